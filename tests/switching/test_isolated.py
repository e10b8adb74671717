"""The stand-in for the user cache folder: what it shows, what it hides, and how what is new comes home."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiers import amount

from cachectl.layers.disk import copies
from cachectl.stack import Stack
from cachectl.switching import isolated as scratch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from homes import Home
    from injector import Injector


@pytest.fixture
def cache(home: Home) -> Path:
    """Return the real user cache folder."""
    folder = home.path / ".cache"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def temporary(home: Home) -> None:
    """Make the temporary folder of the home."""
    (home.path / "tmp").mkdir()


@pytest.fixture
def said() -> list[str]:
    """Return the messages about files that could not be moved home."""
    return []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an isolated root."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def overlaid(home: Home, root: Path, said: list[str], **changes: str) -> AbstractContextManager[None]:
    """Shadow the user cache folder for every layer."""
    environment = home.environment(**changes)
    return scratch.overlay_cache_home(environment, Stack(environment, plugins=False), root, said.append)


def test_a_layer_with_a_variable_of_its_own_hides_nothing(home: Home, cache: Path, root: Path, said: list[str]) -> None:
    (cache / "proj" / "pocl").mkdir(parents=True)
    (cache / "pytools").mkdir()
    with overlaid(home, root, said, POCL_CACHE_DIR=str(cache / "proj" / "pocl")):
        assert sorted(os.listdir(root / "xdg")) == ["proj"]
        (root / "xdg" / "proj" / "mine").write_text("mine")
    assert (cache / "proj" / "mine").read_text() == "mine"


def test_a_file_replaced_by_rename_comes_home(home: Home, cache: Path, root: Path, said: list[str]) -> None:
    for name in ("mine", "raced"):
        (cache / name).write_text("old")
    with overlaid(home, root, said):
        for name in ("mine", "raced"):
            (root / "new").write_text("new")
            os.replace(root / "new", root / "xdg" / name)
        (cache / "raced").write_text("somebody else's")
    assert (cache / "mine").read_text() == "new"
    assert (cache / "raced").read_text() == "somebody else's"
    assert sorted(os.listdir(cache)) == ["mine", "raced"]
    # Neither of the two is lost: the one that came second stays where it is, and is named.
    assert (root / "xdg" / "raced").read_text() == "new"
    assert [line.split()[0] for line in said] == [str(root / "xdg" / "raced")]


def test_nothing_that_stands_is_overwritten_or_entered(home: Home, cache: Path, root: Path, said: list[str]) -> None:
    with overlaid(home, root, said):
        for folder in (root / "xdg", cache):
            (folder / "twice").mkdir()
            (folder / "twice" / folder.name).write_text("")
            (folder / "file").write_text(folder.name)
    assert os.listdir(cache / "twice") == [".cache"]
    assert (cache / "file").read_text() == ".cache"


@pytest.fixture
def elsewhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the isolated root another file system."""
    rename = os.rename

    def refuse(source: Any, target: Any, **options: Any) -> None:  # noqa: ANN401 - as os.rename
        if os.fspath(source).startswith(str(root)):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
        rename(source, target, **options)

    link = os.link

    def refuse_link(source: Any, target: Any, **options: Any) -> None:  # noqa: ANN401 - as os.link
        if os.fspath(source).startswith(str(root)):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
        link(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "link", refuse_link)


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on another file system. Skips where there is none."""
    memory = Path("/dev/shm")  # noqa: S108 - its file system is what matters
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm, another file system than the temporary folder")
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def test_a_copy_that_a_killed_run_leaves_is_reported_and_goes_with_the_next_purge(
    home: Home, cache: Path, other_disk: Path, injector: Injector
) -> None:
    """Killed at each call in turn: the program's files are at home or in the isolated root, never lost."""
    from injector import KILL, WRITES, Fault

    program = 'mkdir "$XDG_CACHE_HOME/other"; echo content > "$XDG_CACHE_HOME/other/file"'
    left = 0
    for nth in range(1, 100, amount(2, 1)):
        shutil.rmtree(cache)
        cache.mkdir()
        root = other_disk / str(nth)
        command = ("run", f"--isolated={root}", "--", "/bin/sh", "-c", program)
        done = injector.run(*command, home=home.path, fault=Fault(WRITES, nth, KILL))
        originals = [
            path.read_text() for path in (root / "xdg" / "other" / "file", cache / "other" / "file") if path.is_file()
        ]
        assert originals[:1] == ["content\n"], nth
        if done.status == 0:
            break
        copies = list(cache.glob(".cachectl-*"))
        report = injector.run("report", "--json", home=home.path, fault=Fault(0)).json
        assert [Path(one["root"], one["key"]) for one in report["leftovers"]] == copies
        assert all(one["modified"] > 0 for one in report["leftovers"])
        left += len(copies)
        dry = injector.run("purge", "--all", "--dry-run", home=home.path, fault=Fault(0))
        assert dry.status == 0
        assert list(cache.glob(".cachectl-*")) == copies
        again = injector.run("purge", "--all", home=home.path, fault=Fault(0))
        assert again.status == 0
        assert len(again.stderr.splitlines()) == len(copies)
        assert list(cache.glob(".cachectl-*")) == []
    else:
        pytest.fail("the run never ends")
    assert left > amount(1, 3)
    assert list(cache.iterdir()) == [cache / "other"]


def test_a_copy_in_progress_is_not_a_leftover(home: Home, cache: Path) -> None:
    environment = home.environment()
    with copies.stage_in(cache) as stage:
        assert copies.abandoned_copies(environment) == ()
        assert scratch.remove_copies(environment) == ()
        assert stage.is_dir()
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("elsewhere")
def test_things_come_home_across_file_systems(home: Home, cache: Path, root: Path, said: list[str]) -> None:
    with overlaid(home, root, said):
        new = root / "xdg" / "new"
        new.mkdir()
        (new / "file").write_text("mine")
        (new / "link").symlink_to("file")
        os.mkfifo(new / "pipe")
        os.mkfifo(root / "xdg" / "pipe")
        (root / "xdg" / "single").write_text("mine")
    assert sorted(os.listdir(cache)) == ["new", "single"]
    assert sorted(os.listdir(cache / "new")) == ["file", "link"]
    assert os.readlink(cache / "new" / "link") == "file"
    assert said == []
    assert os.listdir(root / "xdg") == ["pipe"]


@pytest.mark.usefixtures("elsewhere")
def test_entries_that_cannot_be_moved_home_are_kept_and_named(
    home: Home, cache: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scratch, "_place", full)
    with scratch.isolated_root(home.environment()) as root:
        with overlaid(home, root, said):
            (root / "xdg" / "new").write_text("mine")
            (root / "xdg" / "pytools").mkdir()
        assert said == [f"{root}/xdg/new stays: cannot move it to {cache}/new: No space left on device"]
    assert (root / "xdg" / "new").read_text() == "mine"
    assert os.listdir(cache) == []
    shutil.rmtree(root)


def test_a_folder_that_is_used_again_shows_what_is_there_now(
    home: Home, cache: Path, root: Path, said: list[str]
) -> None:
    (cache / "old").mkdir()
    with overlaid(home, root, said):
        assert os.listdir(root / "xdg") == ["old"]
    (cache / "old").rmdir()
    (cache / "new").mkdir()
    # A link that an earlier run, with other layers, left to what is isolated now.
    (cache / "pytools").mkdir()
    (root / "xdg" / "pytools").symlink_to(cache / "pytools")
    with overlaid(home, root, said):
        assert os.listdir(root / "xdg") == ["new"]


def test_a_forked_child_leaves_its_parents_scratch_alone(home: Home, root: Path, said: list[str]) -> None:
    def leave() -> Iterator[None]:
        with scratch.isolated_root(home.environment()) as folder, overlaid(home, root, said):
            (root / "xdg" / "new").write_text("mine")
            kept.append(folder)
            yield

    kept: list[Path] = []
    block = leave()
    next(block)
    child = os.fork()
    if child == 0:
        next(block, None)
        os._exit(0)
    os.waitpid(child, 0)
    assert kept[0].is_dir()
    assert not (home.path / ".cache").exists()
    next(block, None)
    assert not kept[0].exists()
    assert (home.path / ".cache" / "new").is_file()


def test_a_read_only_scratch_goes_too(home: Home) -> None:
    with scratch.isolated_root(home.environment()) as folder:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b").chmod(stat.S_IRUSR)
        (folder / "a").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert not folder.exists()


def test_a_block_within_a_block_of_the_same_folder_changes_nothing(home: Home, root: Path, said: list[str]) -> None:
    (root / "xdg").mkdir()
    with overlaid(home, root, said, XDG_CACHE_HOME=str(root / "xdg")):
        (root / "xdg" / "new").write_text("mine")
    assert os.listdir(root / "xdg") == ["new"]
