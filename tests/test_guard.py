"""Tests change nothing outside of temporary folders, and neither do the Pythons that they start."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import guard
import pytest

#: What would change something outside; nothing is there.
OUTSIDE = {
    "mkdir": "os.mkdir('/nonexistent/folder')",
    "open": "open('/nonexistent/file', 'w')",
    "remove, by a handle": "os.remove('nothing', dir_fd=os.open('/', os.O_RDONLY))",
    "rename, by a link": "os.symlink('/usr', 'link'), os.rename('link/none', 'link/nothing')",
    "sqlite": "sqlite3.connect('/nonexistent/file')",
    "MIOpen's fallback": "open('/tmp/gfx90a6e.ukdb', 'a')",
}


@pytest.mark.parametrize("statement", OUTSIDE.values(), ids=OUTSIDE)
def test_a_change_elsewhere_is_refused_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(guard.Outside):
        exec(statement, {"os": os, "sqlite3": sqlite3})  # noqa: S102 - one of those above
    assert len(guard.take_touched()) == 1
    (tmp_path / "child").mkdir()
    command = (sys.executable, "-c", f"import os, sqlite3; {statement}")
    done = subprocess.run(command, cwd=tmp_path / "child", capture_output=True, text=True, check=False)
    assert (done.returncode, "Outside" in done.stderr) == (1, True)
    assert len(guard.take_touched()) == 1


def test_temporary_folders_are_free(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    sqlite3.connect(tmp_path / "file").close()
    os.rename(tmp_path / "file", tmp_path / "folder/file")
    sqlite3.connect("file:/etc/passwd?mode=ro", uri=True).close()
    assert guard.take_touched() == []
