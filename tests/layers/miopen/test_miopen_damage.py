"""MIOpen's kernel databases: what MIOpen accepts and rejects, and which database answers."""

from __future__ import annotations

import bz2
import os
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.layers import got
from support.miopen_kernels import (
    ARGS,
    CODE,
    COLUMNS,
    KEY,
    NAME,
    TABLE_2_3,
    VERSION,
    artifact,
    environment_of,
    findings,
    key_of,
    packed,
    problems,
    require_read_only,
    spoil,
    store,
    stored,
    user_file,
)

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import Damaged, EntryExists, Refused
from cachectl.layers.base.facts import Artifact, Entry, Housekeeping, Problem, Root, Severity
from cachectl.layers.base.selection import Selection
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.kernel_db import kernel_key, split_kernel_key
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.system import MIOpenSystemKernels


@pytest.fixture
def layer(tmp_path: Path) -> MIOpenKernels:
    return MIOpenKernels(environment_of(tmp_path))


def test_system_kernels_are_read_and_refuse_the_rest(tmp_path: Path) -> None:
    path = store(tmp_path / "db" / "gfx90a.kdb", {(NAME, ARGS): packed(CODE)})
    layer = MIOpenSystemKernels(environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db")))
    before = snapshot(tmp_path, times=True)
    (entry,) = layer.entries()
    assert (entry.key, entry.device, entry.versions) == (key_of("gfx90a.kdb"), "gfx90a", {})
    read = got(layer, entry.key)
    assert read.data == CODE
    require_read_only(layer, artifact(entry.key, layer="miopen-system"), "miopen")
    assert snapshot(tmp_path, times=True) == before
    assert os.listdir(path.parent) == ["gfx90a.kdb"]


GOOD = packed(CODE)
BLOB, MD5, SIZE = GOOD
HALVES = bz2.compress(CODE[:100]) + bz2.compress(CODE[100:])
# What MIOpen 3.3.0's own ``KernDb``, compiled as a program, said to each variant.
ACCEPTED = {
    "level 1": (bz2.compress(CODE, 1), MD5, SIZE),
    "plain": (CODE, MD5, 0),
    "a size as text": (BLOB, MD5, str(SIZE)),
    "a size too large": (BLOB, MD5, SIZE + 7),
    "bytes after the stream": (BLOB + b"junk", MD5, SIZE),
    "the md5 of the first stream": (HALVES, packed(CODE[:100])[1], 100),
    "an md5 in a blob": (BLOB, MD5.encode(), SIZE),
    "a text for a blob": ("plain", packed(b"plain")[1], 0),
}
REJECTED = {
    "upper-case md5": (BLOB, MD5.upper(), SIZE),
    "bad md5": (BLOB, "0" * 32, SIZE),
    "more after the md5": (BLOB, f"{MD5} ", SIZE),
    "size too small": (BLOB, MD5, SIZE - 1),
    "a text without a number": (BLOB, MD5, "unknown"),
    "no bz2": (CODE, MD5, SIZE),
    "joined streams": (HALVES, MD5, SIZE),
    "cut short": (BLOB[:-10], MD5, SIZE),
    "empty": (b"", packed(b"")[1], 0),
    "a bomb": (bz2.compress(bytes(50_000_000)), MD5, SIZE),
}


@pytest.mark.parametrize("values", ACCEPTED.values(), ids=ACCEPTED)
def test_rows_that_miopen_accepts_are_read_and_put_as_it_stores_them(
    tmp_path: Path, values: tuple[object, ...]
) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): values})
    layer = MIOpenKernels(environment_of(tmp_path))
    read = got(layer, KEY)
    assert (problems(layer), findings(layer)) == ([], [])
    assert layer.clear(layer.plan_clear()).removed == 1
    layer.put(KEY, read)
    assert stored(path) == [(NAME, ARGS, *kernel_db.encode(read.data))]


@pytest.mark.parametrize("values", REJECTED.values(), ids=REJECTED)
def test_rows_that_miopen_rejects_are_damaged(tmp_path: Path, layer: MIOpenKernels, values: tuple[object, ...]) -> None:
    store(user_file(tmp_path), {(NAME, ARGS): values, ("good.s.o", ""): GOOD})
    with pytest.raises(Damaged):
        layer.get(KEY)
    assert problems(layer) == []
    (finding,) = layer.store.verify(layer.roots()[0])
    assert (finding.key, finding.severity, finding.code) == (KEY, Severity.FAILS, "content")
    assert finding.fix == f"cachectl purge miopen --key '{KEY}'"
    # A damaged row is cleared, or replaced, like any other.
    with pytest.raises(EntryExists):
        layer.put(KEY, artifact(KEY))
    layer.put(KEY, artifact(KEY), replace=True)
    assert findings(layer) == []


NAMES = ("ns::name.cl.o", "ns", "a:b%3A.s.o", "::", ":", "100%.cl.o", "%25", "colon:", "plain.cl.o")


def test_kernels_with_colons_in_their_names_come_and_go(tmp_path: Path, layer: MIOpenKernels) -> None:
    keys = {kernel_key(name, args): (name, args) for name in NAMES for args in ("", ":x", "::", ARGS, "ns::name.cl.o")}
    assert len(keys) == len(NAMES) * 5
    assert {key: split_kernel_key(key) for key in keys} == keys
    odd = {(name, ARGS): kernel_db.encode(CODE + name.encode()) for name in NAMES}
    path = store(user_file(tmp_path), odd)
    before = stored(path)
    entries = {entry.detail["kernel_name"]: entry.key for entry in layer.entries()}
    assert entries["ns::name.cl.o"] == key_of(name="ns%3A%3Aname.cl.o")
    read = layer.get_many(list(entries.values()))
    artifacts = {name: one for name, key in entries.items() if isinstance(one := read[key], Artifact)}
    assert {name: one.data for name, one in artifacts.items()} == {name: CODE + name.encode() for name in NAMES}
    assert layer.clear(layer.plan_clear(Selection(key=entries["ns::name.cl.o"]))).removed == 1
    assert len(stored(path)) == len(NAMES) - 1
    layer.put(entries["ns::name.cl.o"], artifacts["ns::name.cl.o"])
    assert set(stored(path)) == set(before)
    assert layer.clear(layer.plan_clear()).removed == len(NAMES)
    whole = [one for name, one in artifacts.items() if name.endswith(".o")]
    assert layer.put_new(whole) == [True] * len(whole)
    # Keys of files in such a folder would mean another file.
    store(tmp_path / ".cache" / "miopen" / "3.3.0.a::b" / "gfx90a6e.ukdb", {(NAME, ARGS): GOOD})
    assert len(list(layer.entries())) == len(whole)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_file_in_the_place_of_a_database_is_named(tmp_path: Path, layer: MIOpenKernels, kind: str) -> None:
    """MIOpen throws at every lookup and every store. That of a package is the package's to fix."""
    (tmp_path / "db" / "gfx90a.kdb").mkdir(parents=True)
    system = MIOpenSystemKernels(environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db")))
    (finding,) = system.store.verify(system.roots()[0])
    assert (finding.code, finding.severity) == ("no-file", Severity.FAILS)
    assert "reinstall the package" in finding.fix
    path = user_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    (problem,) = (found for found in layer.store.scan(layer.roots()[0]) if isinstance(found, Problem))
    assert (problem.path, problem.code) == (path, "no-file")
    (finding,) = layer.store.verify(layer.roots()[0])
    assert (finding.key, finding.severity) == (f"{VERSION}/gfx90a6e.ukdb", Severity.FAILS)
    with pytest.raises(Refused, match="a folder"):
        layer.put(KEY, artifact(KEY))
    subprocess.run(finding.fix, shell=True, check=True)  # noqa: S602 - the command is what is tested
    layer.put(KEY, artifact(KEY))
    assert list(layer.store.verify(layer.roots()[0])) == []


def test_rows_that_break_statements_or_the_index_are_found(tmp_path: Path, layer: MIOpenKernels) -> None:
    path = store(user_file(tmp_path), {("it's.cl.o", ""): GOOD, (NAME, ARGS): GOOD})
    assert len(list(layer.entries())) == 2
    assert findings(layer) == [("quote", Severity.FAILS)]
    assert layer.clear(layer.plan_clear(Selection(key=key_of(name="it's.cl.o", args="")))).removed == 1
    assert findings(layer) == []
    spoil(path, f"DROP INDEX idx_kern_db; INSERT INTO kern_db({COLUMNS}) SELECT {COLUMNS} FROM kern_db")
    assert findings(layer) == [("duplicate", Severity.FAILS)]


def test_an_empty_database_is_housekeeping_and_a_locked_one_a_problem(tmp_path: Path) -> None:
    # A mere lookup makes MIOpen write such a file.
    path = store(user_file(tmp_path), {})
    layer = MIOpenKernels(replace(environment_of(tmp_path), lock_timeout=0.05))
    (found,) = layer.store.scan(layer.roots()[0])
    assert isinstance(found, Housekeeping)
    assert found.bytes == path.stat().st_size
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert (problems(layer), findings(layer)) == (["busy"], [("unreadable", Severity.HARMLESS)])


def test_unusable_files_are_problems(tmp_path: Path, layer: MIOpenKernels) -> None:
    folder = user_file(tmp_path).parent
    tables = {"gfx900_56": "CREATE TABLE other(x)", "gfx906_60": "CREATE TABLE kern_db(kernel_name, kernel_hash)"}
    for base, table in {**tables, "gfx90878": TABLE_2_3}.items():
        spoil(store(folder / f"{base}.ukdb", {}), f"DROP TABLE kern_db;{table}")
    (folder / "gfx90a6e.ukdb").write_bytes(b"garbage" * 1000)
    store(folder / "gfx1030_36.ukdb", {(f"k{n}.s.o", ""): (os.urandom(5000), "0", 0) for n in range(9)})
    os.truncate(folder / "gfx1030_36.ukdb", 20_000)
    found = [thing for thing in layer.store.scan(layer.roots()[0]) if isinstance(thing, Problem)]
    codes = {problem.path.stem: problem.code for problem in found}
    assert codes == {**dict.fromkeys(tables, "unreadable"), **dict.fromkeys(("gfx90a6e", "gfx1030_36"), "sqlite")}
    judged = {Path(finding.key or "").stem: finding for finding in layer.store.verify(layer.roots()[0])}
    assert {name: (finding.code, finding.thing is not None) for name, finding in judged.items()} == {
        **dict.fromkeys((*tables, "gfx90878"), ("foreign", False)),
        **dict.fromkeys(("gfx90a6e", "gfx1030_36"), ("damaged", True)),
    }
    with pytest.raises(Damaged):
        layer.get(KEY)


def test_system_files_are_judged_by_their_header(tmp_path: Path) -> None:
    store(tmp_path / "db" / "gfx90a.kdb", {(NAME, ARGS): GOOD}, wal=True)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 333916279\n"
    (tmp_path / "db" / "gfx906.kdb").write_text(pointer)
    spoil(tmp_path / "db" / "gfx900.kdb", "CREATE TABLE other(x)")
    system = MIOpenSystemKernels(environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db")))
    assert sorted(findings(system)) == [
        ("foreign", Severity.HARMLESS),
        ("too-small", Severity.RECOMPILES),
        ("wal", Severity.FAILS),
    ]
    (wal,) = (finding for finding in system.store.verify(system.roots()[0]) if finding.code == "wal")
    assert "journal_mode=delete" in wal.fix
    assert [entry.key for entry in system.entries()] == [key_of("gfx90a.kdb")]
    assert sorted(os.listdir(tmp_path / "db")) == ["gfx900.kdb", "gfx906.kdb", "gfx90a.kdb"]


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


def test_a_folder_that_cannot_be_read_is_one_problem(tmp_path: Path) -> None:
    """It is read as databases and as object files."""
    root = tmp_path / ".cache" / "miopen"
    root.parent.mkdir()
    root.symlink_to(root)
    assert problems(MIOpenKernels(environment_of(tmp_path))) == ["unreadable"]
