"""Options that several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

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


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Add ``LAYER...``."""
    parser.add_argument("layers", nargs="*", metavar="LAYER", help="a layer that cachectl layers lists (default: all)")


def add_layer(parser: argparse.ArgumentParser) -> None:
    """Add ``--layer LAYER``, for verbs whose arguments are a command."""
    parser.add_argument(
        "--layer", action="append", default=[], dest="layers", metavar="LAYER", help="only this one; may be repeated"
    )


def add_entry(parser: argparse.ArgumentParser) -> None:
    """Add ``LAYER KEY``."""
    parser.add_argument("layer", metavar="LAYER", help="the layer that keeps the entry")
    parser.add_argument("key", metavar="KEY", help="the entry's key, as cachectl ls -q prints it")


def add_command(parser: argparse.ArgumentParser) -> None:
    """Collect words before ``--`` that are no option: a command without ``--``, with its own options."""
    parser.add_argument("stray", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select entries."""
    group = parser.add_argument_group("selection")
    group.add_argument("--kernel", metavar="GLOB", help="entries of kernels whose name matches")
    group.add_argument("--older-than", metavar="AGE", help="not changed or used for 30d, 12h, 2w")
    group.add_argument("--newer-than", metavar="AGE", help="changed or used within AGE")
    group.add_argument("--larger-than", metavar="SIZE", help="larger than 500M, 2GiB")
    group.add_argument(
        "--stale", action="store_true", help="entries that no program can hit any more, as far as this Python tells"
    )
    group.add_argument("--key", metavar="KEY", help="the entry of this key")


def add_trust(parser: argparse.ArgumentParser, file: str, *, required: bool) -> None:
    """Add the options that say why a bundle is trusted."""
    why = parser.add_mutually_exclusive_group(required=required)
    signed = f"{file}.sig is by a signer of this list (ssh-keygen -Y)"
    why.add_argument("--allowed-signers", metavar="LIST", help=signed)
    why.add_argument("--sha256", metavar="HEX", help=f"this is the SHA-256 of {file}")
    why.add_argument("--trust", action="store_true", help="believe it: it is code that your programs will run")
    parser.add_argument(
        "--newer-than", metavar="AGE", help="refuse a bundle that was not signed within 30d, 12h, or since 2026-12-31"
    )


def add_sign(parser: argparse.ArgumentParser) -> None:
    """Add ``--sign KEY``."""
    parser.add_argument("--sign", metavar="KEY", help="sign it with a key of OpenSSH; the signature is FILE.sig")


def add_mpi(parser: argparse.ArgumentParser) -> None:
    """Add ``--mpi``."""
    parser.add_argument(
        "--mpi", action="store_true", help="started by mpiexec: all nodes at once, what they share counted once"
    )


def add_dry_run(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--dry-run``."""
    parser.add_argument("-n", "--dry-run", action="store_true", help=f"list what would {what}, and touch nothing")


def add_force(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add ``--force``."""
    parser.add_argument("--force", action="store_true", help=f"replace a FILE that is there and is not {kind}")


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON: bytes and epoch seconds as numbers")


def add_changing(parser: argparse.ArgumentParser) -> None:
    """Add the options of every verb that changes a cache."""
    parser.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help="how long to wait for a lock somebody else holds (default: 5)"
    )
    parser.add_argument(
        "--over-others", action="store_true", help="as the superuser, change what belongs to another user too"
    )
