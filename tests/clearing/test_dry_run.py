"""Dry runs: the plan, printed. It names every entry, and what stays and why."""

from __future__ import annotations

import re
from typing import Any

import pytest
from homes import Home
from tiers import thorough

from cachectl.layers.base.conformance import snapshot

pytestmark = pytest.mark.real

LAYERS = ("loopy", "pyopencl-invoker", "pyopencl", "pocl")


def numbers(document: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return what a purge says of each layer, but for the bytes of database files, which shrink by pages."""
    return [
        (layer["layer"], layer["removed"], layer["orphans_removed"], layer["skipped"], layer["failed"])
        for layer in document["layers"]
    ]


def keys(document: dict[str, Any]) -> dict[str, set[str]]:
    """Return the keys of entries that a dry run names, layer by layer."""
    return {
        layer["layer"]: {entry["key"] for entry in layer["entries"] if entry["state"] != "orphan"}
        for layer in document["layers"]
    }


def listed(home: Home, *arguments: str) -> dict[str, set[str]]:
    """Return the keys that ``ls`` names, layer by layer."""
    found: dict[str, set[str]] = {}
    for entry in home.json("ls", *arguments)["entries"]:
        found.setdefault(entry["layer"], set()).add(entry["key"])
    return found


@pytest.mark.parametrize(
    "command",
    [("purge", "--all"), *thorough((("purge", "--all", "--kernel", "lk[12]"),)), ("prune", "--max-size", "300KiB")],
)
def test_every_entry_that_goes_is_named(warm: Home, command: tuple[str, ...]) -> None:
    # The first command records which Pythons there are.
    there = listed(warm, *(command[2:] if command[0] == "purge" else ()))
    before = snapshot(warm.path)
    planned = warm.json(*command, "--dry-run")
    assert snapshot(warm.path) == before
    if command[0] == "purge":
        assert {layer: named for layer, named in keys(planned).items() if named} == there
        assert set(there) == set(LAYERS) - ({"pyopencl"} if "--kernel" in command else set())
    assert planned["total"]["removed"] > 0
    assert all(len(keys(planned)[layer["layer"]]) == layer["removed"] for layer in planned["layers"])
    assert all(entry["bytes"] >= 0 for layer in planned["layers"] for entry in layer["entries"])
    done = warm.json(*command)
    assert numbers(planned) == numbers(done)
    assert "entries" not in done["layers"][0]


@pytest.mark.parametrize("command", [("purge", "pocl"), ("prune", "--stale", "pocl")])
def test_orphans_are_listed_and_counted_as_they_are_removed(warm: Home, command: tuple[str, ...]) -> None:
    for number in range(3):
        leaked = warm.path / f".cache/pocl/kcache/tempfile_abcde{number}"
        leaked.touch(mode=0o600)
    said = warm.cachectl(*command, "--dry-run").stdout
    planned, done = warm.json(*command, "--dry-run"), warm.json(*command)
    assert numbers(planned) == numbers(done)
    (layer,) = planned["layers"]
    orphans = [entry for entry in layer["entries"] if entry["state"] == "orphan"]
    assert len(orphans) == layer["orphans_removed"] == done["total"]["orphans_removed"] >= 3
    assert re.search(rf"^total +\d+ +{len(orphans)} ", said, re.MULTILINE)


def test_text_has_sums_and_with_v_the_entries(warm: Home) -> None:
    sums = warm.cachectl("purge --all --dry-run").stdout
    assert sums.split()[:3] == ["layer", "would", "go"]
    entries, summary = warm.cachectl("purge --all --dry-run -v").stdout.split("\n\n")
    assert summary.split()[:3] == ["layer", "would", "go"]
    assert {line.split()[-1] for line in entries.splitlines()[1:]} >= set.union(*listed(warm, *LAYERS).values())


def test_damaged_tuning_is_never_removed(home: Home) -> None:
    file = home.path / ".config/miopen/gfx90a68.HIP.3_3_0_a85ca8a54.ufdb.txt"
    file.parent.mkdir(parents=True)
    file.write_text("no record at all\none=S:1.5,0,A\n")
    before = file.read_bytes()
    (finding,) = home.json("verify miopen-tuning", check=False)["findings"]
    assert "line 1" in finding["message"]
    assert file.name in finding["fix"]
    home.cachectl("purge --damaged miopen-tuning")
    assert file.read_bytes() == before
