"""Listings of folders that seldom change, such as linker folders and installed packages, which are kept."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import Final

#: Within one tick of the file system's clock, a folder may change again without a new time.
_SETTLED_NANOSECONDS: Final = 2_000_000_000


def names_in(folder: str, *beginnings: str) -> tuple[str, ...]:
    """Return the names in a folder with one of these prefixes, sorted; none if it cannot be listed."""
    try:
        changed = os.stat(folder or ".").st_mtime_ns
        settled = time.time_ns() - changed >= _SETTLED_NANOSECONDS
        listing = _listing if settled else _listing.__wrapped__
        # Not normalised: after a link, ".." is not the folder above its name.
        whole = folder if os.path.isabs(folder) else os.path.join(os.getcwd(), folder)
        return listing(whole, beginnings, changed)
    except OSError:
        return ()


@lru_cache(maxsize=512)
def _listing(folder: str, beginnings: tuple[str, ...], changed: int) -> tuple[str, ...]:
    del changed
    return tuple(sorted(name for name in os.listdir(folder) if name.startswith(beginnings or "")))
