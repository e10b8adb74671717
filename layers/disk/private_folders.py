"""Private folders of this user: nobody else can create, rename or replace anything in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.base.environment import user_name, user_state_folder
from cachectl.layers.base.errors import CachectlError, printable
from cachectl.layers.disk.trust import deciding_owner, shared_because

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment


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
    if hasattr(os, "geteuid") and (decides := deciding_owner(place)) is not None:
        raise NotPrivate(place, f"a part of the path belongs to {user_name(decides.st_uid)}, who can replace it")
    place = Path(os.path.realpath(place))
    if make:
        _make(place)
    if not hasattr(os, "geteuid"):
        # On Windows the temporary folder is private.
        return place
    if (because := shared_because(place, sticky=True)) is not None:
        raise NotPrivate(place, f"others can replace what is in it: {because}")
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
    if missing and (because := shared_because(missing[0].parent, sticky=True)) is not None:
        raise NotPrivate(missing[0].parent, f"others can replace what is in it: {because}")
    for folder in missing:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def own_folder_in(place: Path) -> Path:
    """Return the path of this user's folder in a shared folder."""
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


# ---------------------------------------------------------------------- temporary folders


def temporary_parent(environment: Environment) -> tuple[Path, str | None]:
    """Return the folder for temporary folders, and a notice if that is not in the temporary folder.

    Raises :class:`CachectlError` if there is no private folder.
    """
    try:
        return private_folder(environment.temporary), None
    except (NotPrivate, OSError) as error:
        why = _reason(error)
    elsewhere = _state_folder(environment)
    try:
        return private_folder(elsewhere, make=True), f"{why}; temporary folders are made in {elsewhere}"
    except (NotPrivate, OSError) as error:
        message = f"no place for temporary folders: {why}; {_reason(error)}; set TMPDIR to a folder of mode 700"
        raise CachectlError(message) from error


def temporary_parents(environment: Environment) -> Iterator[Path]:
    """Yield this user's folders that may hold abandoned temporary folders; makes none."""
    if not hasattr(os, "geteuid"):
        return
    temporary = Path(os.path.realpath(environment.temporary))
    for folder in dict.fromkeys((temporary, own_folder_in(temporary), _state_folder(environment))):
        with suppress(OSError):
            if _why_not_private(folder) is None:
                yield folder


def _state_folder(environment: Environment) -> Path:
    """Return the folder in the user's home that replaces the temporary one.

    It ignores variables that move caches: a command in an isolated run must not make its temporary folder in there.
    """
    return Path(os.path.realpath(user_state_folder(environment) / "scratch"))


def _reason(error: NotPrivate | OSError) -> str:
    if isinstance(error, NotPrivate):
        return str(error)
    return f"{printable(str(error.filename))}: {error.strerror}"
