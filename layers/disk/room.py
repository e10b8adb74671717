"""Free space, free inodes and remaining quota at a path.

Sources: statvfs(3); quotactl_fd(2), or quotactl(2) before Linux 5.14, and ``struct dqblk`` of ``linux/quota.h`` (limits
in blocks of 1024 bytes, usage in bytes). None of them shows a server's quota (NFS, Lustre), which is unknown here.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

from cachectl.layers.base.processes import mount_of
from cachectl.layers.disk.plain import nearest

#: The number of the system call ``quotactl_fd`` (Linux 5.14) on every architecture except alpha.
_QUOTACTL_FD = 443
_GET_QUOTA = 0x800007
_OF_USER, _OF_GROUP = range(2)
#: Hard and soft limit of blocks, bytes in use; hard and soft limit of inodes, inodes in use; two times, valid fields.
_DQBLK = struct.Struct("=8QI4x")
_BLOCK = 1024

#: Bytes and files that this user can still store, and the source of the limit; ``None`` is unknown.
Room = tuple[int | None, int | None, str]


def room_at(path: Path) -> tuple[Room, ...]:
    """Return the space left at a path, or above it, by file system, then by quotas. Raises :class:`OSError`."""
    place = nearest(path)
    if not hasattr(os, "statvfs"):
        import shutil

        return ((shutil.disk_usage(place).free, None, "the file system"),)
    status = os.statvfs(place)
    # Some totals are zero: blocks on tmpfs without a limit, inodes on btrfs.
    free = status.f_bavail * status.f_frsize if status.f_blocks else None
    files = status.f_favail if status.f_files else None
    quotas = (
        _quota(place, _OF_USER, os.geteuid(), "your quota"),
        _quota(place, _OF_GROUP, os.getegid(), "your group's quota"),
    )
    return ((free, files, "the file system"), *(quota for quota in quotas if quota is not None))


def _quota(folder: Path, kind: int, number: int, source: str) -> Room | None:
    """Return what is left of a quota; ``None`` if there is no quota or it is unknown."""
    if sys.platform != "linux":
        return None
    import ctypes

    answer = ctypes.create_string_buffer(_DQBLK.size)
    with suppress(OSError, AttributeError, ValueError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            library, command = ctypes.CDLL(None, use_errno=True), ctypes.c_uint(_GET_QUOTA << 8 | kind)
            failed = library.syscall(_QUOTACTL_FD, handle, command, ctypes.c_int(number), answer)
            if failed and ctypes.get_errno() == errno.ENOSYS and (source_of_mount := mount_of(folder).source):
                failed = library.quotactl(command, os.fsencode(source_of_mount), ctypes.c_int(number), answer)
            if failed:
                return None
        finally:
            os.close(handle)
        return left_of_quota(answer.raw, source)
    return None


def left_of_quota(answer: bytes, source: str) -> Room | None:
    """Return what is left below the hard limits of a ``struct dqblk``; ``None`` if it has no limits."""
    blocks, _, used, inodes, _, present, *_ = _DQBLK.unpack(answer)
    free = max(0, blocks * _BLOCK - used) if blocks else None
    files = max(0, inodes - present) if inodes else None
    return None if (free, files) == (None, None) else (free, files, source)
