"""Checks for other users who own a folder or can write to it, and the one gate before every change of a cache.

Sqlite opens a database and its journal by name, and looks for the journal again at every lock. It rolls back a journal
that it finds, and deletes the file that the journal names as its super-journal. If another user can place a journal, or
replace a folder on the way to it, that user decides what sqlite writes and deletes.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.environment import user_name
from cachectl.layers.disk.presence import nearest

#: The user id that represents all users unknown to a user namespace.
_OVERFLOW: Final = Path("/proc/sys/kernel/overflowuid")
_MAPPED: Final = Path("/proc/self/uid_map")
#: Limit on links in a path, as in the kernel.
_LINKS: Final = 40
_ACL: Final = "system.posix_acl_access"


def shared_because(folder: Path, names: tuple[str, ...] = (), *, sticky: bool = False) -> str | None:
    """Return why another user could write to a folder, or to those of its files that exist; ``None`` if nobody can.

    Every folder on the path counts, because a user who can write there can replace the next one, and so does the owner
    of a link. Modes below a folder that other users cannot enter do not matter. Root is always trusted. With
    ``sticky``, others may write to the folder itself if it is sticky: they cannot replace this user's files there.
    Always ``None`` on a system without user ids. Raises :class:`OSError` for a folder that does not exist.
    """
    if not hasattr(os, "geteuid"):
        return None
    trusted = _trusted()
    entered = True
    real = Path("/")
    for step in _way(folder):
        real = step.place
        if step.status.st_uid not in trusted:
            return f"{step.place} belongs to {user_name(step.status.st_uid)}"
        if step.is_writable and not (sticky and step.is_sticky):
            return f"other users can write to {step.place}"
        entered = step.entered and _can_enter(step.place, step.status)
    for file in (real / name for name in names):
        with suppress(FileNotFoundError):
            if (reason := _others_reason(file, file.lstat(), trusted, entered=entered)) is not None:
                return reason
    return None


def shared_within(folder: Path) -> str | None:
    """Return why another user could write to a folder, as :func:`shared_because`, or to anything below it.

    No link below the folder is followed. Raises :class:`OSError` for a folder that does not exist.
    """
    reason = shared_because(folder)
    if reason is not None or not hasattr(os, "geteuid"):
        return reason
    *_, last = _way(folder)
    trusted, todo = _trusted(), [(last.place, last.entered and _can_enter(last.place, last.status))]
    while todo:
        above, entered = todo.pop()
        for place in map(above.joinpath, _names_in(above)):
            with suppress(FileNotFoundError):
                status = place.lstat()
                if (reason := _others_reason(place, status, trusted, entered=entered)) is not None:
                    return reason
                if stat.S_ISDIR(status.st_mode):
                    todo.append((place, entered and _can_enter(place, status)))
    return None


def _others_reason(place: Path, status: os.stat_result, trusted: frozenset[int], *, entered: bool) -> str | None:
    """Return why another user could change something in a folder, which others can have ``entered``."""
    if status.st_uid not in trusted:
        return f"{place} belongs to {user_name(status.st_uid)}"
    is_writable = entered and not stat.S_ISLNK(status.st_mode) and _can_write(place, status)
    return f"other users can write to {place}" if is_writable else None


def _names_in(folder: Path) -> list[str]:
    """List a folder; one that this user cannot list has nothing that this user reads."""
    try:
        return os.listdir(folder)
    except (PermissionError, FileNotFoundError):
        return []


def closed_to_changes(root: Path, *, superuser: bool, shared: bool) -> str | None:
    """Return why a cache is only read: another ordinary user owns it or a folder on its way, or can write there.

    Whoever can write a cache decides what its user runs, and where a change leads. ``shared`` says that those users are
    trusted. ``None`` if nothing forbids changes.
    """
    place = nearest(root, follow=False)
    try:
        reason = shared_because(place, sticky=place != root)
    except FileNotFoundError:
        # A link that leads nowhere.
        return None
    if reason is None or shared:
        return None
    owner = deciding_owner(place)
    if owner is not None:
        reason = f"{reason}: {_as_owner(owner.st_uid)}"
    return reason if superuser else f"{reason}; --shared changes it if you trust them"


def belonging_to(owner: int) -> str:
    """Return why the superuser leaves an entry of another user, with the command that works."""
    return f"belongs to {user_name(owner)}: {_as_owner(owner)}"


def _as_owner(owner: int) -> str:
    name = user_name(owner)
    return f"sudo -u {f'#{owner}' if ' ' in name else name} cachectl …"


def owner_of(root: Path, key: str) -> int:
    """Return the user who owns an entry, or the nearest file or folder above it that exists."""
    place = Path(root, key)
    try:
        return place.lstat().st_uid
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return nearest(place.parent, follow=False).lstat().st_uid


def open_to_others(path: Path) -> Iterator[Path]:
    """Yield the folders of a path, itself included, in which another user could replace the next one or add files.

    Links are followed. Yields nothing on a system without user ids. Raises :class:`OSError` for a path that does not
    exist.
    """
    if hasattr(os, "geteuid"):
        yield from (step.place for step in _way(path) if step.is_writable)


def deciding_owner(folder: Path) -> os.stat_result | None:
    """Return the status of the first part of a path, links included, that belongs neither to root nor to this user.

    Its owner decides where the path leads. ``None`` if there is none; the folder need not exist.
    """
    trusted = _trusted()
    with suppress(FileNotFoundError, NotADirectoryError):
        return next((step.status for step in _way(folder) if step.status.st_uid not in trusted), None)
    return None


class Closed(NamedTuple):
    """Something closed to this user: its owner, and the command that gives it to this user, if that is right."""

    place: Path
    owner: str
    command: str | None

    @property
    def fix(self) -> str:
        """Return the command that lets this user read it."""
        return self.command or f"as {self.owner}: chmod -R go+rX {shlex.quote(str(self.place))}"


def closed_by_another(place: Path, home: Path) -> Closed | None:
    """Return who closed a file or folder to this user by owning it, or what is above it; ``None`` if nobody did.

    Below this user's own ``home`` it is a slip of ``sudo``, and everything that another user owns on the path is given
    back. Elsewhere it may be the other user's on purpose.
    """
    if not hasattr(os, "geteuid"):
        return None
    user, owners = os.geteuid(), dict[Path, int]()
    real, own = Path(os.path.realpath(place)), Path(os.path.realpath(home))
    for path in (real, *real.parents):
        with suppress(OSError):
            owners[path] = path.stat().st_uid
    nearest = next(iter(owners))
    if owners[nearest] == user or os.access(nearest, os.R_OK | os.W_OK):
        return None
    command = None
    if own in real.parents and owners.get(own) == user:
        *_, highest = (path for path, owner in owners.items() if owner != user and own in path.parents)
        command = f"sudo chown -R {user_name(user).removeprefix('user ')} {shlex.quote(str(highest))}"
    return Closed(place, user_name(owners[nearest]), command)


class _Step(NamedTuple):
    """A folder or link on a path, whether other users can enter its parent folder, and whether it is the last part."""

    place: Path
    status: os.stat_result
    entered: bool
    last: bool

    @property
    def is_sticky(self) -> bool:
        """Return whether users can replace only their own files in the folder."""
        return bool(self.status.st_mode & stat.S_ISVTX)

    @property
    def is_writable(self) -> bool:
        """Return whether other users can add files to the last folder, or replace the next part in another one."""
        if not self.entered or stat.S_ISLNK(self.status.st_mode) or (self.is_sticky and not self.last):
            return False
        return _can_write(self.place, self.status)


def _way(folder: Path) -> Iterator[_Step]:
    """Yield every folder and every link on the path to a folder, following links."""
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


def _can_write(place: Path, status: os.stat_result) -> bool:
    return _open_to_others(place, status, stat.S_IWGRP, stat.S_IWOTH)


def _trusted() -> frozenset[int]:
    """Return the ids of this user and of root, as numbered in the user namespace."""
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
    # With an access control list these bits bound the permissions of every user or group named there.
    return _has_acl(place) or not _is_private(status)


def _has_acl(place: Path) -> bool:
    with suppress(OSError, AttributeError):
        return bool(os.getxattr(place, _ACL, follow_symlinks=False))
    return False


def _is_private(status: os.stat_result) -> bool:
    """Return whether the group of a file has no member but the file's owner, this user and root.

    Many systems give every user a group of the same name without other members. Group lists omit accounts whose primary
    group it is. Those are looked up only for root's group, which some systems give to other accounts (``operator`` on
    Red Hat); no system gives a user's own group to other accounts.
    """
    import grp
    import pwd

    trusted = {user_name(user) for user in (0, os.geteuid(), status.st_uid)}
    try:
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    members = set(group.gr_mem)
    if status.st_gid == 0:
        members.update(account.pw_name for account in pwd.getpwall() if account.pw_gid == 0)
    elif group.gr_name not in trusted:
        return False
    return members <= trusted
