"""What each layer did in a run, or what kept it from taking part, from all that was seen of it.

Each layer says how its lookups are observed (:class:`cachectl.layers.core.parts.Lookups`). Libraries in Python are
watched, and drivers that report while they build are listened to: exact, also while other programs use the same caches.
File events show the lookups of drivers that keep each entry in a file: exact, unless something was seen that makes it
doubtful. For other layers the entries before and after the run are compared: new ones, and times of use.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import NamedTuple

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, Damaged
from cachectl.layers.core.entry import Artifact, Entry
from cachectl.layers.core.json_form import as_json
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.parts import Lookups
from cachectl.layers.core.root import ABSENT, BYPASSED, DISABLED, UNKNOWN, Scope, State
from cachectl.layers.core.store import ENTRY, OWN
from cachectl.layers.disk import place
from cachectl.watching.events import Use, kind_of
from cachectl.watching.program_events import (
    BuildEnd,
    CacheLookup,
    CacheStore,
    DriverMessages,
    Event,
    FailedUse,
    Misfit,
    ProcessStart,
    of_kind,
)

EXACT = "exact"
INFERRED = "inferred"
NONE = "none"
#: Seconds by which the clock of a file event may be behind that of a build.
_LATE = 0.05
_NO_PYTHON = "no Python of the run could be watched (it had none, was started with -I or -S, or has other releases)"


class LayerTrace(NamedTuple):
    """What one layer did in a run; ``None`` is unknown. ``evidence`` is exact, inferred or none, ``why`` says how.

    ``state`` is ``disabled``, ``bypassed`` or ``closed`` (it cannot be written) if that kept the layer from
    participating, by the variables of the programs that used caches, else of the command; ``state_why`` is the reason.
    """

    layer: str
    hits: int | None = None
    misses: int | None = None
    stores: int | None = None
    bytes: int | None = None
    evidence: str = NONE
    why: str = ""
    state: str | None = None
    state_why: str | None = None

    @property
    def was_used(self) -> bool:
        """Whether any use was seen."""
        return bool(self.hits or self.misses or self.stores)


@as_json(hidden=("at",))
class EntryTrace(NamedTuple):
    """One entry that was used: how often it was read and stored, its bytes, and what its bytes say.

    ``broken`` says that it is damaged, so that its readings are misses. ``at`` are the times of use (epoch seconds).
    """

    layer: str
    key: str
    hits: int
    stores: int
    bytes: int | None
    kernels: tuple[str, ...] | None
    device: str | None
    broken: bool = False
    at: tuple[float, ...] = ()
    root: str = ""


class Evidence:
    """All that is seen of one layer in a run: made before it starts, and completed after it has ended.

    ``used`` are the entries that file events showed, ``None`` without any events, and ``doubts`` say why uses of files
    may be missing.
    """

    def __init__(self, layer: Layer, *, off: str | None = None) -> None:
        self.layer = layer
        self._off = off
        self._is_system = layer.about.scope is Scope.SYSTEM
        self.part = layer.about.lookups or Lookups()
        # Without a file that is loaded into programs, only this layer is not traced.
        for file in (*self.part.watchers.values(), *self.part.listeners.values()):
            file.stat()
        self._views: dict[int, Layer] = {}
        self.views: tuple[Layer, ...] = (layer,)
        self.used: list[EntryTrace] | None = None
        self.doubts: dict[str, None] = {}
        #: Whether another program may have used the cache meanwhile.
        self.is_shared = False
        self._events: Sequence[Event] = ()
        #: Files that hold many entries, of which no event says what is read, with how often each was opened.
        self.shared = Counter[str]()
        #: Entries before the run, by root and key; ``None`` if they cannot be listed, or the layer is watched.
        self.before = self._list()
        #: When it began, in epoch seconds.
        self.began = time.time()

    def live_in(self, environments: Mapping[int, Environment]) -> None:
        """Take over in which environment each process of the run used caches; without any, the command's counts."""
        self._views = {process: type(self.layer)(environment) for process, environment in environments.items()}
        alike = {tuple(sorted(view.environment.variables.items())): view for view in reversed([*self._views.values()])}
        self.views = tuple(reversed(alike.values())) or (self.layer,)

    def view_in(self, process: int) -> Layer:
        """Return the layer as one process of the run used it."""
        return self._views.get(process, self.views[0])

    def state(self) -> State:
        """Return the state of the layer in the programs of the run; unknown if it is on in some and off in others."""
        states = [view.state() for view in self.views]
        if len({state.condition for state in states}) == 1:
            return states[0]
        return State(UNKNOWN, "it is on in some programs of the run only")

    def used_later(self) -> frozenset[str]:
        """Return the paths of entries that were there before the run, and that were used since it began."""
        before = self.before or {}
        after = (self.after or {}) if before and self.part.keeps_use else {}
        used = {path: entry.used for path, entry in after.items() if path in before}
        return frozenset(path for path, moment in used.items() if moment is not None and moment >= self.began)

    def take(self, uses: Iterable[Use], doubts: Mapping[str, None], platforms: frozenset[str]) -> None:
        """Take over what file events showed: the uses of the layer's files, and why some may be missing.

        ``platforms`` are those for which the run built.
        """
        shared, entries = self.part.shared, []
        self.used, self.doubts = [], {**doubts}
        for use in uses:
            root, key, history = use
            name, kind = key.rpartition("/")[2], kind_of(self.layer, root, key)
            if kind == ENTRY:
                entries.append(use)
            elif kind == OWN and shared is not None and shared.fullmatch(name):
                self.shared[name] += history.openings
            else:
                continue
            self.doubts |= dict.fromkeys(sorted(history.doubts))
        listed = {**(self.before or {}), **(self.after or {})} if entries else {}
        is_own = not self.is_shared and not platforms.isdisjoint(self.part.platforms)
        for use in sorted(entries, key=lambda use: use[2].uses[0]):
            entry = listed.get(f"{use[0].path}/{use[1]}")
            # What a cache keeps for others is excluded, unless only builds of the run can have used it.
            if entry is None or not entry.is_foreign or is_own:
                self.used.append(self._described(use, None if entry is None else entry.bytes))

    @cached_property
    def after(self) -> dict[str, Entry] | None:
        """The entries after the run, as ``before`` has those before it; listed once."""
        return self._list()

    def appeared(self) -> list[Entry] | None:
        """Return the entries that appeared in the run; ``None`` if they could not be listed."""
        if self.before is None or self.after is None:
            return None
        return [entry for path, entry in self.after.items() if path not in self.before]

    def _list(self) -> dict[str, Entry] | None:
        if self._is_system or self.part.modules:
            return None
        try:
            return {
                f"{root.path}/{entry.key}": entry
                for root in self.layer.roots()
                for entry in self.layer.store.scan(root, contents=False)
                if isinstance(entry, Entry) and entry.is_listed
            }
        except FAILURES:
            return None

    def trace(
        self, events: Sequence[Event], commands: Sequence[str], unread: Sequence[str], cut: Collection[str]
    ) -> LayerTrace:
        """Return what the layer did; ``events`` are those that watched programs noted, of every layer.

        ``commands`` of the run used the layer and could not be watched; ``unread`` has a line for each file of noted
        events that could not be read; ``cut`` are the platforms of builds that did not end.
        """
        self._events = events
        built = {name for build in of_kind(events, BuildEnd) for name in build.kernels}
        if self.used and self.is_shared and built:
            # What another program used meanwhile, if it names no kernel of this run.
            self.used = [entry for entry in self.used if not entry.kernels or built & {*entry.kernels}]
        counted = self._by_files() or self._by_programs()
        gaps = [
            f"could not {act} {', '.join(names)}" for act, names in (("watch", commands), ("read", unread)) if names
        ]
        if counted.evidence == EXACT and self.used is None and gaps:
            counted = counted._replace(evidence=INFERRED, why=f"{counted.why}; a lower bound: {' and '.join(gaps)}")
        own = {*self.part.listeners, *self.layer.about.platforms}
        if counted.evidence != NONE and not own.isdisjoint(cut):
            why = f"{counted.why}; a build did not end, so it is unknown whether it missed"
            counted = counted._replace(misses=counted.misses or None, evidence=INFERRED, why=why)
        if self._off and not (counted.hits or counted.stores):
            return counted._replace(state=DISABLED.value, state_why=self._off)
        # Why it did not participate; what was counted counts more, because a program may switch a layer itself.
        with suppress(*FAILURES):
            state = self.state()
            if state.condition in (DISABLED, BYPASSED):
                was_used = counted.hits if state.condition is DISABLED else counted.was_used
                return counted if was_used else counted._replace(state=state.condition.value, state_why=state.why)
            if state.condition is not ABSENT and place.Use.WRITE in self.layer.about.uses and not counted.stores:
                roots = (root.path for root in self.views[0].roots() if root.scope is Scope.USER)
                home = self.views[0].environment.home_folder
                if reason := next(filter(None, (place.why_closed(root, home) for root in roots)), None):
                    return counted._replace(state="closed", state_why=reason)
        return counted

    def _by_programs(self) -> LayerTrace:
        name, part, wrong = self.layer.name, self.part, misfits(self._events)
        if unfit := sorted(wrong.keys() & set(part.modules)):
            return LayerTrace(name, why=wrong[unfit[0]])
        if part.modules and of_kind(self._events, ProcessStart):
            lookups, stores = of_kind(self._events, CacheLookup), of_kind(self._events, CacheStore)
            outcomes = Counter(lookup.outcome for lookup in lookups if lookup.layer == name)
            sizes = [store.bytes for store in stores if store.layer == name]
            total = None if None in sizes else sum(filter(None, sizes))
            reason = f"{part.by} in each Python of the run that could be watched"
            return LayerTrace(name, outcomes["hit"], outcomes["miss"], len(sizes), total, EXACT, reason)
        builds = [build for build in of_kind(self._events, BuildEnd) if build.driver == name]
        if part.listeners and builds and all(build.heard for build in builds):
            return self._by_messages()
        return LayerTrace(name, why=_NO_PYTHON) if part.modules else self._by_comparison()

    def _by_messages(self) -> LayerTrace:
        name = self.layer.name
        own = [messages for messages in of_kind(self._events, DriverMessages) if messages.layer == name]
        written = [path for messages in own for path in messages.wrote]
        weights = {path: self.part.weigh(path) for path in set(written)}
        total = sum(weight or 0 for weight in weights.values())
        stored = sum(weights[path] is not None for path in written)
        reason = f"programs, each for each of its devices, by {self.part.by}"
        asked = [messages.lookups for messages in own]
        if None in asked:
            reason = f"{reason}; builds failed while others ran, so hits are not known"
            return LayerTrace(name, None, len(written), stored, total, INFERRED, reason)
        hits = sum(filter(None, asked)) - len(written)
        return LayerTrace(name, hits, len(written), stored, total, EXACT, reason)

    def _by_comparison(self) -> LayerTrace:
        name, new, after, keeps_use = self.layer.name, self.appeared(), self.after or {}, self.part.keeps_use
        if new is None:
            reason = "it is only read, which leaves no trace" if self._is_system else "it cannot be listed"
            return LayerTrace(name, why=reason)
        if not self.before and not after and not keeps_use:
            return LayerTrace(name, why="it has no entries, and its lookups cannot be observed")
        times = [entry.used for path, entry in after.items() if path in (self.before or {}) and entry.used is not None]
        hits = sum(moment >= self.began for moment in times) if times or keeps_use else None
        reason = "entries that appeared, and times of use; other programs on the same cache are counted too"
        return LayerTrace(name, hits, None, len(new), sum(entry.bytes for entry in new), INFERRED, reason)

    def _described(self, use: Use, size: int | None) -> EntryTrace:
        root, key, history = use
        artifact: object = None
        # An entry that cannot be read shows what is known without its content.
        with suppress(*FAILURES):
            artifact = self.layer.store.read(root, [key]).get(key)
        detail = artifact.detail if isinstance(artifact, Artifact) else {}
        stores = sum(is_store for _, is_store in history.uses)
        return EntryTrace(
            layer=self.layer.name,
            key=key,
            hits=len(history.uses) - stores,
            stores=stores,
            bytes=size,
            kernels=tuple((detail.get("kernels") or "").split()) or None,
            device=detail.get("device") or None,
            broken=isinstance(artifact, Damaged),
            at=tuple(at for at, _ in history.uses),
            root=str(root.path),
        )

    def _by_files(self) -> LayerTrace | None:
        """Return what the files of entries showed; ``None`` if they could not be watched at all.

        A lookup that finds nothing touches no file: a miss is counted when its entry is stored.
        """
        name, part, used = self.layer.name, self.part, self.used
        if used is None or (self.before is None and not self._is_system):
            return None
        doubts = [*self.doubts]
        if self.shared:
            new = [entry.bytes for entry in self.appeared() or () if not entry.is_foreign]
            openings = sum(self.shared.values())
            hits, misses = part.by_openings(openings, len(new), self.layer.environment) or (None, None)
            shown = f"opened {openings} times; {part.otherwise}; stores are the entries that appeared"
            reason = "; ".join([f"{', '.join(sorted(self.shared))}: {shown}", *doubts])
            return LayerTrace(name, hits, misses, len(new), sum(new), INFERRED, reason)
        stores = sum(entry.stores for entry in used)
        misses = stores + sum(-(-entry.hits // part.openings_of_miss) for entry in used if entry.broken)
        hits = sum(entry.hits for entry in used if not entry.broken)
        total = sum((entry.bytes or 0) * bool(entry.stores) for entry in used)
        doubts += self._silent(used)
        reason = "; ".join(["the kernel's file events on its entries", *doubts])
        counted = LayerTrace(name, hits, misses, stores, total, INFERRED if doubts else EXACT, reason)
        # The other program may have stored those that name no kernel.
        unnamed = sum(entry.stores for entry in used if not entry.kernels) if self.is_shared else 0
        if unnamed:
            return counted._replace(misses=misses - unnamed or None, stores=stores - unnamed or None, bytes=None)
        return counted

    def _silent(self, used: Sequence[EntryTrace]) -> Iterator[str]:
        """Yield why misses may have stored nothing."""
        with suppress(*FAILURES):
            state = self.state()
            if state.condition is DISABLED:
                yield f"it is off ({state.why}), so that no lookup shows"
        builds = [build for build in of_kind(self._events, BuildEnd) if build.is_silent or build.by_files]
        if used and any(build.failed for build in builds):
            yield "a build failed, which stores nothing, so that its misses do not show"
        platforms = self.layer.about.platforms
        lost = (build for build in builds if not build.by_files and not build.failed and build.kernels)
        if all(entry.kernels for entry in used) and any(build.inputs.platform in platforms for build in lost):
            yield "a build used no entry, so that it may have missed and stored nothing"


def misfits(events: Iterable[Event]) -> dict[str, str]:
    """Return the libraries that are not as their watchers expect them, each with what is wrong."""
    return {
        misfit.library: f"{misfit.library} cannot be watched ({misfit.error})" for misfit in of_kind(events, Misfit)
    }


def find_owners(events: Iterable[Event], parts: Mapping[str, Lookups]) -> list[Event]:
    """Return events in which each lookup and store names the layer that it belongs to, by the dictionary too."""

    @cache
    def owner_of(layer: str, dictionary: str) -> str:
        return next((name for name, part in parts.items() if part.owns(layer, dictionary, name)), layer)

    return [
        event._replace(layer=owner_of(event.layer, event.dictionary))
        if isinstance(event, CacheLookup | CacheStore | FailedUse)
        else event
        for event in events
    ]


# ---------------------------------------------------------------------- builds by drivers that say nothing


def complete_builds(events: Sequence[Event], entries: Iterable[EntryTrace]) -> list[Event]:
    """Return events in which builds whose driver said nothing have what the files of entries say of them."""
    builds = {index: event for index, event in enumerate(events) if isinstance(event, BuildEnd)}
    silent = sorted((index for index, build in builds.items() if build.is_silent), key=lambda one: builds[one].began)
    for entry in entries:
        names = set() if entry.broken else set(entry.kernels or ())
        alike = [index for index in silent if names & {*builds[index].kernels}]
        for at in entry.at:
            # Builds of kernels of one name are distinguished by time: an entry counts for the last that had begun.
            for index in [index for index in alike if builds[index].began <= at + _LATE][-1:]:
                driver, compiled = builds[index].driver or entry.layer, bool(builds[index].compiled or entry.stores)
                builds[index] = builds[index]._replace(driver=driver, compiled=compiled, by_files=True)
    return [builds.get(index, event) for index, event in enumerate(events)]


def settle_builds(events: Sequence[Event], layers: Iterable[LayerTrace]) -> list[Event]:
    """Return events in which builds of several threads say whether they were compiled, if sums leave one answer.

    A driver that reports does not say which thread a message is of. Those of a build that did not end are unread, so
    no build may have been cut.
    """
    settled = [*events]
    for use in layers:
        builds = {
            index: event
            for index, event in enumerate(events)
            if isinstance(event, BuildEnd) and event.driver == use.layer and not event.failed
        }
        unclear = {index: build for index, build in builds.items() if build.compiled is None}
        if unclear and use.misses is not None and all(len(build.inputs.devices) == 1 for build in builds.values()):
            left = use.misses - sum(bool(build.compiled) for build in builds.values())
            # Of threads that build the same at once the first compiles, and the others wait for it.
            by_begin = sorted(unclear.items(), key=lambda item: item[1].began, reverse=True)
            first = {build.inputs: index for index, build in by_begin}
            if left in (0, len(first), len(unclear)):
                for index, build in unclear.items():
                    compiled = left == len(unclear) or (left == len(first) and first[build.inputs] == index)
                    settled[index] = build._replace(compiled=compiled)
    return settled
