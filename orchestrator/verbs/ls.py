"""``cachectl ls``: entries, one a line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter

from cachectl import layer_set, listing, verbs
from cachectl.layers import core

#: What each order sorts by.
_ORDERS = {"size": "bytes", "age": "modified", "used": "used"}
OPTIONS = (
    verbs.LAYERS,
    verbs.SELECTION,
    ("--sort", None, "largest, oldest, or longest unused first", {"choices": tuple(_ORDERS)}),
    ("--limit", "N", "show no more than N entries", {"type": int}),
    verbs.PYTHON,
    verbs.WAIT,
    verbs.PLACES,
    [*verbs.FORM, ("-q --quiet", "print nothing but keys")],
)
EPILOG = "On a terminal the table shortens names and keys to fit; elsewhere they are whole."


def ls(
    stack: layer_set.LayerSet,
    selection: core.Selection = core.ALL,
    *,
    layers: Iterable[str] = (),
    sort: str | None = None,
    limit: int | None = None,
    contents: bool = True,
) -> listing.Listing:
    """Return the selected entries, sorted by ``size``, ``age`` or ``used``, no more than ``limit``.

    Without ``contents`` entries are read only if the selection needs that. Raises :class:`BadRequest` for a negative
    limit.
    """
    if limit is not None and limit < 0:
        raise core.BadRequest(f"--limit {limit} is negative")
    troubles: list[listing.Trouble] = []
    reads = contents or selection.needs_contents
    entries: Iterable[core.Entry] = listing.listed(stack.named(layers), selection, troubles.append, contents=reads)
    if sort is not None:
        place = attrgetter(_ORDERS[sort])
        # An unknown time comes last.
        entries = sorted(entries, key=lambda entry: (place(entry) is None, place(entry) or 0), reverse=sort == "size")
    most = None if limit is None else min(limit, sys.maxsize)
    return listing.Listing(tuple(islice(entries, most)), tuple(troubles))


def run(request: verbs.Request) -> listing.Listing | int:
    """Carry out ``cachectl ls``."""
    options, selected = request.options, request.selection()
    asked = {"layers": options.layers, "sort": options.sort, "limit": options.limit, "contents": not options.quiet}
    with request.output.progress("listing"):
        listed = ls(request.stack, selected, **asked)
    for trouble in listed.problems:
        where = "" if trouble.path is None else f"{trouble.path}: "
        request.notice(f"{trouble.layer}: {where}{trouble.message}")
    if options.quiet:
        request.output.show_raw(entry.key for entry in listed.entries)
        return int(listed.failed)
    return listed


def table(listed: listing.Listing, request: verbs.Request) -> verbs.Table:
    """Return the entries."""
    return listing.entries_table(listed.entries, request.now, "stale")


def show(listed: listing.Listing, request: verbs.Request) -> Iterator[object]:
    """Yield the table of entries."""
    yield listing.entries_table(listed.entries, request.now, "")
