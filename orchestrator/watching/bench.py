"""The time that each cache saves a command: runs with all cold, all warm, all off, and each off in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.layer_set import LayerSet
from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import CachectlError, Refused
from cachectl.layers.base.facts import Ability, Scope
from cachectl.switching import run as child
from cachectl.switching.isolated import can_switch, copy_isolated_root, isolated_root, link_cache_home
from cachectl.verbs.report import report as count
from cachectl.watching.machine import Machine, machine

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

COLD: Final = "cold"
WARM: Final = "warm"
OFF: Final = "off"
#: Maximum number of runs that fill the caches. PyOpenCL's binary cache makes the driver store again in the second
#: run; the third run finds that entry.
_FILLS: Final = 3
#: Limits on the shown end of a failed command's standard error: lines, and bytes to search for them.
_LINES: Final = 10
_BYTES: Final = 10_000


class Ended(CachectlError):
    """The command failed or was ended; ``status`` is its exit status, ``said`` the last lines of its standard error."""

    def __init__(self, setting: str, status: int, said: Sequence[str]) -> None:
        self.status = status
        self.said = tuple(said)
        super().__init__(f"the command ended with status {status} in its {setting} run, so nothing is compared")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the caches, and the wall seconds of the command in each round.

    ``setting`` is ``cold``, ``warm``, ``off``, or ``LAYER off`` with that layer in ``layer``; ``how`` describes the
    means.
    """

    setting: str
    how: str
    layer: str | None = None
    seconds: tuple[float, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(also=("median",))

    @property
    def median(self) -> float:
        """Return the median of the seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Saved:
    """The time that a layer saves: the median with it off minus the warm median, in seconds.

    ``by_round`` has the same difference for each round; ``entries`` counts the entries that the command left in the
    layer.
    """

    layer: str
    seconds: float
    by_round: tuple[float, ...]
    entries: int


@dataclass(frozen=True, slots=True)
class Unused:
    """A layer that was not turned off, and the reason."""

    layer: str
    why: str


@dataclass(frozen=True, slots=True)
class Bench:
    """All measurements, and the machine; ``started`` is in epoch seconds.

    ``exit_status`` is 0, or 128+n if signal n ended it: then the rounds that were finished are there.
    """

    command: tuple[str, ...]
    settings: tuple[Setting, ...]
    saved: tuple[Saved, ...]
    unused: tuple[Unused, ...]
    machine: Machine
    versions: Mapping[str, str]
    started: float
    exit_status: int = 0
    as_json: ClassVar[AsJson] = AsJson("cachectl/bench/1", names={"saved": "saved_by_layer", "unused": "not_used"})

    def __getitem__(self, setting: str) -> Setting:
        return next(one for one in self.settings if one.setting == setting)


@dataclass(frozen=True, slots=True)
class Step:
    """Progress: runs done, runs in all (``None``: not known yet), and the seconds left (``None``: not known yet)."""

    doing: str
    done: int
    total: int | None
    seconds_left: float | None


def bench(
    command: Sequence[str],
    stack: LayerSet,
    rounds: int,
    *,
    notice: Callable[[str], None],
    show: Callable[[Step], None],
) -> Bench:
    """Run a command in every setting, ``rounds`` times, the settings interleaved; return the measured times.

    ``notice`` gets lines that a reader of the figures must know, ``show`` the progress. The user's own caches are
    neither read nor written. Raises :class:`Ended` if the command fails, and :class:`~.child.CannotStart`.
    """
    started = stack.environment.clock()
    layers = tuple(layer for layer in stack if layer.abilities()[Ability.RELOCATE] is None)
    with child.signals_held() as signals, isolated_root(stack.environment, notice=notice) as full:
        work = _Work(tuple(command), stack, layers, signals, notice, full)
        fills, entries = work.fill(show)
        settings, unused = _settings(stack, layers, entries)
        measured = work.measure(settings, rounds, fills, show)
    warm = next(one for one in measured if one.setting == WARM)
    return Bench(
        command=tuple(command),
        settings=measured,
        saved=tuple(_saved(one, warm, entries) for one in measured if one.layer is not None),
        unused=unused,
        machine=machine(stack.environment),
        versions=_versions(stack),
        started=started,
        exit_status=signals.ending(),
    )


def _saved(off: Setting, warm: Setting, entries: Mapping[str, int]) -> Saved:
    layer = off.layer or ""
    rounds = tuple(without - with_it for without, with_it in zip(off.seconds, warm.seconds, strict=True))
    return Saved(layer, off.median - warm.median, rounds, entries[layer])


def _versions(stack: LayerSet) -> dict[str, str]:
    """Return the versions of the libraries installed beside cachectl; most commands run in that Python."""
    environment = stack.environment
    found = {name: environment.installed(name) for layer in stack for name in layer.distributions}
    return {
        "python": ".".join(environment.python.split(".")[:3]),
        **{name: version for name, version in found.items() if version is not None},
    }


# ---------------------------------------------------------------------- settings


def _settings(
    stack: LayerSet, layers: Sequence[Layer], entries: Mapping[str, int]
) -> tuple[tuple[Setting, ...], tuple[Unused, ...]]:
    """Return the settings, one for each layer that the command filled, and the layers that cannot be turned off."""
    used = [layer for layer in layers if entries.get(layer.name)]
    turned: list[Setting] = []
    unused = [
        *(Unused(name, f"stays as it is: {why}") for name, why in child.left_alone(stack, off=False).items()),
        *(Unused(layer.name, "the command stores nothing in it") for layer in layers if layer not in used),
    ]
    for layer in used:
        how = _how(layer, used)
        if how is None:
            unused.append(Unused(layer.name, "no switch, and it cannot be emptied"))
        else:
            turned.append(Setting(f"{layer.name} off", how, layer.name))
    every = (Setting(WARM, "every cache full"), *turned, Setting(COLD, "every cache empty"), Setting(OFF, "all off"))
    return every, tuple(unused)


def _how(layer: Layer, used: Iterable[Layer]) -> str | None:
    """Return how one layer alone is turned off; ``None`` if that is impossible.

    A layer that is only emptied stores entries again, so its seconds include that.
    """
    sharing = [other.name for other in used if other is not layer and _variables(other) & _variables(layer)]
    if can_switch(layer) and not layer.disable().patches and not sharing:
        return "switched off"
    if layer.abilities()[Ability.CLEAR] is not None:
        return None
    return "emptied: " + (f"its switch is that of {', '.join(sharing)} too" if sharing else "no variable switches it")


def _variables(layer: Layer) -> frozenset[str]:
    if not can_switch(layer):
        return frozenset()
    switch = layer.disable()
    return switch.unset | switch.set.keys()


# ---------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class _Work:
    """The command and everything that its runs have in common; ``full`` is the root that is kept warm."""

    command: tuple[str, ...]
    stack: LayerSet
    layers: tuple[Layer, ...]
    signals: child.Signals
    notice: Callable[[str], None]
    full: Path

    def fill(self, show: Callable[[Step], None]) -> tuple[list[float], dict[str, int]]:
        """Run until no new entry is stored; return the seconds of each run, and the number of entries of each layer."""
        changes = child.variables_isolated(self.layers, self.full)
        seconds: list[float] = []
        before: dict[str, int] = {}
        for number in range(_FILLS):
            show(Step("filling the caches", number, None, None))
            seconds.append(self._seconds("first", self.full, changes))
            after = self._entries(self.full)
            if after == before:
                break
            before = after
        else:
            self.notice(f"still storing new entries after {_FILLS} runs; warm timings may be too high")
        return seconds, after

    def measure(
        self, settings: Sequence[Setting], rounds: int, fills: Sequence[float], show: Callable[[Step], None]
    ) -> tuple[Setting, ...]:
        """Run every setting once a round. Each round begins with another setting, so that none is always first.

        A signal ends it; finished rounds are kept. Raises :class:`Ended` if there is none, or if the command fails.
        """
        taken: dict[str, list[float]] = {one.setting: [] for one in settings}
        order = [
            settings[(place + number) % len(settings)] for number in range(rounds) for place in range(len(settings))
        ]
        for done, one in enumerate(order):
            show(Step(one.setting, done, len(order), _left(order[done:], taken, fills)))
            try:
                taken[one.setting].append(self._once(one))
            except Ended:
                if not (self.signals.ending() and min(map(len, taken.values()))):
                    raise
                break
        finished = min(map(len, taken.values()))
        if finished < rounds:
            self.notice(f"interrupted: {finished} of {rounds} rounds are finished, and count")
        return tuple(replace(one, seconds=tuple(taken[one.setting][:finished])) for one in settings)

    def _once(self, one: Setting) -> float:
        with self._root(one) as root:
            if one.setting == OFF:
                changes = child.variables_off(self.layers, self.stack, root)
            else:
                changes = child.variables_isolated(self.layers, root)
            if one.layer is not None:
                self._turn_off(one, root, changes)
            before = self._entries(root) if one.setting == WARM else {}
            seconds = self._seconds(one.setting, root, changes)
            if one.setting == WARM and (fresh := self._grown(before, self._entries(root))):
                self.notice(f"a warm run stored new entries in {', '.join(fresh)}; warm timings may be too high")
            return seconds

    @contextmanager
    def _root(self, one: Setting) -> Iterator[Path]:
        """Yield a root for one run: a copy of the full one, so that a run does not affect the next one."""
        with isolated_root(self.stack.environment, notice=self.notice) as root:
            if one.setting not in (COLD, OFF):
                copy_isolated_root(self.full, root)
            yield root

    def _turn_off(self, one: Setting, root: Path, changes: dict[str, str | None]) -> None:
        layer = self.stack[one.layer or ""]
        if one.how == "switched off":
            switch = layer.disable()
            changes.update(dict.fromkeys(switch.unset, None))
            changes.update(switch.set)
            return
        moved = self._moved(root)[layer.name]
        outcome = moved.clear(moved.plan_clear())
        if outcome.failed:
            raise Refused(layer.name, f"cannot be emptied for its turn: {outcome.failed[0].because}")

    def _seconds(self, setting: str, root: Path, changes: Mapping[str, str | None]) -> float:
        """Run the command once with its output hidden; return its wall seconds, or raise :class:`Ended`."""
        environment = self.stack.environment
        link_cache_home(environment, self.layers, root)
        with TemporaryFile() as said:
            started = time.perf_counter()
            status = child.run(self.command, changes, environment, self.signals, quiet=said)
            seconds = time.perf_counter() - started
            status = status or self.signals.ending()
            if status:
                end = said.seek(0, 2)
                said.seek(max(0, end - _BYTES))
                raise Ended(setting, status, said.read().decode(errors="replace").splitlines()[-_LINES:])
        return seconds

    def _moved(self, root: Path) -> LayerSet:
        """Return the layers as they are under a root."""
        changes = child.variables_isolated(self.layers, root)
        put = {name: value for name, value in changes.items() if value is not None}
        return LayerSet(self.stack.environment.with_variables(put, frozenset(changes) - put.keys()))

    def _entries(self, root: Path) -> dict[str, int]:
        stack = self._moved(root)
        report = count(stack, [layer.name for layer in self.layers])
        return {
            layer.layer: sum(one.usage.entries or 0 for one in layer.roots if root in one.root.path.parents)
            for layer in report.layers
            if layer.scope is Scope.USER
        }

    @staticmethod
    def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
        return [name for name, count in after.items() if count > before.get(name, 0)]


def _left(order: Sequence[Setting], taken: Mapping[str, Sequence[float]], fills: Sequence[float]) -> float:
    """Estimate the seconds of the remaining runs from earlier runs of the same setting, else from the first runs."""
    first = {WARM: fills[-1]}
    return sum(
        statistics.median(seen) if (seen := taken[one.setting]) else first.get(one.setting, fills[0]) for one in order
    )
