"""Entries of Intel's compute-runtime cache: zebin, its OpenCL wrapper around a device binary, SPIR-V.

Sources: ``shared/source/device_binary_format/`` of intel/compute-runtime (``zebin/zebin_elf.h``,
``elf/ocl_elf.h``) and ``ocl_igc_shared/executable_format/patch_list.h`` of intel-graphics-compiler.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from cachectl.layers.formats import device_binaries, elf
from cachectl.layers.formats.details import Cut, Details, fields, names_or_none, part, require

_ZEBIN: Final = frozenset({0xFF11, 0xFF12, 0xFF13})
_WRAPPER: Final = 0xFF04
_DEVICE_BINARY: Final = 0xFF000005
_SPIRV: Final = 0xFF000009
_TEXT: Final = ".text."
#: The section of functions that are no kernels.
_FUNCTIONS: Final = "Intel_Symbol_Table_Void_Program"
_COMPATIBILITY: Final = ".note.intelgt.compat"
#: The types of its notes: product family, graphics core, version of zebin, exact device.
_FAMILY, _CORE, _VERSION, _DEVICE = 1, 2, 4, 6
_ARCHIVE: Final = b"!<arch>\n"

_PATCH_TOKENS: Final = b"CTNI"
#: Magic, version, device, pointer size, number of kernels, stepping, bytes of patches.
_PROGRAM: Final = struct.Struct("<7I")
#: Checksum, hash, then the lengths of name, patches and heaps: kernel, general, dynamic and surface state; and the
#: kernel's length without padding.
_KERNEL: Final = struct.Struct("<IQ7I")

#: Bytes of all entries, as the driver holds them against its limit (``size_t``).
ACCOUNT: Final = struct.Struct("=Q")
#: Hits, misses, version of the file.
STATISTICS: Final = struct.Struct("=QQQ")


def complaint(data: bytes) -> str | None:
    """Return what is wrong with an entry, which must be complete and of a kind that the driver stores."""
    if device_binaries.is_known(data):
        return device_binaries.complaint(data)
    if data.startswith(_PATCH_TOKENS):
        return None if _patch_tokens(data) is not None else str(Cut(data))
    if data.startswith(_ARCHIVE):
        return None
    return "holds no program of a kind that the driver stores" if data else "is empty"


def is_wrapper(data: bytes) -> bool:
    """Return whether an entry has the header, complete or not, of the wrapper used before zebin."""
    return data.startswith(elf.MAGIC) and data[16:18] == _WRAPPER.to_bytes(2, "little")


def describe(data: bytes) -> Details:
    """Return kernels, device and versions of a program of any kind."""
    if (details := device_binaries.describe(data)) is not None:
        return details
    if data.startswith(_ARCHIVE):
        return Details("archive")
    file = elf.read_elf(data)
    if file is None:
        return _patch_tokens(data) or Details("unknown")
    if file.kind != _WRAPPER:
        return _zebin(file) or Details("ELF")
    wrapped = {section.kind: file.content(section) for section in file.sections}
    device = wrapped.get(_DEVICE_BINARY, b"")
    # A wrapper is not wrapped again: no depth to bound.
    details = _zebin(elf.read_elf(device)) or _patch_tokens(device)
    return details or Details("OpenCL ELF", device_binaries.spirv_kernels(wrapped.get(_SPIRV, b"")))


def _zebin(file: elf.Elf | None) -> Details | None:
    """Describe a file of the current format; ``None`` for other files."""
    if file is None or file.kind not in _ZEBIN:
        return None
    named = {one.name.removeprefix(_TEXT) for one in file.sections if one.name.startswith(_TEXT)}
    notes = {
        kind: described
        for section in file.sections
        if section.name == _COMPATIBILITY
        for owner, kind, described in file.notes(section)
        if owner == b"IntelGT"
    }
    version = notes.get(_VERSION, b"").rstrip(b"\0").decode(errors="replace")
    return Details("zebin", names_or_none(named - {_FUNCTIONS}), _device(notes), {"zebin": version} if version else {})


def _device(notes: Mapping[int, bytes]) -> str | None:
    """Return the device as ``ocloc`` names it where the notes say it exactly, else its family."""
    numbers = {kind: int.from_bytes(described[:4], "little") for kind, described in notes.items() if described}
    if _DEVICE in numbers:
        config = numbers[_DEVICE]
        return f"{config >> 22}.{config >> 14 & 0xFF}.{config & 0x3F}"
    if _FAMILY in numbers:
        return f"product family {numbers[_FAMILY]}"
    return f"graphics core {numbers[_CORE]}" if _CORE in numbers else None


def _patch_tokens(data: bytes) -> Details | None:
    """Read a device binary of the format before zebin; ``None`` where it is none, or not whole."""
    try:
        magic, version, device, _, count, _, patches = fields(_PROGRAM, data)
        names = list(_kernels(data, _PROGRAM.size + patches, count))
    except Cut:
        return None
    is_one = magic == int.from_bytes(_PATCH_TOKENS, "little")
    details = Details("patch tokens", names_or_none(names), f"graphics core {device}", {"format": str(version)})
    return details if is_one else None


def _kernels(data: bytes, at: int, count: int) -> Iterator[str]:
    """Yield the name of each kernel. Raises :class:`Cut`."""
    for _ in range(count):
        _, _, name, patches, *heaps, _ = fields(_KERNEL, data, at)
        at += _KERNEL.size
        yield part(data, at, name).rstrip(b"\0").decode(errors="replace")
        require(data, at, name + patches + sum(heaps))
        at += name + patches + sum(heaps)


def read_statistics(data: bytes) -> tuple[int, int] | None:
    """Return hits and misses; ``None`` where it is no file of a known version."""
    if len(data) != STATISTICS.size:
        return None
    hits, misses, version = STATISTICS.unpack(data)
    return (hits, misses) if version == 1 else None
