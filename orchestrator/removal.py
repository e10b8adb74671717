"""Plans and results of removals, which ``purge`` and ``prune`` share, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cachectl import table as tables
from cachectl.layers.base import errors
from cachectl.layers.base.facts import Ability, AsJson, Note, Outcome, Plan, total
from cachectl.layers.base.layer import every_root, require_changeable

if TYPE_CHECKING:
    from cachectl import layer_set
    from cachectl.layers.base import facts
    from cachectl.layers.base.layer import Layer
    from cachectl.options import Request

    Row = tuple[str, facts.Removable]


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
        for layer, plan in sorted(self.parts, key=lambda part: part[0].store.clearing_needs_room):
            outcome = Outcome(plan.layer, skipped=plan.skipped, failed=plan.failed)
            try:
                outcomes[layer] = layer.clear(plan) if plan.entries else outcome
            except errors.FAILURES as error:
                outcomes[layer] = outcome.plus(Outcome(plan.layer, failed=(Note("*", errors.reason_of(error)),)))
        return PurgeResult(dry_run=False, layers=tuple(outcomes[layer] for layer, _ in self.parts))


def planned(layer: Layer, plan: Callable[[], Plan]) -> tuple[Layer, Plan]:
    """Return a layer with its plan; a refusal is part of the plan."""
    try:
        return layer, plan()
    except errors.FAILURES as error:
        return layer, Plan(layer.name, failed=(Note("*", errors.reason_of(error)),))


def recover(layers: Iterable[Layer]) -> None:
    """Finish or roll back interrupted writes; planning handles those of less than 1 GiB without that."""
    for layer in layers:
        # The plan of a layer names its failure.
        with suppress(*errors.FAILURES):
            for root in every_root(layer) if layer.abilities()[Ability.CLEAR] is None else ():
                with suppress(*errors.FAILURES):
                    require_changeable(layer, root)
                    layer.store.recover(root)


def carry_out(
    stack: layer_set.LayerSet,
    layers: tuple[Layer, ...],
    plan: Callable[[], PurgePlan],
    notice: Callable[[str], None],
    *,
    dry_run: bool,
) -> PurgeResult:
    """Return the plan of a removal (``dry_run``), or apply it and remove what killed commands left."""
    if dry_run:
        return plan().result
    recover(layers)
    result = plan().apply()
    from cachectl.switching.isolated import remove_abandoned

    if left := remove_abandoned(stack.environment):
        notice(f"removed {errors.plural(left, 'temporary folder')} of commands that were killed")
    return result


# ---------------------------------------------------------------------- the command line


def _columns(verb: str) -> tuple[tables.Column[Outcome], ...]:
    """Return the columns of a removal; ``verb`` is the title over the number of entries."""
    return (
        tables.Column("layer", lambda outcome: outcome.layer),
        tables.counts(verb, lambda outcome: outcome.removed),
        tables.counts("orphans", lambda outcome: outcome.orphans_removed),
        tables.sizes("size", lambda outcome: outcome.bytes_freed),
        tables.counts("skipped", lambda outcome: len(outcome.skipped)),
    )


def table(result: PurgeResult, request: Request) -> tables.Table[Any]:
    """Return what was removed from each layer, or the entries of a plan."""
    if not result.dry_run:
        return tables.Table(_columns("removed"), result.layers)
    columns: tuple[tables.Column[Row], ...] = (
        tables.Column("layer", lambda row: row[0]),
        tables.Column("state", lambda row: row[1].state),
        tables.sizes("size", lambda row: row[1].bytes),
        tables.ages("age", lambda row: row[1].modified, request.now),
        tables.Column("key", lambda row: row[1].key),
    )
    rows = ((outcome.layer, entry) for outcome in result.layers for entry in outcome.entries or ())
    return tables.Table(columns, rows)


def show(result: PurgeResult, request: Request) -> Iterator[object]:
    """Yield what a removal did, or would do, layer by layer, with ``-v`` each entry of a plan; warn of what stays.

    Without ``-v`` or a named layer, layers without anything to remove are one line.
    """
    verbose, total = request.options.verbose, result.total
    if verbose and result.dry_run and (entries := table(result, request)).rows:
        yield entries
        yield ""
    cleared = [outcome for outcome in result.layers if not outcome.failed or outcome.removed]
    shown = [outcome for outcome in cleared if verbose or request.options.layers or _did(outcome)]
    if shown:
        sums = (tables.count(total.removed), tables.count(total.orphans_removed), tables.size(total.bytes_freed))
        last = ("total", *sums, tables.count(total.skipped))
        yield tables.Table(_columns("would go" if result.dry_run else "removed"), shown, last)
    if hidden := len(cleared) - len(shown):
        yield f"{errors.plural(hidden, 'more layer' if shown else 'layer')}: nothing to remove"
    for outcome in result.layers:
        request.warn_notes(f"{outcome.layer}: skipped", outcome.skipped)
        # A full disk is one warning, however many files it holds.
        keys: dict[str, list[str]] = {}
        for note in outcome.failed:
            keys.setdefault(note.because, []).append(note.key)
        for reason, (first, *more) in keys.items():
            others = f" and {len(more)} more" if more else ""
            request.notice(f"{outcome.layer}: {'' if first == '*' else f'{first}{others}: '}{reason}")


def _did(outcome: Outcome) -> bool:
    return bool(outcome.removed or outcome.orphans_removed or outcome.bytes_freed or outcome.skipped)
