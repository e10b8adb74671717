"""Names of functions in LLVM bitcode; kernels are those that a module defines with a kernel's calling convention.

Source: ``llvm/docs/BitCodeFormat.rst`` and ``llvm/include/llvm/Bitcode/LLVMBitCodes.h``. Only the records of the
module itself and of its string table are decoded; every block within the module is passed over by its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cachectl.layers.formats.object_files import BITCODE_MAGIC

_MODULE: Final = 8
_STRING_TABLE: Final = 23
_FUNCTION: Final = 8
_BLOB: Final = 1
# Abbreviations that every block knows.
_END, _ENTER, _DEFINE, _PLAIN = range(4)
# Encodings of an operand.
_LITERAL, _FIXED, _VARIABLE, _ARRAY, _CHARACTER, _BYTES = range(6)
#: SPIR kernels and AMDGPU kernels (``llvm/IR/CallingConv.h``).
_KERNELS: Final = frozenset({76, 91})
#: The fields of a function's record that are read: offset and length of its name, type, calling convention, and
#: whether it is a mere declaration.
_FIELDS: Final = 5
#: Longer names are none, in bytes.
_LONGEST: Final = 4096
_WORD: Final = 32
_WIDEST: Final = 64

_Operand = tuple[int, int]
_Record = tuple[int, list[int], bytes]


@dataclass(slots=True)
class _Bits:
    """A place in a stream of bits; reading past the end raises :class:`ValueError`."""

    data: bytes
    at: int
    end: int

    def fixed(self, width: int) -> int:
        if width > _WIDEST or self.at + width > self.end:
            raise ValueError("the bitcode ends early")
        first = self.at >> 3
        word = int.from_bytes(self.data[first : first + 9], "little") >> (self.at & 7)
        self.at += width
        return word & ((1 << width) - 1)

    def variable(self, width: int) -> int:
        # One of a single bit would never end, or carry nothing.
        if not 1 < width <= _WORD:
            raise ValueError("no width of a number")
        more = 1 << (width - 1)
        value = shift = 0
        while shift <= _WIDEST:
            chunk = self.fixed(width)
            value |= (chunk & (more - 1)) << shift
            if not chunk & more:
                return value
            shift += width - 1
        raise ValueError("a number that is too long")

    def align(self) -> None:
        self.at = -(-self.at // _WORD) * _WORD

    def enter(self) -> tuple[int, int, int]:
        """Read the head of a block: its number, the width of its abbreviations, where it ends."""
        number, width = self.variable(8), self.variable(4)
        self.align()
        end = self.fixed(_WORD) * _WORD + self.at
        if end > self.end or width < 2:  # noqa: PLR2004 - the four abbreviations that every block knows
            raise ValueError("a block reaches beyond the bitcode")
        return number, width, end


def kernels(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels that bitcode defines; ``None`` where it cannot be read, or defines none."""
    found = {name for name, convention, declared in _functions(data) if convention in _KERNELS and not declared}
    return tuple(sorted(found)) or None


def function_names(data: bytes) -> tuple[str, ...]:
    """Return the names of all functions that bitcode defines or declares; none where it cannot be read."""
    return tuple(sorted({name for name, _, _ in _functions(data)}))


def _functions(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield name and calling convention of each function, and whether it is a mere declaration."""
    functions: list[list[int]] = []
    table = b""
    try:
        for number, records in _blocks(data):
            if number == _MODULE:
                functions += [operands for code, operands, _ in records if code == _FUNCTION]
            elif number == _STRING_TABLE:
                table = next((blob for code, _, blob in records if code == _BLOB), table)
    except ValueError:
        return
    for operands in functions:
        if len(operands) >= _FIELDS and 0 < operands[1] <= _LONGEST:
            begin, length, _, convention, declared = operands[:_FIELDS]
            yield table[begin : begin + length].decode(errors="replace"), convention, declared


def _blocks(data: bytes) -> Iterator[tuple[int, Iterator[_Record]]]:
    """Yield the number and the records of each top-level block."""
    if not data.startswith(BITCODE_MAGIC):
        raise ValueError("no bitcode")
    bits = _Bits(data, _WORD, len(data) * 8)
    while bits.at + _WORD <= bits.end:
        if bits.fixed(2) != _ENTER:
            raise ValueError("something that is no block")
        number, width, end = bits.enter()
        yield number, _records(_Bits(data, bits.at, end), width)
        bits.at = end


def _records(bits: _Bits, width: int) -> Iterator[_Record]:
    """Yield code, operands and blob of each record of a block; blocks within it are passed over."""
    known: list[list[_Operand]] = []
    while (which := bits.fixed(width)) != _END:
        if which == _ENTER:
            bits.at = bits.enter()[2]
        elif which == _DEFINE:
            known.append(_abbreviation(bits))
        elif which == _PLAIN:
            code, count = bits.variable(6), bits.variable(6)
            yield code, [bits.variable(6) for _ in range(count)], b""
        elif which - 4 < len(known):
            yield _abbreviated(bits, known[which - 4])
        else:
            raise ValueError("an abbreviation that was not defined")


def _abbreviation(bits: _Bits) -> list[_Operand]:
    operands: list[_Operand] = []
    for _ in range(bits.variable(5)):
        if bits.fixed(1):
            operands.append((_LITERAL, bits.variable(8)))
            continue
        encoding = bits.fixed(3)
        if not _FIXED <= encoding <= _BYTES:
            raise ValueError("an encoding that there is not")
        operands.append((encoding, bits.variable(5) if encoding in (_FIXED, _VARIABLE) else 0))
    return operands


def _abbreviated(bits: _Bits, operands: list[_Operand]) -> _Record:
    values: list[int] = []
    blob = b""
    for place, operand in enumerate(operands):
        if operand[0] == _ARRAY:
            if place + 1 >= len(operands):
                raise ValueError("an array of nothing")
            # Each element takes a bit at least, or the count would be bounded by nothing.
            count = bits.variable(6)
            if count > bits.end - bits.at:
                raise ValueError("an array that is too long")
            values += [_value(bits, operands[place + 1]) for _ in range(count)]
            break
        if operand[0] == _BYTES:
            blob = _bytes(bits)
        else:
            values.append(_value(bits, operand))
    if not values:
        raise ValueError("a record without a code")
    return values[0], values[1:], blob


def _value(bits: _Bits, operand: _Operand) -> int:
    encoding, number = operand
    if encoding == _LITERAL:
        return number
    if encoding == _CHARACTER:
        return bits.fixed(6)
    if encoding not in (_FIXED, _VARIABLE):
        raise ValueError("an operand of operands")
    # A width of nothing stands for zero.
    if not number:
        return 0
    return bits.fixed(number) if encoding == _FIXED else bits.variable(number)


def _bytes(bits: _Bits) -> bytes:
    length = bits.variable(6)
    bits.align()
    begin = bits.at // 8
    if bits.at + 8 * length > bits.end:
        raise ValueError("a blob that is too long")
    bits.at += 8 * length
    bits.align()
    return bits.data[begin : begin + length]
