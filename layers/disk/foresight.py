"""Obstacles to a change, found without changing anything: modes, read-only file systems, and locks."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from cachectl.layers.base.errors import Busy
from cachectl.layers.disk.locking import release_flock, try_flock, wait_until
from cachectl.layers.disk.locks import ask_for_record, has_record_structure
from cachectl.layers.disk.plain import open_plain, release
from cachectl.layers.disk.presence import nearest


def closed_because(root: Path, key: str, known: dict[Path, str | None] | None = None) -> str | None:
    """Return the operating system's reason why an entry below a root could not be placed or removed, else ``None``.

    A folder can be moved only if the root, its parent and the folder itself are writable; a file needs its parent. For
    a path that does not exist, the nearest existing one above must be a writable folder. ``known`` caches folders
    between calls.
    """
    seen = {} if known is None else known
    path = root / key
    folders = [path.parent]
    if path.is_dir() and not path.is_symlink():
        folders += [root, path]
    for folder in folders:
        there = nearest(folder, follow=False)
        if there not in seen:
            seen[there] = unwritable_because(there) if there.is_dir() else os.strerror(errno.ENOTDIR)
        if seen[there] is not None:
            return seen[there]
    return None


def closed_bytes(path: Path) -> list[int]:
    """Return the bytes of the files in each read-only folder below a path: they stay when it is moved and deleted."""
    return [
        sum((Path(folder) / name).lstat().st_size for name in names)
        for folder, folders, names in os.walk(path)
        if (folders or names) and unwritable_because(Path(folder)) is not None
    ]


def file_closed_because(path: Path) -> str | None:
    """Return the reason why a file could not be written in place, with a journal beside it; ``None`` if it could."""
    there = path if os.path.lexists(path) else path.parent
    return closed_because(path.parent, path.name) or (None if there == path.parent else unwritable_because(there))


def unwritable_because(path: Path) -> str | None:
    """Return why this process could not write to a file or folder."""
    wanted = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    effective = os.access in os.supports_effective_ids
    if os.access(path, wanted, effective_ids=effective):
        return None
    with suppress(OSError, AttributeError):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return os.strerror(errno.EROFS)
    return os.strerror(errno.EACCES)


def wait_until_free(layer: str, path: Path, lock_timeout: float, *, span: tuple[int, int] = (0, 0)) -> None:
    """Wait until no other process holds a lock on a file. Raises :class:`Busy` after ``lock_timeout`` seconds.

    Both kinds of lock count: ``flock``, and records of ``fcntl``, which sqlite, CUDA and MIOpen take, in a ``span`` of
    bytes (start and length; a length of 0 is the rest of the file).
    """
    if not wait_until(lambda: not _is_locked(path, span), lock_timeout):
        message = f"locked by another process for more than {lock_timeout:g} s; try again later, or use --wait"
        raise Busy(layer, message, path)


def _is_locked(path: Path, span: tuple[int, int]) -> bool:
    try:
        handle = open_plain(path)
    except OSError:
        # The change itself reports the error.
        return False
    try:
        if not try_flock(handle, shared=True):
            return True
        release_flock(handle)
        return _has_record_lock(handle, span)
    except OSError:
        # The platform or the file system has no such locks.
        return False
    finally:
        # Closing it now could drop locks of a library in this process.
        release(handle)


def _has_record_lock(handle: int, span: tuple[int, int]) -> bool:
    """Return whether another process holds a conflicting record lock, without taking one; only on 64-bit Linux."""
    if not has_record_structure():
        return False
    import fcntl

    return ask_for_record(handle, fcntl.F_GETLK, fcntl.F_WRLCK, span) != fcntl.F_UNLCK
