"""``cachectl ls``: entries, one a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cachectl.options import CSV, JSON, LAYERS, PLACES, PYTHON, SELECTION, WAIT, OneOf, Option, Request
from cachectl.table import DASH, Column, Raw, Table, ages, sizes

if TYPE_CHECKING:
    from cachectl.inspecting.entries import Listing
    from cachectl.layers.base.facts import Entry

OPTIONS: Final = (
    LAYERS,
    SELECTION,
    Option("--sort", choices=("size", "age", "used"), help="largest, oldest, or longest unused first"),
    Option("--limit", type=int, metavar="N", help="show no more than N entries"),
    PYTHON,
    WAIT,
    PLACES,
    OneOf((JSON, CSV, Option("-q", "--quiet", action="store_true", help="print nothing but keys"))),
)
EPILOG: Final = "On a terminal the table shortens names and keys to fit; elsewhere they are whole."


def run(request: Request) -> Listing:
    """Carry out ``cachectl ls``."""
    from cachectl.inspecting.entries import list_entries

    options, selected = request.options, request.selection()
    with request.working("listing"):
        layers = request.stack.named(options.layers)
        listing = list_entries(layers, selected, sort=options.sort, limit=options.limit)
    for trouble in listing.problems:
        where = "" if trouble.path is None else f"{trouble.path}: "
        request.notice(f"{trouble.layer}: {where}{trouble.message}")
    return listing


def columns(now: float) -> tuple[Column[Entry], ...]:
    """Return the columns of a listing; ``now`` is the time that ages refer to."""
    return (
        Column("layer", lambda entry: entry.layer),
        Column("kernels", lambda entry: " ".join(entry.kernels or (DASH,))),
        sizes("size", lambda entry: entry.bytes),
        ages("age", lambda entry: entry.modified if entry.used is None else entry.used, now),
        Column("", lambda entry: "stale" if entry.stale else "", raw=lambda entry: entry.stale, name="stale"),
        Column("key", lambda entry: entry.key),
    )


def table(listing: Listing, request: Request) -> Table[Entry]:
    """Return the entries."""
    return Table(columns(request.now), listing.entries)


def show(listing: Listing, request: Request) -> Iterator[object]:
    """Yield the table of entries, or with ``-q`` their keys."""
    yield Raw(entry.key for entry in listing.entries) if request.options.quiet else table(listing, request)
