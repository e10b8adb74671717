"""Shared stores: what another home pulls, what a push adds, and what gc and verify do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.bundles import keys

if TYPE_CHECKING:
    from homes import Home


def programs(home: Home) -> set[Path]:
    return {path.relative_to(home.path) for path in home.path.rglob("program.bc")}


def files(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.real
def test_another_home_compiles_nothing_and_pushes_only_what_is_new(source: Home, home: Home, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = source.json("push", str(store))
    assert done["total"]["pushed"] == len(keys(source))
    assert source.json("push", str(store))["written"] == 0

    pulled = home.json("pull", str(store), "--trust")
    assert pulled["digest"] == done["digest"]
    assert {one["hits"] for layer in pulled["layers"] for one in layer["outlook"]} == {True}
    compiled = programs(home)
    assert keys(home) == keys(source)
    home.python("thirteen.py", "4", "2")
    assert programs(home) == compiled
    assert keys(home) == keys(source)

    before = files(store)
    home.python("thirteen.py", "5", "2")
    again = home.json("push", str(store))
    new = files(store).keys() - before.keys()
    assert again["total"]["pushed"] == len(keys(home)) - len(keys(source))
    # A pack and an index part for each layer that the kernel goes through.
    assert sum(name.startswith("packs/") for name in new) == sum(name.startswith("index/") for name in new) == 3
    assert sum(len(files(store)[name]) for name in new) == again["written"]
    assert {name: data for name, data in files(store).items() if name in before} == before
    assert home.json("store", "verify", str(store))["findings"] == []
