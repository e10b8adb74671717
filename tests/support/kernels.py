"""Many cheap entries: kernels in a database of MIOpen's."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from cachectl.layers.base.facts import Artifact
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

TABLE = (
    "CREATE TABLE IF NOT EXISTS `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,"
    "`uncompressed_size` INT NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args);"
)


def kernel(number: int, size: int = 99) -> bytes:
    """Return the code of a kernel, different for each number."""
    return b"\x7fELF" + number.to_bytes(4, "little") * (size // 4)


def add_kernels(home: Home, numbers: Iterable[int], size: int = 99) -> None:
    """Add kernels to the database of a home, which is made if it is missing."""
    path = home.path / ".cache" / "miopen" / "3.3.0.a85ca8a54" / "gfx90a6e.ukdb"
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLE)
        for number in numbers:
            code = kernel(number, size)
            row = (f"k{number}.cl.o", " -O3", code, hashlib.md5(code).hexdigest(), 0)  # noqa: S324 - MIOpen's choice
            columns = "kernel_name, kernel_args, kernel_blob, kernel_hash, uncompressed_size"
            connection.execute(f"INSERT INTO kern_db({columns}) VALUES(?, ?, ?, ?, ?)", row)
        connection.commit()


def kernels_in(home: Home) -> dict[str, bytes]:
    """Return the entries of a home by their keys, as their layer reads them."""
    layer = Stack(home.environment())["miopen"]
    found = layer.get_many([entry.key for entry in layer.entries()])
    return {key: one.data for key, one in found.items() if isinstance(one, Artifact)}
