"""MIOpen's databases merged."""

from __future__ import annotations

import fcntl
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.miopen_files import (
    ARGS,
    CODE,
    FIND,
    RAW,
    VERSION,
    environment_of,
    packed,
    pending,
    perf,
    store,
    stored,
    tuned,
    user_file,
)
from tiers import amount

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import BadRequest, Busy, Refused, Unreachable
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.merging import merge
from cachectl.layers.miopen.places import lock_files
from cachectl.layers.miopen.tuning import MIOpenTuning

if TYPE_CHECKING:
    from homes import Home


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


def test_damaged_bundles_are_named_and_the_rest_merged(tmp_path: Path) -> None:
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


def test_names_that_miopen_never_opens_are_refused_first(tmp_path: Path) -> None:
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
        ([good, into], into, "name INTO last, and only once"),
        ([good, tmp_path / "notes"], into, "is not a name of a MIOpen database"),
        ([good], tmp_path / "notes", "is not a name of a MIOpen database"),
        ([good, tmp_path / FIND], into, "holds find-db, but"),
        ([tmp_path / FIND], tmp_path / "gfx90a6e.OpenCL.3_3_0_a85ca8a54.ufdb.txt", "backend"),
        ([tmp_path / FIND], tmp_path / "gfx90a6e.HIP.3_3_0_a85ca8a54.fusion.ufdb.txt", "holds find-db, but"),
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
            merge(replace(environment, lock_timeout=0.2), [str(source)], str(folder / FIND))
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
    for number in range(amount(6, 12)):
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


@pytest.mark.parametrize("broken", ["source", "target"])
def test_a_merge_that_fails_leaves_no_lock_files(tmp_path: Path, broken: str) -> None:
    name = "gfx90a6e.HIP.3_2_0_abc.ufdb.txt"
    paths = {role: tmp_path / role / name for role in ("source", "target")}
    for role, path in paths.items():
        path.parent.mkdir()
        path.write_text(f"{role}=s:1,2,3\n")
    paths[broken].unlink()
    paths[broken].mkdir()
    before = snapshot(tmp_path)
    environment = replace(environment_of(tmp_path), temporary=tmp_path / "tmp")
    if broken == "target":
        with pytest.raises(Unreachable, match="a folder, no plain file"):
            merge(environment, [str(paths["source"])], str(paths["target"]))
    else:
        assert merge(environment, [str(paths["source"])], str(paths["target"])).failed
    assert snapshot(tmp_path) == before
