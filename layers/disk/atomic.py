"""Changes of files: they are staged next to their place, synced and renamed; and every removal of a file or folder.

Nothing else removes, renames or cuts a file of this machine, except :mod:`cachectl.layers.stores.tree_remove`, which
removes empty folders. Rows are deleted in :mod:`cachectl.layers.stores.rows`, where sqlite also cuts its
log. ``tests/test_rooms.py`` holds that. A file of a remote store is renamed in :mod:`cachectl.exchange.place`.
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
    """Write everything, from the offset ``at`` if given, even if a disk that fills up accepts only partial writes."""
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            written = os.write(handle, rest) if at is None else os.pwrite(handle, rest, at)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest, at = rest[written:], None if at is None else at + written


def cut(handle: int, length: int) -> None:
    """Cut an open file, or extend it by zeros."""
    os.ftruncate(handle, length)


def move_in(staged: str, stage: int, name: str, folder: int) -> None:
    """Rename a staged file into an open folder, over the one that has its name there."""
    os.rename(staged, name, src_dir_fd=stage, dst_dir_fd=folder)


def overwrite(handle: int, old: bytes, new: bytes) -> None:
    """Overwrite the ``old`` content of an open file in place; if there is no room, the file stays unchanged.

    For files that others have open or locked, which must not be replaced by a rename. The added part at the end is
    written first, because only that needs room; an interrupted file may be too long, never too short.
    """
    try:
        write_all(handle, (new[len(old) :],), len(old))
        # Some file systems report only now that there is no room.
        os.fsync(handle)
        write_all(handle, (new[: len(old)],), 0)
    except OSError:
        with suppress(OSError):
            write_all(handle, (old,), 0)
        os.ftruncate(handle, len(old))
        raise
    os.ftruncate(handle, len(new))


def create(name: str, folder: int | None = None, mode: int = 0o600) -> int:
    """Create a file, which must not exist; return its descriptor."""
    return os.open(name, _NEW, mode, dir_fd=folder)


def replace_file(
    path: str | Path, chunks: Iterable[bytes], *, folder: int | None = None, mode: int = 0, new: bool = False
) -> None:
    """Replace a file atomically, or create it; the mode of the old one is kept. Raises :class:`OSError`.

    With ``new`` it raises :class:`FileExistsError` if there is a file. ``folder`` is the open folder of the file, by
    default the parent of ``path``. A new file has the permissions of the umask and those of ``mode``. An interruption
    leaves the old file or the new one. A kill may leave a stage next to it, which the next call removes.
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
            # It is replaced itself, and everybody has its permissions.
            old = None
        stage, handle = _stage(name, folder)
        try:
            stack.callback(os.close, handle)
            if old is not None or mode:
                # Before anything is written to it: others may have no access to the old file.
                permissions = mode | os.fstat(handle).st_mode if old is None else old.st_mode
                os.fchmod(handle, stat.S_IMODE(permissions))
            write_all(handle, chunks)
            os.fsync(handle)
            # Under its lock, so that nobody takes the stage for an abandoned one.
            (place_new if new else os.replace)(stage, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(stage, dir_fd=folder)
            raise
        if folder is not None:
            os.fsync(folder)


def _stage(name: str, folder: int | None) -> tuple[str, int]:
    """Create and lock the stage of a file. The stage that a killed command left for it is removed."""
    import hashlib

    above, last = os.path.split(name)
    stage = os.path.join(above, plain.STAGE + hashlib.sha256(os.fsencode(last)).hexdigest()[:32])
    with suppress(OSError), open(plain.open_plain(stage, dir_fd=folder), "rb") as left:
        if handles.take_flock(left.fileno()) and handles.is_same_file(stage, left.fileno(), dir_fd=folder):
            os.unlink(stage, dir_fd=folder)
    with suppress(FileExistsError):
        handle = create(stage, folder, 0o666)
        # Before the lock, another command may have taken it for an abandoned one, and made its own.
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
    # Another command is writing to the same place, or the file belongs to another user.
    stage = os.path.join(above, plain.own_name())
    return stage, create(stage, folder, 0o666)


def place_new(
    source: str | Path, target: str | Path, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    """Move a file to a free place. Raises :class:`FileExistsError` if the place is taken.

    A hard link, unlike a rename, never replaces a file.
    """
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
    """Remove a file or a link, in an open folder if one is given. Nothing happens if it has gone."""
    with suppress(FileNotFoundError):
        os.unlink(path, dir_fd=folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder of cachectl's own with all that is in it, as far as this user may. Links are not followed."""
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
    """Remove files of a service, by one request if it takes them ``together``; those that have gone do not matter."""
    if together:
        with suppress(FileNotFoundError):
            system.rm(list(paths))
        return
    for path in paths:
        with suppress(FileNotFoundError):
            system.rm_file(path)


def delete(handle: int, name: str, freed: list[int], *, first: Collection[str] = (), depth: int = 0) -> None:
    """Delete a file or a whole folder relative to a handle, and add the bytes of what was deleted to ``freed``.

    The files that ``first`` names are deleted before the others. Links are unlinked, never followed. A failed deletion
    does not stop the others, unless ``first`` names the file; at the end the first :class:`OSError` is raised.
    """
    errors: list[OSError] = []
    with suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=handle, follow_symlinks=False)
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder:
            # An entry may lie in a trash folder.
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
    """Delete a folder by the paths of its files and folders, which were just listed. Links are not followed.

    The paths are those of :func:`~cachectl.layers.disk.handles.gather`, each with the bytes that its deletion adds to
    ``freed``. Raises :class:`OSError`, and leaves the rest, if anything else is in it.
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
    """Make a folder for this process only, locked during the block, and delete it afterwards unless it was renamed.

    Yields its descriptor. The deletion adds to ``freed`` as :func:`delete` does, or what a folder takes that stays.
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
            # The folder itself was made here, so its end frees nothing.
            inside = inside[:-1]
        except OSError:
            try:
                # An empty folder goes even where nothing can be read.
                os.rmdir(name, dir_fd=handle)
            except OSError:
                inside.append(-size)
            raise
        finally:
            if freed is not None:
                freed += inside
