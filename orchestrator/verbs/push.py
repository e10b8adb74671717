"""``cachectl push``: add to a store the entries that it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cachectl import listing, transfer, verbs
from cachectl.layers.base.errors import CachectlError
from cachectl.show import units
from cachectl.show.table import Table
from cachectl.verbs import ls

EXAMPLE = "cachectl push warm.zip pocl loopy"
OPTIONS = (
    ("target", "TARGET", f"{verbs.STORES}, made if missing; - (standard output); or a MIOpen database file"),
    verbs.CLEARABLE,
    verbs.SELECTION,
    verbs.ROOT,
    verbs.SIGN,
    ("--allowed-signers", "LIST", "with --sign: what a signer in this list has pushed counts as present too"),
    verbs.FORCE_BUNDLE,
    verbs.VERBOSE_MESSAGES,
    verbs.FORM,
)


def run(request: verbs.Request) -> transfer.Transfer | int:
    """Carry out ``cachectl push``. Raises :class:`CachectlError` if no entry has the selected kernel or key."""
    from cachectl.exchange.push_pull import push

    options, selected = request.options, request.selection()
    if options.target == "-" and (form := request.form) != "table":
        request.misuse(f"{form.upper()} and the bundle cannot both go to standard output; name a FILE for the bundle")
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
    missing = None if held else listing.unmatched(request.stack.chosen(options.layers), selected)
    if missing is not None and not pushed.failed:
        raise CachectlError(missing)
    request.warn_of_dead({layer.name for layer in request.stack} - held)
    if options.target != "-":
        return pushed
    # Standard output holds the bundle.
    request.output.say_on_stderr(show(pushed, request))
    return int(pushed.failed)


def table(outcome: transfer.Transfer, request: verbs.Request, stale: str = "stale") -> Table:
    """Return the layers with what was placed, or the entries of a dry run."""
    if not outcome.dry_run:
        return _table("placed", outcome.layers)
    entries = (entry for layer in outcome.layers for entry in layer.entries or ())
    return ls.entries_table(entries, request.environment.clock(), stale)


def _table(verb: str, layers: Iterable[transfer.Moved]) -> Table:
    rows = [
        (layer.layer, layer.placed, layer.bytes, layer.there, len(layer.kept), layer.cannot_hit, len(layer.failed))
        for layer in layers
    ]
    left = dict.fromkeys(("there", "differ", "cannot hit", "failed"), units.count)
    return Table({"layer": str, verb: units.count, "size": units.size, **left}, rows)


def show(outcome: transfer.Transfer, request: verbs.Request) -> Iterator[object]:
    """Yield what was or would be placed, whether programs here will hit it, and what was not placed."""
    if outcome.dry_run and (entries := table(outcome, request, "")).rows:
        yield entries
        yield ""
    if rows := [layer for layer in outcome.layers if layer != transfer.Moved(layer.layer)]:
        yield _table("would place" if outcome.dry_run else "placed", rows)
    else:
        layers = ", ".join(layer.layer for layer in outcome.layers) or "the layers here"
        request.notice(f"no entry to {request.options.verb} in {layers}")
    yield ""
    yield [f"{outcome.url}: copied {units.size(outcome.moved)}"]
    if outcome.digest is not None:
        yield [f"digest {outcome.digest}"]
    for reason in outcome.trusted:
        yield [f"accepted: {reason}"]
    verbose = request.options.verbose
    for layer in outcome.layers:
        for seen in layer.foreseen:
            yield [f"{layer.layer}: {units.count(seen.entries)} {seen.words}"]
        for what, notes in (("skipped", layer.skipped), ("kept", layer.kept), ("failed", layer.failed)):
            request.output.warn_notes(f"{layer.layer}: {what}", notes, verbose=verbose)
    for layers, revealed in units.merged({layer.layer: layer.sensitive for layer in outcome.layers if layer.sensitive}):
        request.notice(f"{layers}: the target now contains {revealed}")
    for note in outcome.unread:
        yield [f"{note.key}: {note.because}"]
    request.output.warn_notes("not trusted:", outcome.left_out, verbose=verbose)
