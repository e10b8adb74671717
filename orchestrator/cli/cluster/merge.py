"""``cachectl merge``: entries of several folders, of ranks for instance, into one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from cachectl.cli import options
from cachectl.cli.output import Column, counts, show_lines, show_table, sizes, warn, warn_notes, working

if TYPE_CHECKING:
    from cachectl.cli.call import Call
    from cachectl.cluster.rank_roots import MergedLayer, MergedRoots


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "roots", nargs="+", metavar="ROOT", help="a folder that run --isolated kept, or an XDG_CACHE_HOME, or a home"
    )
    parser.add_argument("into", metavar="INTO", help="the folder that gets every entry once, for run --isolated=INTO")
    options.add_json(parser)


def run(call: Call) -> int:
    """Merge."""
    from cachectl.cluster.rank_roots import merge_roots

    given = call.options
    if given.into in call.stack:
        call.misuse(f"{given.into!r} is a layer, and no folder; write ./{given.into} for one")
    environment = call.environment
    roots = [environment.expand(root) for root in given.roots]
    with working("merging"):
        done = merge_roots(environment, roots, environment.expand(given.into))
    return call.show(done, _show)


COLUMNS: Final[tuple[Column[MergedLayer], ...]] = (
    Column("layer", lambda layer: layer.layer),
    counts("placed", lambda layer: layer.placed),
    sizes("size", lambda layer: layer.bytes),
    counts("there", lambda layer: layer.there),
    counts("differ", lambda layer: len(layer.kept)),
    counts("failed", lambda layer: len(layer.failed)),
)


def _show(done: MergedRoots) -> None:
    if not done.layers:
        show_lines(["nothing is there"])
        return
    show_table(COLUMNS, done.layers)
    for layer in done.layers:
        if layer.kept:
            # Drivers seldom compile the same bytes twice: most kernels that ranks share differ.
            warn(f"{layer.layer}: {len(layer.kept)} differ from the one of the same key that was first, which stays")
        warn_notes(f"{layer.layer}: failed:", layer.failed)
