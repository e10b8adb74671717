"""Two timelines compared: which kernels became cold or warm, and which stage became slower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from cachectl.layers.base.as_json import AsJson
from cachectl.observing.summary import summarize
from cachectl.observing.timeline import STAGES, Timeline

COLD: Final = "cold"
WARM: Final = "warm"


@dataclass(frozen=True, slots=True)
class StageChange:
    """The seconds of one stage in the two runs, without the stages inside."""

    stage: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class KernelChange:
    """A kernel whose state differs: ``cold`` if a lookup missed, ``warm`` if all hit, ``None`` if there was none.

    ``layers`` are those in which its lookups missed in one run alone. Seconds are those of all stages.
    """

    kernel: str
    before: str | None
    after: str | None
    layers: tuple[str, ...]
    seconds_before: float
    seconds_after: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two timelines: every stage, and the kernels whose state differs."""

    before: str
    after: str
    wall_before: float
    wall_after: float
    stages: tuple[StageChange, ...]
    kernels: tuple[KernelChange, ...]
    #: How many kernels are as they were.
    unchanged: int
    as_json: ClassVar[AsJson] = AsJson("cachectl/compare/1")


@dataclass(frozen=True, slots=True)
class _Kernel:
    state: str | None
    missed: frozenset[str]
    seconds: float


_ABSENT: Final = _Kernel(None, frozenset(), 0.0)


def compare(before: Timeline, after: Timeline, names: tuple[str, str] = ("before", "after")) -> Comparison:
    """Compare two timelines; ``names`` are what to call them."""
    stages = [{one.stage: one.seconds for one in summarize(timeline).stages} for timeline in (before, after)]
    old, new = _kernels(before), _kernels(after)
    changes = [
        KernelChange(
            name,
            was.state,
            now.state,
            tuple(sorted(was.missed ^ now.missed)),
            was.seconds,
            now.seconds,
        )
        for name in sorted(old.keys() | new.keys())
        if (was := old.get(name, _ABSENT)).state != (now := new.get(name, _ABSENT)).state or was.missed != now.missed
    ]
    return Comparison(
        *names,
        before.wall_seconds,
        after.wall_seconds,
        tuple(
            StageChange(stage, stages[0].get(stage, 0.0), stages[1].get(stage, 0.0))
            for stage in STAGES
            if any(stage in times for times in stages)
        ),
        tuple(changes),
        len(old.keys() | new.keys()) - len(changes),
    )


def _kernels(timeline: Timeline) -> dict[str, _Kernel]:
    outcomes: dict[str, set[str]] = {}
    missed: dict[str, set[str]] = {}
    seconds: dict[str, float] = {}
    for span, own, kernel in timeline.own():
        if kernel is None:
            continue
        seconds[kernel] = seconds.get(kernel, 0.0) + own
        outcomes.setdefault(kernel, set())
        if span.outcome in ("hit", "miss"):
            outcomes[kernel].add(span.outcome)
        if span.outcome == "miss" and span.layer is not None:
            missed.setdefault(kernel, set()).add(span.layer)
    return {
        name: _Kernel(
            None if not found else COLD if "miss" in found else WARM,
            frozenset(missed.get(name, ())),
            seconds[name],
        )
        for name, found in outcomes.items()
    }
