"""``cachectl env``: variables as shell commands, for ``eval``."""

from __future__ import annotations

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser
from cachectl.switching.shells import SHELLS, format_changes, guess_shell


def add_options(parser: Parser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--disable", action="store_true", help="switch layers off")
    what.add_argument("--enable", action="store_true", help="switch layers on")
    what.add_argument(
        "--root", metavar="DIR", help="keep every layer under one folder (moves XDG_CACHE_HOME, for every program)"
    )
    parser.add_argument(
        "--base", metavar="DIR", help="start every layer warm from DIR, which may be read-only; --root is your own root"
    )
    parser.add_shared("--layer")
    parser.add_argument("--shell", choices=SHELLS, help="whose commands to print (default: the login shell's)")


def run(call: Call) -> int:
    given = call.options
    if not (given.disable or given.enable or given.root is not None or given.base is not None):
        call.misuse("choose --disable, --enable, --root or --base")
    if given.base is not None and (given.disable or given.enable):
        call.misuse("--base starts layers warm, which is on; leave --disable or --enable out")
    changes, notes = call.stack.env(enable=given.enable, root=given.root, base=given.base, layers=given.layers)
    output.show_raw(format_changes(changes, given.shell or guess_shell(call.environment.get("SHELL"))))
    for note in notes:
        output.warn(note)
    return 0
