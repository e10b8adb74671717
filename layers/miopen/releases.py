"""The version of an installed MIOpen, in the form that the names of its files have.

It is read from the constants of the library, which is not loaded. Source: ``src/db_path.cpp.in`` (``GetUserDbSuffix``).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

from cachectl.layers import miopen
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk import plain
from cachectl.layers.formats import elf
from cachectl.layers.host import record

PRODUCT = "MIOpen"
_CONSTANTS = ".rodata"
#: Backend, version, and the id of the build, which is empty if it was built without git.
_TEXT = regex(rb"(?<=\0)(?:HIPNOGPU|HIP|OpenCL)\.(\d{1,3})_(\d{1,3})_(\d{1,3})_([0-9A-Za-z-]{0,64})(?=\0)")


def read_version(library: str) -> str | None:
    """Return the version of a library, such as ``3.3.0.a85ca8a54``; ``None`` if its constants do not state one."""
    with suppress(OSError, ValueError), open(plain.open_plain(library, follow=True), "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        read = elf.read_elf(content)
        versions = set[str]()
        for section in read.sections if read is not None else ():
            if section.name == _CONSTANTS:
                matches = _TEXT.finditer(content, section.offset, section.offset + section.size)
                versions.update(b".".join(match.groups()).decode() for match in matches)
        if len(versions) == 1:
            return versions.pop()
    return None


def note_here(environment: Environment, *, reads: bool) -> record.Record:
    """Note the MIOpens found here, and return the record; ``reads`` allows reading new libraries of hundreds of MiB."""
    sightings = record.record_of(environment)
    for library in miopen.libraries(environment) if environment.searches_pythons and reads else ():
        if sightings.version_at(PRODUCT, library) is None:
            sightings.note(PRODUCT, library, read_version(str(library)) or record.UNREADABLE)
    sightings.save()
    return sightings


def all_are_known(environment: Environment, sightings: record.Record) -> bool:
    """Return whether the version of every MIOpen here is known."""
    versions = (sightings.version_at(PRODUCT, library) for library in miopen.libraries(environment))
    return all(version not in (None, record.UNREADABLE) for version in versions)
