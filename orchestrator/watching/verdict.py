"""What a traced run lost to misses, and why: each kernel that missed is compared with the last run that built it."""

from __future__ import annotations

import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice, product

from cachectl.layers.base.errors import FAILURES
from cachectl.layers.base.text import plural
from cachectl.layers.core.finding import FAILS, Finding
from cachectl.layers.disk import place
from cachectl.switching.salt import SALT
from cachectl.watching import causes, differences, evidence, ledger, timeline
from cachectl.watching.kernels import read_kernels
from cachectl.watching.program_events import (
    BuildEnd,
    Event,
    FailedUse,
    ProcessEnd,
    ProcessStart,
    cut_builds,
    of_kind,
)
from cachectl.watching.reasons import Reasons, keys_of

#: A run that lost less than this part of its time to misses is nearly warm.
_SLOW = 0.1
#: Seconds that are not worth a word.
_NOTHING = 0.01
#: Entries of a cache that is verified after a command has failed.
_MOST_VERIFIED = 2000
#: Seconds by which the time of a file may be off that of the launch that made it.
_LATE = 0.05
#: How a process pool of Python starts its workers.
_WORKER = "multiprocessing.spawn"
#: Seconds of stores that are worth a word.
_LONG_STORE = 0.5
#: Kernels that are named of those that were compiled at a launch.
_FEW = 3


class Judge:
    """Compares a run with the ledger (``None``: it is not asked), by its trace and the events of its programs."""

    def __init__(
        self,
        layers: Mapping[str, evidence.Evidence],
        trace: timeline.Trace,
        events: Sequence[Event],
        book: ledger.Ledger | None,
        lockers: Iterable[str],
    ) -> None:
        self._layers = layers
        #: Other programs that locked a file of a cache meanwhile.
        self._lockers = lockers
        self._trace = trace
        self._states = {use.layer: use for use in trace.layers if use.state in ("disabled", "closed")}
        self.kernels = read_kernels(layers, trace, events)
        self._reasons = Reasons(layers, self._states, book)
        self._known = {} if book is None else book.kernels
        self.late = {name: late for name, layer in layers.items() if (late := tuple(self._launched(layer)))}
        started = (process for process in of_kind(events, ProcessStart) if not process.forked)
        programs = {process.pid: " ".join(process.program) for process in started}
        ended = {process.pid for process in of_kind(events, ProcessEnd)} | {os.getpid()}
        builds = of_kind(events, BuildEnd)
        killed = cut_builds(events)
        #: The programs that were killed in a build, or have left without Python's last steps, as a pool's workers do.
        self._cut = [
            program
            for pid, program in programs.items()
            if pid in killed or (pid not in ended and _WORKER not in program)
        ]
        self._is_killed_in_build = bool(killed)
        #: Lookups that raised an exception, of which nothing else is known.
        self._raised = of_kind(events, FailedUse)
        self._builds = [build for build in builds if not build.failed]
        self._failed = [build for build in builds if build.failed]

    def missed(self, *, explain: bool) -> tuple[timeline.MissedKernel, ...]:
        """Return the kernels that missed, those that took most first; with ``explain`` how their sources differ."""
        missed = []
        for kernel, this_run in self.kernels.items():
            if this_run.misses:
                earlier = self._known.get(kernel, ledger.Known(0.0)).builds
                diff = differences.diff(kernel, this_run.builds, earlier) if explain else None
                because = "; ".join(self._reasons.of(kernel, this_run))
                seconds = sum(timeline.covered_by_thread(this_run.work))
                missed.append(timeline.MissedKernel(kernel, seconds, tuple(this_run.misses), because, diff))
        return tuple(sorted(missed, key=lambda kernel: -kernel.seconds))

    def verdict(self, missed: Sequence[timeline.MissedKernel]) -> str:
        """Return what the run lost, and why, in a sentence or two."""
        if self._trace.summary is None:
            compiled = f" {self._stored()}." if self._stored() else ""
            return " ".join((*self._ending(), f"Unknown: no Python process of the run could be watched.{compiled}"))
        explained_layers = {name for kernel in missed for name in kernel.layers}
        costs = {name: self._cost(name) for name in self._states if name not in explained_layers}
        ending = [*self._ending()]
        sentences = [f"T{self._reasons.said_of(name)[1:]}: {cost}." for name, cost in costs.items() if cost]
        # A failure that is known says more.
        is_explained = sentences or len(ending) > bool(self._trace.exit_status)
        sentences.append(self._outcome(missed, self._trace.summary) or ("" if is_explained else self._nothing_asked()))
        if idle := [name for name, cost in costs.items() if not cost and self._states[name].state == "disabled"]:
            sentences.append(f"Off, at no measurable cost: {', '.join(idle)}.")
        return " ".join(filter(None, (*ending, *sentences)))

    def _ending(self) -> Iterator[str]:
        status = self._trace.exit_status
        if status:
            yield f"The command ended with status {status}."
        for failure in self._raised[:1]:
            fix = f"cachectl purge --key {shlex.quote(f'{failure.file}/{failure.key}')} {failure.layer} removes the row"
            # The row is not at fault if the database is, or if there is none.
            if failure.use == "store" or failure.error.startswith("sqlite3."):
                fix = f"cachectl doctor {failure.layer} checks the folder"
            yield f"A {failure.use} in {failure.dictionary} raised {failure.error}; {fix}."
        if self._failed:
            seconds = sum(build.when.seconds for build in self._failed)
            took = f", which took {seconds:.2f} s" if seconds >= _NOTHING else ""
            yield f"{plural(len(self._failed), 'build')} failed{took}."
        if self._is_killed_in_build:
            yield "A build began and did not end."
        for finding in islice(self._damaged(), 1) if status else ():
            yield f"In {finding.layer}, {finding.key}: {finding.message}; {finding.fix} removes it."

    def _damaged(self) -> Iterator[Finding]:
        """Yield entries with which a library fails: all of a layer that was asked, else those that were read.

        After a build that did not end it is unknown which were read. Caches that are too large are excluded.
        """
        for layer in self._layers.values():
            is_watched = bool(layer.part.modules and self._trace.processes)
            with suppress(*FAILURES):
                read, is_asked = layer.used_later(), is_watched or self._is_killed_in_build
                for root in layer.layer.roots() if read or is_asked else ():
                    if max(len(layer.before or ()), layer.layer.store.usage(root).entries or 0) > _MOST_VERIFIED:
                        continue
                    for finding in layer.layer.store.verify(root):
                        is_read = is_asked or f"{root.path}/{finding.key}" in read
                        if is_read and finding.thing is not None and finding.severity is FAILS:
                            yield finding

    def _outcome(self, missed: Sequence[timeline.MissedKernel], summary: timeline.Summary) -> str:
        """Say what the lookups came to; nothing if none was seen."""
        trace = self._trace
        looked = sum((use.hits or 0) + (use.misses or 0) for use in trace.layers)
        explained = {name for kernel in missed if kernel.kernel or kernel.seconds for name in kernel.layers}
        unseen = [use for use in trace.layers if use.misses and use.layer not in explained]
        if unseen and not explained:
            names = ", ".join(use.layer for use in unseen)
            count = plural(sum(use.misses or 0 for use in unseen), "lookup")
            return (
                f"{count} missed in {names}; which kernels missed, and how long each took, is unknown{self._at_once()}."
            )
        if missed:
            work = (span for this_run in self.kernels.values() for span in this_run.work)
            seconds = max([summary.missed, *timeline.covered_by_thread(work)])
            slow = "Slow" if seconds >= _SLOW * trace.wall_seconds else "Nearly warm"
            at_least = "at least " if summary.at_least or trace.unwatched else ""
            lost = f"{at_least}{seconds:.2f} of {trace.wall_seconds:.2f} s"
            late = f" {self._late()}." if self._late() else ""
            return _loss(missed, slow, lost if seconds else "") + self._waited(summary) + late
        if uncached := self._uncached():
            return f"{uncached}."
        if not looked:
            return f"Not warm: {self._stored()}." if self._stored() else ""
        return self._hits(looked)

    def _hits(self, looked: int) -> str:
        """Say that every lookup that was seen hit, and if that is not warm, why."""
        if self.is_warm:
            return f"Warm: every lookup hit ({looked:,})."
        if any(map(self._cost, self._states)):
            return f"Every other lookup hit ({looked:,})."
        judged = "Every" if self._trace.exit_status else f"{'Unknown' if self.is_warm is None else 'Not warm'}: every"
        return f"{'; '.join([f'{judged} observed lookup hit ({looked:,})', *self._unseen()])}."

    def _at_once(self) -> str:
        builds = [span for span in self._trace.spans if span.stage == "build"]
        at_once = ((a, b) for a, b in product(builds, builds) if a.start < b.end and b.start < a.end)
        threads = {(a.process, a.thread) for a, b in at_once if (a.process, a.thread) != (b.process, b.thread)}
        return f": {len(threads)} threads built at once" if threads else ""

    def _waited(self, summary: timeline.Summary) -> str:
        """Say that most of what was lost are stores, which take no time but where they wait."""
        seconds = sum(own for span, own in timeline.own_times(self._trace.spans) if span.stage == "store")
        if seconds < max(_LONG_STORE, summary.missed / 4):
            return ""
        who = ", ".join(self._lockers) or "another program"
        return f" {seconds:.2f} s of that was spent storing, which waits while {who} has the cache locked."

    def _stored(self) -> str:
        """Say what was stored that no watched build explains; nothing if there is nothing."""
        stored = [
            f"{use.layer} stored {plural(use.stores, 'entry', 'entries')}" for use in self._trace.layers if use.stores
        ]
        stored += [
            f"{name} has {plural(count, 'new entry', 'new entries')} of builds that were not watched"
            for name, count in self._unseen_stores().items()
        ]
        return "; ".join(stored)

    def _unseen_stores(self) -> dict[str, int]:
        """Return by layer how many entries appeared in the run that no watched build explains.

        Nothing is known of a cache that another program used meanwhile. A program that is made of a binary is unpacked.
        """
        counted = {use.layer: use.stores or 0 for use in self._trace.layers}
        unpacked = Counter(build.driver for build in self._builds if not build.kernels)
        unseen = {}
        for name, layer in self._layers.items():
            new = layer.appeared() if layer.part.listeners and not layer.is_shared else None
            count = sum(not entry.is_foreign for entry in new or ()) - counted.get(name, 0) - unpacked[name]
            if count > 0:
                unseen[name] = count
        return unseen

    def _nothing_asked(self) -> str:
        for name in self._states if self._trace.exit_status else ():
            hazard = self._layers[name].layer.about.uses.get(place.Use.WRITE)
            if self._states[name].state == "closed" and hazard is not None and hazard.severity is FAILS:
                return f"No cache was used: {self._reasons.said_of(name)}."
        return "No cache was used: no lookup was seen."

    @cached_property
    def is_warm(self) -> bool | None:
        """Whether nothing was compiled, missed or stored; ``None`` if not everything could be seen."""
        trace, summary = self._trace, self._trace.summary
        uses = [use for use in trace.layers if use.was_used]
        if any(map(self._cost, self._states)):
            return False
        if any(use.misses or use.stores for use in uses) or self._uncached() or self._failed or self._unseen_stores():
            return False
        is_unknown = summary is None or trace.exit_status or not uses or self._raised or self._unseen()
        return None if is_unknown else True

    def _unseen(self) -> list[str]:
        """Return why there may have been misses that were not seen."""
        reasons = [f"{program['command']} could not be watched" for program in self._trace.unwatched]
        reasons += [f"{program} did not exit normally" for program in self._cut]
        if self._trace.summary is not None and self._trace.summary.at_least:
            reasons.append("a driver does not say whether it compiled")
        reasons += [self._stored()] if self._stored() else []
        unknown = [use.layer for use in self._trace.layers if use.was_used and None in (use.hits, use.misses)]
        shared = ", which another program used meanwhile" * any(self._layers[name].is_shared for name in unknown)
        return reasons or ([f"misses in {', '.join(unknown)}{shared} cannot be counted"] if unknown else [])

    def _uncached(self) -> str:
        """Return what was compiled at a launch, or the work that a hit would save, for which no cache was asked."""
        if self._late():
            return self._late()
        used = {use.layer for use in self._trace.layers if use.was_used} | self._states.keys()
        used |= {name for name, layer in self._layers.items() if layer.shared}
        # Of a cache that is off the cost is said.
        is_said = any("compile" in self._layers[name].part.saves for name in self._states)
        # By a driver without a cache that is known, of which PyOpenCL's own cache was not asked either.
        unknown = [] if is_said else [build for build in self._builds if not build.driver and not build.binary]
        compiling = sum(end - start for build in unknown for start, end in build.compiles) / 1e9
        times = defaultdict(float, compile=compiling)
        idle = {
            stage
            for name, layer in self._layers.items()
            if name not in used and (not layer.part.platforms or self._platforms & {*layer.part.platforms})
            for stage in layer.part.saves
        }
        for span, took in timeline.own_times(self._trace.spans):
            if span.stage == "compile" and span.layer is None and span.name != timeline.DRIVER:
                # As by loopy's target for C, which asks no cache.
                times["compile"] += took
            elif span.stage != "compile" and span.stage in idle:
                times[span.stage] += took
        long = {stage: f"{seconds:.2f} s" for stage, seconds in times.items() if seconds >= _NOTHING}
        if [*long] == ["compile"]:
            seconds, elsewhere = long["compile"], self._elsewhere()
            return f"{elsewhere}: {seconds} of compile" if elsewhere else f"Compiled without a cache: {seconds}"
        missing_cache = ", ".join(f"{seconds} of {stage}" for stage, seconds in long.items())
        return f"No cache was used for {missing_cache}" if long else ""

    def _elsewhere(self) -> str:
        """Say that a driver's cache is another folder in a program than in the shell, so that it was not watched."""
        for name, layer in self._layers.items():
            platforms = {*layer.part.platforms, *layer.layer.about.platforms}
            for view in layer.views if layer.part.files and platforms & self._platforms else ():
                expected, root = (next(iter(one.roots()), None) for one in (layer.layer, view))
                if expected is not None and root is not None and root.path != expected.path:
                    place = f"{root.path} ({root.source})"
                    return f"The {name} cache of the program is {place}, which was not watched"
        return ""

    @property
    def _platforms(self) -> set[str]:
        return {build.inputs.platform for build in self._builds}

    def _launched(self, layer: evidence.Evidence) -> Iterator[str]:
        """Yield what a driver compiled at launches of this run; another program may have done so meanwhile, too."""
        trace = self._trace
        launched = [span for span in trace.spans if span.stage == "launch"]
        compiled = (layer.part.compiled_since(path, layer.began) for path in sorted(layer.used_later()))
        for kernel, shape, moment in chain.from_iterable(compiled):
            at = moment - trace.started
            launches = [span for span in launched if kernel in (span.kernel or "").split()]
            # The driver compiles in a thread of its own, from the first launch on, until the program has waited for it.
            if trace.unwatched or (launches and launches[0].start - _LATE <= at <= launches[-1].end + _LATE):
                yield f"{kernel} ({shape})"

    def _late(self) -> str:
        late = sorted(what for compiled in self.late.values() for what in compiled)
        more = f" and {len(late) - _FEW} more" * (len(late) > _FEW)
        return f"Compiled at launch, for a new work-group size: {', '.join(late[:_FEW])}{more}" if late else ""

    def _cost(self, name: str) -> str:
        """Say what a layer that is off or closed cost: failed builds, or the seconds in the stages that it saves."""
        part, times = self._layers[name].part, defaultdict[str, float](float)
        failed = sum(build.driver in ("", name) for build in self._failed)
        if failed and self._states[name].state == "closed" and "compile" in part.saves:
            return f"{plural(failed, 'build')} failed"
        if part.platforms and self._platforms.isdisjoint(part.platforms):
            return ""
        for span, seconds in timeline.own_times(self._trace.spans):
            if span.stage in part.saves and span.layer in (None, name) and span.outcome != "hit":
                times[span.stage] += seconds
        total = sum(times.values())
        return f"{total:.2f} s of {', '.join(times)}" if total >= _NOTHING else ""

    def remember(self, book: ledger.Ledger) -> None:
        """Add the run to a ledger."""
        trace = self._trace
        storing = {use.layer for use in trace.layers if use.stores != 0} - self._states.keys()
        saved = 0.0
        for kernel, this_run in self.kernels.items():
            last_run = book.kernels.get(kernel, ledger.Known(0.0))
            # Where that was measured.
            saved += sum(last_run.seconds.get(layer, 0.0) for layer in this_run.hits)
            # A salted build, of a block of disabled(), has an option that no other has.
            if not kernel or any(SALT.upper() in build.options for build in this_run.builds):
                continue
            stored = this_run.hits | (storing & this_run.misses.keys())
            roots = {name: place[0] for name in stored if (place := self._reasons.place_of(name, this_run)) is not None}
            # What was off has lost nothing.
            lost = this_run.misses.keys() - self._states.keys()
            before = {name: place for name, place in last_run.layers.items() if name not in lost}
            book.kernels[kernel] = ledger.Known(
                trace.started,
                (*(build for build in last_run.builds if build not in this_run.builds), *this_run.builds),
                {**before, **roots},
                this_run.python,
                this_run.packages,
                keys_of(this_run, last_run),
                {**last_run.seconds, **this_run.seconds},
                # Lookups that a program's memory answers are not seen, so those of earlier runs stay.
                tuple(dict.fromkeys((*last_run.asked, *this_run.asked))),
                (*last_run.kinds, self._reasons.kinds.get(kernel, "")) if this_run.builds else last_run.kinds,
                tuple(dict.fromkeys((*last_run.paths, *map(ledger.shorten, (*this_run.wrote, *this_run.read))))),
            )
        summary = trace.summary
        if summary is not None:
            hits, misses = (sum(getattr(use, name) or 0 for use in trace.layers) for name in ("hits", "misses"))
            book.runs.append(ledger.Run(trace.started, hits, misses, trace.wall_seconds, summary.missed, saved))


def _loss(missed: Sequence[timeline.MissedKernel], slow: str, lost: str) -> str:
    """Say what the time went into, and why the kernel that took most of it missed; ``lost`` is empty if unknown."""
    named = [kernel for kernel in missed if kernel.kernel] or missed
    first, what = named[0], f"compiling {len(named)} kernels"
    if len(named) == 1:
        what = f"compiling `{first.kernel}`" if first.kernel else "lookups that name no kernel"
    link = ", because " if len(named) == 1 else ", each because "
    link = "; " if first.because == causes.UNCOMPARED.say() else link
    because = f"{link}{first.because}" if first.kernel else ""
    if len({kernel.because for kernel in named}) > 1:
        because = f": `{first.kernel}` ({first.seconds:.2f} s) because {first.because}"
    elif first.because == causes.NEW.say() and len(named) > 1:
        slow, because = "Cold", ", none of which a remembered run built"
    if not lost:
        layers = ", ".join(dict.fromkeys(name for kernel in named for name in kernel.layers))
        what = what.removeprefix("compiling ")
        return f"Not warm: {what} missed in {layers}{because}. How long that took is unknown."
    return f"{slow}: {lost} went into {what}{because}."
