"""``cachectl prune``: remove stale and old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from cachectl.clearing.limits import Limits
from cachectl.clearing.purge import PurgePlan
from cachectl.layers.base.errors import FAILURES, BadRequest, reason_of
from cachectl.layers.base.facts import Entry, Housekeeping, Note, Orphan, Plan, Problem, Removable
from cachectl.layers.base.texts import printable

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer

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


def configured_limits(layers: LayerSet, notice: Callable[[str], None]) -> Limits:
    """Return the limits of the config files and variables; ``notice`` gets a line for each unknown layer.

    Raises :class:`BadRequest` if there are none, and :class:`BadConfig` for a wrong one.
    """
    from cachectl.config import load
    from cachectl.layers.base.environment import config_paths

    limits = load(layers.environment).limits(layers.environment.clock(), layers, notice)
    if limits.none:
        places = [printable(path) for _, path in config_paths(layers.environment)]
        where = f", or write a limit below [prune] in {places[0]}, such as max-size = '5G'" if places else ""
        message = f"name a limit: --stale, --older-than or --max-size{where}"
        raise BadRequest(message)
    return limits


def plan_prune(layers: Iterable[Layer], limits: Limits, *, alone: Iterable[Layer] = ()) -> PurgePlan:
    """Plan the removals that the limits require; changes nothing.

    The longest unused goes first, by time of use, else of change, else by a bound on it. Things of unknown age stay.
    Layers that stand ``alone`` have only their own limits.
    """
    together = [_look(layer, limits.of(layer.name, alone=False)) for layer in layers]
    holdings = [*together, *(_look(layer, limits.of(layer.name, alone=True)) for layer in alone)]
    for holding in holdings:
        _make_room([holding], holding.limits)
    _make_room(together, limits)
    return PurgePlan(tuple((holding.layer, _plan_layer(holding)) for holding in holdings))


def _look(layer: Layer, limits: Limits) -> _Holding:
    holding = _Holding(layer, limits)
    try:
        for root in layer.roots():
            for found in layer.scan(root, contents=bool(limits.stale)):
                if isinstance(found, Housekeeping):
                    # A file of fixed length does not shrink, so it must not make prune remove entries.
                    holding.bytes += 0 if found.fixed else found.bytes
                elif isinstance(found, Problem):
                    holding.failed += [Note(str(found.path), found.message)] if found.hides else []
                elif isinstance(found, Orphan) or found.guest is None:
                    # A guest belongs to another program.
                    (holding.going if limits.forbids(found) else holding.kept).append(found)
    except FAILURES as error:
        # Nothing is removed because of an incomplete count.
        return _Holding(layer, limits, failed=[Note("*", reason_of(error))])
    return holding


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


def _plan_layer(holding: _Holding) -> Plan:
    try:
        plan = holding.layer.plan_removal(holding.going)
        return replace(plan, failed=(*plan.failed, *holding.failed))
    except FAILURES as error:
        return Plan(holding.layer.name, failed=(Note("*", reason_of(error)),))
