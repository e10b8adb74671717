"""The formats of Mesa's single-file store and of its database, each a data file and an index.

Sources: ``src/util/fossilize_db.c`` and ``.h`` (single file), ``src/util/mesa_cache_db.c`` (database).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cachectl.layers.base.lazy import regex

#: The name of an entry in both: a SHA-1 as hex digits.
NAME: Final = regex(rb"[0-9a-f]{40}")
_NAME_LENGTH: Final = 40

FOZ_MAGIC: Final = b"\x81FOSSILIZEDB\0\0\0\x06"
_FOZ_VERSIONS: Final = (5, 6)
#: Packed length, kind of packing, checksum, unpacked length.
FOZ_HEADER: Final = struct.Struct("<IIII")
_FOZ_PLAIN: Final = 1
_FOZ_PLACE: Final = struct.Struct("<Q")
_FOZ_RECORD: Final = _NAME_LENGTH + FOZ_HEADER.size + _FOZ_PLACE.size

DB_MAGIC: Final = b"MESA_DB\0"
_DB_VERSION: Final = 1
#: Magic, version, and a number that is equal in files that belong together.
DB_HEADER: Final = struct.Struct("<8sIQ")
#: Key, checksum, length.
DB_ENTRY: Final = struct.Struct("<20sII")
#: The key's beginning, length, nanoseconds of the last use since the machine started, place.
DB_RECORD: Final = struct.Struct("<QIQQ")


@dataclass(frozen=True, slots=True)
class Place:
    """A record of an index: the name of an entry (or its beginning), and the offset of its header."""

    name: str
    offset: int
    length: int | None = None
    used: int = 0


def is_fossilize(head: bytes) -> bool:
    """Return whether a file has the header of a single-file store. Mesa neither uses nor repairs another file."""
    whole = len(head) == len(FOZ_MAGIC)
    return whole and head[:-1] == FOZ_MAGIC[:-1] and head[-1] in _FOZ_VERSIONS


def foz_places(index: bytes) -> Iterator[Place]:
    """Yield the records of an index up to the first incomplete one, where Mesa stops."""
    at = len(FOZ_MAGIC)
    while at + _FOZ_RECORD <= len(index):
        name = index[at : at + _NAME_LENGTH]
        length, _, _, _ = FOZ_HEADER.unpack_from(index, at + _NAME_LENGTH)
        if length != _FOZ_PLACE.size or not NAME.fullmatch(name):
            return
        (offset,) = _FOZ_PLACE.unpack_from(index, at + _NAME_LENGTH + FOZ_HEADER.size)
        yield Place(name.decode(), offset)
        at += _FOZ_RECORD


def foz_entry(name: str, data: bytes, checksum: int) -> bytes:
    """Return the bytes of an entry of the data file."""
    return name.encode() + FOZ_HEADER.pack(len(data), _FOZ_PLAIN, checksum, len(data)) + data


def foz_record(place: Place) -> bytes:
    """Return the bytes of a record of the index."""
    size = _FOZ_PLACE.size
    return place.name.encode() + FOZ_HEADER.pack(size, _FOZ_PLAIN, 0, size) + _FOZ_PLACE.pack(place.offset)


def db_number(head: bytes) -> int | None:
    """Return the number in a header, 0 while the file is being changed; ``None`` for other bytes."""
    if len(head) < DB_HEADER.size:
        return None
    magic, version, number = DB_HEADER.unpack_from(head)
    return int(number) if magic == DB_MAGIC and version == _DB_VERSION else None


def db_head(number: int) -> bytes:
    """Return the bytes of a header."""
    return DB_HEADER.pack(DB_MAGIC, _DB_VERSION, number)


def db_places(index: bytes) -> Iterator[Place]:
    """Yield the records of an index up to the first one that Mesa takes for damage."""
    for at in range(DB_HEADER.size, len(index) - DB_RECORD.size + 1, DB_RECORD.size):
        beginning, length, used, offset = DB_RECORD.unpack_from(index, at)
        if not (beginning and length and DB_HEADER.size <= offset < 1 << 63):
            return
        yield Place(beginning.to_bytes(8, "little").hex(), offset, length, used)


def db_entry(name: str, data: bytes, checksum: int) -> bytes:
    """Return the bytes of an entry of the data file."""
    return DB_ENTRY.pack(bytes.fromhex(name), checksum, len(data)) + data


def db_record(place: Place) -> bytes:
    """Return the bytes of a record of the index, for a place of known length."""
    beginning = int.from_bytes(bytes.fromhex(place.name)[:8], "little")
    return DB_RECORD.pack(beginning, place.length or 0, place.used, place.offset)
