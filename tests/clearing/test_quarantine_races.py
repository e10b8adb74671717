"""Quarantine beside other programs and other users."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.quarantine import (
    held,
    junk_native,
    one,
    quarantine_all,
)

from cachectl.inspecting.verify import findings
from cachectl.layers.base.errors import Damaged
from cachectl.layers.miopen import kernel_db
from cachectl.layers.stores.rows import RowFile
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


# ---------------------------------------------------------------------- found by reviews


HOLDER = """
import fcntl, os, sqlite3, subprocess, sys
import cachectl
database, index = sys.argv[1:]
connection = sqlite3.connect(database, isolation_level=None)
connection.execute("begin immediate")
handle = os.open(index, os.O_RDWR)
fcntl.lockf(handle, fcntl.LOCK_EX)
stack = cachectl.Stack()
stack.report()
for name in ("loopy", "cuda"):
    for root in stack[name].roots():
        list(stack[name].verify(root))
    list(stack[name].entries())
other = '''
import fcntl, os, sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("begin immediate")
    print("database")
except sqlite3.OperationalError: pass
try:
    fcntl.lockf(os.open(sys.argv[2], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("index")
except OSError: pass
'''
print(subprocess.run([sys.executable, "-c", other, database, index], capture_output=True, text=True).stdout.split())
"""


@pytest.mark.real
def test_looking_drops_no_lock_of_this_process(warm: Home, compute_cache: Callable[[Path], None]) -> None:
    """POSIX drops a process's locks on a file when it closes any descriptor of it: ours must not be that one."""
    root = warm.path / ".nv" / "ComputeCache"
    compute_cache(root)
    database = one(warm.path / ".cache" / "pytools", "pdict-v5-loopy-code-gen*.sqlite")
    done = warm.run(sys.executable, "-c", HOLDER, str(database), str(root / "index"))
    assert done.stdout == "[]\n"


def damaged_database(home: Home) -> Path:
    path = home.path / ".cache" / "miopen" / "3.3.0.a85ca8a54" / "gfx90a6e.ukdb"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"SQLite format 3\0" + b"malformed" * 500)
    return path


def good_database(path: Path) -> Path:
    rows = RowFile("miopen", path, kernel_db.SCHEMA)
    rows.insert(("k.o", "args"), kernel_db.encode(b"\x7fELF", kernel_db.SCHEMA), replace=False)
    return path


def test_a_database_that_was_fixed_meanwhile_is_restored(home: Home, tmp_path: Path) -> None:
    """The finding is old, the file under its name is whole by now: it stays, whatever its mark."""
    path = damaged_database(home)
    stack = Stack(home.environment())
    layer = stack["miopen"]
    (finding,) = findings([layer])
    good_database(tmp_path / "good")
    shutil.copyfile(tmp_path / "good", path)
    status = path.stat()
    assert finding.thing is not None
    fresh = replace(finding, thing=replace(finding.thing, stamp=(status.st_ino, status.st_size, status.st_mtime_ns)))
    outcome = layer.quarantine(layer.plan_quarantine([fresh]), [fresh])
    assert [note.because for note in outcome.skipped] == ["changed since it was planned"]
    assert path.read_bytes() == (tmp_path / "good").read_bytes()
    assert held(layer) == []
    assert not list(home.path.rglob(".cachectl-*"))


def test_a_folder_named_like_a_journal_is_never_moved(home: Home) -> None:
    """Neither quarantine nor restore touches it."""
    path = damaged_database(home)
    layer = Stack(home.environment())["miopen"]
    found = findings([layer])
    stranger = Path(f"{path}-wal") / "thesis.txt"
    stranger.parent.mkdir()
    stranger.write_text("years of work")
    layer.quarantine(layer.plan_quarantine(found), found)
    assert stranger.read_text() == "years of work"
    (thing,) = held(layer)
    layer.restore(thing)
    assert stranger.read_text() == "years of work"
    assert path.exists()


def test_a_restore_that_fails_puts_the_newer_one_back(home: Home) -> None:
    """The former entry is in its place again, and the quarantined one is still in quarantine."""
    path = damaged_database(home)
    layer = Stack(home.environment())["miopen"]
    found = findings([layer])
    layer.quarantine(layer.plan_quarantine(found), found)
    (thing,) = held(layer)
    before = good_database(path).read_bytes()

    class Stubborn(RowFile):
        def _journals(self, folder: int) -> list[str]:
            # A journal that is listed but has gone: the exchange fails in its midst.
            return [*super()._journals(folder), "vanished"] if "label.json" in os.listdir(folder) else []

    with pytest.raises(OSError, match="No such file"):
        Stubborn("miopen", path, kernel_db.SCHEMA).bring_file_back(thing, replace=True)
    assert path.read_bytes() == before
    assert held(layer) == [thing]


def test_a_row_that_cannot_go_leaves_nothing_in_quarantine(home: Home) -> None:
    """The database is locked: no copy piles up with each try."""
    path = home.path / ".cache" / "miopen" / "3.3.0.a85ca8a54" / "gfx90a6e.ukdb"
    good_database(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update kern_db set kernel_blob = x'00ff'")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        done = home.cachectl("verify", "--quarantine", "miopen", "--wait", "0.1", check=False)
    assert done.returncode == 1
    assert "locked by another process" in done.stderr
    assert home.json("restore")["quarantine"] == []
    assert not list(home.path.rglob(".cachectl-*"))


@pytest.mark.real
def test_files_that_are_not_entries_are_not_restored(warm: Home, tmp_path: Path) -> None:
    """Somebody has put a link, or a file of his own, where the entry lay: it stays where it is."""
    junk_native(warm.path)
    quarantine_all(warm)
    layer = Stack(warm.environment())["pocl"]
    (thing,) = held(layer)
    (label,) = (warm.path / ".cache" / "pocl").rglob("label.json")
    entry = label.parent / thing.key.split("/")[1]
    shutil.move(entry, tmp_path / "entry")
    entry.symlink_to(tmp_path / "entry")
    with pytest.raises(Damaged, match="is no entry"):
        layer.restore(thing)
    entry.unlink()
    entry.mkdir()
    (entry / "thesis.txt").write_text("years of work")
    with pytest.raises(Damaged, match="is no entry"):
        layer.restore(thing)
    assert (entry / "thesis.txt").exists()


def test_a_folder_that_others_can_write_to_is_not_believed(home: Home) -> None:
    """A user who may write into a quarantine folder could choose what is restored: it is reported and left."""
    path = damaged_database(home)
    home.cachectl("verify", "--quarantine", "miopen")
    (label,) = home.path.rglob("label.json")
    label.parent.chmod(0o777)
    done = home.cachectl("restore", "--all", check=False)
    assert done.returncode == 1
    assert "others may write to it" in done.stderr
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a folder away")
def test_a_folder_of_another_user_is_not_believed(home: Home) -> None:
    """In a shared root anybody could plant a row for our own database."""
    damaged_database(home)
    home.cachectl("verify", "--quarantine", "miopen")
    (label,) = home.path.rglob("label.json")
    os.chown(label.parent, 30001, 30001)
    done = home.cachectl("restore", "--all", check=False)
    assert "was put there by another user" in done.stderr
    home.cachectl("purge", "miopen")
    assert label.exists()
