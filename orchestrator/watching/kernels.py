"""What became of each kernel in a run: what it was built from, which lookups hit or missed, and what that took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cachectl.layers.core.parts import Lookups
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


class KernelRun(NamedTuple):
    """One kernel in a run: its builds, its Python and packages, and the layers that hit it.

    ``seconds`` are what misses took, by layer, and ``asked`` the keys of its lookups with the layers that missed.
    ``wrote`` are the paths that drivers stored, and ``read`` those that they hit; ``collided`` are the layers that had
    its hash for another key, and ``process`` is the first in which it missed, or else was built. ``folders`` are those
    that a build named itself, by layer. ``is_linked`` says that it is of a program that was linked.
    """

    builds: tuple[ledger.Build, ...] = ()
    python: str = ""
    packages: Mapping[str, str] = {}
    hits: frozenset[str] = frozenset()
    seconds: Mapping[str, float] = {}
    lost: float = 0.0
    asked: Mapping[str, str | None] = {}
    wrote: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    collided: frozenset[str] = frozenset()
    process: int = 0
    folders: Mapping[str, str] = {}
    is_linked: bool = False

    @property
    def misses(self) -> tuple[str, ...]:
        """Return the layers in which it missed."""
        return tuple(self.seconds)

    @property
    def key(self) -> str:
        """Return a digest of what the kernel was built from, the same for the same builds."""
        return differences.digest(repr(sorted(build._replace(packed="") for build in self.builds)).encode())


class _Noted:
    """What the events of programs say of each kernel, by its name."""

    def __init__(self, events: Sequence[Event], lookups: Mapping[str, Lookups]) -> None:
        self.started = {process.pid: process for process in of_kind(events, ProcessStart)}
        self.builds: dict[str, dict[ledger.Build, None]] = defaultdict(dict)
        self.asked: dict[str, dict[str, str | None]] = defaultdict(dict)
        self.folders: dict[str, dict[str, str]] = defaultdict(dict)
        self.wrote: dict[str, list[str]] = defaultdict(list)
        self.collided: dict[str, set[str]] = defaultdict(set)
        self.processes: dict[str, int] = {}
        self.linked: set[str] = set()
        self._texts = {source.source: source.text for source in of_kind(events, SourceText)}
        self._variables = {name for part in lookups.values() for name in part.variables}
        self._lookups = lookups
        #: What a process has made of its variables, and what its driver has stored since its last build.
        self._states: dict[int, ProcessState] = {}
        self._stored: dict[int, tuple[str, ...]] = {}
        for event in events:
            self._note(event)

    def _note(self, event: Event) -> None:
        if isinstance(event, ProcessState):
            self._states[event.pid] = event
        elif isinstance(event, DriverMessages):
            self._stored[event.pid] = event.wrote
        elif isinstance(event, CacheUse):
            kernel, layer = " ".join(event.kernels), None
            if isinstance(event, CacheLookup) and event.outcome == "miss":
                layer = evidence.layer_of(event.layer, event.dictionary, self._lookups)
                if event.collision:
                    self.collided[kernel].add(layer)
            if kernel:
                self.processes.setdefault(kernel, event.pid)
                if isinstance(event, BuildEnd):
                    self._build(kernel, event)
                elif event.key:
                    self.asked[kernel].setdefault(event.key, layer)

    def _build(self, kernel: str, build: BuildEnd) -> None:
        if build.failed:
            return
        inputs, process, state = build.inputs, self.started.get(build.pid), self._states.get(build.pid)
        text = self._texts.get(inputs.source, "")
        self.builds[kernel][differences.read_build(inputs, text, process, state, self._variables)] = None
        self.wrote[kernel] += self._stored.pop(build.pid, ())
        if inputs.kind == "link":
            self.linked.add(kernel)
        if inputs.cache_dir:
            self.folders[kernel][build.layer] = inputs.cache_dir


def read_kernels(
    layers: Mapping[str, evidence.Evidence], trace: timeline.Trace, events: Sequence[Event]
) -> tuple[dict[str, KernelRun], float]:
    """Return what is known of each kernel of a run, and the seconds that misses took in the thread that lost most.

    Lookups that name no kernel have the name "".
    """
    lookups = {name: layer.part for name, layer in layers.items()}
    noted = _Noted(events, lookups)
    packages = _Packages(name for part in lookups.values() for name in part.packages)
    hits, misses = _outcomes(trace, [*noted.processes])
    read: dict[str, list[str]] = defaultdict(list)
    for kernel, entry in _entries(trace, noted.processes):
        (noted.wrote if entry.stores else read)[kernel].append(f"{entry.root}/{entry.key}")
    kernels = {}
    for kernel in {**noted.processes, **hits, **misses}:
        lost = misses.get(kernel, {})
        first = next((thread[0] for times in lost.values() for thread, _, _ in times), noted.processes.get(kernel, 0))
        process = noted.started.get(first)
        kernels[kernel] = KernelRun(
            tuple(noted.builds[kernel]),
            "" if process is None else process.python,
            {} if process is None else packages.of(process),
            frozenset(hits.get(kernel, ())),
            {layer: sum(timeline.covered_by_thread(times)) for layer, times in lost.items()},
            sum(timeline.covered_by_thread(one for times in lost.values() for one in times)),
            noted.asked[kernel],
            tuple(noted.wrote[kernel]),
            tuple(read[kernel]),
            frozenset(noted.collided[kernel]),
            first,
            noted.folders[kernel],
            kernel in noted.linked,
        )
    work = [interval for times in misses.values() for intervals in times.values() for interval in intervals]
    return kernels, max(timeline.covered_by_thread(work), default=0.0)


def _entries(trace: timeline.Trace, kernels: Iterable[str]) -> Iterator[tuple[str, evidence.EntryTrace]]:
    """Yield the entries that file events showed, each with a kernel of the run that it has."""
    for entry in trace.entries:
        for kernel in kernels if entry.kernels else ():
            if {*kernel.split()} & {*(entry.kernels or ())}:
                yield kernel, entry


def _outcomes(
    trace: timeline.Trace, kernels: Sequence[str]
) -> tuple[dict[str, set[str]], dict[str, dict[str, list[timeline.Work]]]]:
    """Return the layers that hit each kernel, and the work of its misses by layer; some name no kernel."""
    hits: dict[str, set[str]] = defaultdict(set)
    misses: dict[str, dict[str, list[timeline.Work]]] = defaultdict(lambda: defaultdict(list))
    for span in trace.spans:
        if span.outcome == "hit" and span.kernel and span.layer:
            hits[span.kernel].add(span.layer)
    for span, end in timeline.missed_work(trace.spans):
        if span.layer:
            misses[span.kernel or ""][span.layer].append(((span.process, span.thread), span.start, end))
    for kernel, entry in _entries(trace, kernels):
        if entry.stores:
            # A driver may compile at the launch; else what such a miss took does not show.
            misses[kernel][entry.layer] += [
                ((span.process, span.thread), span.start, span.end)
                for span in trace.spans
                if span.stage == "launch" and {*kernel.split()} & {*(span.kernel or "").split()}
                if any(span.start <= at - trace.started <= span.end for at in entry.at)
            ]
    return hits, misses


class _Packages:
    """The versions of some packages in the Pythons of a run, each read once."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(set(map(distributions.normal, names)))
        self._read: dict[tuple[str, ...], dict[str, str]] = {}

    def of(self, process: ProcessStart) -> dict[str, str]:
        """Return the versions in a process, given the event by which it started."""
        if process.paths not in self._read:
            versions = distributions.versions_in(process.paths)
            self._read[process.paths] = {name: versions[name] for name in self._names if name in versions}
        return self._read[process.paths]
