"""Program binaries as OpenCL drivers return them: recognised by their first bytes, and checked where known.

Intel's CPU driver returns an ELF file whose sections hold other files: ``.ocl.ir`` LLVM bitcode, ``.ocl.obj`` an ELF
file of machine code, ``.ocl.meta`` a description of the kernels in a format that Intel does not document. A program
runs with a damaged ``.ocl.ir`` (seen with release 2026.22).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from cachectl.layers.formats import bitcode, elf, spirv
from cachectl.layers.formats.elf import Elf, Section

#: The checked sections of Intel's CPU driver, and the kinds of file that each may contain.
_HELD: Final = {".ocl.ir": (bitcode.MAGIC, spirv.MAGIC), ".ocl.obj": (elf.MAGIC,)}
_INTERMEDIATE: Final = ".ocl.ir"
#: Drivers that return only known kinds, as :mod:`cachectl.layers.host.drivers` names them.
KNOWN_DRIVERS: Final = frozenset({"Intel CPU"})
#: The checks of known kinds of files, by their first bytes.
_CHECKS: Final = {elf.MAGIC: elf.complaint, bitcode.MAGIC: bitcode.complaint, spirv.MAGIC: spirv.complaint}


class BinaryDamage(NamedTuple):
    """What is wrong; ``runs`` where the damaged part is not needed to run the program."""

    message: str
    runs: bool = False


def is_known(data: bytes) -> bool:
    """Return whether a binary is of a kind that :func:`damage` checks."""
    return data[:4] in _CHECKS


def damage(data: bytes) -> BinaryDamage | None:
    """Return what is wrong with a binary; ``None`` where nothing is, and for unknown kinds."""
    if (wrong := complaint(data)) is not None:
        return BinaryDamage(wrong)
    found = elf.read_elf(data)
    return None if found is None else _damage_inside(found)


def complaint(data: bytes) -> str | None:
    """Return what is wrong with a file of a known kind; ``None`` where nothing is, and for unknown kinds."""
    check = _CHECKS.get(data[:4])
    return None if check is None else check(data)


def _damage_inside(found: Elf) -> BinaryDamage | None:
    """Check the files inside the sections of a driver's own type of file."""
    if found.kind < elf.OWN_TYPES:
        return None
    damages = [
        BinaryDamage(f"{section.name} {wrong}", runs=section.name == _INTERMEDIATE)
        for section in found.sections
        if section.name in _HELD and (wrong := _section_complaint(found, section)) is not None
    ]
    return min(damages, key=lambda damage: damage.runs, default=None)


def _section_complaint(found: Elf, section: Section) -> str | None:
    content = found.content(section)
    if not content.startswith(_HELD[section.name]):
        return "does not hold what Intel's driver keeps there"
    inner = elf.read_elf(content)
    if inner is not None and inner.machine != found.machine:
        return "is for another machine"
    return complaint(content)
