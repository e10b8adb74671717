"""Sqlite databases opened for reading, which changes nothing on the disk, or for writing.

**Reading.** A database is read under sqlite's shared lock. Sqlite would create files next to one in WAL mode, so that
one is read as immutable while it has no log, and with its log while another process has it open. An interrupted write,
or a log that is still to be applied, makes the content unknown: the next program that opens the database for writing
finishes it, as ``recover`` does.

**Writing.** Sqlite opens its journal next to the database by name, rolls back what it finds there, and may delete
files. So nothing is opened for writing where another user could place or replace one
(:mod:`cachectl.layers.disk.trust`).

**Content.** A view, a trigger or a generated column could run code, so only the tables and indexes that the library
creates are accepted.

Sources: sqlite.org/lockingv3.html, sqlite.org/wal.html, ``src/pager.c`` of sqlite 3.40 (``hasHotJournal``).
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from cachectl.layers.base.errors import Busy, Refused, Unreachable
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.handles import blocks_of
from cachectl.layers.disk.locking import try_record_lock, wait_until
from cachectl.layers.disk.plain import borrow, open_plain, plain_identity, read_locked, release
from cachectl.layers.disk.presence import nearest, status_at
from cachectl.layers.disk.trust import shared_because

#: Suffixes of the files that sqlite keeps next to a database.
COMPANIONS: Final = ("-journal", "-wal", "-shm")
_MAGIC: Final = b"SQLite format 3\0"
_HEADER: Final = 100
#: The bytes that sqlite locks: those of waiting and active writers, and of readers.
_FIRST_LOCKED: Final = 0x40000000
_LOCKED_BYTES: Final = 512
_WAL_MODE: Final = b"\2\2"
#: The byte of an index that every process with an open database locks (``UNIX_SHM_DMS`` in ``src/os_unix.c``).
_OPEN_LOCK: Final = 128
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_FLOCK: Final = "hhqqi4x"
#: Characters of a foreign name shown in messages.
_LONGEST: Final = 80
_CHUNK: Final = 1 << 20
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
    return DiskUsage(
        len(found), sum(status.st_size for status in found), sum(blocks) if len(blocks) == len(found) else None
    )


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return the version stamp of a plain file (inode, bytes, last change). Raises :class:`OSError` for others."""
    plain_identity(path)
    status = path.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def require_readable(layer: str, path: Path) -> None:
    """Raise :class:`Unreachable` if a file cannot be read to its end: sqlite takes that for damage too."""
    try:
        handle = open_plain(path)
        try:
            while os.read(handle, _CHUNK):
                pass
        finally:
            release(handle)
    except OSError as error:
        raise Unreachable(layer, f"cannot be read: {error.strerror or error}", path) from error


def is_wal(header: bytes) -> bool:
    """Return whether the first bytes of a database say that it is in WAL mode."""
    return header[18:20] == _WAL_MODE


def has_journal(path: Path) -> bool:
    """Return whether a journal lies next to a database, even one that a program is writing now."""
    return _size(companion(path, "-journal")) is not None


def has_log(path: Path) -> bool:
    """Return whether a log lies next to a database with writes that are still to be applied."""
    return bool(_size(companion(path, "-wal")))


def _is_open_elsewhere(path: Path) -> bool:
    """Return whether another process has a database in WAL mode open: sqlite keeps a lock on its index meanwhile."""
    index = companion(path, "-shm")
    if sys.platform != "linux" or _size(index) is None:
        return False
    import fcntl

    handle = borrow(index)
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _OPEN_LOCK, 1, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
    finally:
        release(handle)


def _size(path: Path) -> int | None:
    with suppress(OSError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


# ---------------------------------------------------------------------- content


def require_made_by(connection: sqlite3.Connection, statements: tuple[str, ...], layer: str, path: Path) -> None:
    """Raise :class:`Refused` for a database with an object that none of these ``create`` statements creates."""
    allowed = _tokens_of(statements)
    for kind, name, sql in connection.execute("select type, name, sql from sqlite_master"):
        # The index of a primary key has no statement.
        if not (_tokens(sql) in allowed if sql else kind == "index"):
            message = f"holds a {kind} {str(name)[:_LONGEST]!r} that its library does not make; left alone"
            raise Refused(layer, message, path)


@lru_cache
def _tokens_of(statements: Iterable[str]) -> frozenset[tuple[str, ...]]:
    return frozenset(map(_tokens, statements))


def _tokens(sql: object) -> tuple[str, ...]:
    """Return the tokens of a statement in lower case, without the quotes of names."""
    words = _QUOTES.sub(" ", str(sql).lower()).replace("if not exists", "")
    return tuple(_TOKEN.findall(words))


# ---------------------------------------------------------------------- connections


@contextmanager
def opened_for_reading(layer: str, path: Path, lock_timeout: float) -> Iterator[sqlite3.Connection]:
    """Open a database, and change nothing on the disk.

    Raises :class:`OSError`, :class:`sqlite3.Error`, and :class:`Unreachable` if a log is to be applied first, or if the
    database changed while it was read without a lock.
    """
    header = read_locked(path, limit=_HEADER)
    if header and not header.startswith(_MAGIC):
        raise sqlite3.DatabaseError("file is not a database")
    _require_plain(path)
    logged = has_log(path)
    in_use = logged and _is_open_elsewhere(path)
    if logged and not in_use:
        raise pending(layer, path)
    unlocked = not in_use and (is_wal(header) or _size(companion(path, "-wal")) is not None)
    before = _version(path)
    try:
        with _connected(path, "mode=ro&immutable=1" if unlocked else "mode=ro", lock_timeout) as connection:
            yield connection
    except sqlite3.DatabaseError as error:
        if unlocked and (has_log(path) or _version(path) != before):
            raise Busy(layer, "was written to while it was read; try again later", path) from error
        raise


def require_private(layer: str, path: Path) -> None:
    """Raise :class:`Unreachable` if another user can write to a database, or to a folder on the way to it.

    That user could make sqlite delete other files. Neither the file nor its folder need exist.
    """
    folder = nearest(path.parent)
    names = tuple(path.name + suffix for suffix in ("", *COMPANIONS)) if folder == path.parent else ()
    if (reason := shared_because(folder, names)) is not None:
        message = f"not opened for writing: {reason}; close it to them first, or use --shared if you trust them"
        raise Unreachable(layer, message, path)


@contextmanager
def opened_for_writing(
    path: Path, lock_timeout: float, require: Callable[[sqlite3.Connection], object], *, create: bool
) -> Iterator[sqlite3.Connection]:
    """Open a database for writing; sqlite rolls back interrupted writes first.

    ``require`` raises an error if an existing database is unusable. With ``create`` a missing file is made, and its
    folder. Raises as :func:`opened_for_reading`. The caller has called :func:`require_private`.
    """
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    is_new = create and _make(path)
    _require_plain(path)
    with _connected(path, "mode=rw", lock_timeout) as connection:
        connection.execute("pragma secure_delete = off")
        if not is_new:
            require(connection)
        yield connection
        # Where another program has the database open too, its log stays, and would make the content unknown.
        with suppress(sqlite3.OperationalError):
            connection.execute("pragma wal_checkpoint(truncate)")


@contextmanager
def exclusively_locked(layer: str, path: Path, lock_timeout: float) -> Iterator[None]:
    """Hold the lock of sqlite's writers on a file that need not be a database, without opening it as one.

    Raises :class:`Busy` after ``lock_timeout`` seconds, and :class:`OSError` for anything but a plain file.
    """
    handle = open_plain(path, flags=os.O_RDWR)
    try:
        if not wait_until(partial(try_record_lock, handle, _LOCKED_BYTES, _FIRST_LOCKED), lock_timeout):
            raise locked_too_long(layer, path, lock_timeout)
        yield
    finally:
        release(handle)


def locked_too_long(layer: str, path: Path, lock_timeout: float) -> Busy:
    """Return the error for a lock that another program held beyond the timeout."""
    message = f"locked by another process for more than {lock_timeout:g} s; try again later, or use --wait"
    return Busy(layer, message, path)


def pending(layer: str, path: Path) -> Unreachable:
    """Return the error for a database whose content is unknown until an interrupted write or a log is finished."""
    what = "a log is pending" if has_log(path) else "an interrupted write is pending"
    command = f"sqlite3 {shlex.quote(str(path))} .tables"
    return Unreachable(layer, f"{what}, which the next program that opens it finishes; so does: {command}", path)


@contextmanager
def _connected(path: Path, mode: str, lock_timeout: float) -> Iterator[sqlite3.Connection]:
    location = f"file:{quote(os.fsencode(path))}?{mode}"
    connected = sqlite3.connect(location, timeout=lock_timeout, uri=True, isolation_level=None, check_same_thread=False)
    with closing(connected) as connection:
        connection.text_factory = lambda data: data.decode(errors="surrogateescape")
        connection.execute("pragma trusted_schema = off")
        connection.execute("pragma cell_size_check = on")
        yield connection


def _require_plain(path: Path) -> None:
    """Raise :class:`OSError` if a database or a file that sqlite opens next to it is a link, a pipe or so."""
    for suffix in ("", *COMPANIONS):
        if not suffix or os.path.lexists(companion(path, suffix)):
            plain_identity(companion(path, suffix))


def _version(path: Path) -> tuple[int, ...] | None:
    status = status_at(path)
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def _make(path: Path) -> bool:
    """Make an empty file, which sqlite takes for a new database; return ``False`` if the file exists."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644))
        return True
    return False
