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
#: The first bytes of known kinds of binaries.
_KNOWN: Final = (elf.MAGIC, bitcode.MAGIC, spirv.MAGIC)


class BinaryDamage(NamedTuple):
    """What is wrong; ``runs`` where the damaged part is not needed to run the program."""

    message: str
    runs: bool = False


def is_known(data: bytes) -> bool:
    """Return whether a binary is of a kind that :func:`damage` checks."""
    return data.startswith(_KNOWN)


def damage(data: bytes) -> BinaryDamage | None:
    """Return what is wrong with a binary; ``None`` where nothing is, and for unknown kinds."""
    found = elf.read_elf(data)
    if found is not None:
        wrong = elf.complaint(data)
        return _damage_inside(found) if wrong is None else BinaryDamage(wrong)
    wrong = _complaint(data) if is_known(data) else None
    return None if wrong is None else BinaryDamage(wrong)


def _complaint(data: bytes) -> str | None:
    if data.startswith(elf.MAGIC):
        return elf.complaint(data)
    if data.startswith(bitcode.MAGIC):
        return bitcode.complaint(data)
    return spirv.complaint(data) if data.startswith(spirv.MAGIC) else None


def _damage_inside(found: Elf) -> BinaryDamage | None:
    """Check the files inside the sections of a driver's own type of file."""
    if found.kind < elf.OWN_TYPES:
        return None
    damages = [
        BinaryDamage(f"{section.name} {wrong}", runs=section.name == _INTERMEDIATE)
        for section in found.sections
        if section.name in _HELD and (wrong := _section_complaint(found, section)) is not None
    ]
    return min(damages, key=lambda one: one.runs, default=None)


def _section_complaint(found: Elf, section: Section) -> str | None:
    content = found.content(section)
    if not content.startswith(_HELD[section.name]):
        return "does not hold what Intel's driver keeps there"
    inner = elf.read_elf(content)
    if inner is not None and inner.machine != found.machine:
        return "is for another machine"
    return _complaint(content)
