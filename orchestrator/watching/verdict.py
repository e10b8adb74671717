"""What a traced run lost to misses, and why: each kernel that missed is compared with the last run that built it."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from cachectl.layers.base.errors import FAILURES
from cachectl.layers.base.text import plural
from cachectl.layers.core.finding import FAILS, Finding
from cachectl.layers.core.root import DISABLED, Root
from cachectl.layers.disk import distributions, place
from cachectl.show import units
from cachectl.watching import differences, evidence, ledger, timeline
from cachectl.watching.programs import Event

NEW = "no traced run has built it before"
#: A run that lost less than this part of its time to misses is nearly warm.
_SLOW = 0.1
#: Seconds that are not worth a word.
_NOTHING = 0.01
#: Runs with different keys after which a kernel is said to change every run.
_ALWAYS = 3
#: Entries of a cache that is verified after a command has failed.
_MOST_VERIFIED = 2000
#: Kernels that are named of those that were compiled at a launch.
_FEW = 3


class Seen(NamedTuple):
    """One kernel in a run: its builds, its Python and packages, and the layers that hit, missed or stored it.

    ``seconds`` are what misses took, by layer, and ``asked`` the keys of its lookups with the layers that missed.
    ``wrote`` are the paths that its driver stored, and ``collided`` the layers that had its hash for another key, and
    ``processes`` those in which it missed.
    """

    builds: tuple[ledger.Build, ...] = ()
    python: str = ""
    packages: Mapping[str, str] = {}
    hits: frozenset[str] = frozenset()
    misses: tuple[str, ...] = ()
    seconds: Mapping[str, float] = {}
    lost: float = 0.0
    asked: Mapping[str, str | None] = {}
    wrote: tuple[str, ...] = ()
    collided: frozenset[str] = frozenset()
    processes: frozenset[int] = frozenset()

    @property
    def key(self) -> str:
        """Return a digest of what the kernel was built from, the same for the same builds."""
        return differences.digest(repr(sorted(build._replace(packed="") for build in self.builds)).encode())


class Judge:
    """Compares a run with the ledger: made with the layers, the run's trace and the events of its programs."""

    def __init__(self, layers: Mapping[str, evidence.Evidence], trace: timeline.Trace, events: Sequence[Event]) -> None:
        self._layers = layers
        self._trace = trace
        self._states = {use.layer: use for use in trace.layers if use.state in ("disabled", "closed")}
        self._roots: dict[str, Root] = {}
        for name, layer in layers.items():
            with suppress(*FAILURES):
                self._roots[name] = layer.views[0].roots()[0]
        self.kernels = dict(self._seen(events))
        #: What differs from the last run in the builds of each kernel, in two words.
        self._kinds: dict[str, str] = {}
        self._removals: Sequence[ledger.Removed] = ()
        self.late = {name: late for name, layer in layers.items() if (late := tuple(layer.compiled_later()))}
        started = {event["pid"]: event for event in events if event["event"] == "started" and not event.get("forked")}
        ended = {event["pid"] for event in events if event["event"] == "ended"} | {os.getpid()}
        #: The programs that were killed, or have left without Python's last steps.
        self._cut = [" ".join(event["program"]) for pid, event in started.items() if pid not in ended]
        #: Lookups that raised an exception, of which nothing else is known.
        self._raised = [event for event in events if event["event"] == "raised"]
        builds = [event for event in events if event["event"] == "build" and not event["failed"]]
        #: Builds by a driver without a cache that is known, of which PyOpenCL's own cache was not asked either.
        self._unknown = [event for event in builds if (event.get("driver"), event.get("binary")) == (None, None)]
        #: The driver of each build that failed.
        self._failed = [event.get("driver") for event in events if event["event"] == "build" and event["failed"]]

    def _seen(self, events: Sequence[Event]) -> Iterator[tuple[str, Seen]]:
        texts = {event["source"]: event["text"] for event in events if event["event"] == "source"}
        started = {event["pid"]: event for event in events if event["event"] == "started"}
        names = {name for layer in self._layers.values() for name in map(distributions.normal, layer.part.imports)}
        packages: dict[tuple[str, ...], dict[str, str]] = {}
        builds: dict[str, dict[ledger.Build, None]] = defaultdict(dict)
        asked: dict[str, dict[str, str | None]] = defaultdict(dict)
        lookups = {name: layer.part for name, layer in self._layers.items()}
        pids: dict[str, int] = {}
        wrote: dict[str, list[str]] = defaultdict(list)
        collided: dict[str, set[str]] = defaultdict(set)
        #: What the driver of a process has stored since its last build.
        stored: dict[int, list[str]] = {}
        for event in events:
            if event["event"] == "messages":
                stored[event["pid"]] = event["wrote"]
            if kernel := " ".join(event.get("kernels") or ()):
                pids.setdefault(kernel, event["pid"])
                if key := event.get("key"):
                    layer = evidence.layer_of(event, lookups)
                    asked[kernel].setdefault(key, layer if event["event"] == "miss" else None)
                    if event.get("collision"):
                        collided[kernel].add(layer)
                if event["event"] == "build" and not event["failed"]:
                    process = started.get(event["pid"], {})
                    builds[kernel][differences.read_build(event, texts.get(event.get("source")), process)] = None
                    wrote[kernel] += stored.pop(event["pid"], ())
        hits, misses = self._outcomes()
        for kernel in {**pids, **hits, **misses}:
            process = started.get(pids.get(kernel, 0), {})
            paths = tuple(process.get("paths") or ())
            if paths not in packages:
                found = distributions.versions_in(paths)
                packages[paths] = {name: found[name] for name in sorted(names & found.keys())}
            work = misses.get(kernel, {})
            yield (
                kernel,
                Seen(
                    tuple(builds.get(kernel, ())),
                    str(process.get("python") or ""),
                    packages[paths],
                    frozenset(hits.get(kernel, ())),
                    tuple(work),
                    {layer: sum(timeline.covered_by_thread(times)) for layer, times in work.items()},
                    sum(timeline.covered_by_thread(one for times in work.values() for one in times)),
                    asked.get(kernel, {}),
                    tuple(wrote[kernel]),
                    frozenset(collided[kernel]),
                    frozenset(thread[0] for times in work.values() for thread, _, _ in times),
                ),
            )

    def _outcomes(self) -> tuple[dict[str, set[str]], dict[str, dict[str, list[timeline.Work]]]]:
        """Return the layers that hit each kernel, and the work of its misses by layer; some name no kernel."""
        hits: dict[str, set[str]] = defaultdict(set)
        misses: dict[str, dict[str, list[timeline.Work]]] = defaultdict(lambda: defaultdict(list))
        for span in self._trace.spans:
            if span.outcome == "hit" and span.kernel and span.layer:
                hits[span.kernel].add(span.layer)
        for span, end in timeline.missed_work(self._trace.spans):
            if span.layer:
                thread = (span.process, span.thread)
                misses[span.kernel or ""][span.layer].append((thread, span.start, end))
        return hits, misses

    def missed(self, book: ledger.Ledger | None, *, explain: bool) -> tuple[timeline.MissedKernel, ...]:
        """Return the kernels that missed, those that took most first; with ``explain`` how their sources differ."""
        found = []
        known, self._removals = ({}, []) if book is None else (book.kernels, book.removals)
        for kernel, seen in self.kernels.items():
            if seen.misses:
                then = known.get(kernel)
                diff = differences.diff(kernel, seen.builds, then.builds) if explain and then is not None else None
                because = self._because(kernel, seen, then) if kernel else "these lookups name no kernel"
                found.append(timeline.MissedKernel(kernel, seen.lost, seen.misses, because, diff))
        return tuple(sorted(found, key=lambda one: -one.seconds))

    def _because(self, kernel: str, seen: Seen, then: ledger.Known | None) -> str:
        closed = [words for name in seen.misses if (words := self._stopped(name, seen))]
        if len(closed) == len(seen.misses):
            return "; ".join(closed)
        if seen.collided:
            return f"its entry in {', '.join(sorted(seen.collided))} has another key, of the same hash"
        if then is None:
            return NEW
        reasons = [*self._moved(seen, then), *self._differences(seen, then)]
        if not reasons:
            new = [name for name in seen.misses if name not in then.layers and name not in self._states]
            others = {layer for key, layer in seen.asked.items() if key not in then.asked} & then.layers.keys()
            if new:
                reasons = [f"the last traced run left nothing of it in {', '.join(new)}"]
            elif then.asked and others:
                named = ", ".join(sorted(map(str, others)))
                reasons = [f"its key in {named} is another one, though its source and options are the same"]
            else:
                reasons = [self._missing(seen, then)]
        changes: list[str] = []
        for key in reversed(_keys(seen, then)):
            if key in changes:
                break
            changes.append(key)
        kind = self._kinds[kernel] = " ".join(reasons[0].split()[:2])
        # The first of them differs from none.
        if len(changes) >= _ALWAYS and {kind} == {*then.kinds[-(len(changes) - 2) :]}:
            reasons[-1] += f"; it changed in each of its last {len(changes)} runs"
        return "; ".join(reasons[: differences.NAMED])

    def _stopped(self, name: str, seen: Seen) -> str:
        """Say why a layer took no part where a kernel missed; it may be on in other programs of the run."""
        if name in self._states:
            return self._said_of(name)
        states = (self._layers[name].state_in(process) for process in seen.processes)
        return next(
            (f"the cache of {name} is off ({state.why})" for state in states if state.condition is DISABLED), ""
        )

    def _missing(self, seen: Seen, then: ledger.Known) -> str:
        """Say what became of entries that the last traced run left: removed, missing, or there and not taken."""
        names = [name for name in seen.misses if name not in self._states]
        keys = {ledger.shorten(key) for key in (*seen.asked, *seen.wrote)}
        removals = [
            removal
            for removal in self._removals
            if removal.at > then.at and removal.layer in names and keys & {*removal.keys}
        ]
        if removals:
            layers = [name for name in names if name in {removal.layer for removal in removals}]
            moment = units.moment(removals[-1].at)
            what = (
                f"its entry in {', '.join(layers)} was"
                if len(layers) == 1
                else f"its entries in {', '.join(layers)} were"
            )
            return f"{what} removed by cachectl {removals[-1].verb} on {moment}"
        for name in names:
            if any(path in (self._layers[name].before or ()) for path in seen.wrote):
                return f"its entry in {name} was there, and was not taken; cachectl verify {name} looks for damage"
        return f"its entry in {', '.join(names)} is missing"

    def _said_of(self, name: str) -> str:
        use = self._states[name]
        return f"the cache of {name} is {'off' if use.state == 'disabled' else use.state} ({use.state_why})"

    def _moved(self, seen: Seen, then: ledger.Known) -> Iterator[str]:
        """Yield the first layer whose place is another than in the last run."""
        for name in seen.misses:
            root, before = self._roots.get(name), then.layers.get(name)
            if root is not None and before not in (None, str(root.path)):
                yield f"the cache of {name} is {root.path} ({root.source}), and was {before}"
                return

    def _differences(self, seen: Seen, then: ledger.Known) -> Iterator[str]:
        """Yield what differs from the last run: first what decides about keys made in Python, then the build."""
        if any(self._layers[name].part.modules for name in seen.misses):
            here = {"Python": seen.python, **seen.packages}
            there = {"Python": then.python, **then.packages}
            for name, version in here.items():
                if version and there.get(name) and version != there[name]:
                    yield f"{name} is {version}, and was {there[name]}"
        now, before = differences.nearest(seen.builds, then.builds)
        if now is not None and before is not None:
            if now.platform == before.platform and now.version != before.version:
                words = [differences.short_version(build.version) for build in (now, before)]
                words = words if words[0] != words[1] else [now.version, before.version]
                yield f"the driver is {words[0]}, and was {words[1]}{self._several()}"
            yield from differences.find_differences(now, before)

    def _several(self) -> str:
        """Say which drivers are registered, if a layer finds several of one maker."""
        for layer in self._layers.values():
            with suppress(*FAILURES):
                for finding in layer.layer.diagnose():
                    if finding.code == "drivers":
                        return f" ({finding.message.partition(' (')[0]})"
        return ""

    def verdict(self, missed: Sequence[timeline.MissedKernel]) -> str:
        """Return what the run lost, and why, in a sentence or two."""
        if self._trace.summary is None:
            return " ".join((*self._ending(), "Unknown: no Python of the run could be watched."))
        known = {name for one in missed for name in one.layers}
        costs = {name: self._cost(name) for name in self._states if name not in known}
        ending = [*self._ending()]
        said = [f"T{self._said_of(name)[1:]}: {cost}." for name, cost in costs.items() if cost]
        # A failure that is known says more.
        is_explained = said or len(ending) > 1 or self._raised
        said.append(self._outcome(missed, self._trace.summary) or ("" if is_explained else self._nothing_asked()))
        if idle := [name for name, cost in costs.items() if not cost and self._states[name].state == "disabled"]:
            said.append(f"Off, at no cost that shows: {', '.join(idle)}.")
        return " ".join(filter(None, (*ending, *said)))

    def _ending(self) -> Iterator[str]:
        """Yield how the command ended, and what failed in it."""
        if status := self._trace.exit_status:
            yield f"The command ended with status {status}."
        for event in self._raised[:1]:
            owner = evidence.layer_of(event, {name: layer.part for name, layer in self._layers.items()})
            purge = f"cachectl purge --key {shlex.quote(event['file'] + '/' + event['key'])} {owner}"
            yield f"A lookup in {event['dictionary']} raised {event['error']}; {purge} removes the row."
        if self._trace.exit_status and self._failed:
            yield f"{plural(len(self._failed), 'build')} failed."
        for finding in islice(self._damaged(), 1) if self._trace.exit_status else ():
            yield f"In {finding.layer}, {finding.key}: {finding.message}; {finding.fix} removes it."

    def _damaged(self) -> Iterator[Finding]:
        """Yield entries that the run read, and with which a library fails; of no cache that is too large for that."""
        for layer in self._layers.values():
            with suppress(*FAILURES):
                read = layer.used_later()
                for root in layer.layer.roots() if 0 < len(read) <= len(layer.before or ()) <= _MOST_VERIFIED else ():
                    for finding in layer.layer.store.verify(root):
                        is_read = f"{root.path}/{finding.key}" in read
                        if is_read and finding.thing is not None and finding.severity is FAILS:
                            yield finding

    def _outcome(self, missed: Sequence[timeline.MissedKernel], summary: timeline.Summary) -> str:
        """Say what the lookups came to; nothing if none was seen."""
        trace = self._trace
        looked = sum((use.hits or 0) + (use.misses or 0) for use in trace.layers)
        explained = {name for one in missed if one.kernel for name in one.layers}
        unseen = [use for use in trace.layers if use.misses and use.layer not in explained]
        if unseen and not explained:
            names = ", ".join(use.layer for use in unseen)
            count = plural(sum(use.misses or 0 for use in unseen), "lookup")
            return f"{count} missed in {names}; what each took does not show, as where threads build at once."
        if missed:
            slow = "Slow" if summary.missed >= _SLOW * trace.wall_seconds else "Nearly warm"
            at_least = "at least " if summary.at_least or trace.unwatched else ""
            return _loss(missed, slow, f"{at_least}{summary.missed:.2f} of {trace.wall_seconds:.2f} s")
        if uncached := self._uncached():
            return f"{uncached}."
        if looked and self.is_warm:
            return f"Warm: every lookup hit ({looked:,})."
        if looked:
            return f"{'' if trace.exit_status else 'Unknown: '}{self._seen_only(looked)}."
        return ""

    def _nothing_asked(self) -> str:
        failing = (name for name in self._states if self._trace.exit_status and self._fails_when_closed(name))
        return f"No cache was asked: {next(map(self._said_of, failing), 'no lookup was seen')}."

    @property
    def is_warm(self) -> bool | None:
        """Whether nothing was compiled, missed or stored; ``None`` if not everything could be seen."""
        trace, summary = self._trace, self._trace.summary
        uses = [use for use in trace.layers if use.was_used]
        if any(use.misses or use.stores for use in uses) or self._uncached():
            return False
        if summary is None or summary.at_least or trace.exit_status or not uses:
            return None
        if trace.unwatched or self._raised or self._cut:
            return None
        return None if any(use.hits is None or use.misses is None for use in uses) else True

    def _seen_only(self, looked: int) -> str:
        """Say that every lookup that was seen hit, and what was not seen."""
        said = f"{'E' if self._trace.exit_status else 'e'}very lookup that could be seen hit ({looked:,})"
        reasons = [f"{program['command']} could not be watched" for program in self._trace.unwatched]
        reasons += [f"{program} did not end in order" for program in self._cut]
        if self._trace.summary is not None and self._trace.summary.at_least:
            reasons.append("a driver does not say whether it compiled")
        stored = [use.layer for use in self._trace.layers if use.stores]
        reasons += [f"{', '.join(stored)} stored entries"] if stored else []
        return f"{said}; {'; '.join(reasons)}" if reasons else said

    def _uncached(self) -> str:
        """Return what was compiled at a launch, or the work that a hit would save, for which no cache was asked."""
        if late := [what for compiled in self.late.values() for what in compiled]:
            return f"Compiled at launch, for a new work-group size: {', '.join(late[:_FEW])}"
        used = {use.layer for use in self._trace.layers if use.was_used} | self._states.keys()
        # Of a cache that is off the cost is said.
        is_said = any("compile" in self._layers[name].part.saves for name in self._states)
        unknown = () if is_said else self._unknown
        times = {"compile": sum(end - start for event in unknown for start, end in event["compiles"]) / 1e9}
        idle = [layer.part.saves for name, layer in self._layers.items() if name not in used]
        for span, seconds in timeline.own_times(self._trace.spans):
            if span.stage != "compile" and any(span.stage in saves for saves in idle):
                times[span.stage] = times.get(span.stage, 0.0) + seconds
        long = {stage: f"{seconds:.2f} s" for stage, seconds in times.items() if seconds >= _NOTHING}
        if [*long] == ["compile"]:
            return f"Compiled without a cache: {long['compile']}"
        asked = ", ".join(f"{seconds} of {stage}" for stage, seconds in long.items())
        return f"No cache was asked for {asked}" if long else ""

    def _fails_when_closed(self, name: str) -> bool:
        hazard = self._layers[name].layer.about.uses.get(place.Use.WRITE)
        return self._states[name].state == "closed" and hazard is not None and hazard.severity is FAILS

    def _cost(self, name: str) -> str:
        """Say what a layer that is off or closed cost: failed builds, or the seconds in the stages that it saves."""
        failed = sum(driver in (None, name) for driver in self._failed)
        if failed and self._states[name].state == "closed" and "compile" in self._layers[name].part.saves:
            return f"{plural(failed, 'build')} failed"
        times: dict[str, float] = {}
        for span, seconds in timeline.own_times(self._trace.spans):
            if span.stage in self._layers[name].part.saves and span.layer in (None, name) and span.outcome != "hit":
                times[span.stage] = times.get(span.stage, 0.0) + seconds
        seconds = sum(times.values())
        return f"{seconds:.2f} s of {', '.join(times)}" if seconds >= _NOTHING else ""

    def remember(self, book: ledger.Ledger) -> None:
        """Add the run to a ledger."""
        trace = self._trace
        storing = {use.layer for use in trace.layers if use.stores != 0} - self._states.keys()
        saved = book.saved_by({kernel: set(seen.hits) for kernel, seen in self.kernels.items()})
        for kernel, seen in self.kernels.items():
            if not kernel:
                continue
            then = book.kernels.get(kernel, ledger.Known(0.0))
            stored = {*seen.hits, *(storing & {*seen.misses})}
            roots = {name: str(root.path) for name in stored if (root := self._roots.get(name)) is not None}
            # What was off has lost nothing.
            lost = {*seen.misses} - self._states.keys()
            before = {name: place for name, place in then.layers.items() if name not in lost}
            book.kernels[kernel] = ledger.Known(
                trace.started,
                (*(build for build in then.builds if build not in seen.builds), *seen.builds),
                {**before, **roots},
                seen.python,
                seen.packages,
                _keys(seen, then),
                {**then.seconds, **seen.seconds},
                # Lookups that a program's memory answers are not seen, so those of earlier runs stay.
                tuple(dict.fromkeys((*then.asked, *seen.asked))),
                (*then.kinds, self._kinds.get(kernel, "")) if seen.builds else then.kinds,
            )
        summary = trace.summary
        if summary is not None:
            hits, misses = (sum(getattr(use, name) or 0 for use in trace.layers) for name in ("hits", "misses"))
            book.runs.append(ledger.Run(trace.started, hits, trace.wall_seconds, summary.missed, saved, misses))


def _loss(missed: Sequence[timeline.MissedKernel], slow: str, lost: str) -> str:
    """Say what the time went into, and why the kernel that took most of it missed."""
    named = [one for one in missed if one.kernel] or missed
    first, what = named[0], f"compiling {len(named)} kernels"
    if len(named) == 1:
        what = f"compiling `{first.kernel}`" if first.kernel else "lookups that name no kernel"
    because = f", because {first.because}" if first.kernel else ""
    if len({one.because for one in named}) > 1:
        because = f": `{first.kernel}` ({first.seconds:.2f} s) because {first.because}"
    elif first.because == NEW and len(named) > 1:
        slow, because = "Cold", ", none of which a traced run has built before"
    return f"{slow}: {lost} went into {what}{because}."


def _keys(seen: Seen, then: ledger.Known) -> tuple[str, ...]:
    """Return the keys of the runs that built a kernel, this one's last."""
    return (*then.keys, seen.key) if seen.builds else then.keys
