"""Isolated roots, and the links in them that stand for the user cache folder: what they show, and what they hide."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachectl.stack import Stack
from cachectl.switching import isolated

if TYPE_CHECKING:
    from homes import Home


@pytest.fixture
def cache(home: Home) -> Path:
    """Return the real user cache folder."""
    (home.path / "tmp").mkdir()
    folder = home.path / ".cache"
    folder.mkdir()
    return folder


def linked(home: Home, root: Path, **changes: str) -> list[str]:
    """Link the user cache folder below a root, without the entries of every layer; return the names in it."""
    environment = home.environment(**changes)
    isolated.link_cache_home(environment, Stack(environment, plugins=False), root)
    return sorted(os.listdir(root / "xdg"))


def test_layers_that_move_are_hidden_and_others_are_linked(home: Home, cache: Path, tmp_path: Path) -> None:
    """A layer with a variable of its own hides nothing. New files of others in linked folders are in their place."""
    (cache / "proj" / "pocl").mkdir(parents=True)
    (cache / "pytools").mkdir()
    assert linked(home, tmp_path / "root", POCL_CACHE_DIR=str(cache / "proj" / "pocl")) == ["proj"]
    (tmp_path / "root" / "xdg" / "proj" / "mine").write_text("mine")
    assert (cache / "proj" / "mine").read_text() == "mine"


def test_a_root_that_is_used_again_shows_what_is_there_now(home: Home, cache: Path, tmp_path: Path) -> None:
    (cache / "old").mkdir()
    assert linked(home, tmp_path) == ["old"]
    (cache / "old").rmdir()
    (cache / "new").mkdir()
    # A link that an earlier run, with other layers, left to what is isolated now.
    (cache / "pytools").mkdir()
    (tmp_path / "xdg" / "pytools").symlink_to(cache / "pytools")
    (tmp_path / "xdg" / "kept").write_text("of another program")
    assert linked(home, tmp_path) == ["kept", "new"]


def test_a_root_in_itself_or_in_the_cache_folder_links_to_no_part_of_itself(home: Home, cache: Path) -> None:
    root = cache / "scratch" / "root"
    assert linked(home, root) == []
    (root / "xdg" / "new").write_text("mine")
    assert linked(home, root, XDG_CACHE_HOME=str(root / "xdg")) == ["new"]


@pytest.mark.usefixtures("cache")
def test_a_forked_child_leaves_its_parents_root_alone(home: Home) -> None:
    def leave() -> Iterator[Path]:
        with isolated.isolated_root(home.environment()) as folder:
            yield folder

    block = leave()
    folder = next(block)
    child = os.fork()
    if child == 0:
        next(block, None)
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.is_dir()
    next(block, None)
    assert not folder.exists()


@pytest.mark.usefixtures("cache")
def test_a_read_only_root_goes_too(home: Home) -> None:
    with isolated.isolated_root(home.environment()) as folder:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b").chmod(stat.S_IRUSR)
        (folder / "a").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert not folder.exists()


def test_files_of_other_programs_stay_where_the_links_lead(home: Home, cache: Path) -> None:
    """Nothing that lies behind a link is removed with a root."""
    (cache / "fonts").mkdir()
    (cache / "fonts" / "one").write_text("font")
    with isolated.isolated_root(home.environment()) as folder:
        assert linked(home, folder) == ["fonts"]
    assert (cache / "fonts" / "one").read_text() == "font"
