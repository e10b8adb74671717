"""Existence of paths, and safe opening and reading of plain files: no links, no blocking pipes, no oversized files.

Only ``ENOENT``, ``ENOTDIR`` and ``ENAMETOOLONG`` mean absence. After any other error (``EIO``, ``EACCES``, ``EMFILE``),
which is raised, existence is unknown.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cachectl.layers.base.limits import LARGEST_ENTRY
from cachectl.layers.base.text import too_large

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_FLAGS = os.O_RDONLY | _NO_LINKS | getattr(os, "O_NONBLOCK", 0)
#: Reading must not change access times: some caches evict by access time.
_UNNOTICED = getattr(os, "O_NOATIME", 0)
#: The folder in which the system shows the open files of this process.
_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
#: Prefix of the names of staged files.
STAGE = ".cachectl-stage-"
#: Bytes to read before the size of a file is known.
_HEAD = 4096


def means_absent(error: OSError) -> bool:
    """Return whether an error means that the path does not exist."""
    return error.errno in _ABSENT


def means_no_file(error: OSError) -> bool:
    """Return whether an error of :func:`open_plain` means that there is no plain file, or something else instead."""
    return means_absent(error) or error.errno in (errno.ELOOP, errno.EINVAL)


def nearest(path: Path, *, follow: bool = True) -> Path:
    """Return a path, or the nearest folder above it that exists.

    A dangling link exists unless ``follow`` is set. With ``follow``, raises :class:`OSError` if that is unknown.
    """
    exists = Path.exists if follow else os.path.lexists
    return next(place for place in (path, *path.parents) if exists(place))


def status_at(path: str | Path, *, dir_fd: int | None = None, follow: bool = False) -> os.stat_result | None:
    """Return the status of a path, ``None`` if it does not exist. Raises :class:`OSError` if that is unknown."""
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow)
    except OSError as error:
        if means_absent(error):
            return None
        raise


def own_name(prefix: str = STAGE) -> str:
    """Return a unique name with a prefix, by default that of staged files."""
    return prefix + os.urandom(16).hex()


def open_plain(path: str | Path, *, dir_fd: int | None = None, flags: int = _FLAGS, follow: bool = False) -> int:
    """Open a plain file; return its descriptor.

    Raises :class:`OSError` for a folder, a pipe, a socket or a device, so that nothing in a cache can block this. Links
    are refused too, unless ``follow`` is set, which is only for files of an installation.
    """
    # Even opening a device can have an effect. A link fails when it is opened.
    if (status := status_at(path, dir_fd=dir_fd, follow=follow)) is not None and not stat.S_ISLNK(status.st_mode):
        _require_plain(status, path)
    # With O_NONBLOCK, a pipe that replaces the file now does not block either.
    handle = os.open(path, (flags | _FLAGS) & ~(_NO_LINKS if follow else 0), 0o644, dir_fd=dir_fd)
    try:
        _require_plain(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return handle


def _require_plain(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a plain file, or a link, which is not followed", str(path))


def plain_status(path: Path) -> os.stat_result:
    """Return the status of a plain file that is not a link. Raises :class:`OSError` for anything else."""
    status = path.lstat()
    _require_plain(status, path)
    return status


# ---------------------------------------------------------------------- files that programs lock

#: Descriptors that cannot be closed yet.
_PARKED: list[int] = []


@contextmanager
def opened_locked(path: str | Path, *, dir_fd: int | None = None, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a plain file that programs lock, for a block; close it once this process no longer has it open elsewhere.

    Closing any descriptor of a file drops all POSIX locks of the process on it, such as those of sqlite, the CUDA
    driver or MIOpen if cachectl runs in their process. A reader reuses a descriptor that could not be closed yet, so
    that there is at most one per file; its position is undefined.
    """
    handle = _unpark(path) if flags == os.O_RDONLY else None
    if handle is None:
        handle = open_plain(path, dir_fd=dir_fd, flags=flags)
    try:
        yield handle
    finally:
        _PARKED.append(handle)
        for parked in _PARKED[:]:
            # A file that cannot be identified stays open.
            with suppress(ValueError, OSError):
                if not _open_otherwise(parked):
                    _PARKED.remove(parked)
                    os.close(parked)


def _unpark(path: str | Path) -> int | None:
    for parked in _PARKED[:]:
        with suppress(OSError, ValueError):
            if os.path.samestat(os.fstat(parked), os.lstat(path)):
                _PARKED.remove(parked)
                return parked
    return None


def _open_otherwise(handle: int) -> bool:
    """Return whether this process has the file also open by another descriptor, as far as the system shows that."""
    mine = os.fstat(handle)
    for number in map(int, os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ()):
        with suppress(OSError):
            if number not in _PARKED and os.path.samestat(os.fstat(number), mine):
                return True
    return False


# ---------------------------------------------------------------------- reading


def read_locked(path: str | Path, *, limit: int = -1) -> bytes:
    """Read a plain file that programs lock without dropping locks of this process. Raises like :func:`read_plain`."""
    with opened_locked(path) as handle:
        return _read_all(handle, path, limit)


def read_installed(path: str | Path) -> bytes:
    """Read a file of an installation, following links. Raises like :func:`read_plain`."""
    return read_plain(path, follow=True)


def read_plain(
    path: str | Path, *, dir_fd: int | None = None, limit: int = -1, most: int = LARGEST_ENTRY, follow: bool = False
) -> bytes:
    """Read a plain file (at most ``most`` bytes), or its first ``limit`` bytes. Raises :class:`OSError`."""
    try:
        handle = open_plain(path, dir_fd=dir_fd, flags=_UNNOTICED, follow=follow)
    except PermissionError:
        # Only the owner may open with O_NOATIME.
        handle = open_plain(path, dir_fd=dir_fd, follow=follow)
    try:
        return _read_all(handle, path, limit, most)
    finally:
        os.close(handle)


def _read_all(handle: int, path: str | Path, limit: int, most: int = LARGEST_ENTRY) -> bytes:
    """Read an open file from its beginning, independently of its position."""
    wanted = limit
    if not 0 <= limit <= _HEAD:
        size = os.fstat(handle).st_size
        if limit < 0 and size > most:
            raise OSError(errno.EFBIG, too_large(size, most), str(path))
        wanted = size if limit < 0 else min(size, limit)
    data = os.pread(handle, wanted, 0)
    while len(data) < wanted and (more := os.pread(handle, wanted - len(data), len(data))):
        data += more
    return data
