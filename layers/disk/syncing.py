"""Syncs to the disk: each file as it is written, or all of a file system at once."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ctypes import CDLL

#: The numbers of ext2 to ext4, XFS, Btrfs, F2FS and tmpfs (``statfs(2)``). Others, such as those of a network or FUSE,
#: may return from ``syncfs`` before everything is written.
_KINDS: Final = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
#: The first Linux whose ``syncfs`` returns the errors of files (``syncfs(2)``).
_FIRST: Final = (5, 8)
#: From here on a single call is faster, though it also waits for what other programs have written.
_MANY: Final = 8
#: Longer than ``struct statfs``, in words; its first member is the number of the file system.
_STATFS: Final = 64


class Syncing:
    """Syncs what is written for a number of entries to the disk, beginning when an open folder is given.

    Each file is synced by :meth:`one`, unless :meth:`all` can sync the folder's file system at once, and reports errors
    as ``fsync`` does. Both raise :class:`OSError`.
    """

    def __init__(self, folder: int, entries: int) -> None:
        self._folder = folder
        self._syncfs = _syncfs() if entries >= _MANY and _is_known(folder) else None

    def one(self, handle: int) -> None:
        """Sync an open file or folder, or leave it to the next :meth:`all`."""
        if self._syncfs is None:
            os.fsync(handle)

    def all(self) -> None:
        """Sync everything that :meth:`one` was given."""
        if self._syncfs is not None and self._syncfs(self._folder):
            raise _last_error()


def _is_known(folder: int) -> bool:
    """Return whether ``syncfs`` may be relied upon for the file system of an open folder."""
    if _syncfs() is None:
        return False
    import ctypes

    status = (ctypes.c_long * _STATFS)()
    return _libc().fstatfs(folder, status) == 0 and status[0] in _KINDS


@lru_cache(maxsize=1)
def _libc() -> CDLL:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _last_error() -> OSError:
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@lru_cache(maxsize=1)
def _syncfs() -> Callable[[int], int] | None:
    """Return ``syncfs`` of the C library; ``None`` where it is missing or hides errors."""
    if sys.platform != "linux":
        return None
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < _FIRST:
        return None
    try:
        return _libc().syncfs
    except (ImportError, OSError, AttributeError):
        return None
