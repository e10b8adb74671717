"""Atomic changes of files, which are staged next to their target, synced and renamed; and all removals of files.

Nothing else removes, renames or truncates a local file, except that :mod:`cachectl.layers.stores.tree_remove` removes
empty folders, and sqlite truncates its log in :mod:`cachectl.layers.stores.rows`. ``tests/test_rooms.py`` enforces
that. Files of a remote store are renamed in :mod:`cachectl.exchange.place`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from cachectl.layers.disk import handles, plain

#: Errors of a file system without hard links.
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def write_all(handle: int, chunks: Iterable[bytes], at: int | None = None) -> None:
    """Write everything, from the offset ``at`` if given, even if a nearly full disk accepts only partial writes."""
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            written = os.write(handle, rest) if at is None else os.pwrite(handle, rest, at)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest, at = rest[written:], None if at is None else at + written


def cut(handle: int, length: int) -> None:
    """Truncate an open file, or extend it with zeros."""
    os.ftruncate(handle, length)


def move_in(staged: str, stage: int, name: str, folder: int) -> None:
    """Rename a staged file into an open folder, replacing the file of that name."""
    os.rename(staged, name, src_dir_fd=stage, dst_dir_fd=folder)


def overwrite(handle: int, old: bytes, new: bytes) -> None:
    """Overwrite the ``old`` content of an open file in place; if the disk is full, the file stays unchanged.

    For files that others have open or locked, which must not be replaced by a rename. What exceeds the old length is
    written first, because only that needs space; after an interruption the file may be too long, never too short.
    """
    try:
        write_all(handle, (new[len(old) :],), len(old))
        # Some file systems report a full disk only now.
        os.fsync(handle)
        write_all(handle, (new[: len(old)],), 0)
    except OSError:
        with suppress(OSError):
            write_all(handle, (old,), 0)
        os.ftruncate(handle, len(old))
        raise
    os.ftruncate(handle, len(new))


def create(name: str, folder: int | None = None, mode: int = 0o600) -> int:
    """Create a file, which must not exist yet; return its descriptor."""
    return os.open(name, _NEW, mode, dir_fd=folder)


def replace_file(
    path: str | Path, chunks: Iterable[bytes], *, folder: int | None = None, mode: int = 0, new: bool = False
) -> None:
    """Replace a file atomically and keep its mode, or create it. Raises :class:`OSError`.

    With ``new``, an existing file is a :class:`FileExistsError`. ``folder`` is the open folder of the file, by default
    the parent of ``path``. A new file has the permissions of the umask and those of ``mode``. An interruption leaves
    the old file or the new one; a kill may also leave a stage, which the next call removes.
    """
    above, name = os.path.split(os.path.abspath(path))
    with ExitStack() as stack:
        if folder is None:
            # A writable folder may be unreadable.
            with suppress(PermissionError):
                folder = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, folder)
        if folder is None:
            name = os.path.join(above, name)
        old = plain.status_at(name, dir_fd=folder)
        if old is not None and stat.S_ISLNK(old.st_mode):
            # The link itself is replaced; its mode means nothing.
            old = None
        stage, handle = _stage(name, folder)
        try:
            stack.callback(os.close, handle)
            if old is not None or mode:
                # Before anything is written: others may have no access to the old file.
                permissions = mode | os.fstat(handle).st_mode if old is None else old.st_mode
                os.fchmod(handle, stat.S_IMODE(permissions))
            write_all(handle, chunks)
            os.fsync(handle)
            # While it is locked, so that nobody considers the stage abandoned.
            (place_new if new else os.replace)(stage, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(stage, dir_fd=folder)
            raise
        if folder is not None:
            os.fsync(folder)


def _stage(name: str, folder: int | None) -> tuple[str, int]:
    """Create and lock the stage of a file, after removing one that a killed command left."""
    import hashlib

    above, last = os.path.split(name)
    stage = os.path.join(above, plain.STAGE + hashlib.sha256(os.fsencode(last)).hexdigest()[:32])
    with suppress(OSError), open(plain.open_plain(stage, dir_fd=folder), "rb") as left:
        if handles.take_flock(left.fileno()) and handles.is_same_file(stage, left.fileno(), dir_fd=folder):
            os.unlink(stage, dir_fd=folder)
    with suppress(FileExistsError):
        handle = create(stage, folder, 0o666)
        # Before it was locked, another command may have considered it abandoned and made its own.
        try:
            is_locked = handles.take_flock(handle)
            is_own = handles.is_same_file(stage, handle, dir_fd=folder)
        except OSError:
            os.close(handle)
            remove_file(stage, folder)
            raise
        if is_locked and is_own:
            return stage, handle
        os.close(handle)
        if is_own:
            remove_file(stage, folder)
    # Another command is replacing the same file, or that stage belongs to another user.
    stage = os.path.join(above, plain.own_name())
    return stage, create(stage, folder, 0o666)


def place_new(
    source: str | Path, target: str | Path, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    """Move a file to an unused path by a hard link, which replaces nothing. Raises :class:`FileExistsError`."""
    try:
        os.link(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if plain.status_at(target, dir_fd=dst_dir_fd) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from error
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    else:
        os.unlink(source, dir_fd=src_dir_fd)


# ---------------------------------------------------------------------- removal


def remove_file(path: str | Path, folder: int | None = None) -> None:
    """Remove a file or a link, in an open folder if one is given; do nothing if it does not exist."""
    with suppress(FileNotFoundError):
        os.unlink(path, dir_fd=folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder of cachectl's own with its contents, as far as this user may. Links are not followed."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    if folder.is_symlink() or not folder.exists():
        return
    # Some programs make their cache folders read-only.
    for above, names, _ in os.walk(folder):
        for path in (os.path.join(above, name) for name in names):
            if not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def remove_remote(system: Any, paths: Sequence[str], *, together: bool) -> None:  # noqa: ANN401 - of fsspec
    """Remove files of a remote service, if they exist; ``together`` says that it can remove all in one request."""
    if together:
        with suppress(FileNotFoundError):
            system.rm(list(paths))
        return
    for path in paths:
        with suppress(FileNotFoundError):
            system.rm_file(path)


def delete(handle: int, name: str, freed: list[int], *, first: Collection[str] = (), depth: int = 0) -> None:
    """Delete a file or a folder relative to a handle, and add the bytes of each deleted item to ``freed``.

    The files named in ``first`` are deleted before the others. Links are unlinked, never followed. A failure does not
    stop the other deletions, unless the file is named in ``first``; at the end the first :class:`OSError` is raised.
    """
    errors: list[OSError] = []
    with suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=handle, follow_symlinks=False)
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder:
            # An entry may be inside a trash folder.
            handles.require_shallow(name, depth - 1)
            with handles.opened(name, handle) as folder:
                for child in sorted(os.listdir(folder), key=lambda child: child not in first):
                    try:
                        delete(folder, child, freed, depth=depth + 1)
                    except OSError as error:  # noqa: PERF203 - one must not end the rest
                        errors.append(error)
                        if child in first:
                            break
        if errors:
            raise errors[0]
        (os.rmdir if is_folder else os.unlink)(name, dir_fd=handle)
        # A file with another hard link frees nothing.
        if is_folder or status.st_nlink == 1:
            freed.append(handles.size_of(status))


def delete_listed(handle: int, name: str, listed: Mapping[str, int], freed: list[int]) -> None:
    """Delete a folder by the paths of its contents, which were just listed. Links are not followed.

    The paths are those of :func:`~cachectl.layers.disk.handles.gather`, each with the bytes that its deletion adds to
    ``freed``. Raises :class:`OSError`, and leaves the rest, if the folder contains anything else.
    """
    below: dict[str, dict[str, int]] = {}
    folder = handles.open_folder(name, handle)
    try:
        for path, frees in listed.items():
            child, is_below, rest = path.partition("/")
            if is_below:
                below.setdefault(child, {})[rest] = frees
            elif child:
                os.unlink(child, dir_fd=folder)
                freed.append(frees)
        for child, inner in below.items():
            delete_listed(folder, child, inner, freed)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=handle)
    freed.append(listed[""])


@contextmanager
def own_folder(handle: int, prefix: str, freed: list[int] | None = None) -> Iterator[int]:
    """Make a folder for this process, locked during the block, and delete it afterwards unless it was renamed.

    Yields its descriptor. ``freed`` gets the bytes of each deleted item, or minus those of the folder if it stays.
    """
    name = plain.own_name(prefix)
    os.mkdir(name, 0o700, dir_fd=handle)
    inside: list[int] = []
    size = 0
    try:
        with handles.opened(name, handle) as folder:
            # Another cachectl may be checking briefly whether it is held.
            handles.take_flock(folder, wait=True)
            size = handles.size_of(os.fstat(folder))
            yield folder
    finally:
        try:
            delete(handle, name, inside)
            # Deleting the folder itself, which was made here, frees nothing.
            inside = inside[:-1]
        except OSError:
            try:
                # An empty folder can be removed even if it cannot be read.
                os.rmdir(name, dir_fd=handle)
            except OSError:
                inside.append(-size)
            raise
        finally:
            if freed is not None:
                freed += inside
