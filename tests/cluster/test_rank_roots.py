"""The folders that ranks had each for themselves, made one in which all of their programs are warm."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from homes import Home


def entries(home: Home, **changes: str) -> dict[str, int]:
    document = replace(home, variables={**home.variables, **changes}).json("report")
    return {layer["layer"]: layer["entries"] for layer in document["layers"] if layer["entries"]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, new_home: Callable[[Path], Home]) -> Home:
    """Return a home with ``rank0``, kept by run, and ``rank1``, an XDG_CACHE_HOME: other programs in each."""
    home = new_home(tmp_path_factory.mktemp("ranks") / "home")
    program = str(home.programs / "thirteen.py")
    home.cachectl("run", f"--isolated={home.path / 'rank0'}", "--", sys.executable, program, "2", "0")
    home.python("thirteen.py", "1", "1", XDG_CACHE_HOME=str(home.path / "rank1"))
    return home


@pytest.fixture
def mine(ranks: Home, tmp_path: Path) -> Home:
    shutil.copytree(ranks.path, tmp_path / "home", symlinks=True)
    variables = {**ranks.variables, "HOME": str(tmp_path / "home")}
    return replace(ranks, path=tmp_path / "home", variables=variables)


@pytest.mark.real
def test_all_programs_of_all_ranks_are_warm_in_one_folder(mine: Home) -> None:
    document = json.loads(mine.cachectl("merge", "rank0", "rank1", "all", "--json").stdout)
    assert document["schema"] == "cachectl/merge/1"
    layers = {layer["layer"]: layer for layer in document["layers"]}
    # Two loopy kernels in the one; one of them, and a plain program, in the other.
    assert layers["pocl"]["placed"] == 3
    assert layers["pocl"]["there"] + len(layers["pocl"]["kept"]) == 1
    assert document["total"]["failed"] == 0

    program = (sys.executable, str(mine.programs / "thirteen.py"), "2", "1")
    before = sorted((mine.path / "all").rglob("program.bc"))
    assert len(before) == 3
    trace = (sys.executable, "-m", "cachectl", "trace", "--json", "trace.json", "--", *program)
    mine.cachectl("run", f"--isolated={mine.path / 'all'}", "--", *trace)
    traced = {one["layer"]: one for one in json.loads((mine.path / "trace.json").read_text())["layers"]}
    assert {name: traced[name]["misses"] for name in ("loopy", "pocl")} == {"loopy": 0, "pocl": 0}
    assert sorted((mine.path / "all").rglob("program.bc")) == before


@pytest.mark.real
def test_merging_again_changes_nothing_and_the_sources_stay(mine: Home) -> None:
    sources = {path: path.read_bytes() for name in ("rank0", "rank1") for path in (mine.path / name).rglob("*.bc")}
    mine.cachectl("merge", "rank0", "rank1", "all")
    again = json.loads(mine.cachectl("merge", "rank0", "rank1", "all", "--json").stdout)
    assert again["total"]["placed"] == 0
    rank0 = entries(mine, XDG_CACHE_HOME=str(mine.path / "rank0" / "xdg"), POCL_CACHE_DIR=pocl(mine.path / "rank0"))
    rank1 = entries(mine, XDG_CACHE_HOME=str(mine.path / "rank1"))
    assert again["total"]["there"] + again["total"]["kept"] == sum(rank0.values()) + sum(rank1.values())
    assert {path: path.read_bytes() for path in sources} == sources


def pocl(root: Path) -> str:
    """Return the folder that run has given PoCL: that of its entries, two folders above each."""
    return str(next(root.rglob("program.bc")).parents[2])


@pytest.mark.real
def test_the_first_of_two_entries_with_one_key_stays_and_the_other_is_counted(mine: Home) -> None:
    mine.cachectl("merge", "rank0", "all")
    [compiled, *_] = sorted((mine.path / "rank0").rglob("*.so"))
    kept = {path.name: path.read_bytes() for path in (mine.path / "all").rglob("*.so")}
    # What follows an ELF file's own bytes harms nobody.
    compiled.write_bytes(compiled.read_bytes() + bytes(4))
    done = mine.cachectl("merge", "rank0", "all")
    assert "pocl: 1 differ from the one of the same key that was first, which stays" in done.stderr
    assert {path.name: path.read_bytes() for path in (mine.path / "all").rglob("*.so")} == kept


def test_a_folder_that_is_not_a_root_is_refused_before_any_write(home: Home) -> None:
    (home.path / "photographs").mkdir()
    (home.path / "photographs" / "cat.jpg").write_text("cat")
    (home.path / "rank0" / "xdg").mkdir(parents=True)
    done = home.cachectl("merge", "photographs", "all", check=False)
    assert done.returncode == 2
    assert "photographs is not a root" in done.stderr
    assert not (home.path / "all").exists()
    done = home.cachectl("merge", "rank0", "photographs", check=False)
    assert done.returncode == 2
    assert "is not empty and not a root" in done.stderr
