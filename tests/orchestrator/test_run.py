"""``cachectl run``: the child's caches off or elsewhere, its status and its surroundings its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from cachectl.layers.conformance import snapshot

if TYPE_CHECKING:
    from conftest import Home


def kernels(count: int = 2) -> list[str]:
    """Spell the command of the loopy program."""
    from pathlib import Path

    return [sys.executable, str(Path(__file__).parents[1] / "programs" / "kernels.py"), str(count)]


@pytest.mark.real
def test_no_cache_neither_reads_nor_writes(warm: Home) -> None:
    before = snapshot(warm.path, times=True)
    done = warm.cachectl("run", "--no-cache", "--", *kernels(), POCL_DEBUG="general,llvm")
    assert done.stderr.count("Writing program.bc") == 2
    assert "Using a cached" not in done.stderr
    assert snapshot(warm.path, times=True) == before


@pytest.mark.real
def test_no_cache_of_one_layer_leaves_the_others_on(warm: Home) -> None:
    done = warm.cachectl("run", "--no-cache", "--layer", "pocl", "--", *kernels(), POCL_DEBUG="general,llvm")
    assert done.stderr.count("Writing program.bc") == 2
    assert "code generation cache hit" in done.stdout
    done = warm.cachectl("run", "--no-cache", "--layer", "loopy", "--", *kernels(), POCL_DEBUG="general,llvm")
    assert "Writing program.bc" not in done.stderr
    assert "code generation cache hit" not in done.stdout


@pytest.mark.real
def test_isolated_is_cold_every_time_and_leaves_nothing(warm: Home) -> None:
    before = snapshot(warm.path, times=True)
    for _ in range(2):
        done = warm.cachectl("run", "--isolated", "--", *kernels(), POCL_DEBUG="general,llvm")
        assert done.stderr.count("Writing program.bc") == 2
    assert snapshot(warm.path, times=True) == before


@pytest.mark.real
def test_isolated_in_a_named_folder_is_kept_and_warm(home: Home) -> None:
    cold = home.cachectl("run", "--isolated=kept", "--", *kernels(), POCL_DEBUG="general,llvm")
    warm = home.cachectl("run", "--isolated=kept", "--", *kernels(), POCL_DEBUG="general,llvm")
    assert cold.stderr.count("Writing program.bc") == 2
    assert warm.stderr.count("Writing program.bc") == 0
    assert (home.path / "kept").is_dir()
    assert not (home.path / ".cache").exists()


def test_the_childs_status_is_the_status(home: Home) -> None:
    assert home.cachectl("run", "--no-cache", "--", "sh", "-c", "exit 7", check=False).returncode == 7
    assert home.cachectl("run", "--no-cache", "--", "sh", "-c", "kill -9 $$", check=False).returncode == 137
    assert home.cachectl("run", "--isolated", "--", "sh", "-c", "kill -TERM $$", check=False).returncode == 143


def test_a_command_may_have_a_double_dash_of_its_own(home: Home) -> None:
    done = home.cachectl("run", "--no-cache", "--", "sh", "-c", 'echo "$@"', "sh", "--", "--json")
    assert done.stdout == "-- --json\n"


def test_programs_that_are_no_layer_see_their_own_cache(home: Home) -> None:
    other = home.path / ".cache" / "other"
    other.mkdir(parents=True)
    (other / "file").write_text("mine")
    program = 'cat "${XDG_CACHE_HOME:-$HOME/.cache}/other/file"; ls "${XDG_CACHE_HOME:-$HOME/.cache}"'
    (home.path / ".cache" / "pytools").mkdir()
    done = home.cachectl("run", "--no-cache", "--", "sh", "-c", program)
    assert done.stdout == "mineother\n"
    assert (other / "file").read_text() == "mine"


@pytest.mark.real
def test_a_layer_without_a_switch_is_not_silently_left_on(home: Home) -> None:
    command = [sys.executable, str(home.programs / "dictionary.py"), "3"]
    done = home.cachectl("run", "--no-cache", "--layer", "pytools", "--", *command, check=False)
    assert done.returncode == 1
    assert "pytools: has no switch" in done.stderr
    assert not (home.path / ".cache").exists()
    home.cachectl("run", "--no-cache", "--", *command)
    assert not (home.path / ".cache" / "pytools").exists()


@pytest.mark.real
def test_isolating_one_layer_loses_nothing_of_the_others(home: Home) -> None:
    done = home.cachectl("run", "--isolated", "--layer", "loopy", "--", *kernels())
    assert "pyopencl-invoker keeps its entries in the same folder" in done.stderr
    # PoCL follows XDG_CACHE_HOME too, and had no folder yet: what it made has come home.
    entries = {layer["layer"]: layer["entries"] for layer in home.json("report", "loopy", "pocl")["layers"]}
    assert entries == {"loopy": 0, "pocl": 2}


def test_what_other_programs_newly_cache_comes_home(home: Home) -> None:
    program = 'mkdir -p "$XDG_CACHE_HOME/new" && echo mine > "$XDG_CACHE_HOME/new/file"'
    home.cachectl("run", "--no-cache", "--", "sh", "-c", program)
    assert (home.path / ".cache" / "new" / "file").read_text() == "mine\n"
