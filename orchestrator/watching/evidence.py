"""What each layer did in a run, from all that was seen of it, and why its lookups missed.

Each layer says how its lookups are observed (:class:`cachectl.layers.base.parts.Lookups`). Libraries in Python are
watched, and drivers that report while they build are listened to: exact, also while other programs use the same caches.
File events show the lookups of drivers that keep each entry in a file: exact, unless something was seen that makes it
doubtful. For other layers the entries before and after the run are compared: new ones, and times of use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, NamedTuple

from cachectl.layer_set import LayerSet
from cachectl.layers.base.errors import FAILURES, Damaged
from cachectl.layers.base.facts import AsJson, Condition, Entry, Scope
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import EntryFiles, Lookups
from cachectl.watching.events import EntryUse, Seen, storing_refused

EXACT: Final = "exact"
INFERRED: Final = "inferred"
NONE: Final = "none"
#: Events that are counted as they are.
_COUNTED: Final = frozenset({"hit", "miss", "store"})
#: Seconds by which the clock of a file event may be behind that of a build.
_LATE: Final = 0.05
_NO_PYTHON: Final = (
    "no Python of the run could be watched (it had none, was started with -I or -S, or has other releases)"
)
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What one layer did in a run; ``None`` is unknown. ``evidence`` is exact, inferred or none, ``why`` says how.

    ``state`` is ``disabled``, ``bypassed`` or ``closed`` (it cannot be written) if the layer took no part for that
    reason, by the variables with which the command started; ``state_why`` is the reason.
    """

    layer: str
    hits: int | None
    misses: int | None
    stores: int | None
    bytes: int | None
    evidence: str
    why: str
    state: str | None = None
    state_why: str | None = None

    @property
    def was_used(self) -> bool:
        """Whether any use was seen."""
        return bool(self.hits or self.misses or self.stores)


@dataclass(frozen=True, slots=True)
class EntryTrace:
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
    as_json: ClassVar[AsJson] = AsJson(hidden=("at",))


@dataclass(frozen=True, slots=True)
class Miss:
    """One lookup that found nothing, and why, as far as keys can be read."""

    layer: str
    kernels: tuple[str, ...]
    because: str
    #: The part of the cache that was asked, such as a dictionary; ``None`` if the cache has no parts.
    part: str | None = None


class Before(NamedTuple):
    """What was known of one layer before the run: its entries by root and key, and its own counters.

    ``entries`` is ``None`` if the layer cannot be listed, or is watched in the programs.
    """

    entries: dict[str, Entry] | None
    counters: tuple[int, int] | None


@dataclass
class Evidence:
    """All that was seen of a run.

    ``seen`` is what file events showed, ``None`` without any; ``unwatched`` maps layers to commands of the run that
    could not be watched, ``strangers`` to those of other programs that may have used its files; ``unread`` has a line
    for each file of events that could not be read.
    """

    began: float
    before: Mapping[str, Before]
    lookups: Mapping[str, Lookups]
    events: Sequence[Event]
    seen: Mapping[str, Seen] | None = None
    unwatched: Mapping[str, Sequence[str]] = field(default_factory=dict)
    strangers: Mapping[str, Iterable[str]] = field(default_factory=dict)
    unread: Sequence[str] = ()

    @property
    def misfits(self) -> dict[str, str]:
        """The libraries that are not as their watchers expect them, each with what is wrong."""
        failed = (event for event in self.events if event["event"] == "failed")
        return {event["library"]: f"{event['library']} cannot be watched ({event.get('error')})" for event in failed}

    def owns(self, name: str, event: Event) -> bool:
        """Return whether an event is one of a layer's."""
        part = self.lookups.get(name)
        return part is not None and event["layer"] == (part.family or name) and part.owns(event)

    def layer_of(self, event: Event) -> str:
        """Return the name of the layer that an event belongs to."""
        return next((name for name in self.lookups if self.owns(name, event)), str(event["layer"]))

    def of_layer(self, layer: Layer, used: Sequence[EntryTrace]) -> LayerTrace:
        """Return what one layer did; ``used`` are its entries that file events showed."""
        return _judged(layer, self._by_files(layer, used) or self._bounded(self._by_programs(layer)))

    # ------------------------------------------------------------------ seen in programs

    def _by_programs(self, layer: Layer) -> LayerTrace:
        name, part = layer.name, self.lookups.get(layer.name, Lookups())
        modules = modules_of(part)
        misfits = self.misfits
        if unfit := [misfits[module] for module in sorted(modules & misfits.keys())]:
            return _unseen(name, unfit[0])
        if modules and any(event["event"] == "started" for event in self.events):
            own = [event for event in self.events if event["event"] in _COUNTED and self.owns(name, event)]
            return _counted(name, own, f"{part.by} in each Python of the run that could be watched")
        builds = [event for event in self.events if event["event"] == "build" and event.get("driver") == name]
        if part.listeners and builds and all(event.get("heard") for event in builds):
            own = [event for event in self.events if event["event"] == "messages" and event["layer"] == name]
            return _heard(name, part, own)
        if modules:
            return _unseen(name, _NO_PYTHON)
        return self._by_comparison(layer, part)

    def _by_comparison(self, layer: Layer, part: Lookups) -> LayerTrace:
        before, after = self.before[layer.name], list_entries(layer, part)
        if before.entries is None or after is None:
            why = (
                "it is only read, which leaves no trace" if layer.about.scope is Scope.SYSTEM else "it cannot be listed"
            )
            return _unseen(layer.name, why)
        if not before.entries and not after and not part.keeps_use:
            return _unseen(layer.name, "it keeps no entry, and no lookup shows")
        new = after.keys() - before.entries.keys()
        times = [entry.used for key, entry in after.items() if key not in new and entry.used is not None]
        hits = sum(moment >= self.began for moment in times) if times or part.keeps_use else None
        misses = None
        why = "entries that appeared, and times of use"
        if (counters := counters_of(layer, part)) is not None:
            first = before.counters or (0, 0)
            why = part.by
            # The counters may have been reset in the run.
            hits, misses = (now - then if now >= then else None for now, then in zip(counters, first, strict=True))
        total = sum(after[key].bytes for key in new)
        why = f"{why}; other programs on the same cache are counted too"
        return LayerTrace(layer.name, hits, misses, len(new), total, INFERRED, why)

    def _bounded(self, counted: LayerTrace) -> LayerTrace:
        """Turn exact numbers into lower bounds if a process could not be watched, or its notes could not be read."""
        commands = self.unwatched.get(counted.layer, ())
        if counted.evidence != EXACT or not (commands or self.unread):
            return counted
        reasons = [f"could not watch {', '.join(commands)}"] if commands else []
        reasons += [f"could not read {', '.join(self.unread)}"] if self.unread else []
        return replace(counted, evidence=INFERRED, why=f"{counted.why}; a lower bound: {' and '.join(reasons)}")

    # ------------------------------------------------------------------ seen by files

    def used(self, layer: Layer) -> Iterator[EntryTrace]:
        """Yield the entries of a layer that were used; those of others that share the root are left out."""
        seen = (self.seen or {}).get(layer.name, Seen())
        if not seen.entries:
            return
        before = self.before[layer.name].entries or {}
        after = list_entries(layer, self.lookups[layer.name]) or {}
        for use in sorted(seen.entries, key=lambda use: min((*use.hits, *use.stores), default=0.0)):
            name = f"{use.root.path}/{use.key}"
            listed = after.get(name) or before.get(name)
            if listed is None or listed.guest is None:
                yield _described(layer, use, None if listed is None else listed.bytes)

    def _by_files(self, layer: Layer, used: Sequence[EntryTrace]) -> LayerTrace | None:
        """Return what the files of a layer's entries showed; ``None`` if they could not be watched at all.

        A lookup that finds nothing touches no file: a miss is counted when its entry is stored.
        """
        part = self.lookups.get(layer.name)
        if part is None or part.files is None or self.seen is None:
            return None
        if layer.about.scope is not Scope.SYSTEM and self.before[layer.name].entries is None:
            return None
        seen = self.seen[layer.name]
        strangers = sorted(self.strangers.get(layer.name, ()))
        others = [f"another program that may use the cache ran meanwhile: {', '.join(strangers)}"] * bool(strangers)
        if seen.shared:
            return self._by_openings(layer, part, seen, others)
        stores = sum(entry.stores for entry in used)
        misses = stores + sum(entry.hits for entry in used if entry.broken)
        hits = sum(entry.hits for entry in used if not entry.broken)
        total = sum((entry.bytes or 0) * bool(entry.stores) for entry in used)
        doubts = [*seen.doubts, *others, *_silent(layer, used, self.events)]
        why = "; ".join(["the kernel's file events on its entries", *doubts])
        return LayerTrace(layer.name, hits, misses, stores, total, INFERRED if doubts else EXACT, why)

    def _by_openings(self, layer: Layer, part: Lookups, seen: Seen, others: Sequence[str]) -> LayerTrace:
        before, after = self.before[layer.name].entries or {}, list_entries(layer, part) or {}
        new = [key for key, entry in after.items() if key not in before and entry.guest is None]
        names, openings = ", ".join(sorted({path.name for path in seen.shared})), sum(seen.shared.values())
        hits, misses = part.by_openings(openings, len(new), layer.environment) or (None, None)
        files = part.files or EntryFiles()
        why = f"{names}: opened {openings} times; {files.otherwise}; stores are the entries that appeared"
        total = sum(after[key].bytes for key in new)
        return LayerTrace(layer.name, hits, misses, len(new), total, INFERRED, "; ".join([why, *others]))


def _unseen(name: str, why: str) -> LayerTrace:
    return LayerTrace(name, None, None, None, None, NONE, why)


def modules_of(lookups: Lookups) -> set[str]:
    """Return the modules that must be watched for a layer's numbers to be exact."""
    return {*lookups.modules, *(call.module for call in lookups.calls)}


def counters_of(layer: Layer, lookups: Lookups) -> tuple[int, int] | None:
    """Return the cache's own counters; ``None`` if it has none, or if a plug-in fails to read them."""
    try:
        return lookups.counters(layer.environment)
    except FAILURES:
        return None


def list_entries(layer: Layer, lookups: Lookups) -> dict[str, Entry] | None:
    """List the entries of a layer; return ``None`` if it is watched, or read only, or cannot be listed."""
    if layer.about.scope is Scope.SYSTEM or modules_of(lookups):
        return None
    try:
        return {
            f"{root.path}/{entry.key}": entry
            for root in layer.roots()
            for entry in layer.store.scan(root, contents=False)
            if isinstance(entry, Entry)
        }
    except FAILURES:
        return None


def _described(layer: Layer, use: EntryUse, size: int | None) -> EntryTrace:
    detail: Mapping[str, str] = {}
    broken = False
    # An entry that cannot be read shows what is known without its content.
    with suppress(*FAILURES):
        try:
            artifact = layer.store.read(use.root, use.key)
            detail = {} if artifact is None else artifact.detail
        except Damaged:
            broken = True
    return EntryTrace(
        layer=layer.name,
        key=use.key,
        hits=len(use.hits),
        stores=len(use.stores),
        bytes=size,
        kernels=tuple((detail.get("kernels") or "").split()) or None,
        device=detail.get("device") or None,
        broken=broken,
        at=tuple(sorted((*use.hits, *use.stores))),
        root=str(use.root.path),
    )


def _counted(name: str, events: Sequence[Event], why: str) -> LayerTrace:
    counts = Counter(str(event["event"]) for event in events)
    sizes = [event["bytes"] for event in events if isinstance(event.get("bytes"), int)]
    total = sum(sizes) if len(sizes) == counts["store"] else None
    return LayerTrace(name, counts["hit"], counts["miss"], counts["store"], total, EXACT, why)


def _heard(name: str, lookups: Lookups, events: Sequence[Event]) -> LayerTrace:
    written = [path for event in events for path in event["wrote"]]
    asked = [event["lookups"] for event in events]
    weights = {path: lookups.weigh(path) for path in set(written)}
    total = sum(weight or 0 for weight in weights.values())
    stored = sum(weights[path] is not None for path in written)
    why = f"programs, each for each of its devices, by {lookups.by}"
    if None in asked:
        why = f"{why}; builds that failed ran beside others, so hits are not known"
        return LayerTrace(name, None, len(written), stored, total, INFERRED, why)
    return LayerTrace(name, sum(asked) - len(written), len(written), stored, total, EXACT, why)


def _judged(layer: Layer, counted: LayerTrace) -> LayerTrace:
    """Add why a layer took no part. What was counted counts more: a program may switch a layer itself."""
    with suppress(*FAILURES):
        state = layer.state()
        if state.condition is Condition.DISABLED and not counted.hits:
            return replace(counted, state="disabled", state_why=state.why)
        if state.condition is Condition.BYPASSED and not counted.was_used:
            return replace(counted, state="bypassed", state_why=state.why)
        if state.condition in (Condition.ENABLED, Condition.UNKNOWN) and layer.about.when_closed and not counted.stores:
            refused = (storing_refused(root.path) for root in layer.roots() if root.scope is Scope.USER)
            if why := next(filter(None, refused), None):
                return replace(counted, state="closed", state_why=why)
    return counted


# ---------------------------------------------------------------------- builds by drivers that say nothing


def with_files(events: Sequence[Event], entries: Sequence[EntryTrace]) -> list[Event]:
    """Return the events, with what the files of entries say of builds whose driver says nothing."""
    completed = list(events)
    begun = sorted(
        (float(event.get("at") or 0) - float(event["seconds"]), place)
        for place, event in enumerate(events)
        if _is_silent(event) and event.get("binary") != "hit"
    )
    for entry in entries:
        names = set() if entry.broken else set(entry.kernels or ())
        alike = [(start, place) for start, place in begun if names & set(events[place].get("kernels") or ())]
        for at in entry.at:
            # Builds of kernels of one name are distinguished by time: an entry counts for the last that had begun.
            if places := [place for start, place in alike if start <= at + _LATE]:
                build = completed[places[-1]]
                compiled = bool(build.get("compiled") or entry.stores)
                layer = build.get("driver") or entry.layer
                completed[places[-1]] = {**build, "driver": layer, "compiled": compiled, "by_files": True}
    return completed


def _is_silent(event: Event) -> bool:
    return event["event"] == "build" and not event.get("driver")


def _silent(layer: Layer, used: Sequence[EntryTrace], events: Iterable[Event]) -> Iterator[str]:
    """Yield why misses of a layer may have stored nothing, and so do not show."""
    with suppress(*FAILURES):
        state = layer.state()
        if state.condition is Condition.DISABLED:
            yield f"it is off ({state.why}), so that no lookup shows"
    builds = [event for event in events if _is_silent(event) or event.get("by_files")]
    if used and any(event["failed"] for event in builds):
        yield "a build failed, which stores nothing, so that its misses do not show"
    tagging = layer.about.tagging
    platforms = () if tagging is None else tagging.platforms
    lost = (event for event in builds if _is_silent(event) and event.get("binary") != "hit" and not event["failed"])
    if all(entry.kernels for entry in used) and any(
        event.get("platform") in platforms and event.get("kernels") for event in lost
    ):
        yield "a build used no entry, so that it may have missed and stored nothing"


# ---------------------------------------------------------------------- misses


class Explanations:
    """Explains misses by the entries that were there before the run."""

    def __init__(self, stack: LayerSet, lookups: Mapping[str, Lookups]) -> None:
        self._known: list[Entry] = []
        self._lookups = lookups
        for layer in stack:
            with suppress(*FAILURES):
                self._known += layer.entries()

    def misses(self, evidence: Evidence, entries: Iterable[EntryTrace]) -> Iterator[Miss]:
        """Yield every miss, then those that show by what was stored after them."""
        built: list[Event] = []
        for event in evidence.events:
            compiled = event["event"] == "build" and event.get("compiled")
            if event["event"] == "miss" or compiled:
                layer = str(event.get("driver")) if compiled else evidence.layer_of(event)
                kernels = tuple(event.get("kernels") or ())
                because = _other_build(event, built) or self._because(layer, kernels, event)
                yield Miss(layer, kernels, because, self._lookups.get(layer, Lookups()).part_of(event))
            if event["event"] == "build":
                built.append(event)
        for entry in entries:
            if entry.stores or entry.broken:
                yield Miss(entry.layer, entry.kernels or (), self._because_of_entry(entry))

    def _because_of_entry(self, entry: EntryTrace) -> str:
        if any((known.layer, known.key) == (entry.layer, entry.key) for known in self._known):
            return "its entry was there before, and was damaged or removed"
        if entry.broken:
            return "its entry is damaged"
        event = {"root": entry.root, "key": entry.key, "device": entry.device}
        return self._because(entry.layer, entry.kernels or (), event)

    def _because(self, layer: str, kernels: tuple[str, ...], event: Event) -> str:
        """Return the nearest entry that was there before the run, and what differs."""
        lookups = self._lookups.get(layer) or Lookups()
        own = [entry for entry in self._known if entry.layer == layer]
        alike = [entry for entry in own if set(kernels) & set(entry.kernels or ()) and lookups.is_alike(entry, event)]
        if not alike:
            nameless = sum(entry.kernels is None for entry in own)
            known = f"no entry like it is known; {nameless} have no known kernel name"
            return known if nameless else "cold: no entry like it"
        if all(entry.stale for entry in alike):
            return f"an entry of the same kernel is there, but {alike[0].stale_because}"
        return lookups.difference(alike, event)


def _other_build(event: Event, built: Sequence[Event]) -> str | None:
    """Explain the difference from an earlier build of the same source in this run."""
    for other in reversed(built):
        if event.get("source") is not None and other.get("source") == event["source"]:
            differs = [
                f"{what} {_quoted(other.get(what))} there, {_quoted(event.get(what))} here"
                for what in ("options", "devices")
                if other.get(what) != event.get(what)
            ]
            if differs:
                return f"the same source was built before in this run, with {' and '.join(differs)}"
    return None


def _quoted(value: object) -> str:
    return repr(", ".join(value) if isinstance(value, list) else value)
