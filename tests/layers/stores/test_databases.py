"""Databases: allowed contents, interrupted writes, damage, and other users."""

import os
import sqlite3
import struct
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from homes import Home
from support.dictionaries import CREATE, FILE, dictionary, equal_rows, interrupted, rows_of
from support.layers import clear_damaged, keys_of, python, running, sql, usage_of, verified
from tiers import NOBODY, amount, as_root

from benchmarks.commands import at_home
from cachectl.layers.base.errors import Busy, Damaged, LayerError, Refused, Unreachable
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.disk.trust import shared_because
from cachectl.layers.pytools.dictionaries import SCHEMA
from cachectl.layers.stores.database import file_stamp
from cachectl.layers.stores.rows import RowFile
from cachectl.layers.stores.tree_read import CHANGED


def rows_in(path: Path, lock_timeout: float = 5.0) -> RowFile:
    return RowFile("pytools", path, SCHEMA, lock_timeout)


def remove_damaged(path: Path, used: str | None = None) -> str | None:
    return rows_in(path).remove_damaged(file_stamp(path), lambda _path: used)


#: Every way to make sqlite accept a table that is not the library's.
FOREIGN = {
    "another table": f"{CREATE}; create table notes (text)",
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
    path = tmp_path / FILE
    sql(path, statements)
    before = path.read_bytes()
    rows = rows_in(path)
    for use in (
        *(rows.sum, rows.rows, lambda: list(rows.rows_with()), lambda: rows.read(["a"])),
        *(lambda: rows.insert([("a", b"1")], replace=True), lambda: rows.delete(()), rows.vacuum),
        *(rows.check, lambda: remove_damaged(path)),
    ):
        with pytest.raises(Refused, match="does not make"):
            use()
    assert path.read_bytes() == before


SPELLED = "CREATE TABLE IF NOT EXISTS dict (keyhash TEXT NOT NULL PRIMARY KEY, key_value TEXT NOT NULL)"


@pytest.mark.parametrize(
    "statement",
    [SPELLED, SPELLED.lower(), SPELLED.replace("dict (", "`dict`\n( ").replace(", key_value", ',\n"key_value"')],
)
def test_every_spelling_of_the_table_is_accepted(tmp_path: Path, statement: str) -> None:
    """Those of pytools 2024.1.4 to 2026.1.1, and of cachectl."""
    sql(tmp_path / FILE, statement)
    assert rows_in(tmp_path / FILE).sum() == (0, 0)


def test_a_column_that_has_its_type_in_its_name_is_damage(tmp_path: Path) -> None:
    sql(tmp_path / FILE, SPELLED.replace("key_value TEXT", '"key_value TEXT"'))
    with pytest.raises(Damaged, match="no such column: key_value"):
        rows_in(tmp_path / FILE).sum()


def test_keys_that_are_nearly_equal_are_different(tmp_path: Path) -> None:
    rows = rows_in(dictionary(tmp_path / FILE))
    keys = ["ABC", "abc", "a", "a ", "12", "012", "12.0", "x\0y", "x"]
    *placed, refused = rows.insert([(key, key.encode()) for key in keys] + [("\udcff", b"1")])
    assert (placed, type(refused)) == ([True] * 9, Damaged)
    assert rows.read([*keys, "\udcff"]) == [*map(str.encode, keys), None]


def test_every_truncation_is_found_and_none_ends_in_an_error(home: Home) -> None:
    path = dictionary(home.path / ".cache/pytools" / FILE, equal_rows(60))
    whole = path.read_bytes()
    layer = home.stack["pytools"]
    for size in range(1, len(whole), amount(1999, 211)):
        path.write_bytes(whole[:size])
        keys_of(layer)
        usage_of(layer)
        (finding,) = verified(layer)
        assert (finding.code, finding.key) == ("damaged", FILE), size
        outcome = clear_damaged(layer)
        assert (outcome.skipped, outcome.failed, path.exists()) == ((), (), False)


def test_what_follows_the_pages_of_a_database_is_no_damage(home: Home) -> None:
    """Sqlite never reads it; a program killed while it extended the file leaves such bytes."""
    path = dictionary(home.path / ".cache/pytools" / FILE, equal_rows(60))
    keys = keys_of(home.stack["pytools"])
    with path.open("ab") as file:
        file.write(bytes(100))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
    assert verified(home.stack["pytools"]) == []
    assert clear_damaged(home.stack["pytools"]).removed == 0
    assert keys_of(home.stack["pytools"]) == keys


def test_the_pages_of_a_database_count_only_if_its_last_writer_counted_them(home: Home) -> None:
    """A sqlite before 3.7.0 changes only the counter at byte 24, neither its copy at 92 nor the number of pages."""
    path = dictionary(home.path / ".cache/pytools" / FILE, equal_rows(60))
    whole = path.read_bytes()
    for counter, words in ((whole[24:28], ["the file was cut to 49,151 of 49,152 bytes"]), (b"\0\0\xff\0", [])):
        path.write_bytes(whole[:24] + counter + whole[28:-1])
        assert [finding.message for finding in verified(home.stack["pytools"])] == words


def test_a_damaged_file_goes_only_whole_unchanged_and_used_by_nobody(tmp_path: Path) -> None:
    path = dictionary(tmp_path / FILE)
    stamp = file_stamp(path)
    with pytest.raises(Unreachable, match="its disk failed during the check"):
        rows_in(path).remove_damaged(stamp, lambda _path: None)
    os.utime(path, (1, 1))
    assert rows_in(path).remove_damaged(stamp, lambda _path: None) == CHANGED, "another program has repaired it"
    stamp = file_stamp(path)
    os.truncate(path, 5000)
    assert rows_in(path).remove_damaged(stamp, lambda _path: None) == CHANGED
    assert remove_damaged(path, "is open in a program") == "is open in a program"
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_SH, 1, 0x40000002);"
    with running(*python(f"{hold} print(flush=True); input()", path)):
        # It does not wait for the end of the program's transaction.
        with pytest.raises(Busy, match="more than 0 s"):
            remove_damaged(path)
        assert path.exists()
    for suffix in ("-journal", "-shm"):
        Path(f"{path}{suffix}").touch()
    assert remove_damaged(path) is None
    assert os.listdir(tmp_path) == []


def test_an_interrupted_write_is_unknown_and_finished_by_a_purge(home: Home) -> None:
    path = interrupted(home.path / ".cache/pytools" / FILE)
    before = snapshot(home.path, times=True)
    layer = home.stack["pytools"]
    (finding,) = verified(layer)
    assert (finding.severity.value, finding.thing) == ("harmless", None)
    assert "interrupted write is pending; the next program that opens the database finishes it" in finding.message
    assert usage_of(layer).entries is None
    assert layer.plan_clear().failed
    with pytest.raises(Unreachable):
        layer.get(f"{FILE}/{0:016x}")
    assert snapshot(home.path, times=True) == before
    assert home.json("purge pytools")["total"]["removed"] == 20
    assert os.listdir(path.parent) == [path.name]
    assert rows_of(path) == 0


@pytest.mark.parametrize("in_log", [False, True])
def test_a_file_that_its_interrupted_write_repairs_is_not_removed_as_damaged(home: Home, in_log: bool) -> None:
    """A power loss can lose a page that the journal, or the log, still has."""
    path = home.path / ".cache/pytools" / FILE
    if in_log:
        with closing(sqlite3.connect(dictionary(path), isolation_level=None)) as connection:
            connection.executescript("pragma journal_mode = wal; create table more (text); drop table more")
            contents = {name: Path(name).read_bytes() for name in (f"{path}", f"{path}-wal")}
        for name, content in contents.items():
            Path(name).write_bytes(content)
    else:
        interrupted(path)
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
    layer = home.stack["pytools"]
    outcome = clear_damaged(layer)
    assert (outcome.removed, outcome.orphans_removed, outcome.failed) == (0, 0, ())
    assert rows_of(path) == 20


@pytest.mark.parametrize("content", [b"", bytes(512)])
def test_a_journal_without_content_is_removed(home: Home, content: bytes) -> None:
    """A kill before its header is written makes sqlite leave it."""
    path = dictionary(home.path / ".cache/pytools" / FILE, equal_rows(0))
    Path(f"{path}-journal").write_bytes(content)
    home.cachectl("purge pytools")
    assert os.listdir(path.parent) == [path.name]


def test_the_journal_of_a_running_program_is_left(home: Home) -> None:
    path = dictionary(home.path / ".cache/pytools" / FILE)
    journal = Path(f"{path}-journal")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript("begin immediate; insert into dict values ('new', 'x')")
        assert journal.exists()
        assert len(home.json("ls pytools")["entries"]) == 20
        assert home.cachectl("purge pytools --wait 0.1", check=False).returncode == 1
        assert journal.exists()
        connection.execute("commit")
    assert rows_of(path) == 21


def test_a_log_is_unknown_until_it_is_applied_and_reading_leaves_no_file(tmp_path: Path) -> None:
    path = dictionary(tmp_path / FILE)
    rows = rows_in(path)
    sql(path, "pragma journal_mode = wal")
    assert rows.sum() == (20, 20 * 504)
    assert os.listdir(tmp_path) == [FILE]
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("insert into dict values ('new', x'00')")
        before = snapshot(tmp_path, times=True)
        for use in (rows.sum, rows.rows, rows.check, lambda: rows.read(["new"])):
            with pytest.raises(Unreachable, match=": a log is pending"):
                use()
        assert snapshot(tmp_path, times=True) == before
        rows.recover()
        assert rows.read(["new"]) == [b"\0"]
        assert len(rows.delete(rows.rows())) == 21
        assert connection.execute("select count(*) from dict").fetchone() == (0,)


def test_a_database_that_was_written_to_while_it_was_read_without_a_lock_is_no_damage(tmp_path: Path) -> None:
    path = dictionary(tmp_path / FILE, equal_rows(2000))
    sql(path, "pragma journal_mode = wal")
    rows = rows_in(path).rows_with()
    next(rows)
    os.truncate(path, 5000)
    with pytest.raises(Busy, match=": was written to while it was read; try again later"):
        list(rows)


@as_root
@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_no_database_is_opened_for_writing_where_others_can_write(open_folder: Path, mode: int) -> None:
    """Another user could name the file that sqlite deletes, as the journal's super-journal."""
    path = dictionary(open_folder / ".cache/pytools" / FILE)
    path.parent.chmod(mode)
    victim = open_folder / "thesis.tex"
    victim.write_text("years of work")
    name, magic, journal = os.fsencode(victim), bytes.fromhex("d9d505f920a163d7"), Path(f"{path}-journal")
    head = struct.pack(">8s5I484xI", magic, 0, 1, 1, 512, 4096, 0x40000000 // 4096 + 1)
    journal.write_bytes(head + name + struct.pack(">2I", len(name), sum(name)) + magic)
    os.chown(journal, NOBODY, NOBODY)
    with pytest.raises(LayerError):
        rows_in(path, 0.2).insert([("new", b"1")], replace=True)
    home = Home(open_folder, at_home(open_folder))
    home.refused("purge pytools --wait 0.5", says="cachectl: pytools: ")
    assert victim.read_text() == "years of work"
    journal.unlink()
    home.refused("purge pytools", says="other users can write to")
    assert rows_of(path) == 20
    path.parent.chmod(0o755)
    home.cachectl("purge pytools")
    assert rows_of(path) == 0


@as_root
def test_a_file_that_others_can_write_is_changed_only_if_they_are_trusted(open_folder: Path) -> None:
    """MIOpen makes such folders and files."""
    path = dictionary(open_folder / FILE)
    path.chmod(0o666)
    before, rows = path.read_bytes(), rows_in(path)
    for use in (lambda: rows.insert([("a", b"1")]), lambda: rows.delete(rows.rows()), rows.vacuum):
        with pytest.raises(Unreachable, match="--shared if you trust them"):
            use()
    assert path.read_bytes() == before
    trusting = RowFile("pytools", path, SCHEMA, shared=True)
    assert len(trusting.delete(trusting.rows())) == 20


@as_root
def test_writers_of_a_folder_are_found(open_folder: Path) -> None:
    """Modes and owners along the whole path count, but no modes below a folder that others cannot enter."""
    folder, link = open_folder / "a/b", open_folder / "link"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    link.symlink_to(folder)
    # Successive changes of mode or owner, and the path that is then the reason.
    for changed, how, reason in (
        ("a/b", 0o775, None),  # the group of root
        ("a/b", (0, NOBODY), "a/b"),
        ("a/b", 0o777, "a/b"),
        ("a", 0o700, None),
        ("a/b", 0o755, None),
        ("a", 0o777, "a"),
        ("a", 0o1777, None),  # sticky
        ("a/b/file", 0o666, "a/b/file"),
        ("a/b/file", 0o644, None),
        ("a", 0o755, None),
    ):
        if isinstance(how, int):
            (open_folder / changed).chmod(how)
        else:
            os.chown(open_folder / changed, *how)
        expected = reason and f"other users can write to {open_folder / reason}"
        assert shared_because(folder, ("file", "missing")) == expected, changed
        assert changed == "a/b/file" or shared_because(link) == expected
    assert shared_because(link) is None
    for path, asked in ((link, link), (open_folder / "a", folder)):
        os.lchown(path, NOBODY, NOBODY)
        assert shared_because(asked) == f"{path} belongs to nobody"


#: Asks who can write to a folder, where some accounts are others.
ASK = """
import sys
from pathlib import Path
from cachectl.layers.disk.trust import find_strangers, shared_because
folder = Path(sys.argv[1])
print(shared_because(folder), [str(step.place) for step, _ in find_strangers(folder)])
"""
OTHERS = "other users can write to {folder} ['{folder}']\n"
MOUNT = 'mount --bind "$0/passwd" /etc/passwd && mount --bind "$0/group" /etc/group && exec "$@"'


@as_root
@pytest.mark.parametrize(
    ("passwd", "group", "answer"),
    [("operator:x:11:0::/:/bin/sh\n", "", OTHERS), ("", "eve", OTHERS), ("", "", "None []\n")],
)
def test_the_group_of_root_is_trusted_only_while_nobody_else_has_it(
    open_folder: Path, passwd: str, group: str, answer: str
) -> None:
    """An account is not in the list of members of its primary group."""
    folder = open_folder / "folder"
    folder.mkdir()
    folder.chmod(0o775)
    (open_folder / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\n{passwd}")
    (open_folder / "group").write_text(f"root:x:0:{group}\n")
    command = ("unshare", "--mount", "sh", "-c", MOUNT, open_folder, *python(ASK, folder))
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Traceback" not in asked.stderr and asked.returncode:
        pytest.skip("cannot mount here")
    assert asked.stdout == answer.format(folder=folder)
