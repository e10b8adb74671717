"""``cachectl prune``: remove what is stale or old, then the longest unused until the rest fits."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cachectl.cli import options
from cachectl.cli.clearing.purge import show_purge
from cachectl.cli.output import warn, working

if TYPE_CHECKING:
    from cachectl.clearing.prune import Limits
    from cachectl.cli.call import Call


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_layers(parser)
    parser.add_argument(
        "--stale", action="store_true", help="what no program can hit any more as far as this Python tells, and orphans"
    )
    parser.add_argument("--older-than", metavar="AGE", help="what was not changed or used for 30d, 12h, 2w")
    parser.add_argument("--max-size", metavar="SIZE", help="until the layers together hold no more than 500M, 2GiB")
    parser.add_argument("--max-files", type=options.positive, metavar="N", help="until they hold no more than N files")
    options.add_dry_run(parser, "go")
    options.add_changing(parser)
    options.add_json(parser)


def run(call: Call) -> int:
    """Prune."""
    limits = _limits(call)
    if limits.none:
        call.misuse("say what to prune: --stale, --older-than, --max-size or --max-files")
    with working("pruning"):
        result = call.stack.prune(limits, layers=call.options.layers, dry_run=call.options.dry_run, notice=warn)
    return call.show(result, lambda result: show_purge(result, call.now))


def _limits(call: Call) -> Limits:
    from cachectl.clearing.prune import Limits
    from cachectl.layers.base.selection import parse_age, parse_size

    given = call.options
    return Limits(
        stale=given.stale,
        before=None if given.older_than is None else call.now - parse_age(given.older_than),
        bytes=None if given.max_size is None else parse_size(given.max_size),
        files=given.max_files,
    )
