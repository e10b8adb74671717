"""``cachectl prune``: remove stale or old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.clearing.purge import show_result
from cachectl.cli.parser import CHANGING, Parser

if TYPE_CHECKING:
    from cachectl.clearing.limits import Limits


def add_options(parser: Parser) -> None:
    parser.add_layers("default: every user layer but tuning results")
    parser.add_argument(
        "--stale", action="store_true", help="entries that no known Python or driver can hit any more, and orphans"
    )
    parser.add_argument("--older-than", metavar="AGE", help="entries not changed or used for 30d, 12h, 2w")
    parser.add_argument("--max-size", metavar="SIZE", help="until the layers together hold no more than 500M, 2GiB")
    parser.add_dry_run("go")
    parser.add_shared("--verbose")
    parser.add_places(users=True)
    parser.add_form("--python", *CHANGING)


def run(call: Call) -> int:
    limits = _limits(call)
    given = None if limits.none else limits
    with output.working("pruning"):
        result = call.stack.prune(given, layers=call.options.layers, dry_run=call.options.dry_run, notice=output.warn)
    return show_result(call, result)


def _limits(call: Call) -> Limits:
    from cachectl.clearing.limits import Limits
    from cachectl.layers.base.selection import parse_age, parse_size

    given = call.options
    return Limits(
        stale=given.stale,
        before=None if given.older_than is None else call.now - parse_age(given.older_than),
        bytes=None if given.max_size is None else parse_size(given.max_size),
    )
