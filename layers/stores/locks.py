"""The two kinds of lock that cache owners take, waited for a finite time and never broken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachectl.layers.errors import Busy, Refused, Unreachable

#: Seconds to wait for a lock that another process holds.
PATIENCE: Final = 5.0
_PAUSE: Final = 0.02


@contextmanager
def record_lock(layer: str, path: Path, *, patience: float = PATIENCE) -> Iterator[int]:
    """Hold a POSIX record lock on a whole file, made if need be; yield the open file's descriptor.

    The CUDA driver and MIOpen lock so; ``flock`` would not exclude them. Raises :class:`Busy` after
    ``patience`` seconds.
    """
    try:
        import fcntl
    except ImportError as error:
        raise Refused(layer, "this platform has no record locks", path) from error
    handle = _open(layer, path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
    try:
        deadline = time.monotonic() + patience
        while not _try(lambda: fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            if time.monotonic() > deadline:
                raise Busy(layer, f"locked by another process for more than {patience:g} s", path)
            time.sleep(_PAUSE)
        yield handle
    finally:
        os.close(handle)


@contextmanager
def presence_lock(layer: str, path: Path, *, patience: float = PATIENCE) -> Iterator[None]:
    """Hold a lock that consists in a file being there, as PyOpenCL's does.

    Raises :class:`Busy` after ``patience`` seconds; a lock that is held is never removed.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
            break
        except FileExistsError as error:
            if time.monotonic() > deadline:
                message = f"locked for more than {patience:g} s; if no program is running, remove the lock"
                raise Busy(layer, message, path) from error
            time.sleep(_PAUSE)
        except OSError as error:
            raise Unreachable(layer, f"cannot lock: {error.strerror}", path) from error
    try:
        yield
    finally:
        os.close(handle)
        os.unlink(path)


def _open(layer: str, path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise Unreachable(layer, f"cannot open: {error.strerror}", path) from error


def _try(lock: Callable[[], None]) -> bool:
    try:
        lock()
    except (BlockingIOError, PermissionError):
        # Either is what POSIX allows a refused record lock to say.
        return False
    return True
