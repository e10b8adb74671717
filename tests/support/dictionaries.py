"""Helpers shared by the tests of dictionaries."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def dictionary(folder: Path, file: str, content: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table dict (keyhash text not null primary key, key_value text not null)")
        connection.executemany("insert into dict values (?, ?)", content.items())
        connection.commit()
    return path
