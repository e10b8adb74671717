"""Existence of paths, and the errors that mean absence.

Only ``ENOENT``, ``ENOTDIR`` and ``ENAMETOOLONG`` mean absence. Any other error (``EIO``, ``EACCES``, ``EMFILE``) leaves
it unknown and is raised: an entry that cannot be read has not gone.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


def means_absent(error: OSError) -> bool:
    """Return whether an error means that nothing has this name."""
    return error.errno in _ABSENT


def means_no_file(error: OSError) -> bool:
    """Return whether an error of opening a plain file means that there is none, but nothing, a link, a pipe or so."""
    return means_absent(error) or error.errno in (errno.ELOOP, errno.EINVAL)


def nearest(path: Path, *, follow: bool = True) -> Path:
    """Return a path, or the nearest folder above it that exists.

    A link without a target exists unless ``follow`` is set. Raises :class:`OSError` if ``follow`` is set and the
    existence cannot be determined.
    """
    exists = Path.exists if follow else os.path.lexists
    return next(place for place in (path, *path.parents) if exists(place))


def status_at(path: str | Path, *, dir_fd: int | None = None, follow: bool = False) -> os.stat_result | None:
    """Return the status of a path, of a link itself unless ``follow`` is set; ``None`` if nothing is there.

    Raises :class:`OSError` if that cannot be determined.
    """
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow)
    except OSError as error:
        if means_absent(error):
            return None
        raise


def is_plain_file(path: str | Path) -> bool:
    """Return whether a path is a regular file and no link. Raises :class:`OSError` if that is unknown."""
    status = status_at(path)
    return status is not None and stat.S_ISREG(status.st_mode)
