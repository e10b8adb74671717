"""Where the time of a run went: spans of its processes and threads, on one clock.

Times are seconds since the trace began. They come from the monotonic clock, which all processes of a machine share.
Each process notes both its clocks when it starts, so that those of other machines are aligned by the time of day.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from cachectl.layers.base.as_json import AsJson

#: The stages of a start, in the order in which a kernel passes through them.
STAGES: Final = (
    *("import", "driver", "create", "preprocess", "schedule", "codegen"),
    *("build", "compile", "lookup", "store", "launch"),
)


@dataclass(frozen=True, slots=True)
class Span:
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


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run; ``rank`` is its number in an MPI job, if it has one."""

    process: int
    command: str
    host: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of a run. ``started`` is when the trace began, in epoch seconds."""

    command: tuple[str, ...]
    started: float
    wall_seconds: float
    processes: tuple[Process, ...]
    spans: tuple[Span, ...]
    as_json: ClassVar = AsJson("cachectl/timeline/1")

    def own(self) -> Iterator[tuple[Span, float, str | None]]:
        """Yield each span with its seconds without the spans inside it, and its kernel, or that of a span around."""
        outer = parents(self.spans)
        return zip(self.spans, self_seconds(self.spans), kernels_of(self.spans, outer), strict=True)


@dataclass(frozen=True, slots=True)
class Clock:
    """One moment by both clocks of a machine, in nanoseconds."""

    monotonic: int = field(default_factory=time.monotonic_ns)
    epoch: int = field(default_factory=time.time_ns)
    host: str = field(default_factory=platform.node)

    def shift(self, other: Clock) -> int:
        """Return what to subtract from a time of another process's monotonic clock so that it counts from here."""
        apart = (other.epoch - other.monotonic) - (self.epoch - self.monotonic)
        if self.host == other.host and abs(apart) < _SAME_CLOCK:
            return self.monotonic
        return self.monotonic - apart


#: Nanoseconds by which the two clocks of a machine may drift apart in a run, as the time of day is set.
_SAME_CLOCK: Final = 10_000_000_000
_Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Telling:
    """What layers say of events: the layer that an event belongs to, and the bytes of a file that a driver stored."""

    layer: Callable[[_Event], str]
    weigh: Callable[[str, str], int | None]


def read_timeline(
    command: Sequence[str], began: Clock, wall: float, events: Sequence[_Event], telling: Telling
) -> Timeline:
    """Return the timeline of a run from the events of its processes, each process's in their order."""
    processes: dict[int, Process] = {}
    shifts: dict[int, int] = {}
    for event in events:
        if event["event"] == "started":
            pid, host = event["pid"], event.get("host", "")
            processes[pid] = Process(pid, " ".join(event.get("program") or ()), host, event.get("rank"))
            shifts[pid] = began.monotonic
            if "monotonic" in event and "epoch" in event:
                shifts[pid] = began.shift(Clock(event["monotonic"], event["epoch"], host))
    spans = [
        span
        for event, stored in _with_stores(events)
        if event["pid"] in shifts and event.get("start", 0) <= event.get("end", -1)
        for span in _spans(event, shifts[event["pid"]], telling, stored)
    ]
    spans.sort(key=lambda span: (span.start, -span.seconds))
    in_order = sorted(processes.values(), key=lambda one: (math.inf if one.rank is None else one.rank, one.process))
    return Timeline(tuple(command), began.epoch / 1e9, wall, tuple(in_order), tuple(spans))


def _with_stores(events: Iterable[_Event]) -> Iterator[tuple[_Event, Sequence[str]]]:
    """Yield each event with what a driver said in it that it had stored: it says so just before a build ends."""
    said: Sequence[str] = ()
    for event in events:
        if event["event"] == "messages":
            said = event["wrote"]
            continue
        yield event, said
        if event["event"] == "build":
            said = ()


def _spans(event: _Event, shift: int, telling: Telling, stored: Sequence[str]) -> Iterator[Span]:
    """Yield the spans that an event tells of."""
    kind = event["event"]

    def span(stage: str, name: str, when: Sequence[int], layer: str | None = None, outcome: str | None = None) -> Span:
        start, seconds = (when[0] - shift) / 1e9, (when[1] - when[0]) / 1e9
        kernel = " ".join(event.get("kernels") or ()) or None
        return Span(event["pid"], event.get("thread", 0), stage, name, start, seconds, layer, kernel, outcome)

    whole = (event["start"], event["end"])
    if kind == "span":
        yield span(event["stage"], event["name"], whole)
    elif kind in _LOOKUPS:
        name = event.get("dictionary") or event.get("key") or event["layer"]
        found = span("store" if kind == "store" else "lookup", name, whole, telling.layer(event), kind)
        yield replace(found, bytes=event.get("bytes"))
    elif kind == "build":
        compiled, driver = event.get("compiled"), event.get("driver")
        outcome = _OUTCOMES[compiled]
        yield span("build", event["kind"], whole, event["layer"], event.get("binary"))
        sizes = [telling.weigh(driver, path) for path in stored] if driver else []
        total = sum(size or 0 for size in sizes) if compiled and sizes else None
        for pair in event.get("compiles", ()):
            found = span("lookup" if compiled is False else "compile", "driver", pair, driver, outcome)
            yield replace(found, bytes=total)


_LOOKUPS: Final = frozenset({"hit", "miss", "store"})
#: The outcome of a driver's lookup by whether it compiled.
_OUTCOMES: Final = {True: "miss", False: "hit", None: None}


def self_seconds(spans: Sequence[Span]) -> list[float]:
    """Return the seconds of each span without those of the spans inside it.

    Spans must be in the order of a timeline: by start, longer ones first.
    """
    own = [span.seconds for span in spans]
    for index, outer in enumerate(parents(spans)):
        if outer is not None:
            # Parts of spans that overlap without nesting count once, in the later one.
            inside = min(spans[index].start + spans[index].seconds, spans[outer].start + spans[outer].seconds)
            own[outer] -= inside - spans[index].start
    return [max(0.0, seconds) for seconds in own]


def parents(spans: Sequence[Span]) -> list[int | None]:
    """Return for each span the index of the innermost span of its thread that is open when it starts."""
    open_spans: dict[tuple[int, int], list[int]] = {}
    found: list[int | None] = []
    for index, span in enumerate(spans):
        stack = open_spans.setdefault((span.process, span.thread), [])
        while stack and spans[stack[-1]].start + spans[stack[-1]].seconds <= span.start:
            stack.pop()
        found.append(stack[-1] if stack else None)
        stack.append(index)
    return found


def kernels_of(spans: Sequence[Span], outer: Sequence[int | None]) -> list[str | None]:
    """Return the kernel of each span: its own, else that of the nearest span around it that has one."""
    found: list[str | None] = []
    for span, parent in zip(spans, outer, strict=True):
        found.append(span.kernel or (None if parent is None else found[parent]))
    return found
