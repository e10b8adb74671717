"""``cachectl doctor``: what is wrong with this set-up, and the command that fixes it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cachectl.cli import options
from cachectl.cli.inspecting.verify import show_findings
from cachectl.cli.output import working

if TYPE_CHECKING:
    from cachectl.cli.call import Call


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_layers(parser)
    options.add_json(parser)


def run(call: Call) -> int:
    """Diagnose."""
    with working("looking into everything"):
        done = call.stack.doctor(layers=call.options.layers)
    return call.show(done, lambda done: show_findings(done.findings, "nothing is wrong"))
