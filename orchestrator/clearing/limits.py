"""What prune removes: limits of all layers together, and of single ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cachectl.layers.base.facts import Orphan, Removable
from cachectl.layers.base.selection import Selection


@dataclass(frozen=True, slots=True)
class Limits:
    """What to remove: stale entries, entries last used before a moment, then the excess over a size.

    ``before`` is epoch seconds; ``bytes`` bounds what the pruned layers hold together. ``own`` are the limits of single
    layers: their ``stale`` and ``before`` replace those of all, their ``bytes`` bounds what the layer holds by itself.
    """

    stale: bool | None = None
    before: float | None = None
    bytes: int | None = None
    own: Mapping[str, Limits] = field(default_factory=dict)

    @property
    def none(self) -> bool:
        """Return whether nothing is limited."""
        return not self.stale and self.before is None and self.bytes is None and not self.own

    def of(self, layer: str, *, alone: bool) -> Limits:
        """Return the limits of one layer; those of all layers count too, unless it is ``alone``."""
        own = self.own.get(layer, Limits())
        if alone:
            return own
        stale = self.stale if own.stale is None else own.stale
        return replace(own, stale=stale, before=self.before if own.before is None else own.before)

    def forbids(self, thing: Removable) -> bool:
        """Return whether a thing must be removed regardless of the free space."""
        if self.stale and (isinstance(thing, Orphan) or thing.stale):
            return True
        return self.before is not None and Selection(before=self.before).selects(thing)
