"""Cached listings of folders and files that seldom change, such as linker folders and installed packages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from cachectl.layers.disk.plain import read_installed

#: Within one tick of the file system's clock, a folder may change again without a new time.
_SETTLED_NANOSECONDS: Final = 2_000_000_000
_Look = Callable[[str, tuple[str, ...]], tuple[str, ...]]


def names_in(folder: str, *beginnings: str) -> tuple[str, ...]:
    """Return the names in a folder with one of these prefixes, sorted; none if it cannot be listed."""
    return _remembered(_list, folder or ".", beginnings)


def lines_of(file: str) -> tuple[str, ...]:
    """Return the lines of a small text file; none if it cannot be read."""
    return _remembered(_read, file, ())


def _remembered(look: _Look, path: str, details: tuple[str, ...]) -> tuple[str, ...]:
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        return ()
    if time.time_ns() - changed < _SETTLED_NANOSECONDS:
        return look(path, details)
    return _looked(look, os.path.abspath(path), details, changed)


@lru_cache(maxsize=512)
def _looked(look: _Look, path: str, details: tuple[str, ...], changed: int) -> tuple[str, ...]:
    del changed
    return look(path, details)


def _list(folder: str, beginnings: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(sorted(name for name in os.listdir(folder) if name.startswith(beginnings or "")))
    except OSError:
        return ()


def _read(file: str, details: tuple[str, ...]) -> tuple[str, ...]:
    del details
    try:
        return tuple(read_installed(file).decode(errors="replace").splitlines())
    except OSError:
        return ()
