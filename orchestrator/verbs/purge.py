"""``cachectl purge``: plan the exact removals of every layer, then apply the plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from cachectl import layer_set, listing, removal, verbs
from cachectl.layers.base.text import plural
from cachectl.layers.core.plan import Outcome, Plan
from cachectl.layers.core.selection import ALL, Selection
from cachectl.show import units
from cachectl.show.table import Table
from cachectl.verbs.ls import entries_table
from cachectl.watching import ledger

EXAMPLE = "cachectl purge pocl --older-than 30d"
OPTIONS = (
    ("layers", "LAYER", "a layer, as cachectl layers lists it (name one, or use --all)", verbs.MANY),
    ("--all", "every user layer except tuning results"),
    verbs.SELECTION,
    ("--damaged", "only entries that verify finds damaged; never tuning results"),
    *verbs.REMOVING,
    *verbs.CHANGING,
)


def plan_purge(
    stack: layer_set.LayerSet,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    damaged: bool = False,
    contents: bool = False,
) -> removal.RemovalPlan:
    """Plan a purge; changes nothing. The plan's ``apply()`` carries it out.

    :param damaged: only damaged entries of the selection
    :param contents: read the entries even if the selection does not need it, to list their kernels
    :returns: for each layer what is removed, and what is left and why; a layer that refuses is ``failed``
    :raises BadRequest: for an unknown layer
    """
    chosen = stack.chosen(layers)
    return removal.planned(chosen, lambda layer: layer.plan_clear(selection, damaged=damaged, contents=contents))


def purge(
    stack: layer_set.LayerSet,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    damaged: bool = False,
    dry_run: bool = False,
    contents: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> removal.RemovalPlan | removal.Removal:
    """Remove the selected entries, and what killed commands left.

    :param damaged: only damaged entries of the selection
    :param dry_run: return the plan; ``contents`` is that of :func:`plan_purge`
    :returns: for each layer what is removed, and what is left and why; a layer that refuses is ``failed``
    :raises BadRequest: for an unknown layer
    """
    names = tuple(layers)
    plan = partial(plan_purge, stack, selection, layers=names, damaged=damaged, contents=contents and dry_run)
    note = partial(ledger.note_removals, stack.environment, "purge")
    return removal.carry_out(stack, stack.chosen(names), plan, notice, dry_run=dry_run, note=note)


def run(request: verbs.Request) -> removal.RemovalPlan | removal.Removal:
    """Carry out ``cachectl purge``."""
    options = request.options
    if options.all == bool(options.layers):
        request.misuse("name the layers to purge, or use --all" if not options.all else "--all needs no LAYER")
    stack, layers, selection = request.stack, options.layers, request.selection()
    with request.output.progress("purging"):
        result = purge(
            stack,
            selection,
            layers=layers,
            damaged=options.damaged,
            dry_run=options.dry_run,
            contents=options.verbose,
            notice=request.notice,
        )
    total = result.total
    if not options.all:
        request.warn_of_dead({layer.layer for layer in result.layers if layer.removed})
    is_empty = not any((total.removed, total.orphans_removed, total.failed))
    if is_empty and (missing := listing.unmatched(stack.chosen(layers), selection)) is not None:
        request.notice(missing)
    return result


def of_users(_options: argparse.Namespace) -> verbs.OfUsers:
    """Show one line for each layer of a user."""
    numbers = ("removed", "orphans_removed", "bytes_freed", "skipped", "failed")
    return verbs.OfUsers("layers", ("layer",), numbers, order="bytes_freed")


def layers_table(
    result: removal.RemovalPlan | removal.Removal, layers: Iterable[Plan | Outcome], home: str, *, sums: bool
) -> Table:
    """Return the numbers and places of some layers, with ``sums`` also the totals.

    A plan shows the size of its entries, because what a file of rows will shrink by is not known before.
    """
    verb = "would go" if result.dry_run else "removed"
    numbers = {verb: units.count, "orphans": units.count, "size": units.size, "skipped": units.count}
    rows = []
    for layer in layers:
        roots = " ".join(units.short_path(root, home) for root in layer.roots)
        size = sum(entry.bytes for entry in layer.entries) if isinstance(layer, Plan) else layer.bytes_freed
        rows.append((layer.layer, layer.removed, layer.orphans_removed, size, len(layer.skipped), roots))
    last = ("total", *(sum(column) for column in list(zip(*rows, strict=True))[1:5]), "") if sums else ()
    return Table({"layer": str, **numbers, "root": str}, rows, last)


def is_empty(layer: Plan | Outcome) -> bool:
    """Return whether a layer has nothing to show."""
    return not (layer.removed or layer.orphans_removed or layer.skipped or layer.failed)


def table(result: removal.RemovalPlan | removal.Removal, request: verbs.Request) -> Table:
    """Return what was removed from each layer, or the entries of a plan."""
    if isinstance(result, removal.Removal):
        return layers_table(result, result.layers, str(request.environment.home_folder), sums=False)
    return entries_table(result.entries, request.environment.clock(), "stale")


def show(result: removal.RemovalPlan | removal.Removal, request: verbs.Request) -> Iterator[object]:
    """Yield what a removal did or would do, layer by layer, with ``-v`` each entry of a plan; warn of what stays.

    Layers with nothing to remove are one line, unless ``-v`` is given or layers are named.
    """
    shows_all = request.options.verbose or request.options.layers
    if request.options.verbose and isinstance(result, removal.RemovalPlan):
        yield from (entries_table(result.entries, request.environment.clock(), ""), "")
    cleared = [layer for layer in result.layers if not layer.failed or layer.removed]
    shown = [layer for layer in cleared if shows_all or not is_empty(layer)]
    if shown:
        yield layers_table(result, shown, str(request.environment.home_folder), sums=True)
    if hidden := len(cleared) - len(shown):
        yield f"{plural(hidden, 'more layer' if shown else 'layer')}: nothing to remove"
    for layer in result.layers:
        for about, notes in ((" skipped", layer.skipped), ("", layer.failed)):
            request.output.warn_notes(f"{layer.layer}:{about}", notes, verbose=request.options.verbose)
