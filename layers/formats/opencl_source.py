"""What PyOpenCL stores next to a binary: its OpenCL C source, and a pickled ``_SourceInfo`` (``pyopencl/cache.py``)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cachectl.layers.base.lazy import regex
from cachectl.layers.formats import details, pickles

# Each part can match in only one way, a bounded number of times, so no source causes much backtracking. PyOpenCL's own
# scans write KERNEL REQD_WG_SIZE(128, 1, 1) void (pyopencl/scan.py).
_ATTRIBUTE = rb"(?:__attribute__\s{0,9}\(\((?:(?!\)\)).){0,200}\){2,9}\s{0,99}){0,9}"
_KERNEL = regex(
    rb"\b(?:(?:__)?kernel|KERNEL)\s{1,99}(?:REQD_WG_SIZE\([^()]{0,99}\)\s{0,99})?"
    + _ATTRIBUTE
    + rb"void\s{1,99}"
    + _ATTRIBUTE
    + rb"(\w{1,999})\s{0,99}\(",
    re.DOTALL,
)


def kernel_names(source: bytes) -> tuple[str, ...] | None:
    """Return the kernels that a source defines or declares; ``None`` if it has none."""
    return details.names_or_none(match[1].decode() for match in _KERNEL.finditer(source))


def source_info(info: bytes) -> dict[str, object] | None:
    """Return the attributes of a ``_SourceInfo`` without unpickling it; ``None`` if it is none."""
    try:
        top, _ = pickles.walk(info)
    except ValueError:
        return None
    match top:
        case pickles.Thing("object", [pickles.Thing("global", [*_, str(name)]), *_]) if name.endswith("_SourceInfo"):
            return pickles.attributes(top)
    return None


def dependencies(info: bytes) -> Iterator[tuple[str, float, str]]:
    """Yield path, modification time (epoch seconds) and MD5 of each header that a program includes."""
    dependencies = (source_info(info) or {}).get("dependencies")
    for item in dependencies.items if isinstance(dependencies, pickles.Thing) else ():
        match item.items if isinstance(item, pickles.Thing) else ():
            case [str(path), float(changed), str(digest)]:
                yield path, changed, digest
