"""Detection of reads by access times, used if file events cannot be had.

Most systems write an access time only if it is not newer than the file's last change (``relatime``), and some never do.
So a file of our own shows first whether a file system keeps access times. Then each file is primed: setting its times
to their present values counts as a change, so that the next read must be recorded.
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

#: Minimum age (ns) of a primed access time: the clocks of file systems tick every few milliseconds.
_PAST: Final = 10_000_000_000


def why_not_kept(folder: Path) -> str | None:
    """Return why access times show nothing in a folder's file system; ``None`` if a read of our own file shows."""
    try:
        with opened_root(folder) as root:
            if root is None:
                return f"cannot test access times in {folder}: it does not exist"
            with own_folder(root, STAGE) as (_, name):
                probe = folder / name / "probe"
                probe.write_bytes(b"?")
                primed = _prime(str(probe))
                probe.read_bytes()
                return None if probe.lstat().st_atime_ns != primed else "its file system keeps no access times"
    except OSError as error:
        return f"cannot test access times in {folder}: {error.strerror}"


def prime(paths: Iterable[str]) -> tuple[dict[str, int], str | None]:
    """Prime files; return the access time (ns) of each until it is read, and the reasons for files that have none."""
    primed: dict[str, int] = {}
    why = None
    for path in paths:
        with suppress(FileNotFoundError):
            why = _primed(path, primed) or why
    return primed, why


def read_since(primed: dict[str, int]) -> tuple[str, ...]:
    """Return the files that were read since they were primed, as far as they still exist."""
    return tuple(path for path, before in primed.items() if _access_time(path) not in (before, None))


def _primed(path: str, primed: dict[str, int]) -> str | None:
    try:
        primed[path] = _prime(path)
    except OSError as error:
        return f"cannot set the access time of {path}, which belongs to another user: {error.strerror}"
    return None


def _prime(path: str) -> int:
    status = os.lstat(path)
    accessed = min(status.st_atime_ns, time.time_ns() - _PAST)
    os.utime(path, ns=(accessed, status.st_mtime_ns), follow_symlinks=False)
    # A file system may round times.
    return os.lstat(path).st_atime_ns


def _access_time(path: str) -> int | None:
    try:
        return os.lstat(path).st_atime_ns
    except OSError:
        return None
