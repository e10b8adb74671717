"""Entries of Intel's compute-runtime cache: zebin, its OpenCL wrapper around a device binary, SPIR-V.

Sources: ``shared/source/device_binary_format/`` of intel/compute-runtime (``zebin/zebin_elf.h``,
``elf/ocl_elf.h``) and ``ocl_igc_shared/executable_format/patch_list.h`` of intel-graphics-compiler.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from cachectl.layers.formats import bitcode, device_binaries, elf, spirv
from cachectl.layers.formats.details import Details
from cachectl.layers.formats.elf import Elf, read_elf

_ZEBIN: Final = frozenset({0xFF11, 0xFF12, 0xFF13})
_WRAPPER: Final = 0xFF04
_DEVICE_BINARY: Final = 0xFF000005
_SPIRV: Final = 0xFF000009
_TEXT: Final = ".text."
#: The section of functions that are no kernels.
_FUNCTIONS: Final = "Intel_Symbol_Table_Void_Program"
_COMPATIBILITY: Final = ".note.intelgt.compat"
_ARCHIVE: Final = b"!<arch>\n"

_PATCH_TOKENS: Final = b"CTNI"
#: Magic, version, device, pointer size, number of kernels, stepping, bytes of patches.
_PROGRAM: Final = struct.Struct("<7I")
#: Checksum, hash, then the lengths of name, patches and heaps: kernel, general, dynamic and surface state; and the
#: kernel's length without padding.
_KERNEL: Final = struct.Struct("<IQ7I")


def complaint(data: bytes) -> str | None:
    """Return what is wrong with an entry, which must be complete and of a kind that the driver stores."""
    if device_binaries.is_known(data):
        return device_binaries.complaint(data)
    if data.startswith(_PATCH_TOKENS):
        return None if _patch_tokens(data) is not None else f"is cut short at {len(data)} bytes"
    if data.startswith(_ARCHIVE):
        return None
    return "holds no program of a kind that the driver stores" if data else "is empty"


def is_wrapper(data: bytes) -> bool:
    """Return whether an entry has the header, complete or not, of the wrapper used before zebin."""
    return data.startswith(elf.MAGIC) and data[16:18] == _WRAPPER.to_bytes(2, "little")


def describe(data: bytes) -> Details:
    """Return kernels, device and versions of a program of any kind."""
    if data.startswith(elf.MAGIC):
        file = read_elf(data)
        return Details("unknown") if file is None else _of_elf(file)
    if data.startswith(spirv.MAGIC):
        return Details("SPIR-V", spirv.kernels(data))
    if data.startswith(bitcode.MAGIC):
        return Details("LLVM bitcode", bitcode.kernels(data))
    if data.startswith(_ARCHIVE):
        return Details("archive")
    return _patch_tokens(data) or Details("unknown")


def _of_elf(file: Elf) -> Details:
    if file.kind in _ZEBIN:
        return _of_zebin(file)
    if file.kind != _WRAPPER:
        return Details("ELF")
    wrapped = {section.kind: file.content(section) for section in file.sections}
    device = wrapped.get(_DEVICE_BINARY, b"")
    inner = read_elf(device)
    # A wrapper is not wrapped again: no depth to bound.
    if inner is not None and inner.kind in _ZEBIN:
        return _of_zebin(inner)
    return _patch_tokens(device) or Details("OpenCL ELF", spirv.kernels(wrapped.get(_SPIRV, b"")))


def _of_zebin(file: Elf) -> Details:
    named = {one.name.removeprefix(_TEXT) for one in file.sections if one.name.startswith(_TEXT)}
    notes = {
        kind: described
        for section in file.sections
        if section.name == _COMPATIBILITY
        for owner, kind, described in file.notes(section)
        if owner == b"IntelGT"
    }
    version = notes.get(4, b"").rstrip(b"\0").decode(errors="replace")
    kernels = tuple(sorted(named - {_FUNCTIONS, ""})) or None
    return Details("zebin", kernels, _device(notes), {"zebin": version} if version else {})


def _device(notes: Mapping[int, bytes]) -> str | None:
    """Return the device as ``ocloc`` names it where the notes say it exactly, else its family."""
    numbers = {kind: int.from_bytes(notes[kind][:4], "little") for kind in (1, 2, 6) if notes.get(kind)}
    if 6 in numbers:  # noqa: PLR2004 - the type of the note
        config = numbers[6]
        return f"{config >> 22}.{config >> 14 & 0xFF}.{config & 0x3F}"
    if 1 in numbers:
        return f"product family {numbers[1]}"
    return f"graphics core {numbers[2]}" if 2 in numbers else None  # noqa: PLR2004 - see above


def _patch_tokens(data: bytes) -> Details | None:
    """Read a device binary of the format before zebin; ``None`` where it is none, or not whole."""
    if not data.startswith(_PATCH_TOKENS) or len(data) < _PROGRAM.size:
        return None
    _, version, device, _, count, _, patches = _PROGRAM.unpack_from(data)
    names = list(_kernels(data, _PROGRAM.size + patches, count))
    if len(names) != count:
        return None
    return Details("patch tokens", tuple(sorted(names)) or None, f"graphics core {device}", {"format": str(version)})


def _kernels(data: bytes, at: int, count: int) -> Iterator[str]:
    """Yield the name of each complete kernel."""
    for _ in range(count):
        if at + _KERNEL.size > len(data):
            return
        _, _, name, patches, *heaps, _ = _KERNEL.unpack_from(data, at)
        begin = at + _KERNEL.size
        at = begin + name + patches + sum(heaps)
        if at > len(data):
            return
        yield data[begin : begin + name].rstrip(b"\0").decode(errors="replace")


# ---------------------------------------------------------------------- the files beside the entries

#: Bytes of all entries, as the driver holds them against its limit (``size_t``).
ACCOUNT: Final = struct.Struct("=Q")
#: Hits, misses, version of the file.
STATISTICS: Final = struct.Struct("=QQQ")


def read_statistics(data: bytes) -> tuple[int, int] | None:
    """Return hits and misses; ``None`` where it is no file of a known version."""
    if len(data) != STATISTICS.size:
        return None
    hits, misses, version = STATISTICS.unpack(data)
    return (hits, misses) if version == 1 else None
