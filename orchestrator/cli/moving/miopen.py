"""``cachectl miopen``: merge databases of MIOpen, of several users or ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import CHANGING, Parser

if TYPE_CHECKING:
    from cachectl.layers.miopen.merging import Merge, MergedFile


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "action", choices=("merge",), help="add the entries that INTO lacks; a different entry in INTO stays"
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a database of MIOpen: .ukdb, .kdb, .ufdb.txt, .udb.txt, .udb"
    )
    parser.add_argument("into", metavar="INTO", help="a database for the same device, made if missing")
    parser.add_argument("--mix-versions", action="store_true", help="also merge databases of another MIOpen")
    parser.add_form(*CHANGING)


def run(call: Call) -> int:
    from cachectl.layers.miopen.merging import merge

    given = call.options
    environment = call.stack.environment
    with output.working("merging"):
        done = merge(environment, given.files, given.into, mix_versions=given.mix_versions)
    return call.show(done, _show, lambda done: (COLUMNS, done.files))


COLUMNS: Final[tuple[output.Column[MergedFile], ...]] = (
    output.Column("file", lambda file: str(file.file)),
    output.counts("added", lambda file: file.added),
    output.counts("there", lambda file: file.there),
    output.counts("differ", lambda file: len(file.conflicts)),
    output.counts("failed", lambda file: len(file.failures)),
)


def _show(done: Merge) -> None:
    output.show_table(COLUMNS, done.files)
    output.show_lines(["", f"into {done.into}"])
    for file in done.files:
        output.warn_notes(f"{file.file.name}: kept:", file.conflicts)
        output.warn_notes(f"{file.file.name}: failed:", file.failures)
