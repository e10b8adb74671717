"""``cachectl import``: place what ``export`` packed, once it is trusted and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import CHANGING, Parser
from cachectl.verbs import ls

if TYPE_CHECKING:
    from cachectl.cli.call import Columns
    from cachectl.moving.importing import Import, ImportedLayer
    from cachectl.sharing.pulling import Pull


def add_options(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="a bundle that export wrote, - or its URL")
    parser.add_trust("FILE")
    parser.add_argument("--max-size", metavar="SIZE", help="the largest bundle to read, 500M or 2GiB (default: 32GiB)")
    parser.add_dry_run("be placed")
    parser.add_form(*CHANGING)


def run(call: Call) -> int:
    from cachectl.layers.base.limits import LARGEST_BUNDLE
    from cachectl.layers.base.selection import parse_size

    given = call.options
    most = LARGEST_BUNDLE if given.max_size is None else parse_size(given.max_size)
    if given.file == "-" and given.allowed_signers is not None:
        call.misuse("a bundle on standard input has no FILE.sig; give --sha256 or --trust")
    trust = call.trust()
    if trust is None:
        call.misuse("a bundle is code: give one of --allowed-signers, --sha256 and --trust")
    with output.working("importing"):
        done = call.stack.import_bundle(given.file, trust, dry_run=given.dry_run, most=most)
    return call.show(done, lambda done: _show(done, call.now), lambda done: table(done, call.now))


def table(done: Import | Pull, now: float) -> Columns[Any]:
    """Return the columns and rows of what was placed: layers, or in a dry run entries."""
    if not done.dry_run:
        return columns("placed"), done.layers
    return ls.columns(now), [entry for layer in done.layers for entry in layer.entries or ()]


def columns(verb: str) -> tuple[output.Column[ImportedLayer], ...]:
    """Return the columns of an import; ``verb`` is the title over the number of entries."""
    return (
        output.Column("layer", lambda layer: layer.layer),
        output.counts(verb, lambda layer: layer.placed),
        output.sizes("size", lambda layer: layer.bytes),
        output.counts("there", lambda layer: layer.there),
        output.counts("differ", lambda layer: len(layer.kept)),
        output.counts("cannot hit", lambda layer: layer.cannot_hit),
        output.counts("failed", lambda layer: len(layer.failed)),
    )


def _show(done: Import, now: float) -> None:
    """Print what was or would be placed, whether programs here will hit it, and what was not placed."""
    from cachectl.layers.base.selection import moment_text

    if listed := [entry for layer in done.layers for entry in layer.entries or ()]:
        output.show_table(ls.columns(now), listed)
        output.show_lines([""])
    output.show_table(columns("would place" if done.dry_run else "placed"), done.layers)
    made = "unknown, only a signed bundle says" if done.made is None else moment_text(done.made)
    output.show_lines(["", f"trusted: {done.trusted}", f"made: {made}"])
    for layer in done.layers:
        output.show_lines(f"{layer.layer}: {output.count(one.entries)} {one.outlook.words}" for one in layer.foreseen)
        if layer.exposed:
            output.warn(f"{layer.layer}: others could write to its folder where the bundle was made")
        output.warn_notes(f"{layer.layer}: kept:", layer.kept)
        output.warn_notes(f"{layer.layer}: failed:", layer.failed)
