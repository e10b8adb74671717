"""``cachectl prune``: remove stale and old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from cachectl.clearing.limits import Limits
from cachectl.clearing.purge import PurgePlan
from cachectl.layers.base.errors import FAILURES, BadRequest, reason_of
from cachectl.layers.base.facts import ClearPlan, Entry, Housekeeping, Note, Orphan, Problem, Removable
from cachectl.layers.base.texts import printable

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer

_UNKNOWN: Final = float("inf")


@dataclass(slots=True)
class _Holding:
    """The things of one layer to keep, and those to remove."""

    layer: Layer
    limits: Limits
    kept: list[Removable] = field(default_factory=list)
    going: list[Removable] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    bytes: int = 0
    files: int = 0
    failed: tuple[Note, ...] = ()
    #: Places that could not be read; the rest of the layer is still pruned.
    hidden: list[Note] = field(default_factory=list)

    def go(self, thing: Removable, because: str) -> None:
        """Add a thing to remove, and why."""
        self.going.append(thing)
        self.reasons.append(because)


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
    reasons = {
        (holding.layer.name, thing.root, thing.key): because
        for holding in holdings
        for thing, because in zip(holding.going, holding.reasons, strict=True)
    }
    return PurgePlan(tuple((holding.layer, _plan_one(holding)) for holding in holdings), reasons)


def _look(layer: Layer, limits: Limits) -> _Holding:
    holding = _Holding(layer, limits)
    try:
        for root in layer.roots():
            for found in layer.scan(root, contents=bool(limits.stale)):
                if isinstance(found, Housekeeping):
                    # A file of fixed length does not shrink, so it must not make prune remove entries.
                    holding.bytes += 0 if found.fixed else found.bytes
                    holding.files += found.files
                elif isinstance(found, Orphan) and found.kept:
                    # It is in quarantine.
                    continue
                elif isinstance(found, Entry) and found.guest is not None:
                    # It belongs to another program.
                    continue
                elif isinstance(found, (Entry, Orphan)):
                    if (because := limits.forbids(found)) is None:
                        holding.kept.append(found)
                    else:
                        holding.go(found, because)
                elif isinstance(found, Problem) and found.hides:
                    holding.hidden.append(Note(str(found.path), found.message))
    except FAILURES as error:
        # Nothing is removed because of an incomplete count.
        return _Holding(layer, limits, failed=(Note("*", reason_of(error)),))
    return holding


def _make_room(holdings: list[_Holding], limits: Limits) -> None:
    """Move the longest unused things from kept to going until the rest fits."""
    total = sum(holding.bytes + sum(thing.bytes for thing in holding.kept) for holding in holdings)
    files = sum(holding.files + sum(thing.files for thing in holding.kept) for holding in holdings)
    aged = [(_last(thing), number, thing) for number, holding in enumerate(holdings) for thing in holding.kept]
    aged.sort(key=lambda item: item[:2])
    going = set()
    for last, number, thing in aged:
        too_large = limits.bytes is not None and total > limits.bytes
        too_many = limits.files is not None and files > limits.files
        if last == _UNKNOWN or not (too_large or too_many):
            break
        # A row has no file of its own.
        if too_large or thing.files:
            because = "over the size" if too_large else "too many files"
            holdings[number].go(thing, because)
            going.add(id(thing))
            total -= thing.bytes
            files -= thing.files
    for holding in holdings if going else ():
        holding.kept = [thing for thing in holding.kept if id(thing) not in going]


def _last(thing: Removable) -> float:
    if isinstance(thing, Orphan):
        return thing.modified
    known = (thing.used, thing.modified, thing.written_before)
    return next((moment for moment in known if moment is not None), _UNKNOWN)


def _plan_one(holding: _Holding) -> ClearPlan:
    if holding.failed:
        return ClearPlan(holding.layer.name, failed=holding.failed)
    try:
        plan = holding.layer.plan_removal(holding.going)
        return replace(plan, failed=(*plan.failed, *holding.hidden))
    except FAILURES as error:
        return ClearPlan(holding.layer.name, failed=(Note("*", reason_of(error)),))
