"""Where the time of a run went: spans of its processes and threads, on one clock.

Times are seconds since the trace began. They come from the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from cachectl.layers.base.as_json import AsJson

#: The stages of a start, in the order in which a kernel passes through them.
STAGES: Final = ("import", "preprocess", "schedule", "codegen", "build", "compile", "lookup", "store", "launch")


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
    as_json: ClassVar[AsJson] = AsJson("cachectl/timeline/1")
