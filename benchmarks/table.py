"""The lines of the table: what is measured, against what, and what is to hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import trees, verbs
from benchmarks.commands import cachectl
from benchmarks.races import CPU, MEMORY, MICROSECONDS, MILLISECONDS, WALL, Figure, Line, Need, Race

#: Bytes in memory and inodes of a program of PoCL's: three files of which one is empty, three folders and a bit.
POCL_ROOM = 15_000.0
POCL_INODES = 6.3
#: The same of a program that PoCL compiled.
PROGRAM_ROOM = 70_000.0
PROGRAM_INODES = 12.0
#: Bytes of a row, with the pages that sqlite spends on it: of the dictionary of schedules, and of all five on average.
SCHEDULE = 5_000.0
ROW = 7_300.0
#: How often a program that only starts is started.
_STARTS = 15


def sized(race: Callable[..., Race], *counts: int) -> Callable[[Path, float], Race]:
    """Let a race start with a part of its counts, and never with nothing."""
    return lambda folder, scale: race(folder, *(max(10, round(count * scale)) for count in counts))


def _starting() -> list[Line]:
    line = partial(Line, against="python -c pass", unit=CPU, figure=Figure.RATIO, repeat=_STARTS)
    ours = {
        "version": ("cachectl --version", 2.5, (*cachectl(), "--version")),
        "help": ("cachectl --help", 2.5, (*cachectl(), "--help")),
        "empty": ("report, empty home", 5.0, (*cachectl(), "report")),
        "import": ("import cachectl", 1.3, (sys.executable, "-c", "import cachectl")),
    }
    return [
        *(line(name, what, limit=limit, start=partial(verbs.start, run)) for name, (what, limit, run) in ours.items()),
        line("get", "get of one program", limit=6.0, start=partial(verbs.one, "get")),
        line("put", "put of one program", limit=6.0, start=partial(verbs.one, "put")),
    ]


def _reading() -> list[Line]:
    line = partial(Line, unit=CPU, figure=Figure.RATIO)
    room, inodes = 1e5 * POCL_ROOM, 1e5 * POCL_INODES
    programs = Need(5_000 * PROGRAM_ROOM, 5_000 * PROGRAM_INODES)
    return [
        line(
            "report",
            "report, 100,000 programs",
            "start and 1.3 os.scandir walks",
            limit=1,
            start=sized(verbs.report_programs, 100_000),
            need=Need(room, inodes),
        ),
        line(
            "report-all",
            "report --json, PoCL 100,000, CUDA 20,000, PyOpenCL 20,000, 30 pdicts",
            "du -s of each root",
            unit=WALL,
            limit=1,
            start=sized(verbs.report_all, 100_000, 20_000, 20_000),
            need=Need(room + 1e9, inodes + 2e5),
        ),
        line(
            "report-rows",
            "report, pdict of 1,000,000 rows",
            "sqlite3: count, sum of lengths",
            limit=1.1,
            start=sized(verbs.report_rows, 1_000_000),
            need=Need(1e6 * SCHEDULE),
        ),
        line(
            "memory",
            "peak memory of report, 333,333 programs",
            "du -s",
            unit=MEMORY,
            figure=Figure.OVER,
            limit=float(60 << 20),
            start=sized(verbs.memory, 333_333),
            repeat=3,
            need=Need(3.4e5 * POCL_ROOM, 3.4e5 * POCL_INODES),
        ),
        line(
            "keys", "ls -q, 20,000 rows", "sqlite3", limit=None, start=sized(verbs.keys, 20_000), need=Need(2e4 * ROW)
        ),
        line("ls", "ls, 20,000 rows", "-", figure=Figure.ALONE, limit=2.0, start=sized(verbs.names, 20_000)),
        line(
            "tab",
            "a kernel's name completed, 20,000 rows",
            "-",
            unit=WALL,
            figure=Figure.ALONE,
            limit=0.3,
            start=sized(verbs.complete, 20_000),
        ),
        line(
            "ls-kernel",
            "ls --kernel, 100,000 programs and 100,000 rows",
            "find -name, grep -c",
            unit=WALL,
            limit=1.5,
            start=sized(verbs.list_both, 100_000, 100_000),
            need=Need(room + 1e5 * ROW, inodes),
        ),
        line("doctor", "doctor, 10,000 entries", "2 reports", limit=1, start=sized(verbs.look, 10_000)),
        line("html", "report --html, 10,000", "4 reports, 30 µs each", limit=1, start=sized(verbs.report_page, 10_000)),
        line(
            "verify",
            "verify, 5,000 programs",
            "3 times cat, sha256sum",
            limit=1,
            start=sized(verbs.verify, 5_000),
            need=programs,
        ),
    ]


def _removing() -> list[Line]:
    line = partial(Line, unit=CPU, figure=Figure.RATIO)
    rows, few = Need(4e4 * ROW), Need(4e3 * PROGRAM_ROOM, 4e3 * PROGRAM_INODES)
    many = Need(2e5 * POCL_ROOM, 2e5 * POCL_INODES, in_memory=True)
    small = partial(verbs.purge_programs, make=trees.pocl)
    named = ("--kernel", "kernel_0000*")
    plan = "purge -n, 20,000 rows"
    return [
        line("plan", plan, "the purge", limit=1, start=sized(partial(verbs.plan_purge, ()), 20_000), need=rows),
        line(
            "plan-kernel",
            "purge --kernel -n, 20,000 rows",
            "the purge",
            limit=1,
            start=sized(partial(verbs.plan_purge, named), 20_000),
            need=rows,
        ),
        line("plan-prune", "prune --max-size -n there", "2 reports", limit=1, start=sized(verbs.plan_prune, 20_000)),
        line(
            "purge-wall",
            "purge --all, 100,000 programs",
            "rm -rf",
            unit=WALL,
            limit=1.5,
            start=sized(small, 100_000),
            need=many,
        ),
        line("purge", "purge --all, 100,000 programs", "rm -rf", limit=2, start=sized(small, 100_000), need=many),
        line(
            "purge-few",
            "purge --all, 2,000 real programs",
            "rm -rf",
            limit=2,
            start=sized(verbs.purge_programs, 2_000),
            need=few,
        ),
        line(
            "purge-rows",
            "purge loopy, 1,000,000 rows",
            "sqlite3: delete, vacuum",
            unit=WALL,
            limit=1.1,
            start=sized(verbs.purge_rows, 1_000_000),
            repeat=3,
            # The original, a copy, and the journal of what is deleted.
            need=Need(3e6 * SCHEDULE),
        ),
    ]


def _moving() -> list[Line]:
    line = partial(Line, against="of one entry", unit=CPU, figure=Figure.OVER)
    programs, rows = Need(6e3 * PROGRAM_ROOM, 6e3 * PROGRAM_INODES), Need(6e4 * ROW)
    kinds = {
        "programs": (trees.programs, 2_000, {"push": 0.4e-3, "pull": 0.8e-3}, programs),
        "rows": (trees.loopy, 20_000, {"push": 0.1e-3, "pull": 0.1e-3}, rows),
    }
    return [
        line(
            f"{verb}-{kind}",
            f"{verb}, {count:,} {kind}, a file",
            limit=count * limits[verb],
            start=sized(partial(race, make), count),
            need=need,
        )
        for kind, (make, count, limits, need) in kinds.items()
        for verb, race in (("push", verbs.push), ("pull", verbs.pull))
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


def lines() -> list[Line]:
    """Return every line of the table."""
    return [*_starting(), *_reading(), *_removing(), *_moving(), *_entries()]
