"""Helpers shared by the tests of miopen files."""

from __future__ import annotations

import bz2
import hashlib
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from cachectl.layers.base.environment import Environment

TABLE = (
    "CREATE TABLE IF NOT EXISTS `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,"
    "`uncompressed_size` INT NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args);"
)
VERSION = "3.3.0.a85ca8a54"
ARGS = " -DMLO_HW_WAVE_SZ=64 -mcpu=gfx90a"
CODE = b"\x7fELF" + b"some code that packs well " * 400
RAW = b"\x7fELF raw"
FIND = "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
COLUMNS = "kernel_name, kernel_args, kernel_blob, kernel_hash, uncompressed_size"

Values = tuple[bytes, str, int]


def environment_of(home: Path, **variables: str) -> Environment:
    return Environment({"HOME": str(home), **variables}, home=home, cwd=home, temporary=home / "tmp")


def packed(code: bytes, level: int = 9) -> Values:
    blob = bz2.compress(code, level)
    digest = hashlib.md5(code).hexdigest()  # noqa: S324 - MIOpen's choice
    return (blob, digest, len(code)) if len(blob) < len(code) else (code, digest, 0)


def store(path: Path, kernels: Mapping[str, Values], *, wal: bool = False) -> Path:
    """Write kernels by their names, as MIOpen does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        if wal:
            connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(TABLE)
        for name, values in kernels.items():
            connection.execute(
                f"INSERT OR REPLACE INTO kern_db({COLUMNS}) VALUES(?, ?, ?, ?, ?)", (name, ARGS, *values)
            )
        connection.commit()
    return path


def stored(path: Path) -> dict[str, Values]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = connection.execute(f"SELECT {COLUMNS} FROM kern_db").fetchall()
    assert {row[1] for row in rows} <= {ARGS}
    return {row[0]: row[2:] for row in rows}


def user_file(home: Path, base: str = "gfx90a6e", version: str = VERSION) -> Path:
    return home / ".cache" / "miopen" / version / f"{base}.ukdb"
