"""``cachectl trace``: hits, misses and stores of every layer in a run of a command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from cachectl import layer_set
from cachectl.layers.base import errors
from cachectl.options import FORCE, UNEXPECTED, Option, Request
from cachectl.table import DASH, Column, Table, counts, size

if TYPE_CHECKING:
    from cachectl.watching import evidence, timeline
    from cachectl.watching.trace import KernelTrace, Trace

OPTIONS: Final = (
    UNEXPECTED,
    Option("--explain", action="store_true", help="also list builds and entries, and explain every miss"),
    Option("--json", metavar="FILE", help="write JSON to a file, - for standard output"),
    Option(
        "--timeline",
        metavar="FILE",
        help="write where the time went: .json in the Chrome trace format, which Perfetto opens, .html as a page",
    ),
    FORCE.having(help="replace an existing FILE that is not JSON or a timeline of trace"),
)
USAGE: Final = """\
cachectl trace [--explain] [--json FILE] [--timeline FILE.json|FILE.html] [--force]
       -- COMMAND..."""


def trace(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    *,
    explain: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> Trace:
    """Run a command and return what each layer did; with ``explain`` also why each lookup missed.

    ``notice`` gets a line for each thing that went wrong with the temporary folder, and for each library that could not
    be watched. Raises :class:`~cachectl.switching.run.CannotStart`.
    """
    from cachectl.switching import run as child
    from cachectl.switching.isolated import isolated_root
    from cachectl.watching.trace import Tracer

    with child.signals_held() as signals, isolated_root(stack.environment, notice=notice) as folder:
        tracer = Tracer(stack, folder, explain=explain)
        with tracer.watching():
            started = time.perf_counter()
            status = child.run(command, tracer.variables(stack.environment), stack.environment, signals)
            wall = time.perf_counter() - started
        traced = tracer.ended(command, status, wall)
    for line in traced.misfits:
        notice(line)
    return traced


def run(request: Request) -> int:
    """Carry out ``cachectl trace``."""
    from cachectl.output_files import demand_targets, json_kind
    from cachectl.watching import timeline_files

    options = request.options
    request.demand_command()
    if options.timeline is not None:
        timeline_files.check(options.timeline)
    document = None if options.json is None else request.output_file(options.json, json_kind("cachectl/trace"))
    drawn = None if options.timeline is None else request.output_file(options.timeline, timeline_files.TIMELINE)
    demand_targets(document, drawn)
    traced = trace(request.stack, request.command, explain=options.explain, notice=request.notice)
    if document is not None:
        request.write_json(traced, document)
    # Standard output belongs to the command.
    request.say_on_stderr(show(traced))
    if drawn is not None and traced.timeline is None:
        request.notice(f"no process of the run could be watched, so {drawn.name} was not written")
        return traced.exit_status or 1
    if drawn is not None and traced.timeline is not None:
        drawn.write((timeline_files.encode(traced.timeline, drawn.name),))
    return traced.exit_status or 0


_LAYERS: Final[tuple[Column[evidence.LayerTrace], ...]] = (
    Column("layer", lambda layer: layer.layer),
    counts("hits", lambda layer: layer.hits),
    counts("misses", lambda layer: layer.misses),
    counts("stores", lambda layer: layer.stores),
    Column("stored", lambda layer: size(layer.bytes), right=True),
    Column("evidence", lambda layer: layer.evidence),
)
#: Of builds of the same kernels that the same layer served.
_BUILDS: Final[tuple[Column[Sequence[KernelTrace]], ...]] = (
    Column("seconds", lambda alike: f"{sum(kernel.seconds for kernel in alike):.3f}", right=True),
    counts("builds", len),
    Column("served by", lambda alike: _served_by(alike[0])),
    Column("kernels", lambda alike: " ".join(alike[0].kernels) or DASH),
)
_ENTRIES: Final[tuple[Column[evidence.EntryTrace], ...]] = (
    Column("entries of", lambda entry: entry.layer),
    counts("hits", lambda entry: 0 if entry.broken else entry.hits),
    counts("stores", lambda entry: entry.stores),
    Column("size", lambda entry: size(entry.bytes), right=True),
    Column("device", lambda entry: entry.device or DASH),
    Column("kernels", lambda entry: " ".join(entry.kernels or ()) or DASH),
)
_STAGES: Final[tuple[Column[timeline.StageTime], ...]] = (
    Column("stage", lambda time: time.stage),
    Column("seconds", lambda time: f"{time.seconds:.3f}", right=True),
    Column("hit", lambda time: f"{time.hit:.3f}" if time.hit else DASH, right=True),
    Column("missed", lambda time: f"{time.missed:.3f}" if time.missed else DASH, right=True),
)
_SLOWEST: Final[tuple[Column[timeline.KernelTime], ...]] = (
    Column("seconds", lambda time: f"{time.seconds:.3f}", right=True),
    Column("most in", lambda time: time.slowest_stage),
    Column("state", lambda time: {True: "warm", False: "cold", None: DASH}[time.warm]),
    Column("slowest kernels", lambda time: time.kernel),
)


def show(traced: Trace) -> Iterator[bytes | str | Table[Any]]:
    """Yield what people see of a trace, after what the run's own C code printed."""
    yield traced.passed_on
    shown = [layer for layer in traced.layers if layer.was_used]
    stopped = [layer for layer in traced.layers if layer.state is not None]
    if shown:
        yield Table(_LAYERS, shown)
    yield from (f"{layer.layer}: {layer.state} ({layer.state_why})" for layer in stopped)
    others = len(traced.layers) - len({layer.layer for layer in (*shown, *stopped)})
    yield f"{errors.plural(others, 'more layer' if shown or stopped else 'layer')}: no use seen"
    for program in traced.unwatched:
        yield f"not counted, could not be watched: {program.command} (it used {', '.join(program.layers)})"
    summary = traced.summary
    if summary is not None and summary.stages:
        yield from ("", Table(_STAGES, summary.stages), "", _missed(summary, traced))
        if summary.slowest:
            yield from ("", Table(_SLOWEST, summary.slowest))
    if traced.misses is None:
        return
    alike: dict[tuple[tuple[str, ...], str], list[KernelTrace]] = {}
    for kernel in traced.kernels:
        alike.setdefault((kernel.kernels, _served_by(kernel)), []).append(kernel)
    if alike:
        yield from ("", Table(_BUILDS, alike.values()))
    if traced.entries:
        yield from ("", Table(_ENTRIES, traced.entries))
    yield from ("", *_folded(traced.misses))


def _served_by(kernel: KernelTrace) -> str:
    return kernel.served_by or ("compiled" if kernel.compiled else DASH)


def _missed(summary: timeline.Summary, traced: Trace) -> str:
    off = "".join(
        f"; {layer.layer} is {layer.state}" for layer in traced.layers if layer.state in ("disabled", "closed")
    )
    if not summary.missed and not summary.at_least:
        return f"it took {traced.wall_seconds:.2f} s, and no lookup missed{off}"
    about = "at least " if summary.at_least else ""
    return f"of {traced.wall_seconds:.2f} s, {about}{summary.missed:.2f} s went into misses{off}"


def _folded(misses: Sequence[evidence.Miss]) -> Iterator[str]:
    """Yield a line for the first miss of each reason in each part of a layer, and one for the others of that reason."""
    groups: dict[tuple[str, str | None, str], list[evidence.Miss]] = {}
    for miss in misses:
        groups.setdefault((miss.layer, miss.part, miss.because), []).append(miss)
    for (layer, part, because), alike in groups.items():
        names = list(dict.fromkeys(" ".join(miss.kernels) or DASH for miss in alike))
        yield f"{': '.join(filter(None, (layer, part, names[0])))}: {because}"
        if names[1:]:
            yield f"  … and {errors.plural(len(names) - 1, 'more kernel')}: the same"
