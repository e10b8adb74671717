"""Plans and results of removals, which ``purge`` and ``prune`` share, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cachectl import verbs
from cachectl.layers.base import errors, facts
from cachectl.layers.base.facts import Note, Outcome, Plan
from cachectl.layers.base.layer import every_root, require_changeable

if TYPE_CHECKING:
    from cachectl import layer_set
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
    as_json: ClassVar[facts.AsJson] = facts.AsJson("cachectl/purge/1", also=("total",))

    def __repr__(self) -> str:
        return f"PurgeResult(dry_run={self.dry_run}, total={self.total})"

    @property
    def total(self) -> PurgeTotal:
        """Return the sums over all layers."""
        return facts.total(PurgeTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether anything failed or was refused."""
        return any(outcome.failed for outcome in self.layers)


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
        outcomes = {}
        for layer, plan in self.parts:
            outcomes[layer] = Outcome(plan.layer, skipped=plan.skipped, failed=plan.failed)
        going = [(layer, plan) for layer, plan in self.parts if plan.entries]
        for layer, plan in sorted(going, key=lambda part: part[0].store.clearing_needs_room):
            try:
                outcomes[layer] = layer.clear(plan)
            except errors.FAILURES as error:  # noqa: PERF203 - one must not end the rest
                outcomes[layer] = outcomes[layer].plus(Outcome(plan.layer, failed=_failure(error)))
        return PurgeResult(dry_run=False, layers=tuple(outcomes.values()))


def _failure(error: Exception) -> tuple[Note]:
    return (Note("*", errors.reason_of(error)),)


def planned(layers: Iterable[Layer], plan: Callable[[Layer], Plan]) -> PurgePlan:
    """Return the plans of layers; a refusal is part of a plan."""
    parts = []
    for layer in layers:
        try:
            parts.append((layer, plan(layer)))
        except errors.FAILURES as error:  # noqa: PERF203 - one must not end the rest
            parts.append((layer, Plan(layer.name, failed=_failure(error))))
    return PurgePlan(tuple(parts))


def existing_roots(layer: Layer) -> list[facts.Root]:
    """Return the roots of a layer where something exists, and those of which that is unknown."""
    return [root for root in every_root(layer) if root.may_exist]


def carry_out(
    stack: layer_set.LayerSet,
    layers: Iterable[Layer],
    plan: Callable[[], PurgePlan],
    notice: Callable[[str], None],
    *,
    dry_run: bool,
) -> PurgeResult:
    """Return the plan of a removal (``dry_run``), or apply it and remove what killed commands left.

    Interrupted writes are finished or rolled back first; planning handles those of less than 1 GiB without that.
    """
    if dry_run:
        return plan().result
    for layer in layers:
        # The plan of a layer names its failure. Stores are loaded where there is something.
        with suppress(*errors.FAILURES):
            roots = existing_roots(layer)
            for root in roots if roots and layer.abilities()[facts.Ability.CLEAR] is None else ():
                with suppress(*errors.FAILURES):
                    require_changeable(layer, root)
                    layer.store.recover(root)
    result = plan().apply()
    from cachectl.layers.disk.temporaries import remove_abandoned

    if left := remove_abandoned(stack.environment):
        notice(f"removed {errors.plural(left, 'temporary folder')} of commands that were killed")
    return result


# ---------------------------------------------------------------------- the command line


def _layers_table(verb: str, outcomes: Iterable[Outcome], total: PurgeTotal | None = None) -> verbs.Table:
    """Return the sums of layers; ``verb`` is the title over the number of entries."""
    columns = (
        *("layer", verbs.counts(verb), verbs.counts("orphans")),
        *(verbs.sizes("size"), verbs.counts("skipped")),
    )
    rows = [(one.layer, one.removed, one.orphans_removed, one.bytes_freed, len(one.skipped)) for one in outcomes]
    if total is None:
        return verbs.Table(columns, rows)
    last = ("total", total.removed, total.orphans_removed, total.bytes_freed, total.skipped)
    return verbs.Table(columns, rows, last)


def table(result: PurgeResult, request: verbs.Request) -> verbs.Table:
    """Return what was removed from each layer, or the entries of a plan."""
    if not result.dry_run:
        return _layers_table("removed", result.layers)
    columns = ("layer", "state", verbs.sizes("size"), verbs.ages("age", request.now), "key")
    rows: list[tuple[object, ...]] = []
    for outcome in result.layers:
        entries = outcome.entries or ()
        rows += [(outcome.layer, entry.state, entry.bytes, entry.modified, entry.key) for entry in entries]
    return verbs.Table(columns, rows)


def show(result: PurgeResult, request: verbs.Request) -> Iterator[object]:
    """Yield what a removal did, or would do, layer by layer, with ``-v`` each entry of a plan; warn of what stays.

    Without ``-v`` or a named layer, layers without anything to remove are one line.
    """
    whole = request.options.verbose or request.options.layers
    if request.options.verbose and result.dry_run and (entries := table(result, request)).rows:
        yield entries
        yield ""
    cleared = [outcome for outcome in result.layers if not outcome.failed or outcome.removed]
    shown = [outcome for outcome in cleared if whole or outcome != Outcome(outcome.layer, entries=outcome.entries)]
    if shown:
        yield _layers_table("would go" if result.dry_run else "removed", shown, result.total)
    if hidden := len(cleared) - len(shown):
        yield f"{errors.plural(hidden, 'more layer' if shown else 'layer')}: nothing to remove"
    for outcome in result.layers:
        request.output.warn_notes(f"{outcome.layer}: skipped", outcome.skipped)
        # A full disk is one warning, however many files it holds.
        keys: dict[str, list[str]] = {}
        for note in outcome.failed:
            keys.setdefault(note.because, []).append(note.key)
        for reason, (first, *more) in keys.items():
            others = f" and {len(more)} more" if more else ""
            request.notice(f"{outcome.layer}: {'' if first == '*' else f'{first}{others}: '}{reason}")
