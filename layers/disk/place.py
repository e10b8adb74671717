"""Checks whether a library can do in a folder what it does there.

A layer declares its uses (:class:`Use`). The system reports modes, owners and mounts. What only an attempt can show is
tried with an unnamed file, which leaves nothing behind.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.environment import user_name
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.processes import mount_of
from cachectl.layers.base.text import printable
from cachectl.layers.disk import plain, trust
from cachectl.layers.disk.room import room_at

#: Free bytes below which a cache may be unable to store its next entry.
_LITTLE = 16 << 20
#: Suffix of a file that sqlite must be able to write before it can read the database.
_JOURNAL = "-journal"
#: Virtual file systems, in which no program can create files.
_WITHOUT_FILES = frozenset({"proc", "sysfs", "cgroup", "cgroup2"})


class Use(Enum):
    """What a library does in its place.

    MAKE is a part of WRITE, and OPEN one of CHANGE: a layer declares their effect only if it differs. ``OWN`` is for
    libraries that set the modes of files, which only the owner can do.
    """

    WRITE = "creates files and folders"
    MAKE = "creates its folder"
    CHANGE = "changes existing contents: opens files for writing, creates files in their folders"
    OPEN = "opens a file, which creates others next to it"
    OWN = "sets the modes of its files"
    EXECUTE = "maps code from files"


class Obstacle(NamedTuple):
    """Why a place cannot be used, or not safely.

    ``code`` is that of the catalogue. ``use`` is what is impossible, ``None`` if everything is possible but unsafe.
    ``place`` is the file or folder to change, ``command`` changes it in ``sh``; it may be empty.
    """

    code: str
    use: Use | None
    place: Path
    message: str
    command: str = ""


def find_obstacles(path: Path, uses: Collection[Use], home: Path, written: Iterable[Path] = ()) -> Iterator[Obstacle]:
    """Yield what prevents the uses of a folder, which need not exist, or lets others change it.

    ``written`` are files and folders in it that the library opens for writing. Files of other users below this user's
    ``home`` are attributed to a mistaken ``sudo``. Raises :class:`OSError` if the place cannot be examined.
    """
    nearest = plain.nearest(path, follow=False)
    if not nearest.is_dir():
        yield _no_folder(path, nearest)
        return
    if (obstacle := _closed(path, nearest, home)) is not None:
        yield obstacle
    else:
        closed = [_closed_within(path, each, uses, home) for each in written]
        yield from _grouped(obstacle for obstacle in closed if obstacle is not None)
    if Use.EXECUTE in uses and mount_flags(nearest) & getattr(os, "ST_NOEXEC", 0):
        yield Obstacle("noexec", Use.EXECUTE, nearest, "is on a file system that is mounted with noexec")
    yield from _open_to_others(path, nearest)


def why_closed(path: Path, home: Path) -> str | None:
    """Return why a library cannot store anything in a folder, existing or not; ``None`` if no reason is known."""
    with suppress(OSError):
        for obstacle in find_obstacles(path, (Use.WRITE,), home):
            if obstacle.use is not None:
                return f"{path} {obstacle.message}"
        return _lack_of_room(path)
    return None


def _lack_of_room(path: Path) -> str | None:
    for free, files, source in room_at(path):
        if (free is not None and free < _LITTLE) or files == 0:
            return f"{source} has no space left for {path}"
    return None


def require_serving(folder: Path, uses: Iterable[Use], home: Path) -> None:
    """Raise :class:`CachectlError` if a folder does not allow all uses of a library; it may be open to others."""
    for obstacle in find_obstacles(folder, tuple(uses), home):
        if obstacle.use is not None:
            raise CachectlError(f"{printable(folder)} {obstacle.message}")


def serves(folder: Path, uses: Iterable[Use], home: Path) -> bool:
    """Return whether a folder allows all uses of a library and has space; it may be open to others."""
    try:
        require_serving(folder, uses, home)
        return _lack_of_room(folder) is None
    except (CachectlError, OSError):
        return False


def mount_flags(place: Path) -> int:
    """Return the mount flags of a path from ``statvfs``; 0 if the system has none."""
    return os.statvfs(place).f_flag if hasattr(os, "statvfs") else 0


def _no_folder(path: Path, nearest: Path) -> Obstacle:
    quoted = shlex.quote(str(nearest))
    command = f"mv {quoted} {shlex.quote(f'{nearest}.aside')}"
    if nearest.is_symlink() and not nearest.exists() and (target := os.path.realpath(nearest)) != str(nearest):
        command = f"mkdir -p {shlex.quote(target)}"
    which = "in its place" if nearest == path else f"at {nearest}"
    use = Use.WRITE if nearest == path and not nearest.is_symlink() else Use.MAKE
    return Obstacle("no-folder", use, nearest, f"has something other than a directory {which}", command)


def _closed(path: Path, nearest: Path, home: Path) -> Obstacle | None:
    """Return the obstacle that this user cannot write to a folder or to the nearest one above it, if so."""
    use, state = Use.WRITE, "is"
    if nearest != path:
        use, state = Use.MAKE, f"cannot be created, because {nearest} is"
    if mount_flags(nearest) & getattr(os, "ST_RDONLY", 0):
        return Obstacle("closed", use, nearest, f"{state} on a file system that is mounted read-only")
    # A library that creates the folders on the way fails at the first of these.
    names = (os.fsencode(name) for name in path.relative_to(nearest).parts)
    if hasattr(os, "pathconf") and max(map(len, names), default=0) > os.pathconf(nearest, "PC_NAME_MAX"):
        return Obstacle("closed", use, path, f"cannot be created: {os.strerror(errno.ENAMETOOLONG)}")
    if not is_writable(nearest):
        closed = trust.closed_by_another(nearest, home)
        message = f"{state} not writable by you{closed.owner}"
        return Obstacle("closed", use, nearest, message, closed.command or _opened(nearest))
    if (reason := _try(nearest)) is not None:
        return Obstacle("closed", use, nearest, f"{state} closed: no file can be created there ({reason})")
    return None


def _try(folder: Path) -> str | None:
    """Return why no file can be created in a folder, by trying an unnamed one; ``None`` if nothing shows that.

    Only this reveals quotas, kernel security rules and file systems without files (``/proc``). Nothing is tried in a
    folder of another user, and some network file systems have no unnamed files.
    """
    flags = getattr(os, "O_TMPFILE", None)
    if flags is None or folder.stat().st_uid != os.geteuid():
        return None
    try:
        os.close(os.open(folder, flags | os.O_RDWR, 0o600))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP and mount_of(folder).kind not in _WITHOUT_FILES:
            return None
        return error.strerror
    return None


def _closed_within(path: Path, file: Path, uses: Collection[Use], home: Path) -> Obstacle | None:
    """Return the obstacle that this user cannot write to something in a folder; ``None`` if it can, or is gone."""
    if not os.path.exists(file):
        return None
    if not is_writable(file):
        closed = trust.closed_by_another(file, home)
        message = f"has {file.relative_to(path)}, which is not writable by you{closed.owner}"
        is_opened = file.is_file() and os.access(file, os.R_OK) and not file.name.endswith(_JOURNAL)
        use = Use.OPEN if Use.OPEN in uses and not is_opened else Use.CHANGE
        return Obstacle("closed", use, file, message, closed.command or _opened(file))
    uid = file.stat().st_uid
    if Use.OWN not in uses or not file.is_file() or not hasattr(os, "geteuid") or os.geteuid() in (0, uid):
        return None
    message = f"has {file.relative_to(path)}, which belongs to {user_name(uid)}"
    return Obstacle("closed", Use.OWN, file, message)


def _grouped(obstacles: Iterable[Obstacle]) -> Iterator[Obstacle]:
    """Merge obstacles that the same command removes if it is given all their paths."""
    groups: dict[tuple[Use | None, tuple[str, ...]], list[Obstacle]] = {}
    for obstacle in obstacles:
        groups.setdefault((obstacle.use, tuple(shlex.split(obstacle.command)[:-1])), []).append(obstacle)
    for (_, words), (first, *more) in groups.items():
        if more and words:
            paths = dict.fromkeys(shlex.split(obstacle.command)[-1] for obstacle in (first, *more))
            message = f"{first.message} ({len(more)} more like it)"
            yield first._replace(message=message, command=shlex.join((*words, *paths)))
        else:
            yield from (first, *more)


def is_writable(place: Path) -> bool:
    """Return whether this user may write to a file, or create files in a folder."""
    wanted = os.W_OK | os.X_OK if place.is_dir() else os.W_OK
    return os.access(place, wanted, effective_ids=os.access in os.supports_effective_ids)


def _opened(place: Path) -> str:
    """Return the command that makes a file or folder of this user writable; empty for other users' files."""
    status = place.stat()
    is_own = hasattr(os, "geteuid") and status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWUSR
    return f"chmod u+w {shlex.quote(str(place))}" if is_own else ""


def _open_to_others(path: Path, nearest: Path) -> Iterator[Obstacle]:
    """Yield who else controls what is in a root: a cache is code, which runs as its user."""
    real, owners = Path(os.path.realpath(path)), set[int]()
    for step, is_anothers in trust.find_strangers(nearest, sticky=nearest != path):
        where, uid = step.place, step.status.st_uid
        if is_anothers and uid not in owners:
            owners.add(uid)
            named = "belongs to" if where == real else f"is below {where}, which belongs to"
            yield Obstacle("owner", None, where, f"{named} {user_name(uid)}, whose code runs as you")
        if is_anothers:
            continue
        whose = "everybody" if step.status.st_mode & stat.S_IWOTH else f"the group {_group_name(step.status.st_gid)}"
        message = f"is writable by {whose}, who can put code there that runs as you"
        if where != real:
            message = f"is below {where}, which is writable by {whose}, who can put another folder in its place"
        command = f"chmod go-w {shlex.quote(str(where))}"
        if step.status.st_mode & stat.S_ISVTX:
            # Writable by everybody on purpose.
            command = ""
        elif os.geteuid() not in (0, uid):
            command = f"as {user_name(uid)}: {command}"
        yield Obstacle("writable", None, where, message, command)


def _group_name(number: int) -> str:
    import grp

    with suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)
