"""``cachectl push``: add to a store the entries that it lacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Final

from cachectl.options import CLEARABLE, FORCE_BUNDLE, FORM, ROOT, SELECTION, SIGN, STORES, Option, Request
from cachectl.table import Column, Table, Whole, counts, size, sizes

if TYPE_CHECKING:
    from cachectl.exchange.copying import Moved, Transfer

OPTIONS: Final = (
    Option(
        "target",
        metavar="TARGET",
        help=f"made if missing: {STORES}; - (standard output); a database file of MIOpen",
    ),
    CLEARABLE,
    SELECTION,
    ROOT,
    SIGN,
    Option(
        "--allowed-signers",
        metavar="LIST",
        help="with --sign, what a signer of this list has pushed counts as present too",
    ),
    FORCE_BUNDLE,
    FORM,
)


def run(request: Request) -> Transfer | int:
    """Carry out ``cachectl push``."""
    from cachectl.exchange.push import push

    options, selected = request.options, request.selection()
    if options.target == "-" and request.form != "table":
        request.misuse(f"{request.form.upper()} and the bundle cannot both go to standard output; name a FILE")
    with request.working("pushing"):
        done = push(
            request.stack,
            request.target(options.target),
            selected,
            layers=options.layers,
            sign=options.sign,
            allowed_signers=options.allowed_signers,
            force=options.force,
        )
    if options.target != "-":
        return done
    # Standard output holds the bundle.
    with redirect_stdout(sys.stderr):
        request.say(show(done, request))
    return int(done.failed)


_COLUMNS: Final[tuple[Column[Moved], ...]] = (
    Column("layer", lambda layer: layer.layer),
    counts("pushed", lambda layer: layer.placed),
    sizes("size", lambda layer: layer.bytes),
    counts("there", lambda layer: layer.there),
    counts("failed", lambda layer: len(layer.failed)),
)


def table(done: Transfer, _request: Request) -> Table[Moved]:
    """Return what was added, by layer."""
    return Table(_COLUMNS, done.layers)


def show(done: Transfer, request: Request) -> Iterator[object]:
    """Yield what was added, the digest of the store, and what the new entries reveal."""
    if rows := [layer for layer in done.layers if layer.placed or layer.there or layer.failed]:
        yield Table(_COLUMNS, rows)
    else:
        request.notice(f"no entry to push in {', '.join(layer.layer for layer in done.layers)}")
    yield ""
    yield Whole(f"{done.url}: {size(done.moved)} written")
    if done.digest is not None:
        yield Whole(f"digest {done.digest}")
    for layer in done.layers:
        if layer.sensitive is not None:
            request.notice(f"{layer.layer}: it now holds {layer.sensitive}")
        request.warn_notes(f"{layer.layer}: not pushed:", [*layer.skipped, *layer.kept])
        request.warn_notes(f"{layer.layer}: failed:", layer.failed)
