"""File systems without free bytes or inodes, or with a used-up quota: room is made, no kill damages a dictionary."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from homes import Home
from support.dictionaries import PYTHON
from support.layers import fill_up, python, running, select, sql, write
from tiers import thorough, thorough_only

from benchmarks.commands import at_home
from cachectl.layers.disk.room import left_of_quota

pytestmark = pytest.mark.real

ROWS = 40
#: Opens a dictionary of pytools, then executes commands from its input, line by line.
PROGRAM = """
import sys
from pytools.persistent_dict import WriteOncePersistentDict
mine = WriteOncePersistentDict(sys.argv[1], safe_sync=False, in_mem_cache_size=0)
print("started", flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except KeyError:
        print("miss", flush=True)
"""
#: Runs a purge that is killed before the given call of those that write to a file.
KILLED = """
import os, signal, sys
from itertools import count
calls = count()
def dying(function):
    def call(*arguments):
        if next(calls) == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
for name in ("pwrite", "fsync", "ftruncate"):
    setattr(os, name, dying(getattr(os, name)))
from cachectl.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def fill_dictionary(home: Path, identifier: str) -> Path:
    """Let pytools store rows in a dictionary of a home; return its file."""
    program = (
        "from pytools.persistent_dict import WriteOncePersistentDict\n"
        f"mine = WriteOncePersistentDict({identifier!r}, safe_sync=False)\n"
        f"for n in range({ROWS}): mine[n] = bytes([n]) * 9000"
    )
    subprocess.run(python(program), env=at_home(home), check=True)
    return home / f".cache/pytools/pdict-v5-{identifier}-{PYTHON}.sqlite"


def use_up_inodes(disk: Path) -> None:
    with suppress(OSError):
        for number in range(30):
            (disk / str(number)).touch()


def cachectl(home: Path, *arguments: str, command: tuple[str, ...] = ("-m", "cachectl")) -> tuple[int, dict[str, Any]]:
    """Run the command over a home, its temporary folder there too; return status and what it wrote as JSON."""
    program = Home(home, {**at_home(home), "TMPDIR": str(home)})
    done = program.run(sys.executable, *command, *arguments, "--json", check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout or "{}")


def purged(home: Path, *arguments: str, command: tuple[str, ...] = ("-m", "cachectl")) -> tuple[int, dict[str, Any]]:
    """Purge; return the status and the state of the dictionaries."""
    status, result = cachectl(home, "purge", *arguments or ("pytools",), command=command)
    return status, next((layer for layer in result.get("layers", ()) if layer["layer"] == "pytools"), {})


def state(file: Path) -> tuple[str, int]:
    """Return what sqlite's own check says of a database, and the number of rows."""
    ((verdict, rows),) = select(file, "integrity_check, (select count(*) from dict) from pragma_integrity_check")
    return verdict, rows


def test_a_disk_with_dictionaries_alone_is_cleared_without_a_free_byte(disk: Path) -> None:
    """All rows are removed, the space is freed, and the dictionary is as sqlite would have made it."""
    file, other = (fill_dictionary(disk, name) for name in ("mine", "other"))
    fill_up(disk)
    full = file.stat().st_size
    status, said = purged(disk, "--all")
    assert (status, said["removed"], said["skipped"]) == (0, 2 * ROWS, [])
    assert said["bytes_freed"] >= 2 * (full - 12288)
    assert state(file) == state(other) == ("ok", 0)
    assert file.stat().st_size == 12288
    assert set(file.parent.iterdir()) == {file, other}
    fill_dictionary(disk, "mine")
    assert state(file) == ("ok", ROWS)


def test_a_program_that_has_the_dictionary_open_goes_on(disk: Path) -> None:
    """During a purge on a full disk a live program misses, stores and hits again, without an error."""
    file = fill_dictionary(disk, "mine")
    with running(*python(PROGRAM, "mine"), env=at_home(disk)) as live:

        def ask(line: str) -> str:
            assert live.stdin is not None
            assert live.stdout is not None
            print(line, file=live.stdin, flush=True)
            return live.stdout.readline().strip()

        assert [ask("len(mine)"), ask("mine[3][:2]")] == [str(ROWS), r"b'\x03\x03'"]
        fill_up(disk)
        inode = file.stat().st_ino
        assert purged(disk, "--all")[0] == 0
        assert file.stat().st_ino == inode
        asked = ("mine[3]", "mine.store_if_not_present(3, b'new')", "mine[3]", "len(mine)")
        assert [ask(line) for line in asked] == ["miss", "None", "b'new'", "1"]
        live.communicate()
        assert live.returncode == 0
    assert state(file) == ("ok", 1)


@thorough_only
def test_a_kill_at_any_write_leaves_all_rows_or_none(disk: Path, tmp_path: Path) -> None:
    """A purge killed before any write leaves a valid database, which pytools opens and fills."""
    file = fill_dictionary(disk, "mine")
    whole, filler, killed = file.read_bytes(), fill_up(disk), -signal.SIGKILL
    script = write(tmp_path / "killed.py", KILLED)
    states: list[tuple[str, int]] = []
    while killed == -signal.SIGKILL:
        file.write_bytes(whole)
        fill_up(disk)
        killed, _ = purged(disk, command=(str(script), str(len(states))))
        states.append(state(file))
    assert killed == 0
    assert set(states) == {("ok", 0), ("ok", ROWS)}
    # Two writes with their syncs, and the cut.
    assert [rows for _, rows in states[:5]] == [ROWS] * 3 + [0] * 2
    assert states[-1] == ("ok", 0)
    filler.unlink()
    fill_dictionary(disk, "mine")
    assert state(file) == ("ok", ROWS)


def test_a_disk_without_inodes_is_cleared(mount: Callable[..., Path], tmp_path: Path) -> None:
    """Sqlite cannot even make a journal if no file can be made."""
    disk = mount("-t", "tmpfs", "-o", "size=8m,nr_inodes=30", "tmpfs", on=tmp_path / "disk")
    file = fill_dictionary(disk, "mine")
    use_up_inodes(disk)
    status, said = purged(disk, "--all")
    assert (status, said["removed"]) == (0, ROWS)
    assert state(file) == ("ok", 0)
    assert file.stat().st_size < 12288


def test_rows_of_which_some_stay_need_room_and_say_so(disk: Path) -> None:
    """If nothing else can be removed, nothing is lost, and one line says what to do."""
    file = fill_dictionary(disk, "a")
    (key,), *_ = select(file, "keyhash from dict")
    filler, before = fill_up(disk), file.read_bytes()
    status, said = purged(disk, "pytools", "--key", f"{file.name}/{key}")
    (failed,) = said["failed"]
    assert (status, "disk is full; make room and try again" in failed["because"]) == (1, True)
    assert file.read_bytes() == before
    # Then there is room for the deletion's journal, but not for a copy of the database.
    os.truncate(filler, filler.stat().st_size - (1 << 16))
    status, said = purged(disk, "pytools", "--key", f"{file.name}/{key}")
    (note,) = said["skipped"]
    reason = "its rows were deleted, but there is no room to shrink the file now"
    assert (status, said["removed"], note["because"]) == (0, 1, reason)
    assert state(file) == ("ok", ROWS - 1)


def test_a_quota_that_sqlite_takes_for_an_io_error_is_no_hindrance(home: Home) -> None:
    """The system refuses a journal with an error that sqlite reports as "disk I/O error", as it does for a quota."""
    file = fill_dictionary(home.path, "mine")
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))\n"
    program = f"{limited}from cachectl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    delete = "import sqlite3; c = sqlite3.connect(sys.argv[1]); c.execute('delete from dict'); c.commit()"
    done = home.run(sys.executable, "-c", limited + delete, str(file), check=False)
    assert "disk I/O error" in done.stderr
    assert state(file) == ("ok", ROWS)
    status, said = purged(home.path, command=("-c", program))
    assert (status, said["removed"]) == (0, ROWS)
    assert state(file) == ("ok", 0)
    assert file.stat().st_size < 2048
    # With small pages it is used as before, and the next purge gives it usual ones.
    fill_dictionary(home.path, "mine")
    assert state(file) == ("ok", ROWS)
    assert purged(home.path)[0] == 0
    assert (state(file), file.stat().st_size) == (("ok", 0), 12288)


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("pragma journal_mode = wal", "page 1 may lie in the log"),
        *thorough(
            ("pragma auto_vacuum = full; vacuum", "page 2 is sqlite's own"),
            ("pragma page_size = 1024; vacuum", "page 1 has no gap that is large enough"),
        ),
    ],
)
def test_a_database_of_another_form_is_not_emptied_in_place(disk: Path, statement: str, why: str) -> None:
    """If the schema is not the one that pytools makes, a full disk is reported, and no row is lost."""
    file = fill_dictionary(disk, "mine")
    sql(file, statement)
    filler = fill_up(disk)
    status, said = purged(disk)
    assert (status, "make room" in said["failed"][0]["because"]) == (1, True), why
    filler.unlink()
    assert state(file) == ("ok", ROWS)
    status, said = purged(disk)
    assert (status, said["removed"]) == (0, ROWS)


@pytest.mark.parametrize(
    ("lack", "verb"),
    [("bytes", "prune --max-size=0B"), ("bytes", "purge --all"), *thorough(("files", "prune --max-size=0B"))],
)
def test_a_full_home_is_first_and_cleared(
    lack: str, verb: str, mount: Callable[..., Path], tmp_path: Path, filled: Home
) -> None:
    """A home on 6 MB without a free byte, or without an inode: the doctor begins with it, and all entries go."""
    inodes = 9999 if lack == "bytes" else 20 + len([*(filled.path / ".cache").rglob("*")])
    disk = mount("-t", "tmpfs", "-o", f"size=6m,nr_inodes={inodes}", "tmpfs", on=tmp_path / "disk")
    shutil.copytree(filled.path / ".cache", disk / ".cache", symlinks=True)
    fill_up(disk) if lack == "bytes" else use_up_inodes(disk)
    status, result = cachectl(disk, "doctor")
    first, *others = result["findings"]
    assert (status, first["code"], first["severity"]) == (1, "full", "fails every run")
    assert "full" not in {finding["code"] for finding in others}
    layer = first["fix"].removeprefix("cachectl purge ")
    assert f"0 more {lack}; {layer} holds most" in first["message"]
    status, result = cachectl(disk, *verb.split())
    assert (status, result["total"]["failed"]) == (0, 0), [one["failed"] for one in result["layers"] if one["failed"]]
    assert cachectl(disk, "report")[1]["total"]["entries"] == 0
    assert not [path for path in disk.rglob("*") if re.fullmatch(r"\.cachectl-.*|.*-journal|lock", path.name)]
    (disk / "new").write_bytes(bytes(1 << 20))
    assert os.statvfs(disk).f_favail > 10


def test_a_quota_bounds_what_can_be_stored() -> None:
    """``struct dqblk`` of the Linux kernel: 100 blocks of 1024 bytes, 60,000 bytes used; 10 inodes, 12 used."""
    answer = struct.pack("=8QI4x", 100, 90, 60_000, 10, 0, 12, 0, 0, 63)
    assert left_of_quota(answer, "your quota") == (42_400, 0, "your quota")
    assert left_of_quota(struct.pack("=8QI4x", 0, 90, 60_000, 0, 5, 12, 0, 0, 63), "your quota") is None
