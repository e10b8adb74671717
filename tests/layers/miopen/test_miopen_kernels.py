"""MIOpen's kernel databases: entries, and how they are read, placed and cleared."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.layers import got
from support.miopen_kernels import (
    ARGS,
    CODE,
    INSERT,
    KEY,
    NAME,
    TABLE_2_3,
    VERSION,
    MIOpenConformance,
    artifact,
    environment_of,
    findings,
    key_of,
    packed,
    problems,
    spoil,
    store,
    stored,
    user_file,
)

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import EntryExists, LayerError, Refused, Unreachable
from cachectl.layers.base.facts import Severity
from cachectl.layers.base.selection import Selection
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.system import MIOpenSystemKernels, MIOpenSystemTuning
from cachectl.layers.miopen.tuning import MIOpenTuning
from cachectl.removal import recover

OBJECT = "2.2.1/0123456789abcdef0123456789abcdef/MIOpenPooling.cl.o"
OTHER = ("Conv_Winograd_v21_1_3.s.o", " -mcpu=gfx90a")


def fill(home: Path) -> None:
    """Make one cache of each generation."""
    store(user_file(home), {(NAME, ARGS): packed(CODE), OTHER: packed(b"\x7fELF raw")}, wal=True)
    store(user_file(home, "gfx906_60", "3.2.0.x"), {(NAME, ARGS): (CODE, packed(CODE)[1], 0)})
    path = home / ".cache" / "miopen" / OBJECT
    path.parent.mkdir(parents=True)
    path.write_bytes(CODE)


def fill_system(home: Path) -> None:
    store(home / "db" / "gfx90a.kdb", {(NAME, ARGS): packed(CODE), ("other.s.o", ARGS): packed(CODE)})


class TestUser(MIOpenConformance):
    """User kernels of both generations."""

    layer, fill = MIOpenKernels, staticmethod(fill)


class TestSystem(MIOpenConformance):
    """System kernels."""

    layer, fill = MIOpenSystemKernels, staticmethod(fill_system)


@pytest.fixture
def layer(tmp_path: Path) -> MIOpenKernels:
    return MIOpenKernels(environment_of(tmp_path))


def test_both_generations_are_listed(tmp_path: Path, layer: MIOpenKernels) -> None:
    fill(tmp_path)
    entries = {entry.key: entry for entry in layer.entries()}
    old = "3.2.0.x/gfx906_60.ukdb"
    assert set(entries) == {KEY, key_of(f"{VERSION}/gfx90a6e.ukdb", *OTHER), key_of(old), OBJECT}
    new = entries[KEY]
    assert (new.bytes, new.files, new.device) == (len(packed(CODE)[0]), 0, "gfx90a")
    assert (new.stale, new.modified) == (None, None)
    assert (new.kernels, new.versions) == (("MIOpenConvUni.cl", "MIOpenConvUni"), {"miopen": VERSION})
    assert new.written_before == user_file(tmp_path).stat().st_mtime
    assert (entries[key_of(old)].bytes, entries[key_of(old)].stale) == (len(CODE), True)
    assert entries[key_of(old)].stale_because == f"a newer MIOpen ({VERSION}) has its own files"
    assert (entries[OBJECT].bytes, entries[OBJECT].files, entries[OBJECT].stale) == (len(CODE), 1, True)
    assert entries[OBJECT].kernels == ("MIOpenPooling.cl", "MIOpenPooling")
    for pattern in ("MIOpenConvUni", "MIOpenConvUni.cl", "*ConvUni*"):
        assert {entry.kernels for entry in layer.entries(Selection(kernel=pattern))} == {new.kernels}


def test_get_gives_the_uncompressed_kernel_of_exactly_these_arguments(tmp_path: Path, layer: MIOpenKernels) -> None:
    fill(tmp_path)
    read = got(layer, KEY)
    assert (read.form, read.data) == ("miopen-kernel/1", CODE)
    assert {**read.detail, "kernel_name": NAME, "kernel_args": ARGS, "md5": packed(CODE)[1]} == read.detail
    assert [layer.get(key_of(args=args)) for args in (ARGS.strip(), ARGS.upper())] == [None, None]


def test_kernels_of_2_3_are_listed_and_removed_and_nothing_else(tmp_path: Path, layer: MIOpenKernels) -> None:
    path = store(user_file(tmp_path, "gfx906_60", "2.3.0"), {})
    spoil(path, "DROP TABLE kern_db;" + TABLE_2_3 + f"INSERT INTO kern_db VALUES(1, '{NAME}', '{ARGS}', x'00')")
    (key,) = (entry.key for entry in layer.entries())
    with pytest.raises(Refused, match=r"columns of MIOpen 2\.3\.0"):
        layer.get(key)
    with pytest.raises(Refused, match=r"columns of MIOpen 2\.3\.0"):
        layer.put(key, artifact(key))
    assert findings(layer) == [("foreign", Severity.HARMLESS)]
    assert layer.clear(layer.plan_clear(Selection(key=key))).removed == 1


@pytest.mark.parametrize("wal", [None, True])
@pytest.mark.parametrize("code", [CODE, os.urandom(4096), b"abc"], ids=["packs", "does not pack", "three bytes"])
def test_put_writes_what_miopen_would_have_written(tmp_path: Path, code: bytes, wal: bool | None) -> None:
    """And it leaves the rows and the mode of a file that exists."""
    layer, path = MIOpenKernels(environment_of(tmp_path)), user_file(tmp_path)
    before = stored(store(path, {OTHER: packed(CODE)}, wal=True)) if wal else []
    layer.put(KEY, artifact(KEY, code))
    assert stored(path) == [*before, (NAME, ARGS, *packed(code))]
    assert os.listdir(path.parent) == ["gfx90a6e.ukdb"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA index_info(idx_kern_db)").fetchall() != []
    assert path.read_bytes()[18:20] == (b"\x02\x02" if wal else b"\x01\x01")
    read = got(layer, KEY)
    assert (read.data, findings(layer)) == (code, [])


def test_equal_bytes_are_not_put_again_however_they_are_packed(tmp_path: Path, layer: MIOpenKernels) -> None:
    store(user_file(tmp_path), {(NAME, ARGS): packed(CODE, level=1)})
    before = snapshot(tmp_path)
    layer.put(KEY, artifact(KEY))
    with pytest.raises(EntryExists, match="--replace"):
        layer.put(KEY, artifact(KEY, b"another kernel"))
    assert snapshot(tmp_path) == before
    layer.put(KEY, artifact(KEY, b"another kernel"), replace=True)
    assert stored(user_file(tmp_path))[0][2] == b"another kernel"


@pytest.mark.parametrize(
    ("key", "data", "sentence"),
    [
        (key_of(args=" -DX='a'"), CODE, "a quote"),
        (key_of(name="it's.cl.o"), CODE, "a quote"),
        (key_of(name="kernel.cl"), CODE, "does not end in .o"),
        (KEY, b"", "is empty"),
        (key_of("../gfx90a6e.ukdb"), CODE, "is not a key"),
        (key_of("gfx90a6e.kdb"), CODE, "is not a key"),
        (key_of("notes/gfx90a6e.ukdb"), CODE, "is not a key"),
        (f"{VERSION}/gfx90a6e.ukdb::{NAME}", CODE, "is not a key"),
    ],
)
def test_put_refuses_what_miopen_could_not_use(tmp_path: Path, key: str, data: bytes, sentence: str) -> None:
    home = tmp_path / "home"
    fill(home)
    before = snapshot(tmp_path)
    with pytest.raises(LayerError, match=sentence):
        MIOpenKernels(environment_of(home)).put(key, artifact(key, data))
    assert snapshot(tmp_path) == before


def test_put_does_not_write_through_links(tmp_path: Path, layer: MIOpenKernels) -> None:
    elsewhere = store(tmp_path / "elsewhere.ukdb", {})
    path = user_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    (path.parent.parent / "3.4.0").symlink_to(path.parent)
    assert set(problems(layer)) == {"link"}
    for key in (KEY, key_of("3.4.0/gfx1030_36.ukdb")):
        assert layer.get(key) is None
        with pytest.raises(Refused, match="link"):
            layer.put(key, artifact(key))
    assert stored(elsewhere) == []


def test_an_old_object_file_comes_and_goes_as_it_stands(tmp_path: Path, layer: MIOpenKernels) -> None:
    fill(tmp_path)
    read = got(layer, OBJECT)
    assert (read.form, read.data) == ("miopen-object/1", CODE)
    assert layer.clear(layer.plan_clear(Selection(key=OBJECT))).removed == 1
    path = tmp_path / ".cache" / "miopen" / OBJECT
    assert not path.exists()
    layer.put(OBJECT, read)
    assert path.read_bytes() == CODE
    with pytest.raises(LayerError, match="is not a key"):
        layer.put(KEY, replace(read, key=KEY))


@contextmanager
def pending(path: Path) -> Iterator[None]:
    """Hold a file open as a running program does, with a row that is only in its log."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute(INSERT, ("late.cl.o", "", *packed(CODE)))
        connection.commit()
        yield


def test_a_log_that_is_pending_is_left_alone_until_something_is_written(tmp_path: Path, layer: MIOpenKernels) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): packed(CODE)}, wal=True)
    with pending(path):
        before = snapshot(tmp_path)
        assert any(name.endswith("-wal") for name in before)
        assert (problems(layer), findings(layer)) == (["unreadable"], [("unreadable", Severity.HARMLESS)])
        with pytest.raises(Unreachable, match="a log is pending"):
            layer.get(KEY)
        assert snapshot(tmp_path) == before
        usage = layer.store.usage(layer.roots()[0])
        assert (usage.files, usage.entries) == (len(os.listdir(path.parent)), None)
        layer.put(KEY, artifact(KEY))
        assert [entry.key for entry in layer.entries()] == [KEY, key_of(name="late.cl.o", args="")]


WRITER = f"""
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
number = 0
while True:
    number += 1
    time.sleep(0.002)
    connection.execute("{INSERT}", (f"new{{number}}.o", "", bytes(1), "", 0))
    if number == 3:
        print("begun", flush=True)
"""


@pytest.mark.parametrize("wal", [True, False])
def test_a_database_that_a_program_writes_all_the_time_is_read_and_cleared(tmp_path: Path, wal: bool) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): packed(CODE)}, wal=wal)
    layer = MIOpenKernels(replace(environment_of(tmp_path), lock_timeout=60.0))
    with subprocess.Popen((sys.executable, "-c", WRITER, str(path)), stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"begun\n"
            assert KEY in {entry.key for entry in layer.entries()}
            outcome = layer.clear(layer.plan_clear())
            assert outcome.removed >= 4
            assert KEY not in {entry.key for entry in layer.entries()}
            assert program.poll() is None
        finally:
            program.kill()


def test_a_clear_beside_a_running_program_deletes_rows_and_never_the_file(tmp_path: Path, layer: MIOpenKernels) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): packed(CODE)}, wal=True)
    inode = path.stat().st_ino
    with pending(path):
        recover([layer])
        outcome = layer.clear(layer.plan_clear())
    assert (outcome.removed, outcome.skipped, outcome.failed) == (2, (), ())
    assert (path.stat().st_ino, stored(path)) == (inode, [])


def test_a_kernel_stored_again_since_the_plan_is_kept(tmp_path: Path, layer: MIOpenKernels) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): packed(CODE)})
    plan = layer.plan_clear()
    store(path, {("new.s.o", ""): packed(CODE), (NAME, ARGS): packed(CODE)})
    outcome = layer.clear(plan)
    assert (outcome.removed, [note.because for note in outcome.skipped]) == (0, ["changed since it was planned"])
    assert len(stored(path)) == 2


def test_a_purge_of_user_layers_leaves_the_rest(tmp_path: Path) -> None:
    home = tmp_path / "home"
    fill(home)
    system = store(tmp_path / "rocm" / "share" / "miopen" / "db" / "gfx90a.kdb", {(NAME, ARGS): packed(CODE)})
    system.with_name("gfx90a6e.HIP.fdb.txt").write_text("k=S:1,0,A\n")
    (home / ".config" / "miopen").mkdir(parents=True)
    (home / ".config" / "miopen" / "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt").write_text("k=S:1,0,A\n")
    (home / ".cache" / "miopen" / "notes.ukdb").write_text("not MIOpen's")
    before = {**snapshot(tmp_path / "rocm"), **snapshot(home / ".config")}
    environment = environment_of(home, MIOPEN_SYSTEM_DB_PATH=str(system.parent))
    classes = (MIOpenKernels, MIOpenSystemKernels, MIOpenTuning, MIOpenSystemTuning)
    for layer in (made(environment) for made in classes):
        if layer.about.scope.value == "user" and not layer.about.precious:
            outcome = layer.clear(layer.plan_clear())
            assert (outcome.removed, outcome.failed) == (4, ())
    assert {**snapshot(tmp_path / "rocm"), **snapshot(home / ".config")} == before
    assert list(MIOpenKernels(environment).entries()) == []
    assert (home / ".cache" / "miopen" / "notes.ukdb").read_text() == "not MIOpen's"
