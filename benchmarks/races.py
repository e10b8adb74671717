"""Two ways of doing the same, run by turns, and what comes out of it."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import Failed, Used

#: One repetition of one way. What it needs is made before its clock starts.
Side = Callable[[], Used]
#: One repetition of both, ours first; ``None`` where there is nothing to compare with.
Race = Callable[[], tuple[Used, Used | None]]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory, used through tempfile
#: How much more room than a line is said to need there must be.
_MARGIN = 1.2


#: From here on a figure has no decimals.
_WHOLE = 100


class Missing(Exception):
    """What a line is compared with, or needs, is not on this machine."""


class Figure(Enum):
    """How a line is judged: ours as a multiple of the other, by how much it is over it, or by itself."""

    RATIO = "ratio"
    OVER = "over"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Unit:
    """What of a run is looked at (``cpu``, ``wall`` or ``memory``), and how it is written."""

    what: str
    name: str
    size: float

    def of(self, used: Used) -> float:
        """Return the figure of a run, in seconds or bytes."""
        return float(getattr(used, self.what))

    def write(self, value: float) -> str:
        """Format a figure that is in seconds or bytes."""
        figure = value / self.size
        return f"{figure:,.0f} {self.name}" if abs(figure) >= _WHOLE else f"{figure:.3g} {self.name}"


CPU = Unit("cpu", "s CPU", 1.0)
WALL = Unit("wall", "s", 1.0)
MILLISECONDS = Unit("wall", "ms", 1e-3)
MICROSECONDS = Unit("wall", "µs", 1e-6)
MEMORY = Unit("memory", "MiB", float(1 << 20))


class Need(NamedTuple):
    """What the caches of a line need at full scale: bytes, and files with folders; and whether only memory will do."""

    room: float = 1e6
    inodes: float = 1e3
    in_memory: bool = False


#: What caches of a few entries need.
_LITTLE = Need()


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table.

    ``limit`` is a multiple, or in seconds or bytes as the figure says; ``None`` is for the record. ``start`` makes
    what is needed in an empty folder and returns the race.
    """

    name: str
    what: str
    against: str
    unit: Unit
    figure: Figure
    limit: float | None
    start: Callable[[Path, float], Race]
    repeat: int = 5
    need: Need = _LITTLE

    @property
    def target(self) -> str:
        """Format the target."""
        return "for the record" if self.limit is None else f"≤ {self.write(self.limit)}"

    def write(self, value: float) -> str:
        """Format a value of the figure that decides about the line."""
        if self.figure is Figure.RATIO:
            return f"{value:.2f}x"
        return self.unit.write(value) + (" over it" if self.figure is Figure.OVER else "")

    def value(self, ours: float, peer: float | None) -> float:
        """Return the figure by which the line is judged."""
        if self.figure is Figure.ALONE or peer is None:
            return ours
        return ours / peer if self.figure is Figure.RATIO else ours - peer


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of a line: every run in the order of running, in seconds or bytes; or why nothing was."""

    line: Line
    runs: tuple[tuple[Used, Used | None], ...] = ()
    folder: str = ""
    missing: str | None = None

    @property
    def ours(self) -> tuple[float, ...]:
        """Return our own figure of each repetition."""
        return tuple(self.line.unit.of(ours) for ours, _ in self.runs)

    @property
    def peers(self) -> tuple[float, ...]:
        """Return the other's figure of each repetition."""
        return tuple(self.line.unit.of(peer) for _, peer in self.runs if peer is not None)

    @property
    def value(self) -> float:
        """Return the figure of the medians."""
        return self.line.value(statistics.median(self.ours), statistics.median(self.peers) if self.peers else None)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the lowest and the highest figure of any repetition by itself."""
        peers = self.peers or (None,) * len(self.ours)
        paired = [self.line.value(*pair) for pair in zip(self.ours, peers, strict=True)]
        return min(paired), max(paired)

    @property
    def held(self) -> bool | None:
        """Return whether the target is met; ``None`` without a target or a measurement."""
        return None if self.missing or self.line.limit is None else self.value <= self.line.limit


def duel(ours: Side, peer: Side) -> Race:
    """Run ours, then the other."""
    return lambda: (ours(), peer())


def run(line: Line, scratch: Path | None, scale: float, repeat: int | None) -> Result:
    """Make what a line needs, run both ways once unmeasured, then by turns, and tidy up."""
    try:
        with _ground(line, scratch, scale) as folder:
            race = line.start(folder, scale)
            race()
            runs = tuple(race() for _ in range(repeat or line.repeat))
            return Result(line, runs, str(folder.parent))
    except (Missing, Failed) as error:
        return Result(line, missing=str(error))


@contextmanager
def _ground(line: Line, scratch: Path | None, scale: float) -> Iterator[Path]:
    """Yield an empty folder with enough room, and remove whatever was made in it."""
    folder = Path(tempfile.mkdtemp(prefix="cachectl-bench-", dir=_place(line, scratch, scale)))
    try:
        yield folder
    finally:
        # A million files go several times faster so than through Python.
        subprocess.run((shutil.which("rm") or "rm", "-rf", str(folder)), check=False)


def _place(line: Line, scratch: Path | None, scale: float) -> Path:
    room, inodes = line.need.room * scale * _MARGIN, line.need.inodes * scale * _MARGIN
    if line.need.in_memory:
        candidates = [_SHARED_MEMORY]
    else:
        candidates = [_SHARED_MEMORY, Path(tempfile.gettempdir())] if scratch is None else [scratch]
    for candidate in candidates:
        if candidate.is_dir() and _has_room(candidate, room, inodes):
            return candidate
    raise Missing(
        f"needs {room / 1e9:.1f} GB and {inodes:,.0f} files free in {' or '.join(str(place) for place in candidates)}"
    )


def _has_room(place: Path, room: float, inodes: float) -> bool:
    free = shutil.disk_usage(place).free
    return free >= room and _free_inodes(place) >= inodes


def _free_inodes(place: Path) -> float:
    status = os.statvfs(place)
    # Some file systems do not count them.
    return status.f_favail if status.f_files else float("inf")
