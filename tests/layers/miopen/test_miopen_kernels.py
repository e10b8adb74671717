"""MIOpen's kernel databases: entries, how they are read, placed and cleared, and what MIOpen accepts and rejects."""

import bz2
import os
import subprocess
from pathlib import Path

import pytest
from support.layers import (
    clear,
    clear_damaged,
    environment_of,
    findings,
    got,
    keys_of,
    listed,
    on_disk,
    problems,
    python,
    root_of,
    running,
    select,
    sql,
    verified,
)
from support.miopen_kernels import (
    ARGS,
    CODE,
    COLUMNS,
    FIND,
    INSERT,
    KEY,
    NAME,
    TABLE_2_3,
    VERSION,
    artifact,
    key_of,
    packed,
    store,
    stored,
    stored_whole,
    user_file,
)
from support.products import OBJECT, OTHER, fill_tuning
from support.products import fill_kernels as fill

from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Refused
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.entry import Artifact, Usage
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.layer import Layer, put_many
from cachectl.layers.miopen import MIOpenKernels, MIOpenSystemKernels, MIOpenTuning, kernels
from cachectl.layers.miopen.kernels import encode, join_kernel_key, split_kernel_key
from cachectl.stack import Stack


@pytest.fixture
def layer(tmp_path: Path) -> MIOpenKernels:
    return MIOpenKernels(environment_of(tmp_path))


def test_both_generations_are_listed(tmp_path: Path, layer: MIOpenKernels) -> None:
    fill(tmp_path)
    entries = listed(layer)
    old = key_of("3.2.0.x/gfx906_60.ukdb")
    assert set(entries) == {KEY, key_of(f"{VERSION}/gfx90a6e.ukdb", *OTHER), old, OBJECT}
    new = entries[KEY]
    assert (new.bytes, new.files, new.details.device) == (len(packed(CODE)[0]), 0, "gfx90a")
    assert (new.stale, new.modified) == (None, None)
    assert (new.details.kernels, new.details.versions) == (("MIOpenConvUni.cl", "MIOpenConvUni"), {"miopen": VERSION})
    assert new.written_before == user_file(tmp_path).stat().st_mtime
    for key, files in ((old, 0), (OBJECT, 1)):
        entry = entries[key]
        assert (entry.length, entry.files, entry.stale) == (len(CODE), files, None)
    assert entries[OBJECT].details.kernels == ("MIOpenPooling.cl", "MIOpenPooling")
    read = got(layer, KEY)
    assert (read.form, read.data) == ("miopen-kernel/1", CODE)
    assert read.detail.items() >= {"kernel_name": NAME, "kernel_args": ARGS, "md5": packed(CODE)[1]}.items()
    old_form = got(layer, OBJECT)
    assert (old_form.form, old_form.data) == ("miopen-object/1", CODE)
    with pytest.raises(LayerError, match="form miopen-object/1"):
        layer.put(KEY, old_form._replace(key=KEY))
    assert clear(layer, key=OBJECT).removed == 1
    assert not (tmp_path / ".cache/miopen/2.2.1").exists(), "the empty folders above it stay"
    # Only with exactly these arguments.
    assert [layer.get(key_of(args=args)) for args in (ARGS.strip(), ARGS.upper())] == [None, None]


@pytest.mark.parametrize("wal", [None, True])
@pytest.mark.parametrize("code", [CODE, os.urandom(4096), b"abc"], ids=["packs", "does not pack", "three bytes"])
def test_put_writes_what_miopen_would_have_written(
    tmp_path: Path, layer: MIOpenKernels, code: bytes, wal: bool | None
) -> None:
    """And it keeps the rows and the mode of an existing file."""
    path = user_file(tmp_path)
    before = stored(store(path, {OTHER: packed(CODE)}, wal=True)) if wal else []
    layer.put(KEY, artifact(KEY, code))
    assert stored(path) == [*before, (NAME, ARGS, *packed(code))]
    assert os.listdir(path.parent) == ["gfx90a6e.ukdb"]
    assert select(path, "* FROM pragma_index_info('idx_kern_db')") != []
    assert path.read_bytes()[18:20] == (b"\x02\x02" if wal else b"\x01\x01")
    assert (got(layer, KEY).data, findings(layer)) == (code, [])


@pytest.mark.parametrize("args", [f" -D{'x' * (1 << 15)}", " -DA=1\n -DB=2", " -DA=\x1b"])
def test_arguments_may_be_long_or_have_control_characters(tmp_path: Path, layer: MIOpenKernels, args: str) -> None:
    (tmp_path / "tmp").mkdir()
    key = key_of(args=args)
    store(user_file(tmp_path), {(NAME, args): packed(CODE)})
    taken = got(layer, key)
    clear(layer)
    layer.put(key, taken)
    assert stored(user_file(tmp_path)) == [(NAME, args, *packed(CODE))]
    Stack(layer.environment).push(tmp_path / "gfx90a6e.kdb", layers=["miopen"])
    assert stored(tmp_path / "gfx90a6e.kdb") == [(NAME, args, *packed(CODE))]
    # The name of the file may have neither.
    with pytest.raises(LayerError, match="is not a key"):
        layer.put(key_of("3.3.0.\n/gfx90a6e.ukdb"), taken._replace(key=key_of("3.3.0.\n/gfx90a6e.ukdb")))


def test_nothing_is_read_or_written_through_a_link_for_a_versions_folder(tmp_path: Path, layer: MIOpenKernels) -> None:
    path = store(user_file(tmp_path), {})
    (path.parent.parent / "3.4.0").symlink_to(path.parent)
    key = key_of("3.4.0/gfx90a6e.ukdb")
    assert layer.get(key) is None
    with pytest.raises(Refused, match="link"):
        layer.put(key, artifact(key))
    assert stored(path) == []


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
    """Its rows are removed, never the file."""
    path = store(user_file(tmp_path), {(NAME, ARGS): packed(CODE)}, wal=wal)
    inode = path.stat().st_ino
    layer = MIOpenKernels(environment_of(tmp_path)._replace(lock_timeout=60.0))
    with running(*python(WRITER, path)) as program:
        assert KEY in listed(layer)
        assert clear(layer).removed >= 4
        assert KEY not in listed(layer)
        assert program.poll() is None
    assert path.stat().st_ino == inode


GOOD = packed(CODE)
BLOB, MD5, SIZE = GOOD
HALVES = bz2.compress(CODE[:100]) + bz2.compress(CODE[100:])
# What MIOpen 3.3.0's own ``KernDb``, compiled as a program, said to each variant.
ACCEPTED = {
    "level 1": (bz2.compress(CODE, 1), MD5, SIZE),
    "plain": (CODE, MD5, 0),
    "a size as text": (BLOB, MD5, str(SIZE)),
    "a size too large": (BLOB, MD5, SIZE + 7),
    "a real size": (BLOB, MD5, float(SIZE)),
    "a fractional size": (BLOB, MD5, SIZE + 0.5),
    "a negative size": (BLOB, MD5, -1),
    "a size beyond 32 bits": (BLOB, MD5, (1 << 32) + SIZE),
    "a real size beyond 64 bits": (BLOB, MD5, 1e300),
    "a text that begins with a size": (BLOB, MD5, f" {SIZE}.9 bytes"),
    "a size in a blob": (BLOB, MD5, str(SIZE).encode()),
    "less than one": (CODE, MD5, 0.9),
    "a text without a number": (CODE, MD5, "unknown"),
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
    "packed, with a text without a number": (BLOB, MD5, "unknown"),
    "a size of 32 bits that is 0": (BLOB, MD5, 1 << 32),
    "no bz2": (CODE, MD5, SIZE),
    "joined streams": (HALVES, MD5, SIZE),
    "cut short": (BLOB[:-10], MD5, SIZE),
    "a bomb": (bz2.compress(bytes(50_000_000)), MD5, SIZE),
}


@pytest.mark.parametrize("values", ACCEPTED.values(), ids=ACCEPTED)
def test_rows_that_miopen_accepts_are_read_and_put_alike(
    tmp_path: Path, layer: MIOpenKernels, values: tuple[object, ...]
) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): values})
    read, rows = got(layer, KEY), stored(path)
    assert (problems(layer), findings(layer)) == ([], [])
    # Equal bytes are not put again, however they are packed.
    layer.put(KEY, read)
    assert stored(path) == rows
    assert clear(layer).removed == 1
    layer.put(KEY, read)
    assert stored(path) == [(NAME, ARGS, *encode(read.data))]


@pytest.mark.parametrize("values", REJECTED.values(), ids=REJECTED)
def test_rows_that_miopen_rejects_are_damaged(tmp_path: Path, layer: MIOpenKernels, values: tuple[object, ...]) -> None:
    store(user_file(tmp_path), {(NAME, ARGS): values, ("good.s.o", ""): GOOD})
    with pytest.raises(Damaged):
        layer.get(KEY)
    assert problems(layer) == []
    (finding,) = verified(layer)
    assert (finding.key, finding.severity, finding.code) == (KEY, Severity.FAILS, "damaged")
    assert finding.fix == "cachectl purge --damaged miopen"
    # A damaged row is cleared, or replaced, like any other.
    with pytest.raises(EntryExists):
        layer.put(KEY, artifact(KEY))
    layer.put(KEY, artifact(KEY), replace=True)
    assert findings(layer) == []


def test_an_empty_kernel_is_a_miss(tmp_path: Path, layer: MIOpenKernels) -> None:
    store(user_file(tmp_path), {(NAME, ARGS): stored_whole(b"")})
    assert findings(layer) == [("damaged", Severity.HEALS)]


def test_a_kernel_that_is_too_large_to_read_is_not_damaged(
    tmp_path: Path, layer: MIOpenKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_LARGEST", len(CODE) - 1)
    store(user_file(tmp_path), {(NAME, ARGS): GOOD})
    assert [finding.code for finding in verified(layer)] == ["unreadable"]
    assert clear_damaged(layer).removed == 0
    assert keys_of(layer) == [KEY]


NAMES = ("ns::name.cl.o", "ns", "a:b%3A.s.o", "::", ":", "100%.cl.o", "%25", "colon:", "plain.cl.o")


def test_kernels_with_colons_in_their_names_come_and_go(tmp_path: Path, layer: MIOpenKernels) -> None:
    keys = {
        join_kernel_key((name, args)): (name, args)
        for name in NAMES
        for args in ("", ":x", "::", ARGS, "ns::name.cl.o")
    }
    assert len(keys) == len(NAMES) * 5
    assert {key: split_kernel_key(key) for key in keys} == keys
    codes = {name: CODE + name.encode() for name in NAMES if name.endswith(".o")}
    store(user_file(tmp_path), {(name, ARGS): encode(code) for name, code in codes.items()})
    artifacts = {key: got(layer, key) for key in keys_of(layer)}
    assert {artifact.detail["kernel_name"]: artifact.data for artifact in artifacts.values()} == codes
    assert clear(layer, key=key_of(name="ns%3A%3Aname.cl.o")).removed == 1
    assert clear(layer).removed == len(codes) - 1
    assert put_many(layer, list(artifacts.values())) == [True] * len(codes)
    # Keys of files in such a folder would be those of another file.
    store(tmp_path / ".cache/miopen/3.3.0.a::b/gfx90a6e.ukdb", {(NAME, ARGS): GOOD})
    assert keys_of(layer) == list(artifacts)


RECORD = Artifact("miopen-tuning", f"{FIND}::b", "miopen-record/1", b"b=S:1")


#: For each layer the file of a database, what is put into it, and the effect of an obstacle in its place.
FILES: dict[type[Layer], tuple[str, Artifact, Severity]] = {
    MIOpenKernels: (f".cache/miopen/{VERSION}/gfx90a6e.ukdb", artifact(KEY), Severity.FAILS),
    MIOpenTuning: (f".config/miopen/{FIND}", RECORD, Severity.RECOMPILES),
}


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
@pytest.mark.parametrize("made", FILES)
def test_what_stands_in_the_place_of_a_database_is_named_and_moved(
    tmp_path: Path, kind: str, made: type[Layer]
) -> None:
    """MIOpen throws, or finds and stores nothing. No link is followed."""
    file, put, severity = FILES[made]
    path, elsewhere = tmp_path / file, tmp_path / "elsewhere"
    path.parent.mkdir(parents=True)
    elsewhere.write_text("a=S:1\n")
    if kind == "link":
        path.symlink_to(elsewhere)
    else:
        path.mkdir() if kind == "folder" else os.mkfifo(path)
    layer, code = made(environment_of(tmp_path)), "link" if kind == "link" else "no-file"
    (finding,) = verified(layer)
    assert (finding.key, finding.code) == (str(path.relative_to(root_of(layer))), code)
    assert layer.get(put.key) is None
    with pytest.raises(Refused, match="a link, a folder"):
        layer.put(put.key, put)
    assert elsewhere.read_text() == "a=S:1\n"
    if kind != "link":
        assert finding.severity is severity
        subprocess.run(finding.fix, shell=True, check=True)  # noqa: S602 - the command is what is tested
        layer.put(put.key, put)
        assert verified(layer) == []


def test_rows_that_break_the_index_are_found(tmp_path: Path, layer: MIOpenKernels) -> None:
    path = store(user_file(tmp_path), {(NAME, ARGS): GOOD})
    sql(path, f"DROP INDEX idx_kern_db; INSERT INTO kern_db({COLUMNS}) SELECT {COLUMNS} FROM kern_db")
    assert findings(layer) == [("damaged", Severity.FAILS)]


def test_a_row_is_damaged_by_its_checksum_alone(tmp_path: Path, layer: MIOpenKernels) -> None:
    """A row is MIOpen's own, whatever it contains; one that no lookup can name is neither damaged nor put."""
    other = packed(b"not a format that is known")
    store(
        user_file(tmp_path, "gfx9061e"), {("a'b.o", ARGS): other, ("raw.o", ARGS): other, ("name", ARGS): packed(CODE)}
    )
    assert verified(layer) == []
    quoted = key_of(f"{VERSION}/gfx9061e.ukdb", "a'b.o")
    with pytest.raises(Damaged, match="a quote in"):
        layer.put(quoted, got(layer, quoted)._replace(data=CODE), replace=True)
    assert clear(layer, key=quoted).removed == 1


def test_an_empty_database_is_housekeeping(tmp_path: Path, layer: MIOpenKernels) -> None:
    # Even a lookup makes MIOpen write such a file.
    path = store(user_file(tmp_path), {})
    found, folder = layer.store.scan(layer.roots()[0])
    assert found == Usage(files=1, bytes=on_disk(path))
    assert folder == Usage(bytes=on_disk(path.parent))


def test_unusable_files_are_problems(tmp_path: Path, layer: MIOpenKernels) -> None:
    for base, table in (("gfx900_56", "CREATE TABLE other(x)"), ("gfx90878", TABLE_2_3)):
        sql(store(user_file(tmp_path, base), {}), f"DROP TABLE kern_db;{table}")
    user_file(tmp_path).write_bytes(b"garbage" * 1000)
    assert sorted(problems(layer)) == ["foreign", "sqlite"]
    assert layer.store.usage(layer.roots()[0]).unknown_files == 1
    judged = sorted((finding.code, finding.thing is not None) for finding in verified(layer))
    assert judged == [("columns", False), ("damaged", True), ("foreign", False)]
    with pytest.raises(Damaged):
        layer.get(KEY)


def test_system_files_are_judged_by_their_header(tmp_path: Path) -> None:
    store(tmp_path / "db/gfx90a.kdb", {(NAME, ARGS): GOOD}, wal=True)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 333916279\n"
    (tmp_path / "db/gfx906.kdb").write_text(pointer)
    sql(tmp_path / "db/gfx900.kdb", "CREATE TABLE other(x)")
    (tmp_path / "db/gfx908.kdb").mkdir()
    system = MIOpenSystemKernels(environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db")))
    assert sorted(findings(system)) == [
        ("columns", Severity.RISKS),
        ("no-file", Severity.FAILS),
        ("too-small", Severity.HEALS),
        ("wal", Severity.FAILS),
    ]
    fixes = {finding.code: finding.fix for finding in verified(system)}
    assert "journal_mode=delete" in fixes["wal"]
    assert "reinstall the package" in fixes["no-file"]
    assert keys_of(system) == [key_of("gfx90a.kdb")]


def test_a_custom_folder_is_searched_with_and_without_version_folders(tmp_path: Path) -> None:
    custom = tmp_path / "custom"
    for file in ("gfx90a6e.ukdb", "3.5.2./gfx90a6e.ukdb"):
        store(custom / file, {(NAME, ARGS): GOOD})
    layer = MIOpenKernels(environment_of(tmp_path, MIOPEN_CUSTOM_CACHE_DIR=str(custom)))
    assert {entry.key.split("::")[0] for entry in layer.entries()} == {"gfx90a6e.ukdb", "3.5.2./gfx90a6e.ukdb"}
    assert clear(layer).removed == 2


def test_roots_in_a_temporary_folder_show_their_owners_files_alone(tmp_path: Path, layer: MIOpenKernels) -> None:
    mine = store(tmp_path / "tmp/gfx906_60.ukdb", {(NAME, ARGS): GOOD})
    theirs = store(tmp_path / "tmp/gfx90a6e.ukdb", {(NAME, ARGS): GOOD})
    if os.getuid() == 0:
        os.chown(theirs, 12345, 12345)
    else:
        theirs.unlink()
    assert {root.path: root.role for root in layer.roots()}[tmp_path / "tmp"] == "temporary"
    assert keys_of(layer) == [key_of("gfx906_60.ukdb")]
    assert layer.get(key_of("gfx90a6e.ukdb")) is None
    assert clear(layer).removed == 1
    assert stored(mine) == []


def test_a_purge_of_all_layers_leaves_tuning_and_the_files_of_the_package(tmp_path: Path) -> None:
    home, database = tmp_path / "home", tmp_path / "rocm/share/miopen/db/gfx90a.kdb"
    fill(home)
    store(database, {(NAME, ARGS): packed(CODE)}).with_name("gfx90a6e.HIP.fdb.txt").write_text("k=S:1,0,A\n")
    fill_tuning(home)
    (home / ".cache/miopen/notes.ukdb").write_text("not MIOpen's")
    before = {**snapshot(tmp_path / "rocm"), **snapshot(home / ".config")}
    total = Stack(environment_of(home, MIOPEN_SYSTEM_DB_PATH=str(database.parent))).purge().total
    assert (total.removed, total.failed) == (4, 0)
    assert {**snapshot(tmp_path / "rocm"), **snapshot(home / ".config")} == before
    assert (home / ".cache/miopen/notes.ukdb").read_text() == "not MIOpen's"
