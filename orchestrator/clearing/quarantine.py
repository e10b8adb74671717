"""Quarantine: what is damaged, moved aside in every layer; and brought back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import Unsettled, reason_of
from cachectl.layers.base.facts import ClearPlan, Finding, Note, Outcome, Quarantined, Severity
from cachectl.layers.base.guard import FAILURES

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

_PRECIOUS: Final = "results of tuning are moved aside only when their layer is named"


@dataclass(frozen=True, slots=True)
class QuarantineResult:
    """What was found, what was moved aside of it (``removed`` counts that), and why the rest was left."""

    findings: tuple[Finding, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def mended(self) -> bool:
        """Tell whether nothing is left that harms a program."""
        left = [finding for finding in self.findings if finding.thing is None]
        # What could not be read may hold damage.
        harmless = all(finding.severity is Severity.HARMLESS and finding.code != "unreadable" for finding in left)
        return harmless and not any(outcome.failed or outcome.skipped for outcome in self.outcomes)

    def moved(self, finding: Finding) -> bool:
        """Tell whether what a finding names lies in quarantine now."""
        if finding.thing is None:
            return False
        for outcome in self.outcomes:
            if outcome.layer == finding.layer:
                left = {note.key for note in (*outcome.skipped, *outcome.failed)}
                return not left & {"*", finding.thing.key}
        return False


@dataclass(frozen=True, slots=True)
class QuarantinePlan:
    """What would be moved aside, layer by layer, with the findings that say so."""

    findings: tuple[Finding, ...]
    parts: tuple[tuple[Layer, ClearPlan], ...]

    def apply(self) -> QuarantineResult:
        """Move it. A layer that fails is named, and the others are done all the same."""
        outcomes = tuple(_move(layer, plan, self.findings) for layer, plan in self.parts)
        return QuarantineResult(self.findings, outcomes)


@dataclass(frozen=True, slots=True)
class Restored:
    """One thing that was brought back from quarantine, or why it was not (``because``).

    ``trouble`` says what failed once it was back.
    """

    thing: Quarantined
    because: str | None
    trouble: str | None = None


def plan(layers: Iterable[Layer], findings: Sequence[Finding], *, named: bool) -> QuarantinePlan:
    """Plan to move aside what is damaged; tuning results only where layers were ``named``."""
    parts = []
    for layer in layers:
        own = [finding for finding in findings if finding.layer == layer.name and finding.thing is not None]
        if own:
            parts.append((layer, _plan_one(layer, own, spared=layer.precious and not named)))
    return QuarantinePlan(tuple(findings), tuple(parts))


def _plan_one(layer: Layer, findings: Sequence[Finding], *, spared: bool) -> ClearPlan:
    if spared:
        keys = dict.fromkeys(finding.thing.key for finding in findings if finding.thing is not None)
        return ClearPlan(layer.name, skipped=tuple(Note(key, _PRECIOUS) for key in keys))
    try:
        return layer.plan_quarantine(findings)
    except FAILURES as error:
        return ClearPlan(layer.name, failed=(Note("*", reason_of(error)),))


def _move(layer: Layer, plan: ClearPlan, findings: Sequence[Finding]) -> Outcome:
    untouched = Outcome(plan.layer, skipped=plan.skipped, failed=plan.failed)
    if not plan.targets:
        return untouched
    try:
        return layer.quarantine(plan, [finding for finding in findings if finding.layer == layer.name])
    except FAILURES as error:
        return untouched.plus(Outcome(plan.layer, failed=(Note("*", reason_of(error)),)))


def held(layers: Iterable[Layer]) -> tuple[list[tuple[Layer, Quarantined]], list[Outcome]]:
    """List what is in quarantine, and what could not be read of it."""
    failed: list[Outcome] = []
    return [pair for layer in layers for pair in _held_by(layer, failed)], failed


def _held_by(layer: Layer, failed: list[Outcome]) -> Iterator[tuple[Layer, Quarantined]]:
    try:
        for thing in layer.quarantined():
            if isinstance(thing, Quarantined):
                yield layer, thing
            else:
                failed.append(Outcome(layer.name, failed=(Note(str(thing.path), thing.message),)))
    except FAILURES as error:
        failed.append(Outcome(layer.name, failed=(Note("*", reason_of(error)),)))


def restore(things: Iterable[tuple[Layer, Quarantined]], *, replace: bool, dry_run: bool = False) -> list[Restored]:
    """Bring things back, each for itself, or (``dry_run``) say which would come back.

    ``replace`` lets them take the place of what stands there now.
    """
    return [_restore_one(layer, thing, replace=replace, dry_run=dry_run) for layer, thing in things]


def _restore_one(layer: Layer, thing: Quarantined, *, replace: bool, dry_run: bool) -> Restored:
    try:
        (layer.foresee_restore if dry_run else layer.restore)(thing, replace=replace)
    except Unsettled as error:
        return Restored(thing, None, error.message)
    except FAILURES as error:
        return Restored(thing, reason_of(error))
    return Restored(thing, None)
