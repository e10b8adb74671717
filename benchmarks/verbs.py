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
from benchmarks.races import Missing, Race, Side, duel

PASS = (sys.executable, "-c", "pass")
_ONE_ENTRY = Path(__file__).with_name("one_entry.py")
_WALK = Path(__file__).with_name("walk.py")
#: How often one run of ``one_entry.py`` does each.
_TIMES = 300


def program(name: str) -> str:
    """Find a program that is compared with, or raise :class:`Missing`."""
    found = beside(name)
    if found is None:
        raise Missing(f"{name}: not installed")
    return found


def commands(home: Path, *each: Sequence[str], statuses: tuple[int, ...] = (0,)) -> Side:
    """Run commands one after the other in a home, and add up what they use."""
    environment = variables(home)
    return lambda: sum((spend(command, environment, statuses) for command in each), Used())


def scaled(*sides: tuple[float, Side], plus: float = 0.0) -> Side:
    """Add up what others use, each so many times, and some seconds."""

    def once() -> Used:
        used = [(factor, side()) for factor, side in sides]
        wall, cpu = (sum(factor * getattr(each, what) for factor, each in used) for what in ("wall", "cpu"))
        return Used(wall + plus, cpu + plus)

    return once


def _du(*folders: Path) -> list[tuple[str, ...]]:
    return [(program("du"), "-s", str(folder)) for folder in folders]


def _kcache(home: Path) -> Path:
    return home / ".cache" / "pocl" / "kcache"


def start(ours: Sequence[str], home: Path, _scale: float) -> Race:
    """Start a program in an empty home."""
    return duel(commands(home, ours), commands(home, PASS))


def one(verb: str, home: Path, _scale: float) -> Race:
    """Get or put one program of PoCL's, as a command."""
    trees.expect(home, trees.programs(home, 1))
    key, file = trees.pocl_key(0), home / "entry.tar"
    get = (*cachectl(), "get", "pocl", key, "-o", str(file))
    output(get, variables(home))
    return duel(
        commands(home, get if verb == "get" else (*cachectl(), "put", "pocl", key, str(file))), commands(home, PASS)
    )


def report_programs(home: Path, entries: int) -> Race:
    """Report a cache of PoCL's; against a report of nothing, and 1.3 plain walks without their starts."""
    trees.expect(home, trees.pocl(home, entries))
    report, walk = (*cachectl(), "report"), (sys.executable, str(_WALK), str(_kcache(home)))
    empty = home / "empty"
    empty.mkdir()
    peer = scaled((1.0, commands(empty, report)), (1.3, commands(home, walk)), (-1.3, commands(home, PASS)))
    return duel(commands(home, report), peer)


def report_page(home: Path, entries: int) -> Race:
    """Report every entry as a page, half of them rows; against four reports and 30 µs an entry."""
    trees.expect(home, trees.loopy(home, entries // 2), trees.pocl(home, entries // 2))
    report = (*cachectl(), "report")
    page = (*report, "--html", str(home / "page.html"))
    return duel(commands(home, page), scaled((4.0, commands(home, report)), plus=entries * 30e-6))


def look(home: Path, entries: int) -> Race:
    """Look for what is wrong with a set-up with many entries; against two reports."""
    trees.expect(home, trees.loopy(home, entries // 2), trees.pocl(home, entries // 2))
    report = commands(home, (*cachectl(), "report"))
    return duel(commands(home, (*cachectl(), "doctor"), statuses=(0, 1)), scaled((2.0, report)))


def verify(home: Path, entries: int) -> Race:
    """Check programs that PoCL compiled; against reading and digesting them."""
    trees.expect(home, trees.programs(home, entries))
    files = f"find {_kcache(home)} -type f -print0 | xargs -0 cat | sha256sum"
    ours, peer = (*cachectl(), "verify"), (program("sh"), "-c", files)
    return duel(commands(home, ours), scaled((3.0, commands(home, peer))))


def keys(home: Path, rows: int) -> Race:
    """List the keys of rows; against the sqlite3 shell, which starts in a millisecond."""
    trees.expect(home, trees.loopy(home, rows))
    peer = [(program("sqlite3"), str(path), "select keyhash from dict") for path in _dictionaries(home)]
    return duel(commands(home, (*cachectl(), "ls", "-q")), commands(home, *peer))


def names(home: Path, rows: int) -> Race:
    """List rows with the names of their kernels, or complete such a name: absolute figures."""
    trees.expect(home, trees.loopy(home, rows))
    side = commands(home, (*cachectl(), "ls"))
    return lambda: (side(), None)


def complete(home: Path, rows: int) -> Race:
    """Complete the name of a kernel."""
    trees.expect(home, trees.loopy(home, rows))
    side = commands(home, (*cachectl(), "completion", "--words", "kernels"))
    return lambda: (side(), None)


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


def _dictionaries(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "pytools").iterdir())


def _listing(home: Path, *layers: str) -> tuple[str, ...]:
    command = (*cachectl(), "ls", "--kernel", trees.SOUGHT, "--json")
    found = json.loads(output(command, variables(home)))["entries"]
    if {entry["layer"] for entry in found} != set(layers):
        raise Failed(f"ls --kernel is to find entries of {' and '.join(layers)}, and finds {found}")
    return command


def _find(home: Path) -> tuple[str, ...]:
    return (program("find"), str(_kcache(home)), "-name", trees.SOUGHT)


def _grep(home: Path) -> tuple[str, ...]:
    return (program("grep"), "-c", trees.SOUGHT, *map(str, _dictionaries(home)))


# ---------------------------------------------------------------------- planning and removing


def plan_purge(more: Sequence[str], folder: Path, rows: int) -> Race:
    """Plan a purge of rows; against the purge itself."""
    original, home = folder / "original", folder / "home"
    trees.expect(original, trees.loopy(original, rows))
    purge = (*cachectl(), "purge", "--all", *more)
    return duel(_anew(home, original, (*purge, "-n"), bool), _anew(home, original, purge, bool))


def plan_prune(home: Path, rows: int) -> Race:
    """Plan a prune of rows to a size; against two reports."""
    trees.expect(home, trees.loopy(home, rows))
    ours, report = (*cachectl(), "prune", "--max-size", "1M", "-n"), (*cachectl(), "report")
    return duel(commands(home, ours), scaled((2.0, commands(home, report))))


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


def purge_programs(folder: Path, entries: int, make: Callable[[Path, int], trees.Counts] = trees.programs) -> Race:
    """Purge a cache of PoCL's."""
    original, home = folder / "original", folder / "home"
    trees.expect(original, make(original, entries))
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


# ---------------------------------------------------------------------- moving


def push(make: Callable[[Path, int], trees.Counts], folder: Path, entries: int) -> Race:
    """Push everything into a new file; against a push of one entry."""
    return duel(*(_pushing(folder / name, make, count) for name, count in (("all", entries), ("one", 1))))


def _pushing(home: Path, make: Callable[[Path, int], trees.Counts], entries: int) -> Side:
    trees.expect(home, make(home, entries))
    bundle = home / "bundle.zip"
    side = commands(home, (*cachectl(), "push", str(bundle)))

    def once() -> Used:
        bundle.unlink(missing_ok=True)
        return side()

    return once


def pull(make: Callable[[Path, int], trees.Counts], folder: Path, entries: int) -> Race:
    """Pull everything from a file into an empty home; against a pull of one entry."""
    return duel(*(_pulling(folder / name, make, count) for name, count in (("all", entries), ("one", 1))))


def _pulling(folder: Path, make: Callable[[Path, int], trees.Counts], entries: int) -> Side:
    original, home, bundle = folder / "original", folder / "home", folder / "bundle.zip"
    trees.expect(original, made := make(original, entries))
    output((*cachectl(), "push", str(bundle)), variables(original))
    side = commands(home, (*cachectl(), "pull", "--trust", str(bundle)))

    def once() -> Used:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        os.sync()
        used = side()
        trees.expect(home, made)
        return used

    return once


def one_entry(way: str, folder: Path, entries: int) -> Race:
    """Get or put single entries in one process, or enter and leave ``disabled()``."""
    original, home = folder / "original", folder / "home"
    trees.expect(original, trees.programs(original, entries), trees.one_dictionary(original, entries))
    command = (sys.executable, str(_ONE_ENTRY), way, str(_TIMES))

    def race() -> tuple[Used, Used | None]:
        # What is put in one run would be there in the next.
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(original, home)
        medians = json.loads(output(command, variables(home)))
        return Used(medians["ours"]), None if way == "disabled" else Used(medians["by_hand"])

    return race
