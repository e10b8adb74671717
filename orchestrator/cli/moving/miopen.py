"""``cachectl miopen``: merge databases of MIOpen, of several users or ranks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from cachectl.cli import options
from cachectl.cli.output import Column, counts, show_lines, show_table, warn_notes, working

if TYPE_CHECKING:
    from cachectl.cli.call import Call
    from cachectl.moving.miopen_files import Merge, MergedFile


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("action", choices=("merge",), help="add what INTO has not; what differs stays as it is there")
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a database of MIOpen: .ukdb, .kdb, .ufdb.txt, .udb.txt, .udb"
    )
    parser.add_argument("into", metavar="INTO", help="one for the same device, which is made if it is not there")
    parser.add_argument("--mix-versions", action="store_true", help="also from another MIOpen")
    options.add_changing(parser)
    options.add_json(parser)


def run(call: Call) -> int:
    """Merge."""
    from cachectl.moving.miopen_files import merge

    given = call.options
    environment = call.stack.environment
    with working("merging"):
        done = merge(environment, given.files, given.into, mix_versions=given.mix_versions)
    return call.show(done, _show)


COLUMNS: Final[tuple[Column[MergedFile], ...]] = (
    Column("file", lambda file: str(file.file)),
    counts("added", lambda file: file.added),
    counts("there", lambda file: file.there),
    counts("differ", lambda file: len(file.conflicts)),
    counts("failed", lambda file: len(file.failures)),
)


def _show(done: Merge) -> None:
    show_table(COLUMNS, done.files)
    show_lines(["", f"into {done.into}"])
    for file in done.files:
        warn_notes(f"{file.file.name}: kept:", file.conflicts)
        warn_notes(f"{file.file.name}: failed:", file.failures)
