"""``cachectl env``: variables as shell commands, for ``eval``."""

from __future__ import annotations

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser
from cachectl.switching.shells import SHELLS, format_changes, guess_shell


def add_options(parser: Parser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--disable", action="store_true", help="switch layers off")
    what.add_argument("--enable", action="store_true", help="switch layers on")
    what.add_argument(
        "--root", metavar="DIR", help="keep every layer under one folder (moves XDG_CACHE_HOME, for every program)"
    )
    parser.add_shared("--layer")
    parser.add_argument("--shell", choices=SHELLS, help="whose commands to print (default: the login shell's)")


def run(call: Call) -> int:
    given = call.options
    changes, notes = call.stack.env(enable=given.enable, root=given.root, layers=given.layers)
    output.show_raw(format_changes(changes, given.shell or guess_shell(call.environment.get("SHELL"))))
    for note in notes:
        output.warn(note)
    return 0
