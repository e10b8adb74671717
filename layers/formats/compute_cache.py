"""The CUDA ComputeCache: entries, their keys, and the index.

NVIDIA publishes no format. This one was derived from caches that driver 580.159.04 wrote, and checked on every entry of
them. All numbers are little endian. Version and two checksums are compared, so another format is never misread.

An entry is a header of 28 bytes (u32 version, u64 key length, u64 payload length, u64 FNV-1a of the payload),
the key, the payload. Its file name is the FNV-1a of the key, as 16 hex digits split ``a/b/14 digits``. The
index is u32 version, u32 count, u64 total, then per entry its id and its size without the header.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from cachectl.layers.base.lazy import regex
from cachectl.layers.formats.details import Cut, names_or_none
from cachectl.layers.formats.opencl_source import kernel_names

VERSION: Final = 0x41
#: No format has had so many versions.
_PLAUSIBLE: Final = 0x10000
HEADER: Final = struct.Struct("<IQQQ")
_INDEX_HEADER: Final = struct.Struct("<IIQ")
_INDEX_RECORD: Final = struct.Struct("<QQ")
_OFFSET_BASIS: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = 0xFFFFFFFFFFFFFFFF

_DEVICE: Final = regex(rb"\bsm_\d+[a-z]?")
_PTX_ENTRY: Final = regex(rb"\.entry\s+([\w$]+)")
_DRIVER: Final = regex(rb"\x00(\d{3,4}\.\d+(?:\.\d+)?)\x00")
_BUILD: Final = regex(
    rb"((?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d{4}).{0,4}?(\d\d:\d\d:\d\d)", re.DOTALL
)


class EntryHeader(NamedTuple):
    """The fixed part of an entry; lengths are bytes."""

    version: int
    key_length: int
    payload_length: int
    checksum: int

    @property
    def known(self) -> bool:
        """Whether this is the format described here."""
        return self.version == VERSION

    @property
    def foreign(self) -> bool:
        """Whether this is of another version of the format."""
        return not self.known and 0 < self.version < _PLAUSIBLE

    @property
    def file_size(self) -> int:
        """The length of the whole file in bytes."""
        return HEADER.size + self.key_length + self.payload_length


def fnv1a(data: bytes) -> int:
    """Return the standard 64-bit FNV-1a hash."""
    value = _OFFSET_BASIS
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def read_header(data: bytes) -> EntryHeader | None:
    """Read the first 28 bytes; ``None`` where there are fewer."""
    return EntryHeader(*HEADER.unpack_from(data)) if len(data) >= HEADER.size else None


def identifier_of(name: str) -> int:
    """Return the id of an entry by its relative path."""
    return int(name.replace("/", ""), 16)


def key_from(identifier: int) -> str:
    """Return the relative path of an entry by its id in the index."""
    name = f"{identifier:016x}"
    return f"{name[0]}/{name[1]}/{name[2:]}"


def form_complaint(data: bytes) -> str | None:
    """Return what is wrong with the version or the lengths of an entry, ``None`` where nothing is."""
    header = read_header(data)
    if header is None:
        return str(Cut(data))
    if not header.known:
        return f"has format version {header.version:#x}, not {VERSION:#x}"
    if len(data) != header.file_size:
        return f"is {len(data)} bytes long, its header says {header.file_size}"
    return None


def complaint(name: str, data: bytes) -> str | None:
    """Return what is wrong with an entry: version, lengths, name or checksum; ``None`` where nothing is."""
    if (wrong := form_complaint(data)) is not None:
        return wrong
    header = EntryHeader(*HEADER.unpack_from(data))
    begin = HEADER.size + header.key_length
    if fnv1a(data[HEADER.size : begin]) != identifier_of(name):
        return "its name is not the hash of its key"
    return None if fnv1a(data[begin:]) == header.checksum else "its payload does not match its checksum"


def key_of(data: bytes) -> bytes | None:
    """Return the key of an entry of the known version; ``None`` where it is cut short, or of another version."""
    header = read_header(data)
    if header is None or not header.known or len(data) < HEADER.size + header.key_length:
        return None
    return data[HEADER.size : HEADER.size + header.key_length]


def device(key: bytes) -> str | None:
    """Return the compute architecture in a key (``sm_90``)."""
    match = _DEVICE.search(key)
    return None if match is None else match[0].decode()


def kernels(key: bytes) -> tuple[str, ...] | None:
    """Return the kernels in a key, from OpenCL source or PTX; ``None`` where it has none, as the driver's helpers."""
    ptx = {match[1].decode() for match in _PTX_ENTRY.finditer(key)}
    return names_or_none(ptx.union(kernel_names(key) or ()))


def driver(key: bytes) -> dict[str, str]:
    """Return the driver version in a key, or the date on which the compiler was built."""
    version = _DRIVER.search(key)
    if version is not None:
        return {"driver": version[1].decode()}
    build = _BUILD.search(key)
    return {} if build is None else {"compiler_built": f"{build[1].decode()} {build[2].decode()}"}


def half(key: bytes) -> str:
    """Return which of the two entries of an OpenCL program has a key: that of the back end is PTX."""
    return "back end" if b".target" in key and b".version" in key else "front end"


def parts(key: bytes) -> dict[str, str]:
    """Return the parts of a key that can be compared: a front end's has source and options, a back end's PTX."""
    found = {"device": device(key) or ""}
    found |= {name.replace("_", " "): value for name, value in driver(key).items()}
    if half(key) == "back end":
        return {**found, "PTX": key[max(0, key.find(b".version")) :].decode(errors="replace")}
    texts = [text.decode(errors="replace") for text in key.split(b"\0")]
    options = next((text for text in texts if "-cl-nv-arch" in text), "")
    words = "".join(letter for letter in options if letter.isprintable()).split()
    included = {place for place, word in enumerate(words) if word[:2] == "-I" or words[place - 1 : place] == ["-I"]}
    return {
        **found,
        "source": max(texts, key=len),
        "include path": " ".join(words[place] for place in sorted(included)),
        "options": " ".join(word for place, word in enumerate(words) if place not in included),
    }


#: The records of an index: ids with their sizes (bytes without the header), in the order in which they were stored.
SizeIndex = tuple[tuple[int, int], ...]


def read_index(data: bytes) -> SizeIndex | None:
    """Read an index; ``None`` where it is incomplete, or of another version. An empty file is an empty index."""
    if not data:
        return ()
    if not is_index(data) or not _has_all_records(data):
        return None
    records = tuple(_INDEX_RECORD.iter_unpack(data[_INDEX_HEADER.size :]))
    return records if sum(size for _, size in records) == _INDEX_HEADER.unpack_from(data)[2] else None


def is_index(data: bytes) -> bool:
    """Return whether data begins as an index of the known version, complete or not."""
    return len(data) >= _INDEX_HEADER.size and int.from_bytes(data[:4], "little") == VERSION


def _has_all_records(data: bytes) -> bool:
    _, count, _ = _INDEX_HEADER.unpack_from(data)
    return len(data) == _INDEX_HEADER.size + int(count) * _INDEX_RECORD.size


def may_be_index(data: bytes) -> bool:
    """Return whether data is a damaged index of the known version: it was cut, or begins with zeros."""
    return data[:4] in (bytes(4), VERSION.to_bytes(4, "little"))


def has_version_of(index: bytes, entry: bytes) -> bool:
    """Return whether a complete index of another version has the version of an entry."""
    if len(index) < _INDEX_HEADER.size or entry[:4] != index[:4]:
        return False
    return _has_all_records(index) and VERSION != int.from_bytes(index[:4], "little") < _PLAUSIBLE


def write_index(records: Sequence[tuple[int, int]]) -> bytes:
    """Return the bytes of an index."""
    total = sum(size for _, size in records)
    return _INDEX_HEADER.pack(VERSION, len(records), total) + b"".join(
        _INDEX_RECORD.pack(*record) for record in records
    )
