"""Program binaries that OpenCL drivers return: recognised by their first bytes, and checked if known.

Sources: the specification of SPIR-V, section 2.3 ("Physical Layout of a SPIR-V Module and Instruction"); for Mesa
``src/gallium/frontends/rusticl/core/program.rs`` (22.3, and main in 2025). What Intel's CPU driver refuses was observed
with its release of 2026.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cachectl.layers.formats import bitcode, details, elf

SPIRV = b"\x03\x02\x23\x07"
#: What Rusticl writes before SPIR-V: its name, a version, the sizes of the device's name (which follows) and of the
#: SPIR-V, and a type. Earlier releases wrote a version, a size and a type, and nothing after the SPIR-V.
_RUSTICL, _FRAME = b"rusticl\0", struct.Struct("<8s4I")
_OLD_RUSTICL, _OLD_FRAME = b"\1\0\0\0", struct.Struct("<3I")
#: The sections of a program of Intel's CPU driver: bitcode and an object file.
_INTEL = {".ocl.ir": bitcode.complaint, ".ocl.obj": elf.complaint}
_HEADER = 20
_ENTRY_POINT = 15
_FUNCTION, _FUNCTION_END, _FUNCTION_CALL = 54, 56, 57
#: The offset of a function's number in instructions, in bytes.
_NAMES_FUNCTION = {_ENTRY_POINT: 8, _FUNCTION: 8, _FUNCTION_CALL: 12}
_KERNEL = (6).to_bytes(4, "little")
#: The bytes before the name of an entry point: the instruction, the model, the number of the function.
_BEFORE_NAME = 12


def is_known(data: bytes) -> bool:
    """Return whether :func:`complaint` checks this kind of binary."""
    return data.startswith((elf.MAGIC, bitcode.MAGIC, SPIRV))


def complaint(data: bytes) -> str | None:
    """Return how a file of a known kind was truncated or zeroed; ``None`` if it was not, and for unknown kinds."""
    if data.startswith(elf.MAGIC):
        return elf.complaint(data)
    if data.startswith(bitcode.MAGIC):
        return bitcode.complaint(data)
    return _spirv_complaint(data) if data.startswith(SPIRV) else None


def refusal(data: bytes) -> str | None:
    """Return why a driver would refuse a program that it returned to PyOpenCL; ``None`` for unknown kinds."""
    try:
        data = unwrap(data)
    except ValueError as wrong:
        return str(wrong)
    file = elf.read_elf(data)
    if file is not None and any(section.name in _INTEL for section in file.sections):
        end = max(section.offset + section.size for section in file.sections)
        if end < len(data):
            return f"has {len(data) - end} bytes after its last section"
    return complaint(data)


def part_complaint(data: bytes) -> str | None:
    """Return which part of a program of Intel's CPU driver is damaged, so that its build fails."""
    file = elf.read_elf(data)
    contents = {} if file is None else {section.name: file.content(section) for section in file.sections}
    checked = ((name, check(contents[name])) for name, check in _INTEL.items() if name in contents)
    return next((f"{name} {wrong}" for name, wrong in checked if wrong is not None), None)


def unwrap(data: bytes) -> bytes:
    """Return the module in a binary of Rusticl; other bytes are unchanged. Raises :class:`ValueError` if truncated."""
    if data.startswith(_RUSTICL):
        _, version, name, size, _ = details.fields(_FRAME, data)
        return details.part(data, _FRAME.size + name, size) if version == 1 else data
    if not (_OLD_RUSTICL.startswith(data[:4]) and SPIRV.startswith(data[_OLD_FRAME.size :][: len(SPIRV)])):
        return data
    _, size, _ = details.fields(_OLD_FRAME, data)
    if len(data) != _OLD_FRAME.size + size:
        raise ValueError(f"has {len(data)} bytes, but its header says {_OLD_FRAME.size + size}")
    return data[_OLD_FRAME.size :]


def describe(data: bytes) -> details.Details | None:
    """Return kind and kernels of a program in an intermediate language; ``None`` for other kinds."""
    if data.startswith(bitcode.MAGIC):
        return details.of_kind("LLVM bitcode", bitcode.kernels(data))
    return details.of_kind("SPIR-V", spirv_kernels(data)) if data.startswith(SPIRV) else None


def _spirv_complaint(data: bytes) -> str | None:
    """Return how a module is damaged: instructions must fill it, functions last, with all that they name."""
    functions: dict[bool, set[bytes]] = {True: set(), False: set()}
    end, last = _HEADER, 0
    for last, instruction in _instructions(data):
        end += len(instruction)
        if (place := _NAMES_FUNCTION.get(last)) is not None:
            functions[last == _FUNCTION].add(instruction[place : place + 4])
    is_complete = end == len(data) and last == _FUNCTION_END and functions[False] <= functions[True]
    return None if is_complete else str(details.Cut(data))


def spirv_kernels(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels among a module's entry points; ``None`` if it names none."""
    return details.names_or_none(
        instruction[_BEFORE_NAME:].partition(b"\0")[0].decode(errors="replace")
        for code, instruction in _instructions(data)
        if code == _ENTRY_POINT and instruction[4:8] == _KERNEL
    )


def _instructions(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = _HEADER
    while length := 4 * int.from_bytes(data[at + 2 : at + 4], "little"):
        if at + length > len(data):
            return
        yield int.from_bytes(data[at : at + 2], "little"), data[at : at + length]
        at += length
