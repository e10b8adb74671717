"""``cachectl completion``: a script that completes commands, options, layers, keys and kernels in a shell.

The files ``completion.SHELL`` next to this module have what shtab cannot derive from the grammar.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from importlib.resources import files

from cachectl import listing, verbs
from cachectl.cli import main
from cachectl.layers.base.text import printable
from cachectl.layers.core.selection import ALL

SHELLS = ("bash", "zsh", "fish")
#: The words that the script requests while a line is typed, by the placeholder in the help.
_WORDS = {"LAYER": "layers", "KEY": "keys", "GLOB": "kernels"}
#: Seconds after which the search for words ends: nobody waits longer for a completion.
_PATIENCE = 0.15
_FILES = ("FILE", "LIST", "PATH", "BUNDLE")
EXAMPLE = "cachectl completion bash >> ~/.bashrc"
OPTIONS = (
    [
        ("shell", None, "the shell to print a script for", {"nargs": "?", "choices": SHELLS}),
        ("--words", None, argparse.SUPPRESS, {"choices": tuple(_WORDS.values())}),
    ],
)


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl completion``."""
    options = request.options
    if options.words is not None:
        request.output.show_raw(sorted(set(map(printable, _words(request, options.words)))))
    elif options.shell is None:
        request.misuse(f"name the shell: {', '.join(SHELLS)}")
    else:
        request.output.show_raw(script(options.shell).splitlines())
    return 0


def script(shell: str) -> str:
    """Return the completion script of a shell, made from the grammar of the command line."""
    import shtab

    parser = main.build_parser()
    for action in _actions(parser):
        name = str(action.metavar)
        complete: object = None
        if name in _WORDS and "--sign" not in action.option_strings:
            words = _WORDS[name]
            complete = {
                "bash": f"_cachectl_{words}",
                "zsh": f"_cachectl_words {words}",
                # The script must not print an error into the line that is being typed.
                "fish": f"(cachectl completion --words {words} 2>/dev/null)",
            }
        elif name in _FILES or "--sign" in action.option_strings:
            complete = shtab.FILE
        elif "DIR" in name:
            complete = shtab.DIRECTORY
        if complete is not None:
            action.complete = complete  # type: ignore[attr-defined]
    text = str(shtab.complete(parser, shell))
    if shell == "zsh":
        # The end that shtab writes works only with eval, not with source.
        text = text.partition("if [[ $zsh_eval_context")[0]
        # More layers can follow the first LAYER, and --option=VALUE is the same as --option VALUE.
        text = re.sub(r'"\(\*\)::?', '"*:', text)
        text = re.sub(r'(--[\w-]+)(\}?"?\[.*\]:)', r"\1=\2", text)
    return text + files("cachectl.cli").joinpath(f"completion.{shell}").read_text(encoding="utf-8").rstrip()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for verb in action.choices.values():
                yield from _actions(verb)
        yield action


def _words(request: verbs.Request, what: str) -> Iterator[str]:
    if what == "layers":
        yield from (layer.name for layer in request.stack)
        return
    deadline = time.monotonic() + _PATIENCE
    for entry in listing.listed(request.stack, ALL, lambda _trouble: None, contents=what == "kernels"):
        yield from (entry.key,) if what == "keys" else entry.details.kernels or ()
        if time.monotonic() > deadline:
            return
