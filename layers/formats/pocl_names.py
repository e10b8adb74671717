"""Kernel names in the folder names of PoCL's cache.

From version 4.0 on, PoCL shortens a long kernel name to a prefix, ``.`` (on Windows a blank) and the SHA-1 of the name
in 40 letters (``pocl_hash_clipped_name`` in ``lib/CL/pocl_cache.c``). The name cannot be computed from that, but a name
found elsewhere can be compared with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from cachectl.layers.base.lazy import regex

#: A folder name that may be shortened; no OpenCL C name holds a dot or a blank.
SHORTENED: Final = regex(r".+[. ][A-P]{40}", re.DOTALL)
#: The longest names that are kept whole, in bytes: by PoCL 7.0 and newer, by 6.0, and by 4.0 and 5.0.
_LIMITS: Final = (59, 64, 255)
_HASH_AND_DOT: Final = 41


def whole_name(folder: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that PoCL gives this folder name, shortened or not; ``None`` if no candidate fits."""
    wanted = os.fsencode(folder)
    return next((name for name in candidates if wanted in _folder_names(name.encode(errors="surrogateescape"))), None)


def kept_part(prefix: str) -> str:
    """Return what a shortened name begins with if the whole name begins with ``prefix``, whichever version made it."""
    # Names are cut at a byte, perhaps within a character.
    return prefix[: min(_LIMITS) - _HASH_AND_DOT] if prefix.isascii() else ""


# Kernels are few, and programs many.
@lru_cache(maxsize=1000)
def _folder_names(name: bytes) -> frozenset[bytes]:
    """Return the folder names that versions of PoCL give a kernel, on Windows and elsewhere."""
    limits = [limit for limit in _LIMITS if len(name) > limit]
    if not limits:
        return frozenset((name,))
    import hashlib

    digest = hashlib.sha1(name, usedforsecurity=False).digest()
    letters = bytes(ord("A") + nibble for byte in digest for nibble in (byte & 15, byte >> 4))
    prefixes = (name[: limit - _HASH_AND_DOT] for limit in limits)
    return frozenset((name, *(prefix + dot + letters for prefix in prefixes for dot in (b".", b" "))))
