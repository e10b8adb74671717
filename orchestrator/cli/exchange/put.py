"""``cachectl put``: place an entry that ``get`` wrote, so that the library hits it."""

from __future__ import annotations

from cachectl.cli.call import Call
from cachectl.cli.parser import CHANGING, Parser


def add_options(parser: Parser) -> None:
    parser.add_shared("layer", "key")
    parser.add_argument("file", metavar="FILE", help="a file that get wrote, or - for standard input")
    parser.add_argument("--replace", action="store_true", help="replace a different entry of that key")
    parser.add_shared(*CHANGING)


def run(call: Call) -> int:
    from cachectl.artifact_files import put_artifact, read_artifact

    data = read_artifact(call.options.file)
    put_artifact(call.stack[call.options.layer], call.options.key, data, replace=call.options.replace)
    return 0
