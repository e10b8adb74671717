"""Reports of homes that have been used for months, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from cachectl.layers.base.facts import Condition, Entry, Finding, Root, Scope, Severity, State, Usage
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


def make_report(count: int = 3000, seed: int = 1) -> tuple[Report, Listing, tuple[Finding, ...]]:
    """Return a report of so many entries, the entries, and the findings: stale entries, and a damaged one."""
    chance = random.Random(seed)  # noqa: S311 - the same picture every time
    names = kernel_names(max(10, count // 20))
    listing = Listing(tuple(entry for layer in LAYERS for entry in _entries(layer, count, names, chance)), ())
    report = Report(NOW, tuple(_layer(layer, listing.entries) for layer in LAYERS))
    damaged = next(entry for entry in listing.entries if entry.layer == "pocl")
    fix = f"cachectl purge pocl --key {damaged.key}"
    message = f"{damaged.key}/parallel.so: is cut short at 100 bytes"
    wasted = "entries of Python 3.9, which no known Python can hit"
    findings = (
        Finding("loopy", HOME / "pytools", None, Severity.WASTES, "stale", wasted, "cachectl prune --stale loopy"),
        Finding("pocl", damaged.root, damaged.key, Severity.FAILS, "elf", message, fix, damaged),
    )
    return report, listing, findings


def _entries(layer: str, count: int, names: list[str], chance: random.Random) -> Iterator[Entry]:
    share, size, places = LAYERS[layer]
    for _ in range(round(count * share)):
        place = chance.choices(places, weights=range(len(places), 0, -1))[0]
        written = NOW - chance.lognormvariate(13.5, 1.8)
        python = place.endswith("final.0")
        yield Entry(
            layer,
            f"{chance.getrandbits(160):040x}",
            HOME / layer,
            round(size * chance.lognormvariate(0, 1)),
            1,
            modified=None if python else written,
            used=None if python else min(NOW, written + chance.expovariate(1e-5)),
            written_before=written if python else None,
            kernels=(chance.choice(names),),
            device=None if python else place,
            versions={"python": place} if python else {},
            stale=place == DEAD,
            stale_because="Python 3.9.2 was removed" if place == DEAD else None,
        )


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
