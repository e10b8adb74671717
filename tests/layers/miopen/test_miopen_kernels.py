"""MIOpen's kernels: both generations, both tiers, on databases built here by MIOpen's own statements."""

from __future__ import annotations

import bz2
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachectl.layers.base.conformance import LayerConformance, snapshot
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Refused
from cachectl.layers.base.facts import Ability, Artifact, Entry, Housekeeping, Problem, Root, Severity
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import Selection
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels, lookup
from cachectl.layers.miopen.system_tuning import MIOpenSystemTuning
from cachectl.layers.miopen.tuning import MIOpenTuning
from cachectl.layers.stores import database
from cachectl.layers.stores.rows import RowFile

TABLE = (
    "CREATE TABLE IF NOT EXISTS `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,"
    "`uncompressed_size` INT NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args);"
)
TABLE_2_3 = (
    "CREATE TABLE `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL);"
)
NAME = "MIOpenConvUni.cl.o"
ARGS = " -DMLO_HW_WAVE_SZ=64 -mcpu=gfx90a"
CODE = b"\x7fELF" + b"some code that packs well " * 400
VERSION = "3.3.0.a85ca8a54"


def environment_of(home: Path, **variables: str) -> Environment:
    return Environment({"HOME": str(home), **variables}, home=home, cwd=home, temporary=home / "tmp")


def packed(code: bytes) -> tuple[bytes, str, int]:
    return bz2.compress(code, 9), hashlib.md5(code).hexdigest(), len(code)  # noqa: S324 - MIOpen's choice


def store(path: Path, rows: Mapping[tuple[str, str], tuple[object, ...]], *, wal: bool = False) -> Path:
    """Write rows as MIOpen does, given as (name, args) and (blob, hash, size)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        if wal:
            connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(TABLE)
        statement = (
            "INSERT OR REPLACE INTO kern_db(kernel_name, kernel_args, kernel_blob, kernel_hash, uncompressed_size)"
        )
        for key, values in rows.items():
            connection.execute(statement + " VALUES(?, ?, ?, ?, ?)", (*key, *values))
        connection.commit()
    return path


def stored(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        columns = "kernel_name, kernel_args, kernel_blob, kernel_hash, uncompressed_size"
        return connection.execute(f"SELECT {columns} FROM kern_db ORDER BY id").fetchall()


def user_file(home: Path, base: str = "gfx90a6e", version: str = VERSION) -> Path:
    return home / ".cache" / "miopen" / version / f"{base}.ukdb"


def object_file(home: Path, version: str = "2.2.1") -> Path:
    path = home / ".cache" / "miopen" / version / "0123456789abcdef0123456789abcdef" / "MIOpenPooling.cl.o"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(CODE)
    return path


def fill(home: Path) -> None:
    """Make one cache of each generation."""
    other = ("Conv_Winograd_v21_1_3.s.o", " -mcpu=gfx90a")
    store(
        user_file(home), {(NAME, ARGS): packed(CODE), other: (b"\x7fELF raw", packed(b"\x7fELF raw")[1], 0)}, wal=True
    )
    old = user_file(home, "gfx906_60", "2.3.0")
    old.parent.mkdir(parents=True)
    with closing(sqlite3.connect(old)) as connection:
        connection.executescript(TABLE_2_3)
        connection.execute(
            "INSERT INTO kern_db(kernel_name, kernel_args, kernel_blob) VALUES(?, ?, ?)", (NAME, ARGS, CODE)
        )
        connection.commit()
    object_file(home)


def artifact(key: str, data: bytes = CODE, layer: str = "miopen", form: str = "miopen-kernel/1") -> Artifact:
    return Artifact(layer, key, form, data)


def key_of(file: str, name: str = NAME, args: str = ARGS) -> str:
    return f"{file}::{name}::{args}"


KEY = key_of(f"{VERSION}/gfx90a6e.ukdb")


def problems(layer: Layer) -> list[str]:
    return [found.code for root in layer.roots() for found in layer.scan(root) if isinstance(found, Problem)]


def findings(layer: Layer) -> list[tuple[str, Severity]]:
    return [(finding.code, finding.severity) for root in layer.roots() for finding in layer.verify(root)]


class TestUser(LayerConformance):
    """The shipped suite over user kernels of both generations."""

    def make(self, environment: Environment) -> Layer:
        """Make it."""
        return MIOpenKernels(environment)

    def seed(self, environment: Environment) -> None:
        """Fill it."""
        fill(environment.home)


class TestSystem(LayerConformance):
    """The shipped suite over system kernels."""

    def environment(self, home: Path) -> Environment:
        """Keep the system's databases in the home."""
        return environment_of(home, MIOPEN_SYSTEM_DB_PATH=str(home / "db"))

    def make(self, environment: Environment) -> Layer:
        """Make it."""
        return MIOpenSystemKernels(environment)

    def seed(self, environment: Environment) -> None:
        """Fill it."""
        rows = {(NAME, ARGS): packed(CODE), ("other.s.o", ARGS): packed(CODE)}
        store(environment.home / "db" / "gfx90a.kdb", rows)


def test_both_generations_are_listed(tmp_path: Path) -> None:
    fill(tmp_path)
    entries = {entry.key: entry for entry in MIOpenKernels(environment_of(tmp_path)).entries()}
    assert set(entries) == {
        KEY,
        f"{VERSION}/gfx90a6e.ukdb::Conv_Winograd_v21_1_3.s.o:: -mcpu=gfx90a",
        key_of("2.3.0/gfx906_60.ukdb"),
        "2.2.1/0123456789abcdef0123456789abcdef/MIOpenPooling.cl.o",
    }
    new = entries[KEY]
    assert (new.bytes, new.files, new.device) == (len(bz2.compress(CODE, 9)), 0, "gfx90a")
    assert new.kernels == ("MIOpenConvUni.cl", "MIOpenConvUni")
    assert new.versions == {"miopen": VERSION}
    assert new.written_before == user_file(tmp_path).stat().st_mtime
    assert (new.stale, new.modified) == (None, None)
    old = entries[key_of("2.3.0/gfx906_60.ukdb")]
    assert (old.bytes, old.stale) == (len(CODE), True)
    assert old.stale_because == f"a newer MIOpen ({VERSION}) has its own folder"
    oldest = entries["2.2.1/0123456789abcdef0123456789abcdef/MIOpenPooling.cl.o"]
    assert (oldest.bytes, oldest.files, oldest.stale) == (len(CODE), 1, True)
    assert oldest.kernels == ("MIOpenPooling.cl", "MIOpenPooling")


def test_what_lies_on_disk_is_what_is_counted(tmp_path: Path) -> None:
    fill(tmp_path)
    layer = MIOpenKernels(environment_of(tmp_path))
    census = layer.census(layer.roots()[0])
    files = [path for path in (tmp_path / ".cache").rglob("*") if path.is_file()]
    assert (census.files, census.bytes) == (len(files), sum(path.stat().st_size for path in files))
    assert (census.entries, census.stale_entries, census.problems) == (4, 2, ())


def test_kernels_are_selected_with_and_without_the_ending_of_their_source(tmp_path: Path) -> None:
    fill(tmp_path)
    layer = MIOpenKernels(environment_of(tmp_path))
    for pattern in ("MIOpenConvUni", "MIOpenConvUni.cl", "*ConvUni*"):
        assert {entry.kernels for entry in layer.entries(Selection(kernel=pattern))} == {
            ("MIOpenConvUni.cl", "MIOpenConvUni")
        }


@pytest.mark.parametrize("file", [f"{VERSION}/gfx90a6e.ukdb", "2.3.0/gfx906_60.ukdb"])
def test_get_gives_the_uncompressed_kernel(tmp_path: Path, file: str) -> None:
    fill(tmp_path)
    got = MIOpenKernels(environment_of(tmp_path)).get(key_of(file))
    assert got is not None
    assert (got.form, got.data) == ("miopen-kernel/1", CODE)
    assert got.detail["kernel_name"] == NAME
    assert got.detail["kernel_args"] == ARGS
    assert got.detail["md5"] == packed(CODE)[1]


def test_arguments_are_byte_exact(tmp_path: Path) -> None:
    fill(tmp_path)
    layer = MIOpenKernels(environment_of(tmp_path))
    assert layer.get(key_of(f"{VERSION}/gfx90a6e.ukdb", args=ARGS.strip())) is None
    assert layer.get(key_of(f"{VERSION}/gfx90a6e.ukdb", args=ARGS.upper())) is None


@pytest.mark.parametrize("code", [CODE, os.urandom(4096), b"abc"], ids=["packs", "does not pack", "three bytes"])
def test_put_writes_what_miopen_would_have_written(tmp_path: Path, code: bytes) -> None:
    layer = MIOpenKernels(environment_of(tmp_path))
    layer.put(KEY, artifact(KEY, code))
    squeezed = bz2.compress(code, 9)
    plain = len(squeezed) >= len(code)
    digest = hashlib.md5(code).hexdigest()  # noqa: S324 - MIOpen's choice
    path = user_file(tmp_path)
    assert stored(path) == [(NAME, ARGS, code if plain else squeezed, digest, 0 if plain else len(code))]
    assert os.listdir(path.parent) == ["gfx90a6e.ukdb"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA index_info(idx_kern_db)").fetchall() != []
    assert path.read_bytes()[18:20] == b"\x01\x01"
    got = layer.get(KEY)
    assert got is not None
    assert got.data == code
    assert findings(layer) == []


def test_put_into_the_folder_of_2_3_stores_as_that_did(tmp_path: Path) -> None:
    fill(tmp_path)
    layer = MIOpenKernels(environment_of(tmp_path))
    for base in ("gfx906_60", "gfx900_56"):
        key = key_of(f"2.3.0/{base}.ukdb", "new.cl.o", "")
        layer.put(key, artifact(key))
        with closing(sqlite3.connect(user_file(tmp_path, base, "2.3.0"))) as connection:
            columns = [row[1] for row in connection.execute("PRAGMA table_info(kern_db)")]
            assert columns == ["id", "kernel_name", "kernel_args", "kernel_blob"]
            query = "SELECT kernel_blob FROM kern_db WHERE kernel_name = 'new.cl.o'"
            assert connection.execute(query).fetchall() == [(CODE,)]


def test_put_refuses_a_file_of_another_generation_than_its_folder(tmp_path: Path) -> None:
    path = store(user_file(tmp_path), {})
    spoil(path, "DROP TABLE kern_db;" + TABLE_2_3)
    with pytest.raises(Damaged, match="columns of another MIOpen"):
        MIOpenKernels(environment_of(tmp_path)).put(KEY, artifact(KEY))


def test_put_into_a_wal_file_leaves_its_rows_and_its_mode(tmp_path: Path) -> None:
    fill(tmp_path)
    path = user_file(tmp_path)
    before = stored(path)
    key = key_of(f"{VERSION}/gfx90a6e.ukdb", "new.s.o", "")
    MIOpenKernels(environment_of(tmp_path)).put(key, artifact(key))
    assert stored(path) == [*before, ("new.s.o", "", *packed(CODE))]
    assert path.read_bytes()[18:20] == b"\x02\x02"
    assert os.listdir(path.parent) == ["gfx90a6e.ukdb"]


def test_equal_bytes_are_not_put_again_however_they_are_packed(tmp_path: Path) -> None:
    store(user_file(tmp_path), {(NAME, ARGS): (bz2.compress(CODE, 1), packed(CODE)[1], len(CODE))})
    layer = MIOpenKernels(environment_of(tmp_path))
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
        (key_of(f"{VERSION}/gfx90a6e.ukdb", args=" -DX='a'"), CODE, "a quote"),
        (key_of(f"{VERSION}/gfx90a6e.ukdb", name="it's.cl.o"), CODE, "a quote"),
        (key_of(f"{VERSION}/gfx90a6e.ukdb", name="kernel.cl"), CODE, "does not end in .o"),
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


def test_put_does_not_write_through_links(tmp_path: Path) -> None:
    elsewhere = store(tmp_path / "elsewhere.ukdb", {})
    path = user_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    (path.parent.parent / "3.4.0").symlink_to(path.parent)
    layer = MIOpenKernels(environment_of(tmp_path))
    assert set(problems(layer)) == {"link"}
    for key in (KEY, key_of("3.4.0/gfx1030_36.ukdb")):
        assert layer.get(key) is None
        with pytest.raises(Refused, match="link"):
            layer.put(key, artifact(key))
    assert stored(elsewhere) == []


def test_an_old_object_file_comes_and_goes_as_it_stands(tmp_path: Path) -> None:
    path = object_file(tmp_path)
    layer = MIOpenKernels(environment_of(tmp_path))
    key = "2.2.1/0123456789abcdef0123456789abcdef/MIOpenPooling.cl.o"
    got = layer.get(key)
    assert got is not None
    assert (got.form, got.data) == ("miopen-object/1", CODE)
    assert layer.clear(layer.plan_clear()).removed == 1
    assert not path.exists()
    layer.put(key, got)
    assert path.read_bytes() == CODE
    with pytest.raises(LayerError, match="no key of an object file"):
        layer.put(KEY, replace(got, key=KEY))


def test_a_log_that_is_pending_is_read_and_left_alone(tmp_path: Path) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): packed(CODE)}, wal=True)
    with pending(path):
        before = snapshot(tmp_path)
        assert any(name.endswith("-wal") for name in before)
        layer = MIOpenKernels(environment_of(tmp_path))
        keys = [entry.key for entry in layer.entries()]
        assert keys == [KEY, key_of(f"{VERSION}/gfx90a6e.ukdb", "late.cl.o", "")]
        assert layer.get(keys[1]) is not None
        assert findings(layer) == []
        assert snapshot(tmp_path) == before
        census = layer.census(layer.roots()[0])
        assert census.files == len(os.listdir(path.parent))


@contextmanager
def pending(path: Path) -> Iterator[None]:
    """Hold a file open as a running program does, with a row that is only in its log."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint=0")
        statement = "INSERT INTO kern_db(kernel_name, kernel_args, kernel_blob, kernel_hash, uncompressed_size)"
        connection.execute(statement + " VALUES('late.cl.o', '', ?, ?, ?)", packed(CODE))
        connection.commit()
        yield


def test_a_clear_beside_a_running_program_deletes_rows_and_never_the_file(tmp_path: Path) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): packed(CODE)}, wal=True)
    inode = path.stat().st_ino
    layer = MIOpenKernels(environment_of(tmp_path))
    with pending(path):
        outcome = layer.clear(layer.plan_clear())
    assert (outcome.removed, outcome.skipped, outcome.failed) == (2, (), ())
    assert path.stat().st_ino == inode
    assert stored(path) == []


def test_many_kernels_are_read_and_placed_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a database with a pending log copies it."""
    kernels = {(f"k{number}.cl.o", ARGS): packed(CODE + bytes([number])) for number in range(50)}
    store(user_file(tmp_path / "one"), kernels)
    layer = MIOpenKernels(environment_of(tmp_path / "one"))
    keys = [entry.key for entry in layer.entries()]
    connected, opened = database._connected, 0

    def counted(*arguments: Any) -> Any:  # noqa: ANN401 - as what it stands in for
        nonlocal opened
        opened += 1
        return connected(*arguments)

    monkeypatch.setattr(database, "_connected", counted)
    read = layer.get_many(keys)
    assert opened <= 2
    artifacts = [one for one in read.values() if isinstance(one, Artifact)]
    assert [one.data for one in artifacts] == [CODE + bytes([number]) for number in range(50)]
    other = MIOpenKernels(environment_of(tmp_path / "two"))
    different = replace(artifacts[7], data=b"\x7fELF another", detail={})
    spoilt = replace(artifacts[8], detail={"md5": "0" * 32})
    opened = 0
    done = other.put_new([*artifacts[:7], different, spoilt, *artifacts[9:]])
    assert opened <= 12
    assert isinstance(done.pop(8), Damaged)
    assert done == [True] * 49
    again = other.put_new(artifacts)
    assert isinstance(again[7], EntryExists)
    assert [one for number, one in enumerate(again) if number != 7] == [False] * 7 + [True] + [False] * 41
    assert other.get(keys[7]) != artifacts[7]


def test_the_name_of_a_database_is_no_key_of_a_nameless_kernel(tmp_path: Path) -> None:
    store(user_file(tmp_path), {("", ""): packed(CODE), (NAME, ARGS): packed(CODE)})
    layer = MIOpenKernels(environment_of(tmp_path))
    file = KEY.partition("::")[0]
    assert layer.get(file) is None
    assert set(layer.get_many([file, f"{file}::::", KEY])) == {f"{file}::::", KEY}


def test_clear_gives_space_back(tmp_path: Path) -> None:
    rows = {(f"k{number}.s.o", ""): (os.urandom(50_000), "0" * 32, 0) for number in range(20)}
    path = store(user_file(tmp_path), rows, wal=True)
    before = path.stat().st_size
    layer = MIOpenKernels(environment_of(tmp_path))
    plan = layer.plan_clear()
    assert plan.bytes == 20 * 50_000
    outcome = layer.clear(plan)
    assert outcome.bytes_freed == before - path.stat().st_size > 900_000
    assert os.listdir(path.parent) == ["gfx90a6e.ukdb"]


def test_a_kernel_stored_again_since_the_plan_is_kept(tmp_path: Path) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): packed(CODE)})
    layer = MIOpenKernels(environment_of(tmp_path))
    plan = layer.plan_clear()
    store(path, {("new.s.o", ""): packed(CODE), (NAME, ARGS): packed(CODE)})
    outcome = layer.clear(plan)
    assert outcome.removed == 0
    assert [note.because for note in outcome.skipped] == ["changed since it was planned"]
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
        if layer.scope.value == "user" and not layer.precious:
            outcome = layer.clear(layer.plan_clear())
            assert (outcome.removed, outcome.failed) == (4, ())
    assert {**snapshot(tmp_path / "rocm"), **snapshot(home / ".config")} == before
    assert list(MIOpenKernels(environment).entries()) == []
    assert (home / ".cache" / "miopen" / "notes.ukdb").read_text() == "not MIOpen's"


def test_system_kernels_are_read_and_refuse_the_rest(tmp_path: Path) -> None:
    path = store(tmp_path / "db" / "gfx90a.kdb", {(NAME, ARGS): packed(CODE)})
    layer = MIOpenSystemKernels(environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db")))
    before = snapshot(tmp_path, times=True)
    (entry,) = layer.entries()
    assert (entry.key, entry.device, entry.versions) == (key_of("gfx90a.kdb"), "gfx90a", {})
    got = layer.get(entry.key)
    assert got is not None
    assert got.data == CODE
    abilities = layer.abilities()
    for ability in (Ability.PUT, Ability.CLEAR, Ability.RELOCATE):
        assert abilities[ability] is not None
    with pytest.raises(Refused, match="put into the layer miopen"):
        layer.put(entry.key, artifact(entry.key, layer="miopen-system"))
    with pytest.raises(Refused, match="package manager"):
        layer.plan_clear()
    with pytest.raises(Refused, match="MIOPEN_SYSTEM_DB_PATH"):
        layer.relocate(tmp_path)
    assert snapshot(tmp_path, times=True) == before
    assert os.listdir(path.parent) == ["gfx90a.kdb"]


def tiers(tmp_path: Path) -> tuple[MIOpenKernels, MIOpenSystemKernels]:
    environment = environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db"))
    return MIOpenKernels(environment), MIOpenSystemKernels(environment)


def test_the_lookup_asks_user_then_device_then_architecture(tmp_path: Path) -> None:
    user, system = tiers(tmp_path)

    def found() -> str | None:
        answer = lookup(user, system, "gfx90a6e", NAME, ARGS)
        return None if answer is None else answer.data.decode()

    assert found() is None
    arch = store(tmp_path / "db" / "gfx90a.kdb", {(NAME, ARGS): packed(b"architecture")})
    assert found() == "architecture"
    store(arch.with_name("gfx90a6e.kdb"), {(NAME, ARGS): packed(b"device")})
    assert found() == "device"
    store(user_file(tmp_path), {(NAME, ARGS): packed(b"user")})
    assert found() == "user"
    store(user_file(tmp_path, "gfx90a68"), {(NAME, ARGS): packed(b"another device")})
    assert found() == "user"


def test_the_architecture_is_asked_only_where_the_device_has_no_file(tmp_path: Path) -> None:
    user, system = tiers(tmp_path)
    store(tmp_path / "db" / "gfx90a.kdb", {(NAME, ARGS): packed(CODE)})
    store(tmp_path / "db" / "gfx90a6e.kdb", {})
    assert lookup(user, system, "gfx90a6e", NAME, ARGS) is None


def test_a_damaged_user_row_hides_a_good_system_row(tmp_path: Path) -> None:
    user, system = tiers(tmp_path)
    store(tmp_path / "db" / "gfx90a.kdb", {(NAME, ARGS): packed(CODE)})
    store(user_file(tmp_path), {(NAME, ARGS): (bz2.compress(CODE), "0" * 32, len(CODE))})
    with pytest.raises(Damaged, match="md5"):
        lookup(user, system, "gfx90a6e", NAME, ARGS)


GOOD = packed(CODE)
# What MIOpen itself said to each variant (12 of them were put to it).
ACCEPTED = {
    "level 1": (bz2.compress(CODE, 1), GOOD[1], GOOD[2]),
    "plain": (CODE, GOOD[1], 0),
    "size as text": (GOOD[0], GOOD[1], str(GOOD[2])),
}
REJECTED = {
    "upper-case md5": (GOOD[0], GOOD[1].upper(), GOOD[2]),
    "bad md5": (GOOD[0], "0" * 32, GOOD[2]),
    "size too small": (GOOD[0], GOOD[1], GOOD[2] - 1),
    "no bz2": (CODE, GOOD[1], GOOD[2]),
    "joined streams": (bz2.compress(CODE[:100]) + bz2.compress(CODE[100:]), GOOD[1], GOOD[2]),
    "cut short": (GOOD[0][:-10], GOOD[1], GOOD[2]),
    "empty": (b"", packed(b"")[1], 0),
    "a bomb": (bz2.compress(bytes(50_000_000)), GOOD[1], GOOD[2]),
}


@pytest.mark.parametrize("values", ACCEPTED.values(), ids=ACCEPTED)
def test_what_miopen_accepts_is_read(tmp_path: Path, values: tuple[object, ...]) -> None:
    store(user_file(tmp_path), {(NAME, ARGS): values})
    layer = MIOpenKernels(environment_of(tmp_path))
    assert layer.get(KEY) is not None
    assert (problems(layer), findings(layer)) == ([], [])


@pytest.mark.parametrize("values", REJECTED.values(), ids=REJECTED)
def test_what_miopen_rejects_is_damaged(tmp_path: Path, values: tuple[object, ...]) -> None:
    store(user_file(tmp_path), {(NAME, ARGS): values, ("good.s.o", ""): GOOD})
    layer = MIOpenKernels(environment_of(tmp_path))
    with pytest.raises(Damaged):
        layer.get(KEY)
    assert problems(layer) == []
    (finding,) = layer.verify(layer.roots()[0])
    assert (finding.key, finding.severity, finding.code) == (KEY, Severity.FAILS, "content")
    assert finding.fix == f"cachectl purge miopen --key '{KEY}'"
    # A damaged row is cleared, or replaced, like any other.
    with pytest.raises(EntryExists):
        layer.put(KEY, artifact(KEY))
    layer.put(KEY, artifact(KEY), replace=True)
    assert findings(layer) == []


def test_a_quote_is_a_problem_of_its_row(tmp_path: Path) -> None:
    store(user_file(tmp_path), {("it's.cl.o", ""): GOOD, (NAME, ARGS): GOOD})
    layer = MIOpenKernels(environment_of(tmp_path))
    assert len(list(layer.entries())) == 2
    assert problems(layer) == ["quote"]
    assert findings(layer) == [("quote", Severity.FAILS)]
    key = key_of(f"{VERSION}/gfx90a6e.ukdb", "it's.cl.o", "")
    assert layer.clear(layer.plan_clear(Selection(key=key))).removed == 1
    assert findings(layer) == []


def spoil(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statement)


def test_unusable_files_are_problems(tmp_path: Path) -> None:
    folder = user_file(tmp_path).parent
    store(folder / "gfx900_56.ukdb", {})
    spoil(folder / "gfx900_56.ukdb", "DROP TABLE kern_db; CREATE TABLE other(x)")
    store(folder / "gfx906_60.ukdb", {})
    spoil(folder / "gfx906_60.ukdb", "DROP TABLE kern_db; CREATE TABLE kern_db(kernel_name, kernel_hash)")
    store(folder / "gfx90878.ukdb", {})
    spoil(folder / "gfx90878.ukdb", "DROP TABLE kern_db;" + TABLE_2_3)
    (folder / "gfx90a6e.ukdb").write_bytes(b"garbage" * 1000)
    store(folder / "gfx1030_36.ukdb", {(f"k{n}.s.o", ""): (os.urandom(5000), "0", 0) for n in range(9)})
    os.truncate(folder / "gfx1030_36.ukdb", 20_000)
    layer = MIOpenKernels(environment_of(tmp_path))
    found = [thing for thing in layer.scan(layer.roots()[0]) if isinstance(thing, Problem)]
    assert {(problem.path.name, problem.code) for problem in found} == {
        ("gfx900_56.ukdb", "sqlite"),
        ("gfx906_60.ukdb", "sqlite"),
        ("gfx90878.ukdb", "columns"),
        ("gfx90a6e.ukdb", "sqlite"),
        ("gfx1030_36.ukdb", "sqlite"),
    }
    assert {finding.severity for finding in layer.verify(layer.roots()[0])} == {Severity.FAILS}
    with pytest.raises(Damaged):
        layer.get(KEY)


def test_a_second_row_with_a_key_is_found(tmp_path: Path) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): GOOD})
    columns = "kernel_name, kernel_args, kernel_blob, kernel_hash, uncompressed_size"
    spoil(path, f"DROP INDEX idx_kern_db; INSERT INTO kern_db({columns}) SELECT {columns} FROM kern_db")
    assert findings(MIOpenKernels(environment_of(tmp_path))) == [("duplicate", Severity.FAILS)]


def test_system_files_are_judged_by_their_header(tmp_path: Path) -> None:
    store(tmp_path / "db" / "gfx90a.kdb", {(NAME, ARGS): GOOD}, wal=True)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 333916279\n"
    (tmp_path / "db" / "gfx906.kdb").write_text(pointer)
    spoil(tmp_path / "db" / "gfx900.kdb", "CREATE TABLE other(x)")
    user, system = tiers(tmp_path)
    assert sorted(problems(system)) == ["sqlite", "too-small", "wal"]
    assert sorted(findings(system)) == [
        ("damaged", Severity.FAILS),
        ("too-small", Severity.RECOMPILES),
        ("wal", Severity.FAILS),
    ]
    (wal,) = (finding for finding in system.verify(system.roots()[0]) if finding.code == "wal")
    assert "journal_mode=delete" in wal.fix
    assert [entry.key for entry in system.entries()] == [key_of("gfx90a.kdb")]
    # MIOpen takes the pointer for a missing file, and throws on a table that is missing.
    assert lookup(user, system, "gfx906_60", NAME, ARGS) is None
    with pytest.raises(Damaged):
        lookup(user, system, "gfx900_56", NAME, ARGS)
    assert sorted(os.listdir(tmp_path / "db")) == ["gfx900.kdb", "gfx906.kdb", "gfx90a.kdb"]


def test_a_locked_file_is_a_problem_and_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): GOOD})
    monkeypatch.setattr(RowFile.__init__, "__defaults__", (0.05,))
    layer = MIOpenKernels(environment_of(tmp_path))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert problems(layer) == ["unreadable"]
        assert findings(layer) == [("unreadable", Severity.HARMLESS)]


def test_empty_databases_are_housekeeping(tmp_path: Path) -> None:
    # A mere lookup makes MIOpen write such a file.
    path = store(user_file(tmp_path), {})
    layer = MIOpenKernels(environment_of(tmp_path))
    (found,) = layer.scan(layer.roots()[0])
    assert isinstance(found, Housekeeping)
    assert found.bytes == path.stat().st_size


def test_encoding_and_decoding_are_each_others_inverse() -> None:
    for code in (CODE, b"x", os.urandom(100)):
        assert kernel_db.decode(kernel_db.encode(code)) == code


def test_a_custom_folder_is_searched_with_and_without_version_folders(tmp_path: Path) -> None:
    custom = tmp_path / "custom"
    store(custom / "gfx90a6e.ukdb", {(NAME, ARGS): GOOD})
    store(custom / "3.5.2." / "gfx90a6e.ukdb", {(NAME, ARGS): GOOD})
    plain = custom / "0123456789abcdef0123456789abcdef" / "k.s.o"
    plain.parent.mkdir()
    plain.write_bytes(CODE)
    layer = MIOpenKernels(environment_of(tmp_path, MIOPEN_CUSTOM_CACHE_DIR=str(custom)))
    entries = list(layer.entries())
    assert {entry.key.split("::")[0] for entry in entries} == {
        "gfx90a6e.ukdb",
        "3.5.2./gfx90a6e.ukdb",
        "0123456789abcdef0123456789abcdef/k.s.o",
    }
    assert isinstance(entries[0], Entry)
    assert layer.clear(layer.plan_clear()).removed == 3


def test_roots_in_a_temporary_folder_show_their_owners_files_alone(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    mine = store(tmp_path / "tmp" / "gfx906_60.ukdb", {(NAME, ARGS): GOOD})
    theirs = store(tmp_path / "tmp" / "gfx90a6e.ukdb", {(NAME, ARGS): GOOD})
    if os.getuid() == 0:
        os.chown(theirs, 12345, 12345)
    else:
        theirs.unlink()
    layer = MIOpenKernels(environment)
    roots: dict[Path, Root] = {root.path: root for root in layer.roots()}
    assert roots[tmp_path / "tmp"].role == "temporary"
    assert [entry.key for entry in layer.entries()] == [key_of("gfx906_60.ukdb")]
    assert layer.get(key_of("gfx90a6e.ukdb")) is None
    assert layer.clear(layer.plan_clear()).removed == 1
    assert stored(mine) == []
