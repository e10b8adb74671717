"""Folders that belong to this user alone: nobody else can put, rename or replace anything in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.base.environment import user_name
from cachectl.layers.base.errors import CachectlError, printable

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment


class NotPrivate(CachectlError):
    """Another user could put files into a folder, or another folder in its place."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{printable(folder)}: {why}")


def open_to_others(path: Path) -> Iterator[Path]:
    """Yield the folders of a path that somebody else can reach and write in, the path itself included.

    In a sticky folder they can rename nothing of ours, which is enough for a folder above, but not for the root.
    """
    for folder in (*reversed(path.parents), path):
        status = folder.stat()
        if _open(status) and (folder == path or not status.st_mode & stat.S_ISVTX):
            yield folder
        if _closed(status):
            # Nobody else gets any further.
            return


def _open(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and _is_shared(status)))


def _closed(status: os.stat_result) -> bool:
    return not (status.st_mode & stat.S_IXOTH or (status.st_mode & stat.S_IXGRP and _is_shared(status)))


def _is_shared(status: os.stat_result) -> bool:
    """Tell whether the group of a folder has members beside its owner, this user and the superuser.

    Many systems give every user a group of the same name, and of no other members.
    """
    import grp

    trusted = {user_name(uid) for uid in (0, os.geteuid(), status.st_uid)}
    try:
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    return group.gr_name not in trusted or not trusted.issuperset(group.gr_mem)


def private_folder(place: Path, *, make: bool = False) -> Path:
    """Return ``place`` if it is this user's own and has mode 0700, else the folder ``cachectl-UID`` in it, which is.

    That one is made where it is missing, and is never removed: nobody else can make it again while a program that
    was started with its name still runs. With ``make``, a missing ``place`` is made with mode 0700. Raises
    :class:`NotPrivate` where another user could replace either of them, :class:`OSError` where neither can be made.
    """
    place = Path(os.path.realpath(place))
    if make:
        _make(place)
    if not hasattr(os, "geteuid"):
        # On Windows the temporary folder is the user's own.
        return place
    _demand_unreplaceable(place)
    if _why_not_private(place) is None:
        return place
    own = own_folder_in(place)
    with suppress(FileExistsError):
        os.mkdir(own, 0o700)
    why = _why_not_private(own)
    if why is not None:
        raise NotPrivate(own, why)
    return own


def _make(place: Path) -> None:
    """Make a folder and those above it, for this user alone. Raises as :func:`private_folder`."""
    missing = [folder for folder in (*reversed(place.parents), place) if not folder.exists()]
    if missing and hasattr(os, "geteuid"):
        _demand_unreplaceable(missing[0].parent)
    for folder in missing:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def own_folder_in(place: Path) -> Path:
    """Return the path of this user's folder in a folder of many users."""
    return place / f"cachectl-{os.geteuid()}"


def is_private(folder: Path) -> bool:
    """Tell whether a folder exists, is this user's own, and has mode 0700."""
    try:
        return _why_not_private(folder) is None
    except OSError:
        return False


def _why_not_private(folder: Path) -> str | None:
    """Return what another user can do with a folder because of its kind, owner or mode; ``None`` is nothing."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "not a folder, or a link to one; remove it, or name another folder"
    if status.st_uid != os.geteuid():
        return f"belongs to {user_name(status.st_uid)}, who can replace what is in it; name another folder"
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"others have access to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod 700 it"
    return None


def _demand_unreplaceable(place: Path) -> None:
    """Raise :class:`NotPrivate` where another user could rename what this user makes in a folder, or the folder."""
    # In a user namespace, folders of the system outside belong to a user that stands for all unknown ones.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for folder in (*reversed(place.parents), place):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(20, "not a folder", str(folder))
        if status.st_uid not in trusted:
            raise NotPrivate(folder, f"belongs to {user_name(status.st_uid)}, who can replace what is in it")
        if _open(status) and not status.st_mode & stat.S_ISVTX:
            raise NotPrivate(folder, "others can replace what is in it: they can write there, and it is not sticky")
        if _closed(status):
            return


# ---------------------------------------------------------------------- scratch folders


def scratch_parent(environment: Environment) -> tuple[Path, str | None]:
    """Return where scratch folders are made, and a line that says so if that is not in the temporary folder.

    Raises :class:`CachectlError` where no place is this user's alone.
    """
    try:
        return private_folder(environment.temporary), None
    except (NotPrivate, OSError) as error:
        why = _reason(error)
    elsewhere = _state_folder(environment)
    try:
        return private_folder(elsewhere, make=True), f"{why}; scratch folders are made in {elsewhere}"
    except (NotPrivate, OSError) as error:
        message = f"no place for scratch folders: {why}; {_reason(error)}; set TMPDIR to a folder of mode 700"
        raise CachectlError(message) from error


def scratch_parents(environment: Environment) -> Iterator[Path]:
    """Yield the folders of this user in which scratch folders may have been left; none is made."""
    if not hasattr(os, "geteuid"):
        return
    temporary = Path(os.path.realpath(environment.temporary))
    for folder in dict.fromkeys((temporary, own_folder_in(temporary), _state_folder(environment))):
        if is_private(folder):
            yield folder


def _state_folder(environment: Environment) -> Path:
    """Return the folder in the user's home that stands in for the temporary one.

    It follows no variable that moves caches: a command of a scratch run must not make its own scratch in there.
    """
    named = environment.get("XDG_STATE_HOME")
    above = Path(named) if named and os.path.isabs(named) else environment.home_folder / ".local" / "state"
    return Path(os.path.realpath(above / "cachectl" / "scratch"))


def _reason(error: NotPrivate | OSError) -> str:
    if isinstance(error, NotPrivate):
        return str(error)
    return f"{printable(str(error.filename))}: {error.strerror}"
