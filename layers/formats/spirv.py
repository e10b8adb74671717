"""SPIR-V modules: checks, and the kernels in them.

Source: the SPIR-V specification, section 2.3 ("Physical Layout of a SPIR-V Module and Instruction").
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

MAGIC: Final = b"\x03\x02\x23\x07"
_HEADER: Final = 20
_ENTRY_POINT: Final = 15
_FUNCTION, _FUNCTION_END, _FUNCTION_CALL = 54, 56, 57
#: Where instructions have the number of a function, in bytes.
_NAMES_FUNCTION: Final = {_ENTRY_POINT: 8, _FUNCTION: 8, _FUNCTION_CALL: 12}
_KERNEL: Final = 6
#: The words before the name of an entry point: the instruction, the model, the number of the function.
_BEFORE_NAME: Final = 12


def complaint(data: bytes) -> str | None:
    """Return what is wrong with a module: its instructions must fill it exactly, with functions last.

    Every function that is an entry point, or called, must be there.
    """
    if not data.startswith(MAGIC):
        return "is not a SPIR-V module"
    end, last = _HEADER, 0
    needed: set[bytes] = set()
    there: set[bytes] = set()
    for at, length, code in _instructions(data):
        end, last = at + length, code
        if code in _NAMES_FUNCTION:
            number = data[at + _NAMES_FUNCTION[code] :][:4]
            (there if code == _FUNCTION else needed).add(number)
    whole = end == len(data) and last == _FUNCTION_END and needed <= there
    return None if whole else f"is cut short at {len(data)} bytes"


def kernels(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels among a module's entry points; ``None`` where it names none."""
    found = {_name(data[at : at + length]) for at, length, code in _instructions(data) if code == _ENTRY_POINT}
    return tuple(sorted(found - {""})) or None


def _instructions(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the offset, the length in bytes and the code of each complete instruction."""
    at = _HEADER
    while at + 4 <= len(data):
        (word,) = struct.unpack_from("<I", data, at)
        length = 4 * (word >> 16)
        if not length or at + length > len(data):
            return
        yield at, length, word & 0xFFFF
        at += length


def _name(instruction: bytes) -> str:
    if len(instruction) <= _BEFORE_NAME or instruction[4:8] != _KERNEL.to_bytes(4, "little"):
        return ""
    return instruction[_BEFORE_NAME:].partition(b"\0")[0].decode(errors="replace")
