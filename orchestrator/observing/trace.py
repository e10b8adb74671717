"""Which cache served a run: hits, misses and stores of a command and its children, layer by layer.

Each layer says how its lookups are observed (:class:`cachectl.layers.base.parts.Lookups`). Libraries in Python are
watched, and drivers that report while they build are listened to (:mod:`cachectl.observing.observer`). These numbers
are exact even if other programs use the same caches. For other layers the entries before and after the run are
compared: new ones, and times of use. A process that used a cache and could not be watched is named
(:mod:`cachectl.observing.descendants`); the numbers are then a lower bound.
"""

from __future__ import annotations

import json
import os
import py_compile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cachectl.entry_files.events import EntryEvents, Members, Seen
from cachectl.entry_files.lookups import EntryTrace, Listed, count, entries_used, served
from cachectl.layer_set import part_of
from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.environment import process_variable, set_process_variable
from cachectl.layers.base.errors import FAILURES, BadRequest
from cachectl.layers.base.facts import Condition, Entry, Scope
from cachectl.layers.base.parts import Compilation, Lookups
from cachectl.layers.disk.foresight import closed_because
from cachectl.observing.descendants import Descendants, looked_after
from cachectl.observing.observer import TABLE
from cachectl.observing.summary import Summary, summarize
from cachectl.observing.timeline import Clock, DriverFacts, Span, Timeline, read_timeline
from cachectl.observing.trace_events import messages_after, read_events

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

EXACT: Final = "exact"
INFERRED: Final = "inferred"
NONE: Final = "none"
#: Events that are counted as they are.
_COUNTED: Final = frozenset({"hit", "miss", "store"})
_FOLDER: Final = "CACHECTL_TRACE"
_SITE: Final = """
import os, sys

def observe():
    try:
        import cachectl_observer
        cachectl_observer.observe(os.environ["CACHECTL_TRACE"], os.path.dirname(cachectl_observer.__file__))
    except Exception:
        pass

def run_what_this_stands_before():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    rest = [p for p in sys.path if not os.path.exists(os.path.join(p, "cachectl_observer.py"))]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)

if os.environ.get("CACHECTL_TRACE"):
    observe()
run_what_this_stands_before()
"""


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


@dataclass(frozen=True, slots=True)
class KernelTrace:
    """One build: its kernels, the layer that served it, whether it was compiled, and the seconds it took.

    ``served_by`` and ``compiled`` are ``None`` if they are unknown, as with a driver that does not report.
    """

    kernels: tuple[str, ...]
    served_by: str | None
    compiled: bool | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A program that one process built several times: its kernels, and the seconds of all builds but the first.

    ``builds`` counts those of the same source, options and devices. No cache can avoid them.
    """

    kernels: tuple[str, ...]
    builds: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Miss:
    """One lookup that found nothing, and why, as far as keys can be read."""

    layer: str
    kernels: tuple[str, ...]
    because: str
    #: The part of the cache that was asked, such as a dictionary; ``None`` if the cache has no parts.
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Unwatched:
    """A command of the run that is not counted, and the layers it was seen to use."""

    command: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A run: its command, how it ended, and what each layer did. Seconds are wall time."""

    command: tuple[str, ...]
    exit_status: int | None
    wall_seconds: float
    layers: tuple[LayerTrace, ...]
    #: Every build, and every miss; ``None`` if nobody asked for them.
    kernels: tuple[KernelTrace, ...] | None = ()
    misses: tuple[Miss, ...] | None = None
    #: The entries that were hit or stored, of the layers whose files show it; ``None`` if nobody asked for them.
    entries: tuple[EntryTrace, ...] | None = None
    #: Commands that used a cache and could not be watched, with the layers they used.
    unwatched: tuple[Unwatched, ...] = ()
    #: Programs that a process built several times, the slowest first.
    rebuilt: tuple[Rebuilt, ...] = ()
    #: Libraries of the run that could not be watched, a line for each.
    misfits: tuple[str, ...] = ()
    #: Output of C code of the run on its error stream in a build that did not end, without the drivers' own messages.
    passed_on: bytes = b""
    #: Where the time went; ``None`` if no process could be watched.
    timeline: Timeline | None = None
    summary: Summary | None = None
    as_json: ClassVar[AsJson] = AsJson(
        "cachectl/trace/1", hidden=("misfits", "passed_on", "timeline"), optional=("kernels", "misses")
    )


@dataclass
class Traced:
    """The result of :func:`traced`: empty until the block ends."""

    layers: tuple[LayerTrace, ...] = ()
    kernels: tuple[KernelTrace, ...] = ()
    timeline: Timeline | None = None
    summary: Summary | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """What the time of the block went to."""
        return self.timeline.spans if self.timeline is not None else ()

    def __getitem__(self, name: str) -> LayerTrace:
        """Return what a layer did. Raises :class:`KeyError` for an unknown name."""
        found = {layer.layer: layer for layer in self.layers}
        return found[name]


def trace(
    stack: LayerSet,
    command: Sequence[str],
    *,
    kernels: bool = False,
    explain: bool = False,
    notice: Callable[[str], None],
) -> Trace:
    """Run a command and return what each layer did; with ``kernels`` every build too, with ``explain`` every miss.

    ``notice`` gets a line for each thing that went wrong with the temporary folder, and for each library that could not
    be watched. Raises
    :class:`~cachectl.switching.run.CannotStart`.
    """
    from cachectl.switching import run as child
    from cachectl.switching.isolated import isolated_root

    with child.signals_held() as signals, isolated_root(stack.environment, notice=notice) as folder:
        tracer = Tracer(stack, folder, explain=explain)
        with tracer.looking():
            started = time.perf_counter()
            status = child.run(command, tracer.variables(stack.environment), stack.environment, signals)
            wall = time.perf_counter() - started
        done = tracer.ended(command, status, wall)
    for line in done.misfits:
        notice(line)
    return done if kernels else replace(done, kernels=None, entries=None)


def _counters(lookups: Lookups) -> tuple[int, int] | None:
    """Return the cache's own counters; ``None`` if it has none, or if a plug-in fails to read them."""
    try:
        return lookups.counters()
    except FAILURES:
        return None


class Tracer:
    """Watches one run: made before it starts, queried after it has ended."""

    def __init__(self, stack: LayerSet, folder: Path, *, explain: bool = False, here: bool = False) -> None:
        self._stack = stack
        self._folder = folder
        self._lookups = {layer.name: part for layer in stack if (part := part_of(layer, "lookups")) is not None}
        self._before = {layer.name: self._list_entries(layer) for layer in stack}
        self._counted = {name: _counters(part) for name, part in self._lookups.items()}
        self._known = list(_entries(stack)) if explain else []
        self._explain = explain
        files = ((layer, part.files) for layer in stack if (part := self._lookups.get(layer.name)) and part.files)
        self._entry_events = EntryEvents(files, Members(folder / "events", here=here))
        self._seen: dict[str, Seen] = {}
        self._began = Clock()
        self.site.mkdir()
        (folder / "events").mkdir()
        self._descendants = Descendants(
            folder / "events",
            ((sign, name) for name, part in self._lookups.items() for sign in part.mapped),
            ((sign, name) for name, part in self._lookups.items() for sign in part.opened),
        )
        observer = Path(__file__).with_name("observer.py")
        (self.site / "cachectl_observer.py").write_bytes(observer.read_bytes())
        (self.site / "sitecustomize.py").write_text(_SITE)
        (self.site / TABLE).write_text(json.dumps(self._table()))
        # Each process of the run would compile them.
        for path in self.site.glob("*.py"):
            with suppress(OSError):
                py_compile.compile(str(path), doraise=False)

    def _table(self) -> dict[str, object]:
        """Copy the layers' files into the site folder, and return the observer's table."""
        copies: dict[Path, str] = {}

        def copied(file: Path) -> str:
            if file not in copies:
                copies[file] = f"cachectl_watch_{len(copies)}.py"
                (self.site / copies[file]).write_bytes(file.read_bytes())
            return copies[file]

        parts = self._lookups.items()
        watchers = {(module, copied(file)) for _, part in parts for module, file in part.watchers.items()}
        return {
            "calls": [{"layer": name, **asdict(call)} for name, part in parts for call in part.calls],
            "watchers": sorted(watchers),
            "imports": sorted({package for _, part in parts for package in part.imports}),
            "listeners": {
                platform: (name, copied(file)) for name, part in parts for platform, file in part.listeners.items()
            },
        }

    @property
    def site(self) -> Path:
        """The folder of modules that each Python of the run finds first."""
        return self._folder / "site"

    @property
    def events_folder(self) -> Path:
        """The folder in which the processes of the run note their events."""
        return self._folder / "events"

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look from outside, during the block, for processes that cannot be watched from inside."""
        with looked_after(self._descendants), self.watching_entries():
            yield

    @contextmanager
    def watching_entries(self) -> Iterator[None]:
        """Watch the files of entries during the block."""
        try:
            with self._entry_events.watching():
                # Preparations are no part of the timeline.
                self._began = Clock()
                yield
        finally:
            self._seen = self._entry_events.seen()

    def variables(self, environment: Environment) -> dict[str, str]:
        """Return the variables that make a child and its children watched, by an outer trace too."""
        put = {_FOLDER: self.events_folder, "PYTHONPATH": self.site}
        joined = {name: os.pathsep.join(filter(None, [str(path), environment.get(name)])) for name, path in put.items()}
        return joined | {name: value for part in self._lookups.values() for name, value in part.variables.items()}

    def ended(self, command: Sequence[str], status: int | None, wall: float) -> Trace:
        """Return what the run did."""
        noted = read_events(self.events_folder)
        events = noted.events
        unwatched = self._unwatched()
        after = {layer.name: self._list_entries(layer) for layer in self._stack if layer.name in self._seen}
        used = {layer.name: self._used(layer, after[layer.name]) for layer in self._stack if layer.name in self._seen}
        entries = tuple(entry for layer in used.values() for entry in layer)
        completed = with_files(events, entries)
        timeline = self._timeline(command, wall, completed)
        layers = tuple(
            _judged(
                layer,
                self._by_files(layer, used.get(layer.name, ()), after.get(layer.name), completed)
                or _bounded(self._layer(layer, events), unwatched, noted.unread),
            )
            for layer in self._stack
        )
        return Trace(
            tuple(command),
            status,
            wall,
            layers,
            tuple(_kernels(completed)),
            (*self._misses(events), *self._misses_by_files(entries)) if self._explain else None,
            entries,
            unwatched,
            _rebuilt(completed),
            tuple(f"{line}, and was left alone" for line in _misfits(events).values()),
            # The process ended in the build, and so did not pass it on itself.
            b"".join(map(self._other_output, messages_after(self.events_folder, events))),
            timeline,
            None if timeline is None else summarize(timeline),
        )

    def _timeline(self, command: Sequence[str], wall: float, events: Sequence[Mapping[str, Any]]) -> Timeline | None:
        def weigh(layer: str, path: str) -> int | None:
            part = self._lookups.get(layer)
            return None if part is None else part.weigh(path)

        def compilations(layer: str, path: str) -> tuple[Compilation, ...]:
            part = self._lookups.get(layer)
            return () if part is None else part.compilations(path)

        known = DriverFacts(self._layer_of, weigh, compilations)
        found = read_timeline(command, self._began, wall, events, known)
        return found if found.processes else None

    def _unwatched(self) -> tuple[Unwatched, ...]:
        found: dict[str, set[str]] = {}
        for one in self._descendants.unwatched():
            found.setdefault(one.command, set()).update(one.uses)
        return tuple(
            Unwatched(command, tuple(layer.name for layer in self._stack if layer.name in uses))
            for command, uses in found.items()
        )

    def _other_output(self, heard: bytes) -> bytes:
        for part in self._lookups.values():
            heard = part.other_output(heard)
        return heard

    # ------------------------------------------------------------------ layers

    def _used(self, layer: Layer, after: Mapping[str, Listed] | None) -> tuple[EntryTrace, ...]:
        return tuple(entries_used(layer, self._seen[layer.name], self._before[layer.name] or {}, after or {}))

    def _by_files(
        self,
        layer: Layer,
        used: Sequence[EntryTrace],
        after: Mapping[str, Listed] | None,
        events: Sequence[Mapping[str, Any]],
    ) -> LayerTrace | None:
        """Return what the files of a layer's entries showed; ``None`` if they could not be watched at all."""
        lookups, before, seen = self._lookups.get(layer.name), self._before[layer.name], self._seen.get(layer.name)
        if lookups is None or lookups.files is None or seen is None or seen.blind:
            return None
        if layer.scope is not Scope.SYSTEM and (before is None or after is None):
            return None
        silent = tuple(_silent(layer, used, events))
        numbers = count(seen, used, before or {}, after or {}, lookups, silent=silent)
        evidence = EXACT if numbers.exact else INFERRED
        return LayerTrace(
            layer.name, numbers.hits, numbers.misses, numbers.stores, numbers.bytes, evidence, numbers.why
        )

    def _layer(self, layer: Layer, events: Sequence[Mapping[str, Any]]) -> LayerTrace:
        watched = any(event["event"] == "started" for event in events)
        misfits = _misfits(events)
        lookups = self._lookups.get(layer.name)
        modules = set() if lookups is None else _modules(lookups)
        if unfit := [misfits[module] for module in sorted(modules & misfits.keys())]:
            return LayerTrace(layer.name, None, None, None, None, NONE, unfit[0])
        if lookups is not None and modules and watched:
            own = [event for event in events if event["event"] in _COUNTED and self._owns(layer.name, event)]
            return _counted(layer.name, own, f"{lookups.by} in each Python of the run that could be watched")
        if lookups is not None and lookups.listeners and _is_heard(layer.name, events):
            own = [event for event in events if event["event"] == "messages" and event["layer"] == layer.name]
            return _heard(layer.name, lookups, own)
        return self._inferred(layer, lookups or Lookups())

    def _owns(self, name: str, event: Mapping[str, Any]) -> bool:
        part = self._lookups.get(name)
        return part is not None and event["layer"] == (part.family or name) and part.owns(event)

    def _inferred(self, layer: Layer, lookups: Lookups) -> LayerTrace:
        if _modules(lookups):
            why = (
                "no Python of the run could be watched (it had none, was started with -I or -S, or has other releases)"
            )
            return LayerTrace(layer.name, None, None, None, None, NONE, why)
        before, after = self._before[layer.name], self._list_entries(layer)
        if before is None or after is None:
            why = "it is only read, which leaves no trace" if layer.scope is Scope.SYSTEM else "it cannot be listed"
            return LayerTrace(layer.name, None, None, None, None, NONE, why)
        if not before and not after and not lookups.keeps_use:
            return LayerTrace(layer.name, None, None, None, None, NONE, "it keeps no entry, and no lookup shows")
        new = after.keys() - before.keys()
        used = [entry.used for key, entry in after.items() if key in before and entry.used is not None]
        hits = sum(moment >= self._began.epoch / 1e9 for moment in used) if used or lookups.keeps_use else None
        total = sum(after[key].bytes for key in new)
        if (counted := _counters(lookups)) is not None:
            first = self._counted[layer.name] or (0, 0)
            why = f"{lookups.by}; other programs on the same cache are counted too"
            # The counters may have been reset in the run.
            hits, misses = (now - then if now >= then else None for now, then in zip(counted, first, strict=True))
            return LayerTrace(layer.name, hits, misses, len(new), total, INFERRED, why)
        why = "entries that appeared, and times of use; other programs on the same cache are counted too"
        return LayerTrace(layer.name, hits, None, len(new), total, INFERRED, why)

    def _list_entries(self, layer: Layer) -> dict[str, Listed] | None:
        """List the entries of a layer; return ``None`` if it is watched, or read only, or cannot be listed."""
        part = self._lookups.get(layer.name)
        if layer.scope is Scope.SYSTEM or (part is not None and _modules(part)):
            return None
        try:
            seen: dict[str, Listed] = {}
            for root in layer.roots():
                for found in layer.scan(root, contents=False):
                    if isinstance(found, Entry):
                        seen[f"{root.path}/{found.key}"] = Listed(found.bytes, found.used, found.guest is not None)
        except FAILURES:
            return None
        return seen

    # ------------------------------------------------------------------ misses

    def _misses(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Miss]:
        built: list[Mapping[str, Any]] = []
        for event in events:
            compiled = event["event"] == "build" and event.get("compiled")
            if event["event"] == "miss" or compiled:
                layer = str(event.get("driver")) if compiled else self._layer_of(event)
                kernels = tuple(event.get("kernels") or ())
                because = _other_build(event, built) or self._because(layer, kernels, event)
                part = (self._lookups.get(layer) or Lookups()).part_of(event)
                yield Miss(layer, kernels, because, part)
            if event["event"] == "build":
                built.append(event)

    def _misses_by_files(self, entries: Iterable[EntryTrace]) -> Iterator[Miss]:
        """Yield the misses that show by what was stored after them."""
        for entry in entries:
            if entry.stores or entry.broken:
                because = "its entry is damaged"
                if any((known.layer, known.key) == (entry.layer, entry.key) for known in self._known):
                    because = "its entry was there before, and was damaged or removed"
                elif not entry.broken:
                    event = {"root": entry.root, "key": entry.key, "device": entry.device}
                    because = self._because(entry.layer, entry.kernels or (), event)
                yield Miss(entry.layer, entry.kernels or (), because)

    def _layer_of(self, event: Mapping[str, Any]) -> str:
        owners = (layer.name for layer in self._stack if self._owns(layer.name, event))
        return next(owners, str(event["layer"]))

    def _because(self, layer: str, kernels: tuple[str, ...], event: Mapping[str, Any]) -> str:
        """Return the nearest entry that was there before the run, and what differs."""
        lookups = self._lookups.get(layer) or Lookups()
        alike = [
            entry
            for entry in self._known
            if entry.layer == layer and set(kernels) & set(entry.kernels or ()) and lookups.is_alike(entry, event)
        ]
        if not alike:
            nameless = sum(entry.layer == layer and entry.kernels is None for entry in self._known)
            if nameless:
                return f"no entry like it is known; {nameless} have no known kernel name"
            return "cold: no entry like it"
        dead = next((entry for entry in alike if entry.stale), None)
        if dead is not None and all(entry.stale for entry in alike):
            return f"an entry of the same kernel is there, but {dead.stale_because}"
        return lookups.difference(alike, event)


def _other_build(event: Mapping[str, Any], built: Sequence[Mapping[str, Any]]) -> str | None:
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


def _entries(stack: LayerSet) -> Iterator[Entry]:
    for layer in stack:
        with suppress(*FAILURES):
            yield from layer.entries()


def _modules(lookups: Lookups) -> set[str]:
    """Return the modules that must be watched for a layer's numbers to be exact."""
    return {*lookups.modules, *(call.module for call in lookups.calls)}


def _judged(layer: Layer, counted: LayerTrace) -> LayerTrace:
    """Add why a layer took no part. What was counted counts more: a program may switch a layer itself."""
    with suppress(*FAILURES):
        state = layer.state()
        if state.condition is Condition.DISABLED:
            return counted if counted.hits else replace(counted, state="disabled", state_why=state.why)
        if state.condition is Condition.BYPASSED:
            used = counted.hits or counted.misses or counted.stores
            return counted if used else replace(counted, state="bypassed", state_why=state.why)
        if state.condition in (Condition.ENABLED, Condition.UNKNOWN) and layer.when_closed and not counted.stores:
            for root in layer.roots():
                because = closed_because(root.path, "new entry") if root.scope is Scope.USER else None
                if because is not None:
                    return replace(counted, state="closed", state_why=f"{root.path}: {because}")
    return counted


def _misfits(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the libraries that are not as their watchers expect them, each with what is wrong."""
    failed = (event for event in events if event["event"] == "failed")
    return {event["library"]: f"{event['library']} cannot be watched ({event.get('error')})" for event in failed}


def _counted(name: str, events: Sequence[Mapping[str, Any]], why: str) -> LayerTrace:
    counts = Counter(str(event["event"]) for event in events)
    sizes = [event["bytes"] for event in events if isinstance(event.get("bytes"), int)]
    total = sum(sizes) if len(sizes) == counts["store"] else None
    return LayerTrace(name, counts["hit"], counts["miss"], counts["store"], total, EXACT, why)


def _heard(name: str, lookups: Lookups, events: Sequence[Mapping[str, Any]]) -> LayerTrace:
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


def _is_heard(name: str, events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a driver was heard in each of its builds."""
    builds = [event for event in events if event["event"] == "build" and event.get("driver") == name]
    return bool(builds) and all(event.get("heard") for event in builds)


def _bounded(counted: LayerTrace, unwatched: Iterable[Unwatched], unread: Sequence[str]) -> LayerTrace:
    """Turn exact numbers into lower bounds if a process could not be watched, or its notes could not be read."""
    commands = [one.command for one in unwatched if counted.layer in one.layers]
    if counted.evidence != EXACT or not (commands or unread):
        return counted
    watching = [f"could not watch {', '.join(commands)}"] * bool(commands)
    reading = [f"could not read {', '.join(unread)}"] * bool(unread)
    why = f"{counted.why}; a lower bound: {' and '.join(watching + reading)}"
    return replace(counted, evidence=INFERRED, why=why)


# ---------------------------------------------------------------------- kernels


def with_files(events: Sequence[Mapping[str, Any]], entries: Sequence[EntryTrace]) -> list[Mapping[str, Any]]:
    """Return the events, with what the files of entries say of builds whose driver says nothing."""
    silent = [at for at, event in enumerate(events) if _is_silent(event) and event.get("binary") != "hit"]
    found = list(events)
    for place, (layer, compiled) in served([events[at] for at in silent], entries).items():
        found[silent[place]] = {**events[silent[place]], "driver": layer, "compiled": compiled, "by_files": True}
    return found


def _is_silent(event: Mapping[str, Any]) -> bool:
    return event["event"] == "build" and not event.get("driver")


def _silent(layer: Layer, used: Sequence[EntryTrace], events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why misses of a layer may have stored nothing, and so do not show."""
    with suppress(*FAILURES):
        state = layer.state()
        if state.condition is Condition.DISABLED:
            yield f"it is off ({state.why}), so that no lookup shows"
    builds = [event for event in events if _is_silent(event) or event.get("by_files")]
    if used and any(event["failed"] for event in builds):
        yield "a build failed, which stores nothing, so that its misses do not show"
    tagging = part_of(layer, "tagging")
    platforms = () if tagging is None else tagging.platforms
    named = all(entry.kernels for entry in used)
    lost = (event for event in builds if _is_silent(event) and event.get("binary") != "hit" and not event["failed"])
    if named and any(event.get("platform") in platforms and event.get("kernels") for event in lost):
        yield "a build used no entry, so that it may have missed and stored nothing"


def _kernels(events: Iterable[Mapping[str, Any]]) -> Iterator[KernelTrace]:
    for event in events:
        if event["event"] == "build":
            binary = event.get("binary") == "hit"
            compiled = False if binary else event.get("compiled")
            by = None
            if compiled is False and not event.get("failed"):
                by = event["layer"] if binary else event.get("driver")
            yield KernelTrace(tuple(event.get("kernels") or ()), by, compiled, float(event["seconds"]))


def _rebuilt(events: Iterable[Mapping[str, Any]]) -> tuple[Rebuilt, ...]:
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for event in events:
        if event["event"] == "build" and event.get("kernels"):
            program = *map(event.get, ("pid", "kind", "source", "options")), *event.get("devices", ())
            alike.setdefault(program, []).append(event)
    found = [
        Rebuilt(tuple(builds[0]["kernels"]), len(builds), sum(float(build["seconds"]) for build in builds[1:]))
        for builds in alike.values()
        if len(builds) > 1
    ]
    return tuple(sorted(found, key=lambda one: -one.seconds))


# ---------------------------------------------------------------------- in this process


#: A second block would watch and count the replacements of the first.
_ONE: Final = threading.Lock()


@contextmanager
def traced() -> Iterator[Traced]:
    """Count the cache lookups of a block, in this process and the children it starts.

    The numbers are there when the block has ended, however it ends. Only one block of a process is traced at a time; a
    second one raises :class:`BadRequest`.
    """
    from cachectl.layer_set import LayerSet
    from cachectl.switching.isolated import isolated_root

    if not _ONE.acquire(blocking=False):
        raise BadRequest("another block of this process is being traced")
    try:
        result = Traced()
        stack = LayerSet()
        with isolated_root(stack.environment) as folder:
            tracer = Tracer(stack, folder, here=True)
            started = time.perf_counter()
            try:
                with tracer.watching_entries(), _watching(tracer):
                    yield result
            finally:
                done = tracer.ended((), None, time.perf_counter() - started)
                result.layers, result.kernels = done.layers, done.kernels or ()
                result.timeline, result.summary = done.timeline, done.summary
                for line in done.misfits:
                    warnings.warn(f"trace: {line}", RuntimeWarning, stacklevel=4)
    finally:
        _ONE.release()


@contextmanager
def _watching(tracer: Tracer) -> Iterator[None]:
    from cachectl.layers.base.environment import Environment
    from cachectl.observing.observer import observe

    changes = tracer.variables(Environment.here())
    before = {name: process_variable(name) for name in changes}
    for name, wanted in changes.items():
        set_process_variable(name, wanted)
    notes = observe(str(tracer.events_folder), str(tracer.site))
    try:
        yield
    finally:
        notes.stop()
        for name, value in before.items():
            set_process_variable(name, value)
