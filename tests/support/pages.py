"""Timelines and reports of long use, made of numbers, and names that try to leave a page."""

import json
from collections.abc import Iterator
from pathlib import Path

from cachectl.layers.core.entry import Entry, Usage
from cachectl.layers.core.finding import Finding, Severity
from cachectl.layers.core.root import Condition, Root, Scope, State
from cachectl.layers.formats.details import Details
from cachectl.listing import Listing
from cachectl.verbs.report import LayerReport, Report, RootReport, total_of
from cachectl.watching.timeline import Span, Trace

#: Names that try to leave the place where a page shows them.
HOSTILE = (
    "</script><script>document.title = 'taken'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "]]>'\"&amp;`${document.title='taken'}`",
    "line\u2028separator\u2029paragraph",
    "right\u202eto left",
    "undecodable\udcff",
    "null\0byte\x1b[31m",
    "https://example.org/kernel.js",
    "__proto__",
    "constructor",
)

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
    for module in MODULES:
        yield Span(process, process, "import", f"import {module}", now, 0.5)
        now += 0.5
    for number, name in enumerate(names):
        # Each kernel takes another time: lookups, and the work and the stores that a miss costs.
        unit, warm = 0.001 * (1 + number * 7 % 11), number % 3 == 0
        outcome = "hit" if warm else "miss"
        steps: list[tuple[str, str | None, float, str | None]] = [("lookup", "loopy", unit, outcome)]
        steps += [] if warm else [(stage, None, 20 * unit, None) for stage in ("preprocess", "schedule", "codegen")]
        steps += [("lookup", "pocl", unit, outcome)]
        steps += [] if warm else [("compile", "pocl", 90 * unit, outcome), ("store", "pocl", unit, "store")]
        for stage, layer, seconds, result in (*steps, ("launch", None, 6 * unit, None)):
            yield Span(process, process, stage, f"{layer} {stage}", now, seconds, layer, name, result)
            now += seconds


NOW = 1_790_000_000.0
HOME = Path("/home/ada/.cache")
#: Layers with their share of the entries, and the typical bytes of one.
LAYERS = {"loopy": (0.5, 9_000), "pyopencl-invoker": (0.15, 1_500), "pocl": (0.25, 48_000), "cuda": (0.1, 120_000)}


def make_report(count: int = 3000) -> tuple[Report, Listing, tuple[Finding, ...]]:
    """Return a report of so many entries, the entries, and the findings: stale entries, and a damaged one."""
    names = kernel_names(max(10, count // 20))
    listing = Listing(tuple(entry for layer in LAYERS for entry in _entries(layer, count, names)), ())
    report = Report(NOW, tuple(_layer(layer, listing.entries) for layer in LAYERS))
    damaged = next(entry for entry in listing.entries if entry.layer == "pocl")
    fix, message = f"cachectl purge pocl --key {damaged.key}", f"{damaged.key}/parallel.so: is cut short at 100 bytes"
    wasted = "entries of Python 3.9, which no known Python can hit"
    findings = (
        Finding("loopy", HOME / "pytools", None, Severity.WASTES, "stale", wasted, "cachectl prune --stale loopy"),
        Finding("pocl", damaged.root, damaged.key, Severity.FAILS, "elf", message, fix, damaged),
    )
    return report, listing, findings


def _entries(layer: str, count: int, names: list[str]) -> Iterator[Entry]:
    share, size = LAYERS[layer]
    for number in range(round(count * share)):
        written = NOW - 86400 * (1 + number * 37 % 200)
        details = Details((names[number * 31 % len(names)],))
        entry = Entry(layer, f"{number * 7919:040x}", HOME / layer, size * (1 + number * 13 % 19) // 8, 1)
        if layer in ("loopy", "pyopencl-invoker"):
            details = details._replace(versions={"python": "3.9.2"})
            yield entry._replace(written_before=written, details=details, stale=number % 7 == 0)
        else:
            details = details._replace(device="NVIDIA H200")
            yield entry._replace(modified=written, used=written + 3600, details=details)


def _layer(layer: str, entries: tuple[Entry, ...]) -> LayerReport:
    own = [entry for entry in entries if entry.layer == layer]
    stale = [entry for entry in own if entry.stale]
    usage = Usage(
        entries=len(own),
        files=len(own),
        bytes=sum(entry.bytes for entry in own),
        orphan_files=2,
        orphan_bytes=4096,
        stale_entries=len(stale),
        stale_bytes=sum(entry.bytes for entry in stale),
    )
    root = RootReport(Root(HOME / layer, Scope.USER, "the default"), exists=True, usage=usage)
    state = State(Condition.ENABLED, "on by default")
    return LayerReport(layer, layer, state, Scope.USER, False, (root,), (), total_of([root]))  # noqa: FBT003 - precious
