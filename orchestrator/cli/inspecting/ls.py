"""``cachectl ls``: entries, one a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import SHARED, Parser

if TYPE_CHECKING:
    from cachectl.inspecting.entries import Listing
    from cachectl.layers.base.facts import Quarantined, Removable

    Thing = Removable | Quarantined


def add_options(parser: Parser) -> None:
    parser.add_shared("layers")
    parser.add_selection()
    parser.add_argument("--sort", choices=("size", "age", "used"), help="largest, oldest, or longest unused first")
    parser.add_argument("--limit", type=int, metavar="N", help="show no more than N entries")
    parser.add_places(homes=True, root=True)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("-q", "--quiet", action="store_true", help="print nothing but keys")
    form.add_argument("--json", **SHARED["--json"])
    parser.epilog = "The table shortens keys to fit; -q and --json give them in full."


def run(call: Call) -> int:
    selected = call.selection()
    with output.working("listing"):
        listing = call.stack.ls(selected, layers=call.options.layers, sort=call.options.sort, limit=call.options.limit)
    if call.options.json:
        call.show_json(listing)
    elif call.options.quiet:
        output.show_raw(entry.key for entry in listing.entries)
    else:
        show_things(((entry.layer, entry) for entry in listing.entries), call.now)
    _warn_of_problems(listing)
    return 1 if listing.failed else 0


def columns(now: float) -> tuple[output.Column[tuple[str, Thing]], ...]:
    """Return the columns of every listing; a row is the name of a layer and a thing that it keeps."""

    def of(value: Callable[[Thing], str]) -> Callable[[tuple[str, Thing]], str]:
        return lambda row: value(row[1])

    return (
        output.Column("layer", lambda row: row[0]),
        output.Column("kernels", of(lambda thing: output.shorten(_kernels(thing), 18))),
        output.sizes("size", lambda row: row[1].bytes),
        output.Column("age", of(lambda thing: output.age(_last(thing), now)), right=True),
        output.Column("", of(_mark)),
        output.Column("key", of(lambda thing: thing.key)),
    )


def show_things(things: Iterable[tuple[str, Thing]], now: float) -> None:
    """Print entries, orphans or things in quarantine, each with its layer; dry runs do so too."""
    output.show_table(columns(now), things)


def _kernels(thing: Thing) -> str:
    return " ".join(getattr(thing, "kernels", None) or (output.DASH,))


def _mark(thing: Thing) -> str:
    from cachectl.layers.base.facts import Orphan

    if isinstance(thing, Orphan):
        return "orphan"
    return "stale" if getattr(thing, "stale", False) else ""


def _last(thing: Thing) -> float | None:
    """Return the last known time of a thing: of its move to quarantine, else of its use, else of its change."""
    times = (getattr(thing, name, None) for name in ("moved", "used", "modified"))
    return next((moment for moment in times if moment is not None), None)


def _warn_of_problems(listing: Listing) -> None:
    for trouble in listing.problems:
        where = "" if trouble.path is None else f"{trouble.path}: "
        output.warn(f"{trouble.layer}: {where}{trouble.message}")
