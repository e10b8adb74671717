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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Final

from cachectl.layer_set import LayerSet
from cachectl.layers.base import errors
from cachectl.layers.base.environment import Environment, process_variable, set_process_variable
from cachectl.layers.base.facts import AsJson
from cachectl.layers.inside import observer
from cachectl.watching import evidence, processes
from cachectl.watching import timeline as timelines
from cachectl.watching.events import EntryEvents
from cachectl.watching.notes import Event, messages_after, read_events

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
class Unwatched:
    """A command of the run that is not counted, and the layers it was seen to use."""

    command: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A run: its command, how it ended, and what each layer did. Seconds are wall time.

    ``kernels`` are its builds; ``entries`` those that were hit or stored, of the layers whose files show it; ``misses``
    every miss, ``None`` if nobody asked for them; ``unwatched`` commands that used a cache and could not be watched;
    ``misfits`` libraries that could not be watched, a line for each; ``passed_on`` the output of C code on its error
    stream in a build that did not end. ``timeline`` is ``None`` if no process could be watched.
    """

    command: tuple[str, ...]
    exit_status: int | None
    wall_seconds: float
    layers: tuple[evidence.LayerTrace, ...]
    kernels: tuple[KernelTrace, ...]
    entries: tuple[evidence.EntryTrace, ...]
    misses: tuple[evidence.Miss, ...] | None = None
    unwatched: tuple[Unwatched, ...] = ()
    misfits: tuple[str, ...] = ()
    passed_on: bytes = b""
    timeline: timelines.Timeline | None = None
    summary: timelines.Summary | None = None
    as_json: ClassVar[AsJson] = AsJson(
        "cachectl/trace/1", hidden=("misfits", "passed_on", "timeline"), optional=("misses",)
    )


@dataclass
class Traced:
    """The result of :func:`traced`: empty until the block ends."""

    layers: tuple[evidence.LayerTrace, ...] = ()
    kernels: tuple[KernelTrace, ...] = ()
    timeline: timelines.Timeline | None = None
    summary: timelines.Summary | None = None

    @property
    def spans(self) -> tuple[timelines.Span, ...]:
        """What the time of the block went to."""
        return self.timeline.spans if self.timeline is not None else ()

    def __getitem__(self, name: str) -> evidence.LayerTrace:
        """Return what a layer did. Raises :class:`KeyError` for an unknown name."""
        return {layer.layer: layer for layer in self.layers}[name]


class Tracer:
    """Watches one run: made before it starts, queried after it has ended."""

    def __init__(self, stack: LayerSet, folder: Path, *, explain: bool = False) -> None:
        self._stack = stack
        self._explain = explain
        #: Modules that each Python of the run finds first, and events that its processes note.
        self.site, self.notes = folder / "site", folder / "events"
        self.site.mkdir()
        self.notes.mkdir()
        self._evidence = evidence.Evidence(stack, explain=explain)
        self._lookups = self._evidence.lookups
        files = ((stack[name], part.files) for name, part in self._lookups.items() if part.files)
        self._entry_events = EntryEvents(files)
        self._processes = processes.Processes(self.notes, self._lookups)
        self._began = timelines.Clock()
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
            self._began = timelines.Clock()
            yield

    def variables(self, environment: Environment) -> dict[str, str]:
        """Return the variables that make a child and its children watched."""
        paths = os.pathsep.join(filter(None, [str(self.site), environment.get("PYTHONPATH")]))
        own = {_FOLDER: str(self.notes), "PYTHONPATH": paths}
        return own | {name: value for part in self._lookups.values() for name, value in part.variables.items()}

    def ended(self, command: Sequence[str], status: int | None, wall: float) -> Trace:
        """Return what the run did."""
        seen, uses = self._evidence, self._processes.unwatched()
        events, seen.unread = read_events(self.notes)
        seen.began, seen.seen = self._began.epoch / 1e9, self._entry_events.seen()
        seen.strangers = self._processes.strangers
        seen.unwatched = {name: [command for command in uses if name in uses[command]] for name in self._lookups}
        used = {layer.name: tuple(seen.used(layer)) for layer in self._stack}
        entries = tuple(entry for of_layer in used.values() for entry in of_layer)
        seen.events = evidence.with_files(events, entries)
        timeline = timelines.read_timeline(
            command, self._began, wall, seen.events, layer_of=seen.layer_of, lookups=self._lookups
        )
        # The process ended in the build, and so did not pass it on itself.
        passed_on = b""
        for heard in messages_after(self.notes, events):
            other = heard
            for part in self._lookups.values():
                other = part.other_output(other)
            passed_on += other
        return Trace(
            tuple(command),
            status,
            wall,
            tuple(seen.of_layer(layer, used[layer.name]) for layer in self._stack),
            tuple(_kernel(event) for event in seen.events if event["event"] == "build"),
            entries,
            tuple(seen.misses(entries)) if self._explain else None,
            tuple(Unwatched(command, tuple(sorted(names))) for command, names in uses.items()),
            tuple(f"{line}, and was left alone" for line in seen.misfits.values()),
            passed_on,
            timeline if timeline.processes else None,
            timelines.summarize(timeline) if timeline.processes else None,
        )


def _kernel(event: Event) -> KernelTrace:
    binary = event.get("binary") == "hit"
    compiled = False if binary else event.get("compiled")
    by = None
    if compiled is False and not event["failed"]:
        by = event["layer"] if binary else event.get("driver")
    return KernelTrace(tuple(event.get("kernels") or ()), by, compiled, float(event["seconds"]))


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
        raise errors.BadRequest("another block of this process is being traced")
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
