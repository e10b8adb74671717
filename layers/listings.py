"""Names in folders that seldom change, listed again only when they have: linkers' folders, installed packages."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import Final

#: A folder that has changed since may change again without its time moving on: clocks of file systems tick.
_SETTLED_NANOSECONDS: Final = 2_000_000_000


def names_in(folder: str, *beginnings: str) -> tuple[str, ...]:
    """Return the names in a folder that begin so, in order; none where it cannot be listed."""
    try:
        changed = os.stat(folder or ".").st_mtime_ns
    except OSError:
        return ()
    if time.time_ns() - changed < _SETTLED_NANOSECONDS:
        return _list(folder, beginnings)
    return _listed(os.path.abspath(folder), changed, beginnings)


@lru_cache(maxsize=256)
def _listed(folder: str, changed: int, beginnings: tuple[str, ...]) -> tuple[str, ...]:
    del changed
    return _list(folder, beginnings)


def _list(folder: str, beginnings: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(sorted(name for name in os.listdir(folder or ".") if name.startswith(beginnings or "")))
    except OSError:
        return ()
