"""What a verb declares for the command line, its options as data, and what it is given."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import NoReturn

    from cachectl.config import Config
    from cachectl.exchange.around import StoreUse
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.selection import Selection
    from cachectl.output_files import Kind, OutputFile


class Step(NamedTuple):
    """Progress: runs done, runs in all, and the seconds left; ``None`` is not known yet."""

    doing: str
    done: int
    total: int | None
    seconds_left: float | None


class Request(Protocol):
    """What a verb is given by the command line."""

    options: argparse.Namespace
    command: list[str]

    @property
    def environment(self) -> Environment:
        """The environment, with options and settings."""

    @property
    def stack(self) -> LayerSet:
        """The layers of the environment."""

    @property
    def config(self) -> Config:
        """The settings."""

    @property
    def now(self) -> float:
        """The time in epoch seconds."""

    @property
    def form(self) -> str:
        """The form of the output: ``table``, ``json`` or ``csv``."""

    def selection(self) -> Selection:
        """Return which entries were selected."""

    def key(self, text: str, layers: Iterable[Layer]) -> str:
        """Return the key that a text begins."""

    def output_file(self, name: str, kind: Kind) -> OutputFile:
        """Return a file to write, which no layer's name may be."""

    def notice(self, line: str) -> None:
        """Print a line for people on standard error."""

    def say(self, parts: Iterable[object]) -> None:
        """Print tables and lines for people."""

    def tell(self, parts: Iterable[object]) -> None:
        """Print tables and lines on standard error, and bytes as they are."""

    def write_json(self, fact: object, file: OutputFile) -> None:
        """Write a fact to a file as a JSON document."""

    def progress(self) -> AbstractContextManager[Callable[[Step], None]]:
        """Yield a function to call with each step of long work."""

    def store_use(self) -> StoreUse | None:
        """Return the shared store around a command, if there is one."""

    def demand_command(self) -> None:
        """Raise :class:`BadRequest` unless a command follows ``--``."""

    def misuse(self, message: str) -> NoReturn:
        """Print what is wrong with the options, and end the program with status 2."""

    def working(self, what: str) -> AbstractContextManager[None]:
        """Show that something takes long."""


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
CLEARED_LAYERS: Final = LAYERS.having(
    help="a layer that cachectl layers lists (default: every user layer but tuning results)"
)
ONE_LAYER: Final = Option("layer", metavar="LAYER", help="the layer that keeps the entry")
LAYER: Final = Option(
    "--layer", action="append", default=[], dest="layers", metavar="LAYER", help="only this one; may be repeated"
)
KEY: Final = Option(
    "key", metavar="KEY", help="the entry's key, as cachectl ls -q prints it; get takes the beginning of one"
)
DRY_RUN: Final = Option("-n", "--dry-run", action="store_true", help="list what would go, and touch nothing")
VERBOSE: Final = Option("-v", "--verbose", action="store_true")
#: Of verbs that remove entries.
LISTING: Final = VERBOSE.having(help="list every layer, and with --dry-run every entry")
FORCE: Final = Option("--force", action="store_true", help="replace an existing FILE that cachectl did not write")
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
SELECTION: Final = Group(
    (
        Option("--kernel", metavar="GLOB", help="entries of kernels whose name matches"),
        Option("--older-than", metavar="AGE", help="not changed or used for 30d, 12h, 2w"),
        Option("--stale", action="store_true", help="entries that no known Python or driver can hit any more"),
        Option(
            "--key",
            metavar="KEY",
            help="the entry of this key, or of the only one that begins so (4 characters)",
        ),
    )
)
#: Words before ``--`` that are no option: a command without ``--``, with its own options.
UNEXPECTED: Final = Option("unexpected", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
