"""``cachectl ls``: list kernels, or single entries."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from cachectl import layer_set, listing, verbs
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.text import printable
from cachectl.layers.core.entry import Entry, Note
from cachectl.layers.core.selection import ALL, Selection, short_key
from cachectl.show import units
from cachectl.show.table import Columns, Table

_Row = TypeVar("_Row", Entry, listing.Kernel)
#: The attribute to sort by.
_ORDERS = {"size": "bytes", "age": "modified", "used": "used"}
EXAMPLE = "cachectl ls --kernel 'axpy*'"
OPTIONS = (
    verbs.LAYERS,
    verbs.SELECTION,
    ("--sort", None, "largest, oldest, or longest unused first", {"choices": tuple(_ORDERS)}),
    ("--limit", "N", "show at most N lines", {"type": int}),
    ("-l --long", "list one entry per line, with short keys"),
    verbs.VERBOSE_MESSAGES,
    verbs.PYTHON,
    verbs.WAIT,
    verbs.PLACES,
    [*verbs.FORM, ("-q --quiet", "print only keys")],
)
EPILOG = "On a terminal, names are shortened to fit. JSON and CSV have full keys."


def ls(
    stack: layer_set.LayerSet,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    sort: str | None = None,
    limit: int | None = None,
    contents: bool = True,
    by_kernel: bool = True,
) -> listing.Listing:
    """Return the selected entries.

    :param sort: ``"size"``, ``"age"`` or ``"used"``
    :param limit: the most entries, and the most kernels
    :param contents: read entries even if the selection does not need it, for kernels, devices and versions
    :param by_kernel: also sum entries by kernel, in the same order
    :raises BadRequest: for an unknown layer, and a negative limit
    """
    if limit is not None and limit < 0:
        raise BadRequest(f"--limit {limit} is negative")
    troubles: list[listing.Trouble] = []
    reads = contents or selection.needs_contents
    entries: Iterable[Entry] = listing.listed(stack.named(layers), selection, troubles.append, contents=reads)
    kernels: Iterable[listing.Kernel] = ()
    if by_kernel:
        entries = tuple(entries)
        kernels = _sorted(listing.by_kernel(entries, stack.environment), sort)
    most = None if limit is None else min(limit, sys.maxsize)
    first = tuple(islice(_sorted(entries, sort), most))
    missing = None if first or limit == 0 else listing.unmatched(stack.named(layers), selection)
    return listing.Listing(first, tuple(troubles), tuple(islice(kernels, most)), missing)


def _sorted(rows: Iterable[_Row], sort: str | None) -> Iterable[_Row]:
    if sort is None:
        return rows
    place = attrgetter(_ORDERS[sort])
    # An unknown time comes last.
    return sorted(rows, key=lambda row: (place(row) is None, place(row) or 0), reverse=sort == "size")


def run(request: verbs.Request) -> listing.Listing | int:
    """Carry out ``cachectl ls``."""
    options, selected = request.options, request.selection()
    with request.output.progress("listing"):
        listed = ls(
            request.stack,
            selected,
            layers=options.layers,
            sort=options.sort,
            limit=options.limit,
            contents=not options.quiet,
            by_kernel=not (options.quiet or options.long or request.form == "csv"),
        )
    problems: dict[str, list[Note]] = {}
    for trouble in listed.problems:
        problems.setdefault(trouble.layer, []).append(Note(str(trouble.path or "*"), trouble.message))
    for layer, notes in problems.items():
        request.output.warn_notes(f"{layer}:", notes, verbose=options.verbose)
    if listed.unmatched is not None:
        request.notice(listed.unmatched)
    if options.quiet:
        request.output.show_raw(entry.key for entry in listed.entries)
        return int(listed.failed)
    return listed


def table(listed: listing.Listing, request: verbs.Request) -> Table:
    """Return the entries."""
    return entries_table(listed.entries, request.environment.clock(), "stale")


def show(listed: listing.Listing, request: verbs.Request) -> Iterator[object]:
    """Yield the table of kernels, or of entries."""
    if request.options.long:
        yield entries_table(listed.entries, request.environment.clock(), "")
    else:
        yield kernels_table(listed.kernels, request.environment.clock())


def of_users(options: argparse.Namespace) -> verbs.OfUsers:
    """Show kernels, or entries with ``-l`` and ``--csv``."""
    order = _ORDERS[options.sort or "size"]
    if options.long or options.csv:
        return verbs.OfUsers("entries", ("layer", "key"), ("bytes",), order=order)
    return verbs.OfUsers("kernels", ("kernels", "layers"), ("bytes", "entries"), order=order)


def kernels_table(kernels: Sequence[listing.Kernel], now: float) -> Table:
    """Return one row for each kernel, with ages at the time ``now``."""
    columns: dict[str, Callable[[Any], str]] = {"kernel": str, "layers": str, "entries": units.count}
    columns |= {"size": units.size, "age": units.age}
    measured = any(kernel.saves is not None for kernel in kernels)
    rows = []
    for kernel in kernels:
        moment = kernel.modified if kernel.used is None else kernel.used
        row = (" ".join(kernel.kernels) or units.DASH, " ".join(kernel.layers), kernel.entries, kernel.bytes)
        rows.append((*row, units.since(moment, now), *([kernel.saves] if measured else ())))
    return Table(columns | ({"saves": units.duration} if measured else {}), rows)


def entries_table(entries: Iterable[Entry], now: float, stale: str) -> Table:
    """Return one row for each entry, with ages at the time ``now``; ``stale`` is the title of that column.

    Without a title the table is for people: keys are short, and never cut.
    """
    rows: list[tuple[object, ...]] = []
    for entry in entries:
        kernels = " ".join(entry.details.kernels or (units.DASH,))
        moment = entry.modified if entry.used is None else entry.used
        key = entry.key if stale else short_key(entry.key)
        is_stale = entry.stale if stale else "" if entry.state == "live" else entry.state
        rows.append((entry.layer, kernels, entry.bytes, units.since(moment, now), is_stale, key))
    numbers: Columns = {"size": units.size, "age": units.age, stale: str}
    return Table({"layer": str, "kernels": str, **numbers, "key": str if stale else printable}, rows)
