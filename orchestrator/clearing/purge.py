"""``cachectl purge``: plan the exact removals of every layer, then apply the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.facts import ClearPlan, Entry, Note, Orphan, Outcome, Root
from cachectl.layers.base.selection import Selection
from cachectl.layers.base.texts import plural

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer


#: Why things go, by layer, root and key.
Reasons = Mapping[tuple[str, Path, str], str]


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """An entry that would be removed, and which limit of ``prune`` it exceeds."""

    entry: Entry
    because: str | None
    as_json: ClassVar[AsJson] = AsJson(flat=("entry",), optional=("because",))


@dataclass(frozen=True, slots=True)
class ClearedLayer:
    """The outcome of one layer; a dry run also lists what would be removed."""

    outcome: Outcome
    entries: tuple[ListedEntry, ...] | None
    orphans: tuple[Orphan, ...] | None
    as_json: ClassVar[AsJson] = AsJson(flat=("outcome",), optional=("entries", "orphans"))


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
    """The outcome of a purge, or (``dry_run``) of its plan, layer by layer."""

    dry_run: bool
    outcomes: tuple[Outcome, ...]
    reasons: Reasons = field(default_factory=dict)
    as_json: ClassVar[AsJson] = AsJson("cachectl/purge/1", hidden=("outcomes", "reasons"), also=("layers", "total"))

    @property
    def layers(self) -> tuple[ClearedLayer, ...]:
        """Return the outcome of each layer, in a dry run with the entries and orphans that would be removed."""
        return tuple(_cleared(outcome, self.reasons, listed=self.dry_run) for outcome in self.outcomes)

    @property
    def total(self) -> PurgeTotal:
        """Return the sums over all layers."""
        return total(PurgeTotal, self.outcomes)

    @property
    def failed(self) -> bool:
        """Return whether anything failed or was refused."""
        return any(outcome.failed for outcome in self.outcomes)

    @property
    def found_nothing(self) -> bool:
        """Return whether there was nothing to remove and nothing refused or failed."""
        return not any(
            one.removed or one.orphans_removed or one.skipped or one.failed or one.recreated for one in self.outcomes
        )


def _cleared(outcome: Outcome, reasons: Reasons, *, listed: bool) -> ClearedLayer:
    if not listed:
        return ClearedLayer(outcome, None, None)
    entries = tuple(
        ListedEntry(thing, reasons.get((outcome.layer, thing.root, thing.key)))
        for thing in outcome.things
        if isinstance(thing, Entry)
    )
    return ClearedLayer(outcome, entries, tuple(thing for thing in outcome.things if isinstance(thing, Orphan)))


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """The plans of several layers; only what they list is touched. ``reasons`` says why, where that is not the same."""

    parts: tuple[tuple[Layer, ClearPlan], ...]
    reasons: Reasons = field(default_factory=dict)

    @property
    def plans(self) -> tuple[ClearPlan, ...]:
        """Return the plan of each layer."""
        return tuple(plan for _, plan in self.parts)

    def foreseen(self) -> PurgeResult:
        """Return the expected result of :meth:`apply`: its numbers, failures, and each listed entry."""
        outcomes = tuple(_done(plan, layer.foresee) for layer, plan in self.parts)
        return PurgeResult(dry_run=True, outcomes=outcomes, reasons=self.reasons)

    def apply(self) -> PurgeResult:
        """Remove what is listed. If a layer fails, the result says so and the others are still cleared.

        Layers that need no free disk space are cleared first. A removal that failed for lack of space is retried as
        long as other removals succeed.
        """
        outcomes: dict[int, Outcome] = {}
        for number in sorted(
            range(len(self.parts)), key=lambda number: self.parts[number][0].store.clearing_needs_room
        ):
            outcomes[number] = _done(self.parts[number][1], self.parts[number][0].clear)
        freed = any(outcome.removed for outcome in outcomes.values())
        while freed:
            freed = False
            for number, (layer, _) in enumerate(self.parts):
                before = outcomes[number]
                outcomes[number] = _clear_starved(layer, before)
                freed = freed or outcomes[number].removed > before.removed
        return PurgeResult(dry_run=False, outcomes=tuple(outcomes[number] for number in range(len(self.parts))))


def remove_abandoned(environment: Environment, notice: Callable[[str], None]) -> None:
    """Remove temporary folders of killed commands; ``notice`` gets a line if there were any."""
    from cachectl.switching import isolated

    if left := isolated.remove_abandoned(environment):
        notice(f"removed {plural(left, 'temporary folder')} of commands that were killed")


def plan(
    layers: Iterable[Layer],
    selection: Selection,
    *,
    within: Callable[[Layer, Root], bool] = lambda _layer, _root: True,
    listed: bool = False,
) -> PurgePlan:
    """Plan the purge of a selection in each layer's roots that are ``within``; a refusal is part of the plan.

    ``listed`` names every entry, which takes as long as listing them.
    """
    return PurgePlan(tuple((layer, _plan_one(layer, selection, within, listed=listed)) for layer in layers))


def recover(layers: Iterable[Layer], within: Callable[[Layer, Root], bool] = lambda _layer, _root: True) -> None:
    """Finish interrupted writes; call this before planning removals that will be applied."""
    for layer in layers:
        # The plan of a layer names its failure.
        with suppress(*FAILURES):
            layer.recover_all(partial(within, layer))


def _plan_one(layer: Layer, selection: Selection, within: Callable[[Layer, Root], bool], *, listed: bool) -> ClearPlan:
    try:
        return layer.plan_clear(selection, within=partial(within, layer), listed=listed)
    except FAILURES as error:
        return ClearPlan(layer.name, failed=(Note("*", reason_of(error)),))


def _done(plan: ClearPlan, act: Callable[[ClearPlan], Outcome]) -> Outcome:
    """Act on the plan of one layer; if the layer fails as a whole, its outcome has the error."""
    untouched = Outcome(plan.layer, skipped=plan.skipped, failed=plan.failed)
    if not plan.targets and not plan.recreate:
        return untouched
    try:
        return act(plan)
    except FAILURES as error:
        return untouched.plus(Outcome(plan.layer, failed=(Note("*", reason_of(error)),)))


def _clear_starved(layer: Layer, outcome: Outcome) -> Outcome:
    """Try again to remove what failed for lack of disk space."""
    targets = tuple(target for note in outcome.failed for target in note.starved)
    if not targets:
        return outcome
    others = tuple(note for note in outcome.failed if not note.starved)
    return replace(outcome, failed=others).plus(_done(ClearPlan(layer.name, targets), layer.clear))
