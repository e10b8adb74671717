"""Full disks, read-only folders and locks: one line for each cause, and nothing lost."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from homes import Home, run_as
from support.trouble import environment
from tiers import thorough

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.selection import ALL
from cachectl.stack import Stack

#: Layers that the filled home has entries of.
LAYERS = ("loopy", "pyopencl-invoker", "pyopencl", "pocl", "cuda")
CLEARING = [PURGE, PRUNE] = [("purge", "--all"), ("prune", "--max-size", "1B")]


@pytest.fixture
def settle(filled: Home, compute_cache: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a way to give a home what loopy, PyOpenCL, PoCL and CUDA left in others."""

    def fill(home: Path) -> None:
        shutil.copytree(filled.path / ".cache", home / ".cache", symlinks=True)
        compute_cache(home / ".nv/ComputeCache")
        # No program of the tester's can be busy with what is old.
        then = time.time() - 7200
        for path in (*home.rglob("*"), home):
            os.utime(path, (then, then), follow_symlinks=False)

    return fill


def fill_up(disk: Path) -> Path:
    """Leave no room on a disk; return the file that takes it."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def run(home: Path, *arguments: str, by: Sequence[str] = ()) -> tuple[int, Counter[str], str]:
    """Run the command over a home; return its status, how many lines each layer got, and the lines."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    done = run_as(by, arguments, {**kept, "HOME": str(home), "TMPDIR": str(home)})
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("cachectl: ") for line in lines), done.stderr
    return done.returncode, Counter(line.split(": ")[1] for line in lines), done.stderr


def holding(home: Path, aside: Path) -> set[str]:
    stack = Stack(environment(home, aside), plugins=False)
    return {entry.layer for entry in stack.entries(ALL, notice=lambda _: None)}


def assert_no_leftovers(home: Path) -> None:
    names = [path.name for path in home.rglob("*")]
    assert [
        name for name in names if name.startswith(".cachectl-") or name.endswith("-journal") or name == "lock"
    ] == []


@pytest.mark.real
@pytest.mark.parametrize("verb", CLEARING)
def test_a_full_disk_is_cleared(
    disk: Path, settle: Callable[[Path], None], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    settle(disk)
    fill_up(disk)
    assert run(disk, *verb)[:2] == (0, {})
    assert holding(disk, tmp_path / "aside") == set()
    assert_no_leftovers(disk)
    (disk / "new").write_bytes(bytes(1 << 20))


@contextmanager
def locked(file: Path) -> Iterator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("begin immediate")
        yield


@contextmanager
def mode(folder: Path, bits: int) -> Iterator[None]:
    before = folder.stat().st_mode
    folder.chmod(bits)
    try:
        yield
    finally:
        folder.chmod(before)


@pytest.mark.real
@pytest.mark.parametrize("verb", [PURGE, *thorough((PRUNE,))])
@pytest.mark.parametrize(
    ("trouble", "layer", "pattern", "words"),
    [
        ("mount", "pocl", ".cache/pocl", "ead-only"),
        ("mount", "all", "", "ead-only|readonly"),
        ("0", "pocl", ".cache/pocl/kcache/??", "cannot be read: Permission denied"),
        ("500", "pyopencl", ".cache/pyopencl/*", "Permission denied"),
        ("lock", "loopy", ".cache/pytools/pdict-v5-loopy-*", "locked by another process for more than 0.1 s"),
        *thorough(
            ("mount", "cuda", ".nv/ComputeCache", "ead-only"),
            ("mount", "pyopencl", ".cache/pyopencl", "ead-only"),
            ("0", "cuda", ".nv/ComputeCache/?", "cannot be read: Permission denied"),
        ),
    ],
)
def test_a_root_in_trouble_is_one_line_and_stops_no_other_layer(  # noqa: PLR0917 - a table
    mount: Callable[..., Path],
    settle: Callable[[Path], None],
    tmp_path: Path,
    held_to_modes: tuple[str, ...],
    trouble: str,
    layer: str,
    pattern: str,
    words: str,
    verb: tuple[str, ...],
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    settle(home)
    places = sorted(path for path in tmp_path.glob(f"home/{pattern}".rstrip("/")) if path.is_dir() or trouble == "lock")
    layers = set(LAYERS) if layer == "all" else {layer}
    with ExitStack() as stack:
        if trouble == "mount":
            mount("--bind", str(places[0]), on=places[0])
            mount("-o", "remount,ro,bind", on=places[0])
        elif trouble == "lock":
            for place in places:
                stack.enter_context(locked(place))
        else:
            del places[1:]
        before = [place.read_bytes() if place.is_file() else snapshot(place) for place in places]
        if trouble.isdigit():
            stack.enter_context(mode(places[0], int(trouble, 8)))
        status, lines, said = run(home, *verb, "--wait", "0.1", by=held_to_modes if trouble.isdigit() else ())
    assert (status, lines) == (1, dict.fromkeys(layers, 1)), said
    assert all(re.search(words, line) for line in said.splitlines())
    assert [place.read_bytes() if place.is_file() else snapshot(place) for place in places] == before
    assert holding(home, tmp_path / "aside") == layers
    assert_no_leftovers(home)
