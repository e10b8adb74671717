"""Program binaries as OpenCL drivers return them: recognised by their first bytes, and checked where known."""

from __future__ import annotations

from typing import Final

from cachectl.layers.formats import bitcode, elf, spirv

#: Drivers that return only known kinds, as :mod:`cachectl.layers.host.drivers` names them.
KNOWN_DRIVERS: Final = frozenset({"Intel CPU"})
#: The checks of known kinds of files, by their first bytes.
_CHECKS: Final = {elf.MAGIC: elf.complaint, bitcode.MAGIC: bitcode.complaint, spirv.MAGIC: spirv.complaint}


def is_known(data: bytes) -> bool:
    """Return whether a binary is of a kind that :func:`complaint` checks."""
    return data[:4] in _CHECKS


def complaint(data: bytes) -> str | None:
    """Return how a file of a known kind was cut or emptied; ``None`` where it was not, and for unknown kinds."""
    check = _CHECKS.get(data[:4])
    return None if check is None else check(data)
