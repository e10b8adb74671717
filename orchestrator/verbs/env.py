"""``cachectl env``: variables as shell commands, for ``eval``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from cachectl import layer_set, verbs
from cachectl.layers.base.errors import BadRequest, CachectlError, Refused
from cachectl.layers.core.switch import Ability, Switch
from cachectl.layers.disk.place import why_closed
from cachectl.switching import child

#: How each shell sets a variable, and removes one.
_SYNTAXES = {
    "sh": ("export {name}={value}", "unset {name}"),
    "fish": ("set -gx {name} {value}", "set -e {name}"),
    "csh": ("setenv {name} {value};", "unsetenv {name};"),
    "powershell": ("$env:{name} = {value}", "Remove-Item Env:{name} -ErrorAction SilentlyContinue"),
}
#: Shells by the names of login shells; the others are like sh.
_LOGIN = {"csh": "csh", "tcsh": "csh", "fish": "fish", "pwsh": "powershell"}
EXAMPLE = 'eval "$(cachectl env --disable)"'
OPTIONS = (
    [
        ("--disable", "switch layers off"),
        ("--enable", "switch layers on"),
        ("--root", "DIR", "move every layer below DIR (sets XDG_CACHE_HOME, for every program)"),
    ],
    verbs.LAYER,
    ("--shell", None, "syntax of the commands (default: the login shell's)", {"choices": tuple(_SYNTAXES)}),
)


def env(
    stack: layer_set.LayerSet, *, enable: bool = False, root: str | None = None, layers: Iterable[str] = ()
) -> tuple[Mapping[str, str | None], list[str]]:
    """Return the variables that switch layers off or on (``enable``), or move them below ``root``; ``None`` unsets one.

    The second value has one line for each layer that variables cannot switch or move. Makes the folders below ``root``
    that a library does not make itself. Raises :class:`Refused` if a named layer cannot be switched or moved, and
    :class:`BadRequest` if ``root`` is not a directory.
    """
    folder = None if root is None else stack.environment.expand(root)
    if folder is not None and (not root or (folder.exists() and not folder.is_dir())):
        raise BadRequest(f"--root {root!r} is not a directory")
    notes: list[str] = []
    switches: list[Switch] = []
    ability = Ability.DISABLE if folder is None else Ability.RELOCATE
    named = tuple(layers)
    for layer in stack.named(named):
        reason = layer.abilities()[ability]
        if reason is not None and named:
            raise Refused(layer.name, f"cannot {ability.value}: {reason}")
        if reason is not None:
            notes.append(f"{layer.name} cannot {ability.value}: {reason}")
            continue
        switch = layer.relocate(folder) if folder is not None else layer.enable() if enable else layer.disable()
        switches.append(switch)
        if switch.patches:
            notes.append(f"{layer.name}: no variable switches it off, but cachectl run --no-cache does")
    if folder is not None and (reason := why_closed(folder, stack.environment.home_folder)) is not None:
        notes.append(f"{reason}; see cachectl doctor --place {shlex.quote(str(folder))}")
    try:
        child.make_folders(switches)
    except OSError as error:
        notes.append(f"{error.filename}: cannot be made ({error.strerror}); layers that need it store nothing")
    return child.merged(switches), notes


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl env``."""
    options = request.options
    if not (options.disable or options.enable or options.root is not None):
        request.misuse("choose --disable, --enable or --root")
    changes, notes = env(request.stack, enable=options.enable, root=options.root, layers=options.layers)
    login = PurePath(request.environment.get("SHELL") or "sh").name
    request.output.show_raw(format_changes(changes, options.shell or _LOGIN.get(login, "sh")))
    for note in notes:
        request.notice(note)
    return 0


def format_changes(changes: Mapping[str, str | None], shell: str) -> list[str]:
    """Return a command for each variable; ``None`` unsets it. Raises :class:`CachectlError` if csh cannot quote it."""
    put, remove = _SYNTAXES[shell]
    lines = []
    for name, value in sorted(changes.items()):
        if value is None:
            lines.append(remove.format(name=name))
            continue
        quoted = shlex.quote(value)
        if shell == "fish":
            quoted = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        elif shell == "powershell":
            # PowerShell treats typographic single quotes as plain ones.
            quoted = "'" + re.sub("(['\u2018\u2019\u201a\u201b])", r"\1\1", value) + "'"
        elif shell == "csh" and "\n" in value:
            # csh splits the output of `...` at newlines, even quoted ones.
            raise CachectlError(f"csh cannot quote a value that contains a newline: {value!r}")
        elif shell == "csh":
            # csh expands ! even in single quotes.
            quoted = quoted.replace("!", "\\!")
        lines.append(put.format(name=name, value=quoted))
    return lines
