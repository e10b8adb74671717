"""The persistent dictionaries of pytools: names, generations, and purges beside running programs."""

from __future__ import annotations

import os
import pickle
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.dictionaries import NONE, dictionary, mine
from support.layers import got

from cachectl.layers.base.errors import Busy
from cachectl.layers.base.facts import Artifact
from cachectl.layers.base.selection import Selection
from cachectl.layers.formats import pdict
from cachectl.layers.formats.pickles import walk
from cachectl.layers.loopy import LoopyDictionaries
from cachectl.layers.pyopencl_invoker import PyOpenCLInvoker
from cachectl.layers.pytools import PytoolsDictionaries

if TYPE_CHECKING:
    from homes import Home

PYTHON = "3.11.7.final.0"


@pytest.mark.parametrize(
    ("file", "generation", "identifier", "python", "dash"),
    [
        (f"pdict-v5-loopy-x-v2-{PYTHON}.sqlite", "v5", "loopy-x-v2", PYTHON, True),
        (f"pdict-v5-loopy-x-v2{PYTHON}.sqlite", "v5", "loopy-x-v2", PYTHON, False),
        ("pdict-v5-mine3.8.1.final.0.sqlite", "v5", "mine", "3.8.1.final.0", False),
        ("pdict-v5-mine-3.13.0.candidate.2.sqlite", "v5", "mine", "3.13.0.candidate.2", True),
        ("pdict-v4-loopy-y-py3.9.2.final.0", "v4", "loopy-y", "3.9.2.final.0", True),
        ("pdict-v5-two\nlines-3.8.1.final.0.sqlite", "v5", "two\nlines", "3.8.1.final.0", True),
    ],
)
def test_names_of_every_generation(file: str, generation: str, identifier: str, python: str, *, dash: bool) -> None:
    name = pdict.parse_name(file, PYTHON)
    assert name == pdict.DictionaryName(file, generation, identifier, python, dash)


@pytest.mark.parametrize("file", ["pdict-v5-.sqlite", "pdict-v9-x-3.11.7.final.0.sqlite", "notes.sqlite", "pdict-v5-x"])
def test_other_names_are_no_dictionaries(file: str) -> None:
    assert pdict.parse_name(file, PYTHON) is None


def test_a_planted_pickle_is_read_and_not_run(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    assert pdict.kernel_names(b"loopy" + pickle.dumps(Planted())) is None
    assert pdict.kernel_names(pickle.dumps(("loopy", Planted(), "_lpy_host_seen"))) == ("seen",)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_names_at_known_places_are_those_of_a_walk(filled: Home) -> None:
    """In every row that loopy itself has stored; no row has to be walked."""
    seen = 0
    for path in (filled.path / ".cache" / "pytools").glob("pdict-v5-loopy-*.sqlite"):
        with closing(sqlite3.connect(path)) as connection:
            for (data,) in connection.execute("select key_value from dict"):
                walked = sorted(set(pdict._names_in(walk(data)[0])))
                assert sorted(pdict._names_at_known_places(data) or ()) == walked
                assert set(pdict.kernel_names(data) or ()) == set(walked)
                seen += 1
    assert seen >= 5


def test_each_dictionary_has_one_layer(home: Home) -> None:
    environment = home.environment()
    folder = home.path / ".cache" / "pytools"
    for identifier in ("loopy-a", "pyopencl-b", "sumpy-c", "mine"):
        dictionary(folder, f"pdict-v5-{identifier}-{environment.python}.sqlite", {"0" * 16: pickle.dumps((1, 2))})
    listed = {
        layer.name: [entry.detail["dictionary"] for entry in layer(environment).entries()]
        for layer in (LoopyDictionaries, PyOpenCLInvoker, PytoolsDictionaries)
    }
    assert listed == {"loopy": ["loopy-a"], "pyopencl-invoker": ["pyopencl-b"], "pytools": ["mine", "sumpy-c"]}


UNKNOWN = "unknown: written by Python 3.8.1, which was not looked for; --python PATH names it"
OLD = "2020.1-islpy2021.1-cgen2020.1-v2"


@pytest.mark.parametrize(
    ("file", "stale", "because"),
    [
        ("x{python}", True, "pytools 2026.1.1 names and stores its dictionaries differently"),
        (f"x-{OLD}-{{python}}", True, "written with loopy 2020.1, 2025.2 is installed"),
        ("x-2025.2-islpy2026.2.2-cgen2025.1-v2-{python}", False, None),
        # Rows of a Python that cachectl does not run under may be live: none of its packages was examined.
        ("x-3.8.1.final.0", None, UNKNOWN),
        ("x3.8.1.final.0", None, UNKNOWN),
        (f"x-{OLD}-3.8.1.final.0", None, UNKNOWN),
    ],
)
def test_rows_that_nothing_opens_are_stale_and_those_of_other_pythons_unknown(
    home: Home, file: str, stale: bool | None, because: str | None
) -> None:
    versions = {"pytools": "2026.1.1", "loopy": "2025.2", "islpy": "2026.2.2", "cgen": "2025.1"}
    environment = replace(home.environment(), installed=versions.get)
    name = f"pdict-v5-loopy-{file.format(python=environment.python)}.sqlite"
    dictionary(home.path / ".cache" / "pytools", name, {"0" * 16: pickle.dumps((1, 2))})
    layer = LoopyDictionaries(environment)
    (entry,) = layer.entries()
    assert (entry.stale, entry.stale_because) == (stale, because)
    usage = layer.store.usage(layer.roots()[0])
    expected = (None, None) if stale is None else (int(stale), usage.bytes if stale else 0)
    assert (usage.entries, usage.stale_entries, usage.stale_bytes) == (1, *expected)
    assert len(layer.plan_clear(Selection(stale=True)).entries) == (stale is True)
    assert len(layer.plan_clear().entries) == 1


def test_folders_of_old_generations_are_entries(home: Home) -> None:
    folder = home.path / ".cache" / "pytools"
    for path in (
        "pdict-v4-loopy-x-py3.8.1.final.0/abc/def/0123456789",
        "pdict-v3-loopy-x-py3.8.1.final.0/abc/def/" + "0" * 58,
    ):
        (folder / path).mkdir(parents=True)
        (folder / path / "key").write_bytes(pickle.dumps("key"))
        (folder / path / "contents").write_bytes(pickle.dumps("contents"))
    layer = LoopyDictionaries(home.environment())
    entries = list(layer.entries())
    assert len(entries) == 2
    assert all(entry.stale is None and entry.files == 2 for entry in entries)
    artifact = got(layer, entries[0].key)
    assert artifact.form == "loopy-pdict/4"
    assert layer.clear(layer.plan_clear()).removed == 2
    # A program makes its locks in them.
    assert len(list(folder.iterdir())) == 2
    layer.put(entries[0].key, artifact)
    assert layer.get(entries[0].key) == artifact


@pytest.mark.real
def test_a_live_program_goes_on_after_a_purge(home: Home) -> None:
    program = (
        "import sys\n"
        "from pytools.persistent_dict import WriteOncePersistentDict\n"
        "mine = WriteOncePersistentDict('mine', safe_sync=False, in_mem_cache_size=0)\n"
        "for n in range(50): mine.store_if_not_present(n, n)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "assert not any(n in mine for n in range(50))\n"
        "for n in range(20): mine.store_if_not_present(n, n)\n"
        "assert all(mine[n] == n for n in range(20))\n"
        "print('went on')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], env=home.variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        layer = PytoolsDictionaries(home.environment())
        assert layer.clear(layer.plan_clear()).removed == 50
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "went on\n"
    assert len(list(layer.entries())) == 20


def test_rows_that_came_after_the_plan_stay(home: Home) -> None:
    layer, path = mine(home, {"a" * 16: NONE})
    plan = layer.plan_clear()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("insert into dict values (?, ?)", ("b" * 16, NONE))
        connection.commit()
    assert layer.clear(plan).removed == 1
    assert [entry.key.rpartition("/")[2] for entry in layer.entries()] == ["b" * 16]


def test_a_purge_gives_the_space_back_and_keeps_the_file(home: Home) -> None:
    row = b"\x80\x04B" + (4096).to_bytes(4, "little") + bytes(4096) + b"."
    layer, path = mine(home, {f"{n:016x}": row for n in range(200)})
    inode, size = path.stat().st_ino, path.stat().st_size
    outcome = layer.clear(layer.plan_clear())
    assert path.stat().st_ino == inode
    assert outcome.bytes_freed == size - path.stat().st_size > 200 * 4096


def test_a_locked_dictionary_fails_alone_and_in_finite_time(home: Home) -> None:
    environment = replace(home.environment(), lock_timeout=0.2)
    folder = home.path / ".cache" / "pytools"
    for name in ("free", "held"):
        dictionary(folder, f"pdict-v5-{name}-{environment.python}.sqlite", {"a" * 16: NONE})
    layer = PytoolsDictionaries(environment)
    plan = layer.plan_clear()
    with closing(sqlite3.connect(folder / f"pdict-v5-held-{environment.python}.sqlite", isolation_level=None)) as other:
        other.execute("begin exclusive")
        outcome = layer.clear(plan)
        assert outcome.removed == 1
        assert ["locked by another process" in note.because for note in outcome.failed] == [True]
        assert [problem.code for problem in layer.store.usage(layer.roots()[0]).problems] == ["busy"]
    assert layer.clear(plan).removed == 1


def test_rows_of_a_locked_dictionary_wait_once_and_not_each(home: Home) -> None:
    layer = PytoolsDictionaries(replace(home.environment(), lock_timeout=0.1))
    root = layer.roots()[0]
    file = "pdict-v5-mine-3.12.1.final.0.sqlite"
    path = dictionary(root.path, file, {f"{number:064}": pickle.dumps(number) for number in range(300)})
    keys = [f"{file}/{number:064}" for number in range(300)]
    artifacts = [Artifact("pytools", f"{key}0", "pytools-pdict/5", pickle.dumps(1)) for key in keys]
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        read, placed = layer.get_many(keys), layer.put_new(artifacts)
    assert (len(read), len(placed)) == (300, 300)
    # One and the same error: it was met once.
    for errors in (set(read.values()), set(placed)):
        assert [type(error) for error in errors] == [Busy]
    assert {type(one) for one in layer.get_many(keys).values()} == {Artifact}
