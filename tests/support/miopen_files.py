"""MIOpen's databases with kernels of one architecture, by their names."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from support import miopen_kernels
from support.miopen_kernels import ARGS, COLUMNS, Values

RAW = b"\x7fELF raw"
FIND = "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"


def store(path: Path, kernels: Mapping[str, Values], *, wal: bool = False) -> Path:
    return miopen_kernels.store(path, {(name, ARGS): values for name, values in kernels.items()}, wal=wal)


def stored(path: Path) -> dict[str, Values]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = connection.execute(f"SELECT {COLUMNS} FROM kern_db").fetchall()
    assert {row[1] for row in rows} <= {ARGS}
    return {row[0]: row[2:] for row in rows}
