"""``cachectl purge``: plan the exact removals of every layer, then apply the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from cachectl.layer_set import LayerSet, warn_user
from cachectl.layers.base.selection import ALL, Selection
from cachectl.options import CHANGING, LAYERS, REMOVING, SELECTION, Option, Request
from cachectl.removal import PurgePlan, PurgeResult, planned, recover, remove_leftovers, show, table

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

__all__ = ["OPTIONS", "plan_purge", "purge", "run", "show", "table"]

OPTIONS: Final = (
    LAYERS.having(help="a layer that cachectl layers lists (name one, or use --all)"),
    Option("--all", action="store_true", help="every user layer that is not precious"),
    SELECTION,
    Option(
        "--damaged",
        action="store_true",
        help="only entries that verify finds damaged, which a run makes again; never results of tuning",
    ),
    *REMOVING,
    *CHANGING,
)


def plan_purge(layers: Iterable[Layer], selection: Selection = ALL, *, damaged: bool = False) -> PurgePlan:
    """Plan the purge of a selection in each layer, with ``damaged`` only of damaged entries; touches nothing."""
    return PurgePlan(tuple(planned(layer, partial(layer.plan_clear, selection, damaged=damaged)) for layer in layers))


def purge(
    stack: LayerSet,
    selection: Selection = ALL,
    *,
    layers: Sequence[str] = (),
    damaged: bool = False,
    dry_run: bool = False,
    notice: Callable[[str], None] = warn_user,
) -> PurgeResult:
    """Remove the selected entries, and what killed commands left; or return the plan (``dry_run``)."""
    chosen = stack.chosen(layers)
    if dry_run:
        return plan_purge(chosen, selection, damaged=damaged).result
    recover(chosen)
    result = plan_purge(chosen, selection, damaged=damaged).apply()
    remove_leftovers(stack.environment, notice)
    return result


def run(request: Request) -> PurgeResult:
    """Carry out ``cachectl purge``."""
    options = request.options
    if options.all == bool(options.layers):
        request.misuse("name the layers to purge, or use --all" if not options.all else "--all needs no LAYER")
    selected = request.selection()
    with request.working("purging"):
        result = purge(
            request.stack,
            selected,
            layers=options.layers,
            damaged=options.damaged,
            dry_run=options.dry_run,
            notice=request.notice,
        )
    if options.key is not None and not any(
        outcome.removed or outcome.orphans_removed or outcome.skipped or outcome.failed for outcome in result.layers
    ):
        request.notice(f"no entry that is selected has the key {options.key!r}; cachectl ls -q lists keys")
        return replace(result, lacks_key=True)
    return result
