"""LLVM bitcode: checks, the program that wrote it, and the kernels that it defines.

Source: ``llvm/docs/BitCodeFormat.rst`` ("LLVM IR Encoding") and ``llvm/include/llvm/Bitcode/LLVMBitCodes.h``. A kernel
is a function that a module defines with a kernel's calling convention.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from cachectl.layers.base.lazy import regex
from cachectl.layers.formats.bitstream import ENTERED, BitstreamError, Record, records

MAGIC: Final = b"BC\xc0\xde"
#: The header of wrapped bitcode: magic, version, offset and length of the bitcode.
_WRAPPER: Final = struct.Struct("<5I")
_WRAPPER_MAGIC: Final = 0x0B17C0DE

_MODULE: Final = 8
_FUNCTION_BODY: Final = 12
_IDENTIFICATION: Final = 13
_TYPES: Final = 17
_STRING_TABLE: Final = 23
# Codes of records: of a module, of the identification, of the types, of the string table.
_VARIABLE, _FUNCTION = 7, 8
_PRODUCER, _EPOCH = 1, 2
_TYPE_COUNT, _STRUCT_NAME = 1, 19
_BLOB: Final = 1
#: Types made of other types, with the index of the first of these among the operands.
_MADE_OF: Final = {8: 0, 11: 1, 12: 1, 18: 1, 20: 1, 21: 1}
#: A pointer's second operand is no type; arrays and vectors have one element type.
_SINGLE: Final = frozenset({8, 11, 12})
#: SPIR kernels and AMDGPU kernels (``llvm/IR/CallingConv.h``).
_KERNELS: Final = frozenset({76, 91})

_WHOLE: Final = {
    _MODULE: frozenset({_VARIABLE, _FUNCTION}),
    # Only to be counted.
    _FUNCTION_BODY: frozenset(),
    _IDENTIFICATION: None,
    _TYPES: None,
    _STRING_TABLE: frozenset({_BLOB}),
}
_NAMES: Final = {_MODULE: frozenset({_FUNCTION}), _STRING_TABLE: frozenset({_BLOB})}
#: The fields of a function's record that are read: offset and length of its name, type, calling convention, and whether
#: it is only declared.
_FIELDS: Final = 5
#: The longest name, in bytes.
_LONGEST: Final = 4096
#: Larger than any program, in bytes. As text, the bits take eight times as many.
_LARGEST: Final = 1 << 26
_LLVM: Final = regex(r"LLVM(\d+)\..*")


def complaint(data: bytes) -> str | None:
    """Return what is wrong with bitcode; ``None`` where its blocks and records are complete to the last bit.

    Types and operands are not checked beyond what names and counts need: LLVM alone can. More than 64 MiB are not read.
    """
    return examine(data)[0]


def examine(data: bytes) -> tuple[str | None, frozenset[str]]:
    """Return the result of :func:`complaint`, and the names of all functions, none where anything is wrong."""
    if not data.startswith((MAGIC, _WRAPPER_MAGIC.to_bytes(4, "little"))):
        return "is not LLVM bitcode" if data else "is empty", frozenset()
    if len(data) > _LARGEST:
        return None, frozenset()
    stream = _unwrapped(data)
    if stream is None:
        return f"is cut short at {len(data)} bytes", frozenset()
    try:
        found = list(records(stream, len(MAGIC), _WHOLE))
        wrong = _inconsistency(found)
    except BitstreamError as error:
        wrong = str(error)
    if wrong is not None:
        return f"is damaged or cut short at {len(data)} bytes: {wrong}", frozenset()
    return None, frozenset(name for name, _, _ in _functions(found))


def producer(data: bytes) -> str | None:
    """Return the program that wrote the bitcode, such as ``LLVM14.0.6``; ``None`` where it is not named."""
    return next((_text(one) for one in _some(data, {_IDENTIFICATION: None}) if one.code == _PRODUCER), None)


def llvm_release(data: bytes) -> int | None:
    """Return the major release of LLVM that wrote the bitcode; ``None`` where another compiler did."""
    match = _LLVM.fullmatch(producer(data) or "")
    return None if match is None else int(match[1])


def kernels(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels that bitcode defines; ``None`` where it cannot be read, or defines none."""
    found = {
        name
        for name, convention, declared in _functions(_some(data, _NAMES))
        if convention in _KERNELS and not declared
    }
    return tuple(sorted(found)) or None


def function_names(data: bytes) -> tuple[str, ...]:
    """Return the names of all functions that bitcode defines or declares; none where it cannot be read."""
    return tuple(sorted({name for name, _, _ in _functions(_some(data, _NAMES))}))


def _functions(found: list[Record]) -> Iterator[tuple[str, int, int]]:
    """Yield name and calling convention of each function, and whether it is only declared."""
    functions: list[list[int]] = []
    table = b""
    for record in found:
        if record.block == _MODULE and record.code == _FUNCTION:
            functions.append(record.operands)
        elif record.block == _STRING_TABLE and record.code == _BLOB:
            table = record.blob
    for operands in functions:
        if len(operands) >= _FIELDS and 0 < operands[1] <= _LONGEST:
            begin, length, _, convention, declared = operands[:_FIELDS]
            yield table[begin : begin + length].decode(errors="replace"), convention, declared


def _some(data: bytes, wanted: Mapping[int, frozenset[int] | None]) -> list[Record]:
    """Return some records, skipping other blocks by their lengths; none where that fails."""
    stream = _unwrapped(data)
    if stream is None or not stream.startswith(MAGIC) or len(data) > _LARGEST:
        return []
    try:
        return list(records(stream, len(MAGIC), wanted, whole=False))
    except BitstreamError:
        return []


def _unwrapped(data: bytes) -> bytes | None:
    """Return the bitcode without its wrapper; ``None`` where the wrapper is empty."""
    if data.startswith(MAGIC):
        return data
    if len(data) < _WRAPPER.size:
        return None
    _, _, begin, length, _ = _WRAPPER.unpack_from(data)
    inner = data[begin : begin + length]
    return inner if len(inner) == length and inner.startswith(MAGIC) else None


def _text(record: Record) -> str:
    return "".join(chr(number) for number in record.operands if number < 128)  # noqa: PLR2004 - ASCII


def _inconsistency(found: list[Record]) -> str | None:
    """Return what does not fit together among complete records."""
    by_block: dict[int, list[Record]] = {}
    for record in found:
        by_block.setdefault(record.block, []).append(record)
    if _MODULE not in by_block:
        return "it holds no module"
    complaints: Iterable[str | None] = (
        _wrong_epoch(by_block.get(_IDENTIFICATION, [])),
        _wrong_types(by_block.get(_TYPES, [])),
        _wrong_functions(by_block),
        _wrong_names(by_block),
    )
    return next((complaint for complaint in complaints if complaint is not None), None)


def _wrong_epoch(identification: list[Record]) -> str | None:
    wrong = any(record.code == _EPOCH and record.operands != [0] for record in identification)
    return "it is of an epoch that no LLVM has" if wrong else None


def _wrong_types(types: list[Record]) -> str | None:
    """Check that each table of types has the length that it states, and refers only to its own types."""
    tables: list[list[Record]] = []
    for record in types:
        if record.code == ENTERED:
            tables.append([])
        else:
            tables[-1].append(record)
    for table in tables:
        count = sum(record.code not in (_TYPE_COUNT, _STRUCT_NAME) for record in table)
        said = [record.operands for record in table if record.code == _TYPE_COUNT]
        if said and said[-1] != [count]:
            return "the number of its types is not the stated one"
        if any(part >= count for record in table for part in _parts(record)):
            return "a type refers to a missing type"
    return None


def _parts(record: Record) -> Iterator[int]:
    first = _MADE_OF.get(record.code)
    if first is not None:
        yield from record.operands[first : first + 1 if record.code in _SINGLE else None]


def _wrong_functions(by_block: dict[int, list[Record]]) -> str | None:
    """Compare the functions that modules define with their bodies."""
    functions = [record.operands for record in by_block[_MODULE] if record.code == _FUNCTION]
    if any(len(function) < _FIELDS for function in functions):
        return "a function is cut short"
    bodies = [record for record in by_block.get(_FUNCTION_BODY, []) if record.code == ENTERED]
    if sum(not function[4] for function in functions) != len(bodies):
        return "a function that it defines has no body"
    return None


def _wrong_names(by_block: dict[int, list[Record]]) -> str | None:
    tables = [record.blob for record in by_block.get(_STRING_TABLE, []) if record.code == _BLOB]
    # Before LLVM 5 names were in the module.
    if len(tables) != 1:
        return None
    named = (record.operands for record in by_block[_MODULE] if record.code in (_VARIABLE, _FUNCTION))
    if any(len(symbol) < 2 or symbol[0] + symbol[1] > len(tables[0]) for symbol in named):  # noqa: PLR2004 - place, length
        return "a name lies outside the table of strings"
    return None
