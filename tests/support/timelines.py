"""Timelines as runs of loopy on several ranks have them, made from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachectl.watching.timeline import Process, Span, Timeline

LAYERS = ("loopy", "pyopencl-invoker", "pocl")
#: Kernels of a flow solver, as generated code names them.
SUBJECTS = ("mass", "momentum", "energy", "species", "gradient", "divergence", "flux", "operator", "projection")
WORK = ("preprocess", "schedule", "codegen")


def kernel_names(count: int) -> list[str]:
    return [f"{SUBJECTS[number % len(SUBJECTS)]}_{number:03}" for number in range(count)]


def read_timeline_file(path: Path) -> Timeline:
    """Read a file in the Chrome trace format that ``trace --timeline`` has written."""
    document = json.loads(path.read_bytes())
    about = document["otherData"]
    assert about["schema"] == "cachectl/timeline/1"
    spans = [
        Span(one["pid"], one["tid"], one["cat"], one["name"], one["ts"] / 1e6, one["dur"] / 1e6, **one["args"])
        for one in document["traceEvents"]
        if one["ph"] == "X"
    ]
    spans.sort(key=lambda span: (span.start, -span.seconds))
    processes = tuple(Process(**one) for one in about["processes"])
    return Timeline(tuple(about["command"]), about["started"], about["wall_seconds"], processes, tuple(spans))


def make_timeline(ranks: int = 4, kernels: int = 24, *, warm: float = 0.4, seed: int = 1) -> Timeline:
    """Return a timeline in which each rank imports the stack and starts each kernel once.

    ``warm`` is the share of kernels that the caches serve. A kernel has some ten spans.
    """
    chance = random.Random(seed)  # noqa: S311 - the same picture every time
    processes = tuple(Process(4000 + rank, "python simulate.py", "node1", rank) for rank in range(ranks))
    spans = tuple(span for one in processes for span in _process(one.process, kernel_names(kernels), warm, chance))
    wall = max(span.start + span.seconds for span in spans) + 0.05
    return Timeline(("python", "simulate.py", "--order", "3"), 1_790_000_000.0, wall, processes, spans)


def _process(process: int, names: list[str], warm: float, chance: random.Random) -> Iterator[Span]:
    now = chance.uniform(0.02, 0.05)
    for module in ("loopy", "pyopencl", "meshmode"):
        seconds = chance.uniform(0.2, 0.7)
        yield Span(process, process, "import", f"import {module}", now, seconds)
        now += seconds
    for name in names:
        yield from (spans := list(_kernel(process, name, now, chance.random() < warm, chance)))
        now = max(span.start + span.seconds for span in spans) + chance.uniform(0.001, 0.02)


def _kernel(process: int, name: str, begin: float, warm: bool, chance: random.Random) -> Iterator[Span]:
    """Yield the spans of a kernel: lookups, and the work and the stores that a miss costs."""

    def span(stage: str, what: str, start: float, seconds: float, layer: int | None = None, **more: Any) -> Span:  # noqa: ANN401 - of each type
        return Span(
            process, process, stage, what, start, seconds, None if layer is None else LAYERS[layer], name, **more
        )

    now, size = begin, chance.randint(4_000, 90_000)
    scale = chance.lognormvariate(0, 0.8)
    looked = 0.002 * scale
    outcome = "hit" if warm else "miss"
    yield span("lookup", "loopy lookup", now, looked, 0, outcome=outcome, bytes=size if warm else None)
    now += looked
    for stage in () if warm else WORK:
        seconds = chance.uniform(0.02, 0.08) * scale
        yield span(stage, stage, now, seconds)
        now += seconds
    compiled = (0.01 if warm else chance.uniform(0.05, 0.3)) * scale
    yield span("build", "Program.build", now, compiled + 4 * looked, 1)
    yield span("lookup", "pocl lookup", now + looked, looked, 2, outcome=outcome)
    if not warm:
        yield (compile_ := span("compile", "clang", now + 2 * looked, compiled, 2))
        # The driver compiles work groups in a thread of its own.
        yield replace(compile_, thread=process + 1, name="work group", seconds=compiled * 0.8)
        yield span("store", "pocl store", now + 2 * looked + compiled, looked, 2, outcome="store", bytes=size)
    now += compiled + 4 * looked
    yield span("launch", "first launch", now, 0.004 * scale)
