"""The plan of a removal, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.text import short_repr
from cachectl.layers.core.entry import Entry, Note
from cachectl.layers.core.json_form import as_json

#: Bytes of a page of sqlite; what does not fit into a row's page is stored in pages of its own.
_PAGE = 4096


@as_json(hidden=("clear", "needs_room"), also=("removed", "bytes_freed", "orphans_removed", "roots"))
class Plan(NamedTuple):
    """The exact entries that a removal from one layer would remove, and what it would leave.

    Each entry's stamp is compared again before the entry is removed. ``failed`` are places that could not be read or
    must not be changed. The numbers are those of an :class:`Outcome` in which every removal succeeds, the bytes a
    minimum. ``needs_room`` says whether the removal needs free disk space.
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
        """Return the minimum number of bytes freed: a database shrinks by whole pages."""
        return sum(entry.bytes if entry.files else entry.bytes // _PAGE * _PAGE for entry in self.entries)

    @property
    def orphans_removed(self) -> int:
        """Return the number of orphans."""
        return sum(entry.is_orphan for entry in self.entries)

    @property
    def roots(self) -> tuple[Path, ...]:
        """Return the roots of the entries."""
        return tuple(dict.fromkeys(entry.root for entry in self.entries))

    def plus(self, other: Plan) -> Plan:
        """Return the sum of both."""
        entries, skipped = self.entries + other.entries, self.skipped + other.skipped
        return self._replace(entries=entries, skipped=skipped, failed=self.failed + other.failed)

    def apply(self) -> Outcome:
        """Remove the entries. Those that have changed since are skipped."""
        return self.clear(self)


class Outcome(NamedTuple):
    """The result of a removal from one layer; ``removed`` does not count orphans, and ``roots`` are those of both."""

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
