"""Helpers shared by the tests of stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.moving.bundle import Manifest, Reader

if TYPE_CHECKING:
    from homes import Home


def manifest(file: Path) -> Manifest:
    with file.open("rb") as opened:
        return Reader(opened, file.stat().st_size).manifest


def no_home(home: Home) -> bool:
    """Return whether nothing was kept in the home itself."""
    return not (home.path / ".cache").exists()
