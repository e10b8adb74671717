"""``cachectl push``: add to a store the entries that it lacks."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from cachectl.exchange.push import Push, PushedLayer

PLACES: Final = "a bundle FILE (.zip), a folder, s3://, ssh:// or oci://"


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help=f"made if missing: {PLACES}; - (standard output); a database file of MIOpen",
    )
    parser.add_selection(layers=True)
    parser.add_places(root=True)
    parser.add_shared("--sign")
    counting = "with --sign, what a signer of this list has pushed counts as present too"
    parser.add_argument("--allowed-signers", metavar="LIST", help=counting)
    parser.add_force("a bundle")
    parser.add_form()


def run(call: Call) -> int:
    given = call.options
    selected = call.selection()
    if given.target == "-" and call.form != "table":
        call.misuse(f"{call.form.upper()} and the bundle cannot both go to standard output; name a FILE")
    with output.working("pushing"):
        done = call.stack.push(
            call.target(given.target),
            selected,
            layers=given.layers,
            sign=given.sign,
            allowed_signers=given.allowed_signers,
            force=given.force,
        )
    # Standard output holds the bundle.
    with redirect_stdout(sys.stderr) if given.target == "-" else nullcontext():
        return call.show(done, _show, lambda done: (COLUMNS, done.layers))


COLUMNS: Final[tuple[output.Column[PushedLayer], ...]] = (
    output.Column("layer", lambda layer: layer.layer),
    output.counts("pushed", lambda layer: layer.pushed),
    output.sizes("size", lambda layer: layer.bytes),
    output.counts("there", lambda layer: layer.there),
    output.counts("failed", lambda layer: len(layer.failed)),
)


def _show(done: Push) -> None:
    """Print what was added, the digest of the store, and what the new entries reveal."""
    rows = [one for one in done.layers if one.pushed or one.there or one.failed]
    if rows:
        output.show_table(COLUMNS, rows)
    else:
        output.warn(f"no entry to push in {', '.join(layer.layer for layer in done.layers)}")
    output.show_lines(["", f"{done.url}: {output.size(done.written)} written"])
    output.show_lines([] if done.digest is None else [f"digest {done.digest}"])
    for layer in done.layers:
        if layer.sensitive is not None:
            output.warn(f"{layer.layer}: it now holds {layer.sensitive}")
        for folder in layer.exposed:
            output.warn(f"{layer.layer}: others can write to {folder}, and may have put code there")
        output.warn_notes(f"{layer.layer}: not pushed:", layer.skipped)
        output.warn_notes(f"{layer.layer}: failed:", layer.failed)
