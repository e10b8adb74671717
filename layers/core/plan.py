"""What a removal would do, and what one has done."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cachectl.layers.base.text import short_repr
from cachectl.layers.core.entry import Entry, Note
from cachectl.layers.core.json_form import as_json

_Sum = TypeVar("_Sum", "Plan", "Outcome")


class Plan(NamedTuple):
    """The exact entries that a removal from one layer would remove, and what it would leave.

    The stamp of each entry is compared again before it is removed. ``failed`` are places that could not be read or
    must not be changed.
    """

    layer: str
    entries: tuple[Entry, ...] = ()
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()

    def __repr__(self) -> str:
        return short_repr(self, "entries")

    def plus(self, other: Plan) -> Plan:
        """Return the sum of both."""
        return _plus(self, other)

    @property
    def outcome(self) -> Outcome:
        """Return the plan in the form of an outcome that lists its entries; nothing has been removed."""
        orphans = sum(entry.is_orphan for entry in self.entries)
        size = sum(entry.bytes for entry in self.entries)
        removed, roots = len(self.entries) - orphans, tuple(dict.fromkeys(entry.root for entry in self.entries))
        return Outcome(self.layer, removed, size, self.skipped, self.failed, orphans, self.entries, roots)


@as_json(optional=("entries",))
class Outcome(NamedTuple):
    """The result of a removal, or (with ``entries``) its plan.

    ``removed`` counts entries, ``orphans_removed`` orphans; ``roots`` are the places of both.
    """

    layer: str
    removed: int = 0
    bytes_freed: int = 0
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    orphans_removed: int = 0
    entries: tuple[Entry, ...] | None = None
    roots: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        return short_repr(self, "entries")

    def plus(self, other: Outcome) -> Outcome:
        """Return the sum of both."""
        return _plus(self, other)


def _plus(left: _Sum, right: _Sum) -> _Sum:
    """Return the sum of two facts about one layer, field by field; ``None`` counts as nothing."""
    pairs: Iterable[tuple[Any, Any]] = zip(left[1:], right[1:], strict=True)
    sums = (more if before is None else before if more is None else before + more for before, more in pairs)
    return type(left)(left.layer, *sums)
