"""Reports of homes that have been used for months, made of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cachectl.layers.core.facts import Condition, Entry, Finding, Root, Scope, Severity, State, Usage
from cachectl.listing import Listing
from cachectl.verbs.report import LayerReport, Report, RootReport
from support.timelines import kernel_names

NOW = 1_790_000_000.0
HOME = Path("/home/ada/.cache")
#: Layers with their share of the entries, the typical bytes of one, and what their entries are for.
LAYERS = {
    "loopy": (0.5, 9_000, ("3.12.4.final.0", "3.11.7.final.0", "3.9.2.final.0")),
    "pyopencl-invoker": (0.15, 1_500, ("3.12.4.final.0", "3.11.7.final.0")),
    "pocl": (0.25, 48_000, ("pthread-AMD EPYC 9654", "pthread-Intel Xeon Gold 6338")),
    "cuda": (0.1, 120_000, ("NVIDIA H200", "NVIDIA A100")),
}
#: The Python that is no longer there.
DEAD = "3.9.2.final.0"


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
    share, size, places = LAYERS[layer]
    for number in range(round(count * share)):
        place = places[number * number % 7 % len(places)]
        written = NOW - 86400 * (1 + number * 37 % 200)
        facts: dict[str, Any] = {"modified": written, "used": written + 3600, "device": place}
        if place.endswith("final.0"):
            facts = {"written_before": written, "versions": {"python": place}, "stale": place == DEAD}
        key, kernel = f"{number * 7919:040x}", names[number * 31 % len(names)]
        yield Entry(layer, key, HOME / layer, size * (1 + number * 13 % 19) // 8, 1, kernels=(kernel,), **facts)


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
    return LayerReport(
        layer, layer, State(Condition.ENABLED, "on by default"), Scope.USER, precious=False, roots=(root,)
    )
