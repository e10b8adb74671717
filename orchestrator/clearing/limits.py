"""What prune removes: limits of all layers together, and of single ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cachectl.layers.base.facts import Entry, Orphan, Removable
from cachectl.layers.base.selection import Selection


@dataclass(frozen=True, slots=True)
class Limits:
    """What to remove: stale entries, entries last used before a moment, then the excess over a size or a count.

    ``before`` is epoch seconds; ``bytes`` and ``files`` bound what the pruned layers hold together. ``own`` are the
    limits of single layers: their ``stale`` and ``before`` replace those of all, their ``bytes`` and ``files`` bound
    what the layer holds by itself.
    """

    stale: bool | None = None
    before: float | None = None
    bytes: int | None = None
    files: int | None = None
    own: Mapping[str, Limits] = field(default_factory=dict)

    @property
    def none(self) -> bool:
        """Return whether nothing is limited."""
        return not self.stale and (self.before, self.bytes, self.files) == (None, None, None) and not self.own

    def of(self, layer: str, *, alone: bool) -> Limits:
        """Return the limits of one layer; those of all layers count too, unless it is ``alone``."""
        own = self.own.get(layer, Limits())
        if alone:
            return own
        stale = self.stale if own.stale is None else own.stale
        return replace(own, stale=stale, before=self.before if own.before is None else own.before)

    def forbids(self, thing: Removable) -> str | None:
        """Return why a thing must be removed regardless of the free space; ``None`` if it need not."""
        if self.stale and isinstance(thing, Orphan):
            return thing.why
        if self.stale and isinstance(thing, Entry) and thing.stale:
            return f"stale: {thing.stale_because}" if thing.stale_because else "stale"
        if self.before is None:
            return None
        old = Selection(before=self.before)
        is_old = old.matches_orphan(thing) if isinstance(thing, Orphan) else old.matches(thing)
        return "unused for too long" if is_old else None
