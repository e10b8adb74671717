"""What became of each kernel in a run: what it was built from, which lookups hit or missed, and what that took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from cachectl.layers.disk import distributions
from cachectl.watching import differences, evidence, ledger, timeline
from cachectl.watching.program_events import (
    BuildEnd,
    CacheLookup,
    CacheUse,
    DriverMessages,
    Event,
    ProcessStart,
    ProcessState,
    SourceText,
    of_kind,
)


@dataclass
class KernelRun:
    """One kernel in a run: its different builds, its Python and packages, and the layers that hit it.

    ``misses`` are the layers in which it missed, with the work of that, and ``asked`` the keys of its lookups with the
    layers that missed. ``wrote`` are the paths that drivers stored, with the layers, and ``read`` those that they hit;
    ``collided`` are the layers that had its hash for another key, and ``process`` is the first in which it missed, or
    else was built. ``folders`` are those that a build named itself, by layer. ``is_linked`` says that its program was
    linked.
    """

    process: int = 0
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    builds: dict[ledger.Build, None] = field(default_factory=dict)
    hits: set[str] = field(default_factory=set)
    misses: dict[str, list[timeline.Span]] = field(default_factory=dict)
    asked: dict[str, str | None] = field(default_factory=dict)
    wrote: dict[str, str] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    collided: set[str] = field(default_factory=set)
    folders: dict[str, str] = field(default_factory=dict)
    is_linked: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        """Return what misses took in each layer, in seconds of all threads."""
        return {layer: sum(timeline.covered_by_thread(work)) for layer, work in self.misses.items()}

    @property
    def work(self) -> list[timeline.Span]:
        """Return the work of its misses in all layers."""
        return [span for work in self.misses.values() for span in work]

    @property
    def key(self) -> str:
        """Return a digest of what the kernel was built from, the same for the same builds."""
        return differences.digest(repr(sorted(build._replace(packed="") for build in self.builds)).encode())

    def add_build(self, build: BuildEnd, inputs: ledger.Build, wrote: Mapping[str, str]) -> None:
        """Add a build that succeeded, what it was made from, and the paths that its driver stored."""
        self.builds[inputs] = None
        self.wrote |= wrote
        self.is_linked |= build.inputs.kind == "link"
        if build.inputs.cache_dir:
            self.folders[build.layer] = build.inputs.cache_dir


def read_kernels(
    layers: Mapping[str, evidence.Evidence], trace: timeline.Trace, events: Sequence[Event]
) -> dict[str, KernelRun]:
    """Return what is known of each kernel of a run. Lookups that name no kernel have the name ""."""
    parts = [layer.part for layer in layers.values()]
    started = {process.pid: process for process in of_kind(events, ProcessStart)}
    kernels = _read_events(events, started, {name for part in parts for name in part.variables})
    noted = [*kernels]
    for span in trace.spans:
        if span.outcome == "hit" and span.kernel and span.layer:
            kernels[span.kernel].hits.add(span.layer)
    for span in timeline.missed_work(trace.spans):
        if span.layer:
            kernels[span.kernel or ""].misses.setdefault(span.layer, []).append(span)
    for entry, kernel in product(trace.entries, noted):
        if {*kernel.split()} & {*(entry.kernels or ())}:
            _add_entry(kernel, kernels[kernel], entry, trace)
    names = sorted({distributions.normal(name) for part in parts for name in part.packages})
    versions_in = cache(distributions.versions_in)
    for run in kernels.values():
        run.process = next((span.process for span in run.work), run.process)
        if (process := started.get(run.process)) is not None:
            versions = versions_in(process.paths)
            run.python, run.packages = process.python, {name: versions[name] for name in names if name in versions}
    return kernels


def _read_events(
    events: Sequence[Event], started: Mapping[int, ProcessStart], variables: Collection[str]
) -> defaultdict[str, KernelRun]:
    """Return what the events of programs say of each kernel; ``variables`` are those that are part of keys."""
    kernels: defaultdict[str, KernelRun] = defaultdict(KernelRun)
    texts = {source.source: source.text for source in of_kind(events, SourceText)}
    # What a process has made of its variables, and what its driver has stored since its last build.
    states: dict[int, ProcessState] = {}
    stored: dict[int, dict[str, str]] = {}
    for event in events:
        if isinstance(event, ProcessState):
            states[event.pid] = event
        elif isinstance(event, DriverMessages):
            stored[event.pid] = dict.fromkeys(event.wrote, event.layer)
        elif isinstance(event, CacheUse):
            run, layer = kernels[" ".join(event.kernels)], None
            run.process = run.process or event.pid
            if isinstance(event, CacheLookup) and event.outcome == "miss":
                layer = event.layer
                if event.collision:
                    run.collided.add(layer)
            if not isinstance(event, BuildEnd):
                if event.key:
                    run.asked.setdefault(event.key, layer)
            elif not event.failed and (process := started.get(event.pid)) is not None:
                text, state = texts.get(event.inputs.source, ""), states.get(event.pid, process)
                inputs = differences.read_build(event.inputs, text, process, state, variables)
                run.add_build(event, inputs, stored.pop(event.pid, {}))
    return kernels


def _add_entry(kernel: str, run: KernelRun, entry: evidence.EntryTrace, trace: timeline.Trace) -> None:
    path = f"{entry.root}/{entry.key}"
    if not entry.stores:
        run.read.append(path)
    else:
        run.wrote[path] = entry.layer
        # A driver may compile at the launch; else what such a miss took does not show.
        run.misses.setdefault(entry.layer, []).extend(
            span
            for span in trace.spans
            if span.stage == "launch" and {*kernel.split()} & {*(span.kernel or "").split()}
            if any(span.start <= at - trace.started <= span.end for at in entry.at)
        )
