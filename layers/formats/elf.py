"""ELF files, read as far as a cache needs: sections, notes and symbol names, each within the bytes that are there.

Source: the System V ABI, chapter 4 ("Object Files"). Nothing here is executed or mapped; what points outside the
file makes the file no whole one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cachectl.layers.formats.object_files import ELF_MAGIC

#: Longer names are none, in bytes.
_LONGEST: Final = 4096
_NO_BITS: Final = 8
_SYMBOLS: Final = frozenset({2, 11})
_ORDERS: Final = {1: "<", 2: ">"}
# By class: the header behind the first 16 bytes; one section header; one symbol.
_HEADERS: Final = {1: "HHIIIIIHHHHHH", 2: "HHIQQQIHHHHHH"}
_SECTIONS: Final = {1: "IIIIIIIIII", 2: "IIQQQQIIQQ"}
_SYMBOL_ENTRIES: Final = {1: "IIIBBH", 2: "IBBHQQ"}


@dataclass(frozen=True, slots=True)
class Section:
    """One section: ``offset`` and ``size`` in bytes, ``link`` the number of the section it refers to."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True, slots=True)
class Elf:
    """A file whose sections all lie within it."""

    data: bytes
    kind: int
    machine: int
    width: int
    order: str
    sections: tuple[Section, ...]

    def content(self, section: Section) -> bytes:
        """Return the bytes of a section, none for one that takes no room in the file."""
        return b"" if section.kind == _NO_BITS else self.data[section.offset : section.offset + section.size]

    def notes(self, section: Section) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield owner, type and descriptor of each note in a section."""
        content, at = self.content(section), 0
        while at + 12 <= len(content):
            owner, described, kind = struct.unpack_from(self.order + "III", content, at)
            begin = at + 12 + -(-owner // 4) * 4
            if begin + described > len(content):
                return
            yield content[at + 12 : at + 12 + owner].rstrip(b"\0"), kind, content[begin : begin + described]
            at = begin + -(-described // 4) * 4

    def symbols(self) -> Iterator[str]:
        """Yield the names of all symbols, those of the dynamic linker included."""
        entry = struct.Struct(self.order + _SYMBOL_ENTRIES[self.width])
        for section in self.sections:
            if section.kind not in _SYMBOLS or section.link >= len(self.sections):
                continue
            table, names = self.content(section), self.content(self.sections[section.link])
            for at in range(0, len(table) - entry.size + 1, entry.size):
                yield _string(names, entry.unpack_from(table, at)[0])


def read_elf(data: bytes) -> Elf | None:
    """Read the sections of an ELF file; ``None`` where it is none, or something of it lies outside of it."""
    width, order = data[4:5], data[5:6]
    if not data.startswith(ELF_MAGIC) or width not in (b"\1", b"\2") or order not in (b"\1", b"\2"):
        return None
    return _read(data, width[0], _ORDERS[order[0]])


def _read(data: bytes, width: int, order: str) -> Elf | None:
    header, entry = struct.Struct(order + _HEADERS[width]), struct.Struct(order + _SECTIONS[width])
    if len(data) < 16 + header.size:
        return None
    kind, machine, _, _, _, offset, _, _, _, _, each, count, names_at = header.unpack_from(data, 16)
    if count and (each < entry.size or offset + each * count > len(data)):
        return None
    raw = [entry.unpack_from(data, offset + each * number) for number in range(count)]
    if any(one[1] not in (0, _NO_BITS) and one[4] + one[5] > len(data) for one in raw):
        return None
    names = data[raw[names_at][4] : raw[names_at][4] + raw[names_at][5]] if names_at < count else b""
    sections = tuple(Section(_string(names, one[0]), one[1], one[4], one[5], one[6]) for one in raw)
    return Elf(data, kind, machine, width, order, sections)


def _string(table: bytes, at: int) -> str:
    end = table.find(b"\0", at, at + _LONGEST)
    return table[at:end].decode(errors="replace") if at <= end else ""
