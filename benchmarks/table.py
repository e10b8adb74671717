"""The lines of the table: what is measured, against what, and what is to hold."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import trees
from benchmarks.commands import Failed, Used, beside, cachectl, output, peak, spend, variables
from benchmarks.others import TOOLS, Tool
from benchmarks.races import CPU, MEMORY, MICROSECONDS, MILLISECONDS, WALL, Figure, Line, Missing, Race, Side, duel

#: Bytes in memory and inodes of an entry of PoCL: three files of which one is empty, three folders.
_POCL_ROOM: Final = 15_000.0
_POCL_INODES: Final = 6.3
_ROW: Final = 6_500.0
_PYTHON: Final = (sys.executable, "-c", "pass")
_ONE_ENTRY: Final = Path(__file__).with_name("one_entry.py")
#: How often one run of ``one_entry.py`` does each.
_TIMES: Final = 300
#: How often a program that only starts is started.
_STARTS: Final = 15


def scaled(count: int, scale: float) -> int:
    """Return a part of a count, and never nothing."""
    return max(10, round(count * scale))


def program(name: str) -> str:
    """Find a program that is compared with, or raise :class:`Missing`."""
    found = beside(name)
    if found is None:
        raise Missing(f"{name}: not installed")
    return found


def _commands(home: Path, *commands: Sequence[str], **more: str) -> Side:
    """Run commands one after the other in a home, and add up what they use."""
    environment = variables(home, **more)
    return lambda: sum((spend(command, environment) for command in commands), Used())


def _du(*folders: Path) -> list[tuple[str, ...]]:
    return [(program("du"), "-s", str(folder)) for folder in folders]


# ---------------------------------------------------------------------- starting


def near_empty(home: Path) -> None:
    """Make a home with one entry in each cache."""
    trees.expect(home, trees.pocl(home, 1), trees.cuda(home, 1), trees.pyopencl(home, 1), trees.one_dictionary(home, 1))


def _start(ours: Sequence[str], peer: Sequence[str], home: Path, _: float) -> Race:
    near_empty(home)
    return duel(_commands(home, ours), _commands(home, peer))


def _starting() -> list[Line]:
    line = partial(Line, unit=CPU, figure=Figure.RATIO, repeat=_STARTS)
    command, pip = cachectl(), (sys.executable, "-m", "pip", "cache", "info")
    imports, report = (sys.executable, "-c", "import cachectl"), (*command, "report")
    return [
        line("version", "cachectl --version", "python -c pass", limit=4, start=_cold(command, "--version")),
        line("help", "cachectl --help", "python -c pass", limit=4, start=_cold(command, "--help")),
        line(
            "near-empty", "report, near-empty home", "python -c pass", limit=7, start=partial(_start, report, _PYTHON)
        ),
        line(
            "near-empty-pip", "report, near-empty home", "pip cache info", limit=0.3, start=partial(_start, report, pip)
        ),
        line("import", "import cachectl", "python -c pass", limit=1.3, start=partial(_start, imports, _PYTHON)),
    ]


def _cold(command: Sequence[str], option: str) -> Callable[[Path, float], Race]:
    return partial(_start, (*command, option), _PYTHON)


# ---------------------------------------------------------------------- looking


def _report_pocl(home: Path, scale: float) -> Race:
    trees.expect(home, trees.pocl(home, scaled(100_000, scale)))
    return duel(_commands(home, (*cachectl(), "report")), _commands(home, *_du(home / ".cache" / "pocl" / "kcache")))


def _report_all(home: Path, scale: float) -> Race:
    trees.expect(
        home,
        trees.pocl(home, scaled(100_000, scale)),
        trees.cuda(home, scaled(20_000, scale)),
        trees.pyopencl(home, scaled(20_000, scale)),
        trees.others(home, 30, 1_000),
    )
    cache = home / ".cache"
    roots = (cache / "pocl" / "kcache", home / ".nv" / "ComputeCache", cache / "pyopencl", cache / "pytools")
    return duel(_commands(home, (*cachectl(), "report", "--json")), _commands(home, *_du(*roots)))


def _report_rows(home: Path, scale: float) -> Race:
    trees.expect(home, trees.one_dictionary(home, scaled(1_000_000, scale)))
    query = "select count(*), sum(length(key_value)) from dict"
    peer = (program("sqlite3"), str(trees.schedules(home)), query)
    return duel(_commands(home, (*cachectl(), "report")), _commands(home, peer))


def _memory(home: Path, scale: float) -> Race:
    trees.expect(home, trees.pocl(home, scaled(333_333, scale)))
    environment = variables(home)
    (du,) = _du(home / ".cache" / "pocl" / "kcache")
    return duel(lambda: peak((*cachectl(), "report"), environment), lambda: peak(du, environment))


def _ls(home: Path, scale: float) -> Race:
    programs, rows = trees.pocl(home, scaled(100_000, scale)), trees.loopy(home, scaled(100_000, scale))
    trees.expect(home, programs, rows)
    ours = (*cachectl(), "ls", "--kernel", trees.SOUGHT, "--json")
    found = json.loads(output(ours, variables(home)))["entries"]
    if {entry["layer"] for entry in found} != {"pocl", "loopy"}:
        raise Failed(f"ls --kernel is to find rows and programs, and finds {found}")
    files = sorted(str(file) for file in (home / ".cache" / "pytools").iterdir())
    find = (program("find"), str(home / ".cache" / "pocl" / "kcache"), "-name", trees.SOUGHT)
    return duel(_commands(home, ours), _commands(home, find, (program("grep"), "-c", trees.SOUGHT, *files)))


def _looking() -> list[Line]:
    line = partial(Line, unit=WALL, figure=Figure.RATIO)
    room, inodes = 1e5 * _POCL_ROOM, 1e5 * _POCL_INODES
    pocl = "PoCL, 100,000 entries"
    every = f"report --json, {pocl}, CUDA 20,000, PyOpenCL 20,000, 30 pdicts"
    counting = "sqlite3: count, sum of lengths"
    return [
        line("report", f"report, {pocl}", "du -s", limit=1, start=_report_pocl, room=room, inodes=inodes),
        line(
            "report-all", every, "du -s of each root", limit=1, start=_report_all, room=room + 1e9, inodes=inodes + 2e5
        ),
        line("report-rows", "report, pdict of 1,000,000 rows", counting, limit=1.1, start=_report_rows, room=5.5e9),
        Line(
            "memory",
            "peak memory of report, 1,000,000 files",
            "du -s",
            MEMORY,
            Figure.OVER,
            float(60 << 20),
            _memory,
            repeat=3,
            room=3.4e5 * _POCL_ROOM,
            inodes=3.4e5 * _POCL_INODES,
        ),
        line(
            "ls",
            f"ls --kernel, {pocl}, and 100,000 rows",
            "find -name, grep -c",
            limit=1.5,
            start=_ls,
            room=room + 1e5 * _ROW,
            inodes=inodes,
        ),
    ]


# ---------------------------------------------------------------------- removing


def anew(home: Path, original: Path, side: Side, *, emptied: Callable[[], None]) -> Side:
    """Copy a home before each run, file by file, and look after it whether what was to go has gone."""

    def once() -> Used:
        shutil.rmtree(home, ignore_errors=True)
        # No links and no shared blocks: what is removed is to be as dear as the original.
        spend((program("cp"), "-a", "--reflink=never", str(original), str(home)), os.environ)
        used = side()
        emptied()
        return used

    return once


def _purge_pocl(folder: Path, scale: float) -> Race:
    original, home = folder / "original", folder / "home"
    trees.expect(original, trees.pocl(original, scaled(100_000, scale)))
    root = home / ".cache" / "pocl" / "kcache"

    def emptied() -> None:
        if root.exists() and any(root.rglob("program.bc")):
            raise Failed("entries were left: is a program with PoCL running beside?")

    ours, peer = (*cachectl(), "purge", "--all"), (program("rm"), "-rf", str(root))
    return duel(
        anew(home, original, _commands(home, ours), emptied=emptied),
        anew(home, original, _commands(home, peer), emptied=emptied),
    )


def _purge_rows(folder: Path, scale: float) -> Race:
    original, home = folder / "original", folder / "home"
    trees.expect(original, trees.one_dictionary(original, scaled(1_000_000, scale)))
    path = trees.schedules(home)

    def emptied() -> None:
        if path.stat().st_size > 1 << 16:
            raise Failed("the dictionary is not empty, or not small")

    ours = (*cachectl(), "purge", "loopy")
    peer = (program("sqlite3"), str(path), "delete from dict; vacuum;")
    return duel(
        anew(home, original, _commands(home, ours), emptied=emptied),
        anew(home, original, _commands(home, peer), emptied=emptied),
    )


def _removing() -> list[Line]:
    line = partial(Line, unit=WALL, figure=Figure.RATIO)
    what, rows = "purge --all, PoCL, 100,000 entries", "purge loopy, 1,000,000 rows"
    room, inodes = 2e5 * _POCL_ROOM, 2e5 * _POCL_INODES
    return [
        line("purge", what, "rm -rf", limit=1.2, start=_purge_pocl, room=room, inodes=inodes, in_memory=True),
        line("purge-rows", rows, "sqlite3: delete, vacuum", limit=1.1, start=_purge_rows, repeat=3, room=16e9),
    ]


# ---------------------------------------------------------------------- one entry


def _one_entry(way: str, folder: Path, scale: float) -> Race:
    original, home = folder / "original", folder / "home"
    count = scaled(1_000, scale)
    trees.expect(original, trees.pocl(original, count), trees.one_dictionary(original, count))
    command = (sys.executable, str(_ONE_ENTRY), way, str(_TIMES))

    def race() -> tuple[Used, Used | None]:
        # What is put in one run would be there in the next.
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(original, home)
        medians = json.loads(output(command, variables(home)))
        return Used(medians["ours"]), None if way == "disabled" else Used(medians["by_hand"])

    return race


def _entries() -> list[Line]:
    what = {
        "get_row": ("get of a row", "sqlite: open, select, close"),
        "put_row": ("put of a row", "sqlite: open, insert, close"),
        "get_folder": ("get of a program of 3 files", "3 files read"),
        "put_folder": ("put of a program of 3 files", "3 files written"),
    }
    lines = [
        Line(way.replace("_", "-"), said, against, MICROSECONDS, Figure.OVER, 50e-6, partial(_one_entry, way))
        for way, (said, against) in what.items()
    ]
    disabled = "cachectl.disabled(), entry and exit"
    start = partial(_one_entry, "disabled")
    return [*lines, Line("disabled", disabled, "-", MILLISECONDS, Figure.ALONE, 1e-3, start)]


# ---------------------------------------------------------------------- other tools


def _tool(tool: Tool, folder: Path, scale: float) -> Race:
    command = (program(tool.command[0]), *tool.command[1:])
    files = scaled(50_000, scale)
    home, cache = folder / "home", folder / "cache"
    home.mkdir()
    trees.expect(home, trees.pocl(home, files // 3))
    cache.mkdir()
    tool.fill(cache, files)
    more = {name: value.format(cache) for name, value in tool.variables}
    return duel(_commands(home, (*cachectl(), "report")), _commands(home, command, **more))


def _recorded() -> list[Line]:
    what = "report, PoCL, 50,000 files"
    return [
        Line(
            tool.name,
            what,
            f"{' '.join(tool.command)}, 50,000 files",
            WALL,
            Figure.RATIO,
            None,
            partial(_tool, tool),
            room=1e9,
            inodes=3e5,
        )
        for tool in TOOLS
    ]


def lines() -> list[Line]:
    """Return every line of the table."""
    return [*_starting(), *_looking(), *_removing(), *_entries(), *_recorded()]
