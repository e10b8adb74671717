"""``cachectl prune``: remove stale and old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from cachectl.config import Limits, configured_limits, with_interpreters
from cachectl.layer_set import LayerSet, warn_user
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.facts import Entry, Housekeeping, Note, Orphan, Plan, Problem, Removable
from cachectl.layers.base.selection import Selection, parse_age, parse_size
from cachectl.options import CHANGING, LAYERS, PYTHON, REMOVING, Option, Request
from cachectl.removal import PurgePlan, PurgeResult, planned, recover, remove_leftovers, show, table

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

__all__ = ["OPTIONS", "plan_prune", "prune", "run", "show", "table"]

OPTIONS: Final = (
    LAYERS.having(help="a layer that cachectl layers lists (default: every user layer but tuning results)"),
    Option("--stale", action="store_true", help="entries that no known Python or driver can hit any more, and orphans"),
    Option("--older-than", metavar="AGE", help="entries not changed or used for 30d, 12h, 2w"),
    Option("--max-size", metavar="SIZE", help="until the layers together hold no more than 500M, 2GiB"),
    *REMOVING,
    PYTHON,
    *CHANGING,
)
_UNKNOWN: Final = float("inf")


@dataclass(slots=True)
class _Holding:
    """The things of one layer to keep, and those to remove; ``bytes`` are those that stay whatever is removed."""

    layer: Layer
    limits: Limits
    kept: list[Removable] = field(default_factory=list)
    going: list[Removable] = field(default_factory=list)
    bytes: int = 0
    #: Places that could not be read; the rest of the layer is still pruned.
    failed: list[Note] = field(default_factory=list)

    def plan(self) -> Plan:
        """Plan the removal of what goes."""
        plan = self.layer.plan_removal(self.going)
        return replace(plan, failed=(*plan.failed, *self.failed))


def prune(
    stack: LayerSet,
    limits: Limits | None = None,
    *,
    layers: Sequence[str] = (),
    dry_run: bool = False,
    notice: Callable[[str], None] = warn_user,
) -> PurgeResult:
    """Remove what is stale or old, then the longest unused until the rest fits, and what killed commands left.

    Without ``limits``, those of the config files and variables count; :class:`BadRequest` is raised if there are
    none. A layer with limits of its own is pruned by them even if it is not clearable.
    """
    if limits is None:
        # They decide what is stale.
        environment = with_interpreters(stack.environment)
        if environment is not stack.environment:
            stack = type(stack)(environment)
        limits = configured_limits(stack, notice)
    chosen = stack.chosen(layers)
    alone = () if layers else tuple(stack[name] for name in limits.own if stack[name] not in chosen)
    if dry_run:
        return plan_prune(chosen, limits, alone=alone).result
    recover((*chosen, *alone))
    result = plan_prune(chosen, limits, alone=alone).apply()
    remove_leftovers(stack.environment, notice)
    return result


def plan_prune(layers: Iterable[Layer], limits: Limits, *, alone: Iterable[Layer] = ()) -> PurgePlan:
    """Plan the removals that the limits require; changes nothing.

    The longest unused goes first, by time of use, else of change, else by a bound on it. Things of unknown age stay.
    Layers that stand ``alone`` have only their own limits.
    """
    together = []
    for layer in layers:
        own = limits.own.get(layer.name, Limits())
        stale = limits.stale if own.stale is None else own.stale
        before = limits.before if own.before is None else own.before
        together.append(_look(layer, replace(own, stale=stale, before=before)))
    holdings = [*together, *(_look(layer, limits.own[layer.name]) for layer in alone)]
    for holding in holdings:
        _make_room([holding], holding.limits)
    _make_room(together, limits)
    return PurgePlan(tuple(planned(holding.layer, holding.plan) for holding in holdings))


def _look(layer: Layer, limits: Limits) -> _Holding:
    holding = _Holding(layer, limits)
    try:
        for root in layer.roots():
            for found in layer.store.scan(root, contents=bool(limits.stale)):
                if isinstance(found, Housekeeping):
                    # A file of fixed length does not shrink, so it must not make prune remove entries.
                    holding.bytes += 0 if found.fixed else found.bytes
                elif isinstance(found, Problem):
                    holding.failed += [Note(str(found.path), found.message)] if found.hides else []
                elif isinstance(found, Orphan) or found.guest is None:
                    # A guest belongs to another program.
                    (holding.going if _must_go(found, limits) else holding.kept).append(found)
    except FAILURES as error:
        # Nothing is removed because of an incomplete count.
        return _Holding(layer, limits, failed=[Note("*", reason_of(error))])
    return holding


def _must_go(thing: Removable, limits: Limits) -> bool:
    """Return whether a thing must be removed regardless of the free space."""
    if limits.stale and (isinstance(thing, Orphan) or thing.stale):
        return True
    return limits.before is not None and Selection(before=limits.before).selects(thing)


def _make_room(holdings: list[_Holding], limits: Limits) -> None:
    """Move the longest unused things from kept to going until the rest fits."""
    if limits.bytes is None:
        return
    total = sum(holding.bytes + sum(thing.bytes for thing in holding.kept) for holding in holdings)
    aged = [(_last(thing), number, thing) for number, holding in enumerate(holdings) for thing in holding.kept]
    aged.sort(key=lambda item: item[:2])
    going = set()
    for last, number, thing in aged:
        if last == _UNKNOWN or total <= limits.bytes:
            break
        holdings[number].going.append(thing)
        going.add(id(thing))
        total -= thing.bytes
    for holding in holdings if going else ():
        holding.kept = [thing for thing in holding.kept if id(thing) not in going]


def _last(thing: Removable) -> float:
    known = (thing.used, thing.modified, thing.written_before) if isinstance(thing, Entry) else (thing.modified,)
    return next((moment for moment in known if moment is not None), _UNKNOWN)


def run(request: Request) -> PurgeResult:
    """Carry out ``cachectl prune``."""
    options = request.options
    limits = Limits(
        stale=options.stale,
        before=None if options.older_than is None else request.now - parse_age(options.older_than),
        bytes=None if options.max_size is None else parse_size(options.max_size),
    )
    with request.working("pruning"):
        return prune(
            request.stack,
            None if limits.none else limits,
            layers=options.layers,
            dry_run=options.dry_run,
            notice=request.notice,
        )
