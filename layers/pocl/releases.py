"""Which PoCL is installed: the version of a library and of its LLVM, as ``clGetPlatformInfo`` says them.

PoCL is not started for that. The text stands in the bytes of the library. Source: ``lib/CL/clGetPlatformInfo.c``.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

from cachectl.layers import core
from cachectl.layers.disk import plain
from cachectl.layers.host import drivers

_BEFORE = b" PoCL "
_TEXT = core.regex(rb"OpenCL [\d.]+ PoCL (\S+)[^\0]*? LLVM (\d+\.\d+\.\d+)")
#: Bytes around the name in which the text is looked for.
_NEAR, _LONGEST = 20, 300


def read_release(library: str) -> str | None:
    """Return the release of a library, as "3.1 with LLVM 15.0.6"; ``None`` if its bytes do not say it."""
    with suppress(OSError, ValueError), open(plain.open_plain(library, follow=True), "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = content.find(_BEFORE)
        while at >= 0:
            found = _TEXT.search(content[max(0, at - _NEAR) : at + _LONGEST])
            if found is not None:
                return f"{found[1].decode()} with LLVM {found[2].decode()}"
            at = content.find(_BEFORE, at + 1)
    return None


def all_known(environment: core.Environment) -> tuple[str, ...]:
    """Return the releases that this environment and other known Pythons find; none if one may be missing."""
    if "PoCL releases" not in environment.memo:
        from cachectl.layers.host import pythons

        known = pythons.pythons_of(environment)
        wider = environment._replace(python_paths=tuple(python.path for python in known))
        # Other programs find what a variable hides here.
        everywhere = wider, wider.with_variables({}, unset=drivers.VARIABLES)
        found = [driver for one in everywhere for driver in drivers.find_drivers(one)]
        read = dict.fromkeys(read_release(library) for maker, library, _ in found if maker == "PoCL")
        # What is on a file system that is not mounted may be another.
        away = any(python.present is None for python in known) or any(map(drivers.names_missing, everywhere))
        unknown = None in read or away
        environment.memo["PoCL releases"] = () if unknown else tuple(read)
    releases: tuple[str, ...] = environment.memo["PoCL releases"]
    return releases
