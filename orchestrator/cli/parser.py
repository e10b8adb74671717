"""The grammar of the command line: every verb with its summary. The file of a verb declares its options.

Only the verb that was typed is imported: importing all of them takes longer than most reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from cachectl import __version__
from cachectl.options import Group, OneOf, Option

#: Every verb in the order of the help, and what it does.
VERBS: Final[dict[str, str]] = {
    "report": "show where caches are and how much they hold",
    "dir": "print the places of caches, one a line",
    "ls": "list entries, one a line",
    "get": "write one entry to a file",
    "put": "place an entry that get wrote, so that the library hits it",
    "purge": "remove entries; --all is every user layer but tuning results",
    "prune": "remove stale or old entries, then the longest unused until the rest fits",
    "verify": "look for damage, entry by entry",
    "doctor": "find problems of this set-up, each with the command that fixes it",
    "run": "run a command with caches off, or on in empty roots",
    "env": "print variables as shell commands, for eval",
    "trace": "count hits, misses and stores of every layer while a command runs",
    "bench": "measure the time each cache saves a command: cold, warm, each off in turn",
    "push": "add to a bundle, a folder or a URL the entries that it lacks",
    "pull": "place the entries of a store or a root that are missing here, once trusted",
    "store": "list, clean up or check a store",
    "stage": "carry warm caches to every node of an MPI job, and back",
    "config": "show what is set, and where",
    "schedule": "print what prunes by itself, and how to install it",
    "layers": "list layers, what each can do here, and why not",
    "completion": "print a script that completes commands, layers, keys and kernels in a shell",
    "demo": "demonstrate cachectl on PoCL, in an isolated root",
}
#: Words that people type first, and the verb that they mean.
MEANT: Final = {
    **dict.fromkeys(("clean", "clear", "rm", "remove", "delete"), "purge"),
    **dict.fromkeys(("info", "stats", "status", "du"), "report"),
    **dict.fromkeys(("list", "show"), "ls"),
    "gc": "prune",
    "export": "push",
    **dict.fromkeys(("import", "merge", "miopen"), "pull"),
    "check": "verify",
    "path": "dir",
}

#: Stands for the folder of a bare ``--isolated``; no argument of a process can contain it.
_NO_FOLDER: Final = "\0"


def mark_bare(words: Sequence[str]) -> list[str]:
    """Mark a bare ``--isolated`` of ``run``: argparse would take the next word for its folder."""
    run = list(words[:1]) == ["run"]
    return [f"{word}={_NO_FOLDER}" if run and word == "--isolated" else word for word in words]


#: The width of what argparse only makes to check it.
_ANY_WIDTH: Final = 78


def add_to(container: argparse._ActionsContainer, options: Iterable[Option | OneOf | Group]) -> None:
    """Add declared options to a parser."""
    for option in options:
        if isinstance(option, OneOf):
            add_to(container.add_mutually_exclusive_group(), option)
        elif isinstance(option, Group):
            add_to(container.add_argument_group(option.title), option)
        else:
            container.add_argument(*option.names, **option.settings)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and end the program with status 2."""
        from cachectl.cli.output import warn

        warn(message if message.endswith("?") else f"{message}; try {self.prog} --help", self.prog)
        raise SystemExit(2)

    _width = _ANY_WIDTH

    def format_help(self) -> str:
        """Return the help in the width of the terminal."""
        self._measure()
        return super().format_help()

    def format_usage(self) -> str:
        """Return the usage in the width of the terminal."""
        self._measure()
        return super().format_usage()

    def _measure(self) -> None:
        import shutil

        self._width = shutil.get_terminal_size().columns - 2

    def _get_formatter(self) -> argparse.HelpFormatter:
        """Pass a width: without one, every option that is added makes argparse import shutil to find it."""
        return argparse.HelpFormatter(self.prog, width=self._width)


def verb_module(verb: str) -> Any:  # noqa: ANN401 - a module
    """Import the file of a verb."""
    # Completion reads the grammar.
    return import_module(f"cachectl.{'cli' if verb == 'completion' else 'verbs'}.{verb}")


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the verb among some words, or one with every summary if there is none.

    Without ``words`` it has every verb with all its options, for the reference in the documentation.
    """
    parser = Parser(
        prog="cachectl",
        allow_abbrev=False,
        description="See, clear, switch and prove every kernel cache of the OpenCL stack.",
        epilog="LAYER is one of those that 'cachectl layers' lists.",
    )
    parser.add_argument("--version", action="version", version=f"cachectl {__version__}")
    # Without prog, argparse formats a usage to find it, for which it imports shutil.
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="verb", prog=parser.prog)
    typed = VERBS.keys() if words is None else VERBS.keys() & set(words)
    for name, summary in VERBS.items():
        if typed and name not in typed:
            continue
        description = summary[0].upper() + summary[1:] + "."
        verb = verbs.add_parser(name, help=summary, description=description, allow_abbrev=False, add_help=bool(typed))
        if typed:
            verb.set_defaults(parser=verb)
            module = verb_module(name)
            add_to(verb, module.OPTIONS)
            verb.usage, verb.epilog = getattr(module, "USAGE", None), getattr(module, "EPILOG", None)
    return parser
