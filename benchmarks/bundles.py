"""Export and import of a warm cache, against ``tar --zstd`` of the same folders.

``python -m benchmarks.bundles [--kernels N] [--copies M] [--rounds R]`` compiles N kernels of loopy on PoCL, multiplies
what that left M times under other keys, and prints medians of seconds. The trees lie where ``--folder`` says, on the
disk that is to be measured. tar waits for no disk: ``with sync`` does, as an import has to.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

_PROGRAM = Path(__file__).parent.parent / "tests" / "programs" / "kernels.py"
_LETTERS = "ABCDEFGHIJKLMNOP"
_LAYERS = ("loopy", "pyopencl-invoker", "pocl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=20, help="how many kernels to compile")
    parser.add_argument("--copies", type=int, default=50, help="how often what they leave is multiplied")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; the median counts")
    parser.add_argument("--folder", help="where to make the trees (default: the temporary folder)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        home = root / "home"
        _fill(home, options.kernels)
        _multiply(home, options.copies)
        files = [path for path in home.rglob("*") if path.is_file()]
        sys.stdout.write(f"{len(files):,} files, {sum(path.stat().st_size for path in files):,} bytes\n")
        _export(root, home, options.rounds)
        _import(root, options.rounds)
    return 0


def _fill(home: Path, kernels: int) -> None:
    home.mkdir()
    subprocess.run([sys.executable, str(_PROGRAM), str(kernels)], env=_of(home), check=True, stdout=subprocess.DEVNULL)


def _multiply(home: Path, copies: int) -> None:
    """Copy every program and every row under random keys."""
    chance = random.Random(0)  # noqa: S311 - names, no secrets
    kcache = home / ".cache" / "pocl" / "kcache"
    for program in [path.parent for path in kcache.glob("*/*/program.bc")]:
        for _ in range(copies - 1):
            letters = "".join(chance.choices(_LETTERS, k=39))
            shutil.copytree(program, kcache / letters[:2] / letters[2:])
    for file in (home / ".cache" / "pytools").glob("*.sqlite"):
        with closing(sqlite3.connect(file)) as connection, connection:
            rows = connection.execute("select key_value from dict").fetchall()
            keys = (f"{chance.getrandbits(64):016x}" for _ in range(len(rows) * (copies - 1)))
            more = zip(keys, (value for (value,) in rows * (copies - 1)), strict=True)
            connection.executemany("insert into dict values (?, ?)", more)


def _export(root: Path, home: Path, rounds: int) -> None:
    bundle, tar = root / "bundle.cachectl", root / "tree.tar.zst"
    packing = ("tar", "--zstd", "-cf", str(tar), "-C", str(home), ".cache")
    ours, theirs = _timed([lambda: _cachectl(home, "export", str(bundle), *_LAYERS), lambda: _run(*packing)], rounds)
    _tell("export", ours, {"tar --zstd": theirs})
    sys.stdout.write(f"bundle {bundle.stat().st_size:,} bytes, tar {tar.stat().st_size:,} bytes\n")


def _import(root: Path, rounds: int) -> None:
    fresh = root / "fresh"

    def empty() -> None:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        os.sync()

    def unpack(*, sync: bool) -> None:
        _run("tar", "--zstd", "-xf", str(root / "tree.tar.zst"), "-C", str(fresh))
        if sync:
            _run("sync", "-f", str(fresh))

    importing = ("import", str(root / "bundle.cachectl"), "--trust")
    ways = [lambda: _cachectl(fresh, *importing), lambda: unpack(sync=False), lambda: unpack(sync=True)]
    ours, plain, synced = _timed(ways, rounds, empty)
    _tell("import", ours, {"tar --zstd": plain, "with sync": synced})


def _tell(name: str, ours: float, theirs: Mapping[str, float]) -> None:
    compared = "".join(f"   {what} {seconds:.2f} s, ratio {ours / seconds:.2f}" for what, seconds in theirs.items())
    sys.stdout.write(f"{name} {ours:.2f} s{compared}\n")


def _timed(
    ways: Sequence[Callable[[], None]], rounds: int, before: Callable[[], None] = lambda: None
) -> tuple[float, ...]:
    """Go each way by turns, for disks change their pace; return the medians."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, seconds in zip(ways, taken, strict=True):
            before()
            started = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - started)
    return tuple(map(statistics.median, taken))


def _cachectl(home: Path, *arguments: str) -> None:
    _run(sys.executable, "-m", "cachectl", *arguments, home=home)


def _run(*command: str, home: Path | None = None) -> None:
    environment = dict(os.environ) if home is None else _of(home)
    subprocess.run(command, env=environment, check=True, capture_output=True)


def _of(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "POCL_CACHE_DIR")}
    return {**kept, "HOME": str(home)}


if __name__ == "__main__":
    sys.exit(main())
