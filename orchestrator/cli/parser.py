"""The grammar of the command line: every verb with its summary. The file of a verb declares its options.

Only the verb that was typed is imported: importing all of them takes longer than most reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from cachectl import __version__
from cachectl import options as common
from cachectl.options import Group, OneOf, Option, positive

__all__ = ["CHANGING", "VERBS", "Parser", "build_parser", "mark_bare", "positive", "verb_module"]

#: Every verb in the order of the help: the module that has it, and what it does.
VERBS: Final[dict[str, tuple[str, str]]] = {
    "report": ("verbs.report", "show where caches are and how much they hold"),
    "dir": ("verbs.dir", "print the places of caches, one a line"),
    "ls": ("verbs.ls", "list entries, one a line"),
    "get": ("verbs.get", "write one entry to a file"),
    "put": ("verbs.put", "place an entry that get wrote, so that the library hits it"),
    "purge": ("verbs.purge", "remove entries; --all is every user layer but tuning results"),
    "prune": ("verbs.prune", "remove stale or old entries, then the longest unused until the rest fits"),
    "verify": ("verbs.verify", "look for damage, entry by entry"),
    "doctor": ("verbs.doctor", "find problems of this set-up, each with the command that fixes it"),
    "run": ("verbs.run", "run a command with caches off, or on in empty roots"),
    "env": ("verbs.env", "print variables as shell commands, for eval"),
    "trace": ("verbs.trace", "count hits, misses and stores of every layer while a command runs"),
    "bench": ("verbs.bench", "measure the time each cache saves a command: cold, warm, each off in turn"),
    "push": ("cli.exchange.push", "add to a bundle, a folder or a URL the entries that it lacks"),
    "pull": (
        "cli.exchange.pull",
        "place the entries of a store or a root that are missing here, once trusted",
    ),
    "store": ("cli.exchange.store", "list, clean up or check a store"),
    "stage": ("cli.exchange.stage", "carry warm caches to every node of an MPI job, and back"),
    "config": ("verbs.config", "show what is set, and where"),
    "schedule": ("verbs.schedule", "print what prunes by itself, and how to install it"),
    "layers": ("verbs.layers", "list layers, what each can do here, and why not"),
    "completion": ("cli.completion", "print a script that completes commands, layers, keys and kernels in a shell"),
    "demo": ("verbs.demo", "demonstrate cachectl on PoCL, in an isolated root"),
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


#: Options of verbs that have no file in ``verbs`` yet.
_SHARED: Final[dict[str, Option]] = {
    "unexpected": common.UNEXPECTED,
    "--sign": Option("--sign", metavar="KEY", help="sign what is added with a key of OpenSSH"),
    "--python": common.PYTHON,
    "--wait": common.WAIT,
    "--shared": common.SHARED,
    "--verbose": common.LISTING,
    "--json": common.JSON,
}
#: Options of every verb that changes a cache.
CHANGING: Final = ("--wait", "--shared")
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
    """A parser whose errors are one line, with the options that several verbs share."""

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

    def add_shared(self, *names: str) -> None:
        """Add options of :data:`_SHARED`."""
        add_to(self, [_SHARED[name] for name in names])

    def add_layers(self, default: str = "default: all") -> None:
        """Add the argument LAYER, which may be repeated; ``default`` says what none means."""
        add_to(self, [common.LAYERS.having(help=f"a layer that cachectl layers lists ({default})")])

    def add_form(self, *others: str) -> None:
        """Add options for the form of the output; ``others`` are options of :data:`_SHARED`."""
        self.add_shared(*others)
        add_to(self, [common.FORM])

    def add_selection(self, *, layers: bool = False) -> None:
        """Add the options that select entries, and with ``layers`` those whose entries go elsewhere."""
        if layers:
            self.add_layers("default: all but tuning results")
        add_to(self, [common.SELECTION])

    def add_places(self, *, users: bool = False, root: bool = True) -> None:
        """Add options that name other places than those of this environment, of which one can be given."""
        add_to(self, [common.PLACES if users else common.ROOT] if root else [])

    def add_trust(self, group: argparse._ActionsContainer | None = None) -> None:
        """Add the options that say why a store is trusted."""
        why = (self if group is None else group).add_mutually_exclusive_group()
        signed = "take what a signer of this list has signed (ssh-keygen -Y)"
        why.add_argument("--allowed-signers", metavar="LIST", help=signed)
        pinned = "the SHA-256 of the bundle, or the digest of another store, as store ls prints it"
        why.add_argument("--digest", metavar="HEX", help=pinned)
        unchecked = "trust it unchecked: it is code that your programs will run"
        why.add_argument("--trust", action="store_true", help=unchecked)

    def add_dry_run(self, what: str) -> None:
        """Add ``--dry-run``."""
        self.add_argument("-n", "--dry-run", action="store_true", help=f"list what would {what}, and touch nothing")

    def add_force(self, kind: str) -> None:
        """Add ``--force``."""
        self.add_argument("--force", action="store_true", help=f"replace an existing FILE that is not {kind}")


def verb_module(verb: str) -> Any:  # noqa: ANN401 - a module
    """Import the file of a verb."""
    return import_module(f"cachectl.{VERBS[verb][0]}")


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
    for name, (_, summary) in VERBS.items():
        if typed and name not in typed:
            continue
        description = summary[0].upper() + summary[1:] + "."
        verb = verbs.add_parser(name, help=summary, description=description, allow_abbrev=False, add_help=bool(typed))
        if typed:
            verb.set_defaults(parser=verb)
            module = verb_module(name)
            if hasattr(module, "OPTIONS"):
                add_to(verb, module.OPTIONS)
                verb.usage, verb.epilog = getattr(module, "USAGE", None), getattr(module, "EPILOG", None)
            else:
                module.add_options(verb)
    return parser
