"""What the file of a verb declares for the command line, its options as data, and what it is given."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.core.selection import Selection, parse_age, parse_size
from cachectl.layers.host.here import this_environment
from cachectl.layers.host.variables import process_variable

# Layers are imported when they are asked for: --help and --version need none.
if TYPE_CHECKING:
    from cachectl import config as settings
    from cachectl import layer_set
    from cachectl.exchange.trust import Trust
    from cachectl.show import output_files


#: Counts what is done of long work: the number, and where something begins what it is, and how many there are in all.
Progress = Callable[..., None]


class Request:
    """What a verb is given by the command line: the options that were typed, and the command after ``--``.

    ``words`` is the whole line. ``output`` is the module that prints (:mod:`cachectl.cli.output`); ``notice`` prints a
    line on standard error. ``environment`` is the one that :func:`~cachectl.cli.main.main` was given, by default this
    process's.
    """

    def __init__(
        self,
        output: Any,  # noqa: ANN401 - a module
        options: argparse.Namespace,
        words: Sequence[str],
        command: Sequence[str],
        environment: Environment | None,
    ) -> None:
        self.output = output
        self.notice: Callable[[str], None] = output.warn
        self.options = options
        self.words = list(words)
        self.command = list(command)
        self._given = environment

    @cached_property
    def _here(self) -> Environment:
        """The environment without options and settings."""
        if self._given is not None:
            return self._given
        try:
            return this_environment()
        except OSError as error:
            where = process_variable("PWD") or "the working folder"
            raise CachectlError(
                f"{where}: {error.strerror}; the working folder has gone or is closed to you, cd to another"
            ) from error

    @cached_property
    def environment(self) -> Environment:
        """The environment, with the options and settings that change how caches are read and changed."""
        here, options = self._here, vars(self.options)
        if (below := options.get("below")) is not None:
            from cachectl.switching.child import environment_below

            here = environment_below(here, below)
        if pythons := options.get("python") or self.config.get("python"):
            from cachectl.layers.host.pythons import named_pythons

            here = here._replace(python_paths=named_pythons(here, pythons))
        waits = (options.get("wait"), self.config.get("wait"), here.lock_timeout)
        shared = bool(options.get("shared") or self.config.get("shared"))
        # Nobody counts where no progress is shown.
        here = here._replace(step=self.output.step) if sys.stderr.isatty() else here
        return here._replace(lock_timeout=next(wait for wait in waits if wait is not None), shared=shared)

    @cached_property
    def stack(self) -> layer_set.LayerSet:
        """The layers of the environment; broken plug-ins are warned of."""
        from cachectl import layer_set

        stack, options = layer_set.LayerSet(self.environment), vars(self.options)
        # A verb about all layers is incomplete without them.
        if not options.get("layers") and not options.get("layer"):
            for plugin in stack.broken:
                self.notice(f"plug-in {plugin['name']}: {plugin['why']}")
        return stack

    def warn_of_dead(self, gone: Collection[str]) -> None:
        """Warn of layers with entries that nothing can hit without those of layers that are ``gone``."""
        for name in gone:
            for layer in map(self.stack.__getitem__, self.stack[name].about.ahead_of):
                if layer.name not in gone and any(root.exists for root in layer.roots()):
                    said = f"entries of programs that {name} holds too cannot be hit without {name}'s entries"
                    self.notice(f"{layer.name}: {said}")

    @cached_property
    def config(self) -> settings.Config:
        """The config files and variables. Raises as :func:`cachectl.config.load` does."""
        from cachectl import config as settings

        return settings.load(self._here)

    @property
    def now(self) -> float:
        """The time of the environment in epoch seconds."""
        return self.environment.clock()

    @property
    def form(self) -> str:
        """The form of the output: ``table``, ``json`` or ``csv``."""
        return "json" if self.options.json else "csv" if getattr(self.options, "csv", False) else "table"

    def misuse(self, message: str) -> NoReturn:
        """Print what is wrong with the options, and end the program with status 2."""
        self.options.parser.error(message)
        raise SystemExit(2)

    def demand_command(self) -> None:
        """Raise :class:`BadRequest`, with the corrected line, unless the command is behind ``--``, all of it."""
        import shlex

        if unexpected := getattr(self.options, "unexpected", []):
            at = (self.words.index("--") if "--" in self.words else len(self.words)) - len(unexpected)
            before, after = self.words[:at], self.words[at:]
            what, line = "write -- before the command", [*before, "--", *after]
            if self.command and len(unexpected) == 1 and before[-1] == "--isolated":
                what, line = "write the folder after =", [*before[:-1], f"--isolated={unexpected[0]}", *after[1:]]
            raise BadRequest(f"{what}: {shlex.join(['cachectl', *line])}")
        if not self.command:
            self.misuse("end the line with -- and the command to run")

    def selection(self) -> Selection:
        """Return which entries were selected."""
        options = self.options
        return Selection(options.kernel, options.key, options.older_than, options.stale, now=self.now)

    @property
    def portable(self) -> bool:
        """Whether builds are to be portable, by the option or the settings."""
        return bool(self.options.portable or self.config.get("portable"))

    def trust(self) -> Trust | None:
        """Return why a store is trusted; ``None`` if no option says so."""
        from cachectl.exchange.trust import Trust

        typed = (self.options.allowed_signers, self.options.digest, self.options.trust)
        return None if typed == (None, None, False) else Trust(*typed)

    def target(self, name: str) -> str:
        """Return the address of a store, which no layer's name may be."""
        if name in self.stack:
            self.misuse(f"{name!r} is a layer: write what to read or write before the layers, or ./{name}")
        return name

    def outputs(self, *named: tuple[str | None, output_files.Kind]) -> list[Any]:
        """Return each :class:`OutputFile`, checked before a long run; ``None`` for a name that was not given."""
        from cachectl.show import output_files

        options = self.options
        files = [
            None if name is None else output_files.OutputFile(name, kind, self.stack, options.force)
            for name, kind in named
        ]
        output_files.demand_targets(*files)
        return files

    def write_json(self, fact: object, file: output_files.OutputFile | None) -> None:
        """Write a fact to a file, if one was named, as a JSON document."""
        if file is not None and file.name == "-":
            self.output.show_json(fact)
        elif file is not None:
            from cachectl.show.document import json_bytes

            file.write((json_bytes(fact),))


class OfUsers(NamedTuple):
    """What ``--all-users`` shows of a verb: a list in its document, and the texts and numbers of the items in it.

    Items of a user that have the same texts are one line. Items without numbers are one line for all users that have
    the ``same`` texts, with their number. Lines are in the ``order`` of a number, the largest or the oldest first.
    """

    items: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    order: str = "bytes"


# ---------------------------------------------------------------------- options


# An option or an argument is a row: its names, separated by blanks, and its help; if it has a value, the name of that
# between them; and last what else :meth:`argparse.ArgumentParser.add_argument` takes. A list holds options of which one
# can be given; a list that begins with a title is a group of the help.

#: An option that may be repeated; its value is a list.
REPEATED = {"action": "append", "default": []}
#: An argument with any number of values. Without a default, argparse calls it required.
MANY = {"nargs": "*", "default": []}
#: Stands for the folder of a bare ``--isolated``; no argument of a process can contain it.
NO_FOLDER = "\0"


def folder(text: str) -> str:
    """Parse a folder, which an unset variable of a shell is not: an empty path means the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("no folder is named")
    return text


def number(text: str) -> int:
    """Parse a number of at least 1. argparse prints the function's name in its errors."""
    if (parsed := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than one")
    return parsed


def seconds(text: str) -> float:
    """Parse seconds, at most a day."""
    if not 0 <= (parsed := float(text)) <= 86400:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400")
    return parsed


def _read_by(parse: Callable[[str], int | float]) -> Callable[[str], int | float]:
    """Return the type of an option that a function of the selection reads."""

    def read(text: str) -> int | float:
        try:
            return parse(text)
        except BadRequest as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


age_of, size_of = _read_by(parse_age), _read_by(parse_size)
LAYERS = ("layers", "LAYER", "a layer that cachectl layers lists, or several with commas (default: all)", MANY)
CLEARABLE = ("layers", "LAYER", "a layer that cachectl layers lists (default: a user's, but no tuning results)", MANY)
ONE_LAYER = ("layer", "LAYER", "the layer that keeps the entry")
LAYER = ("--layer", "LAYER", "only this one; several with commas, or repeated", REPEATED | {"dest": "layers"})
KEY = ("key", "KEY", "the entry's key, as cachectl ls -q prints it, or the short one of ls -l")
DRY_RUN = ("-n --dry-run", "list what would go, and touch nothing")
#: Of verbs that remove entries.
VERBOSE = ("-v --verbose", "list every layer, and with --dry-run every entry")
VERBOSE_FINDINGS = ("-v --verbose", "every finding, also harmless ones, and what no check can show")
VERBOSE_MESSAGES = ("-v --verbose", "every message, also equal ones")
PORTABLE = ("--portable", "leave PyOpenCL's folder out of builds that do not need it: their entries hit at any path")
FORCE = ("--force", "replace an existing FILE that cachectl did not write")
FORCE_BUNDLE = ("--force", "replace an existing FILE that is not a bundle")
JSON = ("--json", "print JSON")
CSV = ("--csv", "print CSV: bytes and seconds as numbers")
FORM = [JSON, CSV]
ROOT = ("--root", "DIR", "the layers in the isolated root DIR (run --isolated=DIR)", {"type": folder, "dest": "below"})
USER = ("--user", "NAME", "as root: this user's caches; may be repeated", REPEATED)
ALL_USERS = ("--all-users", "as root: the caches of all users (UID_MIN to UID_MAX of login.defs)")
PLACES = [ROOT, USER, ALL_USERS]
PYTHON = (
    "--python",
    "PATH",
    "one more Python whose entries are not stale; may be repeated",
    REPEATED,
)
WAIT = ("--wait", "SECONDS", "how long to wait for a lock of another process (default: 5)", {"type": seconds})
SHARED = ("--shared", "also change a cache that other users can write: you trust them")
#: Options of purge and prune, of which the second ones are those of verbs that change caches and have a table.
REMOVING = (DRY_RUN, VERBOSE, PLACES)
CHANGING = (WAIT, SHARED, FORM)
SELECTION = [
    "selection",
    ("--kernel", "GLOB", "entries of kernels whose name matches"),
    ("--older-than", "AGE", "not changed or used for 30d, 12h, 2w", {"type": age_of}),
    ("--stale", "entries whose driver was seen here and has gone"),
    ("--key", "KEY", "the entry of this key, whole or short"),
]
#: What a store can lie in.
STORES = "a bundle FILE (.zip), a folder, s3://, ssh:// or oci://"
TRUST = [
    ("--allowed-signers", "LIST", "take what a signer of this list has signed (ssh-keygen -Y)"),
    ("--digest", "HEX", "the SHA-256 of the bundle, or the digest of another store, as store ls prints it"),
    ("--trust", "trust it unchecked: it is code that your programs will run"),
]
SIGN = ("--sign", "KEY", "sign what is added with a key of OpenSSH")
#: Words before ``--`` that are no option: a command without ``--``, with its own options.
UNEXPECTED = ("unexpected", None, argparse.SUPPRESS, {"nargs": argparse.REMAINDER})
