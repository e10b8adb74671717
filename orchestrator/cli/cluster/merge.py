"""``cachectl merge``: entries of several folders, of ranks for instance, into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from cachectl.cluster.rank_roots import MergedLayer, MergedRoots


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "roots", nargs="+", metavar="ROOT", help="a folder that run --isolated kept, or an XDG_CACHE_HOME, or a home"
    )
    parser.add_argument("into", metavar="INTO", help="the folder that gets every entry once, for run --isolated=INTO")
    parser.add_form()


def run(call: Call) -> int:
    from cachectl.cluster.rank_roots import merge_roots

    given = call.options
    if given.into in call.stack:
        call.misuse(f"{given.into!r} is a layer, not a folder; write ./{given.into} for a folder of that name")
    environment = call.environment
    roots = [environment.expand(root) for root in given.roots]
    with output.working("merging"):
        done = merge_roots(environment, roots, environment.expand(given.into))
    return call.show(done, _show, lambda done: (COLUMNS, done.layers))


COLUMNS: Final[tuple[output.Column[MergedLayer], ...]] = (
    output.Column("layer", lambda layer: layer.layer),
    output.counts("placed", lambda layer: layer.placed),
    output.sizes("size", lambda layer: layer.bytes),
    output.counts("there", lambda layer: layer.there),
    output.counts("differ", lambda layer: len(layer.kept)),
    output.counts("failed", lambda layer: len(layer.failed)),
)


def _show(done: MergedRoots) -> None:
    if not done.layers:
        output.show_lines(["nothing is there"])
        return
    output.show_table(COLUMNS, done.layers)
    for layer in done.layers:
        if layer.kept:
            # Drivers seldom compile the same bytes twice, so most kernels that ranks share differ.
            output.warn(
                f"{layer.layer}: {len(layer.kept)} differ from the one of the same key that was first, which stays"
            )
        output.warn_notes(f"{layer.layer}: failed:", layer.failed)
