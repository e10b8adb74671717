"""``cachectl ls``: entries, one a line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from cachectl import options
from cachectl import table as tables
from cachectl.layers.base import errors
from cachectl.layers.base.selection import ALL
from cachectl.listing import Listing, Trouble, listed

if TYPE_CHECKING:
    from cachectl import layer_set
    from cachectl.layers.base.facts import Entry
    from cachectl.layers.base.selection import Selection

_UNKNOWN: Final = float("inf")
#: The sort key of each order; an unknown time comes last.
_ORDERS: Final[dict[str, Callable[[Entry], float]]] = {
    "size": lambda entry: -entry.bytes,
    "age": lambda entry: _UNKNOWN if entry.modified is None else entry.modified,
    "used": lambda entry: _UNKNOWN if entry.used is None else entry.used,
}
OPTIONS: Final = (
    options.LAYERS,
    options.SELECTION,
    options.Option("--sort", choices=tuple(_ORDERS), help="largest, oldest, or longest unused first"),
    options.Option("--limit", type=int, metavar="N", help="show no more than N entries"),
    options.PYTHON,
    options.WAIT,
    options.PLACES,
    options.OneOf(
        (options.JSON, options.CSV, options.Option("-q", "--quiet", action="store_true", help="print nothing but keys"))
    ),
)
EPILOG: Final = "On a terminal the table shortens names and keys to fit; elsewhere they are whole."


def ls(
    stack: layer_set.LayerSet,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    sort: str | None = None,
    limit: int | None = None,
) -> Listing:
    """Return the selected entries, sorted by ``size``, ``age`` or ``used``, no more than ``limit``.

    Raises :class:`BadRequest` for a negative limit.
    """
    if limit is not None and limit < 0:
        raise errors.BadRequest(f"--limit {limit} is negative")
    troubles: list[Trouble] = []
    entries: Iterable[Entry] = listed(stack.named(layers), selection, troubles.append)
    if sort is not None:
        entries = sorted(entries, key=_ORDERS[sort])
    most = None if limit is None else min(limit, sys.maxsize)
    return Listing(tuple(islice(entries, most)), tuple(troubles))


def run(request: options.Request) -> Listing:
    """Carry out ``cachectl ls``."""
    options, selected = request.options, request.selection()
    with request.working("listing"):
        listing = ls(request.stack, selected, layers=options.layers, sort=options.sort, limit=options.limit)
    for trouble in listing.problems:
        where = "" if trouble.path is None else f"{trouble.path}: "
        request.notice(f"{trouble.layer}: {where}{trouble.message}")
    return listing


def columns(now: float) -> tuple[tables.Column[Entry], ...]:
    """Return the columns of a listing; ``now`` is the time that ages refer to."""
    return (
        tables.Column("layer", lambda entry: entry.layer),
        tables.Column("kernels", lambda entry: " ".join(entry.kernels or (tables.DASH,))),
        tables.sizes("size", lambda entry: entry.bytes),
        tables.ages("age", lambda entry: entry.modified if entry.used is None else entry.used, now),
        tables.Column("", lambda entry: "stale" if entry.stale else "", raw=lambda entry: entry.stale, name="stale"),
        tables.Column("key", lambda entry: entry.key),
    )


def table(listing: Listing, request: options.Request) -> tables.Table[Entry]:
    """Return the entries."""
    return tables.Table(columns(request.now), listing.entries)


def show(listing: Listing, request: options.Request) -> Iterator[object]:
    """Yield the table of entries, or with ``-q`` their keys."""
    yield tables.Raw(entry.key for entry in listing.entries) if request.options.quiet else table(listing, request)
