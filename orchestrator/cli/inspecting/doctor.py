"""``cachectl doctor``: problems of this set-up, each with the command that fixes it."""

from __future__ import annotations

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.inspecting.verify import show_findings
from cachectl.cli.parser import Parser


def add_options(parser: Parser) -> None:
    parser.add_shared("layers", "--python", "--json")


def run(call: Call) -> int:
    with output.working("looking into everything"):
        done = call.stack.doctor(layers=call.options.layers)
    return call.show(done, lambda done: show_findings(done.findings, "nothing is wrong"))
