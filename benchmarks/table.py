"""The lines of the table: what is measured, against what, and what is to hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import verbs
from benchmarks.commands import cachectl
from benchmarks.others import TOOLS
from benchmarks.races import CPU, MEMORY, MICROSECONDS, MILLISECONDS, WALL, Figure, Line, Race

#: Bytes in memory and inodes of a program of PoCL's: three files of which one is empty, three folders and a bit.
POCL_ROOM = 15_000.0
POCL_INODES = 6.3
#: Bytes of a row, with the pages that sqlite spends on it: of the dictionary of schedules, and of all five on average.
SCHEDULE = 5_000.0
ROW = 7_300.0
#: How often a program that only starts is started.
_STARTS = 15
_POCL = "PoCL, 100,000 entries"


def sized(race: Callable[..., Race], *counts: int) -> Callable[[Path, float], Race]:
    """Let a race start with a part of its counts, and never with nothing."""
    return lambda folder, scale: race(folder, *(max(10, round(count * scale)) for count in counts))


def _starting() -> list[Line]:
    passing, pip = (sys.executable, "-c", "pass"), (sys.executable, "-m", "pip", "cache", "info")
    report = (*cachectl(), "report")
    what = "report, near-empty home"
    lines = (
        ("version", "cachectl --version", "python -c pass", 4, (*cachectl(), "--version"), passing),
        ("help", "cachectl --help", "python -c pass", 4, (*cachectl(), "--help"), passing),
        ("near-empty", what, "python -c pass", 7, report, passing),
        ("near-empty-pip", what, "pip cache info", 0.3, report, pip),
        ("import", "import cachectl", "python -c pass", 1.3, (sys.executable, "-c", "import cachectl"), passing),
    )
    return [
        Line(name, what, against, CPU, Figure.RATIO, limit, partial(verbs.start, ours, peer), repeat=_STARTS)
        for name, what, against, limit, ours, peer in lines
    ]


def _looking() -> list[Line]:
    line = partial(Line, unit=WALL, figure=Figure.RATIO)
    room, inodes = 1e5 * POCL_ROOM, 1e5 * POCL_INODES
    return [
        line(
            "report",
            f"report, {_POCL}",
            "du -s",
            limit=1,
            start=sized(verbs.report_programs, 100_000),
            room=room,
            inodes=inodes,
        ),
        line(
            "report-all",
            "report --json, PoCL 100,000, CUDA 20,000, PyOpenCL 20,000, 30 pdicts",
            "du -s of each root",
            limit=1,
            start=sized(verbs.report_all, 100_000, 20_000, 20_000),
            room=room + 1e9,
            inodes=inodes + 2e5,
        ),
        line(
            "report-rows",
            "report, pdict of 1,000,000 rows",
            "sqlite3: count, sum of lengths",
            limit=1.1,
            start=sized(verbs.report_rows, 1_000_000),
            room=1e6 * SCHEDULE,
        ),
        line(
            "memory",
            "peak memory of report, PoCL, 1,000,000 files",
            "du -s",
            unit=MEMORY,
            figure=Figure.OVER,
            limit=float(60 << 20),
            start=sized(verbs.memory, 333_333),
            repeat=3,
            room=3.4e5 * POCL_ROOM,
            inodes=3.4e5 * POCL_INODES,
        ),
        line(
            "ls",
            f"ls --kernel, {_POCL}, and 100,000 rows",
            "find -name, grep -c",
            limit=1.5,
            start=sized(verbs.list_both, 100_000, 100_000),
            room=room + 1e5 * ROW,
            inodes=inodes,
        ),
    ]


def _removing() -> list[Line]:
    line = partial(Line, unit=WALL, figure=Figure.RATIO)
    return [
        line(
            "purge",
            f"purge --all, {_POCL}, in memory",
            "rm -rf",
            limit=1.2,
            start=sized(verbs.purge_programs, 100_000),
            room=2e5 * POCL_ROOM,
            inodes=2e5 * POCL_INODES,
            in_memory=True,
        ),
        line(
            "purge-rows",
            "purge loopy, 1,000,000 rows",
            "sqlite3: delete, vacuum",
            limit=1.1,
            start=sized(verbs.purge_rows, 1_000_000),
            repeat=3,
            # The original, a copy, and the journal of what is deleted.
            room=3e6 * SCHEDULE,
        ),
    ]


def _entries() -> list[Line]:
    line = partial(Line, unit=MICROSECONDS, figure=Figure.OVER, limit=50e-6)
    ways = {
        "get_row": ("get of a row", "sqlite: open, select, close"),
        "put_row": ("put of a row", "sqlite: open, insert, close"),
        "get_folder": ("get of a program of 3 files", "3 files read"),
        "put_folder": ("put of a program of 3 files", "3 files written"),
    }
    lines = [
        line(way.replace("_", "-"), what, against, start=sized(partial(verbs.one_entry, way), 1_000))
        for way, (what, against) in ways.items()
    ]
    what, start = "cachectl.disabled(), entry and exit", sized(partial(verbs.one_entry, "disabled"), 10)
    return [*lines, Line("disabled", what, "-", MILLISECONDS, Figure.ALONE, 1e-3, start)]


def _recorded() -> list[Line]:
    line = partial(Line, unit=WALL, figure=Figure.RATIO, limit=None, room=1e9, inodes=3e5)
    return [
        line(
            tool.name,
            "report, PoCL, 50,000 files",
            f"{' '.join(tool.command)}, 50,000 files",
            start=sized(partial(verbs.other_tool, tool), 50_000),
        )
        for tool in TOOLS
    ]


def lines() -> list[Line]:
    """Return every line of the table."""
    return [*_starting(), *_looking(), *_removing(), *_entries(), *_recorded()]
