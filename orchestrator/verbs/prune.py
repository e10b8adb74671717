"""``cachectl prune``: remove stale and old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from cachectl import config, layer_set, options, removal
from cachectl.layers.base import errors, facts, selection
from cachectl.layers.base.layer import Layer, every_root, plan_removal
from cachectl.removal import PurgePlan, PurgeResult, show, table

__all__ = ["OPTIONS", "plan_prune", "prune", "run", "show", "table"]

OPTIONS: Final = (
    options.CLEARABLE,
    options.Option(
        "--stale", action="store_true", help="entries that no known Python or driver can hit any more, and orphans"
    ),
    options.Option("--older-than", metavar="AGE", help="entries not changed or used for 30d, 12h, 2w"),
    options.Option("--max-size", metavar="SIZE", help="until the layers together hold no more than 500M, 2GiB"),
    *options.REMOVING,
    options.PYTHON,
    *options.CHANGING,
)
_UNKNOWN: Final = float("inf")


@dataclass(slots=True)
class _Holding:
    """The things of one layer to keep, and those to remove; ``bytes`` are those that stay whatever is removed."""

    layer: Layer
    kept: list[facts.Removable] = field(default_factory=list)
    going: list[facts.Removable] = field(default_factory=list)
    bytes: int = 0
    #: Places that could not be read; the rest of the layer is still pruned.
    failed: list[facts.Note] = field(default_factory=list)

    def plan(self) -> facts.Plan:
        """Plan the removal of what goes."""
        plan = plan_removal(self.layer, self.going)
        return replace(plan, failed=(*plan.failed, *self.failed))


def prune(
    stack: layer_set.LayerSet,
    limits: config.Limits | None = None,
    *,
    layers: Sequence[str] = (),
    dry_run: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> PurgeResult:
    """Remove what is stale or old, then the longest unused until the rest fits, and what killed commands left.

    Without ``limits``, those of the config files count; :class:`BadRequest` is raised if there are none.
    """
    if limits is None:
        # They decide what is stale.
        environment = config.with_interpreters(stack.environment)
        if environment is not stack.environment:
            stack = type(stack)(environment)
        limits = config.configured_limits(environment)
    chosen = stack.chosen(layers)
    return removal.carry_out(stack, chosen, partial(plan_prune, chosen, limits), notice, dry_run=dry_run)


def plan_prune(layers: Iterable[Layer], limits: config.Limits) -> PurgePlan:
    """Plan the removals that the limits require; changes nothing.

    The longest unused goes first, by time of use, else of change, else by a bound on it. Things of unknown age stay.
    """
    holdings = [_look(layer, limits) for layer in layers]
    if limits.bytes is not None:
        _make_room(holdings, limits.bytes)
    return PurgePlan(tuple(removal.planned(holding.layer, holding.plan) for holding in holdings))


def _look(layer: Layer, limits: config.Limits) -> _Holding:
    holding = _Holding(layer)
    try:
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
    except errors.FAILURES as error:
        # Nothing is removed because of an incomplete count.
        return _Holding(layer, failed=[facts.Note("*", errors.reason_of(error))])
    return holding


def _make_room(holdings: list[_Holding], most: int) -> None:
    """Let the longest unused things go until the rest fits."""
    total = sum(holding.bytes + sum(thing.bytes for thing in holding.kept) for holding in holdings)
    aged = [(_last(thing), number, thing) for number, holding in enumerate(holdings) for thing in holding.kept]
    aged.sort(key=lambda item: item[:2])
    for last, number, thing in aged:
        if last == _UNKNOWN or total <= most:
            break
        holdings[number].going.append(thing)
        total -= thing.bytes


def _last(thing: facts.Removable) -> float:
    known = (thing.used, thing.modified, thing.written_before) if isinstance(thing, facts.Entry) else (thing.modified,)
    return next((moment for moment in known if moment is not None), _UNKNOWN)


def run(request: options.Request) -> PurgeResult:
    """Carry out ``cachectl prune``."""
    typed = request.options
    limits = config.Limits(
        stale=typed.stale,
        before=None if typed.older_than is None else request.now - selection.parse_age(typed.older_than),
        bytes=None if typed.max_size is None else selection.parse_size(typed.max_size),
    )
    chosen = None if limits.none else limits
    with request.working("pruning"):
        return prune(request.stack, chosen, layers=typed.layers, dry_run=typed.dry_run, notice=request.notice)
