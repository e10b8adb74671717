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
    named = [part for thing in things(top) if thing.kind == "global" for part in thing.items[-1:]]
    return attributes(top) if any(isinstance(part, str) and part.endswith("_SourceInfo") for part in named) else None


def complaint(info: bytes) -> str | None:
    """Return what is wrong with the file, ``None`` where nothing is."""
    is_whole = _is_known(info) if len(info) <= _SHORT else source_info(info) is not None
    return None if is_whole else "info is not the pickle that PyOpenCL stores"


# Programs that include no header, and whose compiler says nothing, all have the same.
@lru_cache(maxsize=64)
def _is_known(info: bytes) -> bool:
    return source_info(info) is not None


def dependencies(info: bytes) -> Iterator[tuple[str, float, str]]:
    """Yield path, modification time (epoch seconds) and md5 of each header that a program included."""
    found = (source_info(info) or {}).get("dependencies")
    for item in found.items if isinstance(found, Thing) else ():
        if isinstance(item, Thing) and len(item.items) == 3:  # noqa: PLR2004 - path, time, md5
            path, changed, digest = item.items
            if isinstance(path, str) and isinstance(changed, float) and isinstance(digest, str):
                yield path, changed, digest
