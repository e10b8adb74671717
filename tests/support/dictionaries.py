"""Helpers shared by the tests of dictionaries."""

import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from homes import Home

from cachectl.layers.host.here import this_environment
from cachectl.layers.pytools import PytoolsDictionaries
from support.layers import select

#: The pickle of ``None``.
NONE = b"\x80\x04N."

CREATE = "create table dict (keyhash text not null primary key, key_value text not null)"


PYTHON = this_environment().python
FILE = f"pdict-v5-mine-{PYTHON}.sqlite"


def equal_rows(count: int, value: bytes = b"\x80\x04N." + bytes(500)) -> dict[str, bytes]:
    return {f"{number:016x}": value for number in range(count)}


def dictionary(path: Path, content: Mapping[str, bytes] | None = None) -> Path:
    """Make a dictionary with some rows, by default with 20."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = equal_rows(20) if content is None else content
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(CREATE)
        connection.executemany("insert into dict values (?, ?)", content.items())
        connection.commit()
    return path


def mine(home: Home, content: dict[str, bytes]) -> tuple[PytoolsDictionaries, Path]:
    """Make a dictionary of a user's own; return the layer that it belongs to, and its file."""
    return PytoolsDictionaries(home.environment()), dictionary(home.path / ".cache/pytools" / FILE, content)


#: Fills the dictionary that it is given, and is killed before the end.
INTERRUPTED = (
    "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
    "c.execute('pragma cache_size = 1'); c.execute('begin immediate')\n"
    "for n in range(300): c.execute('insert into dict values (?, ?)', (str(n), b'x' * 4000))\n"
    "os.kill(os.getpid(), 9)"
)


def interrupted(path: Path) -> Path:
    dictionary(path)
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(path)], check=False)
    assert Path(f"{path}-journal").stat().st_size
    return path


def rows_of(path: Path) -> int:
    ((count,),) = select(path, "count(*) from dict")
    return int(count)
