"""The lock that Intel's driver takes: ``flock`` on a file, waited for a finite time and never broken."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachectl.layers.base.errors import Busy, Refused, Unreachable
from cachectl.layers.disk.locks import PATIENCE
from cachectl.layers.disk.plain import open_plain

_PAUSE: Final = 0.02


@contextmanager
def file_lock(layer: str, path: Path, *, patience: float = PATIENCE) -> Iterator[int | None]:
    """Hold ``flock`` on a plain file; yield its descriptor, or ``None`` where there is no such file to hold.

    A file that has been replaced while it was waited for is let go, and the new one taken. Raises :class:`Busy` after
    ``patience`` seconds, :class:`Unreachable` where the file cannot be opened or is no plain file.
    """
    deadline = time.monotonic() + patience
    while True:
        handle = _open(layer, path)
        if handle is None:
            yield None
            return
        try:
            while not _try(layer, path, handle):
                if time.monotonic() > deadline:
                    raise Busy(layer, f"locked by another process for more than {patience:g} s", path)
                time.sleep(_PAUSE)
            if _stands(path, handle):
                yield handle
                return
        finally:
            os.close(handle)


def _open(layer: str, path: Path) -> int | None:
    try:
        return open_plain(path, flags=os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreachable(layer, f"cannot open: {error.strerror}", path) from error


def _try(layer: str, path: Path, handle: int) -> bool:
    try:
        import fcntl
    except ImportError as error:
        raise Refused(layer, "this platform has no such locks", path) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stands(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False
