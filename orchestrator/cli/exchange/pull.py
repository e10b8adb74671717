"""``cachectl pull``: place the entries of stores, roots and database files that are missing here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import CHANGING, Parser
from cachectl.layers.base.texts import plural
from cachectl.verbs import ls

if TYPE_CHECKING:
    from cachectl.cli.call import Columns
    from cachectl.exchange.pull import Pull, PulledLayer

_SOURCE: Final = (
    "a bundle FILE or - (standard input), a folder, s3://, ssh://, oci://; an isolated root; or a database file of "
    "MIOpen. Layers follow"
)


def add_options(parser: Parser) -> None:
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=_SOURCE)
    parser.add_selection(layers=True)
    parser.add_places(root=True)
    parser.add_trust()
    parser.add_dry_run("be placed")
    parser.add_form(*CHANGING)
    parser.usage = (
        "cachectl pull SOURCE... [LAYER...] [selection]\n       [--allowed-signers LIST | --digest HEX | --trust] [-n]"
    )


def run(call: Call) -> int:
    given = call.options
    sources = [word for word in given.sources if word not in call.stack]
    # argparse takes all words before the first option for sources.
    given.layers = [*(word for word in given.sources if word in call.stack), *given.layers]
    if not sources:
        call.misuse("name a SOURCE before the layers; ./NAME is a folder that has the name of a layer")
    selected = call.selection()
    with output.working("pulling"):
        done = call.stack.pull(sources, call.trust(), selected, layers=given.layers, dry_run=given.dry_run)
    return call.show(done, lambda done: _show(done, call.now), lambda done: _table(done, call.now))


def _table(done: Pull, now: float) -> Columns[Any]:
    """Return the columns and rows of what was placed: layers, or in a dry run entries."""
    if not done.dry_run:
        return _columns("placed"), done.layers
    return ls.columns(now), [entry for layer in done.layers for entry in layer.entries or ()]


def _columns(verb: str) -> tuple[output.Column[PulledLayer], ...]:
    return (
        output.Column("layer", lambda layer: layer.layer),
        output.counts(verb, lambda layer: layer.placed),
        output.sizes("size", lambda layer: layer.bytes),
        output.counts("there", lambda layer: layer.there),
        output.counts("differ", lambda layer: len(layer.kept)),
        output.counts("cannot hit", lambda layer: layer.cannot_hit),
        output.counts("failed", lambda layer: len(layer.failed)),
    )


def _show(done: Pull, now: float) -> None:
    """Print what was or would be placed, whether programs here will hit it, and what was left alone."""
    if listed := [entry for layer in done.layers for entry in layer.entries or ()]:
        output.show_table(ls.columns(now), listed)
        output.show_lines([""])
    if done.layers:
        output.show_table(_columns("would place" if done.dry_run else "placed"), done.layers)
    else:
        output.warn("no entry to pull: there is none for the layers here")
    output.show_lines(["", f"{done.url}: {output.size(done.read)} read"])
    output.show_lines([] if done.digest is None else [f"digest {done.digest}"])
    output.show_lines(f"trusted: {why}" for why in done.trusted)
    for layer in done.layers:
        output.show_lines(f"{layer.layer}: {output.count(one.entries)} {one.outlook.words}" for one in layer.foreseen)
        if layer.exposed:
            output.warn(f"{layer.layer}: others could write to its folder where entries were pushed")
        output.warn_notes(f"{layer.layer}: kept:", layer.kept)
        output.warn_notes(f"{layer.layer}: failed:", layer.failed)
    for key in done.unread:
        output.show_lines([f"{key.layer}: {plural(key.parts, 'part')} of the index left alone: {key.because}"])
    output.warn_notes("not trusted:", done.left_out)
