"""Entries of Mesa's shader cache, the same bytes in each of its three forms, and whose they are.

GL and Vulkan keep theirs in the same folders, and only contents show it: all entries of one driver and device were
stored by one build of one library, and Rusticl is a library of its own. So if one of them contains a kernel, all are
OpenCL's.

A header names the driver and the device, and a checksum covers the payload, which is packed with zstd. Sources:
``src/util/disk_cache.c`` (the keys at the beginning), ``src/util/disk_cache_os.c``
(``create_cache_item_header_and_blob``, ``parse_and_validate_cache_item``), ``src/util/crc32.c``. Payloads:
``src/gallium/frontends/rusticl/core/program.rs``, ``src/compiler/spirv/spirv_to_nir.c``
(``vtn_emit_kernel_entry_point_wrapper``).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base import errors
from cachectl.layers.base.facts import Entry, Problem
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.store import unreadable
from cachectl.layers.formats import details, device_binaries
from cachectl.layers.formats.elf import MAGIC as ELF_MAGIC

#: Bytes that contain the header of every driver and device; GL's longer headers are read whole.
HEAD: Final = 512
#: The driver, or the device, in entries that Rusticl itself stored.
RUSTICL: Final = "rusticl"

_VERSION: Final = 1
#: Why something of an unknown version is left alone.
FOREIGN: Final = "is of a version of Mesa's format that cachectl does not know; left alone"
_NAMES: Final = regex(rb"([\x21-\x7e][\x20-\x7e]{0,199})\0([\x21-\x7e][\x20-\x7e]{0,199})\0")
_FIXED: Final = struct.Struct("<BQI")
_COUNT: Final = struct.Struct("<I")
_CHECKED: Final = struct.Struct("<II")
_KEY: Final = 20
_POINTERS: Final = (4, 8)
#: The kind of an entry that GL's own compiler has made, and of every other.
_GLSL: Final = 1
_KINDS: Final = (0, _GLSL)
#: More than any program needs, in bytes.
_LARGEST: Final = 1 << 26
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
#: Only an OpenCL kernel gets such a function around it.
_WRAPPED: Final = regex(rb"__wrapped_([A-Za-z_]\w{0,254})\0", re.ASCII)

#: How many entries of one driver are unpacked, the smallest first, to find a kernel.
_LOOKS: Final = 256
_GRAPHICS: Final = "is of GL or Vulkan, which share the folder"
_UNKNOWN: Final = "cannot be distinguished from what GL and Vulkan keep in the same folder"


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
    if content.startswith(ELF_MAGIC):
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

    entry: Entry
    header: Header | None
    read: Callable[[], bytes | None]
    checksum: int = 0


def raw_of(entry: Entry, read: Callable[..., bytes | None], checksum: int = 0) -> RawEntry:
    """Read the header of an entry. Raises :class:`LayerError`."""
    head = read(limit=HEAD)
    return RawEntry(entry, None if head is None else read_header(head), read, checksum)


def kernels_in(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels in an entry; ``None`` if it names none, or cannot be unpacked."""
    try:
        return kernels(inflate(data))
    except ValueError:
        return None


def owned(raws: Sequence[RawEntry], *, contents: bool) -> Iterator[Entry | Problem]:
    """Yield entries with their owners, which driver and device show, and a problem for each that cannot be read.

    Only ``contents`` unpacks the names of kernels.
    """
    problems: dict[Path, Problem] = {}

    def kernels_of(raw: RawEntry) -> tuple[str, ...] | None:
        try:
            return kernels_in(raw.read() or b"")
        except errors.LayerError as error:
            path = raw.entry.root / raw.entry.key
            problems[path] = unreadable(path, error)
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
