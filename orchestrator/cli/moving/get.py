"""``cachectl get``: write one entry to a file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cachectl.cli import options
from cachectl.cli.output import show_bytes

if TYPE_CHECKING:
    from cachectl.cli.call import Call


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_entry(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: standard output)")
    options.add_force(parser, "an artifact")


def run(call: Call) -> int:
    """Get the entry and write it."""
    from cachectl.moving.artifact_files import get_artifact
    from cachectl.moving.output_files import ARTIFACT
    from cachectl.moving.whole_files import STREAM

    layer = call.stack[call.options.layer]
    output = call.output_file(STREAM if call.options.output is None else call.options.output, ARTIFACT)
    output.demand()
    data = get_artifact(layer, call.options.key)
    if output.name == STREAM:
        show_bytes(data)
    else:
        output.write((data,))
    return 0
