"""The files of pytools' dictionaries: damage, links, journals and foreign tables."""

from __future__ import annotations

import os
import pickle
import shlex
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.dictionaries import NONE, dictionary, mine
from support.layers import orphans
from tiers import thorough

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import Damaged, LayerError
from cachectl.layers.base.facts import Artifact, Problem
from cachectl.layers.base.selection import Selection
from cachectl.layers.disk.plain import read_locked
from cachectl.layers.loopy import LoopyDictionaries
from cachectl.layers.pyopencl_invoker import PyOpenCLInvoker
from cachectl.layers.pytools import PytoolsDictionaries

if TYPE_CHECKING:
    from homes import Home


def test_a_file_that_was_just_made_is_no_damage(home: Home) -> None:
    """It is empty until its program makes the table in it."""
    layer, path = mine(home, {})
    path.write_bytes(b"")
    root = layer.roots()[0]
    assert [thing for thing in layer.store.scan(root) if isinstance(thing, Problem)] == []
    assert list(layer.store.verify(root)) == []
    assert not layer.plan_clear().failed


@pytest.mark.parametrize(
    "arguments",
    [["purge", "--all"], *thorough(["purge", "pytools", "--older-than", "0s"], ["prune", "--max-size", "1B"])],
)
def test_a_purge_names_the_cure_of_a_broken_dictionary_and_clears_the_others(home: Home, arguments: list[str]) -> None:
    folder = home.path / ".cache" / "pytools"
    python = home.environment().python
    rows = {f"{n:016x}": pickle.dumps((n, bytes(9000))) for n in range(30)}
    header = dictionary(folder, f"pdict-v5-a-header-{python}.sqlite", rows)
    header.write_bytes(b"no database at all" * 99)
    # Counting reads the tree down to its leaves, and not what hangs on them.
    inside = dictionary(folder, f"pdict-v5-b-inside-{python}.sqlite", rows)
    with inside.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096)
    dictionary(folder, f"pdict-v5-c-whole-{python}.sqlite", rows)
    done = home.cachectl(*arguments, check=False)
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert len(said) == 2, said
    cure = "cachectl purge --damaged pytools"
    assert all(line.startswith("cachectl: pytools: ") and cure in line for line in said)
    left = {entry["key"].partition("/")[0] for entry in home.json("ls", "pytools", check=False)["entries"]}
    assert left == set()
    layer = PytoolsDictionaries(home.environment())
    damaged = [finding.thing for finding in layer.store.verify(layer.roots()[0]) if finding.thing is not None]
    assert [thing.key for thing in damaged] == [header.name, inside.name]
    outcome = layer.clear(layer.plan_removal(damaged))
    assert (outcome.skipped, outcome.failed, header.exists(), inside.exists()) == ((), (), False, False)
    assert home.cachectl(*arguments).stderr == ""


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x04N", b"\x80\x04N.trailing"])
def test_a_broken_pickle_is_found_and_not_put(home: Home, data: bytes) -> None:
    layer, path = mine(home, {"a" * 16: data})
    assert [finding.code for finding in layer.store.verify(layer.roots()[0])] == ["pickle"]
    key = f"{path.name}/{'b' * 16}"
    with pytest.raises(Damaged):
        layer.put(key, Artifact("pytools", key, "pytools-pdict/5", data))


def test_a_pickle_of_a_later_protocol_is_not_removed_as_damaged(home: Home) -> None:
    later = bytes([0x80, pickle.HIGHEST_PROTOCOL + 1]) + b"\xfe."
    layer, _ = mine(home, {"a" * 16: later, "b" * 16: bytes(50)})
    assert [finding.code for finding in layer.store.verify(layer.roots()[0])] == ["foreign", "pickle"]
    assert [entry.key[-1] for entry in layer.plan_clear(damaged=True).entries] == ["b"]


def test_files_of_an_interrupted_cachectl_are_orphans_of_one_layer(home: Home) -> None:
    environment = home.environment()
    (home.path / ".cache" / "pytools" / (".cachectl-stage-" + "0" * 32)).mkdir(parents=True)
    layers = (LoopyDictionaries(environment), PyOpenCLInvoker(environment), PytoolsDictionaries(environment))
    assert [layer.name for layer in layers if orphans(layer)] == ["pytools"]
    layer = PytoolsDictionaries(environment)
    layer.clear(layer.plan_clear(Selection()))
    assert list((home.path / ".cache" / "pytools").iterdir()) == []


def test_nothing_is_read_or_written_through_a_link(home: Home) -> None:
    """Nor is what a link points at that took the dictionary's place after the plan."""
    innocent = dictionary(home.path / "elsewhere", "innocent.db", {"a" * 16: NONE})
    layer, path = mine(home, {"a" * 16: NONE})
    plan = layer.plan_clear()
    path.unlink()
    path.symlink_to(innocent)
    before = innocent.read_bytes()
    key = f"{path.name}/{'a' * 16}"
    with pytest.raises(LayerError, match="link"):
        layer.get(key)
    with pytest.raises(LayerError, match="link"):
        layer.put(key, Artifact("pytools", key, "pytools-pdict/5", NONE), replace=True)
    assert len(list(layer.store.verify(layer.roots()[0]))) == 1
    assert [problem.code for problem in layer.store.usage(layer.roots()[0]).problems] == ["link"]
    layer.clear(layer.plan_clear())
    outcome = layer.clear(plan)
    assert (outcome.removed, len(outcome.failed)) == (0, 1)
    assert innocent.read_bytes() == before


def test_a_pipe_under_a_dictionarys_name_makes_nobody_wait(home: Home) -> None:
    layer, path = mine(home, {})
    path.unlink()
    os.mkfifo(path)
    root = layer.roots()[0]
    layer.store.usage(root)
    assert len(list(layer.store.verify(root))) == 1
    with pytest.raises(LayerError):
        layer.get(f"{path.name}/{'a' * 16}")


def test_advice_is_safe_to_paste(home: Home) -> None:
    layer, _ = mine(home, {"x'; touch pwned; '": b"junk"})
    (finding,) = layer.store.verify(layer.roots()[0])
    assert shlex.split(finding.fix)[-1] == finding.key


def test_rows_that_took_the_numbers_of_deleted_ones_stay(home: Home) -> None:
    layer, path = mine(home, {"a" * 16: NONE})
    plan = layer.plan_clear()
    layer.clear(layer.plan_clear())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("insert into dict values (?, ?)", ("b" * 16, b"\x80\x04K\x01."))
        connection.commit()
    assert layer.clear(plan).removed == 0
    assert len(list(layer.entries())) == 1


def test_folders_with_other_files_are_no_entries(home: Home) -> None:
    folder = home.path / ".cache" / "pytools" / "pdict-v4-mydata-py3.8.1.final.0" / "abc" / "def" / ("0" * 16)
    folder.mkdir(parents=True)
    (folder / "results.h5").write_bytes(b"years")
    layer = PytoolsDictionaries(home.environment())
    layer.clear(layer.plan_clear())
    assert (folder / "results.h5").exists()


@pytest.mark.parametrize("size", [0, 100, 8192])
def test_looking_at_a_file_with_a_stray_log_writes_nothing(home: Home, size: int) -> None:
    """Sqlite makes a shared-memory file, or deletes the log, wherever it finds one beside a database, even empty."""
    layer, path = mine(home, {"b" * 16: NONE})
    os.truncate(path, size)
    Path(f"{path}-wal").write_bytes(b"no log at all" * 100)
    before = snapshot(home.path, times=True)
    for root in layer.roots():
        list(layer.store.scan(root))
        list(layer.store.verify(root))
    layer.plan_clear()
    assert snapshot(home.path, times=True) == before


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors cannot be counted here")
def test_looking_a_thousand_times_beside_an_open_dictionary_costs_one_descriptor(tmp_path: Path) -> None:
    """A descriptor that cannot be closed without dropping a lock of this process is reused."""
    path = tmp_path / "pdict-v5-mine-1.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table dict (keyhash text not null primary key, key_value text not null)")
        connection.commit()
        read_locked(path)
        before = descriptors_of(path)
        for _ in range(50):
            assert read_locked(path, limit=6) == b"SQLite"
            assert read_locked(path).startswith(b"SQLite format 3")
        assert descriptors_of(path) == before == 2
    read_locked(path)
    assert descriptors_of(path) == 0


def descriptors_of(path: Path) -> int:
    """Count this process's descriptors of one file: what else is open comes and goes, with the garbage for one."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}") == str(path.resolve())
    return found


@pytest.mark.parametrize("glob", ["foo*", "[!]]oo_bar", "[!]x]oo_bar", "[]f]oo_bar", "*o_b?r", "foo_bar", "[a-z]*_bar"])
def test_no_kernel_is_missed_by_looking_for_a_part_of_its_name(glob: str) -> None:
    """Every name that a pattern selects contains the literal part, also with brackets."""
    selection = Selection(kernel=glob)
    assert selection.kernel_pattern is not None
    assert selection.kernel_pattern.fullmatch("foo_bar")
    assert selection.kernel_part in "foo_bar"
