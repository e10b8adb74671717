"""Helpers shared by the tests of miopen kernels."""

from __future__ import annotations

import bz2
import hashlib
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from cachectl.layers.core.facts import Artifact
from support.layers import environment_of as environment_of  # noqa: PLC0414 - for its users
from support.layers import select

TABLE_2_3 = (
    "CREATE TABLE `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL);"
)
TABLE = (
    TABLE_2_3.removesuffix(");").replace("TABLE", "TABLE IF NOT EXISTS")
    + ",`kernel_hash` TEXT NOT NULL,`uncompressed_size` INT NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args);"
)
COLUMNS = "kernel_name, kernel_args, kernel_blob, kernel_hash, uncompressed_size"
INSERT = f"INSERT OR REPLACE INTO kern_db({COLUMNS}) VALUES(?, ?, ?, ?, ?)"
NAME = "MIOpenConvUni.cl.o"
ARGS = " -DMLO_HW_WAVE_SZ=64 -mcpu=gfx90a"
CODE = b"\x7fELF" + b"some code that packs well " * 400
VERSION = "3.3.0.a85ca8a54"

Values = tuple[bytes, str, int]


def packed(code: bytes, level: int = 9) -> Values:
    blob = bz2.compress(code, level)
    digest = hashlib.md5(code).hexdigest()  # noqa: S324 - MIOpen's choice
    return (blob, digest, len(code)) if len(blob) < len(code) else (code, digest, 0)


def store(path: Path, rows: Mapping[tuple[str, str], tuple[object, ...]], *, wal: bool = False) -> Path:
    """Write rows as MIOpen does, given as (name, args) and (blob, hash, size)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        if wal:
            connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(TABLE)
        connection.executemany(INSERT, [(*key, *values) for key, values in rows.items()])
        connection.commit()
    return path


def stored(path: Path) -> list[tuple[object, ...]]:
    return select(path, f"{COLUMNS} FROM kern_db ORDER BY id")


def user_file(home: Path, base: str = "gfx90a6e", version: str = VERSION) -> Path:
    return home / ".cache/miopen" / version / f"{base}.ukdb"


def artifact(key: str, data: bytes = CODE, layer: str = "miopen", form: str = "miopen-kernel/1") -> Artifact:
    return Artifact(layer, key, form, data)


def key_of(file: str = f"{VERSION}/gfx90a6e.ukdb", name: str = NAME, args: str = ARGS) -> str:
    return f"{file}::{name}::{args}"


KEY = key_of()
