"""Which cache served a run: hits, misses and stores of a command and its children, layer by layer.

Programs of the run note events (:mod:`cachectl.layers.inside.observer`), the kernel reports those of files
(:mod:`cachectl.watching.events`), and processes are looked at from outside (:mod:`cachectl.watching.processes`).
:mod:`cachectl.watching.evidence` makes numbers of all that.
"""

from __future__ import annotations

import json
import os
import py_compile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment, process_variable, set_process_variable
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.facts import AsJson
from cachectl.layers.base.parts import Lookups
from cachectl.layers.inside import observer
from cachectl.watching import evidence
from cachectl.watching.events import EntryEvents
from cachectl.watching.evidence import EntryTrace, Event, LayerTrace, Miss
from cachectl.watching.notes import messages_after, read_events
from cachectl.watching.processes import Processes
from cachectl.watching.timeline import Clock, Span, Summary, Timeline, read_timeline, summarize

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
    #: Every build.
    kernels: tuple[KernelTrace, ...]
    #: The entries that were hit or stored, of the layers whose files show it.
    entries: tuple[EntryTrace, ...]
    #: Every miss; ``None`` if nobody asked for them.
    misses: tuple[Miss, ...] | None = None
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
        "cachectl/trace/1", hidden=("misfits", "passed_on", "timeline"), optional=("misses",)
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
        return {layer.layer: layer for layer in self.layers}[name]


class Tracer:
    """Watches one run: made before it starts, queried after it has ended."""

    def __init__(self, stack: LayerSet, folder: Path, *, explain: bool = False) -> None:
        self._stack = stack
        #: Modules that each Python of the run finds first, and events that its processes note.
        self.site, self.notes = folder / "site", folder / "events"
        self.site.mkdir()
        self.notes.mkdir()
        self._lookups = {layer.name: part for layer in stack if (part := layer.about.lookups) is not None}
        self._before = {
            layer.name: evidence.Before(evidence.list_entries(layer, part), evidence.counters_of(layer, part))
            for layer in stack
            for part in (self._lookups.get(layer.name, Lookups()),)
        }
        self._explanations = evidence.Explanations(stack, self._lookups) if explain else None
        files = ((layer, part.files) for layer in stack if (part := self._lookups.get(layer.name)) and part.files)
        self._entry_events = EntryEvents(files)
        self._processes = Processes(self.notes, self._lookups)
        self._began = Clock()
        self._make_site()

    def _make_site(self) -> None:
        (self.site / "cachectl_observer.py").write_bytes(Path(observer.__file__).read_bytes())
        (self.site / "sitecustomize.py").write_text(_SITE)
        (self.site / observer.TABLE).write_text(json.dumps(self._table()))
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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the files of entries, and processes, during the block."""
        with self._entry_events.watching(), self._processes.watching():
            # Preparations are no part of the timeline.
            self._began = Clock()
            yield

    def variables(self, environment: Environment) -> dict[str, str]:
        """Return the variables that make a child and its children watched, by an outer trace too."""
        put = {_FOLDER: self.notes, "PYTHONPATH": self.site}
        joined = {name: os.pathsep.join(filter(None, [str(path), environment.get(name)])) for name, path in put.items()}
        return joined | {name: value for part in self._lookups.values() for name, value in part.variables.items()}

    def ended(self, command: Sequence[str], status: int | None, wall: float) -> Trace:
        """Return what the run did."""
        noted = read_events(self.notes)
        unwatched = tuple(self._unwatched())
        seen = evidence.Evidence(
            self._began.epoch / 1e9,
            self._before,
            self._lookups,
            noted.events,
            self._entry_events.seen(),
            {name: [program.command for program in unwatched if name in program.layers] for name in self._lookups},
            self._processes.strangers,
            noted.unread,
        )
        used = {layer.name: tuple(seen.used(layer)) for layer in self._stack}
        entries = tuple(entry for of_layer in used.values() for entry in of_layer)
        events = evidence.with_files(noted.events, entries)
        completed = replace(seen, events=events)
        timeline = read_timeline(command, self._began, wall, events, layer_of=seen.layer_of, lookups=self._lookups)
        return Trace(
            tuple(command),
            status,
            wall,
            tuple(completed.of_layer(layer, used[layer.name]) for layer in self._stack),
            tuple(_kernels(events)),
            entries,
            None if self._explanations is None else tuple(self._explanations.misses(seen, entries)),
            unwatched,
            _rebuilt(events),
            tuple(f"{line}, and was left alone" for line in seen.misfits.values()),
            # The process ended in the build, and so did not pass it on itself.
            b"".join(map(self._other_output, messages_after(self.notes, noted.events))),
            timeline if timeline.processes else None,
            summarize(timeline) if timeline.processes else None,
        )

    def _unwatched(self) -> Iterator[Unwatched]:
        uses: dict[str, set[str]] = {}
        for process in self._processes.unwatched():
            uses.setdefault(process.command, set()).update(process.uses)
        for command, names in uses.items():
            yield Unwatched(command, tuple(layer.name for layer in self._stack if layer.name in names))

    def _other_output(self, heard: bytes) -> bytes:
        for part in self._lookups.values():
            heard = part.other_output(heard)
        return heard


def _kernels(events: Iterable[Event]) -> Iterator[KernelTrace]:
    for event in events:
        if event["event"] == "build":
            binary = event.get("binary") == "hit"
            compiled = False if binary else event.get("compiled")
            by = None
            if compiled is False and not event.get("failed"):
                by = event["layer"] if binary else event.get("driver")
            yield KernelTrace(tuple(event.get("kernels") or ()), by, compiled, float(event["seconds"]))


def _rebuilt(events: Iterable[Event]) -> tuple[Rebuilt, ...]:
    alike: dict[tuple[Any, ...], list[Event]] = {}
    for event in events:
        if event["event"] == "build" and event.get("kernels"):
            program = *map(event.get, ("pid", "kind", "source", "options")), *event.get("devices", ())
            alike.setdefault(program, []).append(event)
    repeated = [
        Rebuilt(tuple(builds[0]["kernels"]), len(builds), sum(float(build["seconds"]) for build in builds[1:]))
        for builds in alike.values()
        if len(builds) > 1
    ]
    return tuple(sorted(repeated, key=lambda program: -program.seconds))


# ---------------------------------------------------------------------- in this process


#: A second block would watch and count the replacements of the first.
_ONE: Final = threading.Lock()


@contextmanager
def traced() -> Iterator[Traced]:
    """Count the cache lookups of a block, in this process and the children it starts.

    The numbers are there when the block has ended, however it ends. Only one block of a process is traced at a time; a
    second one raises :class:`BadRequest`.
    """
    from cachectl.switching.isolated import isolated_root

    if not _ONE.acquire(blocking=False):
        raise BadRequest("another block of this process is being traced")
    try:
        result = Traced()
        stack = LayerSet()
        with isolated_root(stack.environment) as folder:
            tracer = Tracer(stack, folder)
            started = time.perf_counter()
            try:
                with tracer.watching(), _observed(tracer):
                    yield result
            finally:
                done = tracer.ended((), None, time.perf_counter() - started)
                result.layers, result.kernels = done.layers, done.kernels
                result.timeline, result.summary = done.timeline, done.summary
                for line in done.misfits:
                    warnings.warn(f"trace: {line}", RuntimeWarning, stacklevel=4)
    finally:
        _ONE.release()


@contextmanager
def _observed(tracer: Tracer) -> Iterator[None]:
    changes = tracer.variables(Environment.here())
    before = {name: process_variable(name) for name in changes}
    for name, wanted in changes.items():
        set_process_variable(name, wanted)
    notes = observer.observe(str(tracer.notes), str(tracer.site))
    try:
        yield
    finally:
        notes.stop()
        for name, value in before.items():
            set_process_variable(name, value)
