"""Dry runs: the plan, printed. It names every entry, and what stays and why."""

import pytest
from homes import Home
from tiers import thorough

from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.selection import short_key

pytestmark = pytest.mark.real


def keys(home: Home) -> set[tuple[str, str]]:
    return {(entry["layer"], entry["key"]) for entry in home.json("ls")["entries"]}


@pytest.mark.parametrize(
    "line", ["purge --all", *thorough("purge --all --kernel lk[12]"), "prune --max-size 0B", "prune --stale pocl"]
)
def test_plan_apply_and_what_vanished_agree(warm: Home, line: str) -> None:
    for number in range(3):
        (warm.path / f".cache/pocl/kcache/tempfile_abcde{number}").touch(mode=0o600)
    # The first command records which Pythons there are.
    there = keys(warm)
    before = snapshot(warm.path)
    planned = warm.json(f"{line} --dry-run")
    assert snapshot(warm.path) == before
    named = [(layer["layer"], entry) for layer in planned["layers"] for entry in layer["entries"]]
    orphans = sum(entry["state"] == "orphan" for _, entry in named)
    said = warm.cachectl(f"{line} --dry-run -v").stdout
    assert all(short_key(entry["key"]) in said for _, entry in named)
    assert all(kernel in said for _, entry in named for kernel in entry["kernels"] or ())
    assert ("lk1" in said) == any(layer == "loopy" for layer, _ in named)
    done = warm.json(line)
    assert there - keys(warm) == {(layer, entry["key"]) for layer, entry in named if entry["state"] != "orphan"}
    assert (len(named) - orphans, orphans) == (done["total"]["removed"], done["total"]["orphans_removed"])
    # Database files shrink by pages.
    for document in (planned, done):
        for layer in (*document["layers"], document["total"]):
            del layer["bytes_freed"]
            layer.pop("entries", None)
    assert {**planned, "dry_run": False} == done
    assert orphans >= 3 or "--kernel" in line or "--max" in line
