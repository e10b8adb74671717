"""``cachectl push``: add to a store the entries that it lacks."""

from __future__ import annotations

from cachectl import transfer, verbs

EXAMPLE = "cachectl push warm.zip pocl loopy"
OPTIONS = (
    ("target", "TARGET", f"made if missing: {verbs.STORES}; - (standard output); a database file of MIOpen"),
    verbs.CLEARABLE,
    verbs.SELECTION,
    verbs.ROOT,
    verbs.SIGN,
    ("--allowed-signers", "LIST", "with --sign, what a signer of this list has pushed counts as present too"),
    verbs.FORCE_BUNDLE,
    verbs.FORM,
)


show, table = transfer.show, transfer.table


def run(request: verbs.Request) -> transfer.Transfer | int:
    """Carry out ``cachectl push``."""
    from cachectl.exchange.push_pull import push

    options, selected = request.options, request.selection()
    if options.target == "-" and request.form != "table":
        request.misuse(f"{request.form.upper()} and the bundle cannot both go to standard output; name a FILE")
    with request.output.progress("pushing"):
        pushed = push(
            request.stack,
            request.target(options.target),
            selected,
            layers=options.layers,
            sign=options.sign,
            allowed_signers=options.allowed_signers,
            force=options.force,
        )
    held = {moved.layer for moved in pushed.layers if moved.placed or moved.there}
    request.warn_of_dead({layer.name for layer in request.stack} - held)
    if options.target != "-":
        return pushed
    # Standard output holds the bundle.
    request.output.say_on_stderr(show(pushed, request))
    return int(pushed.failed)
