"""The kinds of lock that libraries take on their caches, with a timeout and never broken."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from cachectl.layers.base.environment import LOCK_TIMEOUT, node
from cachectl.layers.base.errors import Busy, Unreachable
from cachectl.layers.disk import handles, plain
from cachectl.layers.disk.atomic import create, remove_file


def require(layer: str, path: Path, take: Callable[[], bool], seconds: float, advice: str = "") -> None:
    """Wait for a lock. Raises :class:`Busy`."""
    if not handles.wait_until(take, seconds):
        raise Busy(layer, f"locked by another process for more than {seconds:g} s{advice}", path)


@contextmanager
def record_lock(layer: str, path: Path, *, folder: int, lock_timeout: float = LOCK_TIMEOUT) -> Iterator[int]:
    """Hold a POSIX record lock on a whole plain file; yield the open file's descriptor.

    The file is opened, or made, in the open ``folder``, even if its path now leads elsewhere. The CUDA driver and
    MIOpen use such locks; ``flock`` would not exclude them. Raises :class:`Busy` after ``lock_timeout`` seconds,
    :class:`Unreachable` if the file cannot be opened or is no plain file.
    """
    try:
        handle = plain.open_plain(path.name, dir_fd=folder, flags=os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise Unreachable(layer, f"cannot open: {error.strerror}", path) from error
    try:
        require(layer, path, partial(handles.try_record_lock, handle), lock_timeout)
        yield handle
    finally:
        plain.release(handle)


@contextmanager
def file_lock(
    layer: str, path: Path, *, folder: int | None = None, lock_timeout: float = LOCK_TIMEOUT
) -> Iterator[int | None]:
    """Hold ``flock`` on a plain file, as Intel's driver does; yield its descriptor, ``None`` if there is no such file.

    The file is opened in the open ``folder``, if one is given. If it was replaced during the wait, the new one is
    locked instead. Raises as :func:`record_lock`.
    """
    name = path if folder is None else path.name
    while True:
        try:
            handle = plain.open_plain(name, dir_fd=folder, flags=os.O_RDWR)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise Unreachable(layer, f"cannot open: {error.strerror}", path) from error
        try:
            require(layer, path, partial(handles.try_flock, handle), lock_timeout)
            if handles.is_same_file(name, handle, dir_fd=folder):
                yield handle
                return
        finally:
            os.close(handle)


# ---------------------------------------------------------------------- locks that exist while they are held


@contextmanager
def presence_lock(
    layer: str,
    path: Path,
    *,
    folder: int | None = None,
    lock_timeout: float = LOCK_TIMEOUT,
    abandoned: Callable[[float], bool] = lambda _age: False,
) -> Iterator[None]:
    """Hold a lock that is the existence of a file, as PyOpenCL's is.

    ``folder`` is the open folder of the lock; without it the parent of ``path`` is opened, which must not be a link.
    The lock stays in that folder even if another folder takes its name.

    Such a lock outlives a killed holder. Our own name their process, and the next cachectl removes those of a process
    that has ended. For a lock of another program ``abandoned`` decides by its age in seconds. Raises :class:`Busy`
    after ``lock_timeout`` seconds. Never removes a lock that may be held, nor any other file of its name.
    """
    with ExitStack() as stack:
        try:
            place = stack.enter_context(handles.opened(str(path.parent))) if folder is None else folder

            def is_made() -> bool:
                while plain.status_at(path.name, dir_fd=place) is not None or not _make_lock(place, path.name, stack):
                    if not _take_over(place, path.name, abandoned):
                        return False
                return True

            require(layer, path, is_made, lock_timeout, "; if no program is running, remove the lock")
        except Busy:
            raise
        except OSError as error:
            raise Unreachable(layer, f"cannot lock: {error.strerror}", path) from error
        yield


def is_abandoned(path: Path, abandoned: Callable[[float], bool], *, remove: bool = False) -> bool:
    """Return whether :func:`presence_lock` would consider a lock abandoned; with ``remove``, whether it was removed."""
    with suppress(OSError), handles.opened(str(path.parent)) as folder:
        if remove:
            return _take_over(folder, path.name, abandoned)
        return _nobody_holds(folder, path.name, abandoned)
    return False


def _make_lock(folder: int, name: str, stack: ExitStack) -> bool:
    """Make a lock that names us, to be removed when the stack ends; return ``False`` if it exists already.

    The file gets its name last, so that a kill leaves no lock without an owner. File systems without unnamed files
    leave an empty one in that moment, which only its age shows to be abandoned.
    """
    unnamed = None
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with suppress(OSError):
            unnamed = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o644, dir_fd=folder)
    try:
        handle = create(name, folder, 0o644) if unnamed is None else unnamed
        stack.callback(os.close, handle)
        # Others see by ``flock`` whether we live.
        handles.take_flock(handle)
        with suppress(OSError):
            # On a full disk the lock stays empty like PyOpenCL's own, and is still valid.
            os.write(handle, b"cachectl %d %s\n" % (os.getpid(), os.fsencode(node())))
        if unnamed is not None:
            os.link(f"/proc/self/fd/{unnamed}", name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    stack.callback(_let_go, folder, name, handle)
    return True


def _let_go(folder: int, name: str, handle: int) -> None:
    # The user may have removed it by hand, as PyOpenCL's warning advises, and another program may have made a new one.
    if handles.is_same_file(name, handle, dir_fd=folder):
        remove_file(name, folder)


def _take_over(folder: int, name: str, abandoned: Callable[[float], bool]) -> bool:
    """Remove an abandoned lock; return whether it was removed.

    Only one cachectl at a time may check and remove: of two that found the same abandoned lock, the second would remove
    the new lock of the first, or of a program. ``flock`` on the folder excludes the others, leaves no file and ends
    with the process. Only cachectl removes abandoned locks; the comparison detects one that was removed by hand.
    """
    # Opened again, because flock belongs to the open folder and others use the given one.
    with suppress(OSError), handles.opened(".", folder) as own:
        if not handles.take_flock(own):
            return False
        judged = _stamp(folder, name)
        if _nobody_holds(folder, name, abandoned) and _stamp(folder, name) == judged:
            remove_file(name, folder)
            return True
    return False


def _nobody_holds(folder: int, name: str, abandoned: Callable[[float], bool]) -> bool:
    """Return whether a lock is abandoned: by ``flock`` for our own of this machine, by ``abandoned`` for others.

    A file that is neither empty nor one of ours is no lock.
    """
    handle = plain.open_plain(name, dir_fd=folder)
    try:
        match = re.fullmatch(rb"(?:cachectl \d+ (.*)\n)?", os.read(handle, 300))
        if match is None:
            return False
        is_ours = match[1] == os.fsencode(node())
        return bool(handles.take_flock(handle)) if is_ours else abandoned(time.time() - os.fstat(handle).st_mtime)
    finally:
        os.close(handle)


def _stamp(folder: int, name: str) -> tuple[int, ...]:
    """Return a version stamp that differs between locks even if the file system reuses an inode."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
