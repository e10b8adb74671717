"""SPIR-V modules: checks, and the kernels in them.

Source: the SPIR-V specification, section 2.3 ("Physical Layout of a SPIR-V Module and Instruction").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cachectl.layers.formats.details import Cut, names_or_none

MAGIC: Final = b"\x03\x02\x23\x07"
_HEADER: Final = 20
_ENTRY_POINT: Final = 15
_FUNCTION, _FUNCTION_END, _FUNCTION_CALL = 54, 56, 57
#: Where instructions have the number of a function, in bytes.
_NAMES_FUNCTION: Final = {_ENTRY_POINT: 8, _FUNCTION: 8, _FUNCTION_CALL: 12}
_KERNEL: Final = (6).to_bytes(4, "little")
#: The words before the name of an entry point: the instruction, the model, the number of the function.
_BEFORE_NAME: Final = 12


def complaint(data: bytes) -> str | None:
    """Return what is wrong with a module: its instructions must fill it exactly, with functions last.

    Every function that is an entry point, or called, must be there.
    """
    if not data.startswith(MAGIC):
        return "is not a SPIR-V module"
    functions: dict[bool, set[bytes]] = {True: set(), False: set()}
    end, last = _HEADER, 0
    for last, instruction in _instructions(data):
        end += len(instruction)
        if (place := _NAMES_FUNCTION.get(last)) is not None:
            functions[last == _FUNCTION].add(instruction[place : place + 4])
    whole = end == len(data) and last == _FUNCTION_END and functions[False] <= functions[True]
    return None if whole else str(Cut(data))


def kernels(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels among a module's entry points; ``None`` where it names none."""
    return names_or_none(
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
