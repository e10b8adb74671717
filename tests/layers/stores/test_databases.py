"""Allowed content of databases, and databases that other users can reach."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from support.databases import CREATE, FILE, dictionary, purge, rows_of
from tiers import amount, thorough

from cachectl.layers.base.errors import Damaged, LayerError, Refused
from cachectl.layers.disk.trust import shared_because
from cachectl.layers.pytools import SCHEMA
from cachectl.layers.stores import database
from cachectl.layers.stores.rows import RowFile, Weight

NOBODY: Final = 65534
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs the superuser, who becomes another user",
)


# ---------------------------------------------------------------------- what may be in a file

#: Every case of the letters, and every way to make sqlite work for a table that is not the library's.
FOREIGN = {
    "another case": "create table Dict (keyhash text not null primary key, key_value text not null)",
    "a column called rowid": "create table dict (keyhash text, key_value text, rowid text)",
    "another order of values": "create table dict (keyhash text primary key collate nocase, key_value text)",
    "a generated column": "create table dict (keyhash text not null primary key,"
    " key_value text not null generated always as (zeroblob(1000000000)))",
    "a view": "create view DICT as with recursive n(i) as (select 1 union all select i + 1 from n)"
    " select i as rowid, i as keyhash, i as key_value from n",
    "a virtual table": "create virtual table dict using fts5(keyhash, key_value)",
    "a trigger": f"{CREATE}; create trigger t after delete on DICT begin delete from sqlite_master; end",
    "a trigger after many entries": f"{CREATE}; pragma writable_schema = on; with recursive n(i) as"
    " (select 1 union all select i + 1 from n where i < 20) insert into sqlite_master"
    " select type, name, tbl_name, rootpage, sql from sqlite_master, n where type = 'index';"
    " create trigger t after delete on dict begin delete from dict; end",
    "an index of an expression": f"{CREATE}; create index i on dict (length(key_value))",
    "a table without row ids": "create table dict (keyhash text not null primary key, key_value text not null)"
    " without rowid",
}


@pytest.mark.parametrize("statements", FOREIGN.values(), ids=FOREIGN.keys())
def test_only_the_table_that_pytools_makes_is_used(tmp_path: Path, statements: str) -> None:
    """Anything else could run code of its own, or hold what its library never writes."""
    path = tmp_path / "pdict-v5-mine-1.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statements)
    before = path.read_bytes()
    rows = RowFile("pytools", path, SCHEMA)
    uses: tuple[Callable[[], object], ...] = (
        rows.sum,
        rows.check,
        lambda: list(rows.rows()),
        lambda: rows.read(("a",)),
        lambda: rows.insert(("a",), (b"1",), replace=True),
        lambda: rows.delete_up_to(Weight(1, 1, 1)),
        rows.vacuum,
    )
    for use in uses:
        with pytest.raises(Damaged, match="does not make"):
            use()
    assert path.read_bytes() == before


def test_a_table_beside_the_librarys_is_left_alone(tmp_path: Path) -> None:
    """The library can use such a file, so that it is no damage either."""
    path = tmp_path / "pdict-v5-mine-1.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{CREATE}; create table notes (text)")
    with pytest.raises(Refused, match="notes"):
        RowFile("pytools", path, SCHEMA).sum()


def test_every_version_of_pytools_made_the_same_table(tmp_path: Path) -> None:
    """As 2024.1.4 to 2026.1.1 wrote it, and as cachectl 0.1.0 did."""
    for number, statement in enumerate(
        (
            "CREATE TABLE IF NOT EXISTS dict (keyhash TEXT NOT NULL PRIMARY KEY, key_value TEXT NOT NULL)",
            "create table if not exists dict (keyhash text not null primary key, key_value text not null)",
        )
    ):
        path = tmp_path / f"{number}.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(statement)
        assert RowFile("pytools", path, SCHEMA).sum() == Weight(0, 0, 0)


def test_many_rows_are_read_and_placed_as_one_is(tmp_path: Path) -> None:
    path = tmp_path / "pdict.sqlite"
    standing = [("ABC", b"1"), ("a ", b"2"), ("12", b"3"), ("x\0y", b"4")]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(CREATE)
        connection.executemany("insert or ignore into dict values (?, ?)", standing)
        connection.commit()
        before = set(connection.execute("select * from dict"))
    rows = RowFile("pytools", path, SCHEMA)
    keys = [(key,) for key in ("ABC", "abc", "a", "a ", "12", "012", "12.0", "x\0y", "x", "\udcff", "0", "Z", "z")]
    assert rows.read_many(keys) == [rows.read(key) for key in keys]
    new = [key for key in keys if key != ("\udcff",)]
    done = rows.insert_new([(key, (b"1",)) for key in new])
    assert [rows.read(key) == (b"1",) for key in new] == [one is not None for one in done]
    with closing(sqlite3.connect(path)) as connection:
        assert before <= set(connection.execute("select * from dict"))


def circular(path: Path) -> Path:
    """Make a small dictionary whose pages refer to one another so that it seems to have 40 ** 15 rows."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma page_size = 512")
        connection.execute(CREATE)
        connection.execute("insert into dict values ('a', 'b')")
        (root,) = connection.execute("select rootpage from sqlite_master where type = 'table'").fetchone()
    data = bytearray(path.read_bytes())
    leaf = bytes(data[(root - 1) * 512 : root * 512])
    last = len(data) // 512
    pages = [root, *range(last + 1, last + 16)]
    for page, child in pairwise(pages):
        cells = struct.pack(">IB", child, 1) * 40
        begin = 512 - len(cells)
        head = struct.pack(">BHHHBI", 5, 0, 40, begin, 0, child)
        places = struct.pack(">40H", *range(begin, 512, 5))
        data[(page - 1) * 512 : page * 512] = (head + places).ljust(begin, b"\0") + cells
    data += leaf
    struct.pack_into(">I", data, 28, len(data) // 512)
    path.write_bytes(data)
    return path


def test_a_file_whose_pages_go_in_circles_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sqlite alone would list rows for ever."""
    monkeypatch.setattr(database, "_STEPS_FREE", amount(100_000, 5_000_000))
    path = circular(tmp_path / FILE)
    rows = RowFile("pytools", path, SCHEMA)
    begin = time.monotonic()
    for use in (rows.sum, lambda: list(rows.rows())):
        with pytest.raises(Damaged, match="work"):
            use()
    assert time.monotonic() - begin < 60


# ---------------------------------------------------------------------- other users

#: How long another user attacks.
SECONDS: Final = amount(1, 4)
#: Plants a journal beside a database again and again; sqlite deletes the file that the journal names.
PLANT: Final = """
import os, struct, sys, time
database, victim, seconds = sys.argv[1], sys.argv[2].encode(), float(sys.argv[3])
magic = bytes.fromhex("d9d505f920a163d7")
journal = (magic + struct.pack(">5I", 0, 1, 1, 512, 4096)).ljust(512, b"\\0")
journal += struct.pack(">I", 0x40000000 // 4096 + 1) + victim + struct.pack(">2I", len(victim), sum(victim)) + magic
spare = os.path.join(os.path.dirname(database), f"spare-{os.getpid()}")
end = time.monotonic() + seconds
print("ready", flush=True)
while time.monotonic() < end:
    with open(spare, "wb") as file:
        file.write(journal)
    try:
        os.rename(spare, database + "-journal")
        time.sleep(0.0005)
        os.unlink(database + "-journal")
    except OSError:
        pass
"""
#: Exchanges two names again and again.
EXCHANGE: Final = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
one, other = (name.encode() for name in sys.argv[1:3])
end = time.monotonic() + float(sys.argv[3])
print("ready", flush=True)
while time.monotonic() < end:
    libc.renameat2(-100, one, -100, other, 2)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a folder that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def other_user(program: str, *arguments: str) -> Iterator[None]:
    """Run a program as another user meanwhile."""
    command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", sys.executable, "-c", program]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, cwd="/") as attack:
        assert attack.stdout is not None
        if attack.stdout.readline() != b"ready\n":
            pytest.skip("this Python is not one that another user can start")
        yield
        attack.kill()


def insert_all_the_time(path: Path, seconds: float) -> int:
    """Open a database for writing again and again; return how often that was done."""
    placed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(LayerError):
            RowFile("pytools", path, SCHEMA, lock_timeout=0.2).insert(("new",), (b"1",), replace=True)
            placed += 1
    return placed


def chown(folder: Path, user: int) -> None:
    """Give a whole folder to a user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)


@as_root
@pytest.mark.parametrize("mode", [0o1777, *thorough(0o777)])
def test_no_database_is_opened_for_writing_where_others_can_write(shared: Path, mode: int) -> None:
    """Another user would name the file that sqlite deletes."""
    path = dictionary(shared / ".cache" / "pytools" / FILE)
    path.parent.chmod(mode)
    victim = shared / "thesis.tex"
    victim.write_text("years of work")
    with other_user(PLANT, str(path), str(victim), str(SECONDS)):
        assert insert_all_the_time(path, SECONDS) == 0
        status, done = purge(shared)
        assert (status, done["removed"]) == (1, 0)
    assert victim.read_text() == "years of work"
    Path(f"{path}-journal").unlink(missing_ok=True)
    assert "other users can write to" in purge(shared)[1]["failed"][0]["because"]
    assert rows_of(path) == 20
    path.parent.chmod(0o755)
    assert purge(shared)[0] == 0
    assert rows_of(path) == 0


@as_root
def test_a_folder_that_another_user_can_replace_is_only_read(shared: Path, tmp_path: Path) -> None:
    """Where the folder above is open to others, nothing is written, not even through a link that is put there."""
    (shared / ".cache").mkdir()
    (shared / ".cache").chmod(0o777)
    path = dictionary(shared / ".cache" / "pytools" / FILE)
    outside = tmp_path / "outside"
    private = dictionary(outside / FILE)
    tmp_path.chmod(0o755)
    before = private.read_bytes()
    (shared / ".cache" / "link").symlink_to(outside)
    with other_user(EXCHANGE, str(path.parent), str(shared / ".cache" / "link"), str(SECONDS)):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            assert purge(shared)[0] == 1
            subprocess.run(
                [sys.executable, "-m", "cachectl", "ls", "pytools", "-q"],
                env={"HOME": str(shared)},
                capture_output=True,
                check=False,
            )
    assert private.read_bytes() == before
    assert os.listdir(outside) == [FILE]


@as_root
def test_writers_of_a_folder_are_found(shared: Path) -> None:
    """The modes and owners of the whole way count; behind a folder that others cannot enter, modes do not."""
    folder = shared / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    assert shared_because(folder, ("file", "missing")) is None
    folder.chmod(0o775)
    assert shared_because(folder) is None, "the group of root"
    os.chown(folder, 0, NOBODY)
    assert shared_because(folder) == f"other users can write to {folder}"
    folder.chmod(0o777)
    (shared / "a").chmod(0o700)
    assert shared_because(folder) is None
    (shared / "a").chmod(0o1777)
    folder.chmod(0o755)
    assert shared_because(folder) is None, "sticky"
    (folder / "file").chmod(0o666)
    assert shared_because(folder, ("file",)) == f"other users can write to {folder / 'file'}"
    (shared / "a").chmod(0o755)
    (shared / "link").symlink_to(folder)
    assert shared_because(shared / "link") is None
    os.lchown(shared / "link", NOBODY, NOBODY)
    assert shared_because(shared / "link") == f"{shared / 'link'} belongs to nobody"
    os.chown(shared / "a", NOBODY, NOBODY)
    assert shared_because(folder) == f"{shared / 'a'} belongs to nobody"


#: Asks who can write to a folder, where some accounts are others.
ASK: Final = """
import sys
from pathlib import Path
from cachectl.layers.disk.trust import open_to_others, shared_because
folder = Path(sys.argv[1])
print(shared_because(folder), list(map(str, open_to_others(folder))))
"""


@as_root
@pytest.mark.parametrize(("passwd", "group"), [("operator:x:11:0::/:/bin/sh\n", ""), ("", "eve")])
def test_the_group_of_root_is_trusted_only_while_nobody_else_has_it(shared: Path, passwd: str, group: str) -> None:
    """An account whose first group it is stands in no list of members."""
    folder = shared / "folder"
    folder.mkdir()
    folder.chmod(0o775)
    accounts = {"passwd": "root:x:0:0::/root:/bin/sh\n" + passwd, "group": f"root:x:0:{group}\n"}
    for name, content in accounts.items():
        (shared / name).write_text(content)
    script = f'mount --bind {shared}/passwd /etc/passwd && mount --bind {shared}/group /etc/group && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", ASK, str(folder)]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Traceback" not in asked.stderr and asked.returncode:
        pytest.skip("cannot mount here")
    assert asked.stdout == f"other users can write to {folder} ['{folder}']\n"
    (shared / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (shared / "group").write_text("root:x:0:\n")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "None []\n"


#: Reads a database in whose place a pipe comes after it was looked at.
READ_A_PIPE: Final = """
import os, sys
from pathlib import Path
from cachectl.layers.base.errors import Unreachable
from cachectl.layers.pytools import SCHEMA
from cachectl.layers.stores import database
from cachectl.layers.stores import database
from cachectl.layers.stores.rows import RowFile
path = Path(sys.argv[1])
pending = database._pending

def exchange(*arguments, **options):
    found = pending(*arguments, **options)
    os.rename(path, path.with_name("aside"))
    os.mkfifo(path)
    return found

database._pending = exchange
try:
    RowFile("pytools", path, SCHEMA, 0.2).sum()
except Unreachable as error:
    print(error.message)
"""


def test_a_pipe_in_the_place_of_a_shared_database_ends_in_an_error(shared: Path) -> None:
    """Sqlite opens by name, and would wait for ever."""
    path = dictionary(shared / "folder" / FILE)
    path.parent.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", READ_A_PIPE, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "cannot be opened: something else has taken its place\n"
