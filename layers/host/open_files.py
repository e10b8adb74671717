"""Check for programs that have a file open, which therefore must not be moved."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cachectl.layers.base.environment import Environment
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.host.processes import holding, process_names


def open_elsewhere(environment: Environment, path: Path) -> str | None:
    """Return who has a file open, or may have; ``None`` if surely nobody has, or there is no file."""
    if not os.path.lexists(path):
        return None
    if (kind := network_file_system(path)) is not None:
        return f"lies on {kind}, where a program of another machine may have it open: end those, and move it by hand"
    if not environment.superuser and _others_may_write(path):
        return "may be open in a program of another user, who can write to it: do it as the superuser, or by hand"
    users = holding(path, processes=environment.processes)
    return None if users == () else f"is open in {process_names(users)}, which must end first"


def _others_may_write(path: Path) -> bool:
    """Return whether processes of other users, which are not visible, may be writing to a file."""
    status = path.lstat()
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) or status.st_uid != os.geteuid()
