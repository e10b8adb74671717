"""``cachectl env``: variables as shell commands, for ``eval``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from cachectl import options, table
from cachectl.layers.base import errors, facts
from cachectl.switching import isolated
from cachectl.switching.run import merged

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl import layer_set
    from cachectl.layers.base.layer import Layer

#: How each shell sets a variable, and removes one.
_SYNTAXES: Final = {
    "sh": ("export {name}={value}", "unset {name}"),
    "fish": ("set -gx {name} {value}", "set -e {name}"),
    "csh": ("setenv {name} {value};", "unsetenv {name};"),
    "powershell": ("$env:{name} = {value}", "Remove-Item Env:{name} -ErrorAction SilentlyContinue"),
}
#: Shells by the names of login shells; the others are like sh.
_LOGIN: Final = {"csh": "csh", "tcsh": "csh", "fish": "fish", "pwsh": "powershell"}
OPTIONS: Final = (
    options.OneOf(
        (
            options.Option("--disable", action="store_true", help="switch layers off"),
            options.Option("--enable", action="store_true", help="switch layers on"),
            options.Option(
                "--root",
                metavar="DIR",
                help="keep every layer under one folder (moves XDG_CACHE_HOME, for every program)",
            ),
        )
    ),
    options.Option(
        "--base", metavar="DIR", help="start every layer warm from DIR, which may be read-only; --root is your own root"
    ),
    options.LAYER,
    options.Option("--shell", choices=tuple(_SYNTAXES), help="whose commands to print (default: the login shell's)"),
)


def env(
    stack: layer_set.LayerSet,
    *,
    enable: bool = False,
    root: str | None = None,
    base: str | None = None,
    layers: Iterable[str] = (),
) -> tuple[Mapping[str, str | None], tuple[str, ...]]:
    """Return the variables that switch layers off, on (``enable``) or move them to a folder; ``None`` unsets one.

    With ``base`` that folder is started warm from a read-only one, as ``run`` does it. The second value has a line for
    each layer that variables cannot switch or move. Raises :class:`BadRequest` if ``root`` is not a directory.
    """
    folder = None if root is None else stack.environment.expand(root)
    if folder is not None and (not root or (folder.exists() and not folder.is_dir())):
        raise errors.BadRequest(f"--root {root!r} is not a directory")
    chosen = stack.named(layers)
    if base is None:
        return _variables(chosen, on=enable, root=folder)
    from cachectl.exchange.copying import base_at, start_from

    notes: list[str] = []
    names = [layer.name for layer in chosen] if layers else ()
    place = base_at(stack.environment, base)
    start = start_from(stack.environment, place, folder, layers=names, notice=notes.append)
    changes, others = _variables(chosen, on=True, root=start)
    return changes, (*notes, *others)


def _variables(
    layers: Iterable[Layer], *, on: bool, root: Path | None
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the variables that switch or move layers, and the reasons why some cannot be.

    Makes the folders below ``root`` that a library would not make itself.
    """
    switches: list[facts.Switch] = []
    notes: list[str] = []
    ability = facts.Ability.DISABLE if root is None else facts.Ability.RELOCATE
    for layer in layers:
        reason = layer.abilities()[ability]
        if reason is not None:
            notes.append(f"{layer.name} cannot {ability.value}: {reason}")
            continue
        switch = layer.relocate(root) if root is not None else layer.enable() if on else layer.disable()
        switches.append(switch)
        if switch.patches:
            notes.append(f"{layer.name}: no variable switches it off; cachectl run --no-cache does")
    try:
        isolated.make_folders(switches)
    except OSError as error:
        notes.append(f"{error.filename}: cannot be made ({error.strerror}); a layer that needs it keeps nothing")
    return merged(switches), tuple(notes)


def run(request: options.Request) -> int:
    """Carry out ``cachectl env``."""
    given = request.options
    if not (given.disable or given.enable or given.root is not None or given.base is not None):
        request.misuse("choose --disable, --enable, --root or --base")
    if given.base is not None and (given.disable or given.enable):
        request.misuse("--base starts layers warm, which is on; leave --disable or --enable out")
    changes, notes = env(request.stack, enable=given.enable, root=given.root, base=given.base, layers=given.layers)
    login = PurePath(request.environment.get("SHELL") or "sh").name
    request.say([table.Raw(format_changes(changes, given.shell or _LOGIN.get(login, "sh")))])
    for note in notes:
        request.notice(note)
    return 0


def format_changes(changes: Mapping[str, str | None], shell: str) -> list[str]:
    """Return a command for each variable; ``None`` unsets it. Raises :class:`CachectlError` for a value beyond csh."""
    put, remove = _SYNTAXES[shell]
    return [
        remove.format(name=name) if value is None else put.format(name=name, value=_quoted(value, shell))
        for name, value in sorted(changes.items())
    ]


def _quoted(value: str, shell: str) -> str:
    if shell == "fish":
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if shell == "powershell":
        # It takes typographic single quotes for plain ones.
        return "'" + re.sub("(['\u2018\u2019\u201a\u201b])", r"\1\1", value) + "'"
    if shell == "csh" and "\n" in value:
        # It splits the output of `...` at newlines even if they are quoted.
        raise errors.CachectlError(f"csh cannot quote a value that contains a newline: {value!r}")
    # csh expands ! even between single quotes.
    return shlex.quote(value).replace("!", "\\!") if shell == "csh" else shlex.quote(value)
