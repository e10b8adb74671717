"""Temporary folders of cachectl, with a record of their owner, so that a later command removes abandoned ones.

Beside the folder ``cachectl-1f…`` lies the file ``cachectl-1f….lock``. The owner holds ``flock`` on it as long as it
lives, and records itself in it. A folder is abandoned if that lock is free, the owner has ended, and no running process
was started with the folder's path in its environment or has a file in it open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachectl.layers.base.facts import Orphan
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.atomic import create, cut, remove_file, remove_tree, write_all
from cachectl.layers.disk.locking import is_same_file, try_flock
from cachectl.layers.disk.locks import node
from cachectl.layers.disk.plain import open_plain, read_plain
from cachectl.layers.disk.presence import status_at
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.host.processes import mentioning, start_of

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment

#: Prefix of the names of temporary folders.
TEMPORARY: Final = "cachectl-"
_NAME: Final = regex(TEMPORARY + r"(?:stage-)?[0-9a-f]{16}")
_LOCK: Final = ".lock"
_KILLED: Final = "a temporary folder left by a cachectl that was killed"
#: Limit on the size of a record, in bytes.
_LARGEST: Final = 16 << 20


@dataclass
class Owned:
    """A temporary folder of this process. ``record`` has the facts that a later command needs to remove it."""

    folder: Path
    record: dict[str, Any] = field(default_factory=dict)
    _handle: int = -1

    @classmethod
    def make(cls, parent: Path, prefix: str, environment: Environment) -> Owned:
        """Make an empty folder with a random name in a private folder, and hold its lock."""
        while True:
            folder = parent / (prefix + os.urandom(8).hex())
            # The lock comes first: a folder without one has no owner.
            handle = create(os.fspath(_lock_of(folder)))
            if _flock(handle) is not False and is_same_file(_lock_of(folder), handle):
                break
            # A sweep of another process took the lock first, and removes the file.
            os.close(handle)
        me = os.getpid()
        owned = cls(folder, {"host": node(), "pid": me, "start": start_of(me, processes=environment.processes)}, handle)
        try:
            owned._write()
            os.mkdir(folder, 0o700)
        except OSError:
            owned.forget()
            raise
        return owned

    def _write(self) -> None:
        import json

        cut(self._handle, 0)
        write_all(self._handle, (json.dumps(self.record).encode(),), 0)

    def forget(self) -> None:
        """Release the lock, and remove its file if the folder has gone."""
        with suppress(OSError):
            if not self.folder.exists():
                remove_file(_lock_of(self.folder))
        with suppress(OSError):
            os.close(self._handle)


@contextmanager
def temporary_folder(environment: Environment | None = None) -> Iterator[Path]:
    """Yield an empty folder that no other user can enter, and delete it afterwards.

    After a kill the next purge or prune deletes it. The environment, by default that of this process, decides where
    temporary folders are. Raises :class:`CachectlError` if there is no private folder, :class:`OSError` if nothing can
    be made in it.
    """
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.disk.private_folders import temporary_parent

    where = environment or Environment.here()
    owned = Owned.make(temporary_parent(where)[0], TEMPORARY, where)
    try:
        yield owned.folder
    finally:
        remove_tree(owned.folder)
        owned.forget()


def abandoned_in(parent: Path, environment: Environment, *, look: bool = False) -> Iterator[Path]:
    """Yield the temporary folders in a private folder that nobody uses any more.

    Each is locked while the caller handles it; if the caller removes it, its lock file is removed too, as are lock
    files without a folder. With ``look`` all lock files stay. Yields nothing on a platform that does not show its
    processes.
    """
    names = sorted(_names(parent))
    shared = bool(names) and network_file_system(parent, mounts=environment.mounts) is not None
    for name in names:
        folder = parent / name
        handle = _taken(folder)
        if handle is None:
            continue
        try:
            record = _record(folder)
            elsewhere = shared and record.get("host") != node()
            if not elsewhere and not _lives(record, environment) and not _is_used(folder, environment):
                if os.path.lexists(folder):
                    yield folder
                if not look and not os.path.lexists(folder):
                    remove_file(_lock_of(folder))
        finally:
            if handle >= 0:
                os.close(handle)


def abandoned_temporaries(environment: Environment) -> tuple[Orphan, ...]:
    """Return the temporary folders of killed commands, measured. Removes nothing."""
    from cachectl.layers.disk.private_folders import temporary_parents

    return tuple(
        _measured(parent, folder.name)
        for parent in temporary_parents(environment)
        for folder in abandoned_in(parent, environment, look=True)
    )


def _measured(parent: Path, name: str) -> Orphan:
    below = os.walk(parent / name)
    paths = (os.path.join(above, path) for above, folders, files in below for path in (*folders, *files))
    steps = [status for path in (str(parent / name), *paths) if (status := status_at(path)) is not None]
    files = [status.st_size for status in steps if stat.S_ISREG(status.st_mode)]
    newest = max((status.st_mtime for status in steps), default=0.0)
    return Orphan(name, parent, sum(files), len(files), newest, _KILLED, idle_only=False)


def _names(parent: Path) -> set[str]:
    """Return the names of the temporary folders in a folder, and of those with only a lock file left."""
    try:
        names = os.listdir(parent)
    except OSError:
        return set()
    return {own for name in names if _NAME.fullmatch(own := name.removesuffix(_LOCK))}


def _taken(folder: Path) -> int | None:
    """Take the lock of a folder; return its descriptor, -1 if there is none, ``None`` if another process holds it."""
    try:
        handle = open_plain(_lock_of(folder), flags=os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # A program that outlived its command has recreated the folder.
        return -1
    except OSError:
        return None
    if _flock(handle) and is_same_file(_lock_of(folder), handle):
        return handle
    os.close(handle)
    return None


def _record(folder: Path) -> Mapping[str, Any]:
    import json

    try:
        record = json.loads(read_plain(_lock_of(folder), limit=_LARGEST))
    except (OSError, ValueError, RecursionError):
        # The owner was killed before it used the folder.
        return {}
    return record if isinstance(record, dict) else {}


def _lives(record: Mapping[str, Any], environment: Environment) -> bool:
    pid, start = record.get("pid"), record.get("start")
    return isinstance(pid, int) and start is not None and start_of(pid, processes=environment.processes) == start


def _is_used(folder: Path, environment: Environment) -> bool:
    return mentioning(folder, processes=environment.processes) is not False


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _flock(handle: int) -> bool | None:
    """Try to take the lock of a file. Return whether that succeeded, ``None`` if there are no such locks."""
    try:
        return try_flock(handle)
    except OSError:
        return None
