"""Temporary folders of cachectl that killed commands left, measured."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Orphan
from cachectl.layers.disk.private_folders import temporary_parents
from cachectl.layers.disk.temporaries import abandoned_in

_KILLED: Final = "a temporary folder left by a cachectl that was killed"


def abandoned_temporaries(environment: Environment) -> tuple[Orphan, ...]:
    """Return the temporary folders of killed commands. Removes nothing."""
    return tuple(
        _measured(parent, folder.name, _KILLED)
        for parent in temporary_parents(environment)
        for folder in abandoned_in(parent, environment, look=True)
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
