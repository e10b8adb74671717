"""Copies of files that share disk blocks where the file system can."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from typing import Final

from cachectl.layers.disk.atomic import create
from cachectl.layers.disk.plain import open_plain

#: Makes a file share the blocks of another (``FICLONE`` of ``linux/fs.h``); other systems have no such request.
_CLONE: Final = 0x40049409


def clone(source: int, target: int) -> bool:
    """Fill an empty open file with the content of another, through shared disk blocks or a copy.

    Returns whether the blocks are shared. Raises :class:`OSError`.
    """
    try:
        import fcntl

        fcntl.ioctl(target, _CLONE, source)
    except (ImportError, OSError):
        pass
    else:
        return True
    at = 0
    while hasattr(os, "copy_file_range"):
        try:
            done = os.copy_file_range(source, target, 1 << 30, at)
        except OSError as error:
            if at or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            # Some pairs of file systems refuse it.
            break
        if not done and (at or not os.fstat(source).st_size):
            return False
        if not done:
            break
        at += done
    with open(source, "rb", closefd=False) as old, open(target, "wb", closefd=False) as new:
        old.seek(0)
        shutil.copyfileobj(old, new)
    return False


def clone_file(source: str, name: str, folder: int) -> bool:
    """Make a file in an open folder with the content and the time of change of a plain file; links are refused.

    Returns whether it shares the disk blocks. It is not synced.
    """
    old = open_plain(source)
    try:
        status = os.fstat(old)
        new = create(name, folder, stat.S_IMODE(status.st_mode) & 0o666 | 0o600)
        try:
            shares = clone(old, new)
            os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(new)
    finally:
        os.close(old)
    return shares
