"""``cachectl dir``: the places of caches, one a line."""

from __future__ import annotations

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser


def add_options(parser: Parser) -> None:
    parser.add_layers()
    parser.add_shared("--all-layers")
    parser.add_places(root=True)
    parser.epilog = "Without LAYER, places that do not exist are left out."


def run(call: Call) -> int:
    given = call.options
    places = call.stack.dir(layers=given.layers, missing=bool(given.layers or given.all_layers))
    output.show_raw(map(str, places))
    return 0
