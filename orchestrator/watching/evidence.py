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
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from cachectl import layer_set
from cachectl.layers.base import facts
from cachectl.layers.base.errors import FAILURES, Damaged
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import EntryFiles, Lookups
from cachectl.watching.events import History, Seen, storing_refused
from cachectl.watching.notes import Event

EXACT: Final = "exact"
INFERRED: Final = "inferred"
NONE: Final = "none"
#: Events that are counted as they are.
COUNTED: Final = frozenset({"hit", "miss", "store"})
#: Seconds by which the clock of a file event may be behind that of a build.
_LATE: Final = 0.05
_NO_PYTHON: Final = (
    "no Python of the run could be watched (it had none, was started with -I or -S, or has other releases)"
)


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
    as_json: ClassVar[facts.AsJson] = facts.AsJson(hidden=("at",))


@dataclass(frozen=True, slots=True)
class Miss:
    """One lookup that found nothing, and why, as far as keys can be read.

    ``part`` is the part of the cache that was asked, such as a dictionary; ``None`` if the cache has no parts.
    """

    layer: str
    kernels: tuple[str, ...]
    because: str
    part: str | None = None


class Evidence:
    """All that is seen of a run: made before it starts, and told afterwards what was seen.

    ``events`` are those of watched programs, ``unread`` has a line for each file of events that could not be read.
    ``seen`` is what file events showed, ``None`` without any. ``unwatched`` maps layers to commands of the run that
    could not be watched, ``strangers`` to those of other programs that may have used its files.
    """

    def __init__(self, stack: layer_set.LayerSet, *, explain: bool = False) -> None:
        self.lookups = {layer.name: part for layer in stack if (part := layer.about.lookups) is not None}
        self.began = 0.0
        self.events: Sequence[Event] = ()
        self.unread: Sequence[str] = ()
        self.seen: Mapping[str, Seen] | None = None
        self.unwatched: Mapping[str, Sequence[str]] = {}
        self.strangers: Mapping[str, Iterable[str]] = {}
        #: Entries before the run, by root and key; ``None`` if they cannot be listed, or the layer is watched.
        self._before = {layer.name: self._list(layer) for layer in stack}
        self._counters = {name: _counters_of(stack[name], part) for name, part in self.lookups.items()}
        self._known: list[facts.Entry] = []
        for layer in stack if explain else ():
            with suppress(*FAILURES):
                self._known += layer.entries()

    @property
    def misfits(self) -> dict[str, str]:
        """The libraries that are not as their watchers expect them, each with what is wrong."""
        failed = (event for event in self.events if event["event"] == "failed")
        return {event["library"]: f"{event['library']} cannot be watched ({event.get('error')})" for event in failed}

    def layer_of(self, event: Event) -> str:
        """Return the name of the layer that an event belongs to."""
        return next((name for name in self.lookups if self._owns(name, event)), str(event["layer"]))

    def _owns(self, name: str, event: Event) -> bool:
        part = self.lookups.get(name)
        return part is not None and event["layer"] == (part.family or name) and part.owns(event)

    def _list(self, layer: Layer) -> dict[str, facts.Entry] | None:
        part = self.lookups.get(layer.name)
        if layer.about.scope is facts.Scope.SYSTEM or (part is not None and modules_of(part)):
            return None
        try:
            return {
                f"{root.path}/{entry.key}": entry
                for root in layer.roots()
                for entry in layer.store.scan(root, contents=False)
                if isinstance(entry, facts.Entry)
            }
        except FAILURES:
            return None

    def of_layer(self, layer: Layer, used: Sequence[EntryTrace]) -> LayerTrace:
        """Return what one layer did; ``used`` are its entries that file events showed."""
        counted = self._by_files(layer, used) or self._by_programs(layer)
        commands = self.unwatched.get(layer.name, ())
        if counted.evidence == EXACT and layer.name not in (self.seen or {}) and (commands or self.unread):
            reasons = [f"could not watch {', '.join(commands)}"] if commands else []
            reasons += [f"could not read {', '.join(self.unread)}"] if self.unread else []
            bound = f"{counted.why}; a lower bound: {' and '.join(reasons)}"
            counted = replace(counted, evidence=INFERRED, why=bound)
        return _judged(layer, counted)

    # ------------------------------------------------------------------ seen in programs

    def _by_programs(self, layer: Layer) -> LayerTrace:
        name, part = layer.name, self.lookups.get(layer.name, Lookups())
        modules, misfits = modules_of(part), self.misfits
        if unfit := [misfits[module] for module in sorted(modules & misfits.keys())]:
            return _unseen(name, unfit[0])
        if modules and any(event["event"] == "started" for event in self.events):
            own = [event for event in self.events if event["event"] in COUNTED and self._owns(name, event)]
            counts = Counter(str(event["event"]) for event in own)
            sizes = [event["bytes"] for event in own if event.get("bytes") is not None]
            total = sum(sizes) if len(sizes) == counts["store"] else None
            why = f"{part.by} in each Python of the run that could be watched"
            return LayerTrace(name, counts["hit"], counts["miss"], counts["store"], total, EXACT, why)
        builds = [event for event in self.events if event["event"] == "build" and event.get("driver") == name]
        if part.listeners and builds and all(event["heard"] for event in builds):
            own = [event for event in self.events if event["event"] == "messages" and event["layer"] == name]
            return _heard(name, part, own)
        return _unseen(name, _NO_PYTHON) if modules else self._by_comparison(layer, part)

    def _by_comparison(self, layer: Layer, part: Lookups) -> LayerTrace:
        before, after = self._before[layer.name], self._list(layer)
        if before is None or after is None:
            why = (
                "it is only read, which leaves no trace"
                if layer.about.scope is facts.Scope.SYSTEM
                else "it cannot be listed"
            )
            return _unseen(layer.name, why)
        if not before and not after and not part.keeps_use:
            return _unseen(layer.name, "it keeps no entry, and no lookup shows")
        new = after.keys() - before.keys()
        times = [entry.used for key, entry in after.items() if key not in new and entry.used is not None]
        hits = sum(moment >= self.began for moment in times) if times or part.keeps_use else None
        misses = None
        why = "entries that appeared, and times of use"
        if (counters := _counters_of(layer, part)) is not None:
            first = self._counters.get(layer.name) or (0, 0)
            why = part.by
            # The counters may have been reset in the run.
            hits, misses = (now - then if now >= then else None for now, then in zip(counters, first, strict=True))
        total = sum(after[key].bytes for key in new)
        why = f"{why}; other programs on the same cache are counted too"
        return LayerTrace(layer.name, hits, misses, len(new), total, INFERRED, why)

    # ------------------------------------------------------------------ seen by files

    def used(self, layer: Layer) -> Iterator[EntryTrace]:
        """Yield the entries of a layer that were used; those of others that share the root are left out."""
        seen = (self.seen or {}).get(layer.name, Seen())
        after = (self._list(layer) if seen.entries else None) or {}
        before = self._before[layer.name] or {}
        for root, key, history in sorted(seen.entries, key=lambda use: use[2].uses[0]):
            name = f"{root.path}/{key}"
            listed = after.get(name) or before.get(name)
            if listed is None or listed.guest is None:
                yield _described(layer, root, key, history, None if listed is None else listed.bytes)

    def _by_files(self, layer: Layer, used: Sequence[EntryTrace]) -> LayerTrace | None:
        """Return what the files of a layer's entries showed; ``None`` if they could not be watched at all.

        A lookup that finds nothing touches no file: a miss is counted when its entry is stored.
        """
        seen = (self.seen or {}).get(layer.name)
        if seen is None or (layer.about.scope is not facts.Scope.SYSTEM and self._before[layer.name] is None):
            return None
        doubts = [*seen.doubts]
        if others := ", ".join(sorted(self.strangers.get(layer.name, ()))):
            doubts.append(f"another program that may use the cache ran meanwhile: {others}")
        if seen.shared:
            return self._by_openings(layer, seen, doubts)
        stores = sum(entry.stores for entry in used)
        misses = stores + sum(entry.hits for entry in used if entry.broken)
        hits = sum(entry.hits for entry in used if not entry.broken)
        total = sum((entry.bytes or 0) * bool(entry.stores) for entry in used)
        doubts += _silent(layer, used, self.events)
        why = "; ".join(["the kernel's file events on its entries", *doubts])
        return LayerTrace(layer.name, hits, misses, stores, total, INFERRED if doubts else EXACT, why)

    def _by_openings(self, layer: Layer, seen: Seen, doubts: Sequence[str]) -> LayerTrace:
        part = self.lookups[layer.name]
        before, after = self._before[layer.name] or {}, self._list(layer) or {}
        new = [key for key, entry in after.items() if key not in before and entry.guest is None]
        names, openings = (", ".join(sorted({path.name for path in seen.shared})), sum(seen.shared.values()))
        hits, misses = part.by_openings(openings, len(new), layer.environment) or (None, None)
        files = part.files or EntryFiles()
        why = f"{names}: opened {openings} times; {files.otherwise}; stores are the entries that appeared"
        total = sum(after[key].bytes for key in new)
        return LayerTrace(layer.name, hits, misses, len(new), total, INFERRED, "; ".join([why, *doubts]))

    # ------------------------------------------------------------------ misses

    def misses(self, entries: Iterable[EntryTrace]) -> Iterator[Miss]:
        """Yield every miss, then those that show by what was stored after them.

        They are explained by the entries that were there before the run.
        """
        built: list[Event] = []
        for event in self.events:
            compiled = event["event"] == "build" and event.get("compiled") and not event.get("by_files")
            if event["event"] == "miss" or compiled:
                layer = str(event.get("driver")) if compiled else self.layer_of(event)
                kernels = tuple(event.get("kernels") or ())
                because = _other_build(event, built) or self._because(layer, kernels, event)
                yield Miss(layer, kernels, because, self.lookups.get(layer, Lookups()).part_of(event))
            if event["event"] == "build":
                built.append(event)
        for entry in entries:
            if any((known.layer, known.key) == (entry.layer, entry.key) for known in self._known):
                because = "its entry was there before, and was damaged or removed"
            else:
                event = {"root": entry.root, "key": entry.key, "device": entry.device}
                because = self._because(entry.layer, entry.kernels or (), event)
            if entry.stores or entry.broken:
                yield Miss(entry.layer, entry.kernels or (), because)

    def _because(self, layer: str, kernels: tuple[str, ...], event: Event) -> str:
        """Return the nearest entry that was there before the run, and what differs."""
        lookups = self.lookups.get(layer) or Lookups()
        own = [entry for entry in self._known if entry.layer == layer]
        alike = [entry for entry in own if set(kernels) & set(entry.kernels or ()) and lookups.is_alike(entry, event)]
        if not alike:
            nameless = sum(entry.kernels is None for entry in own)
            known = f"no entry like it is known; {nameless} have no known kernel name"
            return known if nameless else "cold: no entry like it"
        if all(entry.stale for entry in alike):
            return f"an entry of the same kernel is there, but {alike[0].stale_because}"
        return lookups.difference(alike, event)


def _unseen(name: str, why: str) -> LayerTrace:
    return LayerTrace(name, None, None, None, None, NONE, why)


def modules_of(lookups: Lookups) -> set[str]:
    """Return the modules that must be watched for a layer's numbers to be exact."""
    return {*lookups.modules, *(call.module for call in lookups.calls)}


def _counters_of(layer: Layer, lookups: Lookups) -> tuple[int, int] | None:
    """Return the cache's own counters; ``None`` if it has none, or if a plug-in fails to read them."""
    try:
        return lookups.counters(layer.environment)
    except FAILURES:
        return None


def _described(layer: Layer, root: facts.Root, key: str, history: History, size: int | None) -> EntryTrace:
    artifact: object = None
    # An entry that cannot be read shows what is known without its content.
    with suppress(*FAILURES):
        artifact = layer.store.read(root, [key]).get(key)
    detail = artifact.detail if isinstance(artifact, facts.Artifact) else {}
    return EntryTrace(
        layer=layer.name,
        key=key,
        hits=len(history.times(stores=False)),
        stores=len(history.times(stores=True)),
        bytes=size,
        kernels=tuple((detail.get("kernels") or "").split()) or None,
        device=detail.get("device") or None,
        broken=isinstance(artifact, Damaged),
        at=tuple(at for at, _ in history.uses),
        root=str(root.path),
    )


def _heard(name: str, lookups: Lookups, events: Sequence[Event]) -> LayerTrace:
    written = [path for event in events for path in event["wrote"]]
    asked = [event.get("lookups") for event in events]
    weights = {path: lookups.weigh(path) for path in set(written)}
    total = sum(weight or 0 for weight in weights.values())
    stored = sum(weights[path] is not None for path in written)
    why = f"programs, each for each of its devices, by {lookups.by}"
    if None in asked:
        why = f"{why}; builds that failed ran beside others, so hits are not known"
        return LayerTrace(name, None, len(written), stored, total, INFERRED, why)
    return LayerTrace(name, sum(filter(None, asked)) - len(written), len(written), stored, total, EXACT, why)


def _judged(layer: Layer, counted: LayerTrace) -> LayerTrace:
    """Add why a layer took no part. What was counted counts more: a program may switch a layer itself."""
    with suppress(*FAILURES):
        state = layer.state()
        if state.condition is facts.Condition.DISABLED and not counted.hits:
            return replace(counted, state="disabled", state_why=state.why)
        if state.condition is facts.Condition.BYPASSED and not counted.was_used:
            return replace(counted, state="bypassed", state_why=state.why)
        if (
            state.condition in (facts.Condition.ENABLED, facts.Condition.UNKNOWN)
            and layer.about.when_closed
            and not counted.stores
        ):
            refused = (storing_refused(root.path) for root in layer.roots() if root.scope is facts.Scope.USER)
            if why := next(filter(None, refused), None):
                return replace(counted, state="closed", state_why=why)
    return counted


# ---------------------------------------------------------------------- builds by drivers that say nothing


def with_files(events: Sequence[Event], entries: Sequence[EntryTrace]) -> list[Event]:
    """Return the events, with what the files of entries say of builds whose driver says nothing."""
    completed = list(events)
    begun = sorted((_began_at(event), place) for place, event in enumerate(events) if _is_silent(event))
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


def _began_at(build: Event) -> float:
    return float((build.get("at") or 0) - build["seconds"])


def _is_silent(event: Event) -> bool:
    """Return whether an event is a build by a driver that said nothing of it."""
    return event["event"] == "build" and not event.get("driver") and event.get("binary") != "hit"


def _silent(layer: Layer, used: Sequence[EntryTrace], events: Iterable[Event]) -> Iterator[str]:
    """Yield why misses of a layer may have stored nothing, and so do not show."""
    with suppress(*FAILURES):
        state = layer.state()
        if state.condition is facts.Condition.DISABLED:
            yield f"it is off ({state.why}), so that no lookup shows"
    builds = [event for event in events if _is_silent(event) or event.get("by_files")]
    if used and any(event["failed"] for event in builds):
        yield "a build failed, which stores nothing, so that its misses do not show"
    tagging = layer.about.tagging
    platforms = () if tagging is None else tagging.platforms
    lost = (event for event in builds if not event.get("by_files") and not event["failed"] and event.get("kernels"))
    if all(entry.kernels for entry in used) and any(event.get("platform") in platforms for event in lost):
        yield "a build used no entry, so that it may have missed and stored nothing"


# ---------------------------------------------------------------------- misses


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
