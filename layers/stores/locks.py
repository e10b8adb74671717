"""The two kinds of lock that cache owners take, waited for a finite time and never broken."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from cachectl.layers.errors import Busy, Refused, Unreachable
from cachectl.layers.stores.plain import open_plain, release

#: Seconds to wait for a lock that another process holds.
PATIENCE: Final = 5.0
_PAUSE: Final = 0.02
_FOLDER_FLAGS: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
#: Waits for a word, and removes the lock where none comes and the lock is the file that we share.
_WATCH: Final = 'read -r word || { [ "$1" -ef "$2" ] && /bin/rm -f -- "$1"; }'


@contextmanager
def record_lock(layer: str, path: Path, *, patience: float = PATIENCE, create: bool = True) -> Iterator[int]:
    """Hold a POSIX record lock on a whole plain file; yield the open file's descriptor.

    The CUDA driver and MIOpen lock so; ``flock`` would not exclude them. Raises :class:`Busy` after
    ``patience`` seconds, :class:`Unreachable` where the file cannot be opened or is no plain file.
    """
    try:
        import fcntl
    except ImportError as error:
        raise Refused(layer, "this platform has no record locks", path) from error
    try:
        handle = open_plain(path, flags=os.O_RDWR | (os.O_CREAT if create else 0))
    except OSError as error:
        raise Unreachable(layer, f"cannot open: {error.strerror}", path) from error
    try:
        deadline = time.monotonic() + patience
        while not _try(lambda: fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            if time.monotonic() > deadline:
                raise Busy(layer, f"locked by another process for more than {patience:g} s", path)
            time.sleep(_PAUSE)
        yield handle
    finally:
        release(handle)


@contextmanager
def presence_lock(
    layer: str, path: Path, *, patience: float = PATIENCE, abandoned: Callable[[float], bool] = lambda _age: False
) -> Iterator[None]:
    """Hold a lock that consists in a file being there, as PyOpenCL's does.

    Such a lock outlives a holder that was killed. One of our own says whose it is, and goes with its process, by the
    hand of a watcher or, where that was killed too, of the next cachectl; of another, ``abandoned`` judges by its age
    in seconds. Raises :class:`Busy` after ``patience``
    seconds; a lock that may be held is never removed, nor is what merely has its name.
    """
    deadline = time.monotonic() + patience
    while True:
        with ExitStack() as stack:
            if not os.path.lexists(path) and _make_lock(layer, path, stack):
                yield
                return
        if _take_over(path, abandoned):
            continue
        if time.monotonic() > deadline:
            raise _locked_too_long(layer, path, patience)
        time.sleep(_PAUSE)


def wait_until_absent(
    layer: str, path: Path, *, patience: float = PATIENCE, abandoned: Callable[[float], bool] = lambda _age: False
) -> None:
    """Wait until :func:`presence_lock` could take a lock, without taking it or removing an abandoned one.

    Raises :class:`Busy` as it does.
    """
    deadline = time.monotonic() + patience
    while os.path.lexists(path):
        with suppress(OSError):
            if _nobody_holds(path, time.time() - path.lstat().st_mtime, abandoned):
                return
        if time.monotonic() > deadline:
            raise _locked_too_long(layer, path, patience)
        time.sleep(_PAUSE)


def is_abandoned(path: Path, abandoned: Callable[[float], bool]) -> bool:
    """Tell whether :func:`presence_lock` would take a lock for one that nobody holds any more."""
    with suppress(OSError):
        return _nobody_holds(path, time.time() - path.lstat().st_mtime, abandoned)
    return False


def remove_abandoned(path: Path, abandoned: Callable[[float], bool]) -> bool:
    """Remove a lock that nobody holds any more; return whether that was done."""
    return _take_over(path, abandoned)


def _locked_too_long(layer: str, path: Path, patience: float) -> Busy:
    return Busy(layer, f"locked for more than {patience:g} s; if no program is running, remove the lock", path)


def _let_go(path: Path, handle: int) -> None:
    # Somebody may have removed it by hand, as PyOpenCL's own warning says; then it is another's by now.
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), path.lstat()):
            path.unlink()


@contextmanager
def _watched(path: Path, handle: int) -> Iterator[None]:
    """Have a child by that removes our lock should we be killed: left behind, it would fail every build for good.

    The child waits for a word from us, or for the end of the pipe, which is our end. It is in a session of its own,
    so that what ends us does not end it. It shares the open lock, so that the system holds it for the two of us: while
    the child lives, nobody else takes the lock for a dead one.
    """
    import subprocess

    try:
        child = subprocess.Popen(  # noqa: S603 - a fixed program; what it is told is data
            ["/bin/sh", "-c", _WATCH, "cachectl-lock", os.fspath(path), f"/proc/self/fd/{handle}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(handle,),
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


def _make_lock(layer: str, path: Path, stack: ExitStack) -> bool:
    """Make the lock, to be let go when the stack ends; tell whether that was done, or it is there already."""
    try:
        try:
            _link_nameless(path, stack)
        except FileExistsError:
            raise
        except OSError:
            _attend(path, os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644), stack)
    except FileExistsError:
        return False
    except OSError as error:
        raise Unreachable(layer, f"cannot lock: {error.strerror}", path) from error
    return True


def _link_nameless(path: Path, stack: ExitStack) -> None:
    """Make the lock as a file without a name, with our name in it and a watcher by, then link it to its place.

    Raises :class:`OSError` where the system or the file system has no such files.
    """
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    with ExitStack() as attempt:
        handle = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o644)
        _attend(path, handle, attempt)
        # With a descriptor of a folder, though none is needed, Python follows the link to the file itself.
        os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=handle, follow_symlinks=True)
        stack.push(attempt.pop_all())


def _attend(path: Path, handle: int, stack: ExitStack) -> None:
    """See to it that a lock goes when the stack ends, or we are killed, and bears our name."""
    stack.callback(os.close, handle)
    _own(handle)
    stack.enter_context(_watched(path, handle))
    stack.callback(_let_go, path, handle)


def _own(handle: int) -> None:
    """Put our name into a lock.

    The system holds it for as long as we live, so whoever reads the name can tell whether we do. On a full disk it
    stays empty, as PyOpenCL's own is: it holds all the same.
    """
    _hold(handle)
    with suppress(OSError):
        os.write(handle, _owner())


def _take_over(path: Path, abandoned: Callable[[float], bool]) -> bool:
    """Remove a lock that nobody holds any more; tell whether that was done.

    Only one cachectl at a time may judge and remove: of two that judged the same dead lock, the second would
    remove what the first, or a program, has locked since. Holding the folder keeps the others out, leaves no file
    and ends with the process. Nobody but cachectl removes a dead lock, so the one that is judged stays where it
    is; only a hand may come between, which the comparison is for.
    """
    with suppress(OSError), _opened(os.open(path.parent, _FOLDER_FLAGS)) as folder:
        if not _hold(folder):
            return False
        judged = path.lstat()
        if _nobody_holds(path, time.time() - judged.st_mtime, abandoned) and _marks(path.lstat()) == _marks(judged):
            path.unlink()
            return True
    return False


def _nobody_holds(path: Path, age: float, abandoned: Callable[[float], bool]) -> bool:
    """Judge a lock: one of ours, made on this machine, by the system; of another, ask.

    What is neither empty nor one of ours is no lock, but somebody's file of that name.
    """
    with _opened(open_plain(path)) as handle:
        match = re.fullmatch(rb"(?:cachectl \d+ (.*)\n)?", os.read(handle, 300))
        if match is None:
            return False
        return _hold(handle) if match[1] == _host() else abandoned(age)


@contextmanager
def _opened(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)


def _hold(handle: int) -> bool:
    """Lock an open file or folder, as long as it is open, unless somebody else has; tell whether that was done."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _marks(status: os.stat_result) -> tuple[int, ...]:
    """Tell one lock from the next, although a file system may use an inode again."""
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def _owner() -> bytes:
    return b"cachectl %d %s\n" % (os.getpid(), _host())


def _host() -> bytes:
    import platform

    return os.fsencode(platform.node())


def _try(lock: Callable[[], None]) -> bool:
    try:
        lock()
    except (BlockingIOError, PermissionError):
        # Either is what POSIX allows a refused record lock to say.
        return False
    return True
