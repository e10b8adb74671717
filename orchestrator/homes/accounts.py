"""The users whose homes are handled: those of the password database, or the owner of a folder.

Source of the range of users: ``UID_MIN`` and ``UID_MAX`` of login.defs(5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.environment import user_name
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.disk.trust import deciding_owner

if TYPE_CHECKING:
    from pwd import struct_passwd

_LOGIN_DEFS: Final = Path("/etc/login.defs")
#: The range of the shadow suite's own default.
_UID_RANGE: Final = {"UID_MIN": 1000, "UID_MAX": 60000}
#: Programs that a child may start, such as ``llvm-dis``, come from these folders.
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Account:
    """A user and the home to work in. A missing home of an ``optional`` account is no failure."""

    user: str
    uid: int
    gid: int
    home: Path
    optional: bool = False

    @property
    def groups(self) -> list[int]:
        """Return the ids of all groups of the user, as a login would set them."""
        try:
            return os.getgrouplist(self.user, self.gid)
        except (KeyError, OSError):
            return [self.gid]

    @property
    def variables(self) -> dict[str, str]:
        """Return the only variables that a verb sees in the home: those that everybody has after a login."""
        return {"HOME": str(self.home), "USER": self.user, "LOGNAME": self.user, "PATH": _PATH}


def accounts_of(names: Iterable[str]) -> tuple[Account, ...]:
    """Return the accounts of some users, each once. Raises :class:`BadRequest` for a name without an account."""
    import pwd

    found: list[Account] = []
    name = ""
    try:
        for name in dict.fromkeys(names):
            found.append(_account(pwd.getpwnam(name)))
    except KeyError as error:
        message = f"no account is called {name!r}; getent passwd lists them"
        raise BadRequest(message) from error
    return tuple(found)


def every_account() -> tuple[Account, ...]:
    """Return the accounts of people: those with a uid between ``UID_MIN`` and ``UID_MAX``, so not root.

    A server of accounts that does not list its users (sssd without ``enumerate``) hides them here.
    """
    import pwd

    bounds = _uid_range()
    people = [account for account in pwd.getpwall() if bounds["UID_MIN"] <= account.pw_uid <= bounds["UID_MAX"]]
    # Several names may share one user id and home.
    once = {(account.pw_uid, account.pw_dir): account for account in reversed(people)}
    return tuple(_account(account, optional=True) for account in reversed(once.values()))


def account_of_home(folder: Path) -> Account:
    """Return the owner of a folder, with that folder as the home.

    Raises :class:`CachectlError` for something else than a folder, and if another user owns a folder or a link on the
    way to it: that user could exchange it.
    """
    import pwd

    home = Path(os.path.realpath(folder))
    try:
        status = os.stat(home)
        decides = deciding_owner(folder)
    except OSError as error:
        message = f"{folder}: {error.strerror}; --home takes a folder"
        raise CachectlError(message) from error
    if not os.path.isdir(home):
        message = f"{folder} is no folder; --home takes one"
        raise CachectlError(message)
    if decides is not None and decides.st_uid != status.st_uid:
        whose, other = user_name(status.st_uid), user_name(decides.st_uid)
        message = f"{folder} belongs to {whose}, but {other} decides where that path leads; name the folder itself"
        raise CachectlError(message)
    with suppress(KeyError):
        account = pwd.getpwuid(status.st_uid)
        return Account(account.pw_name, account.pw_uid, account.pw_gid, home)
    return Account(user_name(status.st_uid), status.st_uid, status.st_gid, home)


def _account(account: struct_passwd, *, optional: bool = False) -> Account:
    return Account(account.pw_name, account.pw_uid, account.pw_gid, Path(account.pw_dir), optional)


def _uid_range() -> dict[str, int]:
    bounds = dict(_UID_RANGE)
    with suppress(OSError):
        text = _LOGIN_DEFS.read_text(errors="replace")
        bounds.update((name, int(number)) for name, number in re.findall(r"(?m)^(UID_M(?:IN|AX))\s+(\d{1,10})\b", text))
    return bounds
