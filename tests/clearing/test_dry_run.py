"""Dry runs: every entry is named, and the numbers are those of the run that follows."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from tiers import thorough

from cachectl.cli import output
from cachectl.cli.inspecting import ls
from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.facts import Entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from homes import Home

pytestmark = pytest.mark.real

LAYERS = ("loopy", "pyopencl-invoker", "pyopencl", "pocl")


def numbers(document: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return what a purge says of each layer, but for the words of its failures."""
    return [
        (
            *(layer[key] for key in ("layer", "removed", "orphans_removed", "bytes_freed")),
            *(len(layer[key]) for key in ("skipped", "failed")),
        )
        for layer in document["layers"]
    ]


def keys(document: dict[str, Any]) -> dict[str, set[str]]:
    """Return the keys that a dry run names, layer by layer."""
    return {layer["layer"]: {entry["key"] for entry in layer["entries"]} for layer in document["layers"]}


def listed(home: Home, *arguments: str) -> dict[str, set[str]]:
    """Return the keys that ``ls`` names, layer by layer."""
    found: dict[str, set[str]] = {}
    for entry in home.json("ls", *arguments)["entries"]:
        found.setdefault(entry["layer"], set()).add(entry["key"])
    return found


def close(folder: Path) -> None:
    """Take away the right to write to everything in a folder."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)


def text(home: Home, columns: int, *arguments: str) -> str:
    """Run a command on a terminal of so many columns, and return what it shows, without colours."""
    shown = home.terminal(
        sys.executable, "-m", "cachectl", *arguments, columns=columns, only_output=True, NO_COLOR="1"
    ).stdout
    return re.sub("\x1b\\[[0-9;]*m", "", shown)


# ---------------------------------------------------------------------- purge and prune


@pytest.mark.parametrize("selection", [(), *thorough((("--kernel", "lk[12]"),))])
def test_purge_names_every_entry_and_frees_what_it_said(warm: Home, selection: tuple[str, ...]) -> None:
    # The first command records which Pythons there are.
    there = listed(warm, *selection)
    before = snapshot(warm.path)
    foreseen = warm.json("purge", "--all", "--dry-run", *selection)
    assert snapshot(warm.path) == before
    assert {layer: named for layer, named in keys(foreseen).items() if named} == there
    assert set(there) == set(LAYERS) - ({"pyopencl"} if selection else set())
    entries = [entry for layer in foreseen["layers"] for entry in layer["entries"]]
    assert {name for entry in entries for name in entry["kernels"]} >= {"lk1", "lk2"}
    assert entries[0].keys() == warm.json("ls", "--limit", "1")["entries"][0].keys()
    done = warm.json("purge", "--all", *selection)
    assert numbers(foreseen) == numbers(done)
    assert "entries" not in done["layers"][0]


def test_text_names_entries_as_ls_does(warm: Home) -> None:
    said = warm.cachectl("purge", "--all", "--dry-run").stdout
    entries, *orphans, summary = said.split("\n\n")
    lines = [line.split() for line in entries.splitlines()]
    ages = re.compile(r"\d+[smhd]")
    expected = [line.split() for line in warm.cachectl("ls", *LAYERS).stdout.splitlines()]
    assert [[word for word in line if not ages.fullmatch(word)][:4] for line in lines] == [
        [word for word in line if not ages.fullmatch(word)][:4] for line in expected
    ]
    assert [table.split()[:2] for table in orphans] == [["layer", "orphan"]]
    assert summary.split()[:3] == ["layer", "would", "go"]


@pytest.mark.parametrize("command", [("purge", "pocl"), ("prune", "--stale", "pocl")])
def test_orphans_are_counted_as_they_are_removed(warm: Home, command: tuple[str, ...]) -> None:
    for number in range(3):
        leaked = warm.path / ".cache" / "pocl" / "kcache" / f"tempfile_abcde{number}"
        leaked.touch(mode=0o600)
    said = warm.cachectl(*command, "--dry-run").stdout
    foreseen, done = warm.json(*command, "--dry-run"), warm.json(*command)
    assert numbers(foreseen) == numbers(done)
    (layer,) = foreseen["layers"]
    assert len(layer["orphans"]) == layer["orphans_removed"] == done["total"]["orphans_removed"] >= 3
    assert re.search(rf"^total +\d+ +{layer['orphans_removed']} ", said, re.MULTILINE)


@pytest.mark.parametrize("columns", [40, *thorough(80)])
def test_a_dry_run_fits_a_terminal(warm: Home, columns: int) -> None:
    shown = text(warm, columns, "purge", "pocl", "--dry-run")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert sum(line.startswith("pocl") for line in lines) >= 12
    assert re.search(r"lk3 +46\.\d KiB +2h", shown)
    assert "would go" in shown


def test_prune_names_every_entry(warm: Home) -> None:
    foreseen = warm.json("prune", "--max-size", "300KiB", "--dry-run")
    assert foreseen["total"]["removed"] > 0
    for layer in foreseen["layers"]:
        assert len(layer["entries"]) == layer["removed"]
        assert all(entry["kernels"] for entry in layer["entries"])
    assert numbers(foreseen) == numbers(warm.json("prune", "--max-size", "300KiB"))


def test_unwritable_roots_are_what_would_fail(warm: Home, held_to_modes: tuple[str, ...]) -> None:
    close(warm.path / ".cache")
    command = (*held_to_modes, sys.executable, "-m", "cachectl", "purge", "--all", "--json")
    foreseen, done = (warm.run(*command, *more, check=False) for more in (("--dry-run",), ()))
    assert foreseen.returncode == done.returncode == 1
    said, real = json.loads(foreseen.stdout), json.loads(done.stdout)
    assert numbers(said) == numbers(real)
    assert said["total"]["removed"] == said["total"]["bytes_freed"] == 0
    assert said["total"]["failed"] > len(LAYERS)
    assert not any(layer["entries"] for layer in said["layers"])


@pytest.mark.parametrize("command", [("purge", "--all"), *thorough((("prune", "--max-files", "1"),))])
def test_folders_inside_entries_may_be_closed(
    warm: Home, held_to_modes: tuple[str, ...], command: tuple[str, ...]
) -> None:
    info = next((warm.path / ".cache" / "pyopencl").glob("*/*/info"))
    info.chmod(0)
    next((warm.path / ".cache" / "pocl" / "kcache").rglob("*.so")).parent.chmod(0o500)
    line = (*held_to_modes, sys.executable, "-m", "cachectl", *command, "--json")
    said, real = (json.loads(warm.run(*line, *more, check=False).stdout) for more in (("--dry-run",), ()))
    assert numbers(said) == numbers(real)
    assert said["total"]["failed"] == 1
    # What cannot be read goes like the others.
    assert not info.exists()


def test_an_index_that_cannot_be_opened_is_what_would_fail(
    home: Home, held_to_modes: tuple[str, ...], compute_cache: Callable[[Path], None]
) -> None:
    compute_cache(home.path / ".nv" / "ComputeCache")
    (home.path / ".nv" / "ComputeCache" / "index").chmod(0o444)
    line = (*held_to_modes, sys.executable, "-m", "cachectl", "purge", "cuda", "--json")
    said, real = (json.loads(home.run(*line, *more, check=False).stdout) for more in (("--dry-run",), ()))
    assert numbers(said) == numbers(real)
    assert said["layers"][0]["failed"] == real["layers"][0]["failed"] != []


def test_a_locked_dictionary_is_what_would_fail(warm: Home) -> None:
    file = next((warm.path / ".cache" / "pytools").glob("pdict-v5-loopy-*"))
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("begin immediate")
        foreseen = warm.json("purge", "loopy", "--dry-run", "--wait", "0.2", check=False, process=True)
        done = warm.json("purge", "loopy", "--wait", "0.2", check=False, process=True)
    assert numbers(foreseen) == numbers(done)
    assert [note["key"] for note in foreseen["layers"][0]["failed"]] == [file.name]
    assert "locked by another process" in foreseen["layers"][0]["failed"][0]["because"]


def test_pyopencls_lock_is_what_would_fail(warm: Home) -> None:
    base = next((warm.path / ".cache" / "pyopencl").glob("pyopencl-compiler-cache-*"))
    (base / "lock").touch()
    foreseen = warm.json("purge", "pyopencl", "--dry-run", "--wait", "0.2", check=False)
    done = warm.json("purge", "pyopencl", "--wait", "0.2", check=False)
    assert numbers(foreseen) == numbers(done)
    assert foreseen["layers"][0]["failed"] == done["layers"][0]["failed"] != []


# ---------------------------------------------------------------------- import


@pytest.fixture(scope="module")
def packed(filled: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle of everything in the filled home."""
    file = tmp_path_factory.mktemp("packed") / "bundle.zip"
    filled.cachectl("push", str(file))
    return file


def test_pull_names_every_entry_with_its_kernels(packed: Path, home: Home, filled: Home) -> None:
    foreseen = home.json("pull", str(packed), "--trust", "--dry-run")
    assert not (home.path / ".cache" / "pocl").exists()
    assert keys(foreseen) == listed(filled, *LAYERS)
    entries = [entry for layer in foreseen["layers"] for entry in layer["entries"]]
    expected = {(entry["key"], tuple(entry["kernels"])) for entry in filled.json("ls", *LAYERS)["entries"]}
    assert {(entry["key"], tuple(entry["kernels"])) for entry in entries} == expected
    assert "lk3" in home.cachectl("pull", str(packed), "--trust", "--dry-run").stdout
    assert foreseen["total"] == home.json("pull", str(packed), "--trust")["total"]


# ---------------------------------------------------------------------- restore


def quarantined(home: Home) -> str:
    """Move one damaged program aside, and return its key."""
    program = min((home.path / ".cache" / "pocl" / "kcache").glob("??/*/program.bc"))
    os.truncate(program, 100)
    home.cachectl("verify", "pocl", "--quarantine")
    return f"{program.parent.parent.name}/{program.parent.name}"


def test_restore_names_what_would_come_back(warm: Home) -> None:
    key = quarantined(warm)
    before = snapshot(warm.path)
    foreseen = warm.json("restore", "--all", "--dry-run")
    assert snapshot(warm.path) == before
    assert foreseen["dry_run"] is True
    assert [(layer["layer"], [entry["key"] for entry in layer["entries"]]) for layer in foreseen["layers"]] == [
        ("pocl", [key])
    ]
    said = warm.cachectl("restore", "--all", "--dry-run").stdout
    assert "pocl" in said
    assert "1 would come back" in said
    assert [one["key"] for one in warm.json("restore", "--all")["restored"]] == [key]


def test_a_column_of_ls_needs_a_change_of_ls_alone(warm: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    quarantined(warm)
    (warm.path / ".cache" / "pocl" / "kcache" / "tempfile_abcde0").touch(mode=0o600)
    device = output.Column[Entry]("device", lambda entry: entry.device or output.DASH)
    ours = ls.columns
    monkeypatch.setattr(ls, "columns", lambda now: (device, *ours(now)))
    for command in (("ls",), ("purge", "pocl", "-n"), ("prune", "--older-than", "1s", "-n")):
        assert warm.cachectl(*command).stdout.startswith("device"), command
    assert warm.cachectl("restore", "--all", "-n").stdout.startswith("layer")


def test_restore_says_what_would_stay(warm: Home, filled: Home) -> None:
    key = quarantined(warm)
    kcache = ".cache/pocl/kcache"
    shutil.copytree(filled.path / kcache / key, warm.path / kcache / key, dirs_exist_ok=True)
    for more in (("--dry-run",), ()):
        done = warm.json("restore", "--all", *more, check=False)
        assert [one["failed"] for one in done["restored"]] != [None]
    done = warm.json("restore", "--all", "--replace", "--dry-run")
    assert [one["failed"] for one in done["restored"]] == [None]


def test_a_dry_run_of_restore_needs_a_name(home: Home) -> None:
    done = home.cachectl("restore", "--dry-run", check=False)
    assert done.returncode == 2
    assert "--all" in done.stderr
