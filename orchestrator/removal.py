"""Plans and results of removals, which ``purge`` and ``prune`` share, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cachectl.layers.base.errors import FAILURES, plural, reason_of
from cachectl.layers.base.facts import Ability, AsJson, Note, Outcome, Plan, total
from cachectl.layers.base.layer import require_changeable
from cachectl.table import Column, Table, ages, count, counts, size, sizes

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.facts import Removable
    from cachectl.layers.base.layer import Layer
    from cachectl.options import Request

    Row = tuple[str, Removable]


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
    """The outcome of a removal, or (``dry_run``) its plan, layer by layer.

    ``lacks_key`` says that no layer has the key that was to be removed.
    """

    dry_run: bool
    layers: tuple[Outcome, ...]
    lacks_key: bool = False
    as_json: ClassVar[AsJson] = AsJson("cachectl/purge/1", also=("total",), hidden=("lacks_key",))

    def __repr__(self) -> str:
        return f"PurgeResult(dry_run={self.dry_run}, total={self.total})"

    @property
    def total(self) -> PurgeTotal:
        """Return the sums over all layers."""
        return total(PurgeTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether anything failed or was refused."""
        return self.lacks_key or any(outcome.failed for outcome in self.layers)


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
            if plan.entries:
                try:
                    outcome = layer.clear(plan)
                except FAILURES as error:
                    outcome = outcome.plus(_failure(layer, error).outcome)
            outcomes[layer.name] = outcome
        return PurgeResult(dry_run=False, layers=tuple(outcomes[layer.name] for layer, _ in self.parts))


def _failure(layer: Layer, error: Exception) -> Plan:
    return Plan(layer.name, failed=(Note("*", reason_of(error)),))


def planned(layer: Layer, plan: Callable[[], Plan]) -> tuple[Layer, Plan]:
    """Return a layer with its plan; a refusal is part of the plan."""
    try:
        return layer, plan()
    except FAILURES as error:
        return layer, _failure(layer, error)


def recover(layers: Iterable[Layer]) -> None:
    """Finish or roll back interrupted writes; called before a removal is planned that will be applied.

    Planning handles most interrupted writes without that, but not those of more than 1 GiB.
    """
    for layer in layers:
        # The plan of a layer names its failure.
        with suppress(*FAILURES):
            for root in layer.roots() if layer.abilities()[Ability.CLEAR] is None else ():
                with suppress(*FAILURES):
                    require_changeable(layer, root)
                    layer.store.recover(root)


def remove_leftovers(environment: Environment, notice: Callable[[str], None]) -> None:
    """Remove temporary folders of killed commands; ``notice`` gets a line if there were any."""
    from cachectl.switching.isolated import remove_abandoned

    if left := remove_abandoned(environment):
        notice(f"removed {plural(left, 'temporary folder')} of commands that were killed")


# ---------------------------------------------------------------------- the command line


def _columns(verb: str) -> tuple[Column[Outcome], ...]:
    """Return the columns of a removal; ``verb`` is the title over the number of entries."""
    return (
        Column("layer", lambda outcome: outcome.layer),
        counts(verb, lambda outcome: outcome.removed),
        counts("orphans", lambda outcome: outcome.orphans_removed),
        sizes("size", lambda outcome: outcome.bytes_freed),
        counts("skipped", lambda outcome: len(outcome.skipped)),
    )


def table(result: PurgeResult, request: Request) -> Table[Any]:
    """Return what was removed from each layer, or the entries of a plan."""
    if not result.dry_run:
        return Table(_columns("removed"), result.layers)
    columns: tuple[Column[Row], ...] = (
        Column("layer", lambda row: row[0]),
        Column("state", lambda row: row[1].state),
        sizes("size", lambda row: row[1].bytes),
        ages("age", lambda row: row[1].modified, request.now),
        Column("key", lambda row: row[1].key),
    )
    return Table(columns, ((outcome.layer, entry) for outcome in result.layers for entry in outcome.entries or ()))


def show(result: PurgeResult, request: Request) -> Iterator[object]:
    """Yield what a removal did, or would do, layer by layer, with ``-v`` each entry of a plan; warn of what stays.

    Without ``-v`` or a named layer, layers without anything to remove are one line.
    """
    if result.lacks_key:
        return
    verbose, total = request.options.verbose, result.total
    if verbose and result.dry_run and (entries := table(result, request)).rows:
        yield entries
        yield ""
    cleared = [outcome for outcome in result.layers if not outcome.failed or outcome.removed]
    shown = [
        outcome
        for outcome in cleared
        if (verbose or request.options.layers)
        or (outcome.removed or outcome.orphans_removed or outcome.bytes_freed or outcome.skipped)
    ]
    if shown:
        sums = (count(total.removed), count(total.orphans_removed), size(total.bytes_freed), count(total.skipped))
        yield Table(_columns("would go" if result.dry_run else "removed"), shown, ("total", *sums))
    if hidden := len(cleared) - len(shown):
        yield f"{plural(hidden, 'more layer' if shown else 'layer')}: nothing to remove"
    for outcome in result.layers:
        _warn(outcome, request)


def _warn(outcome: Outcome, request: Request) -> None:
    request.warn_notes(f"{outcome.layer}: skipped", outcome.skipped)
    # A full disk is one warning, however many files it holds.
    for reason in dict.fromkeys(note.because for note in outcome.failed):
        keys = [note.key for note in outcome.failed if note.because == reason]
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        request.notice(f"{outcome.layer}: {'' if keys[0] == '*' else keys[0] + more + ': '}{reason}")
