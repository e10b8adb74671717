"""``cachectl bench``: measure the time that each cache saves: all cold, all warm, all off, each off in turn."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from cachectl import layer_set, verbs
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, BadRequest, CachectlError, Refused
from cachectl.layers.base.text import plural
from cachectl.layers.core.json_form import as_json
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Scope
from cachectl.layers.core.switch import Ability, Switch
from cachectl.layers.host import drivers, hardware
from cachectl.show import output_files, units
from cachectl.show.table import Table
from cachectl.switching import child

EXAMPLE = "cachectl bench -- python simulation.py"
OPTIONS = (
    verbs.UNEXPECTED,
    ("-n --rounds", "N", "run each setting N times (default: 3)", {"type": verbs.number, "default": 3}),
    ("--json", "FILE", "write JSON to FILE, or with - to standard output instead of tables"),
    ("--plot", "FILE", "draw a chart to FILE, .png or .svg, or with - as SVG to standard output (needs matplotlib)"),
    ("--force", "replace an existing FILE that is not JSON or a picture of bench"),
)
USAGE = "cachectl bench [-n N] [--json FILE] [--plot FILE] [--force] -- COMMAND..."

COLD = "cold"
WARM = "warm"
OFF = "off"
_SWITCHED = "switched off"
_UNSEEN = "no difference seen"
#: The most runs to fill the caches. Because of PyOpenCL's binary cache, the driver stores another entry in the second
#: run, which the third run hits.
_FILLS = 3
#: File name extensions of charts, which are matplotlib's names of the formats.
_ENDINGS = (".png", ".svg")
#: Colours that differ in print and for colour-blind readers: warm, without one layer, without any.
_COLOURS = {WARM: "#2a9d8f", COLD: "#9aa5b1", OFF: "#9aa5b1"}
_ONE_OFF, _INK = "#e9a03b", "#1f2933"
#: Length of a command that fits above the bars.
_TITLE = 58
#: How much of a failed command's standard error is shown: the last lines, and the bytes searched for them.
_LINES = 10
_BYTES = 10_000


class Ended(CachectlError):
    """The command failed or was ended; ``status`` is its exit status, ``said`` the last lines of its standard error."""

    def __init__(self, setting: str, status: int, output: Sequence[str]) -> None:
        self.status = status
        self.said = tuple(output)
        super().__init__(f"the command ended with status {status} in its {setting} run, so nothing is compared")


@as_json(also=("median",))
class BenchSetting(NamedTuple):
    """One setting of the caches, and the wall seconds of the command in each round.

    ``setting`` is ``cold``, ``warm``, ``off``, or ``LAYER off`` with that layer in ``layer``; ``how`` says how it is
    set.
    """

    setting: str
    how: str
    layer: str | None
    seconds: list[float]

    @property
    def median(self) -> float:
        """Return the median of the seconds."""
        return statistics.median(self.seconds)


class Saved(NamedTuple):
    """The time that a layer saves: the median with it off minus the warm median, in seconds.

    ``by_round`` has the difference for each round, and ``entries`` counts the entries that the command stored in the
    layer. The time is ``seen`` if every run with the layer off took longer than every warm run.
    """

    layer: str
    seconds: float
    by_round: tuple[float, ...]
    entries: int
    seen: bool


class Machine(NamedTuple):
    """The processor (``None`` if unknown), the number of usable CPUs, the GPUs, the system, and the OpenCL drivers."""

    cpu: str | None
    cpus: int | None
    gpus: tuple[str, ...]
    system: str
    drivers: tuple[str, ...]

    @property
    def title(self) -> str:
        """Return a short description, GPUs first."""
        kinds = {gpu: self.gpus.count(gpu) for gpu in self.gpus}
        gpus = [gpu if count == 1 else f"{count}x {gpu}" for gpu, count in kinds.items()]
        usable = None if self.cpus is None else plural(self.cpus, "CPU")
        return ", ".join(filter(None, (*gpus, self.cpu, usable))) or self.system


def machine(environment: Environment) -> Machine:
    """Describe this machine from the files in ``environment.processes`` (``/proc``)."""
    return Machine(
        cpu=hardware.processor(environment)[0] or platform.processor() or None,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        gpus=hardware.nvidia_gpus(environment),
        system=f"{platform.system()} {platform.release()}",
        drivers=drivers.opencl_drivers(environment),
    )


@as_json("cachectl/bench/1", names={"saved": "saved_by_layer", "unused": "not_used"})
class Bench(NamedTuple):
    """All measurements, and the machine; ``unused`` maps the layers that were not turned off to the reasons."""

    command: tuple[str, ...]
    settings: tuple[BenchSetting, ...]
    saved: tuple[Saved, ...]
    unused: Mapping[str, str]
    machine: Machine


def bench(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    rounds: int = 3,
    *,
    notice: Callable[[str], None] = layer_set.warn_user,
    show: verbs.Progress = lambda *_: None,
) -> Bench:
    """Measure a command in every setting of the caches. The user's own caches are neither read nor written.

    :param rounds: how often each setting is run, in turn
    :param notice: gets caveats about the measurements
    :param show: gets the progress
    :raises Ended: if the command fails
    :raises CannotStart: if the command cannot be started
    """
    environment = stack.environment
    layers = tuple(layer for layer in stack if layer.abilities()[Ability.RELOCATE] is None)
    with child.signals_held() as signals, child.isolated_root(environment, notice=notice) as full:

        def measure(setting: str, root: Path, changes: Mapping[str, str | None]) -> float:
            """Run the command in a root; return its wall seconds, or raise :class:`Ended`."""
            child.link_cache_home(environment, layers, root)
            with TemporaryFile() as output:
                started = time.perf_counter()
                status = child.run(command, changes, environment, signals, quiet=output)
                seconds = time.perf_counter() - started
                if status := status or signals.ending():
                    output.seek(max(0, output.seek(0, os.SEEK_END) - _BYTES))
                    raise Ended(setting, status, output.read().decode(errors="replace").splitlines()[-_LINES:])
            return seconds

        changes, entries = child.variables_isolated(layers, full), dict[str, int]()
        for number in range(_FILLS):
            show(number, "filling the caches")
            measure("first", full, changes)
            before, entries = entries, _entries(layers, environment, full)
            if entries == before:
                break
        else:
            notice(f"still storing new entries after {_FILLS} runs; warm timings may be too high")
        settings, unused = _settings(stack, layers, entries)
        for number in range(rounds * len(settings)):
            # Each round begins with a different setting, so that none is always first.
            setting = settings[(number // len(settings) + number) % len(settings)]
            show(number, setting.setting, rounds * len(settings))
            # A separate root keeps a run from affecting the next one.
            with child.isolated_root(environment, notice=notice) as root:
                if setting.setting not in (COLD, OFF):
                    child.copy_isolated_root(full, root)
                changes = _prepared(setting, stack, layers, root)
                setting.seconds.append(measure(setting.setting, root, changes))
    warm, saved = settings[0], []
    for off in settings:
        if off.layer is not None:
            by_round = tuple(slow - fast for slow, fast in zip(off.seconds, warm.seconds, strict=True))
            is_seen = min(off.seconds) > max(warm.seconds)
            saved.append(Saved(off.layer, off.median - warm.median, by_round, entries[off.layer], is_seen))
    described = child.try_extra("the machine is not described", lambda: machine(environment), notice)
    unknown = Machine(None, None, (), platform.system(), ())
    return Bench(tuple(command), tuple(settings), tuple(saved), unused, described or unknown)


def _settings(
    stack: layer_set.LayerSet, layers: Iterable[Layer], entries: Mapping[str, int]
) -> tuple[list[BenchSetting], dict[str, str]]:
    """Return the settings, including one for each layer that the command filled, and the layers that stay on."""
    users = (layer for layer in stack if layer.about.scope is Scope.USER)
    unused = {name: f"stays as it is: {reason}" for name, reason in child.unable(users, Ability.RELOCATE).items()}
    used: dict[Layer, set[str]] = {}
    for layer in layers:
        if entries.get(layer.name):
            switch = layer.disable() if child.can_switch(layer) else Switch(layer.name)
            used[layer] = {*switch.unset, *switch.set}
        else:
            unused[layer.name] = "the command stores nothing in it"
    settings = [BenchSetting(WARM, "every cache full", None, [])]
    for layer, variables in used.items():
        sharing = [other.name for other, others in used.items() if other is not layer and others & variables]
        # The seconds of a layer that is only emptied include storing its entries again.
        if sharing:
            how = f"emptied: it shares its switch with {', '.join(sharing)}"
        elif child.can_switch(layer) and not layer.disable().patches:
            how = _SWITCHED
        else:
            how = "emptied: no variable switches it off"
        if how != _SWITCHED and layer.abilities()[Ability.CLEAR] is not None:
            unused[layer.name] = "no switch, and it cannot be emptied"
            continue
        settings.append(BenchSetting(f"{layer.name} off", how, layer.name, []))
    settings.append(BenchSetting(COLD, "every cache empty", None, []))
    return [*settings, BenchSetting(OFF, "all off", None, [])], unused


def _prepared(
    setting: BenchSetting, stack: layer_set.LayerSet, layers: Iterable[Layer], root: Path
) -> dict[str, str | None]:
    """Return the variables of a setting in a root, and empty the layer of the setting there if it has no switch."""
    if setting.setting == OFF:
        return child.variables_off(layers, stack, root)
    changes = child.variables_isolated(layers, root)
    if setting.layer is not None and setting.how == _SWITCHED:
        changes |= child.merged([stack[setting.layer].disable()])
    elif setting.layer is not None:
        layer = layer_set.LayerSet(stack.environment.with_variables(changes))[setting.layer]
        outcome = layer.clear(layer.plan_clear())
        if outcome.failed:
            raise Refused(layer.name, f"cannot be emptied: {outcome.failed[0].because}")
    return changes


def _entries(layers: Iterable[Layer], environment: Environment, root: Path) -> dict[str, int]:
    """Count the entries of each layer in a root; unreadable entries are not counted."""
    moved, counts = layer_set.LayerSet(child.environment_of(environment, root)), {}
    for name in (layer.name for layer in layers):
        counts[name] = 0
        with suppress(*FAILURES):
            places = [place for place in moved[name].roots() if root in place.path.parents]
            counts[name] = sum(moved[name].store.usage(place).entries or 0 for place in places)
    return counts


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl bench``."""
    options, stream = request.options, output_files.STREAM
    request.demand_command()
    ending = ".svg" if options.plot in (None, stream) else os.path.splitext(options.plot)[1].lower()
    if ending not in _ENDINGS:
        raise BadRequest(f"--plot {options.plot!r}: the file name must end in {' or '.join(_ENDINGS)}")
    if options.plot is not None and find_spec("matplotlib") is None:
        raise CachectlError("--plot needs matplotlib, the extra plot: pip install 'opencl-cachectl[plot]'")
    if options.plot == options.json == stream:
        request.misuse("JSON and the chart cannot both go to standard output; name a FILE for one")
    kind = output_files.json_kind("cachectl/bench")
    document, picture = request.outputs((options.json, kind), (options.plot, output_files.PICTURE))
    try:
        with request.output.progress() as show_step:
            measured = bench(request.stack, request.command, options.rounds, notice=request.notice, show=show_step)
    except Ended as ended:
        request.output.say_on_stderr(f"command: {line}" for line in ended.said)
        raise
    if options.json != stream:
        # Standard output may be the chart's.
        say = request.output.say_on_stderr if options.plot == stream else request.output.say
        say(show(measured))
    request.write_json(measured, document)
    if picture is not None:
        picture.write((_draw(measured, ending[1:]),))
    return 0


def show(measured: Bench) -> Iterator[str | Table]:
    """Yield the times of each setting, then what each layer saves."""
    rows: list[tuple[str, ...]] = []
    for setting in measured.settings:
        seconds = (setting.median, min(setting.seconds), max(setting.seconds))
        rows.append((*(f"{number:.2f}" for number in seconds), setting.setting, setting.how))
    numeric = dict.fromkeys(("median s", "fastest", "slowest"), units.count)
    yield from (Table({**numeric, "setting": str, "how": str}, rows), "")
    if measured.saved:
        rows = []
        for saved in measured.saved:
            numbers = map(_difference, (saved.seconds, min(saved.by_round), max(saved.by_round)))
            rows.append((*numbers, saved.layer, "" if saved.seen else _UNSEEN))
        yield Table({**dict.fromkeys(("saves s", "least", "most"), units.count), "layer": str, "": str}, rows)
    else:
        yield "the command stores nothing in any cache"
    if measured.unused:
        yield from ("", f"not used: {', '.join(measured.unused)}")


def _difference(seconds: float) -> str:
    # Without -0.00.
    return f"{round(seconds, 2) or 0.0:+.2f}"


def _draw(measured: Bench, form: str) -> bytes:
    """Draw medians as bars and runs as points; return a file in matplotlib's format ``form``."""
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    medians = [setting.median for setting in measured.settings]
    titles = []
    for setting in measured.settings:
        what = f"without {setting.layer}" if setting.layer else f"all caches {setting.setting}"
        titles.append(f"{what}\n{setting.median:.2f} ({_difference(setting.median - medians[0])})")
    colours = [_ONE_OFF if setting.layer else _COLOURS[setting.setting] for setting in measured.settings]
    # Text in an SVG stays text, so that slides can be searched.
    with mpl.rc_context({"font.size": 13, "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(10, 2 + 0.52 * len(medians)), layout="constrained")
        axes = figure.add_subplot()
        axes.barh(titles, medians, height=0.62, color=colours, zorder=2)
        for place, setting in enumerate(measured.settings):
            places = [place] * len(setting.seconds)
            axes.scatter(setting.seconds, places, s=26, color=_INK, edgecolors="white", zorder=3)
        axes.invert_yaxis()
        axes.set_xlabel("wall seconds (points: single runs; in parentheses: difference to warm)")
        axes.grid(visible=True, axis="x", color="#e4e7eb", zorder=0)
        axes.spines[:].set_visible(False)
        # Without folders, and cut to the width of the chart.
        words = shlex.join(os.path.basename(word) if os.path.isabs(word) else word for word in measured.command)
        figure.suptitle(words if len(words) <= _TITLE else words[: _TITLE - 1] + "…", fontweight="bold", color=_INK)
        rounds = len(measured.settings[0].seconds)
        axes.set_title(f"{measured.machine.title} · {'once' if rounds == 1 else f'{rounds} times'} each")
        file = io.BytesIO()
        maker = {"Software" if form == "png" else "Creator": output_files.MAKER}
        figure.savefig(file, format=form, dpi=160, metadata=maker)
    return file.getvalue()
