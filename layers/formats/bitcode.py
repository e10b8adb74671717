"""LLVM bitcode: whether it is complete, its target, and the functions and kernels in it.

Sources: ``llvm/docs/BitCodeFormat.rst``, ``llvm/include/llvm/Bitcode/LLVMBitCodes.h``, and for the symbol table that
LLVM adds for linkers, ``llvm/include/llvm/Object/IRSymtab.h``. Every block states its length, so a truncated file is
detected without reading its blocks. A kernel is a function that a module defines with a kernel's calling convention.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from cachectl.layers.formats.details import Cut, fields, names_or_none, part, require

MAGIC = b"BC\xc0\xde"
#: The beginning of a wrapper, which LLVM skips; wrapped bitcode is not checked.
_WRAPPER = b"\xde\xc0\x17\x0b"
#: The bits that begin a block (its number and the width of its abbreviations), and its length in words.
_BLOCK = struct.Struct("<II")
_WORD = 32

_MODULE = 8
_IDENTIFICATION = 13
_STRING_TABLE = 23
_SYMBOL_TABLE = 25
#: Codes of records in a module, in the string and symbol tables, and in the identification.
_VERSION, _FUNCTION, _BLOB_RECORD, _PRODUCER = 1, 8, 1, 1
#: From this version on, a module's names are in a string table (LLVM 5 and newer).
_WITH_STRING_TABLE = 2
#: Abbreviations that every block has.
_END, _ENTER, _DEFINE, _PLAIN = range(4)
#: Encodings of an operand; a literal has none.
_LITERAL, _FIXED, _VARIABLE, _ARRAY, _CHARACTER, _BLOB = range(6)
_WIDEST = 64
#: The layout of unabbreviated records: their code and an array of numbers, in chunks of six bits.
_UNABBREVIATED = [(_VARIABLE, 6), (_ARRAY, 0), (_VARIABLE, 6)]
#: SPIR kernels and AMDGPU kernels (``llvm/IR/CallingConv.h``).
_KERNELS = frozenset({76, 91})
#: The symbol table: version (the newest is that of LLVM 23), offset and number of symbols, offset and size of the
#: target. A symbol: offset and size of its name, flags.
_SYMBOLS, _SYMBOL = struct.Struct("<I24x2I8x2I"), struct.Struct("<8x2I4xI")
_NEWEST, _UNDEFINED = 4, 1 << 3
#: The number of fields read of a function: offset and length of its name, type, calling convention, whether declared.
_FIELDS = 5
#: The longest name, and the largest file that is read, in bytes.
_LONGEST = 4096
_LARGEST = 1 << 26
#: The characters of six-bit numbers.
_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._"
#: More zeros than a string table can end with: three bytes of padding, and the end of its block.
_ZEROS = bytes(8)


class Symbols(NamedTuple):
    """The target of a module, such as ``x86_64-pc-linux-gnu``, and the names that it defines."""

    target: str
    defined: frozenset[str]


def complaint(data: bytes) -> str | None:
    """Return how bitcode was truncated or zeroed; ``None`` if its blocks fill it. Their records are not checked."""
    if data.startswith(_WRAPPER):
        return None
    if not data.startswith(MAGIC):
        return "is not LLVM bitcode" if data else "is empty"
    try:
        blocks = {block.number: block for block in _blocks(data)}
    except Cut as cut:
        return str(cut)
    # LLVM refuses a length that is not a multiple of a word.
    if len(data) % 4 or _MODULE not in blocks or (_STRING_TABLE not in blocks and blocks[_MODULE].needs_names()):
        return str(Cut(data))
    if [*blocks][-1] == _STRING_TABLE and data.endswith(_ZEROS, 0, blocks[_STRING_TABLE].end // 8):
        return "ends in zeros where names should be"
    return None


@lru_cache
def producer(data: bytes) -> str | None:
    """Return the producer of bitcode, such as ``LLVM15.0.6``, from its first bytes; ``None`` if they do not name it."""
    with suppress(Cut, StopIteration):
        block = next(_blocks(data))
        for code, numbers, _ in block.records() if block.number == _IDENTIFICATION else ():
            if code == _PRODUCER and numbers:
                is_short = max(numbers) < len(_CHARACTERS)
                return "".join(_CHARACTERS[number] if is_short else chr(number & 0x7F) for number in numbers)
    return None


def kernels(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels that bitcode defines; ``None`` if it cannot be read or defines none."""
    functions: list[list[int]] = []
    table = b""
    try:
        for block in _blocks(data) if len(data) <= _LARGEST else ():
            for code, operands, blob in block.records() if block.number in (_MODULE, _STRING_TABLE) else ():
                if block.number == _MODULE and code == _FUNCTION and len(operands) >= _FIELDS:
                    functions.append(operands)
                elif block.number == _STRING_TABLE and code == _BLOB_RECORD:
                    table = blob
    except Cut:
        return None
    return names_or_none(
        table[begin : begin + length].decode(errors="replace")
        for begin, length, _, convention, declared, *_ in functions
        if 0 < length <= _LONGEST and convention in _KERNELS and not declared
    )


def read_symbols(data: bytes) -> Symbols | None:
    """Read the symbol table; ``None`` if it is truncated or missing, as from an LLVM without support of the target."""
    blobs = {_SYMBOL_TABLE: b"", _STRING_TABLE: b""}
    with suppress(Cut, UnicodeDecodeError):
        for block in _blocks(data):
            if block.number in blobs:
                blobs[block.number] = b"".join(blob for code, _, blob in block.records() if code == _BLOB_RECORD)
        table, names = blobs.values()
        version, place, count, target, length = fields(_SYMBOLS, table)
        rows = _SYMBOL.iter_unpack(part(table, place, count * _SYMBOL.size))
        defined = (names[at : at + size].decode() for at, size, flags in rows if not flags & _UNDEFINED)
        return Symbols(part(names, target, length).decode(), frozenset(defined)) if version <= _NEWEST else None
    return None


def _blocks(stream: bytes) -> Iterator[_Block]:
    """Yield the top-level blocks of bitcode, none of other data. Raises :class:`Cut` at what is not a block."""
    at = len(MAGIC if stream.startswith(MAGIC) else stream)
    # LLVM ignores up to eight bytes after the last block (``getBitcodeFileContents`` in ``BitcodeReader.cpp``).
    while at + 8 < len(stream):
        bits, words = fields(_BLOCK, stream, at)
        begin = at + _BLOCK.size
        at = begin + 4 * words
        require(stream, begin, 4 * words)
        # No known block has a number or width that needs a second chunk.
        if bits & 3 != _ENTER or bits >> 9 & 1 or bits >> 13 & 1:
            raise Cut(stream)
        yield _Block(stream, bits >> 2 & 0x7F, bits >> 10 & 0x7, 8 * begin, 8 * at)


class _Block:
    """A top-level block, to be read once: the ``width`` of its abbreviations, the bits ``at`` and ``end``."""

    def __init__(self, data: bytes, number: int, width: int, at: int, end: int) -> None:
        self.data = data
        self.number = number
        self.width = width
        self.at = at
        self.end = end

    def needs_names(self) -> bool:
        """Return whether the version of a module, its first record, requires a string table."""
        with suppress(Cut, StopIteration):
            return next(self.records())[:2] == (_VERSION, [_WITH_STRING_TABLE])
        return False

    def records(self) -> Iterator[tuple[int, list[int], bytes]]:
        """Yield code, operands and blob of each record of the block itself. Raises :class:`Cut` for a truncated one."""
        layouts = [_UNABBREVIATED]
        while self.at < self.end:
            number = self._fixed(self.width)
            if number == _END:
                return
            if number == _ENTER:
                self._variable(8)
                self._variable(4)
                self._align()
                self._skip(_WORD * self._fixed(_WORD))
            elif number == _DEFINE:
                layouts.append([self._operand() for _ in range(self._count(5))])
            elif number - _PLAIN < len(layouts):
                yield self._record(layouts[number - _PLAIN])
            else:
                raise Cut(self.data)

    def _record(self, layout: list[tuple[int, int]]) -> tuple[int, list[int], bytes]:
        numbers: list[int] = []
        blob = b""
        for encoding, value in layout:
            if encoding == _ARRAY:
                # The last operand of the layout describes each element.
                numbers += [self._scalar(*layout[-1]) for _ in range(self._count(6))]
                break
            if encoding == _BLOB:
                length = self._count(6)
                self._align()
                begin = self.at // 8
                self._skip(8 * length)
                self._align()
                blob = self.data[begin : begin + length]
            else:
                numbers.append(self._scalar(encoding, value))
        return (numbers or [0])[0], numbers[1:], blob

    def _operand(self) -> tuple[int, int]:
        if self._fixed(1):
            return _LITERAL, self._variable(8)
        encoding = self._fixed(3)
        return encoding, self._variable(5) if encoding in (_FIXED, _VARIABLE) else 6

    def _scalar(self, encoding: int, value: int) -> int:
        if encoding == _LITERAL:
            return value
        return self._variable(value) if encoding == _VARIABLE else self._fixed(value)

    def _count(self, width: int) -> int:
        """Return the length of an array, which cannot have more elements than its block has bits."""
        count = self._variable(width)
        if count > self.end - self.at:
            raise Cut(self.data)
        return count

    def _variable(self, width: int) -> int:
        """Return a number in chunks of ``width`` bits, whose highest bit says whether another follows."""
        value = shift = 0
        more = 1 << max(0, width - 1)
        chunk = more
        while chunk & more and shift < _WIDEST:
            chunk = self._fixed(width)
            value |= (chunk & (more - 1)) << shift
            shift += width - 1 or _WIDEST
        return value

    def _fixed(self, width: int) -> int:
        at = self.at
        self._skip(width)
        return int.from_bytes(self.data[at >> 3 : (self.at + 7) >> 3], "little") >> (at & 7) & (1 << width) - 1

    def _skip(self, width: int) -> None:
        self.at += width
        if self.at > self.end:
            raise Cut(self.data)

    def _align(self) -> None:
        self.at = -(-self.at // _WORD) * _WORD
