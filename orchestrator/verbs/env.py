"""``cachectl env``: variables as shell commands, for ``eval``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.facts import Ability, Switch
from cachectl.options import LAYER, OneOf, Option, Request
from cachectl.switching.isolated import make_folders
from cachectl.switching.run import merged
from cachectl.switching.shells import SHELLS, format_changes, guess_shell
from cachectl.table import Raw

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer

OPTIONS: Final = (
    OneOf(
        (
            Option("--disable", action="store_true", help="switch layers off"),
            Option("--enable", action="store_true", help="switch layers on"),
            Option(
                "--root",
                metavar="DIR",
                help="keep every layer under one folder (moves XDG_CACHE_HOME, for every program)",
            ),
        )
    ),
    Option(
        "--base", metavar="DIR", help="start every layer warm from DIR, which may be read-only; --root is your own root"
    ),
    LAYER,
    Option("--shell", choices=SHELLS, help="whose commands to print (default: the login shell's)"),
)


def env(
    stack: LayerSet,
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
        raise BadRequest(f"--root {root!r} is not a directory")
    chosen = stack.named(layers)
    if base is None:
        return _variables(chosen, on=enable, root=folder)
    from cachectl.exchange.around import base_at, start_from

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
    switches: list[Switch] = []
    notes: list[str] = []
    ability = Ability.DISABLE if root is None else Ability.RELOCATE
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
        make_folders(switches)
    except OSError as error:
        notes.append(f"{error.filename}: cannot be made ({error.strerror}); a layer that needs it keeps nothing")
    return merged(switches), tuple(notes)


def run(request: Request) -> int:
    """Carry out ``cachectl env``."""
    given = request.options
    if not (given.disable or given.enable or given.root is not None or given.base is not None):
        request.misuse("choose --disable, --enable, --root or --base")
    if given.base is not None and (given.disable or given.enable):
        request.misuse("--base starts layers warm, which is on; leave --disable or --enable out")
    changes, notes = env(request.stack, enable=given.enable, root=given.root, base=given.base, layers=given.layers)
    request.say([Raw(format_changes(changes, given.shell or guess_shell(request.environment.get("SHELL"))))])
    for note in notes:
        request.notice(note)
    return 0
