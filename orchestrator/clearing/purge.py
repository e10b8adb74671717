"""``cachectl purge``: plan the exact removals of every layer, then apply the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.facts import Note, Outcome, Plan
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.base.texts import plural

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer


@dataclass(frozen=True, slots=True)
class PurgeTotal:
    """The sums over all layers: ``removed`` counts entries."""

    removed: int
    orphans_removed: int
    bytes_freed: int
    skipped: int
    failed: int


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """The outcome of a removal, or (``dry_run``) its plan, layer by layer."""

    dry_run: bool
    layers: tuple[Outcome, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/purge/1", also=("total",))

    def __repr__(self) -> str:
        return f"PurgeResult(dry_run={self.dry_run}, total={self.total})"

    @property
    def total(self) -> PurgeTotal:
        """Return the sums over all layers."""
        return total(PurgeTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether anything failed or was refused."""
        return any(outcome.failed for outcome in self.layers)

    @property
    def found_nothing(self) -> bool:
        """Return whether there was nothing to remove and nothing refused or failed."""
        return not any(
            outcome.removed or outcome.orphans_removed or outcome.skipped or outcome.failed or outcome.recreated
            for outcome in self.layers
        )


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """The plans of several layers; only the entries that they list are touched."""

    parts: tuple[tuple[Layer, Plan], ...]

    def __repr__(self) -> str:
        return f"PurgePlan(total={self.result.total})"

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Return the plan of each layer."""
        return tuple(plan for _, plan in self.parts)

    @property
    def result(self) -> PurgeResult:
        """Return the plan in the form of a result: the entries that would go, and those that stay."""
        return PurgeResult(dry_run=True, layers=tuple(plan.outcome for plan in self.plans))

    def apply(self) -> PurgeResult:
        """Remove what is listed. If a layer fails, the result says so and the others are still cleared.

        Layers that need no free disk space are cleared first.
        """
        by_room = sorted(self.parts, key=lambda part: part[0].store.clearing_needs_room)
        outcomes = {layer.name: _applied(layer, plan) for layer, plan in by_room}
        return PurgeResult(dry_run=False, layers=tuple(outcomes[layer.name] for layer, _ in self.parts))


def remove_abandoned(environment: Environment, notice: Callable[[str], None]) -> None:
    """Remove temporary folders of killed commands; ``notice`` gets a line if there were any."""
    from cachectl.switching import isolated

    if left := isolated.remove_abandoned(environment):
        notice(f"removed {plural(left, 'temporary folder')} of commands that were killed")


def plan(layers: Iterable[Layer], selection: Selection = ALL, *, damaged: bool = False) -> PurgePlan:
    """Plan the purge of a selection in each layer; a refusal is part of the plan.

    With ``damaged`` only entries that are damaged are removed.
    """
    return PurgePlan(tuple((layer, _plan_layer(layer, selection, damaged=damaged)) for layer in layers))


def recover(layers: Iterable[Layer]) -> None:
    """Finish interrupted writes; call this before planning removals that will be applied."""
    for layer in layers:
        # The plan of a layer names its failure.
        with suppress(*FAILURES):
            layer.recover_all()


def _plan_layer(layer: Layer, selection: Selection, *, damaged: bool) -> Plan:
    try:
        return layer.plan_clear(selection, damaged=damaged)
    except FAILURES as error:
        return Plan(layer.name, failed=(Note("*", reason_of(error)),))


def _applied(layer: Layer, plan: Plan) -> Outcome:
    untouched = Outcome(plan.layer, skipped=plan.skipped, failed=plan.failed)
    if not plan.entries and not plan.recreate:
        return untouched
    try:
        return layer.clear(plan)
    except FAILURES as error:
        return untouched.plus(Outcome(plan.layer, failed=(Note("*", reason_of(error)),)))
