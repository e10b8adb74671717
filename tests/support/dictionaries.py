"""Helpers shared by the tests of dictionaries."""

import sqlite3
from contextlib import closing
from pathlib import Path

from homes import Home

from cachectl.layers.pytools import PytoolsDictionaries

#: The pickle of ``None``.
NONE = b"\x80\x04N."

CREATE = "create table dict (keyhash text not null primary key, key_value text not null)"


def dictionary(folder: Path, file: str, content: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(CREATE)
        connection.executemany("insert into dict values (?, ?)", content.items())
        connection.commit()
    return path


def mine(home: Home, content: dict[str, bytes]) -> tuple[PytoolsDictionaries, Path]:
    """Make a dictionary of a user's own; return the layer that it belongs to, and its file."""
    layer = PytoolsDictionaries(home.environment())
    file = f"pdict-v5-mine-{layer.environment.python}.sqlite"
    return layer, dictionary(home.path / ".cache/pytools", file, content)
