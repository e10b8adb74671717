"""``store gc``: remove old index parts from a shared store, and later what nothing lists any more.

A reader that listed the index before may still need the packs and objects of a removed part, and a writer may be about
to list an object that it has found in the index. So names that nothing lists are first condemned, in a list under
``index/``, and removed by a later ``gc``, after the grace period, if nothing lists them then. Writers rely on no object
that is condemned.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.selection import moment_text
from cachectl.sharing.format import (
    INDEX,
    CondemnedName,
    PartName,
    condemned_file,
    is_content,
)
from cachectl.sharing.index import Gone, Index

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cachectl.layers.base.environment import Environment
    from cachectl.sharing.place import Place

#: Default grace period, in seconds.
GRACE: Final = 86400.0
#: Seconds by which the clocks of this machine and of the store may differ, beside a quarter of the grace period.
_SKEW: Final = 60.0
#: Names that one list condemns: a registry takes manifests of 4 MiB.
_MOST: Final = 10_000


@dataclass(frozen=True, slots=True)
class Collection:
    """What ``store gc`` removed, or (``dry_run``) would remove.

    ``parts`` are the removed index parts with ``entries``; ``condemned`` the packs and objects that a later ``gc`` may
    remove; ``removed`` and ``freed`` those removed now and their bytes; ``kept`` the bytes of all packs and objects
    that stay listed.
    """

    url: str
    dry_run: bool
    parts: tuple[str, ...]
    entries: int
    condemned: int
    removed: int
    freed: int
    kept: int
    as_json: ClassVar[AsJson] = AsJson("cachectl/store-gc/1")

    @property
    def failed(self) -> bool:
        """Return ``False``: a failure is an error."""
        return False


@dataclass(frozen=True, slots=True)
class _Plan:
    """Index parts to remove, names to condemn, names to remove, and lists of condemned names that are done."""

    parts: tuple[PartName, ...]
    entries: int
    condemn: frozenset[str]
    remove: frozenset[str]
    done: tuple[CondemnedName, ...]
    freed: int
    kept: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What ``gc`` keeps: ages are in seconds, the size in bytes; ``None`` is no limit."""

    older_than: float | None = None
    max_size: int | None = None
    grace: float = GRACE


def collect(place: Place, environment: Environment, limits: Limits, *, dry_run: bool = False) -> Collection:
    """Remove index parts older than a limit, then the oldest until the rest has the size of another.

    Packs and objects that nothing lists are condemned, and removed if they were condemned longer ago than the grace
    period. Raises :class:`BadStore` if an index part is damaged: nothing is removed then, because what it lists is
    unknown.
    """
    try:
        return _collect(place, environment, limits, dry_run=dry_run)
    except Gone:
        # Another gc has removed a part after it was listed.
        return _collect(place, environment, limits, dry_run=dry_run)


def _collect(place: Place, environment: Environment, limits: Limits, *, dry_run: bool) -> Collection:
    index = Index(place, environment)
    index.demand()
    now = environment.clock()
    plan = _plan(index, {one.name: one.bytes or 0 for one in place.contents()}, now, limits)
    if not dry_run:
        _apply(index, plan, now, limits.grace)
        index.save()
    names = tuple(map(str, plan.parts))
    return Collection(
        place.shown, dry_run, names, plan.entries, len(plan.condemn), len(plan.remove), plan.freed, plan.kept
    )


def _plan(index: Index, contents: Mapping[str, int], now: float, limits: Limits) -> _Plan:
    sizes = {name: size for name, size in contents.items() if is_content(name)}
    listed = {name: index.read(name).part for name in index.names.parts}
    uses = Counter(held for part in listed.values() for held in part.holds)
    weight = sum(sizes.get(name, 0) for name in uses)
    removed: list[PartName] = []
    # The oldest first.
    for name, part in listed.items():
        old = limits.older_than is not None and name.made < now - limits.older_than
        # Readers remember the parts of the newest second together.
        same = bool(removed) and removed[-1].made == name.made
        if not old and not same and (limits.max_size is None or weight <= limits.max_size):
            continue
        removed.append(name)
        for held in part.holds:
            uses[held] -= 1
            if not uses[held]:
                weight -= sizes.get(held, 0)
    live = {name for name, number in uses.items() if number}
    unlisted = sizes.keys() - live
    condemned = {name: index.condemned(name) for name in index.names.condemned}
    ripe = frozenset(
        held for name, names in condemned.items() if _age(index, name, now) > limits.grace for held in names
    )
    known = frozenset(held for names in condemned.values() for held in names)
    remove = frozenset(unlisted & ripe)
    done = tuple(name for name, names in condemned.items() if not ((names & unlisted) - remove))
    entries = sum(len(listed[name].entries) for name in removed)
    return _Plan(
        tuple(removed),
        entries,
        frozenset(unlisted - known),
        remove,
        done,
        sum(sizes[name] for name in remove),
        weight,
    )


def _age(index: Index, name: CondemnedName, now: float) -> float:
    """Return how many seconds ago a list was written, by the clock that says less."""
    stored = index.names.found.get(str(name))
    modified = None if stored is None else stored.modified
    return now - max(name.moment, name.moment if modified is None else modified)


def _apply(index: Index, plan: _Plan, now: float, grace: float) -> None:
    place = index.place
    condemn = sorted(plan.condemn)
    written = []
    for at in range(0, len(condemn), _MOST) if condemn else range(bool(plan.remove or plan.parts)):
        file = condemned_file(condemn[at : at + _MOST])
        written.append(CondemnedName(int(now), hashlib.sha256(file).hexdigest()))
        # A registry removes what no name holds.
        place.write(f"{INDEX}{written[-1]}", file, condemn[at : at + _MOST])
    if plan.parts or plan.remove:
        index.list()
        _demand_clock(index, written, now, grace)
    # Condemned before they are removed: a kill in between leaves nothing unknown.
    if plan.parts:
        place.remove([f"{INDEX}{name}" for name in plan.parts])
    if plan.remove:
        # A writer may have listed some of it meanwhile.
        index.list()
        live = {held for name in index.names.parts for held in index.read(name).part.holds}
        place.remove(sorted(plan.remove - live))
    finished = [f"{INDEX}{name}" for name in (*plan.done, *(() if condemn else written))]
    if finished:
        place.remove(finished)
    place.finish()


def _demand_clock(index: Index, written: list[CondemnedName], now: float, grace: float) -> None:
    """Raise :class:`CachectlError` if this machine's clock is not that of the store: ages would be wrong.

    What was just condemned is then forgotten: it bears the wrong time.
    """
    for name in written:
        stored = index.names.found.get(str(name))
        if stored is None or stored.modified is None:
            continue
        if abs(stored.modified - now) > max(_SKEW, grace / 4):
            index.place.remove([f"{INDEX}{one}" for one in written])
            there = moment_text(stored.modified)
            message = f"{index.place.shown}: its clock shows {there}, that of this machine {moment_text(now)}; set it"
            raise CachectlError(message)
