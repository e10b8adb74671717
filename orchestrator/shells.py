"""Variables spelled as commands of a shell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Final

from cachectl.layers.errors import BadRequest

Spelling = tuple[Callable[[str, str], str], Callable[[str], str]]


def _fish_quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _csh_quote(value: str) -> str:
    # csh expands ! even between single quotes.
    return shlex.quote(value).replace("!", "\\!")


def _powershell_quote(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


_SPELLINGS: Final[dict[str, Spelling]] = {
    "sh": (lambda name, value: f"export {name}={shlex.quote(value)}", lambda name: f"unset {name}"),
    "fish": (lambda name, value: f"set -gx {name} {_fish_quote(value)}", lambda name: f"set -e {name}"),
    "csh": (lambda name, value: f"setenv {name} {_csh_quote(value)};", lambda name: f"unsetenv {name};"),
    "powershell": (
        lambda name, value: f"$env:{name} = {_powershell_quote(value)}",
        lambda name: f"Remove-Item Env:{name} -ErrorAction SilentlyContinue",
    ),
}

SHELLS: Final = tuple(_SPELLINGS)


def spell(changes: Mapping[str, str | None], shell: str) -> list[str]:
    """Return a command for each variable; ``None`` unsets it. Raises :class:`BadRequest` for another shell."""
    if shell not in _SPELLINGS:
        message = f"no spelling for the shell {shell!r}; there are {', '.join(SHELLS)}"
        raise BadRequest(message)
    put, remove = _SPELLINGS[shell]
    return [remove(name) if value is None else put(name, value) for name, value in sorted(changes.items())]


def guess_shell(path: str | None) -> str:
    """Name the spelling for a login shell's path; ``sh`` where there is no better."""
    name = PurePath(path or "sh").name
    if name in ("csh", "tcsh"):
        return "csh"
    return {"fish": "fish", "pwsh": "powershell"}.get(name, "sh")
