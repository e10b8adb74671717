"""``cachectl ls``: entries, one a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from cachectl.inspecting.entries import Listing
    from cachectl.layers.base.facts import Entry


def add_options(parser: Parser) -> None:
    parser.add_layers()
    parser.add_selection()
    parser.add_shared("--python", "--wait")
    parser.add_argument("--sort", choices=("size", "age", "used"), help="largest, oldest, or longest unused first")
    parser.add_argument("--limit", type=int, metavar="N", help="show no more than N entries")
    parser.add_places(users=True, root=True)
    parser.add_form().add_argument("-q", "--quiet", action="store_true", help="print nothing but keys")
    parser.epilog = "On a terminal the table shortens names and keys to fit; elsewhere they are whole."


def run(call: Call) -> int:
    selected = call.selection()
    with call.working("listing"):
        listing = call.stack.ls(selected, layers=call.options.layers, sort=call.options.sort, limit=call.options.limit)

    def show(listing: Listing) -> None:
        if call.options.quiet:
            output.show_raw(entry.key for entry in listing.entries)
        else:
            output.show_table(columns(call.now), listing.entries)

    status = call.show(listing, show, lambda listing: (columns(call.now), listing.entries))
    _warn_of_problems(listing)
    return status


def columns(now: float) -> tuple[output.Column[Entry], ...]:
    """Return the columns of a listing; ``now`` is the time that ages refer to."""
    return (
        output.Column("layer", lambda entry: entry.layer),
        output.Column("kernels", lambda entry: " ".join(entry.kernels or (output.DASH,))),
        output.sizes("size", lambda entry: entry.bytes),
        output.ages("age", lambda entry: entry.modified if entry.used is None else entry.used, now),
        output.Column("", lambda entry: "stale" if entry.stale else "", raw=lambda entry: entry.stale, name="stale"),
        output.Column("key", lambda entry: entry.key),
    )


def _warn_of_problems(listing: Listing) -> None:
    for trouble in listing.problems:
        where = "" if trouble.path is None else f"{trouble.path}: "
        output.warn(f"{trouble.layer}: {where}{trouble.message}")
