"""Program binaries as OpenCL drivers return them: recognised by their first bytes, and checked where known.

Source for SPIR-V: its specification, section 2.3 ("Physical Layout of a SPIR-V Module and Instruction").
"""

from __future__ import annotations

from collections.abc import Iterator

from cachectl.layers.formats import bitcode, details, elf

SPIRV = b"\x03\x02\x23\x07"
_HEADER = 20
_ENTRY_POINT = 15
_FUNCTION, _FUNCTION_END, _FUNCTION_CALL = 54, 56, 57
#: Where instructions have the number of a function, in bytes.
_NAMES_FUNCTION = {_ENTRY_POINT: 8, _FUNCTION: 8, _FUNCTION_CALL: 12}
_KERNEL = (6).to_bytes(4, "little")
#: The words before the name of an entry point: the instruction, the model, the number of the function.
_BEFORE_NAME = 12


def is_known(data: bytes) -> bool:
    """Return whether a binary is of a kind that :func:`complaint` checks."""
    return data.startswith((elf.MAGIC, bitcode.MAGIC, SPIRV))


def complaint(data: bytes) -> str | None:
    """Return how a file of a known kind was cut or emptied; ``None`` where it was not, and for unknown kinds."""
    if data.startswith(elf.MAGIC):
        return elf.complaint(data)
    if data.startswith(bitcode.MAGIC):
        return bitcode.complaint(data)
    return _spirv_complaint(data) if data.startswith(SPIRV) else None


def describe(data: bytes) -> details.Details | None:
    """Return kind and kernels of a program before it is machine code; ``None`` for other kinds."""
    if data.startswith(bitcode.MAGIC):
        return details.of_kind("LLVM bitcode", bitcode.kernels(data))
    return details.of_kind("SPIR-V", spirv_kernels(data)) if data.startswith(SPIRV) else None


def _spirv_complaint(data: bytes) -> str | None:
    """Return what is wrong with a module: its instructions must fill it exactly, with functions last.

    Every function that is an entry point, or called, must be there.
    """
    functions: dict[bool, set[bytes]] = {True: set(), False: set()}
    end, last = _HEADER, 0
    for last, instruction in _instructions(data):
        end += len(instruction)
        if (place := _NAMES_FUNCTION.get(last)) is not None:
            functions[last == _FUNCTION].add(instruction[place : place + 4])
    whole = end == len(data) and last == _FUNCTION_END and functions[False] <= functions[True]
    return None if whole else str(details.Cut(data))


def spirv_kernels(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels among a module's entry points; ``None`` where it names none."""
    return details.names_or_none(
        instruction[_BEFORE_NAME:].partition(b"\0")[0].decode(errors="replace")
        for code, instruction in _instructions(data)
        if code == _ENTRY_POINT and instruction[4:8] == _KERNEL
    )


def _instructions(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the code and the bytes of each complete instruction."""
    at = _HEADER
    while length := 4 * int.from_bytes(data[at + 2 : at + 4], "little"):
        if at + length > len(data):
            return
        yield int.from_bytes(data[at : at + 2], "little"), data[at : at + length]
        at += length
