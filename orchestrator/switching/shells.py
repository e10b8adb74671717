"""Shell commands that set and unset variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Final

from cachectl.layers.base.errors import BadRequest, CachectlError

Syntax = tuple[Callable[[str, str], str], Callable[[str], str]]


class Unquotable(CachectlError, ValueError):
    """A value that a shell cannot quote."""


def _fish_quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _csh_quote(value: str) -> str:
    if "\n" in value:
        # csh splits the output of `...` at newlines even if they are quoted.
        message = f"csh cannot quote a value that contains a newline: {value!r}"
        raise Unquotable(message)
    # csh expands ! even between single quotes.
    return shlex.quote(value).replace("!", "\\!")


def _powershell_quote(value: str) -> str:
    # PowerShell takes typographic single quotes for plain ones.
    return "'" + re.sub("(['\u2018\u2019\u201a\u201b])", r"\1\1", value) + "'"


_SYNTAXES: Final[dict[str, Syntax]] = {
    "sh": (lambda name, value: f"export {name}={shlex.quote(value)}", lambda name: f"unset {name}"),
    "fish": (lambda name, value: f"set -gx {name} {_fish_quote(value)}", lambda name: f"set -e {name}"),
    "csh": (lambda name, value: f"setenv {name} {_csh_quote(value)};", lambda name: f"unsetenv {name};"),
    "powershell": (
        lambda name, value: f"$env:{name} = {_powershell_quote(value)}",
        lambda name: f"Remove-Item Env:{name} -ErrorAction SilentlyContinue",
    ),
}

SHELLS: Final = tuple(_SYNTAXES)


def format_changes(changes: Mapping[str, str | None], shell: str) -> list[str]:
    """Return a command for each variable; ``None`` unsets it. Raises :class:`BadRequest` for another shell."""
    if shell not in _SYNTAXES:
        message = f"cannot write commands for the shell {shell!r}; there are {', '.join(SHELLS)}"
        raise BadRequest(message)
    put, remove = _SYNTAXES[shell]
    return [remove(name) if value is None else put(name, value) for name, value in sorted(changes.items())]


def guess_shell(path: str | None) -> str:
    """Return the name in :data:`SHELLS` for a login shell's path; ``sh`` if there is none."""
    name = PurePath(path or "sh").name
    if name in ("csh", "tcsh"):
        return "csh"
    return {"fish": "fish", "pwsh": "powershell"}.get(name, "sh")
