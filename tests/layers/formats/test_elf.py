"""The reader of ELF files, held against pyelftools: the same tables, and no file called whole that it cannot read."""

from __future__ import annotations

import io
import random
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from cachectl.layers.formats import elf, elf_checks

elffile = pytest.importorskip("elftools.elf.elffile")

#: Programs and libraries of this machine: linked by several compilers, stripped and not.
FILES = [
    path
    for folder in (sysconfig.get_config_var("DESTSHARED") or "", "/usr/bin", "/usr/lib/x86_64-linux-gnu")
    for path in sorted(Path(folder).glob("*"))[:400:25]
    if folder and path.is_file() and path.stat().st_size < 1 << 18 and path.read_bytes()[:4] == elf.MAGIC
]
_SYMBOLS = ("SHT_SYMTAB", "SHT_DYNSYM")
_RELOCATIONS = ("SHT_REL", "SHT_RELA")


def tables(data: bytes) -> dict[str, Any]:
    """Return what pyelftools reads of a file."""
    file = elffile.ELFFile(io.BytesIO(data))
    sections = list(file.iter_sections())
    names = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
    return {
        "kind": (file.header["e_machine"] == "EM_X86_64", file.elfclass // 32, file.little_endian),
        "sections": [
            (
                one.name,
                one["sh_offset"],
                one["sh_size"],
                one["sh_link"],
                one["sh_flags"],
                one["sh_addr"],
                one["sh_info"],
            )
            for one in sections
        ],
        "segments": [
            (one["p_offset"], one["p_vaddr"], one["p_filesz"], one["p_memsz"], one["p_align"])
            for one in file.iter_segments()
        ],
        "symbols": [
            (one.name, one["st_value"], one["st_size"])
            for table in sections
            if table["sh_type"] in _SYMBOLS
            for one in table.iter_symbols()
        ],
        "relocations": [
            (one["r_offset"], one["r_info_sym"], one["r_info_type"])
            for table in sections
            if table["sh_type"] in _RELOCATIONS
            for one in table.iter_relocations()
        ],
        "notes": [
            ((one["n_name"] or "").encode("latin-1"), one["n_descdata"])
            for table in sections
            if table["sh_type"] == "SHT_NOTE"
            for one in table.iter_notes()
        ],
        "dynamic": [
            getattr(tag, names[tag.entry.d_tag])
            for table in sections
            if table["sh_type"] == "SHT_DYNAMIC"
            for tag in table.iter_tags()
            if tag.entry.d_tag in names
        ],
    }


def our_tables(data: bytes) -> dict[str, Any]:
    """Return the same as this package reads it."""
    found = elf.read_elf(data)
    assert found is not None
    symbol_tables = [one for one in found.sections if one.kind in (2, 11)]
    return {
        "kind": (found.machine == 62, found.width, found.order == "<"),
        "sections": [
            (one.name, one.offset, one.size, one.link, one.flags, one.address, one.info) for one in found.sections
        ],
        "segments": [(one.offset, one.address, one.size, one.room, one.alignment) for one in found.segments],
        "symbols": [
            (name_in(found.content(found.sections[table.link]), name_at), value, size)
            for table in symbol_tables
            for name_at, _, _, value, size in found.symbol_fields(table)
        ],
        "relocations": [
            relocation for one in found.sections if one.kind in (4, 9) for relocation in found.relocations(one)
        ],
        "notes": [
            (owner, described) for one in found.sections if one.kind == 7 for owner, _, described in found.notes(one)
        ],
        "dynamic": [text for _, text in found.dynamic_strings()],
    }


def name_in(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_every_table_is_read_as_pyelftools_reads_it(path: Path) -> None:
    data = path.read_bytes()
    theirs, ours = tables(data), our_tables(data)
    for table, read in theirs.items():
        assert ours[table] == read, table
    assert elf_checks.complaint(data) is None


@pytest.mark.parametrize("path", FILES[:4], ids=[path.name for path in FILES[:4]])
def test_a_file_that_pyelftools_cannot_read_is_damaged(path: Path) -> None:
    whole = path.read_bytes()
    chance = random.Random(path.name)  # noqa: S311 - places to damage, no secret
    headers = (*range(16, 64), *range(len(whole) - 40 * 64, len(whole)))
    for _ in range(40):
        data = bytearray(whole)
        for at in chance.sample(headers, 3):
            data[at] ^= 1 << chance.randrange(8)
        wrong = elf_checks.complaint(bytes(data))
        try:
            tables(bytes(data))
        except Exception:  # noqa: BLE001 - pyelftools lets many kinds through
            assert wrong is not None
