"""ELF files: sections, notes and symbols. Nothing is executed. Source: the System V ABI, chapter 4 ("Object Files")."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from cachectl.layers.formats.details import Cut, fields, require

if TYPE_CHECKING:
    from mmap import mmap

MAGIC = b"\x7fELF"
#: From this number on, file types are specific to an operating system or a driver.
OWN_TYPES = 0xFE00
#: The longest name, in bytes.
_LONGEST = 4096
#: The offset after the number of the machine.
_MACHINE_END = 20
#: The smallest page of memory (bytes); past the end of a file, its last page is zeros.
_PAGE = 4096
_NO_BITS = 8
_STRINGS = 3
#: Symbol tables of the linker, and of the dynamic linker.
_SYMBOLS, _DYNAMIC_SYMBOLS = 2, 11
_DYNAMIC = 6
_NOTES = 7
#: Tags of dynamic entries: a needed library, and folders to search for libraries.
NEEDED = 1
RPATH = 15
RUN_PATH = 29
_TAGS = (NEEDED, RPATH, RUN_PATH)
_NOTE = "III"
#: The file types of an object file and of a library.
OBJECT, LIBRARY = 1, 3
#: The type of a segment that is mapped.
_LOADED = 1
# By class (32 or 64 bits): the header after the first 16 bytes, a section, a segment, a symbol, a dynamic entry.
_LAYOUTS = {
    1: ("HHIIIIIHHHHHH", "IIIIIIIIII", "IIIIIIII", "IIIBBH", "II"),
    2: ("HHIQQQIHHHHHH", "IIQQQQIIQQ", "IIQQQQQQ", "IBBHQQ", "QQ"),
}
#: The indexes of offset and size in a segment, by class.
_EXTENTS = {1: (1, 4), 2: (2, 5)}
#: The index of the section in a symbol, by class; it is 0 for undefined symbols.
_SECTION = {1: 5, 2: 3}
#: Class, byte order and machine, by the first part of LLVM's targets (``llvm/lib/TargetParser/Triple.cpp``).
_MACHINES = {
    "x86_64": b"\2\1\x3e\0",
    **dict.fromkeys(("i386", "i586", "i686"), b"\1\1\3\0"),
    "aarch64": b"\2\1\xb7\0",
    **dict.fromkeys(("arm", "armv7l", "armv7"), b"\1\1\x28\0"),
    "riscv64": b"\2\1\xf3\0",
    "powerpc64le": b"\2\1\x15\0",
}


class Section(NamedTuple):
    """A section: ``offset`` and ``size`` in bytes, ``link`` is the number of a section that it refers to."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


class Elf(NamedTuple):
    """A file whose sections are all within it."""

    data: bytes | mmap
    kind: int
    machine: int
    width: int
    order: str
    sections: tuple[Section, ...]
    #: The number of segments.
    segments: int
    #: The number of the section that holds the names of sections.
    names: int

    def content(self, section: Section) -> bytes:
        """Return the bytes of a section, empty if it has none in the file."""
        return b"" if section.kind == _NO_BITS else self.data[section.offset : section.offset + section.size]

    def notes(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield owner, type and descriptor of each note."""
        head = struct.Struct(self.order + _NOTE)
        for content in (self.content(section) for section in self.sections if section.kind == _NOTES):
            at = 0
            while at + head.size <= len(content):
                owner, described, kind = head.unpack_from(content, at)
                name = at + head.size
                begin = name + -(-owner // 4) * 4
                at = begin + -(-described // 4) * 4
                if begin + described <= len(content):
                    yield content[name : name + owner].rstrip(b"\0"), kind, content[begin : begin + described]

    def symbols(self, *kinds: int) -> Iterator[tuple[str, bool]]:
        """Yield the symbols in tables of these kinds, by default all, and whether the file defines each."""
        rows = self._tables(kinds or (_SYMBOLS, _DYNAMIC_SYMBOLS), _LAYOUTS[self.width][3])
        return ((_string(names, row[0]), row[_SECTION[self.width]] != 0) for names, row in rows)

    def defined(self) -> bytes:
        """Return the names that a library exports, or another file defines, as a string table."""
        symbols = self.symbols(_DYNAMIC_SYMBOLS if self.kind == LIBRARY else _SYMBOLS)
        return "".join(f"{name}\0" for name, is_defined in symbols if is_defined).encode()

    def dynamic_strings(self) -> Iterator[tuple[int, str]]:
        """Yield the tags and texts of the dynamic entries that name libraries and folders."""
        rows = self._tables((_DYNAMIC,), _LAYOUTS[self.width][4])
        return ((tag, _string(names, value)) for names, (tag, value) in rows if tag in _TAGS)

    def needed(self) -> list[str]:
        """Return the libraries that a library needs."""
        return [text for tag, text in self.dynamic_strings() if tag == NEEDED]

    def _tables(self, kinds: tuple[int, ...], layout: str) -> Iterator[tuple[bytes, tuple[Any, ...]]]:
        """Yield each row of the sections of these kinds, with the strings that the section links to."""
        entry = struct.Struct(self.order + layout)
        for section in self.sections:
            if section.kind in kinds and section.link < len(self.sections):
                table, names = self.content(section), self.content(self.sections[section.link])
                for row in entry.iter_unpack(table[: len(table) // entry.size * entry.size]):
                    yield names, row


def machine_of(head: bytes) -> bytes | None:
    """Return class, byte order and machine of an ELF file from its first 20 bytes; ``None`` for other files."""
    return head[4:6] + head[18:20] if head.startswith(MAGIC) and len(head) >= _MACHINE_END else None


def machine_named(target: str) -> bytes | None:
    """Return what :func:`machine_of` returns for code of an LLVM target; ``None`` if that is no known CPU with ELF."""
    first, _, system = target.partition("-")
    return _MACHINES.get(first) if "linux" in system and not system.endswith("x32") else None


def linking_complaint(data: bytes, file: Elf | None) -> str | None:
    """Return the :func:`complaint` about a file for the linker or dynamic linker.

    The dynamic linker maps the segments of a library, and reads no sections (``elf/dl-load.c`` of glibc), so damage
    after the segments does not matter. They may end in zeros: zeros count as damage only if they fill a page.
    """
    wrong = complaint(data, file)
    try:
        end = _mapped_end(data) if wrong is not None else 0
    except Cut:
        return wrong
    is_whole = len(data) >= end and len(data.rstrip(b"\0")) > (end - 1) // _PAGE * _PAGE
    return None if end and is_whole else wrong


def _mapped_end(data: bytes) -> int:
    """Return the end of the mapped part of a library; 0 for other files. Raises :class:`Cut`."""
    if (form := _form(data)) is None:
        return 0
    width, order = form
    head, _, segment, *_ = (struct.Struct(order + layout) for layout in _LAYOUTS[width])
    kind, _, _, _, at, _, _, _, each, count, *_ = fields(head, data, 16)
    place, length = _EXTENTS[width]
    rows = _headers(data, segment, at, each, count) if kind == LIBRARY else []
    return max((row[place] + row[length] for row in rows if row[0] == _LOADED), default=0)


def complaint(data: bytes, file: Elf | None = None) -> str | None:
    """Return how an ELF file is damaged; ``None`` if its headers, bounds and strings are complete.

    Machine code, relocations and symbols are not checked. ``file`` is the file if it was read before.
    """
    if not data.startswith(MAGIC):
        return "is not an ELF file" if data else "is empty"
    elf = file or read_elf(data)
    if elf is None:
        return str(Cut(data))
    if not elf.kind or not (elf.sections or elf.segments):
        return "is damaged: its header lists no contents"
    tables = [section for section in elf.sections if section.kind == _STRINGS]
    is_named = elf.names < len(elf.sections) and elf.sections[elf.names] in tables
    if elf.sections and not (is_named and any(section.name for section in elf.sections)):
        return "is damaged: its sections have no names"
    # In files of their own types, drivers write tables of their own.
    contents = [elf.content(section) for section in tables if section.size] if elf.kind < OWN_TYPES else []
    if not all(content[0] == content[-1] == 0 for content in contents):
        return "is damaged: a section is not a string table"
    return None


def read_elf(data: bytes | mmap) -> Elf | None:
    """Read the sections of an ELF file, which may be mapped; ``None`` for others, and if a part is outside the file."""
    form = _form(data)
    with suppress(Cut):
        return None if form is None else _read(data, *form)
    return None


def _form(data: bytes | mmap) -> tuple[int, str] | None:
    width, order = data[4:5], {b"\1": "<", b"\2": ">"}.get(data[5:6])
    return (width[0], order) if data[:4] == MAGIC and width in (b"\1", b"\2") and order else None


def _read(data: bytes | mmap, width: int, order: str) -> Elf:
    head, section, segment, *_ = (struct.Struct(order + layout) for layout in _LAYOUTS[width])
    kind, machine, _, _, load_at, offset, _, _, each_load, loads, each, count, names_at = fields(head, data, 16)
    headers = _headers(data, section, offset, each, count)
    # Intel's CPU driver keeps programs in sections without a type.
    without_bytes = (_NO_BITS,) if kind >= OWN_TYPES else (0, _NO_BITS)
    for row in headers:
        if row[1] not in without_bytes:
            require(data, row[4], row[5])
    names = b""
    if names_at < count:
        at, size = headers[names_at][4:6]
        names = data[at : at + size]
    sections = tuple(Section(_string(names, row[0]), row[1], *row[4:7]) for row in headers)
    place, length = _EXTENTS[width]
    for row in _headers(data, segment, load_at, each_load, loads):
        require(data, row[place], row[length])
    return Elf(data, kind, machine, width, order, sections, loads, names_at)


def _headers(data: bytes | mmap, layout: struct.Struct, begin: int, each: int, count: int) -> list[tuple[Any, ...]]:
    if count and each < layout.size:
        raise Cut(data)
    return [fields(layout, data, begin + each * number) for number in range(count)]


def _string(table: bytes, at: int) -> str:
    end = table.find(b"\0", at, at + _LONGEST)
    return table[at:end].decode(errors="replace") if at <= end else ""
