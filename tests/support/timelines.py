"""Timelines like those of real programs, made of numbers, and the file format that ``trace --timeline`` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from cachectl.watching.timeline import Span, Trace

#: Kernels of a flow solver, as generated code names them.
SUBJECTS = ("mass", "momentum", "energy", "species", "gradient", "divergence", "flux", "operator", "projection")
MODULES = ("loopy", "pyopencl", "meshmode")


def kernel_names(count: int) -> list[str]:
    return [f"{SUBJECTS[number % len(SUBJECTS)]}_{number:03}" for number in range(count)]


def read_timeline_file(path: Path) -> Trace:
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
    return Trace(
        tuple(about["command"]),
        wall_seconds=about["wall_seconds"],
        started=about["started"],
        processes=about["processes"],
        spans=spans,
    )


def make_timeline(ranks: int = 4, kernels: int = 24) -> Trace:
    """Return a timeline in which each rank imports the stack and starts each kernel once; a third of them is warm."""
    processes = [
        {"process": 4000 + rank, "command": "python simulate.py", "host": "node1", "rank": rank}
        for rank in range(ranks)
    ]
    spans = [span for rank in range(ranks) for span in _process(4000 + rank, kernel_names(kernels))]
    wall, command = max(span.end for span in spans) + 0.05, ("python", "simulate.py", "--order", "3")
    return Trace(command, wall_seconds=wall, started=1_790_000_000.0, processes=processes, spans=spans)


def _process(process: int, names: list[str]) -> Iterator[Span]:
    now = 0.03
    for place, module in enumerate(MODULES):
        yield Span(process, process, "import", f"import {module}", now, 0.4 + place / 10)
        now += 0.4 + place / 10
    for number, name in enumerate(names):
        # Each kernel takes another time: lookups, and the work and the stores that a miss costs.
        unit, warm, size = 0.001 * (1 + number * 7 % 11), number % 3 == 0, 4000 + number * 997 % 86_000
        outcome = "hit" if warm else "miss"
        yield Span(
            process, process, "lookup", "loopy lookup", now, unit, "loopy", name, outcome, size if warm else None
        )
        now += unit
        for stage in () if warm else ("preprocess", "schedule", "codegen"):
            yield Span(process, process, stage, stage, now, 20 * unit, None, name)
            now += 20 * unit
        build = unit if warm else 90 * unit
        yield Span(process, process, "build", "Program.build", now, build + 2 * unit, "pyopencl-invoker", name)
        yield Span(process, process, "lookup", "pocl lookup", now, unit, "pocl", name, outcome)
        if not warm:
            # The driver compiles work groups in a thread of its own.
            for thread, what in enumerate(("clang", "work group")):
                yield Span(process, process + thread, "compile", what, now + unit, build - unit, "pocl", name)
            yield Span(process, process, "store", "pocl store", now + build, unit, "pocl", name, "store", size)
        now += build + 2 * unit
        yield Span(process, process, "launch", "first launch", now, 4 * unit, None, name)
        now += 6 * unit
