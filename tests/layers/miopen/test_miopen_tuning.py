"""MIOpen's tuning results: text records under its locks."""

import hashlib
import os
import time
from pathlib import Path

import pytest
from support.layers import clear, clear_damaged, environment_of, got, listed, on_disk, usage_of, verified, write
from support.miopen_kernels import FIND
from support.products import LINE, PERF, PROBLEM, TUNED, fill_system_tuning
from support.products import fill_tuning as fill

from cachectl.layers.base.environment import node
from cachectl.layers.base.errors import Damaged
from cachectl.layers.core.entry import Artifact
from cachectl.layers.core.root import DISABLED
from cachectl.layers.core.selection import Selection, short_key
from cachectl.layers.disk import handles
from cachectl.layers.miopen import MIOpenSystemTuning, MIOpenTuning

NEW = Artifact("miopen-tuning", f"{FIND}::new", "miopen-record/1", b"new=S:1,0,A")


@pytest.fixture
def layer(tmp_path: Path) -> MIOpenTuning:
    return MIOpenTuning(environment_of(tmp_path))


def test_records_are_listed_and_taken_out_verbatim(tmp_path: Path, layer: MIOpenTuning) -> None:
    folder = fill(tmp_path)
    entries = listed(layer)
    assert set(entries) == {f"{FIND}::{PROBLEM}", f"{FIND}::other", f"{PERF}::{TUNED}"}
    entry = entries[f"{FIND}::{PROBLEM}"]
    assert (entry.bytes, entry.details.device, entry.details.kernels) == (len(LINE) + 1, "gfx90a", None)
    assert entry.details.versions == {"miopen": "3.3.0.a85ca8a54"}
    assert entry.written_before == (folder / FIND).stat().st_mtime
    read = got(layer, entry.key)
    assert (read.form, read.data) == ("miopen-record/1", LINE.encode())
    plan = layer.plan_clear(Selection(kernel="*"))
    assert (plan.entries, "kernel" in plan.skipped[0].because) == ((), True)
    usage = usage_of(layer)
    assert (usage.files, usage.bytes) == (2, on_disk(*folder.iterdir()))
    # A key need not be text, and has a short form too.
    old = write(folder / "gfx90a6e.HIP.2_20_0_.ufdb.txt", b"\xff=S:1,0,A\n")
    assert got(layer, short_key(f"{old.name}::\udcff")).data == b"\xff=S:1,0,A"
    stale = {entry.details.versions["miopen"]: entry.stale_because for entry in layer.entries()}
    assert stale == {"3.3.0.a85ca8a54": None, "2.20.0.": None}


def test_running_programs_notice_an_edit(tmp_path: Path, layer: MIOpenTuning) -> None:
    folder = fill(tmp_path)
    (folder / FIND).chmod(0o777)
    began = time.monotonic_ns()
    layer.put(NEW.key, NEW)
    assert (folder / FIND).read_text() == f"{LINE}\nother=S:1.5,0,A;T:2.5,0,B\nnew=S:1,0,A\n"
    assert (folder / FIND).stat().st_mode & 0o777 == 0o777
    assert began < int((folder / f"{FIND}.time").read_text()) < time.monotonic_ns()
    clear(layer, key=NEW.key)
    assert (folder / FIND).read_text() == f"{LINE}\nother=S:1.5,0,A;T:2.5,0,B\n"
    # An emptied file goes with its time.
    outcome = clear(layer)
    assert (outcome.removed, outcome.failed) == (3, ())
    assert sorted(os.listdir(folder)) == ["miopen-lockfiles"]


def test_locks_lie_where_every_miopen_takes_them_for_every_spelling_of_the_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    named = f"{tmp_path}/./link"
    layer = MIOpenTuning(environment_of(tmp_path, MIOPEN_USER_DB_PATH=f"{named}/"))
    layer.put(NEW.key, NEW)
    locks = [folder / f"miopen-lockfiles/{FIND}.lock"]
    for spelled in (named, f"{tmp_path}/link", str(folder)):
        digest = hashlib.md5(spelled.encode()).hexdigest()  # noqa: S324 - MIOpen's choice
        locks.append(tmp_path / f"tmp/miopen-lockfiles/{digest}_{FIND}.lock")
    for lock in locks:
        assert (lock.stat().st_mode & 0o777, lock.parent.stat().st_mode & 0o777) == (0o777, 0o777)
        assert lock.read_bytes() == b""


def test_results_in_sqlite_are_counted_and_left(tmp_path: Path, layer: MIOpenTuning) -> None:
    path = write(tmp_path / ".config/miopen/gfx906_60_1.1.0.udb", b"SQLite format 3\0" + bytes(4080))
    usage = usage_of(layer)
    assert (usage.entries, usage.files, usage.bytes) == (0, 1, 4096)
    assert layer.get(f"{path.name}::7::SolverA") is None
    assert (layer.plan_clear().entries, verified(layer)) == ((), [])


@pytest.mark.parametrize("name", ["gfx1030_.HIP.3_4_0_.ufdb.txt", "GeForce GTX 1070_15.OpenCL.2_0_1.ufdb.txt"])
def test_a_device_without_units_and_one_of_another_maker_have_results(
    tmp_path: Path, layer: MIOpenTuning, name: str
) -> None:
    text = "garbage\n=x\nk=S:1,0,A\nhalf"
    path = write(tmp_path / ".config/miopen" / name, text)
    assert (list(listed(layer)), usage_of(layer).unknown_files) == ([f"{name}::k"], 0)
    assert [(found.code, found.message.partition(":")[0]) for found in verified(layer)] == [
        *(("malformed", f"line {number}") for number in (1, 2, 4)),
        ("newline", "line 4"),
    ]
    # What no release makes is unknown.
    path.with_name("GeForce.ufdb.txt").write_text(text)
    assert usage_of(layer).unknown_files == 1


def test_what_a_killed_rewrite_left_is_removed_unless_another_machine_may_be_writing_it(
    tmp_path: Path, layer: MIOpenTuning
) -> None:
    folder = fill(tmp_path)
    endings = ("temp", f"{node()}.4711.temp", "node2.local.4711.temp")
    mine, own, others = (write(folder / f"{FIND}.{ending}", "half a file") for ending in endings)
    write(folder / f"notes.txt.{endings[1]}", "not MIOpen's")
    assert usage_of(layer).orphan_files == 3
    assert [finding.code for finding in verified(layer)] == []
    outcome = clear(layer)
    assert [note.because for note in outcome.skipped] == ["a program on node2.local may be writing it"]
    assert sorted(path.name for path in folder.glob("*temp")) == sorted((others.name, f"notes.txt.{endings[1]}"))
    assert not mine.exists()
    assert not own.exists()
    os.utime(others, (1e9, 1e9))
    assert clear(layer).orphans_removed == 1


def test_both_databases_are_switched_off_where_the_library_can(tmp_path: Path) -> None:
    user, system = MIOpenTuning(environment_of(tmp_path)), MIOpenSystemTuning(environment_of(tmp_path))
    find = "MIOPEN_DEBUG_DISABLE_FIND_DB"
    assert user.disable().set == {find: "1", "MIOPEN_DEBUG_DISABLE_USER_DB": "1"}
    assert system.disable().set == {find: "1", "MIOPEN_DEBUG_DISABLE_SYSTEM_DB": "1"}
    assert user.enable().unset == user.disable().set.keys()
    off = MIOpenTuning(environment_of(tmp_path, **user.disable().set)).state()
    assert (off.condition, off.why.split("; ")[1]) == (DISABLED, "the perf-db stays on before MIOpen 3.6.1")


def test_damage_is_reported_line_by_line(tmp_path: Path, layer: MIOpenTuning) -> None:
    path = write(tmp_path / ".config/miopen" / FIND, "good=S:1,0,A\nno equals\ngood=S:2,0,A\nlast=S:1")
    findings = {finding.code: finding for finding in verified(layer)}
    assert {code: finding.severity.value for code, finding in findings.items()} == {
        **dict.fromkeys(("malformed", "newline"), "recompiles once"),
        "duplicate": "wastes space",
    }
    assert "line 2" in findings["malformed"].fix
    # Results of tuning are never removed as damaged.
    assert {finding.thing for finding in findings.values()} == {None}
    assert clear_damaged(layer).removed == 0
    assert path.read_text().startswith("good=S:1,0,A\nno equals\n")
    path.write_text("bad=S\n")
    with pytest.raises(Damaged):
        layer.get(f"{FIND}::bad")


def test_system_results_of_every_form_are_listed_and_damage_is_the_packages(tmp_path: Path) -> None:
    fill_system_tuning(tmp_path)
    (tmp_path / "db/gfx906_60.db").write_bytes(b"SQLite format 3\0")
    (tmp_path / "db/gfx90a6e.db.txt").write_text(f"{TUNED}=S:1\nbroken\n")
    layer = MIOpenSystemTuning(environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db")))
    assert listed(layer).keys() >= {f"gfx906_60.HIP.fdb.txt::{PROBLEM}", f"gfx90a6e.db.txt::{TUNED}"}
    (finding,) = verified(layer)
    assert "reinstall the package" in finding.fix


def test_a_stage_that_another_command_holds_stays(tmp_path: Path) -> None:
    layer, folder = MIOpenTuning(environment_of(tmp_path)), fill(tmp_path)
    held, left = (write(folder / f".cachectl-stage-{letter * 32}", b"half") for letter in "ab")
    with held.open("rb") as file:
        assert handles.take_flock(file.fileno())
        clear(layer)
        assert (held.exists(), left.exists()) == (True, False)
