"""Databases in folders that are exchanged, and after interrupted writes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from support.databases import FILE, dictionary, rows_of

from cachectl.layers.base.errors import Unreachable
from cachectl.layers.base.facts import Severity
from cachectl.layers.disk.locks import presence_lock
from cachectl.layers.pytools import SCHEMA, PytoolsDictionaries
from cachectl.layers.stores import database
from cachectl.layers.stores.rows import RowFile, Weight

if TYPE_CHECKING:
    from homes import Home


# ---------------------------------------------------------------------- exchanged folders


def test_a_lock_stays_in_the_folder_that_was_opened(tmp_path: Path) -> None:
    """PyOpenCL's lock is never made in, or removed from, a folder that was put in the place of another."""
    inside, outside = tmp_path / "base", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    with presence_lock("pyopencl", inside / "lock"):
        inside.rename(tmp_path / "moved")
        outside.rename(inside)
        (inside / "lock").touch()
        assert (tmp_path / "moved" / "lock").exists()
    assert not (tmp_path / "moved" / "lock").exists()
    assert (inside / "lock").exists()
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    with pytest.raises(Unreachable), presence_lock("pyopencl", tmp_path / "link" / "lock"):
        pass
    assert os.listdir(tmp_path / "moved") == []


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("verb", ["insert", "delete", "create", "read"])
def test_a_folder_that_is_exchanged_while_sqlite_opens_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, moment: str
) -> None:
    """Sqlite opens by name, so its open file is compared with the checked one before the first write."""
    inside, other = tmp_path / "inside" / FILE, tmp_path / "other" / FILE
    dictionary(other)
    inside.parent.mkdir()
    if verb != "create":
        dictionary(inside)
    before = {path: path.read_bytes() for path in (inside, other) if path.exists()}
    connected = database._connected

    def exchange() -> None:
        inside.parent.rename(tmp_path / "aside")
        other.parent.rename(inside.parent)
        (tmp_path / "aside").rename(other.parent)

    @contextmanager
    def connect(*arguments: Any) -> Iterator[database.Connection]:  # noqa: ANN401 - as what it stands in for
        if moment == "before":
            exchange()
        with connected(*arguments) as connection:
            if moment == "after":
                exchange()
            yield connection

    monkeypatch.setattr(database, "_connected", connect)
    rows = RowFile("pytools", inside, SCHEMA)
    uses: dict[str, Callable[[], object]] = {
        "insert": lambda: rows.insert(("new",), (b"1",), replace=False),
        "create": lambda: rows.insert(("new",), (b"1",), replace=False),
        "delete": lambda: rows.delete_up_to(Weight(20, 20 * 504, 20)),
        "read": rows.sum,
    }
    if (verb, moment) == ("read", "after"):
        assert uses[verb]() == Weight(20, 20 * 504, 20)
    else:
        with pytest.raises(Unreachable, match="was replaced while it was opened"):
            uses[verb]()
    exchange()
    after = {path: path.read_bytes() for path in (inside, other) if path.exists()}
    assert {path: after[path] for path in before} == before
    assert sorted(os.listdir(other.parent)) == [FILE]


# ---------------------------------------------------------------------- interrupted writes

INTERRUPTED: Final = (
    "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
    "c.execute('pragma cache_size = 1'); c.execute('begin immediate')\n"
    "for n in range(300): c.execute('insert into dict values (?, ?)', (str(n), b'x' * 4000))\n"
    "os.kill(os.getpid(), 9)"
)


def interrupted(path: Path) -> Path:
    """Make a dictionary with an interrupted write."""
    dictionary(path)
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(path)], check=False)
    assert Path(f"{path}-journal").stat().st_size
    return path


def test_an_interrupted_write_keeps_no_verb_from_its_work(home: Home) -> None:
    path = interrupted(home.path / ".cache" / "pytools" / FILE)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert len(home.json("ls", "pytools")["entries"]) == 20
    assert home.json("purge", "pytools", "--dry-run")["total"]["removed"] == 20
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    assert home.json("purge", "pytools")["total"]["removed"] == 20
    assert os.listdir(path.parent) == [path.name]
    assert rows_of(path) == 0


def test_a_database_too_large_to_copy_is_recovered_by_a_purge(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading says which command does it, and a purge does it first."""
    interrupted(home.path / ".cache" / "pytools" / FILE)
    monkeypatch.setattr(database, "SANE", 0)
    layer = PytoolsDictionaries(home.environment())
    (finding,) = layer.verify(layer.roots()[0])
    assert finding.severity is Severity.HARMLESS
    assert "cachectl purge pytools rolls it back first" in finding.message
    assert layer.plan_clear().failed
    layer.recover_all()
    assert layer.clear(layer.plan_clear()).removed == 20


@pytest.mark.parametrize("content", [b"", bytes(512)])
def test_a_journal_without_content_is_removed(home: Home, content: bytes) -> None:
    """Sqlite leaves it, if a kill came before its header was written."""
    path = dictionary(home.path / ".cache" / "pytools" / FILE, rows=0)
    Path(f"{path}-journal").write_bytes(content)
    home.cachectl("purge", "pytools")
    assert os.listdir(path.parent) == [path.name]


def test_the_journal_of_a_running_program_is_left(home: Home) -> None:
    path = dictionary(home.path / ".cache" / "pytools" / FILE)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("begin immediate")
        connection.execute("insert into dict values ('new', 'x')")
        assert Path(f"{path}-journal").exists()
        assert len(home.json("ls", "pytools")["entries"]) == 20
        done = home.cachectl("purge", "pytools", "--wait", "0.1", check=False)
        assert done.returncode == 1
        assert Path(f"{path}-journal").exists()
        connection.execute("commit")
    assert rows_of(path) == 21
