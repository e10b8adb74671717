"""``cachectl push``: add to a store the entries that it lacks."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Final

from cachectl.options import CLEARABLE, FORCE_BUNDLE, FORM, ROOT, SELECTION, SIGN, STORES, Option, Request
from cachectl.transfer import Transfer, show, table

__all__ = ["OPTIONS", "run", "show", "table"]

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
