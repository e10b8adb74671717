"""Helpers shared by the tests of miopen files."""

from __future__ import annotations

import bz2
import hashlib
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from cachectl.layers.base.environment import Environment

TABLE = (
    "CREATE TABLE IF NOT EXISTS `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,"
    "`uncompressed_size` INT NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args);"
)
TABLE_2_3 = (
    "CREATE TABLE `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL);"
)
INTEGERS = (
    "spatial_dim in_channels in_h in_w in_d fil_h fil_w fil_d out_channels batchsize pad_h pad_w pad_d conv_stride_h "
    "conv_stride_w conv_stride_d dilation_h dilation_w dilation_d bias group_count"
)
TABLES = (
    "CREATE TABLE IF NOT EXISTS `config` (`id` INTEGER PRIMARY KEY ASC,`layout` TEXT NOT NULL,"
    "`data_type` TEXT NOT NULL,`direction` TEXT NOT NULL,"
    + ",".join(f"`{column}` INT NOT NULL" for column in INTEGERS.split())
    + ");CREATE TABLE IF NOT EXISTS `perf_db` (`id` INTEGER PRIMARY KEY ASC,`solver` TEXT NOT NULL,"
    "`config` INTEGER NOT NULL,`params` TEXT NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS `idx_perf_db` ON perf_db(solver, config);"
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


@contextmanager
def pending(path: Path) -> Iterator[None]:
    """Hold a file open as a running program does, with a row that is only in its log."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute(f"INSERT INTO kern_db({COLUMNS}) VALUES('late.cl.o', ?, ?, ?, ?)", (ARGS, *packed(CODE)))
        connection.commit()
        yield


def perf(path: Path, problems: Mapping[int, Mapping[str, str]]) -> Path:
    """Write a perf-db in sqlite: for each problem, identified by its channels, solvers and their parameters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLES)
        columns = f"{', '.join(INTEGERS.split())}, layout, data_type, direction"
        for channels, solvers in problems.items():
            values = (2, channels, *(1 for _ in INTEGERS.split()[2:]), "NCHW", "FP32", "F")
            places = ", ".join("?" * len(values))
            number = connection.execute(f"INSERT INTO config({columns}) VALUES({places})", values).lastrowid
            for solver, params in solvers.items():
                row = (solver, number, params)
                connection.execute("INSERT INTO perf_db(solver, config, params) VALUES(?, ?, ?)", row)
        connection.commit()
    return path


def tuned(path: Path) -> dict[tuple[int, str], str]:
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT in_channels, solver, params FROM perf_db JOIN config ON config.id = perf_db.config"
        return {(row[0], row[1]): row[2] for row in connection.execute(query)}
