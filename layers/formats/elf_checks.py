"""Checks of ELF files: every offset, index and name in their headers and tables must be valid.

Sources: the System V ABI, chapters 4 and 5 ("Object Files", "Program Loading and Dynamic Linking"); the hash tables of
glibc's ``elf/dl-lookup.c``. Machine code and data cannot be checked: any bytes are possible there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cachectl.layers.formats.elf import MAGIC, OWN_TYPES, Elf, Section, Segment, read_elf

# Types of sections.
_NULL, _PROGBITS, _SYMTAB, _STRTAB, _RELA, _HASH, _DYNAMIC, _NOTE, _NOBITS, _REL = range(10)
_DYNSYM: Final = 11
_GNU_HASH: Final = 0x6FFFFFF6
#: The tables of symbol versions: definitions, needs, and the version of each symbol.
_VERSIONS: Final = (0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF)
# Types of segments.
_LOAD, _DYNAMIC_SEGMENT = 1, 2
# Types of files.
_RELOCATABLE, _EXECUTABLE, _SHARED = 1, 2, 3
_FIRST_RESERVED_INDEX: Final = 0xFF00
_EXTENDED_INDEX: Final = 0xFFFF
#: Types of symbols within their section: any kind, data, function, section.
_PLACED: Final = frozenset({0, 1, 2, 3})
_TLS_FLAG, _ALLOCATED = 0x400, 2
# Tags of the dynamic section.
_END_OF_TAGS: Final = 0
_NEEDED, _HASH_AT, _STRINGS_AT, _SYMBOLS_AT, _STRINGS_SIZE = 1, 4, 5, 6, 10
_NAMES: Final = frozenset({1, 14, 15, 29})
#: Tags whose value is an address: hash table, strings, symbols, RELA, INIT, FINI, REL, JMPREL, INIT_ARRAY, FINI_ARRAY,
#: GNU_HASH, VERSYM, VERDEF, VERNEED.
_ADDRESSES: Final = frozenset({4, 5, 6, 7, 12, 13, 17, 23, 25, 26, 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE})
_X86_64: Final = 62
#: The relocations of known machines: x86-64, with the two that GNU adds.
_RELOCATIONS: Final = {_X86_64: frozenset({*range(52), 250, 251})}
_WIDTHS: Final = {1: 4, 2: 8}


class _BadElfError(ValueError):
    """What is wrong; the message follows the name of the file."""


def complaint(data: bytes) -> str | None:
    """Return what is wrong with an ELF file; ``None`` where its headers and tables are consistent."""
    if not data.startswith(MAGIC):
        return "is not an ELF file" if data else "is empty"
    elf = read_elf(data)
    if elf is None:
        return f"is cut short at {len(data)} bytes"
    try:
        _check(elf)
    except _BadElfError as error:
        return f"is damaged: {error}"
    except (struct.error, IndexError):
        return "is damaged: a table reaches beyond its section"
    return None


def _check(elf: Elf) -> None:
    _check_header(elf)
    for number, section in enumerate(elf.sections):
        _check_section(elf, number, section)
    _check_segments(elf)
    for section in elf.sections:
        if section.kind in (_SYMTAB, _DYNSYM):
            _check_symbols(elf, section)
        elif section.kind in (_REL, _RELA):
            _check_relocations(elf, section)
        elif section.kind == _DYNAMIC:
            _check_dynamic(elf, section)
        elif section.kind == _HASH:
            _check_hash(elf, section)
        elif section.kind == _GNU_HASH:
            _check_gnu_hash(elf, section)


def _demand(holds: object, message: str) -> None:
    if not holds:
        raise _BadElfError(message)


def _check_header(elf: Elf) -> None:
    _demand(elf.sections or elf.segments, "it has neither sections nor segments")
    _demand(elf.kind, "its header names no type")
    if elf.kind in (_EXECUTABLE, _SHARED):
        _demand(elf.segments, "it has no segments to load")
    if elf.sections:
        names = elf.names
        _demand(0 < names < len(elf.sections) and elf.sections[names].kind == _STRTAB, "its sections have no names")


def _check_section(elf: Elf, number: int, section: Section) -> None:
    where = f"section {number}"
    if number == 0:
        _demand(section.kind == _NULL, "its first section is not empty")
        return
    # Intel's CPU driver keeps programs in sections without a type.
    if section.kind != _NULL or elf.kind >= OWN_TYPES:
        _demand(
            section.kind == _NOBITS or section.offset + section.size <= len(elf.data), f"{where} ends behind the file"
        )
        _demand(elf.has_name(section.name_at), f"{where} has no name")
    _demand(section.alignment & (section.alignment - 1) == 0, f"{where} has no possible alignment")
    if section.kind in (_SYMTAB, _DYNSYM, _REL, _RELA, _HASH, _DYNAMIC, _GNU_HASH, *_VERSIONS):
        _demand(section.link < len(elf.sections), f"{where} refers to the missing section {section.link}")
    if section.kind == _STRTAB and section.size and elf.kind < OWN_TYPES:
        content = elf.content(section)
        _demand(content[:1] == b"\0" and content[-1:] == b"\0", f"{where} is no table of strings")


def _check_segments(elf: Elf) -> None:
    for number, segment in enumerate(elf.segments):
        where = f"segment {number}"
        _demand(segment.offset + segment.size <= len(elf.data) or not segment.size, f"{where} ends behind the file")
        if segment.kind == _LOAD:
            align = segment.alignment
            _demand(segment.size <= segment.room, f"{where} is larger than its room")
            _demand(align & (align - 1) == 0, f"{where} has no possible alignment")
            _demand(align <= 1 or (segment.offset - segment.address) % align == 0, f"{where} cannot be mapped")
    if elf.kind == _SHARED:
        _demand(any(segment.kind == _LOAD for segment in elf.segments), "it has no segments to load")
        # A loaded table must lie in its section.
        for number, section in enumerate(elf.sections):
            if section.flags & _ALLOCATED and section.size and section.kind not in (_NULL, _NOBITS):
                _demand(_file_offset(elf, section.address) == section.offset, f"section {number} is in no segment")


def _file_offset(elf: Elf, address: int) -> int | None:
    for segment in elf.segments:
        if segment.kind == _LOAD and segment.address <= address < segment.address + segment.size:
            return segment.offset + address - segment.address
    return None


@dataclass(frozen=True, slots=True)
class _Symbol:
    name_at: int
    info: int
    section: int
    value: int
    size: int

    @property
    def is_local(self) -> bool:
        return self.info >> 4 == 0


def _symbols(elf: Elf, table: Section) -> list[_Symbol]:
    return [_Symbol(*fields) for fields in elf.symbol_fields(table)]


def _check_symbols(elf: Elf, table: Section) -> None:
    size = elf.symbol_size
    _demand(table.entry_size == size and table.size % size == 0 and table.size, "a symbol table has a wrong size")
    _demand(elf.sections[table.link].kind == _STRTAB, "a symbol table has no names")
    strings = elf.content(elf.sections[table.link])
    symbols = _symbols(elf, table)
    _demand(symbols[0] == _Symbol(0, 0, 0, 0, 0), "the first symbol is not empty")
    _demand(table.info <= len(symbols), "a symbol table has fewer symbols than its number of local ones")
    for number, symbol in enumerate(symbols):
        _demand(symbol.name_at < len(strings), f"symbol {number} has no name")
        _demand(number == 0 or symbol.is_local == (number < table.info), f"symbol {number} is local and is not")
        if symbol.section == _EXTENDED_INDEX or not symbol.section:
            continue
        if symbol.section >= _FIRST_RESERVED_INDEX:
            continue
        _demand(symbol.section < len(elf.sections), f"symbol {number} is in the missing section {symbol.section}")
        _check_place(elf, number, symbol)


def _check_place(elf: Elf, number: int, symbol: _Symbol) -> None:
    section = elf.sections[symbol.section]
    if symbol.info & 15 not in _PLACED or section.flags & _TLS_FLAG or elf.kind not in (_RELOCATABLE, _SHARED):
        return
    begin = 0 if elf.kind == _RELOCATABLE else section.address
    # Symbols made by the linker may lie at the end of any section.
    if symbol.size:
        inside = begin <= symbol.value and symbol.value + symbol.size <= begin + section.size
        _demand(inside, f"symbol {number} lies outside its section")


def _check_relocations(elf: Elf, table: Section) -> None:
    size = elf.relocation_size(with_addend=table.kind == _RELA)
    _demand(table.entry_size == size and table.size % size == 0, "a relocation table has a wrong size")
    symbols = elf.sections[table.link] if table.link else None
    if symbols is not None:
        _demand(symbols.kind in (_SYMTAB, _DYNSYM), "a relocation table has no symbols")
    count = 1 if symbols is None else symbols.size // elf.symbol_size
    known = _RELOCATIONS.get(elf.machine)
    target = None
    if elf.kind == _RELOCATABLE:
        _demand(0 < table.info < len(elf.sections), "a relocation table is for no section")
        target = elf.sections[table.info]
    for number, (offset, symbol, kind) in enumerate(elf.relocations(table)):
        where = f"relocation {number}"
        _demand(symbol < count, f"{where} is for the missing symbol {symbol}")
        _demand(known is None or kind in known, f"{where} has no possible type")
        if target is not None:
            _demand(offset < target.size, f"{where} lies outside its section")
        else:
            _demand(_is_loaded(elf.segments, offset), f"{where} lies outside what is loaded")


def _is_loaded(segments: Sequence[Segment], address: int) -> bool:
    return any(one.kind == _LOAD and one.address <= address <= one.address + one.room for one in segments)


def _check_dynamic(elf: Elf, section: Section) -> None:
    width = _WIDTHS[elf.width]
    _demand(section.size % (2 * width) == 0, "the dynamic section has a wrong size")
    if elf.segments:
        own = [one for one in elf.segments if one.kind == _DYNAMIC_SEGMENT]
        _demand(len(own) == 1 and own[0].offset == section.offset, "the dynamic segment is not the dynamic section")
    tags = list(_tags(elf, section))
    _demand(tags and tags[-1][0] == _END_OF_TAGS, "the dynamic section does not end")
    values = dict(tags)
    strings = elf.content(elf.sections[section.link])
    _demand(values.get(_STRINGS_SIZE, len(strings)) == len(strings), "the dynamic strings have another size")
    for tag in (_STRINGS_AT, _SYMBOLS_AT, _STRINGS_SIZE):
        _demand(tag in values, f"the dynamic section lacks tag {tag}")
    _demand(values.keys() & {_HASH_AT, 0x6FFFFEF5}, "the dynamic section lacks a hash table")
    for tag, value in tags:
        if tag in _NAMES:
            _demand(value < len(strings), f"the dynamic section names a string outside its table (tag {tag})")
        elif tag in _ADDRESSES:
            _demand(_is_loaded(elf.segments, value), f"the dynamic section leads outside what is loaded (tag {tag})")
    for tag, kind in ((_STRINGS_AT, _STRTAB), (_SYMBOLS_AT, _DYNSYM), (_HASH_AT, _HASH), (0x6FFFFEF5, _GNU_HASH)):
        if tag in values:
            there = any(one.kind == kind and one.address == values[tag] for one in elf.sections)
            _demand(there, f"the dynamic section leads to no table (tag {tag})")


def _tags(elf: Elf, section: Section) -> Iterator[tuple[int, int]]:
    """Yield tags and values, the last of which ends the list."""
    code = {4: "II", 8: "QQ"}[_WIDTHS[elf.width]]
    for tag, value in struct.iter_unpack(elf.order + code, elf.content(section)):
        yield tag, value
        if tag == _END_OF_TAGS:
            return


def _hashed(elf: Elf, section: Section) -> tuple[list[_Symbol], bytes]:
    table = elf.sections[section.link]
    _demand(table.kind == _DYNSYM, "a hash table has no symbols")
    return _symbols(elf, table), elf.content(elf.sections[table.link])


def _check_hash(elf: Elf, section: Section) -> None:
    """Follow every chain: each defined symbol must be found by its name."""
    symbols, strings = _hashed(elf, section)
    words = [word for (word,) in struct.iter_unpack(elf.order + "I", elf.content(section)[: section.size // 4 * 4])]
    _demand(len(words) >= 2, "the hash table is cut short")  # noqa: PLR2004 - its two counts
    buckets, chains = words[:2]
    _demand(
        buckets and chains == len(symbols) and len(words) == 2 + buckets + chains, "the hash table has a wrong size"
    )
    _demand(all(word < chains for word in words[2:]), "the hash table leads to a missing symbol")
    reached: set[int] = set()
    for bucket in range(buckets):
        number = words[2 + bucket]
        while number:
            _demand(number not in reached, "the hash table runs in a circle")
            reached.add(number)
            name = _name(strings, symbols[number].name_at)
            _demand(_sysv_hash(name) % buckets == bucket, f"symbol {number} is not found by its name")
            number = words[2 + buckets + number]
    defined = {number for number, symbol in enumerate(symbols) if symbol.section and not symbol.is_local}
    _demand(defined <= reached, "the hash table lacks a symbol")


def _check_gnu_hash(elf: Elf, section: Section) -> None:
    """Follow every chain as the dynamic linker does, bloom filter first."""
    symbols, strings = _hashed(elf, section)
    content, word = elf.content(section), _WIDTHS[elf.width]
    buckets, first, filters, shift = struct.unpack_from(elf.order + "4I", content)
    _demand(buckets and filters, "the hash table has a wrong size")
    begin = 16 + filters * word
    _demand(begin + 4 * buckets <= len(content), "the hash table has a wrong size")
    heads = struct.unpack_from(f"{elf.order}{buckets}I", content, begin)
    if not any(heads):
        # Without symbols to hash, linkers write any first symbol.
        _demand(not any(symbol.section for symbol in symbols[first:]), "the hash table lacks a symbol")
        return
    _demand(first <= len(symbols), "the hash table has a wrong size")
    count = len(symbols) - first
    _demand(begin + 4 * (buckets + count) <= len(content), "the hash table has a wrong size")
    _demand(shift < 64, "the hash table has no possible filter")  # noqa: PLR2004 - bits of a word
    bloom = struct.unpack_from(f"{elf.order}{filters}{'Q' if word == 8 else 'I'}", content, 16)  # noqa: PLR2004
    chains = struct.unpack_from(f"{elf.order}{count}I", content, begin + 4 * buckets)
    bits = 8 * word
    for number, stored in enumerate(chains, first):
        value = _gnu_hash(_name(strings, symbols[number].name_at))
        _demand(stored | 1 == value | 1, f"symbol {number} is not found by its name")
        mask = 1 << value % bits | 1 << (value >> shift) % bits
        _demand(bloom[value // bits % filters] & mask == mask, f"symbol {number} is not found by its name")
        # A bucket names the first of its symbols; the rest follow, and the last has its lowest bit set.
        head = heads[value % buckets]
        _demand(first <= head <= number, f"symbol {number} is not found by its name")
        ended = number > head and chains[number - 1 - first] & 1
        _demand(not ended or head == number, f"symbol {number} is not found by its name")
    _demand(not chains or chains[-1] & 1, "the hash table does not end")
    _demand(all(head == 0 or head < len(symbols) for head in heads), "the hash table leads to a missing symbol")


def _name(strings: bytes, at: int) -> bytes:
    end = strings.find(b"\0", at)
    return strings[at:end] if end >= 0 else strings[at:]


def _sysv_hash(name: bytes) -> int:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value & 0xFFFFFFFF


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = value * 33 + byte & 0xFFFFFFFF
    return value
