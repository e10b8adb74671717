"""Whether a file may be moved from under its name: not while some program has it open."""

from __future__ import annotations

import os
from pathlib import Path

from cachectl.layers.environment import Environment
from cachectl.layers.mounts import network_file_system
from cachectl.layers.processes import holding, spell


def open_elsewhere(environment: Environment, path: Path) -> str | None:
    """Say who has a file open, or may have; ``None`` where surely nobody has, or there is none."""
    if not os.path.lexists(path):
        return None
    if (kind := network_file_system(path)) is not None:
        return f"lies on {kind}, where a program of another machine may have it open: end those, and move it by hand"
    users = holding(path, processes=environment.processes)
    return None if users == () else f"is open in {spell(users)}, which must end first"
