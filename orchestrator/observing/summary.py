"""The summary of a timeline: seconds in each stage, the slowest kernels, and what a warm cache would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cachectl.observing.timeline import DRIVER, STAGES, Span, Timeline

#: How many of the slowest kernels are listed.
_SLOWEST: Final = 10
#: How much longer it takes to read a value than to store it: pytools loads a pickle of many objects, which takes twice
#: the time of writing it (measured with loopy 2025.2 on CPython 3.11).
_READ_PER_STORE: Final = 2.0
#: What a driver's hit takes of the time in which it compiles the same program (measured with CUDA 13 on an H200, where
#: the 8 programs of loopy's kernels took 366 ms and 16 ms). Where compiling is timed within the driver, its lookup is
#: timed too.
_HIT_PER_BUILD: Final = 0.04


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of all threads in one stage, without the stages inside; ``hit`` and ``missed`` are parts of them."""

    stage: str
    seconds: float
    hit: float
    missed: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of all stages of one kernel, and its slowest one.

    ``warm`` is whether all its lookups hit, ``None`` if there was none.
    """

    kernel: str
    seconds: float
    slowest_stage: str
    warm: bool | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """How long the same run would take with every cache filled, and how much less that is, in seconds.

    ``at_least`` is true if neither a driver nor its cache showed whether it compiled, so that this is left out.
    """

    seconds: float
    saves: float
    at_least: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """Where a start went, and what a warm one would save. Seconds of several threads and processes add up."""

    stages: tuple[StageTime, ...]
    warm: Forecast
    slowest: tuple[KernelTime, ...]


@dataclass
class _Kernel:
    by_stage: dict[str, float] = field(default_factory=dict)
    outcomes: set[str] = field(default_factory=set)


def summarize(timeline: Timeline) -> Summary:
    """Sum a timeline up."""
    stages = {stage: [0.0, 0.0, 0.0] for stage in STAGES}
    found: dict[str, _Kernel] = {}
    for span, seconds, kernel in timeline.own():
        times = stages[span.stage]
        times[0] += seconds
        times[1] += seconds * (span.outcome == "hit")
        times[2] += seconds * (span.outcome == "miss")
        if kernel is not None:
            one = found.setdefault(kernel, _Kernel())
            one.by_stage[span.stage] = one.by_stage.get(span.stage, 0.0) + seconds
            one.outcomes.update({span.outcome} & {"hit", "miss"} if span.outcome else ())
    slowest = sorted(found.items(), key=lambda item: -sum(item[1].by_stage.values()))
    return Summary(
        tuple(StageTime(stage, *times) for stage, times in stages.items() if times[0]),
        _forecast(timeline),
        tuple(
            KernelTime(
                name,
                sum(one.by_stage.values()),
                max(one.by_stage, key=one.by_stage.__getitem__),
                None if not one.outcomes else "miss" not in one.outcomes,
            )
            for name, one in slowest[:_SLOWEST]
        ),
    )


def _forecast(timeline: Timeline) -> Forecast:
    """Return what a run would take without the work between misses and their stores, and without compilations.

    The thread that saves most decides: processes and threads of a run wait for each other.
    """
    by_thread: dict[tuple[int, int], list[Span]] = {}
    for span in timeline.spans:
        by_thread.setdefault((span.process, span.thread), []).append(span)
    saves = max(map(_saved, by_thread.values()), default=0.0)
    unknown = any(span.stage == "compile" and span.outcome is None for span in timeline.spans)
    return Forecast(max(0.0, timeline.wall_seconds - saves), saves, unknown)


def _saved(spans: Sequence[Span]) -> float:
    """Return the seconds that one thread would save."""
    missed: dict[tuple[str | None, str, str | None], list[Span]] = {}
    work: list[tuple[float, float, float]] = []
    for span in spans:
        end = span.start + span.seconds
        lookup = (span.layer, span.name, span.kernel)
        if span.stage == "compile" and span.outcome == "miss":
            work.append((span.start, end, _HIT_PER_BUILD * span.seconds * (span.name == DRIVER)))
        elif span.stage == "lookup" and span.outcome == "miss":
            missed.setdefault(lookup, []).append(span)
        elif span.stage == "store" and missed.get(lookup):
            miss = missed[lookup].pop()
            work.append((miss.start + miss.seconds, end, _READ_PER_STORE * span.seconds))
    saved, until = 0.0, 0.0
    for start, end, read in sorted(work, key=lambda one: (one[0], -one[1])):
        if end > until:
            # Lookups inside are not made if that around them hits.
            saved += end - max(start, until) - (read if start >= until else 0.0)
            until = end
    return max(0.0, saved)
