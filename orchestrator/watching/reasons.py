"""Why a kernel missed: the first cause of :mod:`cachectl.watching.causes` that what was seen supports."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from cachectl.layers.base.errors import FAILURES
from cachectl.layers.core.entry import Entry
from cachectl.layers.core.root import DISABLED
from cachectl.layers.disk import distributions
from cachectl.show import units
from cachectl.watching import causes, differences, evidence, ledger
from cachectl.watching.kernels import KernelRun

#: Runs with different keys after which a kernel is said to change every run.
_ALWAYS = 3
#: Entries of a cache that is read for those of a kernel.
_MOST_READ = 2000
#: Kernels of earlier runs with which one of a new name is compared.
_MOST_COMPARED = 100


class Reasons:
    """Finds why kernels missed, by the evidence of the layers and a ledger, ``None`` if no earlier run is asked.

    ``stopped`` are the layers that did not participate in the run. ``kinds`` has what differs from the last run in the
    builds of each kernel, in two words.
    """

    def __init__(
        self,
        layers: Mapping[str, evidence.Evidence],
        stopped: Mapping[str, evidence.LayerTrace],
        book: ledger.Ledger | None,
    ) -> None:
        self._layers = layers
        self._states = stopped
        self._known = None if book is None else book.kernels
        self._removals = () if book is None else tuple(book.removals)
        self.kinds: dict[str, str] = {}

    def of(self, kernel: str, this_run: KernelRun) -> Iterator[str]:
        """Yield why a kernel missed: the first cause that applies, or up to two differences."""
        last_run = (self._known or {}).get(kernel)
        closed = [words for name in this_run.misses if (words := self._stopped(name, this_run))]
        if len(closed) == len(this_run.misses):
            yield from closed
        elif this_run.collided:
            yield causes.COLLISION.say(layers=", ".join(sorted(this_run.collided)))
        elif not kernel:
            yield "these lookups name no kernel"
        elif self._known is None:
            yield causes.UNCOMPARED.say()
        elif last_run is None:
            yield self._older(kernel, this_run) or _of_another_name(this_run, self._known) or causes.NEW.say()
        elif another := _of_another_program(this_run, last_run):
            yield another
        else:
            reasons = [*self._differences(this_run, last_run)][: differences.NAMED]
            reasons = reasons or [self._absent(this_run, last_run)]
            yield from (*reasons[:-1], reasons[-1] + self._repeated(kernel, this_run, last_run, reasons[0]))

    def _repeated(self, kernel: str, this_run: KernelRun, last_run: ledger.Known, reason: str) -> str:
        """Say in how many of the last runs something of this kind changed, if in several."""
        changes: list[str] = []
        for key in reversed(keys_of(this_run, last_run)):
            if key in changes:
                break
            changes.append(key)
        kind = self.kinds[kernel] = " ".join(reason.split()[:2])
        # The first of them differs from none.
        count = len(changes) - 1
        if count >= _ALWAYS and {kind} == {*last_run.kinds[-(count - 1) :]}:
            return f"; it changed in each of the last {count} runs"
        return ""

    def _older(self, kernel: str, this_run: KernelRun) -> str:
        """Compare with entries that were there before the run, where no earlier run is known."""
        for name in this_run.misses:
            layer = self._layers[name]
            if not 0 < len(layer.before or ()) <= _MOST_READ:
                continue
            with suppress(*FAILURES):
                entries = [
                    entry
                    for root in layer.layer.roots()
                    for entry in layer.layer.store.scan(root)
                    if isinstance(entry, Entry) and {*kernel.split()} & {*(entry.details.kernels or ())}
                ]
                new = [entry for entry in entries if f"{entry.root}/{entry.key}" not in (layer.before or {})]
                old = [entry for entry in entries if entry not in new]
                if new and old:
                    now, before = _facts(new[0]), _facts(max(old, key=lambda entry: entry.modified or 0))
                    if now != before:
                        return causes.OLDER.say(layer=name, before=_only_in(before, now), now=_only_in(now, before))
        return ""

    def _stopped(self, name: str, this_run: KernelRun) -> str:
        """Say why a layer did not participate where a kernel missed; it may be on in other programs of the run."""
        if name in self._states:
            return self.said_of(name)
        state = self._layers[name].view_in(this_run.process).state()
        return causes.OFF.say(layer=name, state="off", reason=state.why) if state.condition is DISABLED else ""

    def _absent(self, this_run: KernelRun, last_run: ledger.Known) -> str:
        """Say why entries were not hit where nothing in their builds differs."""
        names = [name for name in this_run.misses if name not in self._states]
        if new := [name for name in names if name not in last_run.layers]:
            return causes.LEFT_NOTHING.say(layers=", ".join(new))
        if removed := self._removed(this_run, last_run, names):
            return removed
        for name in names:
            layer = self._layers[name]
            if any(path in (layer.before or {}) for path in this_run.wrote):
                cause = causes.RELINKED if this_run.is_linked and layer.part.relinks else causes.NOT_TAKEN
                return cause.say(layer=name)
        empty = [name for name in names if self._layers[name].before == {}]
        keys = [(key, layer) for key, layer in this_run.asked.items() if layer is not None and last_run.asked]
        keys += [(path, layer) for path, layer in this_run.wrote.items() if layer in names and last_run.paths]
        keys_known = {*map(ledger.shorten, last_run.asked), *last_run.paths}
        missing = {layer for key, layer in keys if ledger.shorten(key) in keys_known}
        if empty or missing:
            return (causes.EMPTY if empty else causes.MISSING).say(layers=", ".join(empty or sorted(missing)))
        # It missed with another key than in earlier runs.
        if elsewhere := {layer for _, layer in keys}:
            although = ", though its source and options did not" if this_run.builds else ""
            return causes.OTHER_KEY.say(layers=", ".join(sorted(elsewhere)), although=although)
        return causes.UNEXPLAINED.say(layers=", ".join(names))

    def _removed(self, this_run: KernelRun, last_run: ledger.Known, names: Sequence[str]) -> str:
        """Say by which verb entries with the keys of a kernel were removed since the last run, if by one."""
        keys = {ledger.shorten(key) for key in (*this_run.asked, *this_run.wrote)}
        removals = [
            removal
            for removal in self._removals
            if removal.at > last_run.at and removal.layer in names and keys & {*removal.keys}
        ]
        if not removals:
            return ""
        layers = ", ".join(name for name in names if name in {removal.layer for removal in removals})
        last = removals[-1]
        return causes.REMOVED.say(layers=layers, verb=last.verb, moment=units.moment(last.at))

    def said_of(self, name: str) -> str:
        """Say why a layer did not participate in the run."""
        use = self._states[name]
        return causes.OFF.say(layer=name, state="off" if use.state == "disabled" else use.state, reason=use.state_why)

    def place_of(self, name: str, this_run: KernelRun) -> tuple[str, str] | None:
        """Return where a layer keeps a kernel, and by what: the folder that the build named, or its root."""
        if name in this_run.folders:
            return this_run.folders[name], "cache_dir of the build"
        with suppress(*FAILURES):
            root = next(iter(self._layers[name].view_in(this_run.process).roots()), None)
            return None if root is None else (str(root.path), root.source)
        return None

    def _differences(self, this_run: KernelRun, last_run: ledger.Known) -> Iterator[str]:
        """Yield what differs from the last run: a place, what decides about keys made in Python, then the build."""
        for name in this_run.misses:
            place, last_place = self.place_of(name, this_run), last_run.layers.get(name)
            if place is not None and last_place not in (None, place[0]):
                yield causes.MOVED.say(layer=name, place=place[0], source=place[1], before=last_place)
                break
        parts = [self._layers[name].part for name in this_run.misses]
        named = {name for part in parts for name in map(distributions.normal, part.packages)}
        here = {"Python": this_run.python} if any(part.modules for part in parts) else {}
        here |= {name: version for name, version in this_run.packages.items() if name in named}
        versions_then = {"Python": last_run.python, **last_run.packages}
        for name, version in here.items():
            if version and versions_then.get(name) and version != versions_then[name]:
                yield causes.CHANGED.say(name=name, now=version, before=versions_then[name])
        earlier = [build for build in last_run.builds if build.program in {one.program for one in this_run.builds}]
        if (pair := differences.nearest(this_run.builds, earlier or last_run.builds)) is not None:
            now, before = pair
            if now.platform == before.platform and now.version != before.version:
                words = [differences.short_version(build.version) for build in (now, before)]
                words = words if words[0] != words[1] else [now.version, before.version]
                yield causes.CHANGED.say(name="the driver", now=words[0], before=words[1]) + self._several()
            yield from differences.find_differences(now, before)

    def _several(self) -> str:
        """Say which drivers are registered, if a layer finds several of one maker."""
        for layer in self._layers.values():
            with suppress(*FAILURES):
                for finding in layer.layer.diagnose():
                    if finding.code == "drivers":
                        return f" ({finding.message.partition(' (')[0]})"
        return ""


def _of_another_program(this_run: KernelRun, last_run: ledger.Known) -> str:
    """Say that only another program is known to have built a kernel of this name, and that from another source."""
    programs, sources = ({getattr(build, name) for build in last_run.builds} for name in ("program", "source"))
    own = [build for build in this_run.builds if build.program not in programs and build.source not in sources]
    if not last_run.builds or not own or len(own) < len(this_run.builds):
        return ""
    names = (own[0].program, last_run.builds[-1].program)
    short = [os.path.basename(name) for name in names]
    program, another = names if short[0] == short[1] else short
    return causes.OTHER_PROGRAM.say(program=program, other=another)


def _facts(entry: Entry) -> dict[str, str]:
    return {**entry.details.versions, **({"device": entry.details.device} if entry.details.device else {})}


def _only_in(facts: Mapping[str, str], other: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if other.get(name) != value)


def _of_another_name(this_run: KernelRun, kernels: Mapping[str, ledger.Known]) -> str:
    """Say that a kernel is one that an earlier run built, but for its name; nothing if it is not."""
    text = next((build.text for build in this_run.builds if build.text), None)
    newest = sorted(kernels.items(), key=lambda item: -item[1].at)[:_MOST_COMPARED] if text else ()
    for name, last_run in newest:
        before = next((build.text for build in reversed(last_run.builds) if build.text), None)
        if before and differences.renamed(text or "", before):
            return causes.RENAMED.say(before=name)
    return ""


def keys_of(this_run: KernelRun, last_run: ledger.Known) -> tuple[str, ...]:
    """Return the keys of the runs that built a kernel, this one's last."""
    return (*last_run.keys, this_run.key) if this_run.builds else last_run.keys
