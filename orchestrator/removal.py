"""The plans and results of ``purge`` and ``prune``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

from cachectl import layer_set
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.text import plural
from cachectl.layers.core.entry import Entry, Note
from cachectl.layers.core.json_form import as_json, total
from cachectl.layers.core.layer import Layer, every_root, require_changeable
from cachectl.layers.core.plan import Outcome, Plan
from cachectl.layers.core.root import Root, Scope
from cachectl.layers.core.switch import Ability

_SUMS = ("removed", "orphans_removed", "bytes_freed", "skipped", "failed")


@as_json("cachectl/purge/1", also=("dry_run", "total"), sums=_SUMS)
class RemovalPlan(NamedTuple):
    """What a removal would do, layer by layer."""

    layers: tuple[Plan, ...]

    def __repr__(self) -> str:
        return f"RemovalPlan(total={vars(self.total)})"

    @property
    def dry_run(self) -> bool:
        """Return ``True``: nothing was removed."""
        return True

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return the entries of all layers."""
        return tuple(entry for plan in self.layers for entry in plan.entries)

    @property
    def total(self) -> SimpleNamespace:
        """Return the sums over all layers: ``removed`` counts entries."""
        return total(self)

    @property
    def failed(self) -> bool:
        """Return whether anything could not be read or was refused."""
        return any(plan.failed for plan in self.layers)

    def apply(self) -> Removal:
        """Remove exactly what the plans list. If a layer fails, the result says so, and the other layers go on.

        Layers that need no free disk space are cleared first.
        """
        outcomes = {plan.layer: Outcome(plan.layer, skipped=plan.skipped, failed=plan.failed) for plan in self.layers}
        needed = (plan for plan in self.layers if plan.entries)
        for plan in sorted(needed, key=lambda plan: plan.needs_room):
            try:
                outcomes[plan.layer] = plan.apply()
            except FAILURES as error:  # noqa: PERF203 - the other layers go on
                outcomes[plan.layer] = outcomes[plan.layer].plus(Outcome(plan.layer, failed=_failure(error)))
        return Removal(tuple(outcomes.values()))


@as_json("cachectl/purge/1", also=("dry_run", "total"), sums=_SUMS)
class Removal(NamedTuple):
    """What a removal did, layer by layer."""

    layers: tuple[Outcome, ...]

    def __repr__(self) -> str:
        return f"Removal(total={vars(self.total)})"

    @property
    def dry_run(self) -> bool:
        """Return ``False``: it was carried out."""
        return False

    @property
    def total(self) -> SimpleNamespace:
        """Return the sums over all layers: ``removed`` counts entries."""
        return total(self)

    def plus(self, later: Removal) -> Removal:
        """Return what both did, and what the later one left."""
        earlier = {outcome.layer: outcome._replace(skipped=(), failed=()) for outcome in self.layers}
        return Removal(tuple(earlier[outcome.layer].plus(outcome) for outcome in later.layers))

    @property
    def failed(self) -> bool:
        """Return whether anything failed or was refused."""
        return any(outcome.failed for outcome in self.layers)


def _failure(error: Exception) -> tuple[Note]:
    return (Note("*", reason_of(error)),)


def planned(layers: Iterable[Layer], plan: Callable[[Layer], Plan]) -> RemovalPlan:
    """Return the plan of each layer; a layer that refuses has it as a failure in its plan."""
    plans = []
    for layer in layers:
        try:
            # The store of a user layer that has nothing here is not loaded.
            is_absent = layer.about.scope is Scope.USER and not existing_roots(layer)
            plans.append(Plan(layer.name, layer.clear) if is_absent else plan(layer))
        except FAILURES as error:  # noqa: PERF203 - the other layers go on
            plans.append(Plan(layer.name, layer.clear, failed=_failure(error)))
    return RemovalPlan(tuple(plans))


def existing_roots(layer: Layer) -> list[Root]:
    """Return the roots of a layer that exist or may exist."""
    return [root for root in every_root(layer) if root.may_exist]


def carry_out(
    stack: layer_set.LayerSet,
    layers: Iterable[Layer],
    plan: Callable[[], RemovalPlan],
    notice: Callable[[str], None],
    *,
    dry_run: bool,
    note: Callable[[Mapping[str, Iterable[str]]], None],
    repeats: bool = False,
) -> RemovalPlan | Removal:
    """Return the plan of a removal (``dry_run``), or apply it and remove what killed commands left.

    Interrupted writes are finished or rolled back before planning. ``note`` gets the removed keys by layer, once the
    space is free. If it ``repeats``, it plans and removes again until nothing is left to remove, because a file may
    shrink by less than was planned.
    """
    if dry_run:
        return plan()

    def recover(layer: Layer, root: Root) -> Iterable[None]:
        if hasattr(layer.store, "recover") and layer.abilities()[Ability.CLEAR] is None:
            require_changeable(layer, root)
            layer.store.recover(root)
        return ()

    # Failures are ignored here: the plan of the layer names them.
    tuple(layer_set.in_each_root(layers, recover, existing_roots))
    result, removed = Removal(()), 1
    while removed and (repeats or not result.layers):
        removing = plan()
        stack.environment.step(0, "removing", sum(len(each.entries) for each in removing.layers))
        more = removing.apply()
        kept = {outcome.layer: {item.key for item in (*outcome.skipped, *outcome.failed)} for outcome in more.layers}
        note({each.layer: {entry.key for entry in each.entries} - kept[each.layer] for each in removing.layers})
        result, removed = result.plus(more) if result.layers else more, more.total.removed
    from cachectl.layers.disk.temporaries import remove_abandoned

    if left := remove_abandoned(stack.environment):
        notice(f"removed {plural(left, 'temporary folder')} of commands that were killed")
    return result
