"""``cachectl prune``: remove stale and old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cachectl import config, layer_set, removal, verbs
from cachectl.layers.base import errors, facts, selection
from cachectl.layers.base.layer import every_root

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

OPTIONS: Final = (
    verbs.CLEARABLE,
    verbs.flag("--stale", "entries that no known Python or driver can hit any more, and orphans"),
    verbs.value("--older-than", "AGE", "entries not changed or used for 30d, 12h, 2w"),
    verbs.value("--max-size", "SIZE", "until the layers together hold no more than 500M, 2GiB"),
    *verbs.REMOVING,
    verbs.PYTHON,
    *verbs.CHANGING,
)
_UNKNOWN: Final = float("inf")


def prune(
    stack: layer_set.LayerSet,
    limits: config.Limits | None = None,
    *,
    layers: Sequence[str] = (),
    dry_run: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> removal.PurgeResult:
    """Remove what is stale or old, then the longest unused until the rest fits, and what killed commands left.

    Without ``limits``, those of the config files count; :class:`BadRequest` is raised if there are none.
    """
    if limits is None:
        # They decide what is stale.
        environment = config.with_interpreters(stack.environment)
        if environment is not stack.environment:
            stack = type(stack)(environment)
        limits = config.configured_limits(environment)
    chosen, required = stack.chosen(layers), limits

    def plan() -> removal.PurgePlan:
        return plan_prune(chosen, required)

    return removal.carry_out(stack, chosen, plan, notice, dry_run=dry_run)


class _Holding:
    """The things of one layer to keep, and those to remove; ``bytes`` are those that stay whatever is removed."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.kept: list[facts.Removable] = []
        self.going: list[facts.Removable] = []
        self.bytes = 0
        #: Places that could not be read; the rest of the layer is still pruned.
        self.failed = [] if failure is None else [facts.Note("*", errors.reason_of(failure))]


def plan_prune(layers: Iterable[Layer], limits: config.Limits) -> removal.PurgePlan:
    """Plan the removals that the limits require; changes nothing.

    The longest unused goes first, by time of use, else of change, else by a bound on it. Things of unknown age stay.
    """
    holdings: dict[Layer, _Holding] = {}
    for layer in layers:
        try:
            holdings[layer] = _look(layer, limits)
        except errors.FAILURES as error:  # noqa: PERF203 - one must not end the rest
            # Nothing is removed because of an incomplete count.
            holdings[layer] = _Holding(error)
    if limits.bytes is not None:
        _make_room(holdings.values(), limits.bytes)

    def plan(layer: Layer) -> facts.Plan:
        holding = holdings[layer]
        plan = layer.plan_removal(holding.going)
        return replace(plan, failed=(*plan.failed, *holding.failed))

    return removal.planned(holdings, plan)


def _look(layer: Layer, limits: config.Limits) -> _Holding:
    holding = _Holding()
    for root in every_root(layer):
        for thing in layer.store.scan(root, contents=limits.stale):
            if isinstance(thing, facts.Housekeeping):
                # A file of fixed length does not shrink, so it must not make prune remove entries.
                holding.bytes += 0 if thing.fixed else thing.bytes
            elif isinstance(thing, facts.Problem):
                holding.failed += [thing.note] if thing.hides else []
            elif isinstance(thing, facts.Orphan) or thing.guest is None:
                # A guest belongs to another program.
                stale = limits.stale and (isinstance(thing, facts.Orphan) or thing.stale)
                old = limits.before is not None and selection.Selection(before=limits.before).matches(thing)
                (holding.going if stale or old else holding.kept).append(thing)
    return holding


def _make_room(holdings: Iterable[_Holding], most: int) -> None:
    """Let the longest unused things go until the rest fits."""
    total, aged = 0, list[tuple[float, int, facts.Removable, _Holding]]()
    for number, holding in enumerate(holdings):
        total += holding.bytes + sum(thing.bytes for thing in holding.kept)
        for thing in holding.kept:
            latest = thing.latest if isinstance(thing, facts.Entry) else thing.modified
            aged.append((_UNKNOWN if latest is None else latest, number, thing, holding))
    for latest, _, thing, holding in sorted(aged, key=lambda item: item[:2]):
        if latest == _UNKNOWN or total <= most:
            break
        holding.going.append(thing)
        total -= thing.bytes


show, table = removal.show, removal.table


def run(request: verbs.Request) -> removal.PurgeResult:
    """Carry out ``cachectl prune``."""
    options, stack = request.options, request.stack
    limits = config.Limits(options.stale, request.before, request.max_size)
    typed = None if limits.none else limits
    with request.working("pruning"):
        return prune(stack, typed, layers=options.layers, dry_run=options.dry_run, notice=request.notice)
