"""``cachectl env``: variables as shell commands, for ``eval``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import BadRequest
from cachectl.options import LAYER, OneOf, Option, Request
from cachectl.switching.shells import SHELLS, format_changes, guess_shell
from cachectl.table import Raw

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet

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
    from cachectl.switching.run import variables_for

    folder = None if root is None else stack.environment.expand(root)
    if folder is not None and (not root or (folder.exists() and not folder.is_dir())):
        raise BadRequest(f"--root {root!r} is not a directory")
    chosen = stack.named(layers)
    if base is None:
        return variables_for(chosen, on=enable, root=folder)
    from cachectl.exchange.around import base_at, start_from

    notes: list[str] = []
    names = [layer.name for layer in chosen] if layers else ()
    place = base_at(stack.environment, base)
    start = start_from(stack.environment, place, folder, layers=names, notice=notes.append)
    changes, others = variables_for(chosen, on=True, root=start)
    return changes, (*notes, *others)


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
