"""What a verb declares for the command line, its options as data, and what it is given."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from cachectl.layers.base import errors

# Layers are imported when they are asked for: --help and --version need none.
if TYPE_CHECKING:
    from cachectl.config import Config
    from cachectl.exchange.trust import Trust
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base import facts
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.selection import Selection
    from cachectl.output_files import Kind, OutputFile


class Step(NamedTuple):
    """Progress: runs done, and runs in all; ``None`` is not known yet."""

    doing: str
    done: int
    total: int | None


class Request:
    """What a verb is given by the command line: the options that were typed, and the command after ``--``.

    ``words`` is the whole line. ``output`` is the module that prints: ``say`` prints tables and lines for people,
    ``notice`` a line on standard error, ``say_on_stderr`` tables, lines and bytes there, ``warn_notes`` the first
    notes; ``progress`` yields a function to call with what is done, or with each :class:`Step`. ``environment`` is the
    one that :func:`~cachectl.cli.main.main` was given, by default this process's.
    """

    def __init__(
        self,
        output: Any,  # noqa: ANN401 - a module
        options: argparse.Namespace,
        words: Sequence[str] = (),
        command: Sequence[str] = (),
        environment: Environment | None = None,
    ) -> None:
        self.options = options
        self.words = list(words)
        self.command = list(command)
        self._given = environment
        self._output = output
        self.notice: Callable[[str], None] = output.warn
        self.say: Callable[[Iterable[object]], None] = output.say
        self.say_on_stderr: Callable[[Iterable[object]], None] = output.say_on_stderr
        self.warn_notes: Callable[[str, Sequence[facts.Note]], None] = output.warn_notes
        self.progress: Callable[[], AbstractContextManager[Callable[[str | Step], None]]] = output.progress

    # ------------------------------------------------------------------ what it is about

    @cached_property
    def _here(self) -> Environment:
        """The environment without options and settings."""
        from cachectl.layers.base.environment import Environment, process_variable

        if self._given is not None:
            return self._given
        try:
            os.getcwd()
        except OSError as error:
            where = process_variable("PWD") or "the working folder"
            raise errors.CachectlError(
                f"{where}: {error.strerror}; the working folder has gone or is closed to you, cd to another"
            ) from error
        return Environment.here()

    @cached_property
    def environment(self) -> Environment:
        """The environment, with the options and settings that change how caches are read and changed."""
        from dataclasses import replace

        from cachectl.layers.base.environment import is_configured

        here, given = self._here, vars(self.options)
        if (below := given.get("below")) is not None:
            from cachectl.switching.run import environment_below

            here = environment_below(here, below)
        wait, shared, pythons = given.get("wait"), given.get("shared", False), given.get("python", ())
        if is_configured(self._here):
            wait = self.config.get("wait") if wait is None else wait
            shared = shared or bool(self.config.get("shared"))
            pythons = pythons or self.config.interpreters
        found = here.python_paths
        if pythons:
            from cachectl.layers.host.pythons import named_pythons

            found = named_pythons(here, pythons)
        timeout = here.lock_timeout if wait is None else wait
        return replace(here, python_paths=found, lock_timeout=timeout, shared=shared)

    @property
    def changes_user(self) -> bool:
        """Return whether the verb is about other users. Raises :class:`CachectlError` if only root could do that."""
        given = vars(self.options)
        if not given.get("user") and not given.get("all_users"):
            return False
        if not hasattr(os, "geteuid") or os.geteuid():
            raise errors.CachectlError("only root may become other users: sudo cachectl …")
        return True

    @cached_property
    def stack(self) -> LayerSet:
        """The layers of the environment; broken plug-ins are warned of."""
        from cachectl.layer_set import LayerSet

        stack = LayerSet(self.environment)
        options = vars(self.options)
        # A verb about all layers is incomplete without them.
        if not options.get("layers") and not options.get("layer"):
            for plugin in stack.broken:
                self.notice(f"plug-in {plugin.name}: {plugin.why}")
        return stack

    @cached_property
    def config(self) -> Config:
        """The config files and variables. Raises :class:`BadConfig` and :class:`ConfigRefused`."""
        from cachectl.config import load

        return load(self._here)

    @property
    def now(self) -> float:
        """The time of the environment in epoch seconds."""
        return self.environment.clock()

    # ------------------------------------------------------------------ what was typed

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
            raise errors.BadRequest(f"{what}: {shlex.join(['cachectl', *line])}")
        if not self.command:
            self.misuse("end the line with -- and the command to run")

    def selection(self) -> Selection:
        """Return which entries were selected."""
        from cachectl.layers.base.selection import Selection, parse_age

        options = self.options
        return Selection(
            kernel=options.kernel,
            key=options.key,
            before=None if options.older_than is None else self.now - parse_age(options.older_than),
            stale=options.stale,
        )

    def trust(self) -> Trust | None:
        """Return why a store is trusted; ``None`` if no option says so."""
        from cachectl.exchange.trust import Trust

        given = (self.options.allowed_signers, self.options.digest, self.options.trust)
        return None if given == (None, None, False) else Trust(*given)

    def target(self, name: str) -> str:
        """Return the address of a store, which no layer's name may be."""
        if name in self.stack:
            self.misuse(f"{name!r} is a layer: write what to read or write before the layers, or ./{name}")
        return name

    def output_file(self, name: str, kind: Kind) -> OutputFile:
        """Return a file to write, which no layer's name may be."""
        from cachectl.output_files import OutputFile

        return OutputFile(name, kind, self.stack, self.options.force)

    # ------------------------------------------------------------------ what comes out

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Say on a terminal what is being done."""
        with self.progress() as show:
            show(what)
            yield

    def write_json(self, fact: object, file: OutputFile) -> None:
        """Write a fact to a file as a JSON document."""
        if file.name == "-":
            self._output.show_json(fact)
        else:
            file.write((self._output.json_bytes(fact),))


class Option:
    """An option or an argument: its names, and what :meth:`argparse.ArgumentParser.add_argument` takes."""

    def __init__(self, *names: str, **settings: Any) -> None:  # noqa: ANN401 - argparse's
        self.names = names
        self.settings = settings

    def having(self, **settings: Any) -> Option:  # noqa: ANN401 - argparse's
        """Return the same option with some settings replaced."""
        return Option(*self.names, **{**self.settings, **settings})


class OneOf(tuple[Option, ...]):
    """Options of which one can be given."""

    __slots__ = ()


class Group(tuple[Option, ...]):
    """Options under a title of their own in the help."""

    __slots__ = ()
    title = "selection"


Options = tuple[Option | OneOf | Group, ...]


# ---------------------------------------------------------------------- values


def folder(text: str) -> str:
    """Parse a folder, which an unset variable of a shell is not: an empty path means the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("no folder is named")
    return text


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than one")
    return number


def seconds(text: str) -> float:
    """Parse seconds, at most a day."""
    number = float(text)
    if not 0 <= number <= 86400:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400")
    return number


# argparse prints this name in its errors.
positive.__name__ = "number"


# ---------------------------------------------------------------------- common options

LAYERS: Final = Option(
    # Without a default, argparse calls it required.
    *("layers",),
    nargs="*",
    default=[],
    metavar="LAYER",
    help="a layer that cachectl layers lists (default: all)",
)
CLEARABLE: Final = LAYERS.having(help="a layer that cachectl layers lists (default: all but tuning results)")
ONE_LAYER: Final = Option("layer", metavar="LAYER", help="the layer that keeps the entry")
LAYER: Final = Option(
    "--layer", action="append", default=[], dest="layers", metavar="LAYER", help="only this one; may be repeated"
)
KEY: Final = Option("key", metavar="KEY", help="the entry's key, as cachectl ls -q prints it")
DRY_RUN: Final = Option("-n", "--dry-run", action="store_true", help="list what would go, and touch nothing")
VERBOSE: Final = Option("-v", "--verbose", action="store_true")
#: Of verbs that remove entries.
LISTING: Final = VERBOSE.having(help="list every layer, and with --dry-run every entry")
FORCE: Final = Option("--force", action="store_true", help="replace an existing FILE that cachectl did not write")
FORCE_BUNDLE: Final = FORCE.having(help="replace an existing FILE that is not a bundle")
JSON: Final = Option("--json", action="store_true", help="print JSON")
CSV: Final = Option("--csv", action="store_true", help="print CSV: bytes and seconds as numbers")
FORM: Final = OneOf((JSON, CSV))
ROOT: Final = Option(
    "--root", type=folder, dest="below", metavar="DIR", help="the layers in the isolated root DIR (run --isolated=DIR)"
)
USER: Final = Option(
    "--user", action="append", default=[], metavar="NAME", help="as root: this user's caches; may be repeated"
)
ALL_USERS: Final = Option(
    "--all-users", action="store_true", help="as root: the caches of all users (UID_MIN to UID_MAX of login.defs)"
)
PLACES: Final = OneOf((ROOT, USER, ALL_USERS))
PYTHON: Final = Option(
    "--python",
    action="append",
    default=[],
    metavar="PATH",
    help="a Python whose entries are not stale; may be repeated. Without it, Pythons are looked for on PATH",
)
WAIT: Final = Option(
    "--wait", type=seconds, metavar="SECONDS", help="how long to wait for a lock of another process (default: 5)"
)
SHARED: Final = Option(
    "--shared", action="store_true", help="also change a cache that other users can write: you trust them"
)
#: Options of purge and prune, of which the second ones are those of verbs that change caches and have a table.
REMOVING: Final = (DRY_RUN, LISTING, PLACES)
CHANGING: Final = (WAIT, SHARED, FORM)
SELECTION: Final = Group(
    (
        Option("--kernel", metavar="GLOB", help="entries of kernels whose name matches"),
        Option("--older-than", metavar="AGE", help="not changed or used for 30d, 12h, 2w"),
        Option("--stale", action="store_true", help="entries that no known Python or driver can hit any more"),
        Option("--key", metavar="KEY", help="the entry of this key"),
    )
)
#: What a store can lie in.
STORES: Final = "a bundle FILE (.zip), a folder, s3://, ssh:// or oci://"
TRUST: Final = OneOf(
    (
        Option("--allowed-signers", metavar="LIST", help="take what a signer of this list has signed (ssh-keygen -Y)"),
        Option(
            "--digest",
            metavar="HEX",
            help="the SHA-256 of the bundle, or the digest of another store, as store ls prints it",
        ),
        Option("--trust", action="store_true", help="trust it unchecked: it is code that your programs will run"),
    )
)
SIGN: Final = Option("--sign", metavar="KEY", help="sign what is added with a key of OpenSSH")
#: Words before ``--`` that are no option: a command without ``--``, with its own options.
UNEXPECTED: Final = Option("unexpected", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
