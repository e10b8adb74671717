"""Races of single verbs: caches of a given size are made, and both ways of doing the same are returned."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import trees
from benchmarks.commands import Failed, Used, beside, cachectl, output, peak, spend, variables
from benchmarks.others import Tool
from benchmarks.races import Missing, Race, Side, duel

_ONE_ENTRY = Path(__file__).with_name("one_entry.py")
#: How often one run of ``one_entry.py`` does each.
_TIMES = 300


def program(name: str) -> str:
    """Find a program that is compared with, or raise :class:`Missing`."""
    found = beside(name)
    if found is None:
        raise Missing(f"{name}: not installed")
    return found


def commands(home: Path, *each: Sequence[str], **more: str) -> Side:
    """Run commands one after the other in a home, and add up what they use."""
    environment = variables(home, **more)
    return lambda: sum((spend(command, environment) for command in each), Used())


def _du(*folders: Path) -> list[tuple[str, ...]]:
    return [(program("du"), "-s", str(folder)) for folder in folders]


def _kcache(home: Path) -> Path:
    return home / ".cache" / "pocl" / "kcache"


def start(ours: Sequence[str], peer: Sequence[str], home: Path, _scale: float) -> Race:
    """Start programs in a home with one entry in each cache."""
    trees.expect(home, trees.pocl(home, 1), trees.cuda(home, 1), trees.pyopencl(home, 1), trees.one_dictionary(home, 1))
    return duel(commands(home, ours), commands(home, peer))


def report_programs(home: Path, entries: int) -> Race:
    """Report a cache of PoCL's."""
    trees.expect(home, trees.pocl(home, entries))
    return duel(commands(home, (*cachectl(), "report")), commands(home, *_du(_kcache(home))))


def report_all(home: Path, programs: int, cuda: int, pyopencl: int) -> Race:
    """Report every layer at once, with 30 dictionaries of 1,000 rows."""
    made = (trees.pocl(home, programs), trees.cuda(home, cuda), trees.pyopencl(home, pyopencl))
    trees.expect(home, *made, trees.others(home, 30, 1_000))
    roots = (_kcache(home), home / ".nv" / "ComputeCache", home / ".cache" / "pyopencl", home / ".cache" / "pytools")
    return duel(commands(home, (*cachectl(), "report", "--json")), commands(home, *_du(*roots)))


def report_rows(home: Path, rows: int) -> Race:
    """Report one dictionary."""
    trees.expect(home, trees.one_dictionary(home, rows))
    query = "select count(*), sum(length(key_value)) from dict"
    peer = (program("sqlite3"), str(trees.schedules(home)), query)
    return duel(commands(home, (*cachectl(), "report")), commands(home, peer))


def memory(home: Path, entries: int) -> Race:
    """Report a cache of PoCL's, and look at peak memory."""
    trees.expect(home, trees.pocl(home, entries))
    environment = variables(home)
    (du,) = _du(_kcache(home))
    return duel(lambda: peak((*cachectl(), "report"), environment), lambda: peak(du, environment))


def list_programs(home: Path, entries: int) -> Race:
    """List the programs of one kernel."""
    trees.expect(home, trees.pocl(home, entries))
    return duel(commands(home, _listing(home, "pocl")), commands(home, _find(home)))


def list_rows(home: Path, rows: int) -> Race:
    """List the rows of one kernel."""
    trees.expect(home, trees.loopy(home, rows))
    return duel(commands(home, _listing(home, "loopy")), commands(home, _grep(home)))


def list_both(home: Path, programs: int, rows: int) -> Race:
    """List the programs and rows of one kernel."""
    trees.expect(home, trees.pocl(home, programs), trees.loopy(home, rows))
    return duel(commands(home, _listing(home, "pocl", "loopy")), commands(home, _find(home), _grep(home)))


def _listing(home: Path, *layers: str) -> tuple[str, ...]:
    command = (*cachectl(), "ls", "--kernel", trees.SOUGHT, "--json")
    found = json.loads(output(command, variables(home)))["entries"]
    if {entry["layer"] for entry in found} != set(layers):
        raise Failed(f"ls --kernel is to find entries of {' and '.join(layers)}, and finds {found}")
    return command


def _find(home: Path) -> tuple[str, ...]:
    return (program("find"), str(_kcache(home)), "-name", trees.SOUGHT)


def _grep(home: Path) -> tuple[str, ...]:
    files = sorted(str(file) for file in (home / ".cache" / "pytools").iterdir())
    return (program("grep"), "-c", trees.SOUGHT, *files)


# ---------------------------------------------------------------------- removing


def _anew(home: Path, original: Path, command: Sequence[str], left: Callable[[], bool]) -> Side:
    """Copy a home before each run, file by file, and see to it that what was to go has gone."""
    side = commands(home, command)

    def once() -> Used:
        shutil.rmtree(home, ignore_errors=True)
        # No links and no shared blocks: what is removed is to be as dear as the original.
        spend((program("cp"), "-a", "--reflink=never", str(original), str(home)), os.environ)
        used = side()
        if left():
            raise Failed(f"{' '.join(command)[:200]} left entries: is a program that uses them running beside?")
        return used

    return once


def purge_programs(folder: Path, entries: int) -> Race:
    """Purge a cache of PoCL's."""
    original, home = folder / "original", folder / "home"
    trees.expect(original, trees.pocl(original, entries))
    root = _kcache(home)

    def left() -> bool:
        return root.exists() and any(root.rglob("program.bc"))

    ours, peer = (*cachectl(), "purge", "--all"), (program("rm"), "-rf", str(root))
    return duel(_anew(home, original, ours, left), _anew(home, original, peer, left))


def purge_rows(folder: Path, rows: int) -> Race:
    """Purge one dictionary."""
    original, home = folder / "original", folder / "home"
    trees.expect(original, trees.one_dictionary(original, rows))
    path = trees.schedules(home)

    def left() -> bool:
        # An empty dictionary is three pages.
        return path.stat().st_size > 1 << 16

    ours = (*cachectl(), "purge", "loopy")
    peer = (program("sqlite3"), str(path), "delete from dict; vacuum;")
    return duel(_anew(home, original, ours, left), _anew(home, original, peer, left))


# ---------------------------------------------------------------------- one entry, and other tools


def one_entry(way: str, folder: Path, entries: int) -> Race:
    """Get or put single entries in one process, or enter and leave ``disabled()``."""
    original, home = folder / "original", folder / "home"
    trees.expect(original, trees.pocl(original, entries), trees.one_dictionary(original, entries))
    command = (sys.executable, str(_ONE_ENTRY), way, str(_TIMES))

    def race() -> tuple[Used, Used | None]:
        # What is put in one run would be there in the next.
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(original, home)
        medians = json.loads(output(command, variables(home)))
        return Used(medians["ours"]), None if way == "disabled" else Used(medians["by_hand"])

    return race


def other_tool(tool: Tool, folder: Path, files: int) -> Race:
    """Report a cache of PoCL's, and have another tool look at as many files of its own."""
    command = (program(tool.command[0]), *tool.command[1:])
    home, cache = folder / "home", folder / "cache"
    trees.expect(home, trees.pocl(home, -(-files // 3)))
    tool.fill(cache, files)
    more = {name: value.format(cache) for name, value in tool.variables}
    return duel(commands(home, (*cachectl(), "report")), commands(home, command, **more))
