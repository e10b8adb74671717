"""The grammar of the command line: every verb with its summary. The file of a verb declares its options.

Only the verb that was typed is imported: importing all of them takes longer than most reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final, NoReturn

from cachectl import __version__

if TYPE_CHECKING:
    from typing import Protocol

    from cachectl.cli.call import Call

    class VerbModule(Protocol):
        """What the file of a verb has."""

        def add_options(self, parser: argparse.ArgumentParser) -> None:
            """Declare the options of the verb."""

        def run(self, call: Call) -> int:
            """Carry out the verb, show what it returns, and return the exit status."""


#: Every verb in the order of the help: the module that has it, and what it does.
VERBS: Final[dict[str, tuple[str, str]]] = {
    "report": ("inspecting.report", "locations, state, entries, bytes, stale, problems"),
    "ls": ("inspecting.ls", "entries, one a line"),
    "get": ("moving.get", "write one entry to a file"),
    "put": ("moving.put", "place an entry that get wrote, so that the library hits it"),
    "purge": ("clearing.purge", "remove entries; --all is every user layer but tuning results"),
    "prune": ("clearing.prune", "remove what is stale or old, then the longest unused until the rest fits"),
    "verify": ("inspecting.verify", "look for damage, entry by entry"),
    "restore": ("clearing.restore", "list what verify --quarantine moved aside, or bring it back"),
    "doctor": ("inspecting.doctor", "what is wrong with this set-up, and the command that fixes it"),
    "run": ("switching.run", "run a command with caches off, or on in empty roots"),
    "env": ("switching.env", "variables as shell commands, for eval"),
    "trace": ("observing.trace", "hits, misses and stores of every layer in a run of a command"),
    "bench": ("observing.bench", "what each cache is worth to a command: all cold, all warm, each off in turn"),
    "export": ("moving.export", "pack entries into one file, for another machine"),
    "import": ("moving.import_", "place what export packed, once it is trusted and checked"),
    "miopen": ("moving.miopen", "merge databases of MIOpen, of several users or ranks"),
    "stage": ("cluster.stage", "warm caches to every node of an MPI job, and back"),
    "merge": ("cluster.merge", "entries of several folders, of ranks for instance, into one"),
    "layers": ("inspecting.layers", "adapters, what each can do here, and why not"),
    "demo": ("demo", "the whole story on PoCL, in an isolated root"),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and end the program with status 2."""
        from cachectl.cli.output import warn

        warn(f"{message}; try {self.prog} --help", self.prog)
        raise SystemExit(2)


def verb_module(verb: str) -> VerbModule:
    """Import the file of a verb."""
    found: VerbModule = import_module(f"cachectl.cli.{VERBS[verb][0]}")
    return found


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the verb among some words, or one with every summary if there is none.

    Without ``words`` it has every verb with all its options, for the reference in the documentation.
    """
    parser = _Parser(
        prog="cachectl",
        allow_abbrev=False,
        description="See, clear, switch and prove every kernel cache of the OpenCL stack.",
        epilog="LAYER is one of those that 'cachectl layers' lists; none means all.",
    )
    parser.add_argument("--version", action="version", version=f"cachectl {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="verb")
    typed = VERBS.keys() if words is None else VERBS.keys() & set(words)
    for name, (_, summary) in VERBS.items():
        if typed and name not in typed:
            continue
        description = summary[0].upper() + summary[1:] + "."
        verb = verbs.add_parser(name, help=summary, description=description, allow_abbrev=False, add_help=bool(typed))
        if typed:
            verb.set_defaults(parser=verb)
            verb_module(name).add_options(verb)
    return parser
