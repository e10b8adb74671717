"""Temporary folders of cachectl, with a record of their owner, so that a later command can remove abandoned ones.

The owner of the folder ``cachectl-1f…`` records itself in the file ``cachectl-1f….lock`` next to it, and holds
``flock`` on that while it runs. A folder is abandoned if the lock is free and has a record, the owner has ended, and no
running process was started with the folder's path in its environment or has a file in it open. Without a record,
nothing shows that the folder is cachectl's, so it stays.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base import processes
from cachectl.layers.base.environment import Environment, node, user_name, user_state_folder
from cachectl.layers.base.errors import PARSE_ERRORS, CachectlError
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.text import printable
from cachectl.layers.disk import atomic, handles, place, plain, trust
from cachectl.layers.disk.place import Use

#: Prefix of the names of temporary folders.
TEMPORARY = "cachectl-"
_NAME = regex(TEMPORARY + r"(?:stage-)?[0-9a-f]{16}")
_LOCK = ".lock"
#: Limit on the size of a record, in bytes.
_LARGEST = 16 << 20


class _Owner(NamedTuple):
    """The creator of a folder: the machine, the process, and its start in clock ticks if the system shows that."""

    host: str
    pid: int
    start: int | None


@contextmanager
def owned_folder(parent: Path, prefix: str, environment: Environment) -> Iterator[Path]:
    """Yield an empty folder with a random name in a private folder, hold its lock, and delete it afterwards.

    A forked child leaves the deletion to the process that made the folder.
    """
    from cachectl.layers.base.documents import encode_json

    owner = os.getpid()
    while True:
        folder = parent / (prefix + os.urandom(8).hex())
        # The lock comes first: a folder without one has no owner.
        lock = atomic.create(os.fspath(_lock_of(folder)))
        if handles.take_flock(lock) is not False and handles.is_same_file(_lock_of(folder), lock):
            break
        # Another process took the lock first, to remove abandoned folders, and removes the file.
        os.close(lock)
    record = _Owner(node(), owner, processes.start_of(owner, processes=environment.processes))
    try:
        atomic.write_all(lock, (encode_json(record._asdict()),))
        os.mkdir(folder, 0o700)
        yield folder
    finally:
        if os.getpid() == owner:
            with suppress(OSError):
                _remove(folder)
            with suppress(OSError):
                os.close(lock)


def _remove(folder: Path) -> bool:
    """Remove a temporary folder and then its lock file; return whether the folder was removed."""
    atomic.remove_tree(folder)
    if os.path.lexists(folder):
        return False
    atomic.remove_file(_lock_of(folder))
    return True


@contextmanager
def temporary_folder(environment: Environment, notice: Callable[[str], None] = lambda _: None) -> Iterator[Path]:
    """Yield an empty folder that no other user can enter, and delete it afterwards.

    After a kill, the next purge or prune deletes it. It is in the environment's temporary folder, or elsewhere if that
    is not private or libraries cannot use it; ``notice`` gets a line about that. Raises :class:`CachectlError` if there
    is no suitable place, :class:`OSError` if the folder cannot be created.
    """
    home = environment.home_folder
    try:
        parent = private_folder(environment.temporary)
        place.require_serving(parent, Use, home)
    except CachectlError as reason:
        elsewhere = _scratch_folder(environment)
        try:
            parent = private_folder(elsewhere, make=True)
            place.require_serving(parent, Use, home)
        except CachectlError as error:
            advice = "set TMPDIR to a folder of mode 700"
            raise CachectlError(f"no place for temporary folders: {reason}; {error}; {advice}") from error
        notice(f"{reason}; using {elsewhere} for temporary folders")
    with owned_folder(parent, TEMPORARY, environment) as folder:
        yield folder


def _abandoned(environment: Environment, parents: Iterable[Path]) -> Iterator[Path]:
    """Yield the abandoned temporary folders in private folders, including those of which only a lock file is left.

    Each is locked while the caller handles it. Yields nothing on a platform that does not show its processes.
    """
    for parent in parents:
        names: set[str] = set()
        with suppress(OSError):
            names = {own for name in os.listdir(parent) if _NAME.fullmatch(own := name.removesuffix(_LOCK))}
        is_shared = bool(names) and processes.network_file_system(environment, parent) is not None
        for folder in map(parent.joinpath, sorted(names)):
            with _taken(_lock_of(folder)) as owner:
                if owner is None or (is_shared and owner.host != node()):
                    continue
                start = processes.start_of(owner.pid, environment.processes)
                is_running = owner.start is not None and owner.start == start
                if not is_running and processes.mentioning(folder, environment.processes) is False:
                    yield folder


def remove_abandoned(environment: Environment, parents: Iterable[Path] | None = None) -> int:
    """Remove temporary folders that killed commands left in private folders ``parents``; return their number."""
    removed = 0
    for folder in _abandoned(environment, temporary_parents(environment) if parents is None else parents):
        is_there = os.path.lexists(folder)
        removed += _remove(folder) and is_there
    return removed


def abandoned_temporaries(environment: Environment) -> tuple[Path, ...]:
    """Return the temporary folders of killed commands. Removes nothing."""
    return tuple(filter(os.path.lexists, _abandoned(environment, temporary_parents(environment))))


@contextmanager
def _taken(lock: Path) -> Iterator[_Owner | None]:
    """Hold a lock for a block; yield its record, ``None`` if another process holds it or it is not cachectl's."""
    from cachectl.layers.base.documents import parse_json

    with ExitStack() as stack:
        owner = None
        with suppress(OSError, *PARSE_ERRORS):
            handle = plain.open_plain(lock, flags=os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            if handles.take_flock(handle) and handles.is_same_file(lock, handle):
                owner = _Owner(**parse_json(plain.read_plain(lock, limit=_LARGEST)))
        yield owner if owner is not None and type(owner.pid) is int and owner.pid > 0 else None


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


# ---------------------------------------------------------------------- private folders


def private_folder(place: Path, *, make: bool = False) -> Path:
    """Return ``place`` if this user owns it and its mode is 0700, else such a folder ``cachectl-UID`` in it.

    ``cachectl-UID`` is created if missing and never removed, so that nobody else can create it while a program that was
    started with its path still runs. With ``make``, a missing ``place`` is created with mode 0700. Raises
    :class:`CachectlError` if another user could replace the folder or owns a link on its path, or if that fails.
    """
    try:
        folder, reason = _own_place(place, make=make)
    except OSError as error:
        folder, reason = Path(error.filename or place), error.strerror
    if reason is not None:
        raise CachectlError(f"{printable(folder)}: {reason}")
    return folder


def _own_place(place: Path, *, make: bool) -> tuple[Path, str | None]:
    """Return the folder, and why it is not private, if so."""
    has_users = hasattr(os, "geteuid")
    if has_users and (owner := trust.deciding_owner(place)) is not None:
        return place, f"a part of its path belongs to {user_name(owner)}, who can replace it"
    place = Path(os.path.realpath(place))
    missing = [folder for folder in (*reversed(place.parents), place) if make and not folder.exists()]
    for present, folders in ((missing[0].parent if missing else place, missing), (place, [])):
        if (reason := trust.shared_because(present, sticky=True)) is not None:
            return present, f"others can replace its contents: {reason}"
        for folder in folders:
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
    # On Windows the temporary folder is private.
    if not has_users or _why_not_private(place) is None:
        return place, None
    own = _own_folder_in(place)
    with suppress(FileExistsError):
        os.mkdir(own, 0o700)
    return own, _why_not_private(own)


def _own_folder_in(place: Path) -> Path:
    return place / f"cachectl-{os.geteuid()}"


def _why_not_private(folder: Path) -> str | None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder, or is a link; remove it, or name another folder"
    if status.st_uid != os.geteuid():
        return f"belongs to {user_name(status.st_uid)}, who can replace its contents; name another folder"
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"others have access to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod 700 it"
    return None


def temporary_parents(environment: Environment) -> Iterator[Path]:
    """Yield this user's existing folders that may contain abandoned temporary folders."""
    if not hasattr(os, "geteuid"):
        return
    temporary = Path(os.path.realpath(environment.temporary))
    for folder in dict.fromkeys((temporary, _own_folder_in(temporary), _scratch_folder(environment))):
        with suppress(OSError):
            if _why_not_private(folder) is None:
                yield folder


def _scratch_folder(environment: Environment) -> Path:
    return Path(os.path.realpath(user_state_folder(environment) / "scratch"))
