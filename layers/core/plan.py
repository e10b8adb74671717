"""What a removal would do, and what one has done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.text import short_repr
from cachectl.layers.core.entry import Entry, Note
from cachectl.layers.core.json_form import as_json

#: Bytes of a page of sqlite: those of a row that do not fit into one fill pages of their own.
_PAGE = 4096


@as_json(hidden=("clear", "needs_room"), also=("removed", "bytes_freed", "orphans_removed", "roots"))
class Plan(NamedTuple):
    """The exact entries that a removal from the layer of a name would remove, and what it would leave.

    The stamp of each entry is compared again before it is removed. ``failed`` are places that could not be read or must
    not be changed. The numbers are those of an :class:`Outcome` in which everything goes, its bytes at least.
    ``needs_room`` says that the removal needs free disk space.
    """

    layer: str
    clear: Callable[[Plan], Outcome]
    entries: tuple[Entry, ...] = ()
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    needs_room: bool = False

    def __repr__(self) -> str:
        return short_repr(self, "entries", "clear")

    @property
    def removed(self) -> int:
        """Return the number of entries, without orphans."""
        return len(self.entries) - self.orphans_removed

    @property
    def bytes_freed(self) -> int:
        """Return the bytes that the file systems get back at least: a file of rows shrinks by whole pages."""
        return sum(entry.bytes if entry.files else entry.bytes // _PAGE * _PAGE for entry in self.entries)

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
        plus = self._replace(entries=self.entries + other.entries, skipped=self.skipped + other.skipped)
        return plus._replace(failed=self.failed + other.failed)

    def apply(self) -> Outcome:
        """Remove the entries. Those that have changed since are skipped."""
        return self.clear(self)


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

    def plus(self, other: Outcome) -> Outcome:
        """Return the sum of both."""
        return Outcome(
            self.layer,
            self.removed + other.removed,
            self.bytes_freed + other.bytes_freed,
            self.skipped + other.skipped,
            self.failed + other.failed,
            self.orphans_removed + other.orphans_removed,
            tuple(dict.fromkeys(self.roots + other.roots)),
        )
