"""The summary of a timeline: seconds in each stage, the slowest kernels, and what a warm cache would save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cachectl.observing.timeline import STAGES, Timeline

#: How many of the slowest kernels are listed.
_SLOWEST: Final = 10


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
class Summary:
    """Where a start went. ``warm_saves`` are the seconds that a run with every cache filled would not take.

    Seconds of several threads and processes add up; ``warm_saves`` is that of the process which saves most.
    """

    stages: tuple[StageTime, ...]
    warm_saves: float | None
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
        None,
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
