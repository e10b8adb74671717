"""A journal that another user changes while cachectl reads the database beside it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from cachectl.layers.base.errors import Damaged, Unreachable
from cachectl.layers.pytools import SCHEMA
from cachectl.layers.stores import database
from cachectl.layers.stores.rows import RowFile

_MAGIC = bytes.fromhex("d9d505f920a163d7")


def interrupted(path: Path) -> Path:
    """Make a dictionary with the journal of a write that was interrupted; return the journal."""
    journal = Path(f"{path}-journal")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(SCHEMA.create[0])
        connection.execute("pragma cache_size = 1")
        connection.executemany("insert into dict values (?, ?)", ((str(number), "x" * 500) for number in range(200)))
        connection.execute("begin immediate")
        connection.execute("delete from dict")
        content, pending = path.read_bytes(), journal.read_bytes()
    path.write_bytes(content)
    journal.write_bytes(pending)
    return journal


def name_a_file(journal: Path, victim: Path) -> None:
    """Append to a journal what makes sqlite delete a file after rolling the journal back."""
    name = str(victim).encode()
    with journal.open("ab") as file:
        file.write(struct.pack(">I", 0x40000000 // 4096 + 1) + name + struct.pack(">2I", len(name), sum(name)) + _MAGIC)


def test_a_journal_that_changes_while_it_is_copied_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading rolls a copy of the journal back, so that the copy is what must name no file."""
    path = tmp_path / "pdict-v5-mine-1.sqlite"
    journal = interrupted(path)
    assert len(list(RowFile("pytools", path, SCHEMA).rows())) == 200
    victim = tmp_path / "thesis.tex"
    victim.write_text("years of work")
    copy_file = database._copy_file

    def copy_and_change(source: int, target: Path) -> None:
        copy_file(source, target)
        if not journal.read_bytes().endswith(_MAGIC):
            name_a_file(journal, victim)

    monkeypatch.setattr(database, "_copy_file", copy_and_change)
    with pytest.raises(Damaged, match="names another file"):
        list(RowFile("pytools", path, SCHEMA).rows())
    assert victim.read_text() == "years of work"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs user ids")
def test_no_copy_is_made_where_others_can_exchange_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a temporary folder that is not sticky, another user can put a link in the place of the copy.

    It is made in the state folder then. Where that is open to others too, the file is not read.
    """
    path = tmp_path / "pdict-v5-mine-1.sqlite"
    interrupted(path)
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    try:
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        folder.chmod(0o777)
        assert len(list(RowFile("pytools", path, SCHEMA).rows())) == 200
        assert os.listdir(tmp_path / "state" / "cachectl" / "scratch") == []
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        with pytest.raises(Unreachable, match="other users can write to"):
            list(RowFile("pytools", path, SCHEMA).rows())
        folder.chmod(0o1777)
        assert len(list(RowFile("pytools", path, SCHEMA).rows())) == 200
    finally:
        shutil.rmtree(folder)
