"""What a run did, and where its time went: spans of its processes on one clock, their sums, and files of them.

Times are seconds since the trace began. They come from the monotonic clock, which all processes of a machine share.
Those of drivers come from the time of day. Spans of processes on other machines are excluded.

Files are in the Chrome trace format, which Perfetto and ``about:tracing`` open, or one HTML page. Source: "Trace Event
Format" (Google, 2016): complete events (``ph`` ``X``, with ``ts`` and ``dur`` in microseconds) and metadata events
(``M``). Viewers ignore the keys of ``otherData``, which has what the format has no place for.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cachectl.layers.base.documents import encode_json
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.core.json_form import as_json
from cachectl.layers.core.parts import Lookups
from cachectl.pages import PAGE
from cachectl.show import output_files
from cachectl.watching import evidence
from cachectl.watching.program_events import (
    BuildEnd,
    CacheLookup,
    CacheStore,
    CacheUse,
    DriverMessages,
    Event,
    ProcessStart,
    StageSpan,
    of_kind,
)

#: The stages of a start, in the order in which a kernel passes through them.
STAGES = (
    *("import", "driver", "create", "preprocess", "schedule", "codegen"),
    *("build", "compile", "lookup", "store", "launch"),
)
#: The name of the span of a driver's whole part of a build.
DRIVER = "driver"
SCHEMA = "cachectl/timeline/1"
#: The beginning of such a file, in any version.
_HEAD = b'{"otherData":{"schema":"cachectl/timeline/'
#: What ``trace --timeline`` may replace.
TIMELINE = output_files.Kind(
    "a timeline", lambda head: head.startswith(_HEAD) or PAGE.is_begun_by(head), is_binary=False
)
#: The fields of a span that are arguments of its event.
_ARGUMENTS = ("kernel", "layer", "outcome", "bytes")


class Span(NamedTuple):
    """One stretch of work of a thread: its stage, what it worked on, and when, in seconds.

    ``outcome`` is ``hit``, ``miss`` or ``store``, and ``None`` for work that is no lookup. Spans of a thread nest: the
    time of a stage is that of its spans without the spans inside them.
    """

    process: int
    thread: int
    stage: str
    name: str
    start: float
    seconds: float
    layer: str | None = None
    kernel: str | None = None
    outcome: str | None = None
    bytes: int | None = None

    @property
    def end(self) -> float:
        """Return when it ended."""
        return self.start + self.seconds


class StageTime(NamedTuple):
    """Seconds of all threads in one stage, without the stages inside; ``hit`` and ``missed`` are parts of them."""

    stage: str
    seconds: float
    hit: float
    missed: float


class Summary(NamedTuple):
    """Where a start went. Seconds of several threads and processes add up in ``stages``.

    ``own`` are the seconds in which no thread was in any stage: the program's own. ``missed`` are those that misses
    took, from a lookup to the end of its store, in the thread in which they took most: processes and threads of a run
    wait for each other. ``at_least`` is true if neither a driver nor its cache showed whether it compiled, so that this
    is excluded.
    """

    stages: tuple[StageTime, ...]
    own: float
    missed: float
    at_least: bool


class MissedKernel(NamedTuple):
    """A kernel of which lookups missed, in which layers, the seconds that it took (as ``missed``), and why.

    ``diff`` has the lines of its source that differ from the last traced run, in the unified format, if it is known.
    """

    kernel: str
    seconds: float
    layers: tuple[str, ...]
    because: str
    diff: str | None = None


class KernelTrace(NamedTuple):
    """One build: its kernels, the layer that served it, whether it was compiled, and the seconds it took.

    ``served_by`` and ``compiled`` are ``None`` if they are unknown, as with a driver that does not report.
    """

    kernels: tuple[str, ...]
    served_by: str | None
    compiled: bool | None
    seconds: float


@as_json("cachectl/trace/1", hidden=("passed_on", "started", "processes", "spans", "late"))
@dataclass(frozen=True)
class Trace:
    """A run: its command, how it ended, and what each layer did. Seconds are wall time.

    ``kernels`` are its builds; ``entries`` those that were hit or stored, of the layers whose files show it;
    ``unwatched`` commands that used a cache and could not be watched, with the ``layers`` that each was seen to use;
    ``passed_on`` the output of C code on its error stream in a build that did not end; ``started`` when the run did, in
    epoch seconds; ``processes`` those that were watched (:func:`read_processes`); and ``spans`` what their time went
    to. ``summary`` is ``None`` if there was none. ``verdict`` says in a sentence or two what the run lost to misses,
    and why; ``missed`` are the kernels that it lost it to, those that took most first. ``late`` has by layer what was
    compiled into entries at a launch. ``warm`` says whether every lookup hit and nothing was compiled or stored;
    ``None`` if that is unknown.
    """

    command: tuple[str, ...] = ()
    exit_status: int | None = None
    wall_seconds: float = 0.0
    layers: tuple[evidence.LayerTrace, ...] = ()
    kernels: tuple[KernelTrace, ...] = ()
    entries: tuple[evidence.EntryTrace, ...] = ()
    unwatched: tuple[Mapping[str, str | tuple[str, ...]], ...] = ()
    passed_on: bytes = b""
    started: float = 0.0
    processes: Sequence[Mapping[str, Any]] = ()
    spans: Sequence[Span] = ()
    summary: Summary | None = None
    verdict: str = ""
    warm: bool | None = None
    late: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    missed: tuple[MissedKernel, ...] = ()

    def __repr__(self) -> str:
        return f"Trace({self.verdict!r})"

    def __getitem__(self, name: str) -> evidence.LayerTrace:
        """Return what a layer did. Raises :class:`KeyError` for an unknown name."""
        return {layer.layer: layer for layer in self.layers}[name]


#: Seconds that a run may take longer than its command: processes that outlive it.
_SLACK = 1.0


def read_processes(events: Iterable[Event]) -> list[Mapping[str, Any]]:
    """Return the processes that were watched: number, command, host, and ``rank`` in an MPI job, if any."""
    started = {process.pid: process for process in of_kind(events, ProcessStart)}
    processes = [
        {"process": pid, "command": " ".join(process.program), "host": process.host, "rank": process.rank}
        for pid, process in started.items()
    ]
    return sorted(processes, key=lambda process: (process["rank"] is None, process["rank"] or 0, process["process"]))


def read_spans(
    events: Sequence[Event], began: tuple[int, int], wall: float, lookups: Mapping[str, Lookups]
) -> list[Span]:
    """Return the spans of a run from the events of its processes, each process's in their order.

    ``began`` is when it did, in nanoseconds, by the monotonic clock and since the epoch. ``lookups`` of layers know
    what drivers have stored.
    """
    monotonic = began[0]
    latest = monotonic + (wall + _SLACK) * 1e9
    started = {process.pid for process in of_kind(events, ProcessStart)}
    spans: list[Span] = []
    #: What a driver has said that it stored. It says so just before a build ends.
    stored: Sequence[str] = ()
    #: Kernels that were compiled after the build of their program, by process and name; they start at the end.
    later: dict[tuple[int, str], list[Span]] = {}
    for event in events:
        if isinstance(event, DriverMessages) and event.pid in started:
            stored = event.wrote
        if not isinstance(event, CacheUse | StageSpan) or event.pid not in started:
            continue
        # A program can write any event, and other machines have other clocks.
        if not monotonic <= event.when.start <= event.when.end <= latest:
            continue
        times = (event.when.start - monotonic) / 1e9, event.when.seconds
        span = Span(event.pid, event.when.thread, "", "", *times, kernel=" ".join(event.kernels) or None)
        match event:
            case StageSpan() if event.stage in STAGES:
                span = span._replace(stage=event.stage, name=event.name)
                spans += [span, *(_compiled_in(span, later) if event.stage == "launch" else ())]
            case BuildEnd():
                name, outcome = event.inputs.kind or "build", event.binary or None
                spans.append(span._replace(stage="build", name=name, layer=event.layer, outcome=outcome))
                part = lookups.get(event.driver, Lookups())
                paths = stored if event.compiled and not event.failed else ()
                compilations = [(part.weigh(path), *times) for path in paths for times in part.compilations(path)]
                spans += _driver_spans(event, span, compilations, began, later)
                stored = ()
            case CacheLookup() | CacheStore():
                span = span._replace(name=event.dictionary or event.key or event.layer, layer=event.layer)
                if isinstance(event, CacheStore):
                    spans.append(span._replace(stage="store", outcome="store", bytes=event.bytes))
                else:
                    spans.append(span._replace(stage="lookup", outcome=event.outcome))
    return sorted(spans, key=lambda span: (span.start, -span.seconds))


def _compiled_in(launch: Span, later: Mapping[tuple[int, str], list[Span]]) -> Iterator[Span]:
    """Yield what the driver compiled in a launch, or a wait, since a kernel was launched."""
    begun = launch.start
    names = {(launch.process, name) for name in (launch.kernel or "").split()}
    ended = [span for name in names for span in later.get(name, ()) if begun < span.start <= launch.end]
    for span in sorted(ended, key=lambda span: span.start):
        yield span._replace(thread=launch.thread, start=begun, seconds=span.start - begun)
        begun = span.start
        # It is part of the innermost such span, which is noted first.
        later[span.process, span.kernel or ""].remove(span)


def _driver_spans(
    build: BuildEnd,
    span: Span,
    compilations: Iterable[tuple[int | None, str | None, float | None, float]],
    began: tuple[int, int],
    later: dict[tuple[int, str], list[Span]],
) -> Iterator[Span]:
    """Yield the spans of the driver in a build: one that missed looks up, compiles, and loads; one that failed, none.

    A failure is neither a hit nor a miss, so its time stays that of the build. ``compilations`` begin with the bytes of
    what was stored.
    """
    if build.failed:
        return
    compiled = build.was_compiled
    outcome = None if compiled is None else "miss" if compiled else "hit"
    span = span._replace(stage="compile", layer=build.driver or None, outcome=outcome)
    for begin, until in build.compiles:
        driver = span._replace(name=DRIVER, start=(begin - began[0]) / 1e9, seconds=(until - begin) / 1e9)
        inside = []
        for size, kernel, begun, ended in compilations:
            end = ended - began[1] / 1e9
            start = end if begun is None else begun - began[1] / 1e9
            compiler = span._replace(name="compiler", start=start, seconds=end - start)
            if begun is None:
                later.setdefault((span.process, kernel or ""), []).append(compiler._replace(kernel=kernel))
            elif driver.start <= start < end <= driver.end:
                inside.append(compiler._replace(bytes=size))
        is_known = compiled is False or bool(inside)
        yield driver._replace(stage="lookup") if is_known else driver
        yield from inside


# ---------------------------------------------------------------------- sums


def own_times(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """Return each span with its seconds without the spans inside it.

    Spans must be in order: by start, longer ones first.
    """
    seconds = [span.seconds for span in spans]
    open_spans: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        around = open_spans[span.process, span.thread]
        while around and spans[around[-1]].end <= span.start:
            around.pop()
        if around:
            # Parts of spans that overlap without nesting count once, in the later one.
            seconds[around[-1]] -= min(span.end, spans[around[-1]].end) - span.start
        around.append(index)
    return [(span, max(0.0, own)) for span, own in zip(spans, seconds, strict=True)]


def summarize(spans: Sequence[Span], wall: float) -> Summary:
    """Sum spans up, which must be in order; ``wall`` are the seconds of the run."""
    times: dict[tuple[str, str | None], float] = defaultdict(float)
    totals: dict[str, float] = defaultdict(float)
    for span, seconds in own_times(spans):
        times[span.stage, span.outcome] += seconds
        totals[span.stage] += seconds
    stages = [stage for stage in STAGES if totals[stage]]
    return Summary(
        tuple(StageTime(stage, totals[stage], times[stage, "hit"], times[stage, "miss"]) for stage in stages),
        max(0.0, wall - covered(spans)),
        max(covered_by_thread(missed_work(spans)), default=0.0),
        any(span.stage == "compile" and span.outcome is None for span in spans),
    )


def covered_by_thread(spans: Iterable[Span]) -> list[float]:
    """Return the seconds of each thread that lie in at least one of its spans."""
    threads: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        threads[span.process, span.thread].append(span)
    return list(map(covered, threads.values()))


def missed_work(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield each lookup that missed, also up to the end of its store in the same thread, and each compilation.

    Spans must be in order. They may overlap.
    """
    waiting: dict[tuple[object, ...], list[Span]] = {}
    for span in spans:
        lookup = (span.process, span.thread, span.layer, span.name, span.kernel)
        if span.outcome == "miss":
            yield span
            if span.stage == "lookup":
                waiting.setdefault(lookup, []).append(span)
        elif span.stage == "store" and waiting.get(lookup):
            missed = waiting[lookup].pop()
            yield missed._replace(seconds=span.end - missed.start)


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds that lie in at least one of some spans."""
    seconds, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        seconds += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return seconds


# ---------------------------------------------------------------------- files


def check(name: str) -> None:
    """Raise :class:`BadRequest` if the name of a file does not say its form."""
    if not name.endswith((".json", ".html")):
        message = f"{name!r}: the name of a timeline ends in .json (Chrome trace format) or .html (a page)"
        raise BadRequest(message)


def encode(trace: Trace, name: str) -> bytes:
    """Return the file of a run's timeline, in the form that its name says, which :func:`check` has seen."""
    if name.endswith(".html"):
        return page(trace)
    metadata: list[dict[str, object]] = []
    for index, process in enumerate(trace.processes):
        rank = process["rank"]
        title = process["command"] if rank is None else f"rank {rank}: {process['command']}"
        for kind, arguments in (("process_name", {"name": title}), ("process_sort_index", {"sort_index": index})):
            metadata.append({"name": kind, "ph": "M", "pid": process["process"], "args": arguments})
    spans = (
        {
            "name": span.name,
            "cat": span.stage,
            "ph": "X",
            "ts": round(span.start * 1e6, 3),
            "dur": round(span.seconds * 1e6, 3),
            "pid": span.process,
            "tid": span.thread,
            "args": {name: value for name in _ARGUMENTS if (value := getattr(span, name)) is not None},
        }
        for span in trace.spans
    )
    document = {
        # The first bytes say that cachectl wrote it.
        "otherData": {
            "schema": SCHEMA,
            "command": trace.command,
            "started": trace.started,
            "wall_seconds": trace.wall_seconds,
            "processes": trace.processes,
        },
        "displayTimeUnit": "ms",
        "traceEvents": [*metadata, *spans],
    }
    return encode_json(document, separators=(",", ":")) + b"\n"


def page(trace: Trace) -> bytes:
    """Return one HTML page with all spans. It requests nothing, so it can be sent and kept as a file."""
    from cachectl.pages import build_page, numbered

    words, spans = numbered(), []
    for span in trace.spans:
        # Texts are written once, and spans have their numbers; seconds are rounded to nanoseconds.
        texts = (span.stage, span.name, span.layer, span.kernel, span.outcome)
        numbers = [None if text is None else words[text] for text in texts]
        spans.append([span.process, span.thread, *numbers, round(span.start, 9), round(span.seconds, 9), span.bytes])
    data = {
        "command": shlex.join(trace.command),
        "verdict": trace.verdict,
        "missed": [
            [kernel.kernel, kernel.seconds, ", ".join(kernel.layers), kernel.because, kernel.diff or ""]
            for kernel in trace.missed
        ],
        "started": trace.started,
        "wall": trace.wall_seconds,
        "stages": list(STAGES),
        "processes": [[*process.values()] for process in trace.processes],
        "spans": spans,
        "words": list(words),
    }
    return build_page("timeline", "cachectl trace: timeline", data)
