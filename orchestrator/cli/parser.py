"""The grammar of the command line: every verb with its summary. The file of a verb declares its options.

Only the verb that was typed is imported: importing all of them takes longer than most reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

from cachectl import __version__

if TYPE_CHECKING:
    from typing import Protocol

    from cachectl.cli.call import Call

    class VerbModule(Protocol):
        """The members of a verb's module."""

        def add_options(self, parser: argparse.ArgumentParser) -> None:
            """Declare the options of the verb."""

        def run(self, call: Call) -> int:
            """Carry out the verb, show what it returns, and return the exit status."""


#: Every verb in the order of the help: the module that has it, and what it does.
VERBS: Final[dict[str, tuple[str, str]]] = {
    "report": ("inspecting.report", "locations, state, entries, bytes, stale, problems"),
    "dir": ("inspecting.dir", "the places of caches, one a line"),
    "ls": ("inspecting.ls", "entries, one a line"),
    "get": ("moving.get", "write one entry to a file"),
    "put": ("moving.put", "place an entry that get wrote, so that the library hits it"),
    "purge": ("clearing.purge", "remove entries; --all is every user layer but tuning results"),
    "prune": ("clearing.prune", "remove stale or old entries, then the longest unused until the rest fits"),
    "verify": ("inspecting.verify", "look for damage, entry by entry"),
    "doctor": ("inspecting.doctor", "problems of this set-up, each with the command that fixes it"),
    "run": ("switching.run", "run a command with caches off, or on in empty roots"),
    "env": ("switching.env", "variables as shell commands, for eval"),
    "trace": ("observing.trace", "hits, misses and stores of every layer in a run of a command"),
    "bench": ("observing.bench", "the time each cache saves a command: all cold, all warm, each off in turn"),
    "export": ("moving.export", "pack entries into one file, for another machine"),
    "import": ("moving.import_", "place what export packed, once it is trusted and checked"),
    "push": ("sharing.push", "add to a shared store the entries that it lacks"),
    "pull": ("sharing.pull", "place the entries of a shared store that are missing here, once they are trusted"),
    "store": ("sharing.store", "list, clean up or check a shared store"),
    "miopen": ("moving.miopen", "merge databases of MIOpen, of several users or ranks"),
    "stage": ("cluster.stage", "warm caches to every node of an MPI job, and back"),
    "merge": ("cluster.merge", "entries of several folders, of ranks for instance, into one"),
    "config": ("inspecting.config", "every setting, and the file, line or variable that it comes from"),
    "schedule": ("clearing.schedule", "prune by itself: a user timer, a cron line, or an epilog of Slurm"),
    "layers": ("inspecting.layers", "adapters, what each can do here, and why not"),
    "completion": ("completion", "a script that completes commands, layers, keys and kernels in a shell"),
    "demo": ("demo", "a demonstration on PoCL, in an isolated root"),
}


#: The longest wait for a lock in seconds: a day.
_LONGEST: Final = 86400.0
#: Stands for the folder of a bare ``--isolated``; no argument of a process can contain it.
_NO_FOLDER: Final = "\0"


def mark_bare(words: Sequence[str]) -> list[str]:
    """Mark a bare ``--isolated`` of ``run``: argparse would take the next word for its folder."""
    run = list(words[:1]) == ["run"]
    return [f"{word}={_NO_FOLDER}" if run and word == "--isolated" else word for word in words]


def folder(text: str) -> str:
    """Parse the folder of ``--isolated=DIR``; it is empty for a bare ``--isolated``."""
    if not text:
        raise argparse.ArgumentTypeError("no folder after =; write --isolated=DIR, or --isolated alone")
    return text.removeprefix(_NO_FOLDER)


def _place(text: str) -> str:
    """Parse a folder, which an unset variable of a shell is not: an empty path means the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("no folder is named")
    return text


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    number = int(text)
    if number < 1:
        message = f"{text} is less than one"
        raise argparse.ArgumentTypeError(message)
    return number


# argparse prints this name in its errors.
positive.__name__ = "number"


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= _LONGEST:
        message = f"{text} is not between 0 and {_LONGEST:.0f}"
        raise argparse.ArgumentTypeError(message)
    return number


_seconds.__name__ = "seconds"


_WAIT: Final = "how long to wait for a lock of another process (default: 5)"
_PYTHON: Final = "a Python whose entries are not stale; may be repeated. Without it, Pythons are looked for on PATH"
_ONE_LAYER: Final = "only this one; may be repeated"
#: Arguments and options that several verbs share, with their settings.
SHARED: Final[dict[str, dict[str, Any]]] = {
    "--layer": {"action": "append", "default": [], "dest": "layers", "metavar": "LAYER", "help": _ONE_LAYER},
    "layer": {"metavar": "LAYER", "help": "the layer that keeps the entry"},
    "key": {"metavar": "KEY", "help": "the entry's key, as cachectl ls -q prints it; get takes the beginning of one"},
    # Words before -- that are no option: a command without --, with its own options.
    "unexpected": {"nargs": argparse.REMAINDER, "help": argparse.SUPPRESS},
    "--sign": {"metavar": "KEY", "help": "sign it with a key of OpenSSH; the signature is FILE.sig"},
    "--python": {"action": "append", "default": [], "metavar": "PATH", "help": _PYTHON},
    "--wait": {"type": _seconds, "metavar": "SECONDS", "help": _WAIT},
    "--shared": {"action": "store_true", "help": "also change a cache that other users can write: you trust them"},
    "--verbose": {"action": "store_true", "help": "list every layer, and with --dry-run every entry"},
    "--all-layers": {"action": "store_true", "help": "also list layers with nothing in them"},
    "--json": {"action": "store_true", "help": "the same as --format json"},
}
#: The forms of output.
FORMS: Final = ("table", "json", "jsonl", "csv")
#: Options of every verb that changes a cache.
CHANGING: Final = ("--wait", "--shared")


#: The width of what argparse only makes to check it.
_ANY_WIDTH: Final = 78


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the options that several verbs share."""

    def error(self, message: str) -> NoReturn:
        """Print the error and end the program with status 2."""
        from cachectl.cli.output import warn

        warn(f"{message}; try {self.prog} --help", self.prog)
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
        """Add options that several verbs share, by their names in :data:`SHARED`."""
        for name in names:
            self.add_argument(*(("-v",) if name == "--verbose" else ()), name, **SHARED[name])

    def add_layers(self, default: str = "default: all") -> None:
        """Add the argument LAYER, which may be repeated; ``default`` says what none means."""
        listed = f"a layer that cachectl layers lists ({default})"
        # Without a default, argparse calls it required.
        self.add_argument("layers", nargs="*", default=[], metavar="LAYER", help=listed)

    def add_form(self, *others: str) -> argparse._MutuallyExclusiveGroup:
        """Add options for the form of the output, and return their group; ``others`` are shared options."""
        self.add_shared(*others)
        form = self.add_mutually_exclusive_group()
        forms = "table (default), json, jsonl (an object a line) or csv (bytes and seconds as numbers)"
        form.add_argument("--format", choices=FORMS, default=FORMS[0], help=forms)
        form.add_argument("--json", **SHARED["--json"])
        return form

    def add_selection(self, *, layers: bool = False) -> None:
        """Add the options that select entries, and with ``layers`` those whose entries go elsewhere."""
        if layers:
            self.add_layers("default: all but tuning results")
        group = self.add_argument_group("selection")
        group.add_argument("--kernel", metavar="GLOB", help="entries of kernels whose name matches")
        group.add_argument("--older-than", metavar="AGE", help="not changed or used for 30d, 12h, 2w")
        stale = "entries that no known Python or driver can hit any more"
        group.add_argument("--stale", action="store_true", help=stale)
        group.add_argument("--key", metavar="KEY", help="the entry of this key, or of the only one that begins so")

    def add_places(self, *, users: bool = False, root: bool = False) -> None:
        """Add options that name other places than those of this environment, of which one can be given."""
        where = self.add_mutually_exclusive_group()
        if root:
            below = "the layers as run --isolated=DIR and env --root DIR keep them under DIR"
            where.add_argument("--root", type=_place, dest="below", metavar="DIR", help=below)
        if users:
            named = "as root: the caches of this user, with that user's rights; may be repeated"
            where.add_argument("--user", action="append", default=[], metavar="NAME", help=named)
            everyone = "as root: the same for all users (UID_MIN to UID_MAX of login.defs) whose home exists"
            where.add_argument("--all-users", action="store_true", help=everyone)

    def add_trust(self, file: str) -> None:
        """Add the options that say why a bundle is trusted."""
        why = self.add_mutually_exclusive_group()
        signed = f"{file}.sig is by a signer of this list (ssh-keygen -Y)"
        why.add_argument("--allowed-signers", metavar="LIST", help=signed)
        why.add_argument("--sha256", metavar="HEX", help=f"this is the SHA-256 of {file}")
        why.add_argument(
            "--trust", action="store_true", help="trust the bundle unchecked: it is code that your programs will run"
        )
        newer = "refuse a bundle that was not signed within 30d, 12h, or since 2026-12-31"
        self.add_argument("--newer-than", metavar="AGE", help=newer)

    def add_store_trust(self, *, required: bool) -> None:
        """Add the options that say why a shared store is trusted."""
        why = self.add_mutually_exclusive_group(required=required)
        signed = "take what a signer of this list has signed (ssh-keygen -Y)"
        why.add_argument("--allowed-signers", metavar="LIST", help=signed)
        why.add_argument("--digest", metavar="HEX", help="the store is exactly the one with this digest")
        unchecked = "trust the store unchecked: it is code that your programs will run"
        why.add_argument("--trust", action="store_true", help=unchecked)
        older = "take from a store that is older than, or another than, the one read from URL before"
        self.add_argument("--accept-older", action="store_true", help=older)

    def add_store_use(self) -> None:
        """Add the options for a shared store around a command."""
        group = self.add_argument_group("shared store")
        url = "pull from this shared store before the command, push to it after the command what is new"
        group.add_argument("--store", metavar="URL", help=url)
        modes = "ro: only pull; rw: pull and push (default)"
        group.add_argument("--store-mode", choices=("rw", "ro"), default="rw", help=modes)
        wait = "how long the store may delay the command; then it runs without (default: 30)"
        group.add_argument("--store-wait", type=_seconds, metavar="SECONDS", help=wait)
        why = group.add_mutually_exclusive_group()
        why.add_argument("--allowed-signers", metavar="LIST", help="pull what a signer of this list has signed")
        why.add_argument("--digest", metavar="HEX", help="pull if the store is exactly the one with this digest")
        why.add_argument("--trust", action="store_true", help="pull unchecked: it is code that the command will run")
        group.add_argument("--sign", metavar="KEY", help="sign what is pushed with a key of OpenSSH")

    def add_dry_run(self, what: str) -> None:
        """Add ``--dry-run``."""
        self.add_argument("-n", "--dry-run", action="store_true", help=f"list what would {what}, and touch nothing")

    def add_force(self, kind: str) -> None:
        """Add ``--force``."""
        self.add_argument("--force", action="store_true", help=f"replace an existing FILE that is not {kind}")


def verb_module(verb: str) -> VerbModule:
    """Import the file of a verb."""
    found: VerbModule = import_module(f"cachectl.cli.{VERBS[verb][0]}")
    return found


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
            verb_module(name).add_options(verb)
            colour = "whether to use bold type (default: auto, on a terminal unless NO_COLOR is set)"
            verb.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=colour)
    return parser
