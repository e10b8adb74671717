"""Many entries weighed at once: folders of files in a tree of two levels, with as few system calls as can be.

A :class:`~cachectl.layers.stores.tree.Tree` looks at one entry at a time and knows all about it. Where only sums are
asked, or marks of everything, this does the same for a hundred thousand of them: what is as it should be is weighed,
and whatever is not is left to the tree to judge. The file runs as a program too, with the standard library alone, so
that other processors can take a share: ``python -I -S walk.py`` reads a :class:`Task` and writes what it has weighed.
"""

from __future__ import annotations

import marshal
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, NamedTuple

_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_KIND, _FILE, _FOLDER = 0o170000, stat.S_IFREG, stat.S_IFDIR
#: More folders than an entry should have open at once: what has more is left to the tree.
_MOST_FOLDERS = 256
#: More paths than this are judged anew each time: memory is not to grow with the tree.
_MOST_KNOWN = 10_000
#: Seconds of work after which it pays to start others: a process takes a twentieth of that.
_ALONE = 0.3
#: No machine reads its file system faster with more.
_MOST_PROCESSES = 8


class Weight(NamedTuple):
    """One entry: its name in its folder, its files and their bytes, and its newest change (ns)."""

    name: str
    files: int
    bytes: int
    newest: int


class Task(NamedTuple):
    """What to weigh, in types that another process can read: patterns are those of ``re``.

    ``name`` is what an entry is called, ``member`` what each file of it must match, each with its flags; ``hollow`` are
    files that alone make no entry, ``whole`` those that must be there and not empty.
    """

    name: tuple[str, int]
    member: tuple[str, int]
    hollow: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


class Group(NamedTuple):
    """What one folder of the first level holds: the entries that are as they should be, and the names of others.

    ``others`` is ``None`` where the folder itself could not be read.
    """

    folder: str
    weights: list[Weight]
    others: list[str] | None


def weigh(root: int, folders: list[str], task: Task) -> Iterator[Group]:
    """Weigh the entries in some folders of an open root, as many processors at it as pay.

    Every folder is yielded once, in no order.
    """
    scale = Scale(task)
    started = time.monotonic()
    helpers = _processors() - 1
    for done, folder in enumerate(folders):
        if helpers > 0 and time.monotonic() - started > _ALONE:
            yield from _together(root, folders[done:], task, helpers)
            return
        yield scale.group(root, folder)


class Scale:
    """Weighs entries of one kind."""

    def __init__(self, task: Task) -> None:
        self._is_name = re.compile(*task.name).fullmatch
        self._is_member = re.compile(*task.member).fullmatch
        self._hollow = frozenset(task.hollow)
        self._whole = frozenset(task.whole)
        self._known: set[str] = set()

    def group(self, root: int, folder: str) -> Group:
        """Weigh what lies in one folder."""
        try:
            handle = os.open(folder, _FOLDER_FLAGS, dir_fd=root)
        except OSError:
            return Group(folder, [], None)
        weights: list[Weight] = []
        others: list[str] = []
        try:
            for name in filter(self._is_name, os.listdir(handle)):
                try:
                    weights.append(self._entry(handle, name))
                except (OSError, ValueError):  # noqa: PERF203 - an odd entry must not end the rest
                    others.append(name)
        except OSError:
            return Group(folder, [], None)
        finally:
            os.close(handle)
        return Group(folder, weights, others)

    def _entry(self, handle: int, name: str) -> Weight:
        """Weigh one entry. Raises :class:`ValueError` where anything about it is not as it should be."""
        # One loop, and no more calls than it takes: it runs a million times.
        newest = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mtime_ns
        files = total = 0
        hollow = True
        lacking = self._whole
        waiting = [(handle, name, "")]
        opened: list[int] = []
        try:
            while waiting:
                above, folder, prefix = waiting.pop()
                below = os.open(folder, _FOLDER_FLAGS, dir_fd=above)
                opened.append(below)
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
                        hollow = hollow and path in self._hollow
                        if status.st_size and path in lacking:
                            lacking = lacking - {path}
                    elif kind == _FOLDER and len(opened) < _MOST_FOLDERS:
                        waiting.append((below, item, path + "/"))
                    else:
                        raise ValueError(path)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        if hollow or lacking:
            raise ValueError(name)
        return Weight(name, files, total, newest)

    def _meet(self, path: str) -> None:
        """Judge a path once: kernels are few, and programs many."""
        if not self._is_member(path):
            raise ValueError(path)
        if len(self._known) < _MOST_KNOWN:
            self._known.add(path)


# ---------------------------------------------------------------------- several processes


def _processors() -> int:
    """Return how many can work at once, none where no other Python can be started."""
    if not sys.executable or os.name != "posix":
        return 0
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_PROCESSES, usable)


def _together(root: int, folders: list[str], task: Task, helpers: int) -> Iterator[Group]:
    """Deal folders out to other processes and this one; what a process could not do is done here."""
    shares = [folders[start :: helpers + 1] for start in range(helpers + 1)]
    started = [_start(root, share, task) for share in shares[1:]]
    scale = Scale(task)
    for folder in shares[0]:
        yield scale.group(root, folder)
    for share, answer in zip(shares[1:], started, strict=True):
        done = set()
        for group in () if answer is None else _read(*answer):
            done.add(group.folder)
            yield group
        for folder in share:
            if folder not in done:
                yield scale.group(root, folder)


def _start(root: int, share: list[str], task: Task) -> tuple[subprocess.Popen[bytes], IO[bytes]] | None:
    try:
        # A pipe would fill up, and the other process wait, while this one is at its own share.
        answer = tempfile.TemporaryFile()  # noqa: SIM115 - open until it is read
        command = (sys.executable, "-I", "-S", __file__)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answer, pass_fds=(root,))  # noqa: S603
        if process.stdin is not None:
            with process.stdin as question:
                marshal.dump((root, share, tuple(task)), question)
    except OSError:
        return None
    return process, answer


def _read(process: subprocess.Popen[bytes], answer: IO[bytes]) -> Iterator[Group]:
    """Yield what another process has weighed, as far as it came."""
    with answer:
        process.wait()
        answer.seek(0)
        while True:
            try:
                folder, weights, others = marshal.load(answer)  # noqa: S302 - our own process wrote it
            except (ValueError, EOFError, TypeError):
                return
            yield Group(folder, [Weight(*weight) for weight in weights], others)


def _help() -> None:
    root, folders, task = marshal.load(sys.stdin.buffer)  # noqa: S302 - as above
    scale = Scale(Task(*task))
    for folder, weights, others in (scale.group(root, folder) for folder in folders):
        marshal.dump((folder, [tuple(weight) for weight in weights], others), sys.stdout.buffer)


if __name__ == "__main__":
    _help()
