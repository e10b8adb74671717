"""ELF files: sections, notes and symbol names, read only within the file.

Source: the System V ABI, chapter 4 ("Object Files"). Nothing here is executed or mapped. A file with an offset outside
itself counts as incomplete.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"\x7fELF"
#: From this number on, types of files belong to an operating system or a driver.
OWN_TYPES: Final = 0xFE00
#: The longest name, in bytes.
_LONGEST: Final = 4096
_NO_BITS: Final = 8
_STRINGS: Final = 3
_SYMBOLS: Final = frozenset({2, 11})
_DYNAMIC: Final = 6
_INTERPRETER: Final = 3
#: Tags of dynamic entries: a library that is needed, and folders to look for libraries in.
NEEDED: Final = 1
RPATH: Final = 15
RUN_PATH: Final = 29
_ORDERS: Final = {1: "<", 2: ">"}
# By class: the header behind the first 16 bytes; one section header; one symbol.
_HEADERS: Final = {1: "HHIIIIIHHHHHH", 2: "HHIQQQIHHHHHH"}
_SECTIONS: Final = {1: "IIIIIIIIII", 2: "IIQQQQIIQQ"}
_SEGMENTS: Final = {1: "IIIIIIII", 2: "IIQQQQQQ"}
_SYMBOL_ENTRIES: Final = {1: "IIIBBH", 2: "IBBHQQ"}
_DYNAMIC_ENTRIES: Final = {1: "II", 2: "QQ"}


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
    #: Type and offset of each segment.
    segments: tuple[tuple[int, int], ...]
    #: The number of the section that holds the names of sections.
    names: int

    @property
    def interpreter(self) -> str | None:
        """The path of the dynamic linker that a program names; ``None`` for a library."""
        offset = next((offset for kind, offset in self.segments if kind == _INTERPRETER), None)
        return None if offset is None else _string(self.data, offset)

    def content(self, section: Section) -> bytes:
        """Return the bytes of a section, none for one without bytes in the file."""
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
        """Yield the names of all symbols, including those of the dynamic linker."""
        entry = struct.Struct(self.order + _SYMBOL_ENTRIES[self.width])
        for section in self.sections:
            if section.kind not in _SYMBOLS or section.link >= len(self.sections):
                continue
            table, names = self.content(section), self.content(self.sections[section.link])
            for at in range(0, len(table) - entry.size + 1, entry.size):
                yield _string(names, entry.unpack_from(table, at)[0])

    def dynamic_strings(self) -> Iterator[tuple[int, str]]:
        """Yield tag and text of the dynamic entries that name libraries and folders."""
        entry = struct.Struct(self.order + _DYNAMIC_ENTRIES[self.width])
        for section in self.sections:
            if section.kind != _DYNAMIC or section.link >= len(self.sections):
                continue
            content, names = self.content(section), self.content(self.sections[section.link])
            for tag, value in entry.iter_unpack(content[: len(content) // entry.size * entry.size]):
                if tag in (NEEDED, RPATH, RUN_PATH):
                    yield tag, _string(names, value)


def complaint(data: bytes) -> str | None:
    """Return how an ELF file was cut or emptied; ``None`` if headers, bounds and tables of strings are whole.

    Machine code, relocations and symbols are not checked.
    """
    if not data.startswith(MAGIC):
        return "is not an ELF file" if data else "is empty"
    elf = read_elf(data)
    if elf is None:
        return f"is cut short at {len(data)} bytes"
    if not elf.kind or not (elf.sections or elf.segments):
        return "is damaged: its header names no contents"
    tables = [section for section in elf.sections if section.kind == _STRINGS]
    if elf.sections and not (elf.names < len(elf.sections) and elf.sections[elf.names] in tables):
        return "is damaged: its sections have no names"
    # Drivers write tables of their own into files of their own types.
    contents = [elf.content(section) for section in tables if section.size] if elf.kind < OWN_TYPES else []
    if not all(content[0] == content[-1] == 0 for content in contents):
        return "is damaged: a section is no table of strings"
    return None


def read_elf(data: bytes) -> Elf | None:
    """Read the sections of an ELF file; ``None`` for other bytes, and where a part lies outside the file."""
    width, order = data[4:5], data[5:6]
    if not data.startswith(MAGIC) or width not in (b"\1", b"\2") or order not in (b"\1", b"\2"):
        return None
    return _read(data, width[0], _ORDERS[order[0]])


def _read(data: bytes, width: int, order: str) -> Elf | None:
    header, entry = struct.Struct(order + _HEADERS[width]), struct.Struct(order + _SECTIONS[width])
    if len(data) < 16 + header.size:
        return None
    kind, machine, _, _, load_at, offset, _, _, each_load, loads, each, count, names_at = header.unpack_from(data, 16)
    if count and (each < entry.size or offset + each * count > len(data)):
        return None
    load = struct.Struct(order + _SEGMENTS[width])
    if loads and (each_load < load.size or load_at + each_load * loads > len(data)):
        return None
    raw = [entry.unpack_from(data, offset + each * number) for number in range(count)]
    # Intel's CPU driver keeps programs in sections without a type.
    without_bytes = (_NO_BITS,) if kind >= OWN_TYPES else (0, _NO_BITS)
    if any(one[1] not in without_bytes and one[4] + one[5] > len(data) for one in raw):
        return None
    names = data[raw[names_at][4] : raw[names_at][4] + raw[names_at][5]] if names_at < count else b""
    sections = tuple(
        Section(_string(names, name), kind, at, size, link) for name, kind, _, _, at, size, link, _, _, _ in raw
    )
    segments = []
    for number in range(loads):
        fields = load.unpack_from(data, load_at + each_load * number)
        begin, size = (fields[1], fields[4]) if width == 1 else (fields[2], fields[5])
        if size and begin + size > len(data):
            return None
        segments.append((fields[0], begin))
    return Elf(data, kind, machine, width, order, sections, tuple(segments), names_at)


def _string(table: bytes, at: int) -> str:
    end = table.find(b"\0", at, at + _LONGEST)
    return table[at:end].decode(errors="replace") if at <= end else ""
