"""A sqlite database as a file: the files next to it, its schema, and how it is emptied in place.

Before sqlite deletes rows, it copies every changed page to a journal, for which a full file system has no room. So
:func:`write_empty` changes the file in place, in an order that leaves a valid database at any interruption:

1. Most of page 1 is unused: it holds the header at its beginning and the schema at its end. The gap between them takes
   an empty database of the same schema with pages of 512 or 1024 bytes. Sqlite does not read the gap.
2. One write replaces the header and the pointers to the schema: 112 bytes of the first disk sector. Before it the
   database is the old one, after it the empty one. The change counter and the schema version grow by one, so that
   programs that have the file open discard their copies, as they do after a ``VACUUM`` that changed the page size.
3. The rest of the file, which no longer belongs to a page, is cut off, as ``VACUUM`` does.

Sources: sqlite.org/lockingv3.html, sqlite.org/wal.html, sqlite.org/fileformat2.html (header, b-tree pages, cells),
``src/pager.c`` of sqlite 3.40 (``hasHotJournal``).
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from cachectl.layers.base.lazy import regex
from cachectl.layers.disk import atomic, handles, plain

#: Suffixes of the files that sqlite keeps next to a database.
COMPANIONS = ("-journal", "-wal", "-shm")
_WAL_MODE = b"\2\2"
#: The byte of an index that every process with an open database locks (``UNIX_SHM_DMS`` in ``src/os_unix.c``).
_OPEN_LOCK = 128
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_FLOCK = "hhqqi4x"
#: Characters of a foreign name shown in messages.
_LONGEST = 80
_QUOTES = regex(r'[`"\[\]]')
_TOKEN = regex(r"\w+|[^\w\s]")
#: Page sizes of the empty database; sqlite allows no smaller one than the first.
_PAGE_SIZES = (512, 1024)
#: The bytes of the header.
HEADER = 100
_TABLE_LEAF = 13
_INDEX_LEAF = 10
#: Type, first free block, number of cells, start of their content, fragmented bytes.
_PAGE_HEAD = struct.Struct(">BHHHB")
#: The smallest disk sector: a write within one is atomic.
_SECTOR = 512
#: Start of the pointers to the rows of page 1.
_POINTERS = HEADER + _PAGE_HEAD.size
#: Versions of the file format in the header; with WAL, page 1 may be in another file.
_ROLLBACK_JOURNAL = b"\1\1"


def companion(path: Path, suffix: str) -> Path:
    """Return the path of the file that sqlite keeps next to a database."""
    return path.with_name(path.name + suffix)


def without_companion(name: str) -> str:
    """Return the name of the database to which a sqlite companion file belongs; any other name unchanged."""
    return next((name.removesuffix(ending) for ending in COMPANIONS if name.endswith(ending)), name)


def sizes_of(path: Path) -> list[int]:
    """Return the bytes that a database takes on the disk, and each of the files that sqlite keeps next to it."""
    statuses = (plain.status_at(companion(path, suffix), follow=True) for suffix in ("", *COMPANIONS))
    return [handles.size_of(status) for status in statuses if status is not None]


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return the version stamp of a plain file (inode, bytes, last change). Raises :class:`OSError` for others."""
    status = plain.plain_status(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_wal(header: bytes) -> bool:
    """Return whether the first bytes of a database say that it is in WAL mode."""
    return header[18:20] == _WAL_MODE


def stated_size(path: Path) -> int:
    """Return the bytes of a database according to its header; 0 if that is too short, or an old sqlite wrote last.

    A log may hold more. Source: ``sqlite.org/fileformat2.html``, 1.3.8.
    """
    header = plain.read_locked(path, limit=HEADER)
    if len(header) < HEADER or header[24:28] != header[92:96]:
        return 0
    page = int.from_bytes(header[16:18], "big")
    return (1 << 16 if page == 1 else page) * int.from_bytes(header[28:32], "big")


def size_of(path: Path) -> int | None:
    """Return the size of a plain file; ``None`` for anything else."""
    with suppress(OSError):
        return plain.plain_status(path).st_size
    return None


def has_journal(path: Path) -> bool:
    """Return whether a database has a journal, even one that a program is writing now."""
    return size_of(companion(path, "-journal")) is not None


def has_log(path: Path) -> bool:
    """Return whether a database has a log with writes that have not been applied."""
    return bool(size_of(companion(path, "-wal")))


def is_open_elsewhere(path: Path) -> bool:
    """Return whether another process has a database in WAL mode open: sqlite then holds a lock on its index."""
    index = companion(path, "-shm")
    if sys.platform != "linux" or size_of(index) is None:
        return False
    import fcntl

    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _OPEN_LOCK, 1, 0)
    with plain.opened_locked(index) as handle:
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, query))[0] != fcntl.F_UNLCK)


def columns_of(path: Path, table: str) -> set[str]:
    """Return the names of a table's columns in a file that nobody is writing; none if it has no such table."""
    with closing(sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=ro&immutable=1", uri=True)) as connection:
        return {name for (name,) in connection.execute("select name from pragma_table_info(?)", (table,))}


def foreign_object(connection: sqlite3.Connection, statements: tuple[str, ...]) -> str | None:
    """Return the kind and name of an object that no statement creates, such as a trigger, which could run code."""
    allowed = set(map(_tokens, statements))
    for kind, name, sql in connection.execute("select type, name, sql from sqlite_master"):
        # The index of a primary key has no statement.
        if not (_tokens(sql) in allowed if sql else kind == "index"):
            return f"{kind} {str(name)[:_LONGEST]!r}"
    return None


@lru_cache
def _tokens(sql: object) -> tuple[str, ...]:
    """Return the tokens of a statement in lower case, without the quotes of names."""
    words = _QUOTES.sub(" ", str(sql).lower()).replace("if not exists", "")
    return tuple(_TOKEN.findall(words))


def empty_image(first_page: bytes, roots: Mapping[int, str]) -> bytes | None:
    """Return an empty database with the schema of a page 1; ``None`` if it does not fit into the gap of that page.

    ``roots`` maps the root page of everything in the schema to its type, ``table`` or ``index``.
    """
    count = len(roots)
    if len(first_page) < _SECTOR or commit_length(count) > _SECTOR:
        return None
    kind, _, cells, content, _ = _PAGE_HEAD.unpack_from(first_page, HEADER)
    is_plain = first_page[18:21] == _ROLLBACK_JOURNAL + b"\0" and not any(first_page[52:56])
    in_order = sorted(roots) == list(range(2, count + 2)) and set(roots.values()) <= {"table", "index"}
    if kind != _TABLE_LEAF or cells != count or not is_plain or not in_order:
        return None
    try:
        rows = [_cell(first_page, place) for place in struct.unpack_from(f">{count}H", first_page, _POINTERS)]
    except IndexError:
        return None
    for size in _PAGE_SIZES:
        if commit_length(count) + sum(map(len, rows)) <= size and (count + 1) * size <= content:
            return _image(first_page, rows, roots, size)
    return None


def commit_length(count: int) -> int:
    """Return how many bytes of page 1 commit an empty database with ``count`` tables and indexes."""
    return _POINTERS + 2 * count


def _image(first_page: bytes, rows: list[bytes], roots: Mapping[int, str], size: int) -> bytes:
    pages = len(roots) + 1
    counter, version = (struct.unpack_from(">I", first_page, at)[0] + 1 & 0xFFFFFFFF for at in (24, 40))
    image = bytearray(size * pages)
    image[:HEADER] = first_page[:HEADER]
    struct.pack_into(">H", image, 16, size)
    # Change counter, pages of the file, first free page, number of free pages, schema version.
    struct.pack_into(">5I", image, 24, counter, pages, 0, 0, version)
    # The number of pages counts only while this equals the change counter.
    struct.pack_into(">I", image, 92, counter)
    end = size
    for number, row in enumerate(rows):
        end -= len(row)
        image[end : end + len(row)] = row
        struct.pack_into(">H", image, _POINTERS + 2 * number, end)
    _PAGE_HEAD.pack_into(image, HEADER, _TABLE_LEAF, 0, len(rows), end, 0)
    for root, kind in roots.items():
        leaf = _TABLE_LEAF if kind == "table" else _INDEX_LEAF
        _PAGE_HEAD.pack_into(image, (root - 1) * size, leaf, 0, 0, size, 0)
    return bytes(image)


def _cell(page: bytes, place: int) -> bytes:
    """Return the bytes of one row of the schema in page 1: length of the record, row id, record."""
    length, after = _number(page, place)
    _, after = _number(page, after)
    if after + length > len(page):
        raise IndexError("the row continues on another page")
    return page[place : after + length]


def _number(page: bytes, place: int) -> tuple[int, int]:
    """Read a variable-length integer (seven bits a byte, eight in the ninth); return it and the offset after it."""
    value = 0
    for at in range(place, place + 8):
        value = value << 7 | page[at] & 0x7F
        if not page[at] & 0x80:
            return value, at + 1
    return value << 8 | page[place + 8], place + 9


def write_empty(handle: int, image: bytes, count: int) -> None:
    """Overwrite an open database with an empty one that has ``count`` tables and indexes, under an exclusive lock.

    This needs no room where the file system writes in place. After an :class:`OSError` all rows remain, or none.
    """
    commit = commit_length(count)
    for data, place in ((image[commit:], commit), (image[:commit], 0)):
        if os.pwrite(handle, data, place) != len(data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        # The next write must not reach the disk before this one.
        os.fsync(handle)
    atomic.cut(handle, len(image))
