"""Bulk work on entries that are folders in a tree of two levels, with as few system calls as possible.

A :class:`~cachectl.layers.stores.tree.Tree` handles one entry at a time in full detail. To count, search or clear a
hundred thousand entries, this module handles regular entries itself, and leaves others to the tree. The file is also a
program that needs only the standard library, so that other processors can share the work: ``python -I -S walk.py``
reads a share of the work and writes the answers.
"""

from __future__ import annotations

import errno
import io
import marshal
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import subprocess
    from concurrent.futures import Future

#: Errors that mean that a name is free or a link, as in ``disk/presence.py``.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_KIND, _FILE, _FOLDER = 0o170000, stat.S_IFREG, stat.S_IFDIR
#: Deeper than any entry is nested, as in ``cachectl.layers.disk.handles``.
_DEEP = 16
#: Limit on the open folders of an entry; larger entries are left to the tree.
_MOST_FOLDERS = 256
#: Limit on cached paths, so that memory does not grow with the tree.
_MOST_KNOWN = 10_000
#: Seconds of work after which helpers are started; a start takes a twentieth of that.
_ALONE = 0.3
#: Maximum number of processes; more do not read a file system faster.
_MOST_PROCESSES = 8

#: Programs that start this file as a helper.
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?d?")
_GREETING = b"cachectl walk 1\n"

GONE = "already gone"
CHANGED = "changed since it was planned"


class Weight(NamedTuple):
    """One entry: its name in its folder, its files, their bytes, its newest change (ns), and bytes of disk blocks."""

    name: str
    files: int
    bytes: int
    newest: int
    disk: int = 0

    @property
    def stamp(self) -> tuple[int, ...]:
        """Return the version stamp; blocks may be allocated after the last change."""
        return (self.files, self.bytes, self.newest)


class Task(NamedTuple):
    """The description of entries, in types that can be marshalled; patterns are those of ``re``, with flags.

    ``name`` is the pattern of entry names, ``member`` that of each file in an entry; ``hollow`` are files that alone
    make no entry, ``whole`` those that must exist and not be empty. With a ``child`` nothing is weighed: entries with
    something of that name are listed as ``others``. ``first`` are the files to delete first if an entry cannot be
    renamed.
    """

    name: tuple[str, int]
    member: tuple[str, int]
    hollow: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    child: tuple[str, int] | None = None
    first: tuple[str, ...] = ()


class Group(NamedTuple):
    """The content of one folder of the first level: weights of regular entries, and names of others.

    ``others`` is ``None`` if the folder itself could not be read.
    """

    folder: str
    weights: list[Weight]
    others: list[str] | None


class Cleared(NamedTuple):
    """The result of clearing one folder: removed entries, freed bytes, and the names left with reasons.

    ``failed`` has the operating system's error for each name.
    """

    folder: str
    entries: int
    bytes: int
    left: list[tuple[str, str]]
    failed: list[tuple[str, str]]


def weigh(root: int, folders: Sequence[str], task: Task) -> Iterator[Group]:
    """Weigh or search the entries in some folders of an open root; yield each folder once, in any order."""
    for folder, weights, others in _dealt("weigh", (root,), list(folders), task):
        yield Group(folder, [Weight(*weight) for weight in weights], others)


def clear(root: int, trash: int, planned: Sequence[tuple[str, list[Weight]]], task: Task) -> Iterator[Cleared]:
    """Clear planned entries of some folders unless they have changed; yield each folder once.

    An unchanged entry is renamed into the trash folder, and deleted there through the folders that were opened to check
    it. Only for roots that no program uses.
    """
    items = [(folder, [(weight.name, *weight.stamp) for weight in weights]) for folder, weights in planned]
    for answer in _dealt("clear", (root, trash), items, task):
        yield Cleared(*answer)


# ---------------------------------------------------------------------- one folder


class _Hand:
    """Weighs, searches or clears entries of one task, a folder at a time."""

    def __init__(self, handles: Sequence[int], task: Task, *, parent: int | None = None) -> None:
        #: The process that this helper works for, and with which it ends.
        self._parent = parent
        self._root, self._trash = (*handles, -1)[:2]
        self._is_name = re.compile(*task.name).fullmatch
        self._is_member = re.compile(*task.member).fullmatch
        self._is_child = None if task.child is None else re.compile(*task.child).fullmatch
        self._hollow = frozenset(task.hollow)
        self._whole = frozenset(task.whole)
        self._first = task.first
        self._known: set[str] = set()
        self._strangers: set[str] = set()
        self._taken = 0

    def weigh(self, folder: str) -> tuple[str, list[tuple[str, int, int, int, int]], list[str] | None]:
        """Weigh or search the entries of a folder."""
        weights: list[tuple[str, int, int, int, int]] = []
        others: list[str] = []
        try:
            handle = os.open(folder, _FOLDER_FLAGS, dir_fd=self._root)
        except OSError:
            return folder, weights, None
        try:
            for name in filter(self._is_name, os.listdir(handle)):
                try:
                    if self._is_child is None:
                        weights.append((name, *self._look(handle, name, [], [])))
                    elif self._holds_child(handle, name):
                        others.append(name)
                except (OSError, ValueError):  # noqa: PERF203 - an odd entry must not end the rest
                    others.append(name)
        except OSError:
            return folder, [], None
        finally:
            os.close(handle)
        return folder, weights, others

    def clear(self, item: tuple[str, list[tuple[str, int, int, int]]]) -> tuple[Any, ...]:
        """Clear planned entries of a folder."""
        folder, planned = item
        left: list[tuple[str, str]] = []
        failed: list[tuple[str, str]] = []
        entries = freed = 0
        try:
            handle = os.open(folder, _FOLDER_FLAGS, dir_fd=self._root)
        except OSError as error:
            if error.errno in _ABSENT:
                return folder, 0, 0, [(name, GONE) for name, *_ in planned], failed
            return folder, 0, 0, left, [(name, error.strerror or str(error)) for name, *_ in planned]
        try:
            for name, *stamp in planned:
                if self._parent is not None and os.getppid() != self._parent:
                    sys.exit(1)
                try:
                    size = self._clear(handle, name, tuple(stamp))
                except FileNotFoundError:
                    left.append((name, GONE))
                except ValueError as error:
                    left.append((name, str(error)))
                except OSError as error:
                    failed.append((name, error.strerror or str(error)))
                else:
                    entries += 1
                    freed += size
        finally:
            os.close(handle)
        return folder, entries, freed, left, failed

    def _clear(self, handle: int, name: str, stamp: tuple[int, ...]) -> int:
        """Clear one entry; return the freed bytes. Raises :class:`ValueError` if it has changed.

        Files that cannot be deleted stay in the trash folder for the caller.
        """
        files: list[tuple[int, str, int]] = []
        opened: list[tuple[int, int, str]] = []
        freed = 0
        try:
            if not self._is_as_planned(handle, name, stamp, files, opened):
                raise ValueError(CHANGED)
            self._taken += 1
            place = (f"{os.getpid()}-{self._taken}", self._trash)
            in_place = False
            try:
                os.rename(name, place[0], src_dir_fd=handle, dst_dir_fd=place[1])
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # overlayfs cannot rename a folder of a lower layer: delete it in place.
                place, in_place = (name, handle), True
                files.sort(key=lambda file: file[0] != opened[0][1] or file[1] not in self._first)
            try:
                # The name is gone, but its folders are still open.
                for below, file, size in files:
                    os.unlink(file, dir_fd=below)
                    freed += size
                for above, _, folder in reversed(opened[1:]):
                    os.rmdir(folder, dir_fd=above)
                os.rmdir(place[0], dir_fd=place[1])
            except OSError:
                if in_place:
                    raise
        finally:
            for _, below, _ in opened:
                os.close(below)
        return freed

    def _is_as_planned(
        self,
        handle: int,
        name: str,
        stamp: tuple[int, ...],
        files: list[tuple[int, str, int]],
        opened: list[tuple[int, int, str]],
    ) -> bool:
        try:
            return self._look(handle, name, files, opened, keep=True)[:3] == stamp
        except OSError as error:
            # It has been replaced by a link or something else.
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                return False
            raise
        except ValueError:
            return False

    def _look(  # noqa: C901, PLR0912 - one loop with few calls, because it runs a million times
        self,
        handle: int,
        name: str,
        listed: list[tuple[int, str, int]],
        opened: list[tuple[int, int, str]],
        *,
        keep: bool = False,
    ) -> tuple[int, int, int, int]:
        """Weigh one entry. Raises :class:`ValueError` if it is not regular.

        Lists its folders in the order of opening; with ``keep`` they stay open, and its files are listed with the bytes
        that each would free.
        """
        newest = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mtime_ns
        files = total = blocks = 0
        hollow = True
        missing = self._whole
        waiting = [(handle, name, "")]
        try:
            while waiting:
                above, folder, prefix = waiting.pop()
                if prefix.count("/") > _DEEP:
                    raise ValueError(prefix)
                below = os.open(folder, _FOLDER_FLAGS, dir_fd=above)
                opened.append((above, below, folder))
                for item in os.listdir(below):
                    status = os.stat(item, dir_fd=below, follow_symlinks=False)
                    if status.st_mtime_ns > newest:  # noqa: PLR1730 - twice as fast as max
                        newest = status.st_mtime_ns
                    kind = status.st_mode & _KIND
                    path = prefix + item
                    if kind == _FILE:
                        if path not in self._known:
                            self._meet(path)
                        files += 1
                        total += status.st_size
                        blocks += status.st_blocks
                        hollow = hollow and path in self._hollow
                        if status.st_size and path in missing:
                            missing = missing - {path}
                        if keep:
                            # A file with another hard link frees nothing.
                            listed.append((below, item, status.st_size if status.st_nlink == 1 else 0))
                    elif kind == _FOLDER and len(opened) < _MOST_FOLDERS:
                        waiting.append((below, item, path + "/"))
                    else:
                        raise ValueError(path)
        finally:
            if not keep:
                for _, below, _ in opened:
                    os.close(below)
        if hollow or missing:
            raise ValueError(name)
        return files, total, newest, 512 * blocks

    def _holds_child(self, handle: int, name: str) -> bool:
        folder = os.open(name, _FOLDER_FLAGS, dir_fd=handle)
        try:
            names = os.listdir(folder)
        finally:
            os.close(folder)
        return not self._strangers.issuperset(names) and any(map(self._is_wanted, names))

    def _is_wanted(self, name: str) -> bool:
        """Return whether a name matches the child pattern, cached as in :meth:`_meet`."""
        if self._is_child is not None and self._is_child(name):
            return True
        if len(self._strangers) < _MOST_KNOWN:
            self._strangers.add(name)
        return False

    def _meet(self, path: str) -> None:
        """Match a path, with a cache: few kernel names occur in many programs."""
        if not self._is_member(path):
            raise ValueError(path)
        if len(self._known) < _MOST_KNOWN:
            self._known.add(path)


# ---------------------------------------------------------------------- several processes


def _dealt(verb: str, handles: tuple[int, ...], items: list[Any], task: Task) -> Iterator[tuple[Any, ...]]:
    """Do a verb for each item, and share the rest with other processes if it takes long."""
    do = _verb(verb, _Hand(handles, task))
    started = time.monotonic()
    helpers = _processors() - 1
    for done, item in enumerate(items):
        if helpers > 0 and time.monotonic() - started > _ALONE:
            shares = [items[done:][first :: helpers + 1] for first in range(helpers + 1)]
            yield from _together((verb, handles, tuple(task)), shares, do)
            return
        yield do(item)


def _verb(verb: str, hand: _Hand) -> Callable[[Any], tuple[Any, ...]]:
    return hand.clear if verb == "clear" else hand.weigh


def _processors() -> int:
    """Return the number of processes to use; 1 if no other Python can be started."""
    is_python = _PYTHON.fullmatch(os.path.basename(sys.executable or "")) and not getattr(sys, "frozen", False)
    if not is_python or os.name != "posix" or not os.path.isfile(__file__):
        return 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_PROCESSES, usable)


def _together(
    work: tuple[str, tuple[int, ...], tuple[Any, ...]], shares: list[list[Any]], do: Callable[[Any], tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """Share items among other processes and this one, which also does those that failed in another process.

    ``multiprocessing`` is not used: its processes import the user's main module, or are forks of a process in which
    drivers run threads, and a killed one ends them all.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(shares)) as readers, ExitStack() as started:
        answers: list[Future[tuple[bytes, bytes]] | None] = []
        for share in shares[1:]:
            answer = None
            # No process or thread can be started.
            with suppress(OSError, RuntimeError):
                helper = _start(work[1])
                # The caller may stop before the end.
                started.callback(helper.kill)
                answer = readers.submit(helper.communicate, marshal.dumps((os.getpid(), *work, share)))
            answers.append(answer)
        for item in shares[0]:
            yield do(item)
        for share, answer in zip(shares[1:], answers, strict=True):
            done = 0
            for one in () if answer is None else _answers(answer.result()[0]):
                if done == len(share) or not isinstance(one, tuple) or not _is_of(one, share[done]):
                    break
                done += 1
                yield one
            for item in share[done:]:
                yield do(item)


def _is_of(answer: tuple[Any, ...], item: str | tuple[Any, ...]) -> bool:
    """Return whether an answer belongs to an item."""
    folder = item if isinstance(item, str) else item[0]
    return len(answer) in (len(Group._fields), len(Cleared._fields)) and answer[0] == folder


def _start(handles: tuple[int, ...]) -> subprocess.Popen[bytes]:
    import subprocess

    return subprocess.Popen(  # noqa: S603 - our own file
        (sys.executable, "-I", "-S", __file__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=handles,
    )


def _answers(written: bytes) -> Iterator[object]:
    """Yield the answers of a helper in the order of its share, until the output ends."""
    if not written.startswith(_GREETING):
        return
    stream = io.BytesIO(written)
    stream.seek(len(_GREETING))
    with suppress(ValueError, EOFError, TypeError):
        while True:
            yield marshal.load(stream)  # noqa: S302 - our own process wrote it


def _help() -> None:
    parent, verb, handles, task, share = marshal.load(sys.stdin.buffer)  # noqa: S302 - as above
    do = _verb(verb, _Hand(handles, Task(*task), parent=parent))
    sys.stdout.buffer.write(_GREETING)
    for item in share:
        marshal.dump(do(item), sys.stdout.buffer)
        # A finished item is reported even if this process is killed.
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _help()
