"""Export and import of a warm cache by kind of layer, against ``tar --zstd`` of the same folders.

``python -m benchmarks.bundles [KIND…] [--entries N] [--rounds R] [--folder DIR]`` makes a cache of each kind, and goes
each way by turns. A row of its table has the lowest and the median ratio of wall seconds, then those of CPU seconds.
The trees lie where ``--folder`` says, on the disk that is to be measured. tar waits for no disk: ``with sync`` does, as
an import has to.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import trees
from benchmarks.commands import Used, cachectl, spend, variables

_TESTS: Final = Path(__file__).parent.parent / "tests"
_PROGRAM: Final = _TESTS / "programs" / "kernels.py"
_NEO: Final = _TESTS / "data" / "neo-ocloc-22.43.tar.gz"
_LETTERS: Final = "ABCDEFGHIJKLMNOP"
#: How many different programs are compiled; the others are copies of these under other keys.
_KERNELS: Final = 20


class Kind(NamedTuple):
    """What fills a home with a number of entries of some layers, and the variables under which they are used."""

    layers: tuple[str, ...]
    fill: Callable[[Path, int], object]
    variables: tuple[tuple[str, str], ...] = ()


def _pocl(home: Path, entries: int) -> None:
    """Compile programs of loopy on PoCL, and copy the folder of each under random keys."""
    home.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, str(_PROGRAM), str(_KERNELS)], env=variables(home), check=True, stdout=subprocess.DEVNULL
    )
    shutil.rmtree(home / ".cache" / "pytools")
    chance = random.Random(0)  # noqa: S311 - names, no secrets
    kcache = home / ".cache" / "pocl" / "kcache"
    programs = [path.parent for path in kcache.glob("*/*/program.bc")]
    for number in range(entries - len(programs)):
        letters = "".join(chance.choices(_LETTERS, k=39))
        shutil.copytree(programs[number % len(programs)], kcache / letters[:2] / letters[2:])


def _neo(home: Path, entries: int) -> None:
    """Copy a program that ``ocloc`` stored under other keys."""
    folder = home / ".cache" / "neo_compiler_cache"
    folder.mkdir(parents=True)
    with tarfile.open(_NEO) as tar:
        stored = tar.extractfile(next(member for member in tar if member.name.endswith("90acc8ebe339bbdf.ocloc_cache")))
        data = b"" if stored is None else stored.read()
    for number in range(entries):
        (folder / f"{_name(number)[:16]}.cl_cache").write_bytes(data)
    (folder / "config.file").write_bytes(struct.pack("=Q", entries * len(data)))


def _mesa(home: Path, entries: int) -> None:
    """Make Rusticl's entries, each a file."""
    # What the tests use, which are no package.
    sys.path.insert(0, str(_TESTS))
    from support import mesa

    root = home / ".cache" / "mesa_shader_cache"
    names = map(_name, range(entries))
    mesa.fill_tree(root, {f"{name[:2]}/{name[2:]}": mesa.entry(mesa.kernel(f"k{name}") * 8) for name in names})


def _name(number: int) -> str:
    return hashlib.blake2b(b"%d" % number, digest_size=20).hexdigest()


_KINDS: Final = {
    "pocl": Kind(("pocl",), _pocl),
    "pyopencl": Kind(("pyopencl",), trees.pyopencl),
    "cuda": Kind(("cuda",), trees.cuda),
    "neo": Kind(("neo",), _neo),
    "mesa": Kind(("mesa",), _mesa, (("MESA_DISK_CACHE_MULTI_FILE", "true"),)),
    "rows": Kind(("loopy",), trees.loopy),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"which of {', '.join(_KINDS)} (default: all)")
    parser.add_argument("--entries", type=int, default=2_000, help="how many entries to make of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is gone")
    parser.add_argument("--folder", help="where to make the trees (default: the temporary folder)")
    options = parser.parse_args(arguments)
    sys.stdout.write("| Entries | | tar | wall | CPU |\n|---|---|---|---|---|\n")
    for name in options.kinds or _KINDS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            root = Path(folder)
            _KINDS[name].fill(root / "home", options.entries)
            files = [path.stat().st_size for path in (root / "home").rglob("*") if path.is_file()]
            what = f"{options.entries:,} of {name}: {len(files):,} files, {sum(files) / 1e6:.1f} MB"
            _export(what, _KINDS[name], root, options.rounds)
            _import(what, _KINDS[name], root, options.rounds)
    return 0


def _export(what: str, kind: Kind, root: Path, rounds: int) -> None:
    home, folders = root / "home", [path.name for path in (root / "home").iterdir()]
    environment = variables(home, **dict(kind.variables))
    ours = (*cachectl(), "export", "--force", str(root / "bundle.cachectl"), *kind.layers)
    theirs = ("tar", "--zstd", "-cf", str(root / "tree.tar.zst"), "-C", str(home), *folders)
    taken = _by_turns([lambda: spend(ours, environment), lambda: spend(theirs, environment)], rounds)
    _print_row(what, "export", "created", *taken)


def _import(what: str, kind: Kind, root: Path, rounds: int) -> None:
    fresh = root / "fresh"
    environment = variables(fresh, **dict(kind.variables))
    unpacking = ("tar", "--zstd", "-xf", str(root / "tree.tar.zst"), "-C", str(fresh))

    def empty() -> None:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        os.sync()

    def unpack() -> Used:
        return spend(unpacking, environment)

    def unpack_and_sync() -> Used:
        return unpack() + spend(("sync", "-f", str(fresh)), environment)

    ours = (*cachectl(), "import", str(root / "bundle.cachectl"), "--trust")
    taken = _by_turns([lambda: spend(ours, environment), unpack, unpack_and_sync], rounds, empty)
    _print_row(what, "import", "extracted", taken[0], taken[1])
    _print_row(what, "import", "extracted, sync", taken[0], taken[2])


def _print_row(what: str, verb: str, against: str, ours: Sequence[Used], theirs: Sequence[Used]) -> None:
    cells = (
        _compared([used.wall for used in ours], [used.wall for used in theirs]),
        _compared([used.cpu for used in ours], [used.cpu for used in theirs]),
    )
    sys.stdout.write(f"| {what} | {verb} | {against} | {' | '.join(cells)} |\n")
    sys.stdout.flush()


def _compared(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the lowest of each in seconds with their ratio, and the ratio of the medians."""
    lowest, other = min(ours), min(theirs)
    return f"{lowest:.2f} / {other:.2f} s = {lowest / other:.1f}, medians {_median(ours) / _median(theirs):.1f}"


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)


def _by_turns(
    ways: Sequence[Callable[[], Used]], rounds: int, before: Callable[[], None] = lambda: None
) -> list[list[Used]]:
    """Go each way by turns, for machines change their pace; once unmeasured first."""
    taken: list[list[Used]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for way, runs in zip(ways, taken, strict=True):
            before()
            used = way()
            if number:
                runs.append(used)
    return taken


if __name__ == "__main__":
    sys.exit(main())
