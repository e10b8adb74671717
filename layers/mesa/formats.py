"""The formats of Mesa's single-file store and of its database: many entries in a data file, with an index beside it.

Sources: ``src/util/fossilize_db.c`` and ``.h`` (single file), ``src/util/mesa_cache_db.c`` (database).
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from cachectl.layers.base.lazy import regex
from cachectl.layers.mesa import entries

_NAME: Final = regex(rb"[0-9a-f]{40}")
#: Magic number and version.
_MAGIC: Final = b"\x81FOSSILIZEDB\0\0\0\x06"
_MAGICS: Final = (_MAGIC, b"\x81FOSSILIZEDB\0\0\0\x05")
#: Magic number without the version.
_ANY_MAGIC: Final = _MAGIC[:-1]
#: Packed length, kind of packing, checksum, unpacked length.
_HEADER: Final = struct.Struct("<IIII")
_PLAIN: Final = 1
_PLACE: Final = struct.Struct("<Q")
_DB_MAGIC: Final = b"MESA_DB\0"
_DB_VERSION: Final = 1
#: Magic, version, and a number that is equal in files that belong together, and 0 while they are changed.
_DB_HEAD: Final = struct.Struct("<8sIQ")
#: Key, checksum, length.
_DB_ENTRY: Final = struct.Struct("<20sII")
#: The key's beginning, length, nanoseconds of the last use since the machine started, place.
_DB_RECORD: Final = struct.Struct("<QIQQ")


class IndexRecord(NamedTuple):
    """A record of an index: the name of an entry (or its beginning), and where its frame begins in the data file."""

    name: str
    begin: int
    length: int | None = None
    used: int = 0


class Blob(NamedTuple):
    """An entry in a data file: ``begin`` is that of its frame, ``start`` that of its own bytes."""

    name: str
    begin: int
    start: int
    end: int
    checksum: int
    used: int = 0

    @property
    def length(self) -> int:
        """The length of its own bytes."""
        return self.end - self.start

    @property
    def stamp(self) -> tuple[int, ...]:
        """Identifies the content; offsets change when another entry is removed."""
        return (self.length, self.checksum)


class Fossilize:
    """The single-file store of one driver and device (``MESA_DISK_CACHE_SINGLE_FILE``).

    ``head`` and ``frame`` are the lengths of the head of a file and of the frame of an entry; a format is changed
    ``in_place`` if programs notice that.
    """

    data_name, index_name = "foz_cache.foz", "foz_cache_idx.foz"
    head, frame = len(_MAGIC), 40 + _HEADER.size
    in_place = False

    def new_head(self) -> bytes:
        """Return the head of both files of a pair, with a new number where it has one."""
        return _MAGIC

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Return why Mesa would not use a pair, given its heads; ``None`` if it would. It fills an empty index."""
        if any(head[:-1] == _ANY_MAGIC and head[-1] and head not in _MAGICS for head in (index, data)):
            return entries.FOREIGN
        for what, head in (("index", index), ("data file", data)):
            if head and head not in _MAGICS:
                return f"the {what} lacks Mesa's header, so Mesa stores and finds nothing there"
        return "the data file is empty, so Mesa stores and finds nothing there" if index and not data else None

    def places(self, index: bytes) -> Iterator[IndexRecord]:
        """Yield the records of an index, which are entries with places, up to the first wrong one, where Mesa stops."""
        size = self.frame + _PLACE.size
        for at in range(self.head, len(index) - size + 1, size):
            name = index[at : at + 40]
            if _HEADER.unpack_from(index, at + 40)[0] != _PLACE.size or not _NAME.fullmatch(name):
                return
            # Places are those of headers, and names stand before them.
            yield IndexRecord(name.decode(), _PLACE.unpack_from(index, at + self.frame)[0] - 40)

    def blob(self, place: IndexRecord, frame: bytes) -> Blob | None:
        """Return the entry whose frame is at a place; ``None`` if another, or none, is there."""
        if place.begin < 0 or len(frame) != self.frame or frame[:40] != place.name.encode():
            return None
        length, _, checksum, _ = _HEADER.unpack_from(frame, 40)
        start = place.begin + self.frame
        return Blob(place.name, place.begin, start, start + length, checksum)

    def framed(self, name: str, content: bytes) -> bytes:
        """Return an entry behind its frame, name and header."""
        return name.encode() + _HEADER.pack(len(content), _PLAIN, entries.checksum(content), len(content)) + content

    def record(self, blob: Blob) -> bytes:
        """Return the record of an entry: name, header and place."""
        head = _HEADER.pack(_PLACE.size, _PLAIN, 0, _PLACE.size)
        return blob.name.encode() + head + _PLACE.pack(blob.begin + 40)


class Database:
    """One part of Mesa's database (``MESA_DISK_CACHE_DATABASE``), with the members of :class:`Fossilize`."""

    data_name, index_name = "mesa_cache.db", "mesa_cache.idx"
    head, frame = _DB_HEAD.size, _DB_ENTRY.size
    in_place = True

    def new_head(self) -> bytes:
        """Return a head with a new number as Mesa makes it, never zero."""
        number = int(time.time()) << 32 | int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF
        return _DB_HEAD.pack(_DB_MAGIC, _DB_VERSION, number)

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Check the heads. Mesa empties both files if they do not match."""
        whole = data == index and len(data) == self.head
        if not data and not index:
            return None
        whole_heads = (_DB_HEAD.unpack(head) for head in (data, index) if len(head) == self.head)
        if any(magic == _DB_MAGIC and version not in (0, _DB_VERSION) for magic, version, _ in whole_heads):
            return entries.FOREIGN
        if whole and _DB_HEAD.unpack(data)[:2] == (_DB_MAGIC, _DB_VERSION) and _DB_HEAD.unpack(data)[2]:
            return None
        return "the two files do not belong together: the next program drops every entry"

    def places(self, index: bytes) -> Iterator[IndexRecord]:
        """Yield the records."""
        for at in range(self.head, len(index) - _DB_RECORD.size + 1, _DB_RECORD.size):
            beginning, length, used, begin = _DB_RECORD.unpack_from(index, at)
            if not (beginning and length and self.head <= begin < 1 << 63):
                return
            yield IndexRecord(beginning.to_bytes(8, "little").hex(), begin, length, used)

    def blob(self, place: IndexRecord, frame: bytes) -> Blob | None:
        """Compare the beginning of the name, and the length."""
        if len(frame) != self.frame:
            return None
        key, checksum, length = _DB_ENTRY.unpack(frame)
        if not key.hex().startswith(place.name) or length != place.length:
            return None
        start = place.begin + self.frame
        return Blob(key.hex(), place.begin, start, start + length, checksum, place.used)

    def framed(self, name: str, content: bytes) -> bytes:
        """Put key, checksum and length before an entry."""
        return _DB_ENTRY.pack(bytes.fromhex(name), entries.checksum(content), len(content)) + content

    def record(self, blob: Blob) -> bytes:
        """Return the beginning of the key, length, last use and place."""
        beginning = int.from_bytes(bytes.fromhex(blob.name)[:8], "little")
        return _DB_RECORD.pack(beginning, blob.length, blob.used, blob.begin)


Format: TypeAlias = Fossilize | Database
