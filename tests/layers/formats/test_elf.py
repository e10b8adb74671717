"""The reader of ELF files gives the same tables as pyelftools, and finds truncated files damaged."""

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


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_every_table_is_read_as_pyelftools_reads_it(path: Path) -> None:
    data = path.read_bytes()
    ours, theirs = elf.read_elf(data), list(elffile.ELFFile(io.BytesIO(data)).iter_sections())
    assert ours is not None

    def of(*kinds: str) -> list[Any]:
        return [section for section in theirs if section["sh_type"] in kinds]

    assert [(one.name, one.offset, one.size, one.link) for one in ours.sections] == [
        (one.name, one["sh_offset"], one["sh_size"], one["sh_link"]) for one in theirs
    ]
    symbols = [one for part in of("SHT_SYMTAB", "SHT_DYNSYM") for one in part.iter_symbols()]
    assert list(ours.symbols()) == [(one.name, one["st_shndx"] != "SHN_UNDEF") for one in symbols]
    assert elf.machine_of(data) == data[4:6] + data[18:20] == elf.machine_named("x86_64-pc-linux-gnu")
    notes = [note for part in of("SHT_NOTE") for note in part.iter_notes()]
    read = [((note["n_name"] or "").encode("latin-1"), note["n_descdata"]) for note in notes]
    assert [note[::2] for note in ours.notes()] == read
    tags = [tag for part in of("SHT_DYNAMIC") for tag in part.iter_tags() if tag.entry.d_tag in DYNAMIC]
    assert [text for _, text in ours.dynamic_strings()] == [getattr(tag, DYNAMIC[tag.entry.d_tag]) for tag in tags]
    assert elf.complaint(data) is None
    assert all(elf.complaint(data[:length]) for length in range(0, len(data), 997))
    # Linkers put the section table at the end.
    assert elf.complaint(data[:-4096] + bytes(4096)) is not None
