"""What verbs share: the request that each gets from the command line, and its options as data."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.core.selection import Selection, parse_age, parse_size
from cachectl.layers.host.here import this_environment
from cachectl.layers.host.variables import process_variable

# Layers are imported when they are needed, which --help and --version do not.
if TYPE_CHECKING:
    from cachectl import config as settings
    from cachectl import layer_set
    from cachectl.exchange.trust import Trust
    from cachectl.show import output_files


#: Counts the progress of long work: a number to add, and for a new count its name and total.
Progress = Callable[..., None]


class Request:
    """What a verb gets from the command line: the options, and the command after ``--``.

    ``words`` is the complete line. ``output`` is the module that prints (:mod:`cachectl.cli.output`); ``notice`` prints
    a line on standard error. ``environment`` is that of :func:`~cachectl.cli.main.main`, by default this process's.
    """

    def __init__(
        self,
        output: Any,  # noqa: ANN401 - a module
        options: argparse.Namespace,
        words: list[str],
        command: list[str],
        environment: Environment | None,
    ) -> None:
        self.output = output
        self.notice: Callable[[str], None] = output.warn
        self.options = options
        self.words = words
        self.command = command
        self._given = environment

    @cached_property
    def _here(self) -> Environment:
        """The environment without options and settings."""
        if self._given is not None:
            return self._given
        try:
            return this_environment()
        except OSError as error:
            folder = process_variable("PWD") or "the working directory"
            raise CachectlError(f"{folder}: {error.strerror}; cd to a directory that you can use") from error

    @cached_property
    def environment(self) -> Environment:
        """The environment, with the options and settings that affect how caches are read and changed."""
        here, options = self._here, vars(self.options)
        if (below := options.get("below")) is not None:
            from cachectl.switching.child import environment_below

            here = environment_below(here, below)
        if pythons := options.get("python") or self.config.get("python"):
            from cachectl.layers.host.pythons import named_pythons

            here = here._replace(python_paths=named_pythons(here, pythons))
        waits = (options.get("wait"), self.config.get("wait"), here.lock_timeout)
        shared = bool(options.get("shared") or self.config.get("shared"))
        # Counting costs time, which is wasted if no progress is shown.
        here = here._replace(step=self.output.step) if sys.stderr.isatty() else here
        return here._replace(lock_timeout=next(wait for wait in waits if wait is not None), shared=shared)

    @cached_property
    def stack(self) -> layer_set.LayerSet:
        """The layers of the environment; warns of broken plug-ins."""
        from cachectl import layer_set

        stack, options = layer_set.LayerSet(self.environment), vars(self.options)
        # If no layer is named, the result is incomplete without them.
        if not options.get("layers") and not options.get("layer"):
            for plugin in stack.broken:
                self.notice(f"plug-in {plugin['name']}: {plugin['why']}")
        return stack

    def warn_of_dead(self, missing: Collection[str]) -> None:
        """Warn of layers with entries that nothing can hit without the entries of the ``missing`` layers."""
        for name in missing:
            for layer in map(self.stack.__getitem__, self.stack[name].about.ahead_of):
                if layer.name not in missing and any(root.exists for root in layer.roots()):
                    reason = f"its entries for programs that are also in {name} cannot be hit without those of {name}"
                    self.notice(f"{layer.name}: {reason}")

    @cached_property
    def config(self) -> settings.Config:
        """The config files and variables. Raises as :func:`cachectl.config.load` does."""
        from cachectl import config as settings

        return settings.load(self._here)

    @property
    def form(self) -> str:
        """The form of the output: ``table``, ``json`` or ``csv``."""
        return "json" if self.options.json else "csv" if getattr(self.options, "csv", False) else "table"

    def misuse(self, message: str) -> NoReturn:
        """Print what is wrong with the options, and end the program with status 2."""
        self.options.parser.error(message)
        raise SystemExit(2)

    def demand_command(self) -> None:
        """Raise :class:`BadRequest`, with the corrected line, unless the complete command is after ``--``."""
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
        """Return the selection of entries."""
        options = self.options
        return Selection(options.kernel, options.key, options.older_than, options.stale, now=self.environment.clock())

    @property
    def portable(self) -> bool:
        """Whether the option or the settings request portable builds."""
        return bool(self.options.portable or self.config.get("portable"))

    def trust(self) -> Trust | None:
        """Return why a store is trusted; ``None`` without such an option."""
        from cachectl.exchange.trust import Trust

        typed = (self.options.allowed_signers, self.options.digest, self.options.trust)
        return None if typed == (None, None, False) else Trust(*typed)

    def target(self, name: str) -> str:
        """Return the address of a store, which must not be the name of a layer."""
        if name in self.stack:
            self.misuse(f"{name!r} is a layer: write the store before the layers, or ./{name} for a file")
        return name

    def outputs(self, *named: tuple[str | None, output_files.Kind]) -> list[Any]:
        """Return each :class:`OutputFile`, checked before a long run; ``None`` without a name.

        Raises as :meth:`OutputFile.demand` does, and :class:`BadRequest` if a file is named twice.
        """
        from cachectl.show.output_files import OutputFile

        files = [
            None if name is None else OutputFile(name, kind, self.stack, self.options.force) for name, kind in named
        ]
        places: set[str] = set()
        for file in filter(None, files):
            file.demand()
            place = os.path.realpath(file.name)
            if place in places and os.path.isfile(place) == os.path.exists(place):
                raise BadRequest(f"{file.name!r} is named twice; name a file for each output")
            places.add(place)
        return files

    def write_json(self, fact: object, file: output_files.OutputFile | None) -> None:
        """Write a fact as a JSON document to a file, if there is one."""
        if file is not None and file.name == "-":
            self.output.show_json(fact)
        elif file is not None:
            from cachectl.show.document import json_bytes

            file.write((json_bytes(fact),))


class OfUsers(NamedTuple):
    """What ``--all-users`` shows of a verb: a list in its document, and the texts and numbers of its items.

    Items of a user with the same texts are one line. Items without numbers are one line for all users with the ``same``
    texts, with their count. Lines are sorted by the number ``order``, the largest or the oldest first.
    """

    items: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    order: str = "bytes"


# ---------------------------------------------------------------------- options


# An option or an argument is a row: its names, separated by blanks; the placeholder of its value, if any; its help; and
# last, if needed, more keywords of :meth:`argparse.ArgumentParser.add_argument`. A list holds mutually exclusive
# options; a list that begins with a title is a group in the help.

REPEATED = {"action": "append", "default": []}
#: Without a default, argparse calls the argument required.
MANY = {"nargs": "*", "default": []}
#: The folder of a bare ``--isolated``: no argument of a process can contain this.
NO_FOLDER = "\0"


def folder(text: str) -> str:
    """Parse a folder. Reject the empty path, which an unset shell variable gives: it means the working directory."""
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
    """Return an option type for a parser that raises :class:`BadRequest`."""

    def read(text: str) -> int | float:
        try:
            return parse(text)
        except BadRequest as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


AGE, SIZE = {"type": _read_by(parse_age)}, {"type": _read_by(parse_size)}
LAYERS = ("layers", "LAYER", "a layer, or several with commas; cachectl layers lists them (default: all)", MANY)
CLEARABLE = ("layers", "LAYER", "a layer, as cachectl layers lists it (default: a user's, except tuning results)", MANY)
ONE_LAYER = ("layer", "LAYER", "the layer of the entry")
_NAMES = REPEATED | {"dest": "layers"}
LAYER = ("--layer", "LAYER", "only this layer; can be repeated, or list several with commas", _NAMES)
KEY = ("key", "KEY", "the key of the entry, full as in cachectl ls -q or short as in ls -l")
DRY_RUN = ("-n --dry-run", "show what would be removed, but remove nothing")
#: For verbs that remove entries.
VERBOSE = ("-v --verbose", "list every layer, and with --dry-run every entry")
VERBOSE_FINDINGS = ("-v --verbose", "also show harmless findings, and what no check can show")
VERBOSE_MESSAGES = ("-v --verbose", "print every message, even repeated ones")
PORTABLE = ("--portable", "omit PyOpenCL's include path from builds that do not need it: their entries hit at any path")
FORCE = ("--force", "replace an existing FILE that cachectl did not write")
FORCE_BUNDLE = ("--force", "replace an existing FILE that is not a bundle")
JSON = ("--json", "print JSON")
CSV = ("--csv", "print CSV: bytes and seconds as numbers")
FORM = [JSON, CSV]
_BELOW = {"type": folder, "dest": "below"}
ROOT = ("--root", "DIR", "use the caches in the isolated root DIR (of run --isolated=DIR)", _BELOW)
USER = ("--user", "NAME", "as root: use this user's caches; can be repeated", REPEATED)
ALL_USERS = ("--all-users", "as root: use the caches of all users (UID_MIN to UID_MAX in login.defs)")
PLACES = [ROOT, USER, ALL_USERS]
PYTHON = ("--python", "PATH", "another Python whose entries are not stale; can be repeated", REPEATED)
WAIT = ("--wait", "SECONDS", "how long to wait for another process's lock (default: 5)", {"type": seconds})
SHARED = ("--shared", "also change caches that other users can write to, because you trust these users")
OLDER_THAN = ("--older-than", "AGE", "entries not changed or used for AGE, such as 30d, 12h or 2w", AGE)
#: Options of purge and prune; the second tuple is for verbs that change caches and show a table.
REMOVING = (DRY_RUN, VERBOSE, PLACES)
CHANGING = (WAIT, SHARED, FORM)
SELECTION = [
    "selection",
    ("--kernel", "GLOB", "entries of kernels with a matching name"),
    OLDER_THAN,
    ("--stale", "entries of a driver that was seen here and is gone"),
    ("--key", "KEY", "the entry with this key, full or short"),
]
#: The kinds of places for stores.
STORES = "a bundle FILE (.zip), a folder, s3://, ssh:// or oci://"
TRUST = [
    ("--allowed-signers", "LIST", "accept what a signer in this list has signed (ssh-keygen -Y)"),
    ("--digest", "HEX", "accept only a bundle with this SHA-256, or another store with this digest (store ls)"),
    ("--trust", "accept it unchecked: it is code that your programs will run"),
]
SIGN = ("--sign", "KEY", "sign what is added with this OpenSSH key")
#: Words before ``--`` that are no options: a command without ``--``, with its own options.
UNEXPECTED = ("unexpected", None, argparse.SUPPRESS, {"nargs": argparse.REMAINDER})
