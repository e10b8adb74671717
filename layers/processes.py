"""Which running programs have a library loaded, as far as the platform lets one see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def using(libraries: tuple[str, ...], *, processes: Path = _PROC) -> tuple[int, ...] | None:
    """Return the ids of this user's processes that map a library whose file name starts so.

    ``None`` where it cannot be known: only Linux shows the maps of a process. Another user's processes hide
    theirs, and do not write into this user's caches.
    """
    if not (processes / "self" / "maps").exists():
        return None
    return tuple(sorted(pid for pid in _own_processes(processes) if _maps_one(processes / str(pid), libraries)))


def loaded_here(libraries: tuple[str, ...], *, processes: Path = _PROC) -> bool | None:
    """Tell whether this very process has such a library loaded; ``None`` where it cannot be known."""
    if not (processes / "self" / "maps").exists():
        return None
    return _maps_one(processes / "self", libraries)


def _own_processes(processes: Path) -> Iterator[int]:
    user = os.getuid()
    for name in os.listdir(processes):
        if name.isdigit():
            try:
                owner = (processes / name).stat().st_uid
            except OSError:
                continue
            if owner == user:
                yield int(name)


def _maps_one(process: Path, libraries: tuple[str, ...]) -> bool:
    try:
        maps = (process / "maps").read_bytes()
    except OSError:
        # It has ended meanwhile.
        return False
    return any(b"/" + library.encode() in maps for library in libraries)
