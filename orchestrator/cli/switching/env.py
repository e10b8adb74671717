"""``cachectl env``: variables as shell commands, for ``eval``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cachectl.cli import options
from cachectl.cli.output import show_raw, warn
from cachectl.switching.shells import SHELLS, guess_shell, spell

if TYPE_CHECKING:
    from cachectl.cli.call import Call


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--disable", action="store_true", help="switch layers off")
    what.add_argument("--enable", action="store_true", help="switch layers on")
    what.add_argument(
        "--root", metavar="DIR", help="keep every layer under one folder (moves XDG_CACHE_HOME, for every program)"
    )
    options.add_layer(parser)
    parser.add_argument("--shell", choices=SHELLS, help="whose commands to print (default: the login shell's)")


def run(call: Call) -> int:
    """Print the commands."""
    given = call.options
    changes, notes = call.stack.env(enable=given.enable, root=given.root, layers=given.layers)
    show_raw(spell(changes, given.shell or guess_shell(call.environment.get("SHELL"))))
    for note in notes:
        warn(note)
    return 0
