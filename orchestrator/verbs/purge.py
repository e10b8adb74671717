"""``cachectl purge``: plan the exact removals of every layer, then apply the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from cachectl import layer_set, options, removal
from cachectl.layers.base import errors
from cachectl.layers.base.selection import ALL, Selection
from cachectl.removal import PurgePlan, PurgeResult, show, table

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

__all__ = ["OPTIONS", "plan_purge", "purge", "run", "show", "table"]

OPTIONS: Final = (
    options.LAYERS.having(help="a layer that cachectl layers lists (name one, or use --all)"),
    options.Option("--all", action="store_true", help="every user layer that is not precious"),
    options.SELECTION,
    options.Option(
        "--damaged",
        action="store_true",
        help="only entries that verify finds damaged, which a run makes again; never results of tuning",
    ),
    *options.REMOVING,
    *options.CHANGING,
)


def plan_purge(layers: Iterable[Layer], selection: Selection = ALL, *, damaged: bool = False) -> PurgePlan:
    """Plan the purge of a selection in each layer, with ``damaged`` only of damaged entries; touches nothing."""
    plans = [(layer, partial(layer.plan_clear, selection, damaged=damaged)) for layer in layers]
    return PurgePlan(tuple(removal.planned(layer, plan) for layer, plan in plans))


def purge(
    stack: layer_set.LayerSet,
    selection: Selection = ALL,
    *,
    layers: Sequence[str] = (),
    damaged: bool = False,
    dry_run: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> PurgeResult:
    """Remove the selected entries, and what killed commands left; or return the plan (``dry_run``)."""
    chosen = stack.chosen(layers)
    plan = partial(plan_purge, chosen, selection, damaged=damaged)
    return removal.carry_out(stack, chosen, plan, notice, dry_run=dry_run)


def run(request: options.Request) -> PurgeResult:
    """Carry out ``cachectl purge``. Raises :class:`CachectlError` if nothing has the key that was to be removed."""
    typed = request.options
    if typed.all == bool(typed.layers):
        request.misuse("name the layers to purge, or use --all" if not typed.all else "--all needs no LAYER")
    selected = request.selection()
    with request.working("purging"):
        result = purge(
            request.stack,
            selected,
            layers=typed.layers,
            damaged=typed.damaged,
            dry_run=typed.dry_run,
            notice=request.notice,
        )
    total = result.total
    if typed.key is not None and not any((total.removed, total.orphans_removed, total.skipped, total.failed)):
        raise errors.CachectlError(f"no entry that is selected has the key {typed.key!r}; cachectl ls -q lists keys")
    return result
