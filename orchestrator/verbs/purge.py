"""``cachectl purge``: plan the exact removals of every layer, then apply the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from cachectl import layer_set, removal, verbs
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.core.selection import ALL, Selection

EXAMPLE = "cachectl purge pocl --older-than 30d"
OPTIONS = (
    ("layers", "LAYER", "a layer that cachectl layers lists (name one, or use --all)", verbs.MANY),
    ("--all", "every user layer that is not precious"),
    verbs.SELECTION,
    ("--damaged", "only entries that verify finds damaged, which a run makes again; never results of tuning"),
    *verbs.REMOVING,
    *verbs.CHANGING,
)


def plan_purge(
    stack: layer_set.LayerSet,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    damaged: bool = False,
) -> removal.RemovalPlan:
    """Plan a purge; touches nothing. The plan's ``apply()`` carries it out.

    :param layers: names; none means every clearable one
    :param damaged: only damaged entries of the selection
    :returns: what of each layer goes, what is left and why; a layer that refuses is ``failed``
    :raises BadRequest: for an unknown layer
    """
    return removal.planned(stack.chosen(layers), lambda layer: layer.plan_clear(selection, damaged=damaged))


def purge(
    stack: layer_set.LayerSet,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    damaged: bool = False,
    dry_run: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> removal.RemovalPlan | removal.Removal:
    """Remove the selected entries, and what killed commands left.

    :param layers: names; none means every clearable one
    :param damaged: only damaged entries of the selection
    :param dry_run: return the plan
    :param notice: gets a line for each thing that a caller should know
    :returns: what of each layer goes, what is left and why; a layer that refuses is ``failed``
    :raises BadRequest: for an unknown layer
    """
    names = tuple(layers)
    plan = partial(plan_purge, stack, selection, layers=names, damaged=damaged)
    return removal.carry_out(stack, stack.chosen(names), plan, notice, dry_run=dry_run)


show, table = removal.show, removal.table


def run(request: verbs.Request) -> removal.RemovalPlan | removal.Removal:
    """Carry out ``cachectl purge``. Raises :class:`CachectlError` if nothing has the key that was to be removed."""
    options = request.options
    if options.all == bool(options.layers):
        request.misuse("name the layers to purge, or use --all" if not options.all else "--all needs no LAYER")
    stack, layers, selection = request.stack, options.layers, request.selection()
    with request.output.progress("purging"):
        result = purge(
            stack, selection, layers=layers, damaged=options.damaged, dry_run=options.dry_run, notice=request.notice
        )
    total = result.total
    if not options.all:
        request.warn_of_dead({layer.name for layer in result.layers if layer.removed})
    if options.key is not None and not any((total.removed, total.orphans_removed, total.skipped, total.failed)):
        raise CachectlError(f"no entry that is selected has the key {options.key!r}; cachectl ls -q lists keys")
    return result
