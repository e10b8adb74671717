"""``cachectl pull``: place the entries of a shared store that are missing here, once they are trusted and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.moving.import_ import columns, table
from cachectl.cli.parser import CHANGING, Parser
from cachectl.cli.sharing.push import URL_HELP
from cachectl.layers.base.texts import plural
from cachectl.verbs import ls

if TYPE_CHECKING:
    from cachectl.sharing.pulling import Pull


def add_options(parser: Parser) -> None:
    parser.add_argument("url", metavar="URL", help=f"the store: {URL_HELP}")
    parser.add_selection(layers=True)
    parser.add_places(root=True)
    parser.add_store_trust(required=False)
    parser.add_dry_run("be placed")
    parser.add_form(*CHANGING)


def run(call: Call) -> int:
    given = call.options
    trust = call.demand_trust(given.url)
    selected = call.selection()
    with output.working("pulling"):
        done = call.stack.pull(
            call.store_url(given.url),
            trust,
            selected,
            layers=given.layers,
            dry_run=given.dry_run,
            accept_older=given.accept_older,
        )
    return call.show(done, lambda done: _show(done, call.now), lambda done: table(done, call.now))


def _show(done: Pull, now: float) -> None:
    """Print what was or would be placed, whether programs here will hit it, and what was left alone."""
    if listed := [entry for layer in done.layers for entry in layer.entries or ()]:
        output.show_table(ls.columns(now), listed)
        output.show_lines([""])
    if done.layers:
        output.show_table(columns("would place" if done.dry_run else "placed"), done.layers)
    else:
        output.warn("no entry to pull: the store has none for the layers here")
    output.show_lines(["", f"{done.url}: {output.size(done.read)} read", f"digest {done.digest}"])
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
