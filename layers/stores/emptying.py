"""Remove all rows of a sqlite file on a full file system, without a journal.

To delete rows, sqlite first copies every changed page to a journal. A full file system has no room for that copy. This
module changes the file in place instead, in an order that leaves a whole database at any interruption:

1. Most of page 1 is unused: it holds the header at its beginning and the schema at its end. The gap between them takes
   an empty database of the same schema with pages of 512 or 1024 bytes. Sqlite does not read the gap.
2. One write replaces the header and the pointers to the schema: 112 bytes of the first disk sector. Before it the
   database is the old one, after it the empty one. The change counter and the schema version grow by one, so that
   programs that have the file open discard their copies, as they do after a ``VACUUM`` that changed the page size.
3. The rest of the file belongs to no page any more and is cut off, as ``VACUUM`` does.

The caller holds sqlite's exclusive lock for the whole time, so other programs wait and then find no rows.

Source: the database file format, sqlite.org/fileformat2.html (header, b-tree pages, cells).
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from typing import Final

from cachectl.layers.disk.atomic import cut

#: Sizes of a page of the empty database, the smaller first: sqlite allows no smaller one.
_PAGE_SIZES: Final = (512, 1024)
_HEADER: Final = 100
_TABLE_LEAF: Final = 13
_INDEX_LEAF: Final = 10
#: Type, first free block, number of cells, start of their content, fragmented bytes.
_PAGE_HEAD: Final = struct.Struct(">BHHHB")
#: The smallest disk sector: a write within one happens or does not.
_SECTOR: Final = 512
#: Start of the pointers to the rows of page 1.
_POINTERS: Final = _HEADER + _PAGE_HEAD.size
#: Versions of the file format in the header; with WAL, page 1 may lie in another file.
_ROLLBACK_JOURNAL: Final = b"\1\1"


def empty_image(first_page: bytes, roots: Mapping[int, str]) -> bytes | None:
    """Return the empty database with the schema of a page 1; ``None`` if it does not fit into the gap there.

    ``roots`` maps the root page of everything in the schema to its type, ``table`` or ``index``.
    """
    count = len(roots)
    if len(first_page) < _SECTOR or commit_length(count) > _SECTOR:
        return None
    kind, _, cells, content, _ = _PAGE_HEAD.unpack_from(first_page, _HEADER)
    plain = first_page[18:21] == _ROLLBACK_JOURNAL + b"\0" and not any(first_page[52:56])
    in_order = sorted(roots) == list(range(2, count + 2)) and set(roots.values()) <= {"table", "index"}
    if kind != _TABLE_LEAF or cells != count or not plain or not in_order:
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
    """Return the length of the part of page 1 that commits an empty database with so many tables and indexes."""
    return _POINTERS + 2 * count


def _image(first_page: bytes, rows: list[bytes], roots: Mapping[int, str], size: int) -> bytes:
    pages = len(roots) + 1
    counter, version = (struct.unpack_from(">I", first_page, at)[0] + 1 & 0xFFFFFFFF for at in (24, 40))
    image = bytearray(size * pages)
    image[:_HEADER] = first_page[:_HEADER]
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
    _PAGE_HEAD.pack_into(image, _HEADER, _TABLE_LEAF, 0, len(rows), end, 0)
    for root, kind in roots.items():
        leaf = _TABLE_LEAF if kind == "table" else _INDEX_LEAF
        _PAGE_HEAD.pack_into(image, (root - 1) * size, leaf, 0, 0, size, 0)
    return bytes(image)


def _cell(page: bytes, place: int) -> bytes:
    """Return the bytes of one row of the schema in page 1: length of the record, row id, record."""
    length, after = _number(page, place)
    _, after = _number(page, after)
    if after + length > len(page):
        raise IndexError("the row goes on in another page")
    return page[place : after + length]


def _number(page: bytes, place: int) -> tuple[int, int]:
    """Read a variable-length integer: seven bits a byte, eight in the ninth. Return it and the place after it."""
    value = 0
    for at in range(place, place + 8):
        value = value << 7 | page[at] & 0x7F
        if not page[at] & 0x80:
            return value, at + 1
    return value << 8 | page[place + 8], place + 9


def write_empty(handle: int, image: bytes, count: int) -> None:
    """Write the empty database with ``count`` tables and indexes over an open one.

    Raises :class:`OSError`; then either all rows are there, or none. Every byte is written over another one, so no room
    is needed where the file system writes in place.
    """
    commit = commit_length(count)
    for data, place in ((image[commit:], commit), (image[:commit], 0)):
        if os.pwrite(handle, data, place) != len(data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        # The next write must not reach the disk before this one.
        os.fsync(handle)
    cut(handle, len(image))
