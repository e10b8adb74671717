"""Purges beside programs that are compiling: they lose a recompile at most, where ``rm -rf`` makes them fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from homes import Home
from tiers import thorough

from benchmarks.beside_live_jobs import beside

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("program", "layer", "kernels", "way"),
    [
        ("pyopencl", "pyopencl", 12, "cachectl purge --all"),
        *thorough(
            ("loopy", "loopy", 8, "cachectl purge --all"),
            ("loopy", "loopy", 12, "cachectl purge --all"),
            ("loopy", "loopy", 12, "two at once"),
            ("pyopencl", "pyopencl", 12, "two at once"),
        ),
    ],
)
def test_programs_beside_purges_end_well(program: str, layer: str, kernels: int, way: str) -> None:
    result = beside(program, way, jobs=2, kernels=kernels, pause=0.1)
    assert result.failed == 0, result.first_error
    # A program may hold its lock longer than a purge waits, on a slow disk.
    assert [because for because in result.refused if "locked by another process" not in because] == []
    assert result.purges >= 3
    assert result.removed.get(layer, 0) > 0


@pytest.mark.parametrize("program", thorough("loopy", "pyopencl"))
def test_programs_beside_rm_fail(program: str) -> None:
    """The advice people follow today breaks programs that are running: this is why the tool exists."""
    result = beside(program, "rm -rf", jobs=2, kernels=60, pause=0.3, until_failure=True)
    assert result.failed > 0


BUILDS = """
import sys
import pyopencl as cl
pocl = next(p for p in cl.get_platforms() if p.name == "Portable Computing Language")
context = cl.Context(pocl.get_devices())
for number, line in enumerate(sys.stdin):
    try:
        source = "__kernel void k%d(__global int *a) { a[0] = %d; }" % (number, number)
        cl.Program(context, source).build(cache_dir=False)
        print("built", flush=True)
    except cl.RuntimeError:
        print("failed", flush=True)
"""


@contextmanager
def building(home: Home) -> Iterator[Callable[[], str]]:
    """Run a program that builds one OpenCL program each time the function is called, and says how that went."""
    program = subprocess.Popen(
        [sys.executable, "-c", BUILDS],
        env=dict(home.variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def build() -> str:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("go\n")
        program.stdin.flush()
        return next(line.strip() for line in program.stdout if line.strip() in ("built", "failed"))

    try:
        yield build
    finally:
        program.communicate()
    assert program.returncode == 0


@pytest.mark.parametrize("verb", [("purge", "pocl"), *thorough((("prune", "--stale", "pocl"),))])
@pytest.mark.thorough
def test_empty_folders_of_programs_go_once_pocl_is_not_in_use(home: Home, verb: tuple[str, ...]) -> None:
    """The running program may be about to build in one; nobody is after it has ended."""
    cache = home.path / ".cache" / "pocl" / "kcache"
    with building(home) as build:
        assert [build() for _ in range(3)] == ["built"] * 3
        for path in cache.rglob("*"):
            os.utime(path, (1, 1))
        home.run(sys.executable, "-m", "cachectl", "purge", "pocl")
        empty = sorted(cache.iterdir())
        assert len(empty) == len(list(cache.rglob("*"))) > 0
        again = home.run(sys.executable, "-m", "cachectl", *verb)
        assert "which may be about to build in it" in again.stderr
        assert sorted(cache.iterdir()) == empty
        assert build() == "built"
    home.wait_to_be_alone()
    home.run(sys.executable, "-m", "cachectl", *verb)
    assert [path for path in cache.iterdir() if path.is_dir() and not any(path.iterdir())] == []


def test_nothing_is_made_where_no_program_lacks_it(home: Home) -> None:
    """An empty home stays empty, even while PoCL runs for programs with other homes."""
    home.run(sys.executable, "-m", "cachectl", "purge", "--all")
    assert list(home.path.iterdir()) == []
