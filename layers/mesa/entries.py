"""Entries of Mesa's shader cache, the same bytes in each of its three forms.

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
from dataclasses import dataclass
from typing import Final

from cachectl.layers.base.lazy import regex
from cachectl.layers.formats import spirv
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
    at = names.end()
    if len(data) < at + _FIXED.size:
        return None
    pointer, _, kind = _FIXED.unpack_from(data, at)
    if pointer not in _POINTERS or kind not in _KINDS:
        return None
    driver, device = names[1].decode("ascii"), names[2].decode("ascii")
    at += _FIXED.size
    if kind == _GLSL:
        if len(data) < at + _COUNT.size:
            return Header(driver, device, graphics=True, payload=None)
        at += _COUNT.size + _COUNT.unpack_from(data, at)[0] * _KEY
    if len(data) < at + _CHECKED.size:
        return Header(driver, device, kind == _GLSL, None)
    checksum, inflated = _CHECKED.unpack_from(data, at)
    return Header(driver, device, kind == _GLSL, at + _CHECKED.size, checksum, inflated)


def checksum(data: bytes) -> int:
    """Return the checksum as Mesa computes it: CRC-32 without the last inversion."""
    return zlib.crc32(data) ^ 0xFFFFFFFF


def complaint(data: bytes) -> str | None:
    """Return why Mesa would not use an entry; ``None`` where it would."""
    header = read_header(data)
    if header is None or header.payload is None:
        return "has no whole header"
    packed = data[header.payload :]
    if checksum(packed) != header.checksum:
        return "its checksum does not match"
    return None


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
    packed = data[header.payload :]
    unpack = _unpack_zstd if packed.startswith(_ZSTD) else _unpack_zlib
    content = unpack(packed, header.inflated + 1)
    if len(content) != header.inflated:
        raise ValueError("its length is not the one in its header")
    return content


def _unpack_zlib(packed: bytes, most: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(packed, most)
    except zlib.error as error:
        raise ValueError(str(error)) from error


def _unpack_zstd(packed: bytes, most: int) -> bytes:
    try:
        from cachectl.layers.formats import zstd
    except ImportError as error:
        raise ValueError("this Python was built without zstd") from error
    try:
        return zstd.decompressor().decompress(packed, max_length=most)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from error


def kernels(content: bytes) -> tuple[str, ...] | None:
    """Return the OpenCL kernels in an unpacked payload; ``None`` where it names none, as machine code."""
    if content.startswith(ELF_MAGIC):
        return None
    if content.startswith(spirv.MAGIC):
        return spirv.kernels(content)
    return tuple(sorted({match[1].decode("ascii") for match in _WRAPPED.finditer(content)})) or None
