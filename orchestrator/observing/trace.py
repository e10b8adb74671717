"""Which cache served a run: hits, misses and stores of a command and its children, layer by layer.

Inside Python the libraries are watched (:mod:`cachectl.observing.observer`), and PoCL reports by its own messages:
these numbers are exact, whatever other programs do on the same caches. Where there is no Python, the marks of a layer
are compared: entries that have appeared, and times of use. A process that used a cache and could not be watched is
named (:mod:`cachectl.observing.descendants`), and the numbers of the others are then a lower bound.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.environment import process_variable, set_process_variable
from cachectl.layers.base.errors import FAILURES, BadRequest
from cachectl.layers.base.facts import Entry, Scope
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.neo import NeoCompilerCache
from cachectl.layers.pytools import PytoolsDictionaries
from cachectl.observing.descendants import Descendants, looked_after
from cachectl.observing.observer import POCL, Messages
from cachectl.observing.trace_events import messages_after, read_events

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

EXACT: Final = "exact"
INFERRED: Final = "inferred"
NONE: Final = "none"
_FOLDER: Final = "CACHECTL_TRACE"
_SITE: Final = """
import os, sys

def observe():
    try:
        import cachectl_observer
        cachectl_observer.observe(os.environ["CACHECTL_TRACE"])
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
    """What one layer did in a run; ``None`` is unknown. ``evidence`` is exact, inferred or none, ``why`` says how."""

    layer: str
    hits: int | None
    misses: int | None
    stores: int | None
    bytes: int | None
    evidence: str
    why: str


@dataclass(frozen=True, slots=True)
class KernelTrace:
    """One build: its kernels, the layer that served it, whether it was compiled, and the seconds it took.

    Where neither is known, as with a driver that tells nothing, both are ``None``.
    """

    kernels: tuple[str, ...]
    served_by: str | None
    compiled: bool | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Miss:
    """One lookup that found nothing, and why, as far as keys can be read."""

    layer: str
    kernels: tuple[str, ...]
    because: str


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
    #: Commands that used a cache and could not be watched, with the layers they used.
    unwatched: tuple[Unwatched, ...] = ()
    #: What C code of the run printed to its error stream meanwhile, PoCL's own messages apart.
    passed_on: bytes = b""
    as_json: ClassVar = AsJson("cachectl/trace/1", hidden=("passed_on",), optional=("kernels", "misses"))


@dataclass
class Traced:
    """What :func:`traced` yields: empty until the block ends."""

    layers: tuple[LayerTrace, ...] = ()
    kernels: tuple[KernelTrace, ...] = ()

    def __getitem__(self, name: str) -> LayerTrace:
        """Return what a layer did. Raises :class:`KeyError` for a name that none has."""
        found = {layer.layer: layer for layer in self.layers}
        return found[name]


@dataclass(frozen=True, slots=True)
class _Mark:
    """One entry before or after a run: its bytes, and when it was used."""

    bytes: int
    used: float | None


def trace(
    stack: LayerSet,
    command: Sequence[str],
    *,
    kernels: bool = False,
    explain: bool = False,
    notice: Callable[[str], None],
) -> Trace:
    """Run a command and return what each layer did; with ``kernels`` every build too, with ``explain`` every miss.

    ``notice`` gets a line for each thing that went wrong with the scratch folder. Raises
    :class:`~cachectl.switching.run.CannotStart`.
    """
    from cachectl.switching import run as child
    from cachectl.switching.isolated import scratch_folder

    with child.signals_held() as signals, scratch_folder(stack.environment, notice=notice) as folder:
        tracer = Tracer(stack, folder, explain=explain)
        started = time.perf_counter()
        with tracer.looking():
            status = child.run(command, tracer.variables(stack.environment), stack.environment, signals)
        done = tracer.ended(command, status, time.perf_counter() - started)
    return done if kernels else replace(done, kernels=None)


class Tracer:
    """Watches one run: made before it starts, asked after it has ended."""

    def __init__(self, stack: LayerSet, folder: Path, *, explain: bool = False) -> None:
        self._stack = stack
        self._folder = folder
        self._before = {layer.name: _marks(layer) for layer in stack}
        self._counted = {layer.name: _counters(layer) for layer in stack}
        self._known = list(_entries(stack)) if explain else []
        self._explain = explain
        self._started = time.time()
        (folder / "site").mkdir()
        (folder / "events").mkdir()
        self._descendants = Descendants(folder / "events")
        observer = Path(__file__).with_name("observer.py")
        (folder / "site" / "cachectl_observer.py").write_bytes(observer.read_bytes())
        (folder / "site" / "sitecustomize.py").write_text(_SITE)

    @property
    def events_folder(self) -> Path:
        """Where the processes of the run note what they do."""
        return self._folder / "events"

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look from outside, while the block runs, for processes that cannot be watched from inside."""
        with looked_after(self._descendants):
            yield

    def variables(self, environment: Environment) -> dict[str, str]:
        """Return what a child must be told to be watched, and its children with it, beside a trace it is part of."""
        put = {_FOLDER: self.events_folder, "PYTHONPATH": self._folder / "site"}
        joined = {name: os.pathsep.join(filter(None, [str(path), environment.get(name)])) for name, path in put.items()}
        # Intel's driver then counts; nothing else changes, its keys least of all.
        return {**joined, "NEO_CACHE_STATS": "1"}

    def ended(self, command: Sequence[str], status: int | None, wall: float) -> Trace:
        """Say what the run did."""
        noted = read_events(self.events_folder)
        events = noted.events
        unwatched = self._unwatched()
        layers = tuple(_bounded(self._layer(layer, events), unwatched, noted.unread) for layer in self._stack)
        return Trace(
            tuple(command),
            status,
            wall,
            layers,
            tuple(_kernels(events)),
            tuple(self._misses(events)) if self._explain else None,
            unwatched,
            # C code printed this in a build in which its process ended, and could not pass it on itself.
            b"".join(Messages(text).others for text in messages_after(self.events_folder, events)),
        )

    def _unwatched(self) -> tuple[Unwatched, ...]:
        found: dict[str, set[str]] = {}
        for one in self._descendants.unwatched():
            found.setdefault(one.command, set()).update(one.uses)
        return tuple(Unwatched(command, tuple(self._named(uses))) for command, uses in found.items())

    def _named(self, uses: set[str]) -> Iterator[str]:
        for layer in self._stack:
            kind = "pytools" if isinstance(layer, PytoolsDictionaries) else layer.name
            if kind in uses:
                yield layer.name

    # ------------------------------------------------------------------ layers

    def _layer(self, layer: Layer, events: Sequence[Mapping[str, Any]]) -> LayerTrace:
        watched = any(event["event"] == "started" for event in events)
        failed = {event.get("library") for event in events if event["event"] == "failed"}
        if isinstance(layer, PytoolsDictionaries) and watched and "pytools.persistent_dict" not in failed:
            own = [event for event in events if event.get("layer") == "pytools" and _owns(layer, event)]
            return _counted(layer.name, own, "pytools in each Python of the run that could be watched")
        if layer.name == "pyopencl" and watched and "pyopencl.cache" not in failed:
            own = [event for event in events if event.get("layer") == "pyopencl"]
            return _counted(layer.name, own, "PyOpenCL in each Python of the run that could be watched")
        if layer.name == "pocl" and _is_heard(events):
            return _told(layer.name, [event for event in events if event["event"] == "pocl"])
        return self._inferred(layer, watched=watched)

    def _inferred(self, layer: Layer, *, watched: bool) -> LayerTrace:
        if isinstance(layer, PytoolsDictionaries) or layer.name == "pyopencl":
            why = (
                "no Python of the run could be watched (it had none, was started with -I or -S, or has other releases)"
            )
            return LayerTrace(layer.name, None, None, None, None, NONE, why)
        before, after = self._before[layer.name], _marks(layer)
        if before is None or after is None:
            why = "it is only read, which leaves no mark" if layer.scope is Scope.SYSTEM else "it cannot be listed"
            return LayerTrace(layer.name, None, None, None, None, NONE, why)
        if not before and not after and layer.name != "pocl":
            return LayerTrace(layer.name, None, None, None, None, NONE, "it keeps no entry, and no lookup shows")
        new = after.keys() - before.keys()
        used = [mark.used for key, mark in after.items() if key in before and mark.used is not None]
        hits = sum(moment >= self._started for moment in used) if used or layer.name == "pocl" else None
        if watched and layer.name == "pocl" and not new and not hits:
            hits = 0
        total = sum(after[key].bytes for key in new)
        if (counted := _counters(layer)) is not None:
            first = self._counted[layer.name] or (0, 0)
            why = "the driver's own counters; other programs on the same cache are counted too"
            # Somebody may have set them back meanwhile.
            hits, misses = (now - then if now >= then else None for now, then in zip(counted, first, strict=True))
            return LayerTrace(layer.name, hits, misses, len(new), total, INFERRED, why)
        why = "entries that appeared, and times of use; other programs on the same cache are counted too"
        return LayerTrace(layer.name, hits, None, len(new), total, INFERRED, why)

    # ------------------------------------------------------------------ misses

    def _misses(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Miss]:
        built: list[Mapping[str, Any]] = []
        for event in events:
            compiled = event["event"] == "build" and event.get("compiled")
            if event["event"] == "miss" or compiled:
                layer = "pocl" if compiled else self._layer_of(event)
                kernels = tuple(event.get("kernels") or ())
                yield Miss(layer, kernels, _other_build(event, built) or self._because(layer, kernels, event))
            if event["event"] == "build":
                built.append(event)

    def _layer_of(self, event: Mapping[str, Any]) -> str:
        if event["layer"] != "pytools":
            return str(event["layer"])
        dictionaries = (layer for layer in self._stack if isinstance(layer, PytoolsDictionaries))
        return next((layer.name for layer in dictionaries if _owns(layer, event)), "pytools")

    def _because(self, layer: str, kernels: tuple[str, ...], event: Mapping[str, Any]) -> str:
        """Name the nearest entry that was there before the run, and what differs."""
        dictionary = event.get("dictionary")
        alike = [
            entry
            for entry in self._known
            if entry.layer == layer
            and set(kernels) & set(entry.kernels or ())
            and (dictionary is None or _generation_free(entry.detail.get("dictionary")) == _generation_free(dictionary))
        ]
        if not alike:
            nameless = sum(entry.layer == layer and entry.kernels is None for entry in self._known)
            if nameless:
                return f"no entry like it is known; {nameless} do not name their kernels"
            return "cold: no entry like it"
        dead = next((entry for entry in alike if entry.stale), None)
        if dead is not None and all(entry.stale for entry in alike):
            return f"an entry of the same kernel is there, but {dead.stale_because}"
        if layer == "pyopencl":
            same = any(_source_digest(entry) == event.get("source") for entry in alike)
            differs = "build options, include path, device or driver differ" if same else "its source is another"
            return f"an entry of the same {'source' if same else 'kernel'} is there, but {differs}"
        if layer == "pocl":
            return "a program with this kernel is there, but its source, build options or device differ"
        return "an entry of the same kernel is there, but the kernel itself, its types or its target differ"


def _other_build(event: Mapping[str, Any], built: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what differs from an earlier build of the same source in this run, of which all is known."""
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


def _source_digest(entry: Entry) -> str | None:
    """Return the SHA-256 of the source that an entry of PyOpenCL's was built from.

    PyOpenCL adds a constant to what it builds, so that the driver's cache cannot answer (``pyopencl/cache.py``).
    """
    try:
        text = read_plain(entry.root / entry.key / "source.cl")
    except OSError:
        return None
    own = text.partition(b"\n\n__constant int pyopencl_defeat_cache_")[0].decode(errors="replace")
    return hashlib.sha256(own.encode(errors="replace")).hexdigest()


def _generation_free(identifier: object) -> str:
    """Return an identifier without the versions that loopy and PyOpenCL spell into it."""
    return re.sub(r"-v\d.*", "", str(identifier))


def _entries(stack: LayerSet) -> Iterator[Entry]:
    for layer in stack:
        with suppress(*FAILURES):
            yield from layer.entries()


def _marks(layer: Layer) -> dict[str, _Mark] | None:
    if isinstance(layer, PytoolsDictionaries) or layer.name == "pyopencl" or layer.scope is Scope.SYSTEM:
        # These are watched, or never written: listing them would cost more than the run.
        return None
    try:
        marks: dict[str, _Mark] = {}
        for root in layer.roots():
            for found in layer.scan(root, contents=False):
                if isinstance(found, Entry):
                    marks[f"{root.path}/{found.key}"] = _Mark(found.bytes, found.used)
    except FAILURES:
        return None
    return marks


def _counters(layer: Layer) -> tuple[int, int] | None:
    """Return hits and misses of a layer whose library counts them."""
    return layer.counters() if isinstance(layer, NeoCompilerCache) else None


def _owns(layer: PytoolsDictionaries, event: Mapping[str, Any]) -> bool:
    return layer.store.owns(str(event.get("dictionary") or ""))


def _counted(name: str, events: Sequence[Mapping[str, Any]], why: str) -> LayerTrace:
    counts = Counter(str(event["event"]) for event in events)
    sizes = [event["bytes"] for event in events if isinstance(event.get("bytes"), int)]
    total = sum(sizes) if len(sizes) == counts["store"] else None
    return LayerTrace(name, counts["hit"], counts["miss"], counts["store"], total, EXACT, why)


def _told(name: str, events: Sequence[Mapping[str, Any]]) -> LayerTrace:
    written = [path for event in events for path in event["wrote"]]
    lookups = [event["lookups"] for event in events]
    total = sum(_weight(Path(path)) for path in set(written))
    # With its cache off, PoCL writes what it throws away.
    stored = sum(os.path.exists(os.path.join(path, "program.bc")) for path in written)
    why = "programs, each for each of its devices, by PoCL's own messages"
    if None in lookups:
        why = f"{why}; builds that failed ran beside others, so hits are not known"
        return LayerTrace(name, None, len(written), stored, total, INFERRED, why)
    return LayerTrace(name, sum(lookups) - len(written), len(written), stored, total, EXACT, why)


def _is_heard(events: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether PoCL spoke to us in every process that built with it."""
    builds = [event for event in events if event["event"] == "build" and event.get("platform") == POCL]
    return bool(builds) and all(event.get("heard") for event in builds)


def _bounded(counted: LayerTrace, unwatched: Iterable[Unwatched], unread: Sequence[str]) -> LayerTrace:
    """Take exact numbers for lower bounds where a process of the run could not be watched, or its notes not be read."""
    commands = [one.command for one in unwatched if counted.layer in one.layers]
    if counted.evidence != EXACT or not (commands or unread):
        return counted
    watching = [f"for it could not be watched: {', '.join(commands)}"] * bool(commands)
    reading = [f"for notes of the run could not be read: {', '.join(unread)}"] * bool(unread)
    why = f"{counted.why}; at least these, {' and '.join(watching + reading)}"
    return replace(counted, evidence=INFERRED, why=why)


def _weight(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0


# ---------------------------------------------------------------------- kernels


def _kernels(events: Iterable[Mapping[str, Any]]) -> Iterator[KernelTrace]:
    for event in events:
        if event["event"] == "build":
            compiled = False if event.get("binary") == "hit" else event.get("compiled")
            served = None
            if compiled is False and not event.get("failed"):
                served = "pyopencl" if event.get("binary") == "hit" else "pocl"
            yield KernelTrace(tuple(event.get("kernels") or ()), served, compiled, float(event["seconds"]))


# ---------------------------------------------------------------------- in this process


#: A second block would watch, and count, what the first has put in place.
_ONE: Final = threading.Lock()


@contextmanager
def traced() -> Iterator[Traced]:
    """Count what a block asks of every cache, in this process and the children it starts.

    The numbers are there when the block has ended, however it ends. One block of a process is traced at a time; for a
    second one this raises :class:`BadRequest`.
    """
    from cachectl.layer_set import LayerSet
    from cachectl.switching.isolated import scratch_folder

    if not _ONE.acquire(blocking=False):
        raise BadRequest("a block of this process is being traced already")
    try:
        result = Traced()
        stack = LayerSet()
        with scratch_folder(stack.environment) as folder:
            tracer = Tracer(stack, folder)
            started = time.perf_counter()
            try:
                with _watching(tracer):
                    yield result
            finally:
                done = tracer.ended((), None, time.perf_counter() - started)
                result.layers, result.kernels = done.layers, done.kernels or ()
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
    notes = observe(str(tracer.events_folder))
    try:
        yield
    finally:
        notes.stop()
        for name, value in before.items():
            set_process_variable(name, value)
