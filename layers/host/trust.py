"""Who else can write to a folder, and how the superuser works as the owner of one.

Sqlite opens a database and its journal by name, and looks for the journal again at every lock. It rolls a journal back
that it finds there, and deletes the file that the journal names as its super-journal. Where another user can place a
journal, or exchange a folder on the way to it, that user decides what sqlite writes and deletes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Final, NamedTuple

#: The user id that stands for every user whom a user namespace does not know.
_OVERFLOW: Final = Path("/proc/sys/kernel/overflowuid")
_MAPPED: Final = Path("/proc/self/uid_map")
#: More links than that the system does not follow either.
_LINKS: Final = 40
_ACL: Final = "system.posix_acl_access"
#: The effective user belongs to the process, and not to one thread of it.
_IDENTITY: Final = RLock()


def shared_because(folder: Path, names: tuple[str, ...] = ()) -> str | None:
    """Return why another user could write to a folder, or to those of its files that exist; ``None`` if nobody can.

    Every folder on the way counts, since a user who can write there can exchange the next one, and so does the owner of
    a link. Below a folder that other users cannot enter the modes do not matter. Root is always trusted. Always
    ``None`` where the system has no user ids. Raises :class:`OSError` for a folder that does not exist.
    """
    if not hasattr(os, "geteuid"):
        return None
    trusted = _trusted()
    entered = True
    real = Path("/")
    for step in _way(folder):
        real = step.place
        # In a sticky folder users exchange only what is theirs, and what is next on the way is not.
        closed = not step.entered or (not step.last and bool(step.status.st_mode & stat.S_ISVTX))
        closed = closed or stat.S_ISLNK(step.status.st_mode)
        if (because := _shared_because(step.place, step.status, trusted, closed=closed)) is not None:
            return because
        entered = step.entered and _can_enter(step.place, step.status)
    for file in (real / name for name in names):
        with suppress(FileNotFoundError):
            if (because := _shared_because(file, file.lstat(), trusted, closed=not entered)) is not None:
                return because
    return None


class _Step(NamedTuple):
    """A folder or a link on a way; whether other users can enter the folder that it is in; whether it is the last."""

    place: Path
    status: os.stat_result
    entered: bool
    last: bool


def _way(folder: Path) -> Iterator[_Step]:
    """Yield every folder and every link on the way to a folder, the links followed."""
    todo = list(reversed(Path(os.path.abspath(folder)).parts))
    way: list[tuple[Path, bool]] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == "/":
            way = []
        if part == "..":
            way = way[:-1] or way
            continue
        above, entered = way[-1] if way else (Path("/"), True)
        place = above / part
        status = place.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        yield _Step(place, status, entered, not todo and not is_link)
        if not is_link:
            way.append((place, entered and _can_enter(place, status)))
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        todo += reversed(Path(os.readlink(place)).parts)


def _can_enter(place: Path, status: os.stat_result) -> bool:
    return _open_to_others(place, status, stat.S_IXGRP, stat.S_IXOTH)


def _shared_because(place: Path, status: os.stat_result, trusted: frozenset[int], *, closed: bool) -> str | None:
    """Return why another user could change a file, or what is in a folder; ``closed``: whatever its modes say."""
    if status.st_uid not in trusted:
        return f"{place} belongs to {_name(status.st_uid)}"
    if not closed and _open_to_others(place, status, stat.S_IWGRP, stat.S_IWOTH):
        return f"other users can write to {place}"
    return None


def _trusted() -> frozenset[int]:
    """Return the ids of this user and of root, by whatever number the namespace shows root."""
    trusted = {os.geteuid(), 0}
    with suppress(OSError, ValueError):
        lines = [tuple(map(int, line.split())) for line in _MAPPED.read_text().splitlines()]
        if not any(outside == 0 for _, outside, _ in lines):
            trusted.add(int(_OVERFLOW.read_text()))
    return frozenset(trusted)


def _open_to_others(place: Path, status: os.stat_result, group: int, others: int) -> bool:
    """Return whether users other than the owner and root have a permission, given as its two mode bits."""
    if status.st_mode & others:
        return True
    if not status.st_mode & group:
        return False
    # With an access control list these bits are the most that any user or group named there has.
    return _has_acl(place) or not _is_private(status.st_gid)


def _has_acl(place: Path) -> bool:
    with suppress(OSError, AttributeError):
        return bool(os.getxattr(place, _ACL, follow_symlinks=False))
    return False


def _is_private(group: int) -> bool:
    """Return whether a group has no other member than this user or root, as a user's own group has none."""
    import grp
    import pwd

    try:
        entry = grp.getgrgid(group)
        mine = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return set(entry.gr_mem) <= {mine, "root"} and (group == 0 or entry.gr_name == mine)


def _name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


@contextmanager
def as_owner(folder: Path) -> Iterator[None]:
    """As the superuser, work as the user who owns a folder: what happens there can then do no more than that user.

    Only the effective ids change, so that the user can neither signal nor trace this process. They belong to the whole
    process; other threads that come here wait. Raises :class:`OSError` where the system does not allow it.
    """
    owner = _foreign_owner(folder)
    if owner is None:
        yield
        return
    with _IDENTITY:
        user, group, groups = owner
        before = os.getegid(), os.getgroups()
        try:
            os.setgroups(groups)
            os.setegid(group)
            os.seteuid(user)
            yield
        finally:
            os.seteuid(0)
            os.setegid(before[0])
            os.setgroups(before[1])


def _foreign_owner(folder: Path) -> tuple[int, int, list[int]] | None:
    """Return user, group and groups of the owner, where this is the superuser and the owner is not."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return None
    status = next(place for place in (folder, *folder.parents) if os.path.lexists(place)).stat()
    if status.st_uid == 0:
        return None
    import pwd

    try:
        account = pwd.getpwuid(status.st_uid)
    except KeyError:
        return status.st_uid, status.st_gid, [status.st_gid]
    return account.pw_uid, account.pw_gid, os.getgrouplist(account.pw_name, account.pw_gid)
