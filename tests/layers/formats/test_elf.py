"""The reader of ELF files, held against pyelftools: the same tables; cut files are damaged."""

from __future__ import annotations

import io
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from cachectl.layers.formats import elf

elffile = pytest.importorskip("elftools.elf.elffile")

#: Programs and libraries of this machine: linked by several compilers, stripped and not.
FILES = [
    path
    for folder in (sysconfig.get_config_var("DESTSHARED") or "", "/usr/bin", "/usr/lib/x86_64-linux-gnu")
    for path in sorted(Path(folder).glob("*"))[:400:25]
    if folder and path.is_file() and path.stat().st_size < 1 << 18 and path.read_bytes()[:4] == elf.MAGIC
]
DYNAMIC = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}


def tables(data: bytes) -> dict[str, Any]:
    """Return what pyelftools reads of a file."""
    file = elffile.ELFFile(io.BytesIO(data))
    sections = list(file.iter_sections())

    def of(*kinds: str) -> list[Any]:
        return [section for section in sections if section["sh_type"] in kinds]

    return {
        "sections": [(one.name, one["sh_offset"], one["sh_size"], one["sh_link"]) for one in sections],
        "symbols": [symbol.name for table in of("SHT_SYMTAB", "SHT_DYNSYM") for symbol in table.iter_symbols()],
        "notes": [
            ((note["n_name"] or "").encode("latin-1"), note["n_descdata"])
            for table in of("SHT_NOTE")
            for note in table.iter_notes()
        ],
        "dynamic": [
            getattr(tag, DYNAMIC[tag.entry.d_tag])
            for table in of("SHT_DYNAMIC")
            for tag in table.iter_tags()
            if tag.entry.d_tag in DYNAMIC
        ],
    }


def our_tables(data: bytes) -> dict[str, Any]:
    """Return the same as this package reads it."""
    found = elf.read_elf(data)
    assert found is not None
    return {
        "sections": [(one.name, one.offset, one.size, one.link) for one in found.sections],
        "symbols": list(found.symbols()),
        "notes": [note[::2] for note in found.notes()],
        "dynamic": [text for _, text in found.dynamic_strings()],
    }


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_every_table_is_read_as_pyelftools_reads_it(path: Path) -> None:
    data = path.read_bytes()
    assert our_tables(data) == tables(data)
    assert elf.complaint(data) is None
    assert all(elf.complaint(data[:length]) for length in range(0, len(data), 997))
    # Linkers put the table of sections at the end.
    assert elf.complaint(data[:-4096] + bytes(4096)) is not None
