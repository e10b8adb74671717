"""Native object files and LLVM bitcode, checked for being whole: their own headers say how long they are."""

from __future__ import annotations

import struct
from typing import Final

ELF_MAGIC: Final = b"\x7fELF"
BITCODE_MAGIC: Final = b"BC\xc0\xde"
#: How far into a file its headers reach that are looked at, in bytes.
HEAD: Final = 64

# Of the ELF header: class, byte order; then, for 64 and 32 bits, where the section headers are, how large
# one is, and how many there are.
_LAYOUTS: Final = {2: ("Q", 40, 58), 1: ("I", 32, 46)}
_ORDERS: Final = {1: "<", 2: ">"}
_ENTER_BLOCK: Final = 1
_ABBREVIATION_WIDTH: Final = 2


def elf_complaint(head: bytes, size: int) -> str | None:
    """Say what is wrong with an ELF file of ``size`` bytes, judging by its first :data:`HEAD` ones.

    A linker writes the section headers last, so a file cut short does not reach them.
    """
    if not head.startswith(ELF_MAGIC):
        return "is not an ELF file" if head else "is empty"
    layout, order = _LAYOUTS.get(head[4:5][0] if len(head) > 4 else 0), _ORDERS.get(head[5] if len(head) > 5 else 0)  # noqa: PLR2004
    if layout is None or order is None or len(head) < layout[2] + 4:
        return f"is cut short at {size} bytes"
    code, offset_at, count_at = layout
    (offset,) = struct.unpack_from(order + code, head, offset_at)
    each, count = struct.unpack_from(order + "HH", head, count_at)
    return f"is cut short at {size} bytes" if offset + each * count > size else None


def bitcode_complaint(data: bytes) -> str | None:
    """Say what is wrong with LLVM bitcode: its top-level blocks, each with its length, must fill it exactly.

    Source: the LLVM bitstream format (``llvm/docs/BitCodeFormat.rst``).
    """
    if not data.startswith(BITCODE_MAGIC):
        return "is not LLVM bitcode" if data else "is empty"
    at = len(BITCODE_MAGIC)
    blocks = 0
    while at < len(data):
        length = _block_length(data, at)
        if length is None or at + length > len(data):
            return f"is cut short at {len(data)} bytes" if blocks else "holds no block"
        at += length
        blocks += 1
    return None if blocks else "holds no block"


def _block_length(data: bytes, at: int) -> int | None:
    """Return the bytes a block takes from its beginning, which is aligned to 32 bits; ``None`` if none begins."""
    if len(data) < at + 8:
        return None
    word = int.from_bytes(data[at : at + 8], "little")
    if word & 3 != _ENTER_BLOCK:
        return None
    bit = _ABBREVIATION_WIDTH
    # The block's number and its abbreviation width, in chunks of which the highest bit says that more follow.
    for width in (8, 4):
        while word >> (bit + width - 1) & 1:
            bit += width
        bit += width
    words_at = at + -(-bit // 32) * 4
    words = int.from_bytes(data[words_at : words_at + 4], "little")
    return words_at + 4 - at + 4 * words
