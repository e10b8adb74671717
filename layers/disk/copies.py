"""Staged copies in the user cache folder, and those that a killed command left there.

An isolated run moves files that other programs made in the overlay to the user cache folder. From another file system
they are copied first into a locked folder ``.cachectl-copy-…`` and renamed from there. The original is removed last, so
an abandoned copy is never the only one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import Environment, user_cache_folder
from cachectl.layers.base.facts import Orphan
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.handles import is_held, is_trusted, opened_root, own_folder, status_of
from cachectl.layers.disk.private_folders import temporary_parents
from cachectl.layers.disk.temporaries import abandoned_in

PREFIX: Final = ".cachectl-copy-"
_NAME: Final = regex(re.escape(PREFIX) + "[0-9a-f]{32}")
_KILLED: Final = "a temporary folder left by a cachectl that was killed"
_WHY: Final = "a copy left by a cachectl that was killed while it brought files home"


def user_cache_home(environment: Environment) -> Path:
    """Return the folder that holds the cache folder of every program of this user."""
    folder = user_cache_folder(environment, "any")[0]
    # On Windows an application's folder is any/any/Cache.
    return folder.parents[2] if environment.platform == "win32" else folder.parent


@contextmanager
def stage_in(folder: Path) -> Iterator[Path]:
    """Make a folder for copies in ``folder``, held during the block and removed afterwards.

    The block must leave nothing in it that is deeper than an entry. Raises :class:`OSError`.
    """
    with opened_root(folder) as handle:
        if handle is None:
            raise FileNotFoundError(2, os.strerror(2), str(folder))
        with own_folder(handle, PREFIX) as (_, name):
            yield folder / name


def abandoned_copies(environment: Environment) -> tuple[Orphan, ...] | None:
    """Return the copies in the user cache folder whose maker has ended; ``None`` if the folder cannot be read."""
    folder = user_cache_home(environment)
    try:
        with opened_root(folder) as handle:
            if handle is None:
                return ()
            names = sorted(filter(_NAME.fullmatch, os.listdir(handle)))
            return tuple(_measured(folder, name, _WHY) for name in names if _is_left(handle, name))
    except OSError:
        return None


def _is_left(handle: int, name: str) -> bool:
    status = status_of(handle, name)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return False
    return is_trusted(handle, status) and not is_held(handle, name)


def abandoned_temporaries(environment: Environment) -> tuple[Orphan, ...]:
    """Return the temporary folders of killed commands. Removes nothing."""
    return tuple(
        _measured(parent, left.folder.name, _KILLED)
        for parent in temporary_parents(environment)
        for left in abandoned_in(parent, environment, look=True)
    )


def _measured(folder: Path, name: str, why: str) -> Orphan:
    total = files = 0
    newest = (folder / name).lstat().st_mtime
    for above, folders, names in os.walk(folder / name):
        for one in (*folders, *names):
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(above, one))
                newest = max(newest, status.st_mtime)
                if stat.S_ISREG(status.st_mode):
                    files += 1
                    total += status.st_size
    return Orphan(name, folder, total, files, newest, why, idle_only=False)
