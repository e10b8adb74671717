"""Databases of MIOpen's kernels, which are also the cheapest entries when many are needed."""

from __future__ import annotations

import bz2
import hashlib
import sqlite3
import struct
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.core.entry import Artifact
from cachectl.layers.core.layer import get_many
from support.layers import select

if TYPE_CHECKING:
    from homes import Home

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
FIND = "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"

Values = tuple[bytes, str, int]


def stored_whole(code: bytes) -> Values:
    return code, hashlib.md5(code).hexdigest(), 0  # noqa: S324 - MIOpen's choice


def packed(code: bytes, level: int = 9) -> Values:
    blob = bz2.compress(code, level)
    whole = stored_whole(code)
    return (blob, whole[1], len(code)) if len(blob) < len(code) else whole


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


def artifact(key: str, data: bytes = CODE) -> Artifact:
    return Artifact("miopen", key, "miopen-kernel/1", data)


def key_of(file: str = f"{VERSION}/gfx90a6e.ukdb", name: str = NAME, args: str = ARGS) -> str:
    return f"{file}::{name}::{args}"


KEY = key_of()


def add_kernels(home: Home, numbers: Iterable[int], size: int = 99) -> None:
    """Add kernels, each with code of its own, to the database of a home, which is made if it is missing."""
    codes = {number: b"\x7fELF" + number.to_bytes(4, "little") * (size // 4) for number in numbers}
    store(user_file(home.path), {(f"k{number}.cl.o", " -O3"): stored_whole(code) for number, code in codes.items()})


def kernels_in(home: Home) -> dict[str, bytes]:
    layer = home.stack["miopen"]
    found = get_many(layer, [entry.key for entry in layer.entries()])
    return {key: one.data for key, one in found.items() if isinstance(one, Artifact)}


def library_bytes(version: str) -> bytes:
    """Return so much of a libMIOpen as states its version: a 64-bit ELF file with constants."""
    constants = f"\0HIP.\0HIP.{version.replace('.', '_', 3)}\0.ufdb.txt\0".encode()
    names = b"\0.rodata\0.shstrtab\0"
    head = b"\x7fELF\2\1\1".ljust(16, b"\0")
    at = 64 + len(constants) + len(names)
    header = head + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, 3, 2)
    sections = [
        (0,) * 10,
        (1, 1, 2, 0, 64, len(constants), 0, 0, 1, 0),
        (9, 3, 0, 0, 64 + len(constants), len(names), 0, 0, 1, 0),
    ]
    return header + constants + names + b"".join(struct.pack("<IIQQQQIIQQ", *row) for row in sections)
