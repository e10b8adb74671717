"""Files and folders: what a failed change leaves behind, locks of others, and free space."""

import errno
import fcntl
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.layers import limited, python, write

from cachectl.layers.disk import atomic, handles, plain
from cachectl.layers.disk.room import room_at


def test_a_file_that_cannot_grow_stays_as_it_was(tmp_path: Path) -> None:
    short, long = b"old content", b"other and longer content"
    path = write(tmp_path / "file", short)
    with path.open("r+b", buffering=0) as file:
        # Only a part of the addition is written.
        with limited(resource.RLIMIT_FSIZE, len(short) + 3), pytest.raises(OSError, match="too large"):
            atomic.overwrite(file.fileno(), short, long)
        assert path.read_bytes() == short
        atomic.overwrite(file.fileno(), short, long)
        assert path.read_bytes() == long
        atomic.overwrite(file.fileno(), long, short)
    assert path.read_bytes() == short


def test_a_file_whose_disk_fails_half_way_gets_its_content_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pwrite, failed = write(tmp_path / "file", b"old content"), os.pwrite, list[int]()

    def failing(handle: int, data: bytes, at: int) -> int:
        if at or failed:
            return pwrite(handle, data, at)
        failed.append(pwrite(handle, data[:3], at))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    with path.open("r+b", buffering=0) as file, pytest.raises(OSError, match="Input/output"):
        atomic.overwrite(file.fileno(), b"old content", b"new and longer content")
    assert path.read_bytes() == b"old content"


def test_a_replaced_file_leaves_no_stage_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    atomic.replace_file(tmp_path / "file", [b"new"])
    assert os.listdir(tmp_path) == ["file"]


def test_what_has_just_gone_was_not_left_by_a_command(tmp_path: Path) -> None:
    with handles.opened(str(tmp_path)) as folder:
        assert not handles.is_left_own(folder, "gone", os.fstat(folder))


def test_no_file_is_replaced_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", link)
    staged, taken = write(tmp_path / "staged", "new"), write(tmp_path / "taken", "old")
    with handles.opened(str(tmp_path)) as folder, pytest.raises(FileExistsError):
        atomic.place_new("staged", "taken", src_dir_fd=folder, dst_dir_fd=folder)
    assert (staged.read_text(), taken.read_text()) == ("new", "old")
    atomic.place_new(staged, tmp_path / "free")
    assert ((tmp_path / "free").read_text(), staged.exists()) == ("new", False)


def test_a_folder_of_ours_that_cannot_be_opened_goes(tmp_path: Path) -> None:
    with (
        handles.opened(str(tmp_path)) as folder,
        limited(resource.RLIMIT_NOFILE, folder),
        pytest.raises(OSError, match="Too many open files"),
        atomic.own_folder(folder, "own-"),
    ):
        pass
    assert not os.listdir(tmp_path)


def test_a_link_in_the_place_of_a_folder_of_ours_is_not_followed(tmp_path: Path) -> None:
    inner = tmp_path / "theirs/inner"
    inner.mkdir(parents=True)
    inner.chmod(0o500)
    (tmp_path / "ours").symlink_to(tmp_path / "theirs")
    atomic.remove_tree(tmp_path / "ours")
    assert inner.stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize(("first", "left"), [((), ["b"]), (("b",), ["a", "b", "c"])])
def test_a_failed_deletion_stops_the_others_only_if_it_had_to_be_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...], left: list[str]
) -> None:
    for name in "abc":
        write(tmp_path / "folder" / name, name)
    unlink = os.unlink

    def failing(name: str, **options: Any) -> None:  # noqa: ANN401 - as of os
        if name == "b":
            raise OSError(errno.EIO, "Input/output error")
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", failing)
    freed = list[int]()
    with handles.opened(str(tmp_path)) as handle, pytest.raises(OSError, match="Input/output"):
        atomic.delete(handle, "folder", freed, first=first)
    assert (sorted(os.listdir(tmp_path / "folder")), len(freed)) == (left, 3 - len(left))


def test_reading_drops_no_lock_of_this_process(tmp_path: Path) -> None:
    """The system drops all of them when any descriptor of the file is closed."""
    path, before = write(tmp_path / "file", "content"), len(os.listdir("/proc/self/fd"))
    attempt = python("import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)", path)
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert [plain.read_locked(path, limit=limit) for limit in (-1, 3)] == [b"content", b"con"]
        assert subprocess.run(attempt, stderr=subprocess.DEVNULL, check=False).returncode == 1
    assert plain.read_locked(path) == b"content"
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_room_of_a_file_system_is_in_bytes_and_files(mount: Callable[..., Path], tmp_path: Path) -> None:
    small = mount("-t", "tmpfs", "-o", "size=1m,nr_inodes=10", "tmpfs", on=tmp_path / "small")
    write(small / "file", bytes(4096))
    assert room_at(small / "not/yet/there")[0] == ((1 << 20) - 4096, 8, "the file system")
    endless = mount("-t", "tmpfs", "-o", "size=0,nr_inodes=0", "tmpfs", on=tmp_path / "endless")
    assert room_at(endless)[0] == (None, None, "the file system")
