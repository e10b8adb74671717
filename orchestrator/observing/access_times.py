"""Whether files were read, told by their access times: the means where nothing tells of it as it happens.

Most systems write an access time only if it is not newer than the last change of the file (``relatime``), and some
never. So whether a file system keeps them is tried first, on a file of our own, and each file is primed: its times are
set to what they are already, which counts as a change, so that the next read has to show.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from cachectl.layers.disk.handles import opened_root, own_folder
from cachectl.layers.disk.plain import STAGE

#: How far in the past (ns) a primed access time lies at least: file systems count in ticks of a few milliseconds.
_PAST: Final = 10_000_000_000


def why_not_kept(folder: Path) -> str | None:
    """Say why access times tell nothing in a folder's file system, ``None`` where they do: a file of ours is read."""
    try:
        with opened_root(folder) as root:
            if root is None:
                return f"access times cannot be tried out in {folder}: it is not there"
            with own_folder(root, STAGE) as (_, name):
                probe = folder / name / "probe"
                probe.write_bytes(b"?")
                primed = _prime(str(probe))
                probe.read_bytes()
                return None if probe.lstat().st_atime_ns != primed else "its file system keeps no access times"
    except OSError as error:
        return f"access times cannot be tried out in {folder}: {error.strerror}"


def prime(paths: Iterable[str]) -> tuple[dict[str, int], str | None]:
    """Prime files; return the access time (ns) that each has until it is read, and why some have none."""
    primed: dict[str, int] = {}
    why = None
    for path in paths:
        with suppress(FileNotFoundError):
            why = _primed(path, primed) or why
    return primed, why


def read_since(primed: dict[str, int]) -> tuple[str, ...]:
    """Name the files that were read since they were primed, as far as they are still there."""
    return tuple(path for path, before in primed.items() if _access_time(path) not in (before, None))


def _primed(path: str, primed: dict[str, int]) -> str | None:
    try:
        primed[path] = _prime(path)
    except OSError as error:
        return f"the access time of {path}, which is another user's, cannot be set: {error.strerror}"
    return None


def _prime(path: str) -> int:
    status = os.lstat(path)
    accessed = min(status.st_atime_ns, time.time_ns() - _PAST)
    os.utime(path, ns=(accessed, status.st_mtime_ns), follow_symlinks=False)
    # A file system may round what it is given.
    return os.lstat(path).st_atime_ns


def _access_time(path: str) -> int | None:
    try:
        return os.lstat(path).st_atime_ns
    except OSError:
        return None
