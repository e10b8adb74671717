"""MIOpen's databases exported as files that are installed."""

from __future__ import annotations

import bz2
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.miopen_files import (
    ARGS,
    CODE,
    FIND,
    RAW,
    TABLE_2_3,
    environment_of,
    packed,
    pending,
    perf,
    store,
    stored,
    tuned,
    user_file,
)

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import BadRequest, Damaged, Refused, Unreachable
from cachectl.layers.base.selection import Selection
from cachectl.layers.miopen.exporting import installed_name
from cachectl.layers.miopen.merging import merge
from cachectl.layers.miopen.names import parse_name
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels
from cachectl.layers.miopen.system_tuning import MIOpenSystemTuning
from cachectl.layers.stores.merging import write_database
from cachectl.moving.installable import export_files

PERF = "gfx90a6e.HIP.3_3_0_a85ca8a54.udb.txt"


# ---------------------------------------------------------------------- kernels to be installed


def test_a_database_becomes_a_kdb_that_can_be_installed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kernels = {"conv.cl.o": packed(CODE), "wino.s.o": packed(RAW)}
    path = store(user_file(home), kernels, wal=True)
    made = tmp_path / "db"
    with pending(path):
        pass
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
    found = system.get(f"gfx90a6e.kdb::conv.cl.o::{ARGS}")
    assert found is not None
    assert found.data == CODE
    again = tmp_path / "again"
    export_files(environment_of(home), str(again))
    assert (again / "gfx90a6e.kdb").read_bytes() == target.read_bytes()


def test_a_selection_of_kernels_is_exported(tmp_path: Path) -> None:
    store(user_file(tmp_path), {"conv.cl.o": packed(CODE), "wino.s.o": packed(RAW)})
    store(user_file(tmp_path, "gfx1030_36"), {"conv.cl.o": packed(CODE)})
    done = export_files(environment_of(tmp_path), "db", Selection(kernel="wino*"))
    assert os.listdir(tmp_path / "db") == ["gfx90a6e.kdb"]
    assert set(stored(tmp_path / "db" / "gfx90a6e.kdb")) == {"wino.s.o"}
    assert [Path(note.key).name for note in done.skipped] == ["gfx1030_36.ukdb"]


def test_entries_that_miopen_cannot_use_are_left_out_and_named(tmp_path: Path) -> None:
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
        with pytest.raises(BadRequest, match="is not a folder; name a folder, as for MIOPEN_BINCACHE_PATH"):
            export_files(environment, name)
    (tmp_path / "linked").symlink_to("rocm")
    for name in ("rocm", "linked"):
        with pytest.raises(Refused, match="owned by a package"):
            export_files(environment, name)
    (tmp_path / "linked").unlink()
    with pytest.raises(BadRequest, match="miopen or miopen-tuning"):
        export_files(environment, "db", layers=["pocl"])
    assert snapshot(tmp_path) == before


def test_kernels_that_would_be_hidden_are_reported(tmp_path: Path) -> None:
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
