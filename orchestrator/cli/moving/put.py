"""``cachectl put``: place an entry that ``get`` wrote, so that the library hits it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cachectl.cli import options

if TYPE_CHECKING:
    from cachectl.cli.call import Call


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_entry(parser)
    parser.add_argument("file", metavar="FILE", help="a file that get wrote, or - for standard input")
    parser.add_argument("--replace", action="store_true", help="replace a different entry of that key")
    options.add_changing(parser)


def run(call: Call) -> int:
    """Read the file and place the entry."""
    from cachectl.moving.artifact_files import put_artifact, read_artifact

    data = read_artifact(call.options.file)
    put_artifact(call.stack[call.options.layer], call.options.key, data, replace=call.options.replace)
    return 0
