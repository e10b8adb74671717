"""Entries of Mesa's shader cache, the same bytes in each of its three forms, and whose they are.

GL and Vulkan keep theirs in the same folders, and only contents show it: all entries of one driver and device were
stored by one build of one library, and Rusticl is a library of its own. So if one of them contains a kernel, all are
OpenCL's.

A header names the driver and the device, and a checksum covers the payload, which is packed with zstd. Sources:
``src/util/disk_cache.c`` (the keys at the beginning), ``src/util/disk_cache_os.c``
(``create_cache_item_header_and_blob``, ``parse_and_validate_cache_item``), ``src/util/crc32.c``. Payloads:
``src/gallium/frontends/rusticl/core/program.rs``, ``src/compiler/spirv/spirv_to_nir.c``
(``vtn_emit_kernel_entry_point_wrapper``).

Two forms have many entries in a pair of files, data and index: ``src/util/fossilize_db.c`` and ``.h`` (single file),
``src/util/mesa_cache_db.c`` (database).
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cachectl.layers import core
from cachectl.layers.formats import details, device_binaries, elf

#: Bytes that contain the header of every driver and device; GL's longer headers are read whole.
HEAD = 512
#: The driver, or the device, in entries that Rusticl itself stored.
RUSTICL = "rusticl"

_VERSION = 1
#: Why something of an unknown version is left alone.
FOREIGN = "is of a version of Mesa's format that cachectl does not know; left alone"
_NAMES = core.regex(rb"([\x21-\x7e][\x20-\x7e]{0,199})\0([\x21-\x7e][\x20-\x7e]{0,199})\0")
_FIXED = struct.Struct("<BQI")
_COUNT = struct.Struct("<I")
_CHECKED = struct.Struct("<II")
_KEY = 20
_POINTERS = (4, 8)
#: The kind of an entry that GL's own compiler has made, and of every other.
_GLSL = 1
_KINDS = (0, _GLSL)
#: More than any program needs, in bytes.
_LARGEST = 1 << 26
_ZSTD = b"\x28\xb5\x2f\xfd"
#: Only an OpenCL kernel gets such a function around it.
_WRAPPED = core.regex(rb"__wrapped_([A-Za-z_]\w{0,254})\0", re.ASCII)

#: How many entries of one driver are unpacked, the smallest first, to find a kernel.
_LOOKS = 256
_GRAPHICS = "is of GL or Vulkan, which share the folder"
_UNKNOWN = "cannot be distinguished from what GL and Vulkan keep in the same folder"

_NAME = core.regex(rb"[0-9a-f]{40}")
#: Magic number and version.
_MAGIC = b"\x81FOSSILIZEDB\0\0\0\x06"
_MAGICS = (_MAGIC, b"\x81FOSSILIZEDB\0\0\0\x05")
#: Packed length, kind of packing, checksum, unpacked length.
_HEADER = struct.Struct("<IIII")
_PLAIN = 1
_PLACE = struct.Struct("<Q")
_DB_MAGIC = b"MESA_DB\0"
_DB_VERSION = 1
#: Magic, version, and a number that is equal in files that belong together, and 0 while they are changed.
_DB_HEAD = struct.Struct("<8sIQ")
#: Key, checksum, length.
_DB_ENTRY = struct.Struct("<20sII")
#: The key's beginning, length, nanoseconds of the last use since the machine started, place.
_DB_RECORD = struct.Struct("<QIQQ")


@dataclass(frozen=True, slots=True)
class Header:
    """The owner of an entry: driver (a hash of its build), device, and whether GL's compiler made it.

    ``payload`` is the offset of the packed bytes, ``None`` where more must be read to know it.
    """

    driver: str
    device: str
    graphics: bool
    payload: int | None
    checksum: int = 0
    inflated: int = 0

    @property
    def maker(self) -> tuple[str, str]:
        """Driver and device. Entries with the same pair were stored by one build of one library."""
        return self.driver, self.device


def read_header(data: bytes) -> Header | None:
    """Read the header from an entry, or from its first :data:`HEAD` bytes; ``None`` where there is none."""
    names = _NAMES.match(data, 1)
    if data[:1] != bytes([_VERSION]) or names is None:
        return None
    driver, device = names[1].decode("ascii"), names[2].decode("ascii")
    at = names.end() + _FIXED.size
    if len(data) < at:
        return None
    pointer, _, kind = _FIXED.unpack_from(data, names.end())
    if pointer not in _POINTERS or kind not in _KINDS:
        return None
    graphics = kind == _GLSL
    try:
        if graphics:
            at += _COUNT.size + details.fields(_COUNT, data, at)[0] * _KEY
        return Header(driver, device, graphics, at + _CHECKED.size, *details.fields(_CHECKED, data, at))
    except details.Cut:
        return Header(driver, device, graphics, None)


def checksum(data: bytes) -> int:
    """Return the checksum as Mesa computes it: CRC-32 without the last inversion."""
    return zlib.crc32(data) ^ 0xFFFFFFFF


def complaint(data: bytes, whole: int = 0) -> str | None:
    """Return why Mesa would not use an entry; ``None`` where it would. ``whole`` is its checksum in a larger file."""
    header = read_header(data)
    if header is None or header.payload is None:
        return "has no whole header"
    is_same = checksum(data[header.payload :]) == header.checksum and whole in (0, checksum(data))
    return None if is_same else "its checksum does not match"


def is_foreign(data: bytes) -> bool:
    """Return whether an entry has the names of a header, but an unknown version before them."""
    return data[:1] not in (b"\0", bytes([_VERSION])) and _NAMES.match(data, 1) is not None


def inflate(data: bytes) -> bytes:
    """Unpack the payload of an entry.

    Raises :class:`ValueError` if it cannot be unpacked, or is larger than any program.
    """
    header = read_header(data)
    if header is None or header.payload is None or header.inflated > _LARGEST:
        raise ValueError("its header is missing or impossible")
    packed, most = data[header.payload :], header.inflated + 1
    unpack: Callable[[bytes, int], bytes] = zlib.decompressobj().decompress
    failure: type[Exception] = zlib.error
    if packed.startswith(_ZSTD):
        try:
            from cachectl.layers.formats import zstd
        except ImportError as error:
            raise ValueError("this Python was built without zstd") from error
        unpack, failure = zstd.decompressor().decompress, zstd.ZstdError
    try:
        content = unpack(packed, most)
    except failure as error:
        raise ValueError(str(error)) from error
    if len(content) != header.inflated:
        raise ValueError("its length is not the one in its header")
    return content


def kernels(content: bytes) -> tuple[str, ...] | None:
    """Return the OpenCL kernels in an unpacked payload; ``None`` where it names none, as machine code."""
    if content.startswith(elf.MAGIC):
        return None
    if content.startswith(device_binaries.SPIRV):
        return device_binaries.spirv_kernels(content)
    return details.names_or_none(match[1].decode("ascii") for match in _WRAPPED.finditer(content))


def name_of(key: str) -> str:
    """Return the name of an entry in a larger file."""
    return key.replace("/", "")


def key_of(name: str) -> str:
    """Return the key of an entry of a larger file."""
    return f"{name[:2]}/{name[2:]}"


class RawEntry(NamedTuple):
    """An entry with its header, a function that reads it, and its checksum in a larger file, 0 if it has none."""

    entry: core.Entry
    header: Header | None
    read: Callable[[], bytes | None]
    checksum: int = 0


def raw_of(entry: core.Entry, read: Callable[..., bytes | None], checksum: int = 0) -> RawEntry:
    """Read the header of an entry. Raises :class:`LayerError`."""
    head = read(limit=HEAD)
    return RawEntry(entry, None if head is None else read_header(head), read, checksum)


def kernels_in(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels in an entry; ``None`` if it names none, or cannot be unpacked."""
    try:
        return kernels(inflate(data))
    except ValueError:
        return None


def owned(raws: Sequence[RawEntry], *, contents: bool) -> Iterator[core.Entry | core.Problem]:
    """Yield entries with their owners, which driver and device show, and a problem for each that cannot be read.

    Only ``contents`` unpacks the names of kernels.
    """
    problems: dict[Path, core.Problem] = {}

    def kernels_of(raw: RawEntry) -> tuple[str, ...] | None:
        try:
            return kernels_in(raw.read() or b"")
        except core.LayerError as error:
            path = raw.entry.root / raw.entry.key
            problems[path] = core.unreadable(path, error)
            return None

    groups: dict[tuple[str, str], list[RawEntry]] = {}
    for raw in raws:
        if raw.header is not None:
            groups.setdefault(raw.header.maker, []).append(raw)
    guests = {maker: _guest(maker, group, kernels_of) for maker, group in groups.items()}
    words = {None: "OpenCL", _GRAPHICS: "GL or Vulkan"}
    for raw in raws:
        header = raw.header
        if header is None:
            yield replace(raw.entry, guest=_UNKNOWN)
            continue
        guest = guests[header.maker]
        yield replace(
            raw.entry,
            kernels=kernels_of(raw) if contents and guest is None else None,
            device=header.device,
            versions={"driver": header.driver},
            detail={"of": words.get(guest, "unknown")},
            guest=guest,
        )
    yield from problems.values()


def _guest(maker: tuple[str, str], group: Sequence[RawEntry], kernels_of: Callable[[RawEntry], object]) -> str | None:
    """Return the owner of what a driver has stored for a device; ``None`` for OpenCL."""
    if any(raw.header.graphics for raw in group if raw.header is not None):
        return _GRAPHICS
    # Kernels are smaller than the code that a driver makes from them.
    smallest = sorted(group, key=lambda raw: raw.entry.bytes)[:_LOOKS]
    return None if RUSTICL in maker or any(map(kernels_of, smallest)) else _UNKNOWN


# ---------------------------------------------------------------------- larger files


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


#: Reads so many bytes at a place of a data file; ``None`` if they are not there.
Reader: TypeAlias = Callable[[int, int], bytes | None]


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
        if any(head[:-1] == _MAGIC[:-1] and head[-1] and head not in _MAGICS for head in (index, data)):
            return FOREIGN
        whole = all(head in (b"", *_MAGICS) for head in (index, data)) and bool(data or not index)
        return None if whole else "a file lacks Mesa's header, so Mesa stores and finds nothing there"

    def blobs(self, index: bytes, read: Reader) -> Iterator[tuple[str, Blob | None]]:
        """Yield each name in an index with its entry, ``None`` if another, or none, is at its place.

        It ends at the first record that is no entry with a place, as Mesa does.
        """
        size = self.frame + _PLACE.size
        for at in range(self.head, len(index) - size + 1, size):
            name = index[at : at + 40]
            if _HEADER.unpack_from(index, at + 40)[0] != _PLACE.size or not _NAME.fullmatch(name):
                return
            # Places are those of headers, and names stand before them.
            begin = _PLACE.unpack_from(index, at + self.frame)[0] - 40
            frame, blob = read(begin, self.frame), None
            if frame is not None and frame[:40] == name:
                length, _, checksum, _ = _HEADER.unpack_from(frame, 40)
                start = begin + self.frame
                blob = Blob(name.decode(), begin, start, start + length, checksum)
            yield name.decode(), blob

    def framed(self, name: str, content: bytes) -> bytes:
        """Return an entry behind its frame, name and header."""
        return name.encode() + _HEADER.pack(len(content), _PLAIN, checksum(content), len(content)) + content

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
        if not data and not index:
            return None
        heads = [_DB_HEAD.unpack(head) for head in (data, index) if len(head) == self.head]
        if any(magic == _DB_MAGIC and version not in (0, _DB_VERSION) for magic, version, _ in heads):
            return FOREIGN
        if data == index and heads and heads[0][:2] == (_DB_MAGIC, _DB_VERSION) and heads[0][2]:
            return None
        return "the two files do not belong together: the next program drops every entry"

    def blobs(self, index: bytes, read: Reader) -> Iterator[tuple[str, Blob | None]]:
        """Compare the beginning of the name, and the length."""
        for at in range(self.head, len(index) - _DB_RECORD.size + 1, _DB_RECORD.size):
            beginning, stated, used, begin = _DB_RECORD.unpack_from(index, at)
            if not (beginning and stated and self.head <= begin < 1 << 63):
                return
            name, frame, blob = beginning.to_bytes(8, "little").hex(), read(begin, self.frame), None
            if frame is not None:
                key, checksum, length = _DB_ENTRY.unpack(frame)
                start = begin + self.frame
                if key.hex().startswith(name) and length == stated:
                    blob = Blob(key.hex(), begin, start, start + length, checksum, used)
            yield name, blob

    def framed(self, name: str, content: bytes) -> bytes:
        """Put key, checksum and length before an entry."""
        return _DB_ENTRY.pack(bytes.fromhex(name), checksum(content), len(content)) + content

    def record(self, blob: Blob) -> bytes:
        """Return the beginning of the key, length, last use and place."""
        beginning = int.from_bytes(bytes.fromhex(blob.name)[:8], "little")
        return _DB_RECORD.pack(beginning, blob.length, blob.used, blob.begin)


Format: TypeAlias = Fossilize | Database
