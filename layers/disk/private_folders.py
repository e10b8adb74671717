"""Private folders of this user: nobody else can create, rename or replace anything in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cachectl.layers.base.environment import Environment, user_name, user_state_folder
from cachectl.layers.base.errors import CachectlError, printable
from cachectl.layers.disk.trust import deciding_owner, shared_because


class NotPrivate(CachectlError):
    """Another user could put files into a folder, or another folder in its place."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{printable(folder)}: {why}")


def private_folder(place: Path, *, make: bool = False) -> Path:
    """Return ``place`` if it is this user's own and has mode 0700, else the folder ``cachectl-UID`` in it, which is.

    ``cachectl-UID`` is made if missing and never removed, so that nobody else can make it while a program that was
    started with its path still runs. With ``make``, a missing ``place`` is made with mode 0700. Raises
    :class:`NotPrivate` if another user could replace either of them or owns a link on the way, :class:`OSError` if
    neither can be made.
    """
    has_users = hasattr(os, "geteuid")
    if has_users and (decides := deciding_owner(place)) is not None:
        raise NotPrivate(place, f"a part of the path belongs to {user_name(decides.st_uid)}, who can replace it")
    place = Path(os.path.realpath(place))
    missing = [folder for folder in (*reversed(place.parents), place) if make and not folder.exists()]
    for folder in missing:
        _require_unshared(missing[0].parent)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    _require_unshared(place)
    # On Windows the temporary folder is private.
    if not has_users or _why_not_private(place) is None:
        return place
    own = _own_folder_in(place)
    with suppress(FileExistsError):
        os.mkdir(own, 0o700)
    if (why := _why_not_private(own)) is not None:
        raise NotPrivate(own, why)
    return own


def _require_unshared(folder: Path) -> None:
    if (reason := shared_because(folder, sticky=True)) is not None:
        raise NotPrivate(folder, f"others can replace what is in it: {reason}")


def _own_folder_in(place: Path) -> Path:
    return place / f"cachectl-{os.geteuid()}"


def _why_not_private(folder: Path) -> str | None:
    """Return why a folder is not private, by its kind, owner or mode; ``None`` if it is."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "not a folder, or a link to one; remove it, or name another folder"
    if status.st_uid != os.geteuid():
        return f"belongs to {user_name(status.st_uid)}, who can replace what is in it; name another folder"
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"others have access to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod 700 it"
    return None


def temporary_parent(environment: Environment) -> tuple[Path, str | None]:
    """Return the folder for temporary folders, and a notice if that is not in the temporary folder.

    Raises :class:`CachectlError` if there is no private folder.
    """
    folder = _attempt(environment.temporary)
    if isinstance(folder, Path):
        return folder, None
    elsewhere = _scratch_folder(environment)
    other = _attempt(elsewhere, make=True)
    if isinstance(other, Path):
        return other, f"{folder}; temporary folders are made in {elsewhere}"
    raise CachectlError(f"no place for temporary folders: {folder}; {other}; set TMPDIR to a folder of mode 700")


def _attempt(place: Path, *, make: bool = False) -> Path | str:
    """Return a private folder, or why there is none."""
    try:
        return private_folder(place, make=make)
    except NotPrivate as error:
        return str(error)
    except OSError as error:
        return f"{printable(str(error.filename))}: {error.strerror}"


def temporary_parents(environment: Environment) -> Iterator[Path]:
    """Yield this user's folders that may hold abandoned temporary folders; makes none."""
    if not hasattr(os, "geteuid"):
        return
    temporary = Path(os.path.realpath(environment.temporary))
    for folder in dict.fromkeys((temporary, _own_folder_in(temporary), _scratch_folder(environment))):
        with suppress(OSError):
            if _why_not_private(folder) is None:
                yield folder


def _scratch_folder(environment: Environment) -> Path:
    """Return the folder in the user's home that replaces the temporary one.

    It ignores variables that move caches: a command in an isolated run must not make its temporary folder in there.
    """
    return Path(os.path.realpath(user_state_folder(environment) / "scratch"))
