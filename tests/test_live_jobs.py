"""Purges beside programs that are compiling: they lose a recompile at most."""

import sys

import pytest
from homes import Home
from tiers import thorough

from benchmarks.beside_live_jobs import beside

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("program", "layer", "kernels", "way"),
    thorough(
        ("pyopencl", "pyopencl", 8, "cachectl purge --all"),
        ("loopy", "loopy", 12, "cachectl purge --all"),
        ("loopy", "loopy", 12, "two at once"),
        ("pyopencl", "pyopencl", 12, "two at once"),
    ),
)
def test_programs_beside_purges_end_well(program: str, layer: str, kernels: int, way: str) -> None:
    result = beside(program, way, jobs=2, kernels=kernels, pause=0.1)
    assert result.failed == 0, result.first_error
    # A program may hold its lock longer than a purge waits, on a slow disk.
    assert [because for because in result.refused if "locked by " not in because] == []
    assert result.purges >= 3
    assert result.removed.get(layer, 0) > 0


@pytest.mark.parametrize("program", thorough("loopy", "pyopencl"))
def test_programs_beside_rm_fail(program: str) -> None:
    """The advice people follow today breaks programs that are running: this is why the tool exists."""
    result = beside(program, "rm -rf", jobs=2, kernels=60, pause=0.3, until_failure=True)
    assert result.failed > 0


def test_nothing_is_made_where_no_program_lacks_it(home: Home) -> None:
    """An empty home stays empty, even while PoCL runs for programs with other homes."""
    home.run(sys.executable, "-m", "cachectl", "purge", "--all")
    assert list(home.path.iterdir()) == []
