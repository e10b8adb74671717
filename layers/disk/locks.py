"""The two kinds of lock that cache owners take, waited for a finite time and never broken."""

from __future__ import annotations

import errno
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.errors import Busy, Refused, Unreachable
from cachectl.layers.disk.handles import status_of
from cachectl.layers.disk.locking import take_flock, wait_until
from cachectl.layers.disk.plain import open_plain, release

#: Seconds to wait for a lock that another process holds.
LOCK_TIMEOUT: Final = 5.0
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_RECORD: Final = "hhqqi4x"
_FOLDER: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
#: Waits for a word, and removes the lock where none comes and the lock is the file that we share.
_WATCH: Final = 'read -r word || { [ "$1" -ef "$2" ] && /bin/rm -f -- "$1"; }'


@contextmanager
def record_lock(
    layer: str, path: Path, *, folder: int, lock_timeout: float = LOCK_TIMEOUT, create: bool = True
) -> Iterator[int]:
    """Hold a POSIX record lock on a whole plain file; yield the open file's descriptor.

    The file is opened, or made, in the open ``folder``, whatever its path has come to mean. The CUDA driver and MIOpen
    lock so; ``flock`` would not exclude them. Raises :class:`Busy` after ``lock_timeout`` seconds, :class:`Unreachable`
    where the file cannot be opened or is no plain file.
    """
    try:
        import fcntl
    except ImportError as error:
        raise Refused(layer, "this platform has no record locks", path) from error
    try:
        handle = open_plain(path.name, dir_fd=folder, flags=os.O_RDWR | (os.O_CREAT if create else 0))
    except OSError as error:
        raise Unreachable(layer, f"cannot open: {error.strerror}", path) from error
    try:
        if not wait_until(lambda: _try(lambda: fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)), lock_timeout):
            raise Busy(layer, f"locked by another process for more than {lock_timeout:g} s", path)
        yield handle
    finally:
        release(handle)


def has_record_structure() -> bool:
    """Return whether this system is known to have the ``struct flock`` that :func:`ask_for_record` packs."""
    return sys.platform == "linux" and struct.calcsize("P") == struct.calcsize("q")


def ask_for_record(handle: int, command: int, kind: int, span: tuple[int, int]) -> int:
    """Do something with a record lock of an open file: set it, remove it, or ask for it. Return the kind of lock found.

    ``command`` and ``kind`` are constants of :mod:`fcntl`, as ``F_GETLK`` and ``F_WRLCK``; ``span`` is start and length
    in bytes. Raises :class:`OSError` for a lock that is not given.
    """
    import fcntl

    answer = fcntl.fcntl(handle, command, struct.pack(_RECORD, kind, os.SEEK_SET, *span, 0))
    found: int = struct.unpack(_RECORD, answer)[0]
    return found


@contextmanager
def presence_lock(
    layer: str,
    path: Path,
    *,
    folder: int | None = None,
    lock_timeout: float = LOCK_TIMEOUT,
    abandoned: Callable[[float], bool] = lambda _age: False,
) -> Iterator[None]:
    """Hold a lock that consists in a file being there, as PyOpenCL's does.

    ``folder`` is the open folder that the lock lies in; without it the parent of ``path`` is opened, which must not be
    a link. The lock stays in that folder when its name comes to mean another one.

    Such a lock outlives a holder that was killed. One of our own names its process, and goes with it: a watcher removes
    it or, if that was killed too, the next cachectl. For a lock of another program ``abandoned`` decides by its age in
    seconds. Raises :class:`Busy` after ``lock_timeout`` seconds; a lock that may be held is never removed, and no other
    file of its name either.
    """
    with ExitStack() as stack:
        try:
            handle = folder if folder is not None else stack.enter_context(_opened(os.open(path.parent, _FOLDER)))
        except OSError as error:
            raise Unreachable(layer, f"cannot lock: {error.strerror}", path) from error
        place = _Place(handle, path)

        def is_made() -> bool:
            while not (made := place.status() is None and _make_lock(layer, place, stack)):
                if not _take_over(place, abandoned):
                    break
            return made

        if not wait_until(is_made, lock_timeout):
            raise _locked_too_long(layer, path, lock_timeout)
        yield


def wait_until_absent(
    layer: str,
    path: Path,
    *,
    lock_timeout: float = LOCK_TIMEOUT,
    abandoned: Callable[[float], bool] = lambda _age: False,
) -> None:
    """Wait until :func:`presence_lock` could take a lock, without taking it or removing an abandoned one.

    Raises :class:`Busy` as it does.
    """
    if not wait_until(lambda: not os.path.lexists(path) or is_abandoned(path, abandoned), lock_timeout):
        raise _locked_too_long(layer, path, lock_timeout)


def is_abandoned(path: Path, abandoned: Callable[[float], bool]) -> bool:
    """Tell whether :func:`presence_lock` would take a lock for one that nobody holds any more."""
    with suppress(OSError), _opened(os.open(path.parent, _FOLDER)) as folder:
        return _nobody_holds(_Place(folder, path), time.time() - path.lstat().st_mtime, abandoned)
    return False


def remove_abandoned(path: Path, abandoned: Callable[[float], bool]) -> bool:
    """Remove a lock that nobody holds any more; return whether that was done."""
    with suppress(OSError), _opened(os.open(path.parent, _FOLDER)) as folder:
        return _take_over(_Place(folder, path), abandoned)
    return False


def _locked_too_long(layer: str, path: Path, lock_timeout: float) -> Busy:
    return Busy(layer, f"locked for more than {lock_timeout:g} s; if no program is running, remove the lock", path)


class _Place(NamedTuple):
    """Where a lock is: an open folder, and its path for messages."""

    folder: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def status(self) -> os.stat_result | None:
        return status_of(self.folder, self.name)


def _let_go(place: _Place, handle: int) -> None:
    # The user may have removed it by hand, as PyOpenCL's own warning says. Another program may have made a new one.
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)):
            os.unlink(place.name, dir_fd=place.folder)


@contextmanager
def _watched(place: _Place, handle: int) -> Iterator[None]:
    """Have a child by that removes our lock should we be killed: left behind, it would fail every build for good.

    The child waits for a word from us, or for the end of the pipe, which is our end. It is in a session of its own,
    so that what ends us does not end it. It shares the open lock, so that the system holds it for the two of us: while
    the child lives, nobody else takes the lock for a dead one.
    """
    import subprocess

    lock = f"/proc/self/fd/{place.folder}/{place.name}" if os.path.isdir("/proc/self/fd") else os.fspath(place.path)
    try:
        child = subprocess.Popen(  # noqa: S603 - a fixed program; what it is told is data
            ["/bin/sh", "-c", _WATCH, "cachectl-lock", lock, f"/proc/self/fd/{handle}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(handle, place.folder),
            cwd="/",
        )
    except OSError:
        # Without a shell, or a process to spare, the next cachectl removes it.
        yield
        return
    try:
        yield
    finally:
        child.communicate(b"done\n")


def _make_lock(layer: str, place: _Place, stack: ExitStack) -> bool:
    """Make the lock, to be removed when the stack ends; return ``False`` where it exists already."""
    try:
        try:
            _link_nameless(place, stack)
        except FileExistsError:
            raise
        except OSError:
            flags = os.O_CREAT | os.O_WRONLY | os.O_EXCL
            _attend(place, os.open(place.name, flags, 0o644, dir_fd=place.folder), stack)
    except FileExistsError:
        return False
    except OSError as error:
        raise Unreachable(layer, f"cannot lock: {error.strerror}", place.path) from error
    return True


def _link_nameless(place: _Place, stack: ExitStack) -> None:
    """Make the lock as a file without a name, with our name in it and a watcher, then link it to its place.

    Raises :class:`OSError` where the system or the file system has no such files.
    """
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    with ExitStack() as attempt:
        handle = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o644, dir_fd=place.folder)
        _attend(place, handle, attempt)
        # Python follows the link to the file itself only with a descriptor of a folder, though none is needed.
        os.link(f"/proc/self/fd/{handle}", place.name, src_dir_fd=handle, dst_dir_fd=place.folder, follow_symlinks=True)
        stack.push(attempt.pop_all())


def _attend(place: _Place, handle: int, stack: ExitStack) -> None:
    """Write our name into a lock, and have it removed when the stack ends or this process is killed."""
    stack.callback(os.close, handle)
    _own(handle)
    stack.enter_context(_watched(place, handle))
    stack.callback(_let_go, place, handle)


def _own(handle: int) -> None:
    """Put our name into a lock.

    The system holds it for as long as we live, so whoever reads the name can tell whether we do. On a full disk it
    stays empty, as PyOpenCL's own is: it holds all the same.
    """
    take_flock(handle)
    with suppress(OSError):
        os.write(handle, _owner())


def _take_over(place: _Place, abandoned: Callable[[float], bool]) -> bool:
    """Remove a lock that nobody holds any more; tell whether that was done.

    Only one cachectl at a time may judge and remove: of two that judged the same dead lock, the second would
    remove what the first, or a program, has locked since. Holding the folder keeps the others out, leaves no file
    and ends with the process. Nobody but cachectl removes a dead lock, so the one that is judged stays where it
    is; only a hand may come between, which the comparison is for.
    """
    # Opened again: the system ties what is held to an open folder, and others use the one that is given.
    with suppress(OSError), _opened(os.open(".", _FOLDER, dir_fd=place.folder)) as folder:
        if not take_flock(folder):
            return False
        judged = os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
        age = time.time() - judged.st_mtime
        if _nobody_holds(place, age, abandoned):
            standing = os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
            if _marks(standing) == _marks(judged):
                os.unlink(place.name, dir_fd=place.folder)
                return True
    return False


def _nobody_holds(place: _Place, age: float, abandoned: Callable[[float], bool]) -> bool:
    """Judge a lock: one of ours, made on this machine, by the system; of another, ask.

    What is neither empty nor one of ours is no lock, but somebody's file of that name.
    """
    with _opened(open_plain(place.name, dir_fd=place.folder)) as handle:
        match = re.fullmatch(rb"(?:cachectl \d+ (.*)\n)?", os.read(handle, 300))
        if match is None:
            return False
        return take_flock(handle) if match[1] == os.fsencode(node()) else abandoned(age)


@contextmanager
def _opened(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)


def _marks(status: os.stat_result) -> tuple[int, ...]:
    """Tell one lock from the next, although a file system may use an inode again."""
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def _owner() -> bytes:
    return b"cachectl %d %s\n" % (os.getpid(), os.fsencode(node()))


def node() -> str:
    """Return the name of this machine."""
    import platform

    return platform.node()


def _try(lock: Callable[[], None]) -> bool:
    try:
        lock()
    except (BlockingIOError, PermissionError):
        # Either is what POSIX allows a refused record lock to say.
        return False
    return True
