"""The lock that Intel's driver takes: ``flock`` on a file, waited for a finite time and never broken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cachectl.layers.base.errors import Busy, Unreachable
from cachectl.layers.disk.locking import is_same_file, try_flock, wait_until
from cachectl.layers.disk.locks import LOCK_TIMEOUT
from cachectl.layers.disk.plain import open_plain


@contextmanager
def file_lock(layer: str, path: Path, *, lock_timeout: float = LOCK_TIMEOUT) -> Iterator[int | None]:
    """Hold ``flock`` on a plain file; yield its descriptor, or ``None`` if there is no such file.

    If the file was replaced during the wait, the new one is locked instead. Raises :class:`Busy` after ``lock_timeout``
    seconds, :class:`Unreachable` if the file cannot be opened or is no plain file.
    """
    while True:
        handle = _open(layer, path)
        if handle is None:
            yield None
            return
        try:
            if not wait_until(partial(try_flock, handle), lock_timeout):
                raise Busy(layer, f"locked by another process for more than {lock_timeout:g} s", path)
            if is_same_file(path, handle):
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
