"""The versions of an installed PoCL and of its LLVM, as ``clGetPlatformInfo`` returns them.

They are read from the bytes of the library, which is not loaded. Source: ``lib/CL/clGetPlatformInfo.c``.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

from cachectl.layers.base.environment import Environment, answered_once
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk import plain
from cachectl.layers.host import drivers, record

PRODUCT = "PoCL"
_BEFORE = b" PoCL "
_TEXT = regex(rb"OpenCL [\d.]+ PoCL (\S+)[^\0]*? LLVM (\d+\.\d+\.\d+)")
#: How many bytes before and after the name are searched for the text.
_NEAR, _LONGEST = 20, 300


def read_release(library: str) -> str | None:
    """Return the release of a library, such as "3.1 with LLVM 15.0.6"; ``None`` if its bytes do not state it."""
    with suppress(OSError, ValueError), open(plain.open_plain(library, follow=True), "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = content.find(_BEFORE)
        while at >= 0:
            match = _TEXT.search(content[max(0, at - _NEAR) : at + _LONGEST])
            if match is not None:
                return f"{match[1].decode()} with LLVM {match[2].decode()}"
            at = content.find(_BEFORE, at + 1)
    return None


def note_here(environment: Environment) -> record.Record:
    """Note the PoCLs that programs of this environment find, and return the record; a library is read once."""
    sightings = record.record_of(environment)
    for library in drivers.driver_libraries(environment, PRODUCT) if environment.searches_pythons else ():
        _note(sightings, library)
    sightings.save()
    return sightings


@answered_once
def note_all(environment: Environment) -> bool:
    """Note also the PoCLs that other known Pythons find; return whether these can be all that exist here."""
    from cachectl.layers.host import pythons

    sightings, known = record.record_of(environment), pythons.pythons_of(environment)
    wider = environment._replace(python_paths=tuple(python.path for python in known))
    # Other programs may find what a variable hides here.
    everywhere = wider, wider.with_variables({}, unset=drivers.VARIABLES)
    listed = {driver[:2] for view in everywhere for driver in drivers.find_drivers(view)}
    unread = [library for maker, library in listed if maker == PRODUCT and not _note(sightings, library)]
    sightings.save()
    # There may be another one on a file system that is not mounted.
    away = any(python.present is None for python in known) or any(map(drivers.names_missing, everywhere))
    return not unread and not away


def _note(sightings: record.Record, library: str) -> bool:
    """Note the release of a library if it is new; return whether its bytes state it."""
    if (release := sightings.version_at(PRODUCT, library)) is None:
        release = read_release(library) or record.UNREADABLE
        sightings.note(PRODUCT, library, release)
    return release != record.UNREADABLE
