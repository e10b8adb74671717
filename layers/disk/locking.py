"""``flock`` and record locks, and polling for a lock with a timeout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

#: Seconds between two attempts.
_PAUSE: Final = 0.02


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, at most ``seconds``; return whether it does."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)
    return True


def try_flock(handle: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Take ``flock`` on an open file or folder, at once or after a ``wait``; return ``False`` if another holds it.

    It is released at the latest when the file is closed. Raises :class:`OSError` if the file system has no such locks.
    """
    import fcntl

    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def take_flock(handle: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Take ``flock`` as :func:`try_flock` does; return ``False`` on any failure."""
    with suppress(OSError):
        return try_flock(handle, shared=shared, wait=wait)
    return False


def try_record_lock(handle: int, length: int = 0, start: int = 0) -> bool:
    """Take a POSIX record lock on an open file, or a part of it; return ``False`` if another process holds it.

    Raises :class:`OSError` if the file system has no such locks.
    """
    import fcntl

    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):
        # POSIX allows either error for a refused record lock.
        return False
    return True


def is_same_file(path: str | os.PathLike[str], handle: int, *, dir_fd: int | None = None) -> bool:
    """Return whether a path still names an open file, which another process may have replaced."""
    try:
        return os.path.samestat(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False
