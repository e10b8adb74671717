"""Many entries at once: counted, searched and cleared as the tree does one by one, by one process or several."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachectl.layers.base.facts import Problem, Target
from cachectl.layers.stores import tree as tree_module
from cachectl.layers.stores import walk
from cachectl.layers.stores.tree import Leaf, Shape, Tree, planned
from cachectl.layers.stores.walk import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = Shape((re.compile("[A-P]{2}"), re.compile("[A-P]{4}")), folders=True, members=re.compile(r"a|b|\w+/c"))


@pytest.fixture(params=["one process", "several"])
def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the work done here, or handed out at once."""
    several = request.param == "several"
    monkeypatch.setattr(walk, "_ALONE", -1 if several else 1e9)
    monkeypatch.setattr(walk, "_processors", lambda: 3 if several else 1)
    return str(request.param)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a tree of sixty entries, and of each oddity one."""
    for folder in ("AA", "AB", "AC", "AD", "AE", "AF"):
        for letter in "ABCDEFGHIJ":
            entry = tmp_path / folder / f"AAA{letter}"
            (entry / "kernel").mkdir(parents=True)
            (entry / "a").write_bytes(b"1" * 10)
            (entry / "kernel" / "c").write_bytes(b"2" * 5)
    (tmp_path / "AA" / "AAAB" / "stranger").write_text("not a member")
    (tmp_path / "AB" / "AAAC" / "b").symlink_to("a")
    (tmp_path / "AC" / "AAAD" / "kernel" / "c").unlink()
    (tmp_path / "AC" / "AAAD" / "a").unlink()
    (tmp_path / "AC" / "lower").mkdir()
    (tmp_path / "AC" / "AAAE" / "other").mkdir()
    (tmp_path / "AD" / "AAAE").rename(tmp_path / "elsewhere")
    (tmp_path / "AD" / "AAAE").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "AG").symlink_to("AA")
    (tmp_path / "AH").write_text("no folder")
    return tmp_path


def tree(root: Path) -> Tree:
    return Tree("test", root, SHAPE)


def weighed(root: Path) -> dict[str, tuple[int, ...]]:
    """Return the marks of everything, whichever way they were found."""
    found: dict[str, tuple[int, ...]] = {}
    for one in tree(root).weigh():
        if isinstance(one, Group):
            found.update({f"{one.folder}/{weight.name}": weight.stamp for weight in one.weights})
        elif isinstance(one, Leaf):
            found[one.key] = one.stamp
        else:
            found[str(one.path)] = ()
    return found


def scanned(root: Path) -> dict[str, tuple[int, ...]]:
    found = tree(root).scan()
    return {
        str(one.path) if isinstance(one, Problem) else one.key: () if isinstance(one, Problem) else one.stamp
        for one in found
    }


@pytest.mark.usefixtures("processes")
def test_weighing_finds_what_scanning_finds(root: Path) -> None:
    """Every mark and every problem is the same, whatever lies there."""
    assert weighed(root) == scanned(root)
    assert len(weighed(root)) > 55


@pytest.mark.usefixtures("processes")
def test_searching_finds_what_holds_a_name(root: Path) -> None:
    """Entries without it are not read; unreadable folders are still reported."""
    shutil.rmtree(root / "AE" / "AAAA" / "kernel")
    (root / "AE" / "AAAA" / "wanted").mkdir()
    (root / "AE" / "AAAA" / "wanted" / "c").write_text("x")
    found = {one.key for one in tree(root).holding(re.compile("want.*")) if isinstance(one, Leaf)}
    assert found == {"AE/AAAA"}


def targets(root: Path) -> tuple[Target, ...]:
    """Plan everything that is as it should be."""
    groups = (one for one in tree(root).weigh() if isinstance(one, Group))
    return tuple(target for group in groups for target in planned(root, group))


def files(root: Path) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        yield from (os.path.relpath(os.path.join(folder, name), root) for name in names)


@pytest.mark.usefixtures("processes")
def test_planned_entries_are_removed_and_others_stay(root: Path) -> None:
    """A changed entry goes back whole; a vanished one, and anything that is no entry, is left alone."""
    plan = targets(root)
    (root / "AE" / "AAAA" / "b").write_bytes(b"changed")
    (root / "AE" / "AAAB" / "stranger").write_bytes(b"somebody's")
    shutil.rmtree(root / "AE" / "AAAC")
    outcome = tree(root).remove_unused(plan, lambda: True)
    assert outcome.removed == len(plan) - 3
    assert outcome.bytes_freed == 15 * outcome.removed
    notes = {note.key: note.because for note in outcome.skipped}
    assert notes == {"AE/AAAA": walk.CHANGED, "AE/AAAB": walk.CHANGED, "AE/AAAC": walk.GONE}
    assert outcome.failed == ()
    assert {path.split("/")[0] for path in files(root)} == {"AA", "AB", "AC", "AE", "AH", "elsewhere"} - {"AC"}
    assert (root / "AE" / "AAAA" / "b").read_bytes() == b"changed"
    assert (root / "AE" / "AAAB" / "stranger").read_bytes() == b"somebody's"
    assert not [name for name in os.listdir(root) if name.startswith(".cachectl")]
    assert not (root / "AF").exists()


@pytest.mark.usefixtures("processes")
def test_a_link_that_took_an_entrys_place_is_not_followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither in the place of the entry, nor of the folder above it, nor inside."""
    precious = tmp_path_factory.mktemp("precious")
    (precious / "a").write_bytes(b"1" * 10)
    plan = targets(root)
    shutil.rmtree(root / "AE" / "AAAA")
    (root / "AE" / "AAAA").symlink_to(precious)
    shutil.rmtree(root / "AF")
    (root / "AF").symlink_to(root / "AE")
    shutil.rmtree(root / "AE" / "AAAB" / "kernel")
    (root / "AE" / "AAAB" / "kernel").symlink_to(precious)
    tree(root).remove_unused(plan, lambda: True)
    assert (precious / "a").read_bytes() == b"1" * 10
    assert (root / "AE" / "AAAA").is_symlink()
    assert (root / "AE" / "AAAB" / "kernel").is_symlink()


def test_orphans_are_removed_once_when_a_program_starts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orphans in a folder that was not started are removed once, and not reported as removed entries."""
    monkeypatch.setattr(tree_module, "_SECONDS_UNASKED", -1.0)
    *entries, last = targets(root)
    left_over = replace(last, entries=0)
    outcome = tree(root).remove_unused([*entries, left_over], lambda: False)
    assert outcome.removed == len(entries)
    assert outcome.skipped == ()
    assert not (root / last.key).exists()


@pytest.mark.usefixtures("processes")
def test_a_file_with_another_name_frees_nothing(root: Path) -> None:
    """A file with another hard link frees nothing."""
    os.link(root / "AF" / "AAAA" / "a", root / "kept")
    plan = targets(root)
    assert tree(root).remove_unused(plan, lambda: True).bytes_freed == 15 * len(plan) - 10


def test_a_helper_that_dies_is_made_up_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does what a helper did not do, and counts what it did as done."""
    monkeypatch.setattr(walk, "_ALONE", -1)
    monkeypatch.setattr(walk, "_processors", lambda: 3)
    expected = weighed(root)
    start = subprocess.Popen

    def start_and_kill(*arguments: object, **options: object) -> object:
        process = start(*arguments, **options)  # type: ignore[call-overload]
        process.kill()
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    assert weighed(root) == expected
    plan = targets(root)
    assert tree(root).remove_unused(plan, lambda: True).removed == len(plan)


def test_it_stands_alone() -> None:
    """As a program it has the standard library alone, in isolation and without a site."""
    done = subprocess.run([sys.executable, "-I", "-S", walk.__file__], input=b"", capture_output=True, check=False)
    assert b"EOFError" in done.stderr


#: A Python that takes its time over each entry that it clears.
SLOW = """#!{python} -I
import os, runpy, sys, time
rename = os.rename
def slowly(*names, **folders):
    rename(*names, **folders)
    time.sleep(0.05)
os.rename = slowly
sys.argv = sys.argv[-1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PURGING = """
import sys
from pathlib import Path
from cachectl.layers.stores import walk
from cachectl.layers.stores.tree import Tree
sys.path.insert(0, sys.argv[2])
from test_walk import SHAPE, targets
root = Path(sys.argv[1])
plan = targets(root)
walk._ALONE = -1
walk._processors = lambda: 3
sys.executable = sys.argv[3]
Tree("test", root, SHAPE).remove_unused(plan, lambda: True)
"""


def test_helpers_end_with_the_purge(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user who killed it may start a program that uses the cache."""
    for folder in ("AA", "AB", "AC", "AD", "AE", "AF"):
        for number in range(256):
            letters = "".join("ABCDEFGHIJKLMNOP"[int(digit, 16)] for digit in f"{number:04x}")
            (tmp_path / folder / letters).mkdir(parents=True)
            (tmp_path / folder / letters / "a").write_bytes(b"1")
    slow = tmp_path_factory.mktemp("bin") / "python3"
    slow.write_text(SLOW.format(python=sys.executable))
    slow.chmod(0o700)
    command = (sys.executable, "-c", PURGING, str(tmp_path), str(Path(__file__).parent), str(slow))
    with subprocess.Popen(command) as process:
        # The first share is the purge's own; each helper is at its first folder for a dozen seconds.
        while any(len(os.listdir(tmp_path / folder)) == 256 for folder in ("AB", "AC")):
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    # They hold the trash folder as long as they live.
    (trash,) = tmp_path.glob(".cachectl-trash-*")
    handle = os.open(trash, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)
    assert all(len(os.listdir(tmp_path / folder)) == 256 for folder in ("AE", "AF"))


def test_once_a_program_uses_the_root_the_rest_goes_one_by_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again during the purge; planned entries still go, and empty folders stay."""
    monkeypatch.setattr("cachectl.layers.stores.tree._SECONDS_UNASKED", -1)
    plan = targets(root)
    outcome = tree(root).remove_unused(plan, lambda: False)
    assert outcome.removed == len(plan)
    assert (root / "AF").is_dir()


def test_only_python_is_asked_to_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that bears an interpreter in it would start itself."""
    assert walk._processors() >= 1
    for name in ("/usr/bin/blender", "", None):
        monkeypatch.setattr(sys, "executable", name)
        assert walk._processors() == 1
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3.11")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert walk._processors() == 1


@pytest.mark.parametrize("says", ["Terminal", "(zzzz", "Nothing", ""])
def test_a_helper_that_is_none_is_made_up_for(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """The output of another program is no answer."""
    expected = weighed(root)
    other = tmp_path_factory.mktemp("bin") / "python3"
    other.write_text(f"#!/bin/sh\nprintf %s '{says}'\n")
    other.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(other))
    monkeypatch.setattr(walk, "_ALONE", -1)
    monkeypatch.setattr(walk, "_processors", lambda: 3)
    assert weighed(root) == expected


@pytest.mark.usefixtures("processes")
def test_a_folder_nested_too_deeply_is_not_an_entry(root: Path) -> None:
    """Neither to a scan nor to a weighing."""
    deep = root / "AF" / "AAAA" / "/".join(["kernel"] * 20)
    deep.mkdir(parents=True)
    assert weighed(root) == scanned(root)
