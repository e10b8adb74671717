"""Access below an open folder, one path component at a time and without following links; and locks."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cachectl.layers.disk import plain

#: Errors of a full file system, an exhausted quota or a file size limit.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Bytes of a small sqlite journal.
_PROBE = 1 << 15
#: Seconds between two attempts to take a lock.
_PAUSE = 0.02
#: More levels than any entry has.
_DEEP = 16
#: The contents of a folder, by their paths below it.
Statuses = dict[str, os.stat_result]
#: Windows has no blocks.
_HAS_BLOCKS = hasattr(os.stat_result, "st_blocks")
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


def probe_room(folder: Path, size: int = _PROBE) -> None:
    """Write and remove a file of ``size`` bytes: no call reports quotas reliably. Raises :class:`OSError`."""
    import tempfile

    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())


def open_folder(name: str, handle: int | None = None) -> int:
    """Open a folder that is not a link; return its descriptor."""
    return os.open(name, _FOLDER_FLAGS, dir_fd=handle)


@contextmanager
def opened_root(path: Path) -> Iterator[int | None]:
    """Open a root for a block, following a link; yield ``None`` if there is no such folder."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError as error:
        if not plain.means_absent(error):
            raise
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def opened(name: str, handle: int | None = None) -> Iterator[int]:
    """Open a folder that is not a link, for a block."""
    folder = open_folder(name, handle)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def open_below(handle: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int | None]:
    """Open a folder below a handle for a block, component by component; ``None`` if one is missing or a link.

    Raises :class:`OSError` if that cannot be determined, or if a folder cannot be made.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(make_below(handle, parts, make=make))
        except OSError as error:
            if make or not (plain.means_absent(error) or error.errno == errno.ELOOP):
                raise
            folder = None
        yield folder


@contextmanager
def make_below(handle: int, parts: Sequence[str], *, make: bool = True) -> Iterator[int]:
    """Open a folder below a handle for a block, making missing folders. Raises :class:`OSError`."""
    with ExitStack() as stack:
        for part in parts:
            if make and plain.status_at(part, dir_fd=handle) is None:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=handle)
            handle = stack.enter_context(opened(part, handle))
        yield handle


def require_shallow(name: str, depth: int) -> None:
    """Raise :class:`OSError` for a folder that is nested more deeply than those of any entry."""
    if depth > _DEEP:
        raise OSError(errno.ELOOP, "nested more deeply than any entry", name)


def walk(handle: int, name: str, path: str = "") -> Iterator[tuple[int, str, str]]:
    """Yield every file (also links, pipes and so on) in a folder, or the file itself; links are not followed.

    Each is an open folder, a name in it, and the path below the start, ``""`` for the start itself.
    """
    if not stat.S_ISDIR(os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode):
        yield handle, name, path
        return
    require_shallow(name, path.count("/"))
    with opened(name, handle) as folder:
        for child in os.listdir(folder):
            yield from walk(folder, child, f"{path}/{child}" if path else child)


def gather(handle: int, name: str, files: Statuses, folders: Statuses, above: str = "") -> None:
    """Add the contents of a folder to ``files`` (also links, pipes and so on) and ``folders``, which gets itself too.

    Keys are paths below the folder; those of folders end with a slash, and that of the folder itself is empty. Links
    are not followed, and files that vanish meanwhile are excluded.
    """
    require_shallow(name, above.count("/"))
    folder = open_folder(name, handle)
    try:
        folders[above] = os.fstat(folder)
        for child in list(os.scandir(folder)):
            try:
                if child.is_dir(follow_symlinks=False):
                    gather(folder, child.name, files, folders, f"{above}{child.name}/")
                else:
                    files[above + child.name] = child.stat(follow_symlinks=False)
            except FileNotFoundError:  # noqa: PERF203 - one must not end the rest
                continue
    finally:
        os.close(folder)


def is_left_own(root: int, name: str, status: os.stat_result) -> bool:
    """Return whether a folder or file of cachectl in an open root was left by a command that has ended.

    One that belongs neither to this user nor to the owner of the root, such as a temporary folder, is not trusted and
    never removed. Raises :class:`OSError` if that cannot be determined.
    """
    if status.st_uid not in (os.geteuid(), os.fstat(root).st_uid) or status.st_mode & 0o022:
        return False
    try:
        handle = open_folder(name, root) if stat.S_ISDIR(status.st_mode) else plain.open_plain(name, dir_fd=root)
    except OSError as error:
        if plain.means_no_file(error):
            return False
        raise
    try:
        # A running cachectl holds the lock. Shared, so that several checks do not block each other.
        return bool(take_flock(handle, shared=True))
    finally:
        os.close(handle)


def size_of(status: os.stat_result) -> int:
    """Return the bytes on disk of a file or folder, as ``du`` does; its length if the system does not report them."""
    # POSIX leaves the unit open; Linux, macOS and the BSDs use 512 bytes.
    return 512 * status.st_blocks if _HAS_BLOCKS else status.st_size


# ---------------------------------------------------------------------- locks on open files


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait at most ``seconds`` until a condition holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)
    return True


def try_flock(handle: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Take ``flock`` on an open file or folder; without ``wait``, return ``False`` if another process holds it.

    Closing the file releases the lock. Raises :class:`OSError` if the file system has no such locks.
    """
    import fcntl

    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def take_flock(handle: int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Take ``flock`` like :func:`try_flock`; return ``None`` if there are no such locks."""
    with suppress(OSError):
        return try_flock(handle, shared=shared, wait=wait)
    return None


def try_record_lock(handle: int, length: int = 0, start: int = 0) -> bool:
    """Take a POSIX record lock, or return ``False``. Raises :class:`OSError` if the file system has no such locks."""
    import fcntl

    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):
        # POSIX allows either error for a refused record lock.
        return False
    return True


def is_written_elsewhere(handle: int) -> bool | None:
    """Return whether any process on this machine has a file open for writing that we have open for reading.

    ``None`` if unknown. Linux answers for hidden processes and those in containers too: it grants a read lease only if
    no process has the file open for writing, see fcntl(2). A process that opens it meanwhile has to wait.
    """
    try:
        import fcntl
        import signal

        # The default signal to the holder of a lease would end this process.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except (OSError, AttributeError, ImportError):
        return None
    return False


def is_same_file(path: str | os.PathLike[str], handle: int, *, dir_fd: int | None = None) -> bool:
    """Return whether a path still leads to an open file, which another process may have replaced."""
    try:
        return os.path.samestat(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False
