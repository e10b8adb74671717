"""What a removal would do, and what one has done."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from cachectl.layers.base.text import short_repr
from cachectl.layers.core.entry import Entry, Note
from cachectl.layers.core.json_form import as_json

_Sum = TypeVar("_Sum", "Plan", "Outcome")


class Clearable(Protocol):
    """What a plan needs of its layer."""

    @property
    def name(self) -> str:
        """Return the name of the layer."""

    @property
    def clearing_needs_room(self) -> bool:
        """Return whether removing entries needs free disk space."""

    def clear(self, plan: Plan) -> Outcome:
        """Remove the entries of a plan. Entries that have changed since are skipped."""


@as_json(
    hidden=("layer",), also=("name", "removed", "bytes_freed", "orphans_removed", "roots"), names={"name": "layer"}
)
class Plan(NamedTuple):
    """The exact entries that a removal from one layer would remove, and what it would leave.

    The stamp of each entry is compared again before it is removed. ``failed`` are places that could not be read or
    must not be changed. The numbers are those of an :class:`Outcome` in which everything goes.
    """

    layer: Clearable
    entries: tuple[Entry, ...] = ()
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()

    def __repr__(self) -> str:
        return short_repr(self, "entries")

    @property
    def name(self) -> str:
        """Return the name of the layer."""
        return self.layer.name

    @property
    def removed(self) -> int:
        """Return the number of entries, without orphans."""
        return len(self.entries) - self.orphans_removed

    @property
    def bytes_freed(self) -> int:
        """Return the sum of the bytes of entries and orphans."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def orphans_removed(self) -> int:
        """Return the number of orphans."""
        return sum(entry.is_orphan for entry in self.entries)

    @property
    def roots(self) -> tuple[Path, ...]:
        """Return the places of the entries."""
        return tuple(dict.fromkeys(entry.root for entry in self.entries))

    def plus(self, other: Plan) -> Plan:
        """Return the sum of both."""
        return _plus(self, other)

    def apply(self) -> Outcome:
        """Remove the entries, as :meth:`Layer.clear` does."""
        return self.layer.clear(self)


class Outcome(NamedTuple):
    """The result of a removal from the layer of a name.

    ``removed`` counts entries, ``orphans_removed`` orphans; ``roots`` are the places of both.
    """

    layer: str
    removed: int = 0
    bytes_freed: int = 0
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    orphans_removed: int = 0
    roots: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the layer, as of a plan."""
        return self.layer

    def plus(self, other: Outcome) -> Outcome:
        """Return the sum of both."""
        return _plus(self, other)


def _plus(left: _Sum, right: _Sum) -> _Sum:
    """Return the sum of two facts about one layer, field by field."""
    pairs: Iterable[tuple[Any, Any]] = zip(left[1:], right[1:], strict=True)
    return type(left)(left.layer, *(before + more for before, more in pairs))
