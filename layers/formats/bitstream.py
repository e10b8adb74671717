"""LLVM's bitstream container: nested blocks of records, decoded or checked to the end.

Source: ``llvm/docs/BitCodeFormat.rst`` ("Bitstream Format"). The bits are held as text, lowest bit first: a record that
nobody asked for is skipped by a few string operations instead of one step for each operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

#: The block that defines abbreviations for other blocks, and its record with the id of such a block.
_BLOCK_INFO: Final = 0
_SET_BLOCK: Final = 1
#: Abbreviations that every block has.
_END, _ENTER, _DEFINE, _PLAIN = range(4)
_FIRST_DEFINED: Final = 4
# Encodings of an operand.
_LITERAL, _FIXED, _VARIABLE, _ARRAY, _CHARACTER, _BLOB = range(6)
_WORD: Final = 32
#: The widest field or number, in bits.
_WIDEST: Final = 64
#: Real bitcode nests five blocks.
_DEEPEST: Final = 64
#: The alphabet of a character of six bits.
_SIX_BITS: Final = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._"
#: Every abbreviation number of a given width, by its bits.
_NUMBERS: Final = tuple({format(n, f"0{width}b")[::-1]: n for n in range(1 << width)} for width in range(9))
#: The abbreviation number of a record without an abbreviation, by the width of such numbers.
_PLAIN_RECORD: Final = tuple("11".ljust(width, "0") for width in range(9))
#: The most chunks of six bits that a number of 64 bits takes; in a longer one so many have their highest bit set.
_LONGEST_RUN: Final = 13
_TOO_LONG: Final = "1" * _LONGEST_RUN
#: Every number of variable width that takes one chunk of six bits, by its bits: most numbers are of these.
_SHORT: Final = {bits: number for bits, number in _NUMBERS[6].items() if bits.endswith("0")}


class BitstreamError(ValueError):
    """The bytes are no complete bitstream; the message says why."""


class Record(NamedTuple):
    """One record of a block; ``code`` is :data:`ENTERED` where the block itself begins.

    ``at`` is the bit at which the record, or the content of the block, begins.
    """

    block: int
    code: int
    operands: list[int]
    blob: bytes
    at: int


#: The code of the record that announces a block.
ENTERED: Final = -1

_Operand = tuple[int, int]


class _Abbreviation(NamedTuple):
    """The layout of a record: its operands, its code if that is a literal, and the steps that skip it.

    A step is an encoding and a width: neighbours of fixed width are one step.
    """

    operands: tuple[_Operand, ...]
    code: int | None
    steps: tuple[_Operand, ...]


@dataclass(slots=True)
class _Block:
    number: int
    width: int
    end: int
    known: list[_Abbreviation]
    #: The codes of the records to decode, ``None`` for all.
    codes: frozenset[int] | None = frozenset()
    #: In a block of abbreviations: the block that they are for.
    about: int | None = None


@dataclass(slots=True)
class _Reader:
    data: bytes
    bits: str
    at: int
    #: Where the innermost block ends.
    end: int

    def fixed(self, width: int) -> int:
        at = self.at
        self.at = at + width
        if width > _WIDEST or self.at > self.end:
            raise BitstreamError("a field reaches beyond its block")
        return int(self.bits[at : self.at][::-1], 2) if width else 0

    def variable(self, width: int) -> int:
        if width == 6:  # noqa: PLR2004 - as in every record without an abbreviation
            short = _SHORT.get(self.bits[self.at : self.at + 6])
            if short is not None and self.at + 6 <= self.end:
                self.at += 6
                return short
        if not width:
            return 0
        more = 1 << (width - 1)
        value = shift = 0
        while shift < _WIDEST:
            chunk = self.fixed(width)
            value |= (chunk & (more - 1)) << shift
            if not chunk & more:
                return value
            shift += width - 1
        raise BitstreamError("a number is too long")

    def align(self) -> None:
        self.at = -(-self.at // _WORD) * _WORD

    def skip_variables(self, width: int, count: int) -> None:
        """Skip numbers of variable width: each ends with the first chunk whose highest bit is not set."""
        if count == 1 and self.bits[self.at + width - 1 : self.at + width] == "0":
            self.at += width
            return
        chunks = _LONGEST_RUN * count
        while True:
            stop = min(self.at + chunks * width, self.end)
            flags = self.bits[self.at + width - 1 : stop : width]
            parts = flags.split("0", count)
            if len(parts) > count:
                break
            if stop == self.end:
                raise BitstreamError("a number reaches beyond its block")
            chunks *= 4
        # A number of 64 bits has at most this many chunks.
        if max(map(len, parts[:count])) > _WIDEST // (width - 1):
            raise BitstreamError("a number is too long")
        self.at += (len(flags) - len(parts[count])) * width

    def skip_records(self, width: int) -> None:
        """Skip the usual records that follow: unabbreviated, with numbers of a usual length.

        Most records are of these, so this loop decides how long a program takes; the general case is left to others.
        """
        bits, at, end = self.bits, self.at, self.end
        plain = _PLAIN_RECORD[width]
        while bits.startswith(plain, at):
            begin = at + width + 12
            count = _SHORT.get(bits[begin - 6 : begin])
            if count is None or bits[begin - 7 : begin - 6] != "0":
                break
            if count == 1 and bits[begin + 5 : begin + 6] == "0":
                begin += 6
            elif count:
                flags = bits[begin + 5 : begin + 6 * _LONGEST_RUN * count : 6]
                parts = flags.split("0", count)
                if len(parts) <= count or _TOO_LONG in flags:
                    break
                begin += 6 * (len(flags) - len(parts[-1]))
            if begin > end:
                break
            at = begin
        self.at = at

    def skip(self, abbreviation: _Abbreviation) -> None:
        for encoding, width in abbreviation.steps:
            if encoding == _FIXED:
                self.at += width
            elif encoding == _VARIABLE:
                self.skip_variables(width, 1)
            elif encoding == _BLOB:
                self.blob()
            else:
                self.skip_elements(abbreviation.operands[-1])

    def skip_elements(self, element: _Operand) -> None:
        count = self.variable(6)
        encoding, width = element
        if encoding == _VARIABLE and width:
            # Each element takes at least one chunk, which bounds the count.
            if count * width > self.end - self.at:
                raise BitstreamError("an array reaches beyond its block")
            if count:
                self.skip_variables(width, count)
        elif encoding != _LITERAL:
            self.at += count * (6 if encoding == _CHARACTER else width)

    def value(self, operand: _Operand) -> int:
        encoding, number = operand
        if encoding == _LITERAL:
            return number
        if encoding == _CHARACTER:
            return _SIX_BITS[self.fixed(6)]
        return self.fixed(number) if encoding == _FIXED else self.variable(number)

    def decode(self, abbreviation: _Abbreviation) -> tuple[int, list[int], bytes]:
        values: list[int] = []
        blob = b""
        for operand in abbreviation.operands:
            if operand[0] == _ARRAY:
                count = self.variable(6)
                if count > self.end - self.at:
                    raise BitstreamError("an array reaches beyond its block")
                values += [self.value(abbreviation.operands[-1]) for _ in range(count)]
                break
            if operand[0] == _BLOB:
                blob = self.blob()
            else:
                values.append(self.value(operand))
        if not values:
            raise BitstreamError("a record has no code")
        return values[0], values[1:], blob

    def blob(self) -> bytes:
        length = self.variable(6)
        self.align()
        begin = self.at // 8
        self.at += 8 * length
        if self.at > self.end:
            raise BitstreamError("a blob reaches beyond its block")
        self.align()
        return self.data[begin : begin + length]

    def abbreviation(self) -> _Abbreviation:
        operands: list[_Operand] = []
        for _ in range(self.variable(5)):
            if self.fixed(1):
                operands.append((_LITERAL, self.variable(8)))
                continue
            encoding = self.fixed(3)
            if not _FIXED <= encoding <= _BLOB:
                raise BitstreamError(f"there is no encoding {encoding}")
            width = self.variable(5) if encoding in (_FIXED, _VARIABLE) else 0
            # A number of one-bit chunks would never end.
            if width > _WORD or (encoding == _VARIABLE and width == 1):
                raise BitstreamError(f"an operand is {width} bits wide")
            operands.append((encoding, width))
        return _compiled(tuple(operands))


def _compiled(operands: tuple[_Operand, ...]) -> _Abbreviation:
    encodings = [encoding for encoding, _ in operands]
    if not operands or encodings[0] in (_ARRAY, _BLOB):
        raise BitstreamError("an abbreviation has no code")
    if _ARRAY in encodings and (encodings.index(_ARRAY) != len(operands) - 2 or encodings[-1] in (_ARRAY, _BLOB)):
        raise BitstreamError("an abbreviation has an array of no scalars")
    if _BLOB in encodings[:-1]:
        raise BitstreamError("an abbreviation goes on after a blob")
    steps: list[_Operand] = []
    for encoding, number in operands:
        if encoding == _ARRAY:
            steps.append((_ARRAY, 0))
            break
        if encoding in (_BLOB, _VARIABLE) and (number or encoding == _BLOB):
            steps.append((encoding, number))
        elif encoding in (_FIXED, _CHARACTER):
            width = number if encoding == _FIXED else 6
            if steps and steps[-1][0] == _FIXED:
                width += steps.pop()[1]
            steps.append((_FIXED, width))
    return _Abbreviation(operands, operands[0][1] if encodings[0] == _LITERAL else None, tuple(steps))


def records(
    data: bytes, begin: int, wanted: Mapping[int, frozenset[int] | None], *, whole: bool = True
) -> Iterator[Record]:
    """Yield the wanted records of a bitstream whose first block is at the byte ``begin``.

    ``wanted`` maps the number of a block to the codes of its records, ``None`` for all of them; its blocks are
    announced too. Everything else is checked and skipped; with ``whole=False`` blocks that are not wanted are skipped
    by the length they give, unchecked. Raises :class:`BitstreamError` at the first error of format.
    """
    bits = format(int.from_bytes(data, "little"), "b")[::-1].ljust(len(data) * 8, "0")
    walk = _Walk(_Reader(data, bits, begin * 8, len(data) * 8), wanted, whole=whole)
    while walk.goes_on:
        record = walk.step()
        if record is not None:
            yield record


class _Walk:
    """A reader of a bitstream, one abbreviation number at a time; each step returns a record if it is wanted."""

    def __init__(self, reader: _Reader, wanted: Mapping[int, frozenset[int] | None], *, whole: bool) -> None:
        self._reader = reader
        self._wanted = wanted
        self._whole = whole
        self._outermost = _Block(-1, 2, reader.end, [])
        self._stack = [self._outermost]
        #: Abbreviations for blocks to come, by block.
        self._defined: dict[int, list[_Abbreviation]] = {}

    @property
    def goes_on(self) -> bool:
        return len(self._stack) > 1 or self._reader.at < self._outermost.end

    def step(self) -> Record | None:
        block, reader = self._stack[-1], self._reader
        if block.codes is not None and not block.codes:
            reader.skip_records(block.width)
        start = reader.at
        which = _NUMBERS[block.width].get(reader.bits[start : start + block.width])
        if which is None or start >= block.end:
            raise BitstreamError("a block does not end")
        reader.at = start + block.width
        if which == _ENTER:
            return self._enter()
        if block is self._outermost:
            raise BitstreamError("something between the blocks is not one")
        if which in (_END, _DEFINE):
            self._leave(block) if which == _END else self._define(block)
            return None
        record = self._plain(block, start) if which == _PLAIN else self._abbreviated(block, which, start)
        if reader.at > block.end:
            raise BitstreamError(f"a record reaches beyond block {block.number}")
        if record is not None and block.number == _BLOCK_INFO:
            if record.code == _SET_BLOCK:
                block.about = record.operands[0] if record.operands else None
            return None
        return record

    def _enter(self) -> Record | None:
        reader = self._reader
        number, width = reader.variable(8), reader.variable(4)
        reader.align()
        end = reader.fixed(_WORD) * _WORD + reader.at
        if not 2 <= width < len(_NUMBERS):  # noqa: PLR2004 - the bits of the four abbreviations that every block has
            raise BitstreamError(f"a block has abbreviations of {width} bits")
        if end > reader.end:
            raise BitstreamError("a block reaches beyond the one around it")
        if not self._whole and number not in self._wanted and number != _BLOCK_INFO:
            reader.at = end
            return None
        if len(self._stack) > _DEEPEST:
            raise BitstreamError("blocks are nested too deeply")
        codes = None if number == _BLOCK_INFO else self._wanted.get(number, frozenset())
        self._stack.append(_Block(number, width, end, list(self._defined.get(number, ())), codes))
        reader.end = end
        return Record(number, ENTERED, [], b"", reader.at) if number in self._wanted else None

    def _leave(self, block: _Block) -> None:
        self._reader.align()
        if self._reader.at != block.end:
            raise BitstreamError(f"block {block.number} does not end at its stated length")
        self._stack.pop()
        self._reader.end = self._stack[-1].end

    def _define(self, block: _Block) -> None:
        abbreviation = self._reader.abbreviation()
        if block.number != _BLOCK_INFO:
            block.known.append(abbreviation)
        elif block.about is None:
            raise BitstreamError("an abbreviation is for no block")
        else:
            self._defined.setdefault(block.about, []).append(abbreviation)

    def _plain(self, block: _Block, start: int) -> Record | None:
        """Read a record without an abbreviation: a code, a count and that many operands, all of variable width."""
        reader, codes = self._reader, block.codes
        code, count = reader.variable(6), reader.variable(6)
        if count * 6 > reader.end - reader.at:
            raise BitstreamError(f"a record reaches beyond block {block.number}")
        if codes is None or code in codes:
            return Record(block.number, code, [reader.variable(6) for _ in range(count)], b"", start)
        if count:
            reader.skip_variables(6, count)
        return None

    def _abbreviated(self, block: _Block, which: int, start: int) -> Record | None:
        if which - _FIRST_DEFINED >= len(block.known):
            raise BitstreamError(f"block {block.number} has no abbreviation {which}")
        abbreviation, codes = block.known[which - _FIRST_DEFINED], block.codes
        if codes is not None and (not codes or (abbreviation.code is not None and abbreviation.code not in codes)):
            self._reader.skip(abbreviation)
            return None
        code, operands, blob = self._reader.decode(abbreviation)
        return Record(block.number, code, operands, blob, start) if codes is None or code in codes else None
