"""Locks that are the existence of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachectl.layers.base.errors import Unreachable
from cachectl.layers.disk.locks import presence_lock


def test_a_lock_stays_in_the_folder_that_was_opened(tmp_path: Path) -> None:
    """PyOpenCL's lock is never made in, or removed from, a folder that was put in the place of another."""
    inside, outside = tmp_path / "base", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    with presence_lock("pyopencl", inside / "lock"):
        inside.rename(tmp_path / "moved")
        outside.rename(inside)
        (inside / "lock").touch()
        assert (tmp_path / "moved" / "lock").exists()
    assert not (tmp_path / "moved" / "lock").exists()
    assert (inside / "lock").exists()
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    with pytest.raises(Unreachable), presence_lock("pyopencl", tmp_path / "link" / "lock"):
        pass
    assert os.listdir(tmp_path / "moved") == []
