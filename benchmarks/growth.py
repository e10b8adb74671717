"""How the cost of a verb grows with the number of entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import trees, verbs
from benchmarks.races import WALL, Figure, Line, Need, Race
from benchmarks.table import POCL_INODES, POCL_ROOM, ROW, sized

SIZES = (1_000, 10_000, 100_000, 1_000_000)
#: A purge needs the original and a copy; one of rows also room for a journal of what is deleted.
_COPIES = {"purge-programs": 2.0, "purge-rows": 3.0}


@dataclass(frozen=True, slots=True)
class Curve:
    """A verb over one kind of cache, and what it is compared with."""

    verb: str
    cache: str
    against: str
    race: Callable[[Path, int], Race]

    @property
    def name(self) -> str:
        """Name it on a command line."""
        return f"{self.verb}-{self.cache}"

    def at(self, entries: int) -> Line:
        """Return the line of one size."""
        copies = _COPIES.get(self.name, 1.0)
        each, inodes = (ROW, 0.0) if self.cache == "rows" else (POCL_ROOM, POCL_INODES)
        return Line(
            self.name,
            f"{self.verb}, {entries:,} {self.cache}",
            self.against,
            WALL,
            Figure.RATIO,
            None,
            sized(self.race, entries),
            repeat=3,
            need=Need(each * copies * entries, inodes * copies * entries + 1e3),
        )


CURVES = (
    Curve("report", "programs", "start and 1.3 os.scandir walks", verbs.report_programs),
    Curve("report", "rows", "sqlite3: count, sum of lengths", verbs.report_rows),
    Curve("ls", "programs", "find -name", verbs.list_programs),
    Curve("ls", "rows", "grep -c", verbs.list_rows),
    Curve("purge", "programs", "rm -rf", partial(verbs.purge_programs, make=trees.pocl)),
    Curve("purge", "rows", "sqlite3: delete, vacuum", verbs.purge_rows),
)
