"""Checks for other users who own a folder or can write to it, and the one gate before every change of a cache.

Sqlite opens a database and its journal by name, and looks for the journal again at every lock. It rolls back a journal
that it finds, and deletes the file that the journal names as its super-journal. Another user who can place a journal,
or replace a folder above it, decides what sqlite writes and deletes.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.environment import user_name
from cachectl.layers.disk.plain import nearest

#: The user id that stands for all users unknown to a user namespace.
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
_MAPPED = Path("/proc/self/uid_map")
#: Limit on links in a path, as in the kernel.
_LINKS = 40


class Step(NamedTuple):
    """A part of a path, whether other users can enter the folder above it, and whether it is the last part."""

    place: Path
    status: os.stat_result
    entered: bool
    last: bool = True

    def permits(self, bit: int) -> bool:
        """Return whether users other than the owner and root have a permission, given as its mode bit for others."""
        if not self.entered or self.status.st_mode & bit:
            return self.entered
        if not self.status.st_mode & bit << 3:
            return False
        with suppress(OSError, AttributeError):
            # With an access control list, the group's bits limit the permissions of every user or group named there.
            if os.getxattr(self.place, "system.posix_acl_access", follow_symlinks=False):
                return True
        return not _is_private(self.status)

    def is_open(self, *, sticky: bool) -> bool:
        """Return whether other users can add files to the last folder, or replace the next part in any other.

        With ``sticky``, the last folder may be sticky: others cannot replace this user's files in it.
        """
        mode = self.status.st_mode
        is_fixed = stat.S_ISLNK(mode) or (mode & stat.S_ISVTX and (sticky or not self.last))
        return not is_fixed and self.permits(stat.S_IWOTH)

    def reason(self, trusted: frozenset[int], *, sticky: bool = False) -> str | None:
        """Return why another user could change the contents, or ``None``."""
        if self.status.st_uid not in trusted:
            return f"{self.place} belongs to {user_name(self.status.st_uid)}"
        return f"other users can write to {self.place}" if self.is_open(sticky=sticky) else None


def shared_because(folder: Path, names: tuple[str, ...] = (), *, sticky: bool = False) -> str | None:
    """Return why another user could write to a folder, or to the ``names`` in it that exist; ``None`` if nobody can.

    Every folder on the path counts, because a user who can write to it, or owns it or a link, can replace the next
    part. Modes below a folder that other users cannot enter do not matter. Root is always trusted. With ``sticky``,
    others may write to the folder itself if it is sticky: they cannot replace this user's files in it. Always ``None``
    on a system without user ids. Raises :class:`OSError` for a folder that does not exist.
    """
    if not hasattr(os, "geteuid"):
        return None
    trusted = _trusted()
    for step in _way(folder):
        if (reason := step.reason(trusted, sticky=sticky)) is not None:
            return reason
    for file in (step.place / name for name in names):
        with suppress(FileNotFoundError):
            if (reason := Step(file, file.lstat(), step.permits(stat.S_IXOTH)).reason(trusted)) is not None:
                return reason
    return None


def shared_within(folder: Path) -> str | None:
    """Return why another user could write to a folder or anything below it, by the rule of :func:`shared_because`.

    No link below the folder is followed. Raises :class:`OSError` for a folder that does not exist.
    """
    reason = shared_because(folder)
    if reason is not None or not hasattr(os, "geteuid"):
        return reason
    *_, last = _way(folder)
    trusted, steps = _trusted(), {str(last.place): last}
    for above, folders, files in os.walk(last.place):
        entered = steps.pop(above, last).permits(stat.S_IXOTH)
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                path = os.path.join(above, name)
                steps[path] = step = Step(Path(path), os.lstat(path), entered)
                if (reason := step.reason(trusted)) is not None:
                    return reason
    return None


def closed_to_changes(root: Path, *, superuser: bool, shared: bool) -> str | None:
    """Return why a cache must not be changed: another ordinary user can write to it, or owns or can replace its path.

    That user decides what the cache's user runs, and where a change goes. ``shared`` says that such users are trusted.
    ``None`` if changes are allowed.
    """
    place = nearest(root, follow=False)
    try:
        reason = shared_because(place, sticky=place != root)
    except FileNotFoundError:
        # A dangling link.
        return None
    if reason is None or shared:
        return None
    owner = deciding_owner(place)
    if owner is not None:
        reason = f"{reason}: {_as_owner(owner)}"
    return reason if superuser else f"{reason}; --shared changes it if you trust them"


def belonging_to(owner: int) -> str:
    """Return why root leaves another user's entry, with the command that works."""
    return f"belongs to {user_name(owner)}: {_as_owner(owner)}"


def _as_owner(owner: int) -> str:
    name = user_name(owner)
    return f"sudo -u {f'#{owner}' if ' ' in name else name} cachectl …"


def owner_of(root: Path, key: str) -> int:
    """Return the user who owns an entry, or the nearest file or folder above it that exists."""
    path = f"{root}/{key}"
    while True:
        try:
            return os.lstat(path).st_uid
        except OSError:  # noqa: PERF203 - a row takes two attempts
            path = os.path.dirname(path)


def find_strangers(path: Path, *, sticky: bool = False) -> Iterator[tuple[Step, bool]]:
    """Yield the parts of a path that another user can change, by the rule of :func:`shared_because`.

    Each comes with whether that user owns it. Raises :class:`OSError` for a path that does not exist.
    """
    trusted = _trusted() if hasattr(os, "geteuid") else frozenset[int]()
    for step in _way(path) if trusted else ():
        if (is_anothers := step.status.st_uid not in trusted) or step.is_open(sticky=sticky):
            yield step, is_anothers


def deciding_owner(folder: Path) -> int | None:
    """Return the owner of the first part of a path, or link on it, that belongs neither to root nor to this user."""
    trusted = _trusted()
    with suppress(FileNotFoundError, NotADirectoryError):
        return next((user for step in _way(folder) if (user := step.status.st_uid) not in trusted), None)
    return None


class Closed(NamedTuple):
    """The part of a path that is closed to this user because another one owns it; empty texts if none is.

    ``owner`` is for the end of a message. ``command`` gives ``place`` to this user, if right; ``cure`` is for readers.
    """

    place: Path
    owner: str = ""
    command: str = ""
    cure: str = ""


def closed_by_another(place: Path, home: Path) -> Closed:
    """Return what closes a file or folder to this user.

    Below this user's ``home`` the cause is a mistaken ``sudo``: the command gives back everything on the path that
    another user owns. Elsewhere the other user may own it on purpose.
    """
    if not hasattr(os, "geteuid"):
        return Closed(place)
    user, owners = os.geteuid(), dict[Path, int]()
    real, own = Path(os.path.realpath(place)), Path(os.path.realpath(home))
    for path in (real, *real.parents):
        with suppress(OSError):
            owners[path] = path.stat().st_uid
    closest, owner = next(iter(owners.items()))
    if owner == user or os.access(closest, os.R_OK | os.W_OK):
        return Closed(place)
    command = ""
    foreign = [path for path, uid in owners.items() if uid != user and own in path.parents]
    if foreign and owners.get(own) == user:
        command = f"sudo chown -R {user_name(user).removeprefix('user ')} {shlex.quote(str(foreign[-1]))}"
    name = user_name(owner)
    cure = command or f"as {name}: chmod -R go+rX {shlex.quote(str(closest))}"
    return Closed(closest, f"; it belongs to {name}", command, cure)


def _way(folder: Path) -> Iterator[Step]:
    """Yield every folder and link on the path to a folder, following links."""
    todo = list(reversed(Path(os.path.abspath(folder)).parts))
    way: list[Step] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == "/":
            way = []
        if part == "..":
            way = way[:-1] or way
            continue
        place = way[-1].place / part if way else Path(part)
        status = place.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        step = Step(place, status, not way or way[-1].permits(stat.S_IXOTH), not todo and not is_link)
        yield step
        if not is_link:
            way.append(step)
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        todo += reversed(Path(os.readlink(place)).parts)


def _trusted() -> frozenset[int]:
    """Return the ids of this user and of root in this user namespace."""
    trusted = {os.geteuid(), 0}
    with suppress(OSError, ValueError):
        lines = [tuple(map(int, line.split())) for line in _MAPPED.read_text().splitlines()]
        if not any(outside == 0 for _, outside, _ in lines):
            trusted.add(int(_OVERFLOW.read_text()))
    return frozenset(trusted)


def _is_private(status: os.stat_result) -> bool:
    """Return whether the group of a file has no members except the file's owner, this user and root.

    Many systems give every user a group of the same name without other members. Group lists omit accounts whose primary
    group it is. Those are looked up only for root's group, which some systems give to other accounts (``operator`` on
    Red Hat); no system does that with a user's own group.
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
