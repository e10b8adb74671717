"""``cachectl completion``: a script that completes commands, options, layers, keys and kernels in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser, build_parser

SHELLS: Final = ("bash", "zsh", "fish")
#: The words that the script asks for while a line is typed, by how a placeholder is called in the help.
_WORDS: Final = {"LAYER": "layers", "KEY": "keys", "GLOB": "kernels"}
_FILES: Final = ("FILE", "LIST", "PATH", "BUNDLE")


def add_options(parser: Parser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("shell", nargs="?", choices=SHELLS, help="the shell to print a script for")
    what.add_argument("--words", choices=tuple(_WORDS.values()), help=argparse.SUPPRESS)


def run(call: Call) -> int:
    given = call.options
    if given.words is not None:
        output.show_lines(sorted(set(_words(call, given.words))))
        return 0
    if given.shell is None:
        call.misuse(f"name the shell: {', '.join(SHELLS)}")
    output.show_lines(script(given.shell).splitlines())
    return 0


def script(shell: str) -> str:
    """Return the completion script of a shell, made from the grammar of the command line."""
    import shtab

    parser = build_parser()
    for action in _actions(parser):
        name = str(action.metavar)
        complete: object = None
        if name in _WORDS and "--sign" not in action.option_strings:
            # The script must not print an error into the line that is being typed.
            complete = shtab.cmd(f"cachectl completion --words {_WORDS[name]} 2>/dev/null")
        elif name in _FILES or "--sign" in action.option_strings:
            complete = shtab.FILE
        elif "DIR" in name:
            complete = shtab.DIRECTORY
        if complete is not None:
            action.complete = complete  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its verbs."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list of them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for verb in action.choices.values():
                yield from _actions(verb)
        yield action


def _words(call: Call, what: str) -> Iterator[str]:
    if what == "layers":
        yield from (layer.name for layer in call.stack)
        return
    for entry in call.stack.entries(notice=lambda _trouble: None):
        yield from (entry.key,) if what == "keys" else entry.kernels or ()
