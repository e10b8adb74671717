"""Which PoCL is installed: the version of a library and of its LLVM, as ``clGetPlatformInfo`` says them.

PoCL is not started for that. The text stands in the bytes of the library. Source: ``lib/CL/clGetPlatformInfo.c``.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import NamedTuple

from cachectl.layers import core
from cachectl.layers.disk import plain
from cachectl.layers.host import drivers

_BEFORE = b" PoCL "
_TEXT = core.regex(rb"OpenCL [\d.]+ PoCL (\S+)[^\0]*? LLVM (\d+\.\d+\.\d+)")
#: Bytes around the name in which the text is looked for.
_NEAR, _LONGEST = 20, 300


class Release(NamedTuple):
    """The version of a PoCL, and that of the LLVM in it."""

    version: str
    llvm: str

    def __str__(self) -> str:
        return f"PoCL {self.version} with LLVM {self.llvm}"


def read_release(library: str) -> Release | None:
    """Return the release of a library; ``None`` if its bytes do not say it, or it cannot be read."""
    with suppress(OSError, ValueError), open(plain.open_plain(library, follow=True), "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = content.find(_BEFORE)
        while at >= 0:
            found = _TEXT.search(content[max(0, at - _NEAR) : at + _LONGEST])
            if found is not None:
                return Release(found[1].decode(), found[2].decode())
            at = content.find(_BEFORE, at + 1)
    return None


def all_known(environment: core.Environment) -> tuple[Release, ...]:
    """Return the releases that this environment and other known Pythons find; none if one may be missing."""
    if "PoCL releases" not in environment.memo:
        from cachectl.layers.host import pythons

        known = pythons.pythons_of(environment)
        wider = environment._replace(python_paths=tuple(python.path for python in known))
        read = dict.fromkeys(map(read_release, drivers.driver_libraries(wider, "PoCL")))
        # A Python on a file system that is not mounted may have another.
        unknown = None in read or any(python.present is None for python in known)
        environment.memo["PoCL releases"] = () if unknown else tuple(read)
    releases: tuple[Release, ...] = environment.memo["PoCL releases"]
    return releases
