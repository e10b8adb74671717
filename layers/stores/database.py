"""A sqlite database as files: what lies next to it, and what may be in it.

Sources: sqlite.org/lockingv3.html, sqlite.org/wal.html, ``src/pager.c`` of sqlite 3.40 (``hasHotJournal``).
"""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.handles import blocks_of
from cachectl.layers.disk.plain import borrow, plain_identity, release

#: Suffixes of the files that sqlite keeps next to a database.
COMPANIONS: Final = ("-journal", "-wal", "-shm")
_WAL_MODE: Final = b"\2\2"
#: The byte of an index that every process with an open database locks (``UNIX_SHM_DMS`` in ``src/os_unix.c``).
_OPEN_LOCK: Final = 128
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_FLOCK: Final = "hhqqi4x"
#: Characters of a foreign name shown in messages.
_LONGEST: Final = 80
_QUOTES: Final = regex(r'[`"\[\]]')
_TOKEN: Final = regex(r"\w+|[^\w\s]")


def companion(path: Path, suffix: str) -> Path:
    """Return the path of the file that sqlite keeps next to a database."""
    return path.with_name(path.name + suffix)


def without_companion(name: str) -> str:
    """Return the name of the database to which a sqlite companion file belongs; any other name unchanged."""
    return next((name.removesuffix(ending) for ending in COMPANIONS if name.endswith(ending)), name)


class DiskUsage(NamedTuple):
    """Files of a database, their bytes, and their disk blocks in bytes, ``None`` if the system does not say."""

    files: int
    bytes: int
    disk: int | None


def disk_usage(path: Path) -> DiskUsage:
    """Count a database and the files that sqlite keeps next to it."""
    found = []
    for suffix in ("", *COMPANIONS):
        with suppress(FileNotFoundError):
            found.append(companion(path, suffix).stat())
    blocks = [size for size in map(blocks_of, found) if size is not None]
    disk = sum(blocks) if len(blocks) == len(found) else None
    return DiskUsage(len(found), sum(status.st_size for status in found), disk)


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return the version stamp of a plain file (inode, bytes, last change). Raises :class:`OSError` for others."""
    plain_identity(path)
    status = path.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_wal(header: bytes) -> bool:
    """Return whether the first bytes of a database say that it is in WAL mode."""
    return header[18:20] == _WAL_MODE


def size_of(path: Path) -> int | None:
    """Return the size of a plain file; ``None`` for anything else."""
    with suppress(OSError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def has_journal(path: Path) -> bool:
    """Return whether a journal lies next to a database, even one that a program is writing now."""
    return size_of(companion(path, "-journal")) is not None


def has_log(path: Path) -> bool:
    """Return whether a log lies next to a database with writes that are still to be applied."""
    return bool(size_of(companion(path, "-wal")))


def is_open_elsewhere(path: Path) -> bool:
    """Return whether another process has a database in WAL mode open: sqlite keeps a lock on its index meanwhile."""
    index = companion(path, "-shm")
    if sys.platform != "linux" or size_of(index) is None:
        return False
    import fcntl

    handle = borrow(index)
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _OPEN_LOCK, 1, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
    finally:
        release(handle)


def foreign_object(connection: sqlite3.Connection, statements: tuple[str, ...]) -> str | None:
    """Return the kind and name of an object that none of these ``create`` statements creates.

    A view, a trigger or a generated column could run code.
    """
    allowed = _tokens_of(statements)
    for kind, name, sql in connection.execute("select type, name, sql from sqlite_master"):
        # The index of a primary key has no statement.
        if not (_tokens(sql) in allowed if sql else kind == "index"):
            return f"{kind} {str(name)[:_LONGEST]!r}"
    return None


@lru_cache
def _tokens_of(statements: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    return frozenset(map(_tokens, statements))


def _tokens(sql: object) -> tuple[str, ...]:
    """Return the tokens of a statement in lower case, without the quotes of names."""
    words = _QUOTES.sub(" ", str(sql).lower()).replace("if not exists", "")
    return tuple(_TOKEN.findall(words))
