"""The two kinds of lock that cache owners take, waited for a finite time and never broken."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cachectl.layers.errors import Busy, Refused, Unreachable
from cachectl.layers.stores.plain import open_plain, read_plain

#: Seconds to wait for a lock that another process holds.
PATIENCE: Final = 5.0
_PAUSE: Final = 0.02
_OWNER: Final = b"cachectl %d %s\n"


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
        os.close(handle)


@contextmanager
def presence_lock(
    layer: str, path: Path, *, patience: float = PATIENCE, abandoned: Callable[[float], bool] = lambda _age: False
) -> Iterator[None]:
    """Hold a lock that consists in a file being there, as PyOpenCL's does.

    Such a lock outlives a holder that was killed. One of our own says whose it is, and goes once its process
    is gone; of another, ``abandoned`` judges by its age in seconds. Raises :class:`Busy` after ``patience``
    seconds; a lock that may be held is never removed.
    """
    deadline = time.monotonic() + patience
    while not _make_lock(layer, path):
        if _dead_cachectl(path) or abandoned(_age(path)):
            with suppress(FileNotFoundError):
                path.unlink()
        elif time.monotonic() > deadline:
            raise Busy(layer, f"locked for more than {patience:g} s; if no program is running, remove the lock", path)
        else:
            time.sleep(_PAUSE)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def _make_lock(layer: str, path: Path) -> bool:
    try:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    except OSError as error:
        raise Unreachable(layer, f"cannot lock: {error.strerror}", path) from error
    # On a full disk the lock stays empty, as PyOpenCL's own is: it holds all the same.
    with suppress(OSError):
        os.write(handle, _OWNER % (os.getpid(), _host()))
    os.close(handle)
    return True


def _dead_cachectl(path: Path) -> bool:
    """Tell whether a lock is one of ours, made on this machine by a process that is gone."""
    try:
        match = re.fullmatch(rb"cachectl (\d+) (.*)\n", read_plain(path, limit=300))
    except OSError:
        return False
    if match is None or match[2] != _host():
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _host() -> bytes:
    return os.fsencode(platform.node())


def _try(lock: Callable[[], None]) -> bool:
    try:
        lock()
    except (BlockingIOError, PermissionError):
        # Either is what POSIX allows a refused record lock to say.
        return False
    return True
