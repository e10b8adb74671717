"""MIOpen's databases made to be installed, and merged: on files built here by MIOpen's own statements."""

from __future__ import annotations

import bz2
import fcntl
import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, Busy, Damaged, Refused, Unreachable
from cachectl.layers.base.selection import Selection
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.names import parse_name
from cachectl.layers.miopen.places import lock_files
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels, lookup
from cachectl.layers.miopen.system_tuning import MIOpenSystemTuning
from cachectl.layers.miopen.tuning import MIOpenTuning
from cachectl.layers.stores.merging import write_database
from cachectl.moving.miopen_files import export_files, installed_name, merge

if TYPE_CHECKING:
    from homes import Home

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
INTEGERS = (
    "spatial_dim in_channels in_h in_w in_d fil_h fil_w fil_d out_channels batchsize pad_h pad_w pad_d conv_stride_h "
    "conv_stride_w conv_stride_d dilation_h dilation_w dilation_d bias group_count"
)
TABLES = (
    "CREATE TABLE IF NOT EXISTS `config` (`id` INTEGER PRIMARY KEY ASC,`layout` TEXT NOT NULL,"
    "`data_type` TEXT NOT NULL,`direction` TEXT NOT NULL,"
    + ",".join(f"`{column}` INT NOT NULL" for column in INTEGERS.split())
    + ");CREATE TABLE IF NOT EXISTS `perf_db` (`id` INTEGER PRIMARY KEY ASC,`solver` TEXT NOT NULL,"
    "`config` INTEGER NOT NULL,`params` TEXT NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS `idx_perf_db` ON perf_db(solver, config);"
)
VERSION = "3.3.0.a85ca8a54"
ARGS = " -DMLO_HW_WAVE_SZ=64 -mcpu=gfx90a"
CODE = b"\x7fELF" + b"some code that packs well " * 400
RAW = b"\x7fELF raw"
FIND = "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
PERF = "gfx90a6e.HIP.3_3_0_a85ca8a54.udb.txt"
COLUMNS = "kernel_name, kernel_args, kernel_blob, kernel_hash, uncompressed_size"

Values = tuple[bytes, str, int]


def environment_of(home: Path, **variables: str) -> Environment:
    return Environment({"HOME": str(home), **variables}, home=home, cwd=home, temporary=home / "tmp")


def packed(code: bytes, level: int = 9) -> Values:
    blob = bz2.compress(code, level)
    digest = hashlib.md5(code).hexdigest()  # noqa: S324 - MIOpen's choice
    return (blob, digest, len(code)) if len(blob) < len(code) else (code, digest, 0)


def store(path: Path, kernels: Mapping[str, Values], *, wal: bool = False) -> Path:
    """Write kernels by their names, as MIOpen does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        if wal:
            connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(TABLE)
        for name, values in kernels.items():
            connection.execute(
                f"INSERT OR REPLACE INTO kern_db({COLUMNS}) VALUES(?, ?, ?, ?, ?)", (name, ARGS, *values)
            )
        connection.commit()
    return path


def stored(path: Path) -> dict[str, Values]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = connection.execute(f"SELECT {COLUMNS} FROM kern_db").fetchall()
    assert {row[1] for row in rows} <= {ARGS}
    return {row[0]: row[2:] for row in rows}


def user_file(home: Path, base: str = "gfx90a6e", version: str = VERSION) -> Path:
    return home / ".cache" / "miopen" / version / f"{base}.ukdb"


@contextmanager
def pending(path: Path) -> Iterator[None]:
    """Hold a file open as a running program does, with a row that is only in its log."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute(f"INSERT INTO kern_db({COLUMNS}) VALUES('late.cl.o', ?, ?, ?, ?)", (ARGS, *packed(CODE)))
        connection.commit()
        yield


def perf(path: Path, problems: Mapping[int, Mapping[str, str]]) -> Path:
    """Write a perf-db in sqlite: for each problem, told apart by its channels, solvers and their parameters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLES)
        columns = f"{', '.join(INTEGERS.split())}, layout, data_type, direction"
        for channels, solvers in problems.items():
            values = (2, channels, *(1 for _ in INTEGERS.split()[2:]), "NCHW", "FP32", "F")
            places = ", ".join("?" * len(values))
            number = connection.execute(f"INSERT INTO config({columns}) VALUES({places})", values).lastrowid
            for solver, params in solvers.items():
                row = (solver, number, params)
                connection.execute("INSERT INTO perf_db(solver, config, params) VALUES(?, ?, ?)", row)
        connection.commit()
    return path


def tuned(path: Path) -> dict[tuple[int, str], str]:
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT in_channels, solver, params FROM perf_db JOIN config ON config.id = perf_db.config"
        return {(row[0], row[1]): row[2] for row in connection.execute(query)}


# ---------------------------------------------------------------------- kernels to be installed


def test_a_database_in_use_becomes_a_kdb_that_can_be_installed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kernels = {"conv.cl.o": packed(CODE), "wino.s.o": packed(RAW)}
    path = store(user_file(home), kernels, wal=True)
    made = tmp_path / "db"
    with pending(path):
        before = snapshot(home)
        done = export_files(environment_of(home), str(made))
        assert snapshot(home) == before
    assert os.listdir(made) == ["gfx90a6e.kdb"]
    target = made / "gfx90a6e.kdb"
    assert [(file.file, file.source, file.entries, file.bytes) for file in done.files] == [
        (target, path, 3, target.stat().st_size)
    ]
    assert stored(target) == {**kernels, "late.cl.o": packed(CODE)}
    # Rollback mode: others than its owner can open it, where they may not write beside it.
    assert target.read_bytes()[18:20] == b"\x01\x01"
    assert target.stat().st_mode & 0o777 == 0o644
    with closing(sqlite3.connect(target)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert [row[2] for row in connection.execute("PRAGMA index_info(idx_kern_db)")] == [
            "kernel_name",
            "kernel_args",
        ]
    # What reads the folder that MIOPEN_BINCACHE_PATH, or a package, would fill finds every kernel in it.
    installed = environment_of(tmp_path / "another", MIOPEN_SYSTEM_DB_PATH=str(made))
    system = MIOpenSystemKernels(installed)
    assert list(system.verify(system.roots()[0])) == []
    found = lookup(MIOpenKernels(installed), system, "gfx90a6e", "conv.cl.o", ARGS)
    assert found is not None
    assert found.data == CODE
    again = tmp_path / "again"
    with pending(path) if not stored(path).get("late.cl.o") else closing(sqlite3.connect(path)):
        export_files(environment_of(home), str(again))
    assert (again / "gfx90a6e.kdb").read_bytes() == target.read_bytes()


def test_a_selection_of_kernels_is_exported(tmp_path: Path) -> None:
    store(user_file(tmp_path), {"conv.cl.o": packed(CODE), "wino.s.o": packed(RAW)})
    store(user_file(tmp_path, "gfx1030_36"), {"conv.cl.o": packed(CODE)})
    done = export_files(environment_of(tmp_path), "db", Selection(kernel="wino*"))
    assert os.listdir(tmp_path / "db") == ["gfx90a6e.kdb"]
    assert set(stored(tmp_path / "db" / "gfx90a6e.kdb")) == {"wino.s.o"}
    assert [Path(note.key).name for note in done.skipped] == ["gfx1030_36.ukdb"]


def test_what_miopen_could_not_use_is_left_out_and_named(tmp_path: Path) -> None:
    bad = (packed(CODE)[0], "0" * 32, len(CODE))
    joined = (bz2.compress(CODE[:500]) + bz2.compress(CODE[500:]), packed(CODE)[1], len(CODE))
    rows = {"conv.cl.o": packed(CODE, 1), "bad.cl.o": bad, "it's.cl.o": packed(CODE), "joined.cl.o": joined}
    store(user_file(tmp_path), rows)
    user_file(tmp_path, "gfx1030_36").write_bytes(b"garbage " * 1000)
    done = export_files(environment_of(tmp_path), "db")
    assert stored(tmp_path / "db" / "gfx90a6e.kdb") == {"conv.cl.o": packed(CODE, 1)}
    assert done.failed
    named = [note.key.partition("::")[0] for note in done.failures]
    assert sorted(Path(name).name for name in named if "ukdb" not in name) == ["bad.cl.o", "it's.cl.o", "joined.cl.o"]
    assert str(user_file(tmp_path, "gfx1030_36")) in named
    assert os.listdir(tmp_path / "db") == ["gfx90a6e.kdb"]


def test_no_two_miopens_are_mixed(tmp_path: Path) -> None:
    store(user_file(tmp_path, version="3.2.0.x"), {"old.cl.o": packed(CODE)})
    store(user_file(tmp_path), {"new.cl.o": packed(CODE)})
    done = export_files(environment_of(tmp_path), "db")
    assert set(stored(tmp_path / "db" / "gfx90a6e.kdb")) == {"new.cl.o"}
    assert [note.key for note in done.skipped] == [str(user_file(tmp_path, version="3.2.0.x"))]
    assert not done.failed


def test_the_first_generation_stays_what_it_is(tmp_path: Path) -> None:
    path = user_file(tmp_path, "gfx906_60", "2.3.0")
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLE_2_3)
        values = ("conv.cl.o", ARGS, CODE)
        connection.execute("INSERT INTO kern_db(kernel_name, kernel_args, kernel_blob) VALUES(?, ?, ?)", values)
        connection.commit()
    export_files(environment_of(tmp_path), "db")
    with closing(sqlite3.connect(tmp_path / "db" / "gfx906_60.kdb")) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(kern_db)")]
        assert columns == ["id", "kernel_name", "kernel_args", "kernel_blob"]
        assert connection.execute("SELECT kernel_blob FROM kern_db").fetchall() == [(CODE,)]


def test_object_files_are_named_as_left_out(tmp_path: Path) -> None:
    path = tmp_path / ".cache" / "miopen" / "2.2.1" / "0123456789abcdef0123456789abcdef" / "MIOpenPooling.cl.o"
    path.parent.mkdir(parents=True)
    path.write_bytes(CODE)
    done = export_files(environment_of(tmp_path), "db")
    assert [note.key for note in done.skipped] == ["1 object files"]
    assert os.listdir(tmp_path / "db") == []


def test_a_folder_is_demanded_and_no_package_is_touched(tmp_path: Path) -> None:
    store(user_file(tmp_path), {"conv.cl.o": packed(CODE)})
    (tmp_path / "file").write_text("")
    system = store(tmp_path / "rocm" / "gfx90a6e.kdb", {"shipped.cl.o": packed(CODE)})
    environment = environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(system.parent))
    before = snapshot(tmp_path)
    for name in ("db/gfx90a6e.kdb", "file"):
        with pytest.raises(BadRequest, match="MIOPEN_BINCACHE_PATH takes a folder"):
            export_files(environment, name)
    (tmp_path / "linked").symlink_to("rocm")
    for name in ("rocm", "linked"):
        with pytest.raises(Refused, match="owned by a package"):
            export_files(environment, name)
    (tmp_path / "linked").unlink()
    with pytest.raises(BadRequest, match="miopen or miopen-tuning"):
        export_files(environment, "db", layers=["pocl"])
    assert snapshot(tmp_path) == before


def test_kernels_that_would_be_hidden_are_told(tmp_path: Path) -> None:
    store(user_file(tmp_path), {"conv.cl.o": packed(CODE)})
    system = store(tmp_path / "rocm" / "gfx90a.kdb", {"shipped.cl.o": packed(CODE), "conv.cl.o": packed(RAW)})
    environment = environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(system.parent))
    (hint,) = export_files(environment, "db").hints
    assert f"cachectl miopen merge {system} " in hint.because
    done = merge(environment, [str(system)], "db/gfx90a6e.kdb")
    assert [note.key for note in done.files[0].conflicts] == [f"conv.cl.o::{ARGS}"]
    # The user's own over what was shipped.
    assert stored(tmp_path / "db" / "gfx90a6e.kdb") == {"conv.cl.o": packed(CODE), "shipped.cl.o": packed(CODE)}
    assert set(stored(system)) == {"shipped.cl.o", "conv.cl.o"}


def test_a_database_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    target = store(tmp_path / "gfx90a6e.kdb", {"old.cl.o": packed(CODE)})
    before = snapshot(tmp_path)

    def fails(stage: Path) -> None:
        store(stage, {"new.cl.o": packed(CODE)}, wal=True)
        raise OSError(28, "No space left on device")

    with pytest.raises(Unreachable, match="No space left"):
        write_database("miopen", target, fails)
    assert snapshot(tmp_path) == before
    log = target.with_name("gfx90a6e.kdb-wal")
    log.write_bytes(b"a log of the old one")
    with pytest.raises(Damaged, match="a log of another database"):
        write_database("miopen", target, lambda stage: stage.write_bytes(b""))
    assert stored(Path(shutil.copy(target, tmp_path / "copy.kdb"))) == {"old.cl.o": packed(CODE)}


# ---------------------------------------------------------------------- tuning to be installed


def test_names_of_installed_files() -> None:
    expected = {
        "gfx90a6e.ukdb": "gfx90a6e.kdb",
        FIND: "gfx90a6e.HIP.fdb.txt",
        "gfx90a6e.HIP.3_5_2_.fusion.ufdb.txt": "gfx90a6e.HIP.fusion.fdb.txt",
        PERF: "gfx90a6e.db.txt",
        "batchnorm_gfx906_60.OpenCL.2_9_0_8252-64506314e.udb.txt": "batchnorm_gfx906_60.db.txt",
        "gfx906_60_1.1.0.udb": "gfx906_60.db",
        "gfx906_60.cd.updb.txt": "gfx906_60.cd.pdb.txt",
    }
    for name, installed in expected.items():
        parsed = parse_name(name)
        assert parsed is not None
        assert installed_name(parsed) == installed
        assert parse_name(installed) is not None


def test_tuning_is_exported_over_the_systems(tmp_path: Path) -> None:
    folder, rocm = tmp_path / ".config" / "miopen", tmp_path / "rocm"
    folder.mkdir(parents=True)
    rocm.mkdir()
    (folder / FIND).write_text("k1=S:1.0,0,A\nk2=S:2.0,0,A\nbroken\n")
    (rocm / "gfx90a6e.HIP.fdb.txt").write_text("k1=S:9.0,0,A;T:8.0,0,B\nk3=S:3.0,0,A\n")
    perf(folder / "gfx90a6e_1.1.0.udb", {64: {"A": "mine"}})
    perf(rocm / "gfx90a6e.db", {32: {"A": "theirs"}, 64: {"A": "theirs", "B": "theirs"}})
    environment = environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(rocm))
    before = snapshot(rocm)

    done = export_files(environment, "db", layers=["miopen-tuning"])

    assert (tmp_path / "db" / "gfx90a6e.HIP.fdb.txt").read_text() == (
        "k1=S:1.0,0,A;T:8.0,0,B\nk2=S:2.0,0,A\nk3=S:3.0,0,A\n"
    )
    assert tuned(tmp_path / "db" / "gfx90a6e.db") == {
        (64, "A"): "mine",
        (64, "B"): "theirs",
        (32, "A"): "theirs",
    }
    assert [(file.file.name, file.entries, file.from_system) for file in done.files] == [
        ("gfx90a6e.HIP.fdb.txt", 4, 2),
        ("gfx90a6e.db", 3, 2),
    ]
    assert [note.key for note in done.failures] == [f"{folder / FIND} line 3"]
    assert snapshot(rocm) == before
    installed = MIOpenSystemTuning(environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db")))
    assert list(installed.verify(installed.roots()[0])) == []
    assert len(list(installed.entries())) == 6


# ---------------------------------------------------------------------- merging kernels


def test_ranks_are_merged_and_what_differs_is_named(tmp_path: Path) -> None:
    into = store(user_file(tmp_path), {"a.cl.o": packed(CODE), "b.cl.o": packed(CODE)}, wal=True)
    ranks = [tmp_path / f"rank{number}" / VERSION / "gfx90a6e.ukdb" for number in range(2)]
    # The same kernel may be packed otherwise.
    store(ranks[0], {"a.cl.o": packed(CODE, 1), "c.cl.o": packed(RAW)}, wal=True)
    store(ranks[1], {"b.cl.o": packed(b"\x7fELF another"), "c.cl.o": packed(b"\x7fELF third"), "d.cl.o": packed(CODE)})
    inode = into.stat().st_ino
    with pending(into):
        done = merge(environment_of(tmp_path), [str(rank) for rank in ranks], str(into))
    assert [(file.added, file.there, len(file.conflicts)) for file in done.files] == [(1, 1, 0), (1, 0, 2)]
    assert [note.key for note in done.files[1].conflicts] == [f"b.cl.o::{ARGS}", f"c.cl.o::{ARGS}"]
    assert done.failed
    assert into.stat().st_ino == inode
    assert stored(into) == {
        "a.cl.o": packed(CODE),
        "b.cl.o": packed(CODE),
        "c.cl.o": packed(RAW),
        "d.cl.o": packed(CODE),
        "late.cl.o": packed(CODE),
    }
    assert into.read_bytes()[18:20] == b"\x02\x02"
    layer = MIOpenKernels(environment_of(tmp_path))
    assert list(layer.verify(layer.roots()[0])) == []
    again = merge(environment_of(tmp_path), [str(ranks[0])], str(into))
    assert (again.failed, again.files[0].added, again.files[0].there) == (False, 0, 2)


def test_a_file_that_is_not_there_is_made(tmp_path: Path) -> None:
    source = store(tmp_path / "rank0" / "gfx90a6e.ukdb", {"a.cl.o": packed(CODE)})
    done = merge(environment_of(tmp_path), [str(source)], str(user_file(tmp_path)))
    assert not done.failed
    assert stored(user_file(tmp_path)) == {"a.cl.o": packed(CODE)}
    layer = MIOpenKernels(environment_of(tmp_path))
    assert list(layer.verify(layer.roots()[0])) == []


def test_what_is_damaged_is_named_and_the_rest_merged(tmp_path: Path) -> None:
    bad = (packed(CODE)[0], "0" * 32, len(CODE))
    into = store(user_file(tmp_path), {"x.cl.o": bad})
    garbage = tmp_path / "rank0" / "gfx90a6e.ukdb"
    garbage.parent.mkdir()
    garbage.write_bytes(b"garbage " * 1000)
    good = store(tmp_path / "rank1" / "gfx90a6e.ukdb", {"a.cl.o": packed(CODE), "b.cl.o": bad, "x.cl.o": packed(CODE)})
    done = merge(environment_of(tmp_path), [str(garbage), str(good)], str(into))
    assert [len(file.failures) for file in done.files] == [1, 1]
    assert "damaged" in done.files[1].conflicts[0].because
    assert stored(into) == {"x.cl.o": bad, "a.cl.o": packed(CODE)}


def test_another_generation_is_not_merged(tmp_path: Path) -> None:
    into = store(user_file(tmp_path), {"x.cl.o": packed(CODE)})
    old = tmp_path / "old" / "gfx90a6e.ukdb"
    old.parent.mkdir()
    with closing(sqlite3.connect(old)) as connection:
        connection.executescript(TABLE_2_3)
        connection.commit()
    done = merge(environment_of(tmp_path), [str(old)], str(into))
    assert "another generation" in done.files[0].failures[0].because


def test_what_miopen_would_not_look_for_there_is_refused_before_anything(tmp_path: Path) -> None:
    into = store(user_file(tmp_path), {})
    environment = environment_of(tmp_path)
    good = store(tmp_path / "good" / "gfx90a6e.ukdb", {"a.cl.o": packed(CODE)})
    other = store(tmp_path / "rank" / "gfx906_60.ukdb", {"a.cl.o": packed(CODE)})
    older = store(tmp_path / "3.2.0.x" / "gfx90a6e.ukdb", {"b.cl.o": packed(CODE)})
    for name in (FIND, "gfx90a6e.OpenCL.3_3_0_a85ca8a54.ufdb.txt", "gfx90a6e.HIP.3_3_0_a85ca8a54.fusion.ufdb.txt"):
        (tmp_path / name).write_text("k=S:1,0,A\n")
    (tmp_path / "notes").write_text("")
    before = snapshot(tmp_path)
    for sources, target, words in (
        ([good, other], into, "gfx906_60"),
        ([good, older], into, "--mix-versions"),
        ([good, tmp_path / "none" / "gfx90a6e.ukdb"], into, "No such file"),
        ([good, into], into, "comes last"),
        ([good, tmp_path / "notes"], into, "not called"),
        ([good], tmp_path / "notes", "not called"),
        ([good, tmp_path / FIND], into, "does not hold"),
        ([tmp_path / FIND], tmp_path / "gfx90a6e.OpenCL.3_3_0_a85ca8a54.ufdb.txt", "backend"),
        ([tmp_path / FIND], tmp_path / "gfx90a6e.HIP.3_3_0_a85ca8a54.fusion.ufdb.txt", "does not hold"),
    ):
        with pytest.raises((BadRequest, Refused, FileNotFoundError), match=words):
            merge(environment, [str(source) for source in sources], str(target))
    assert snapshot(tmp_path) == before
    assert not merge(environment, [str(good), str(older)], str(into), mix_versions=True).failed
    assert set(stored(into)) == {"a.cl.o", "b.cl.o"}


def test_a_package_and_a_link_are_not_merged_into(tmp_path: Path) -> None:
    source = store(tmp_path / "rank" / "gfx90a6e.ukdb", {"a.cl.o": packed(CODE)})
    system = store(tmp_path / "rocm" / "gfx90a6e.kdb", {})
    environment = environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(system.parent))
    (tmp_path / "gfx90a6e.ukdb").symlink_to(store(tmp_path / "elsewhere.ukdb", {}))
    before = snapshot(tmp_path)
    for target in (system, tmp_path / "gfx90a6e.ukdb"):
        with pytest.raises(Refused):
            merge(environment, [str(source)], str(target))
    assert snapshot(tmp_path) == before


# ---------------------------------------------------------------------- merging tuning


def test_records_are_merged_key_by_key_and_solver_by_solver(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "miopen"
    folder.mkdir(parents=True)
    # Without its last line's end, as an interrupted write leaves it.
    (folder / FIND).write_text("k1=S:1.0,0,A\nno record\nk2=S:2.0,0,A")
    rank = tmp_path / "rank"
    rank.mkdir()
    (rank / FIND).write_text("k1=S:1.5,0,A;T:0.5,0,B\nk2=S:2.0,0,A\nk3=S:3.0,0,A\nbroken\n")
    done = merge(environment_of(tmp_path), [str(rank / FIND)], str(folder / FIND)).files[0]
    assert (folder / FIND).read_text() == "k1=S:1.0,0,A;T:0.5,0,B\nno record\nk2=S:2.0,0,A\nk3=S:3.0,0,A\n"
    assert (done.added, done.there, [note.key for note in done.conflicts]) == (2, 1, ["k1::S"])
    assert [note.key for note in done.failures] == [f"{rank / FIND} line 4"]
    # Running programs read it again.
    assert int((folder / f"{FIND}.time").read_text()) > 0


def test_the_lock_of_a_running_miopen_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "miopen"
    folder.mkdir(parents=True)
    (folder / FIND).write_text("k1=S:1.0,0,A\n")
    source = tmp_path / "rank" / FIND
    source.parent.mkdir()
    source.write_text("k2=S:2.0,0,A\n")
    environment = environment_of(tmp_path)
    lock = lock_files(environment, folder / FIND)[-1]
    lock.parent.mkdir(parents=True)
    lock.touch()
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(Busy):
            merge(replace(environment, patience=0.2), [str(source)], str(folder / FIND))
        assert (folder / FIND).read_text() == "k1=S:1.0,0,A\n"
        holder.communicate(b"\n")
    assert merge(environment, [str(source)], str(folder / FIND)).files[0].added == 1
    with lock.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_merges_at_once_lose_nothing(home: Home) -> None:
    folder = home.path / ".config" / "miopen"
    commands = []
    for number in range(4):
        source = home.path / f"rank{number}" / FIND
        source.parent.mkdir()
        source.write_text("".join(f"k{number}-{line}=S:{line}.0,0,A\n" for line in range(50)))
        store(source.with_name("gfx90a6e.ukdb"), {f"k{number}.cl.o": packed(CODE)})
        for file, into in ((source, folder / FIND), (source.with_name("gfx90a6e.ukdb"), user_file(home.path))):
            commands.append(
                [sys.executable, "-m", "cachectl", "miopen", "merge", str(file), str(into), "--wait", "600"]
            )
    running = [subprocess.Popen(command, env=dict(home.variables), stdout=-3, stderr=-1) for command in commands]
    for one in running:
        _, said = one.communicate(timeout=1200)
        assert one.returncode == 0, said
    assert len((folder / FIND).read_text().splitlines()) == 200
    assert len(stored(user_file(home.path))) == 4


def test_a_merge_or_an_export_that_is_killed_leaves_the_old_or_the_new(home: Home) -> None:
    folder = home.path / ".config" / "miopen"
    rank = home.path / "rank"
    folder.mkdir(parents=True)
    rank.mkdir()
    kernels = {f"k{number:04}.cl.o": packed(bytes([number % 251]) * 999) for number in range(3000)}
    old = {"old.cl.o": packed(CODE)}
    source = store(rank / "gfx90a6e.ukdb", kernels)
    records = "".join(f"k{number}=S:1.0,0,A\n" for number in range(3000))
    (rank / FIND).write_text(records)
    into, made = user_file(home.path), home.path / "db" / "gfx90a6e.kdb"
    commands = [
        ["miopen", "merge", str(source), str(into)],
        ["miopen", "merge", str(rank / FIND), str(folder / FIND)],
        ["export", "--as-kdb", "db", "miopen", "--force"],
    ]
    draw = random.Random(6)  # noqa: S311 - moments, no secrets
    for number in range(12):
        for beside in (into, made):
            shutil.rmtree(beside.parent, ignore_errors=True)
            store(beside, kernels if beside is into and number % 3 == 2 else old)
        (folder / FIND).write_text("k0=S:9.0,0,A\n")
        command = [sys.executable, "-m", "cachectl", *commands[number % 3]]
        with subprocess.Popen(command, env=dict(home.variables), cwd=home.path, stdout=-3, stderr=-3) as running:
            time.sleep(draw.uniform(0.1, 0.6))
            running.kill()
        # Reading rolls back what was not committed.
        with closing(sqlite3.connect(into)) as connection:
            assert connection.execute("SELECT count(*) FROM kern_db").fetchone()[0] in (1, 3000, 3001)
        assert stored(made) in (old, kernels)
        assert len((folder / FIND).read_text().splitlines()) in (1, 3000)
    shutil.rmtree(into.parent)
    store(into, old)
    assert home.cachectl(*commands[0]).returncode == 0
    assert home.cachectl(*commands[1], check=False).returncode == 1
    assert home.cachectl(*commands[2]).returncode == 0
    assert stored(into) == stored(made) == {**old, **kernels}


def test_perf_dbs_in_sqlite_are_merged(tmp_path: Path) -> None:
    into = perf(tmp_path / ".config" / "miopen" / "gfx906_60_1.1.0.udb", {32: {"A": "1"}, 64: {"A": "1"}})
    source = perf(tmp_path / "rank" / into.name, {64: {"A": "2", "B": "2"}, 128: {"A": "2"}})
    done = merge(environment_of(tmp_path), [str(source)], str(into)).files[0]
    assert tuned(into) == {(32, "A"): "1", (64, "A"): "1", (64, "B"): "2", (128, "A"): "2"}
    assert (done.added, done.there, len(done.conflicts)) == (2, 0, 1)
    assert done.conflicts[0].key.endswith("::A")
    with closing(sqlite3.connect(into)) as connection:
        assert connection.execute("SELECT count(*) FROM config").fetchone() == (3,)
    made = tmp_path / "new" / into.name
    assert merge(environment_of(tmp_path), [str(source)], str(made)).files[0].added == 3
    layer = MIOpenTuning(environment_of(tmp_path, MIOPEN_USER_DB_PATH=str(made.parent)))
    assert len(list(layer.entries())) == 3
    assert list(layer.verify(layer.roots()[0])) == []
    foreign = tmp_path / "foreign" / into.name
    foreign.parent.mkdir()
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE perf_db (id, solver)")
        connection.commit()
    assert "'perf_db'" in merge(environment_of(tmp_path), [str(foreign)], str(into)).files[0].failures[0].because


# ---------------------------------------------------------------------- the command


def test_the_command_exports_files(home: Home) -> None:
    store(user_file(home.path), {"a.cl.o": packed(CODE), "b.cl.o": packed(CODE)})
    document = home.json("export", "--as-kdb", "db", "miopen", "--kernel", "a")
    assert document["schema"] == "cachectl/miopen-export/1"
    assert [(file["file"], file["entries"]) for file in document["files"]] == [
        (str(home.path / "db" / "gfx90a6e.kdb"), 1)
    ]
    assert "gfx90a6e.kdb" in home.cachectl("export", "--as-kdb", "db", "--force").stdout
    assert len(stored(home.path / "db" / "gfx90a6e.kdb")) == 2
    for wrong in (("--as-kdb", "db", "pocl"), ("--as-kdb", "db/x.kdb"), ("--as-kdb", "a", "--sign", "k"), ()):
        done = home.cachectl("export", *wrong, check=False)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_the_command_merges(home: Home) -> None:
    into = store(user_file(home.path), {"a.cl.o": packed(CODE)})
    source = store(home.path / "rank" / "gfx90a6e.ukdb", {"a.cl.o": packed(RAW), "b.cl.o": packed(CODE)})
    done = home.cachectl("miopen", "merge", str(source), str(into), check=False)
    assert done.returncode == 1
    assert f"a.cl.o::{ARGS}" in done.stderr
    document = home.json("miopen", "merge", str(source), str(into), check=False)
    assert document["total"] == {"added": 0, "there": 1, "conflicts": 1, "failed": 0}
    assert home.cachectl("miopen", "merge", str(source), str(home.path / "x.ukdb"), check=False).returncode == 2
