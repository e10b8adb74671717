"""Which cache served a run: hits, misses and stores of a command and its children, layer by layer.

Programs of the run note events (:mod:`cachectl.layers.inside.observer`), the kernel reports those of files
(:mod:`cachectl.watching.events`), and processes are looked at from outside (:mod:`cachectl.watching.programs`).
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
from typing import ClassVar

from cachectl.layer_set import LayerSet
from cachectl.layers import core
from cachectl.layers.inside import observer
from cachectl.switching import child, overlay
from cachectl.watching import evidence, programs
from cachectl.watching import timeline as timelines
from cachectl.watching.events import EntryEvents

_FOLDER = "CACHECTL_TRACE"
_SITE = """
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


@dataclass
class Trace:
    """A run: its command, how it ended, and what each layer did. Seconds are wall time.

    ``kernels`` are its builds; ``entries`` those that were hit or stored, of the layers whose files show it; ``misses``
    every miss, ``None`` if nobody asked for them; ``unwatched`` commands that used a cache and could not be watched;
    ``misfits`` libraries that could not be watched, a line for each; ``passed_on`` the output of C code on its error
    stream in a build that did not end. ``timeline`` is ``None`` if no process could be watched.
    """

    command: tuple[str, ...] = ()
    exit_status: int | None = None
    wall_seconds: float = 0.0
    layers: tuple[evidence.LayerTrace, ...] = ()
    kernels: tuple[KernelTrace, ...] = ()
    entries: tuple[evidence.EntryTrace, ...] = ()
    misses: tuple[evidence.Miss, ...] | None = None
    unwatched: tuple[Unwatched, ...] = ()
    misfits: tuple[str, ...] = ()
    passed_on: bytes = b""
    timeline: timelines.Timeline | None = None
    summary: timelines.Summary | None = None
    as_json: ClassVar[core.AsJson] = core.AsJson(
        "cachectl/trace/1", hidden=("misfits", "passed_on", "timeline"), optional=("misses",)
    )

    @property
    def spans(self) -> tuple[timelines.Span, ...]:
        """What the time went to."""
        return self.timeline.spans if self.timeline is not None else ()

    def __getitem__(self, name: str) -> evidence.LayerTrace:
        """Return what a layer did. Raises :class:`KeyError` for an unknown name."""
        return {layer.layer: layer for layer in self.layers}[name]


class Tracer:
    """Watches one run: made before it starts, queried after it has ended."""

    def __init__(self, stack: LayerSet, folder: Path, *, explain: bool = False) -> None:
        self._explain = explain
        #: Modules that each Python of the run finds first, and events that its processes note.
        self.site, self.notes = folder / "site", folder / "events"
        self.site.mkdir()
        self.notes.mkdir()
        self._layers = {layer.name: evidence.Evidence(layer, explain=explain) for layer in stack}
        self._parts = {name: layer.part for name, layer in self._layers.items()}
        self._entry_events = EntryEvents(seen.layer for seen in self._layers.values() if seen.part.files)
        self._processes = programs.Processes(self.notes, self._parts)
        self._began = timelines.clocks()
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

        calls: list[dict[str, object]] = []
        watchers: set[tuple[str, str]] = set()
        listeners: dict[str, tuple[str, str]] = {}
        for name, part in self._parts.items():
            calls += ({"layer": name, **asdict(call)} for call in part.calls)
            watchers.update((module, copied(file)) for module, file in part.watchers.items())
            listeners.update({platform: (name, copied(file)) for platform, file in part.listeners.items()})
        imports = sorted({package for part in self._parts.values() for package in part.imports})
        return {"calls": calls, "watchers": sorted(watchers), "imports": imports, "listeners": listeners}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the files of entries, and processes, during the block."""
        with self._entry_events.watching(), self._processes.watching():
            # Preparations are no part of the timeline.
            self._began = timelines.clocks()
            yield

    def variables(self, here: core.Environment) -> dict[str, str]:
        """Return the variables that make a child and its children watched."""
        paths = os.pathsep.join(filter(None, [str(self.site), here.get("PYTHONPATH")]))
        own = {_FOLDER: str(self.notes), "PYTHONPATH": paths}
        return own | {name: value for part in self._parts.values() for name, value in part.variables.items()}

    def ended(self, command: Sequence[str], status: int | None, wall: float) -> Trace:
        """Return what the run did."""
        noted, unread = programs.read_events(self.notes)
        unwatched, seen = self._processes.unwatched(), self._entry_events.seen()
        used = {}
        for name, layer in self._layers.items():
            layer.began, layer.unread = self._began[1] / 1e9, unread
            if name in seen:
                layer.take(*seen[name])
            layer.commands = [program for program, names in unwatched.items() if name in names]
            layer.strangers = self._processes.strangers.get(name, ())
            used[name] = tuple(layer.used())
        entries = tuple(entry for of_layer in used.values() for entry in of_layer)
        events = evidence.with_files(noted, entries)
        for layer in self._layers.values():
            layer.events = events
        timeline = timelines.read_timeline(
            command,
            self._began,
            wall,
            events,
            layer_of=lambda event: evidence.layer_of(event, self._layers),
            lookups=self._parts,
        )
        # The process ended in the build, and so did not pass it on itself.
        passed_on = b""
        for heard in programs.messages_after(self.notes, noted):
            other = heard
            for part in self._parts.values():
                other = part.other_output(other)
            passed_on += other
        return Trace(
            tuple(command),
            status,
            wall,
            tuple(layer.trace(used[name]) for name, layer in self._layers.items()),
            tuple(_kernel(event) for event in events if event["event"] == "build"),
            entries,
            tuple(evidence.misses(self._layers, events, entries)) if self._explain else None,
            tuple(Unwatched(program, tuple(sorted(names))) for program, names in unwatched.items()),
            tuple(f"{line}, and was left alone" for line in evidence.misfits(events).values()),
            passed_on,
            timeline if timeline.processes else None,
            timelines.summarize(timeline) if timeline.processes else None,
        )


def _kernel(event: programs.Event) -> KernelTrace:
    is_binary = event.get("binary") == "hit"
    compiled = False if is_binary else event.get("compiled")
    served_by = None
    if compiled is False and not event["failed"]:
        served_by = event["layer"] if is_binary else event.get("driver")
    return KernelTrace(tuple(event.get("kernels") or ()), served_by, compiled, float(event["seconds"]))


# ---------------------------------------------------------------------- in this process


#: A second block would watch and count the replacements of the first.
_ONE = threading.Lock()


@contextmanager
def traced() -> Iterator[Trace]:
    """Count the cache lookups of a block, in this process and the children it starts.

    The trace is empty until the block has ended, however it ends. Only one block of a process is traced at a time; a
    second one raises :class:`BadRequest`.
    """
    if not _ONE.acquire(blocking=False):
        raise core.BadRequest("another block of this process is being traced")
    try:
        trace = Trace()
        stack = LayerSet()
        with child.isolated_root(stack.environment) as folder:
            tracer = Tracer(stack, folder)
            started = time.perf_counter()
            try:
                with tracer.watching(), _observed(tracer):
                    yield trace
            finally:
                vars(trace).update(vars(tracer.ended((), None, time.perf_counter() - started)))
                for line in trace.misfits:
                    warnings.warn(f"trace: {line}", RuntimeWarning, stacklevel=4)
    finally:
        _ONE.release()


@contextmanager
def _observed(tracer: Tracer) -> Iterator[None]:
    with overlay.applied(overlay.variables(tracer.variables(core.Environment.here()))):
        recorder = observer.observe(str(tracer.notes), str(tracer.site))
        try:
            yield
        finally:
            recorder.stop()
