"""The file ``info`` beside PyOpenCL's binaries: a pickled ``_SourceInfo``, read without unpickling.

Source: ``pyopencl/cache.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from cachectl.layers.formats.pickles import Thing, attributes, things, walk

#: The longest file whose check is remembered, in bytes.
_SHORT: Final = 4096


def source_info(info: bytes) -> dict[str, object] | None:
    """Return the attributes of the ``_SourceInfo``; ``None`` where the bytes are none."""
    try:
        top, length = walk(info)
    except ValueError:
        return None
    if not isinstance(top, Thing) or length != len(info):
        return None
    named = (str(thing.items[-1]) for thing in things(top) if thing.kind == "global" and thing.items)
    return attributes(top) if any(name.endswith("_SourceInfo") for name in named) else None


# Programs that include no header, and whose compiler says nothing, all have the same.
_remembered = lru_cache(maxsize=64)(source_info)


def complaint(info: bytes) -> str | None:
    """Return what is wrong with the file, ``None`` where nothing is."""
    found = _remembered(info) if len(info) <= _SHORT else source_info(info)
    return "info is not the pickle that PyOpenCL stores" if found is None else None


def dependencies(info: bytes) -> Iterator[tuple[str, float, str]]:
    """Yield path, modification time (epoch seconds) and md5 of each header that a program included."""
    found = (source_info(info) or {}).get("dependencies")
    for item in found.items if isinstance(found, Thing) else ():
        match item.items if isinstance(item, Thing) else ():
            case [str(path), float(changed), str(digest)]:
                yield path, changed, digest
