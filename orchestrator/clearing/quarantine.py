"""``cachectl verify --quarantine`` and ``cachectl restore``: move damaged things to quarantine and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.inspecting.verify import Verification
from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, Unsettled, reason_of
from cachectl.layers.base.facts import ClearPlan, Finding, Note, Outcome, Quarantined

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

_PRECIOUS: Final = "results of tuning are moved aside only when their layer is named"


@dataclass(frozen=True, slots=True)
class QuarantinePlan:
    """The planned moves to quarantine, layer by layer, and the findings behind them."""

    findings: tuple[Finding, ...]
    parts: tuple[tuple[Layer, ClearPlan], ...]

    def apply(self) -> tuple[Outcome, ...]:
        """Move everything planned. If a layer fails, its outcome says so and the others go on."""
        return tuple(_move(layer, plan, self.findings) for layer, plan in self.parts)


@dataclass(frozen=True, slots=True)
class Restored:
    """One restored thing, or the reason why it was not restored (``because``); ``trouble`` is a later failure."""

    thing: Quarantined
    because: str | None
    trouble: str | None = None
    as_json: ClassVar[AsJson] = AsJson(flat=("thing",), names={"because": "failed"})


@dataclass(frozen=True, slots=True)
class Restorable:
    """One thing a dry run would restore. ``kernels`` is always ``None``: damaged content is not searched for names.

    ``moved`` is when it was moved aside (epoch seconds), and ``because`` why.
    """

    key: str
    root: Path
    bytes: int
    kernels: None
    name: str
    moved: float
    because: str


@dataclass(frozen=True, slots=True)
class RestorableLayer:
    """The things a dry run would restore to one layer."""

    layer: str
    entries: tuple[Restorable, ...]


@dataclass(frozen=True, slots=True)
class Restoration:
    """The content of quarantine if no name was given; else the things restored, or (``dry_run``) to be restored.

    ``unknown`` are names that match nothing in quarantine; ``unread`` are places there that could not be read.
    """

    dry_run: bool
    quarantine: tuple[Quarantined, ...]
    restored: tuple[Restored, ...]
    unknown: tuple[str, ...] = ()
    unread: tuple[Outcome, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(
        "cachectl/quarantine/1", hidden=("unknown", "unread"), also=("layers",), optional=("layers",)
    )

    @property
    def layers(self) -> tuple[RestorableLayer, ...] | None:
        """Return the things that would be restored to each layer; ``None`` unless this is a dry run."""
        if not self.dry_run:
            return None
        things: dict[str, list[Restorable]] = {}
        for one in self.restored:
            thing, named = one.thing, things.setdefault(one.thing.layer, [])
            if one.because is None:
                named.append(
                    Restorable(thing.key, thing.root, thing.bytes, None, thing.name, thing.moved, thing.message)
                )
        return tuple(RestorableLayer(layer, tuple(named)) for layer, named in things.items())

    @property
    def failed(self) -> bool:
        """Return whether something was not found, not readable or not restored."""
        return bool(self.unknown or self.unread) or any(one.because or one.trouble for one in self.restored)


def quarantine(layers: Iterable[Layer], found: Verification, *, named: bool) -> Verification:
    """Move damaged things to quarantine, tuning results only if their layer was ``named``; return the moves."""
    return replace(found, outcomes=plan(layers, found.findings, named=named).apply())


def plan(layers: Iterable[Layer], findings: Sequence[Finding], *, named: bool) -> QuarantinePlan:
    """Plan to move damaged things to quarantine, tuning results only if their layer was ``named``."""
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


def restore(
    layers: Iterable[Layer],
    names: Collection[str] = (),
    *,
    everything: bool = False,
    replace: bool = False,
    dry_run: bool = False,
) -> Restoration:
    """Restore the named things, or ``everything``, from quarantine; without either, list its content.

    ``replace`` overwrites the present things. ``dry_run`` only checks.
    """
    unread: list[Outcome] = []
    held = [pair for layer in layers for pair in _held_by(layer, unread)]
    wanted = [(layer, thing) for layer, thing in held if everything or thing.name in names]
    restored = tuple(_restore_one(layer, thing, replace=replace, dry_run=dry_run) for layer, thing in wanted)
    listed = () if names or everything else tuple(thing for _, thing in held)
    unknown = sorted(set(names) - {thing.name for _, thing in wanted})
    return Restoration(dry_run, listed, restored, tuple(unknown), tuple(unread))


def _held_by(layer: Layer, failed: list[Outcome]) -> Iterator[tuple[Layer, Quarantined]]:
    try:
        for thing in layer.quarantined():
            if isinstance(thing, Quarantined):
                yield layer, thing
            else:
                failed.append(Outcome(layer.name, failed=(Note(str(thing.path), thing.message),)))
    except FAILURES as error:
        failed.append(Outcome(layer.name, failed=(Note("*", reason_of(error)),)))


def _restore_one(layer: Layer, thing: Quarantined, *, replace: bool, dry_run: bool) -> Restored:
    try:
        (layer.foresee_restore if dry_run else layer.restore)(thing, replace=replace)
    except Unsettled as error:
        return Restored(thing, None, error.message)
    except FAILURES as error:
        return Restored(thing, reason_of(error))
    return Restored(thing, None)
