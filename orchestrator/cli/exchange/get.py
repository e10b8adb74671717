"""``cachectl get``: write one entry to a file."""

from __future__ import annotations

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser


def add_options(parser: Parser) -> None:
    parser.add_shared("layer", "key")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: standard output)")
    parser.add_places(root=True)
    parser.add_force("an artifact")


def run(call: Call) -> int:
    from cachectl.artifact_files import get_artifact
    from cachectl.output_files import ARTIFACT, STREAM

    layer = call.stack[call.options.layer]
    file = call.output_file(STREAM if call.options.output is None else call.options.output, ARTIFACT)
    file.demand()
    data = get_artifact(layer, call.key(call.options.key, (layer,)))
    if file.name == STREAM:
        output.show_bytes(data)
    else:
        file.write((data,))
    return 0
