"""``cachectl trace``: hits, misses and stores of every layer in a run of a command."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from cachectl import layer_set, verbs
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.text import plural
from cachectl.show import output_files, units
from cachectl.show.table import Table, sentence
from cachectl.switching import child
from cachectl.watching import evidence, ledger, timeline
from cachectl.watching.portable import building
from cachectl.watching.trace import Recorder

EXAMPLE = "cachectl trace --explain -- python simulation.py"
OPTIONS = (
    verbs.UNEXPECTED,
    ("--explain", "also list builds and entries, and show how sources changed"),
    ("--expect-warm", "exit with 1 if a lookup missed, anything was compiled, or either is unknown"),
    ("--layer", "LAYER", "with --expect-warm: only this layer; can be repeated", verbs.REPEATED | {"dest": "layers"}),
    verbs.PORTABLE,
    ("--no-ledger", "neither compare with earlier runs nor remember this one"),
    ("--forget", "remove what earlier traces remembered, and exit"),
    ("--json", "FILE", "write JSON to FILE, or with - to standard output"),
    ("--timeline", "FILE", "write a timeline, as .html or as .json in the Chrome trace format, for Perfetto"),
    ("--force", "replace an existing FILE that is not JSON or a timeline of trace"),
)
#: The notice about a command that cannot be watched.
_UNWATCHED = "the command is not watched"
#: How many missed kernels are listed, and the least share of the run for a stage to be listed.
_FEW, _SHARE = 12, 0.01
USAGE = """\
cachectl trace [--explain] [--expect-warm [--layer LAYER]] [--json FILE]
       [--timeline FILE.json|FILE.html] [--force] [--no-ledger] [--portable]
       -- COMMAND..."""


def trace(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    *,
    explain: bool = False,
    remembers: bool = True,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> timeline.Trace:
    """Run a command, and return what each layer did and what misses cost.

    A command that cannot be watched, such as on a full disk, runs nevertheless.

    :param explain: also how sources changed since the last traced run
    :param remembers: compare with the last traced run of each kernel, and remember this one
    :param notice: gets a line for each library that could not be watched
    :raises CannotStart: if the command cannot be started
    """
    with ExitStack() as block:
        signals = block.enter_context(child.signals_held())

        def start() -> tuple[Recorder, dict[str, str]]:
            folder = block.enter_context(child.isolated_root(stack.environment, notice=notice))
            recorder = Recorder(stack, folder, notice, remembers=remembers)
            block.callback(recorder.stop)
            return recorder, recorder.start()

        recorder, variables = child.try_extra(_UNWATCHED, start, notice) or (None, {})
        status = child.run(command, variables, stack.environment, signals)
        if recorder is not None:
            return recorder.finish(command, status, explain=explain)
    return timeline.Trace(tuple(command), status, verdict="Unknown: the run was not watched.")


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl trace``."""
    options = request.options
    if options.forget:
        existed = ledger.forget(request.environment)
        request.notice("the ledger of traces was removed" if existed else "there is no ledger of traces")
        return 0
    request.demand_command()
    request.stack.named(options.layers)
    if options.timeline is not None:
        timeline.check(options.timeline)
    kind = output_files.json_kind("cachectl/trace")
    document, drawn = request.outputs((options.json, kind), (options.timeline, timeline.TIMELINE))
    chosen = {"explain": options.explain, "remembers": not options.no_ledger}
    with building(request.stack, request.notice, portable=options.portable) as stack:
        traced = trace(stack, request.command, notice=request.notice, **chosen)
    # Standard output belongs to the command.
    say = partial(request.output.say_on_stderr, show(traced, explain=options.explain))

    def write() -> bool:
        request.write_json(traced, document)
        if drawn is not None and not traced.processes:
            raise CachectlError(f"no process of the run could be watched, so {drawn.name} was not written")
        if drawn is not None:
            drawn.write((timeline.encode(traced, drawn.name),))
        return True

    child.try_extra("the run is not shown", say, request.notice)
    written = child.try_extra("a file is missing", write, request.notice)
    # The command's own status takes precedence.
    status = traced.exit_status or int(written is None)
    if status or not options.expect_warm or (reason := _not_warm(traced, options.layers)) is None:
        return status
    request.notice(f"not warm: {reason}")
    return 1


def _not_warm(traced: timeline.Trace, layers: Collection[str]) -> str | None:
    """Return why a run was not warm in some layers, or in all; ``None`` if it was."""
    uses = [use for use in traced.layers if not layers or use.layer in layers]
    if missed := [use for use in uses if use.misses or use.stores]:
        return "; ".join(f"{use.layer}: {plural(use.misses or use.stores or 0, 'miss', 'misses')}" for use in missed)
    if not layers:
        return None if traced.warm else traced.verdict
    if late := [layer for layer in layers if traced.late.get(layer)]:
        return f"{', '.join(late)}: compiled at launch"
    for program in traced.unwatched:
        if not {*layers}.isdisjoint(program["layers"]):
            return f"{program['command']} could not be watched"
    if uncounted := [use.layer for use in uses if not use.hits]:
        return f"no lookup of {', '.join(uncounted)} was counted"
    unknown = [use.layer for use in uses if use.misses is None]
    return f"misses in {', '.join(unknown)} cannot be counted" if unknown else None


def show(traced: timeline.Trace, *, explain: bool = False) -> Iterator[bytes | str | Table]:
    """Yield what people see of a trace, after the output of the run's C code; ``explain`` adds builds and entries."""
    yield traced.passed_on
    yield traced.verdict
    if traced.missed:
        yield from ("", _missed(traced.missed))
    if traced.summary is not None and traced.summary.stages:
        yield from ("", _stages(traced.summary, traced.wall_seconds))
        threads = {(span.process, span.thread) for span in traced.spans}
        if (seconds := sum(stage.seconds for stage in traced.summary.stages)) > traced.wall_seconds:
            yield f"stages add up to {seconds:.2f} s in {len(threads)} threads, in a run of {traced.wall_seconds:.2f} s"
    shown = [layer for layer in traced.layers if layer.was_used]
    stopped = [layer for layer in traced.layers if layer.state is not None]
    yield ""
    if shown:
        numbers = dict.fromkeys(("hits", "misses", "stores"), units.count)
        rows = [(use.layer, use.hits, use.misses, use.stores, use.bytes, use.evidence) for use in shown]
        yield Table({"layer": str, **numbers, "stored": units.size, "evidence": str}, rows)
    yield from (f"{layer.layer}: {layer.state} ({layer.state_why})" for layer in stopped)
    unused_count = len(traced.layers) - len({layer.layer for layer in (*shown, *stopped)})
    if traced.layers:
        yield f"{plural(unused_count, 'more layer' if shown or stopped else 'layer')}: no use seen"
    for program in traced.unwatched:
        yield f"not counted, because it could not be watched: {program['command']} ({', '.join(program['layers'])})"
    if not explain:
        return
    if traced.kernels:
        yield from ("", _builds(traced.kernels))
    if traced.entries:
        yield from ("", _entries(traced.entries))
    yield from (line for kernel in traced.missed if kernel.diff for line in ("", *kernel.diff.splitlines()))


def _missed(kernels: Sequence[timeline.MissedKernel]) -> Table:
    rows = [
        (f"{kernel.seconds:.3f}", kernel.kernel or units.DASH, " ".join(kernel.layers), kernel.because)
        for kernel in kernels[:_FEW]
    ]
    if more := kernels[_FEW:]:
        rows.append((f"{sum(kernel.seconds for kernel in more):.3f}", f"{len(more):,} more", "", ""))
    return Table({"seconds": units.count, "missed": str, "in": str, "because": sentence}, rows)


def _stages(summary: timeline.Summary, wall: float) -> Table:
    """Return the stages that took long, the sum of the others, and the program's own time."""
    long = [stage for stage in summary.stages if stage.seconds >= _SHARE * wall]
    short = [stage for stage in summary.stages if stage not in long]
    if short:
        seconds, hit, missed = (sum(times) for times in zip(*(stage[1:] for stage in short), strict=True))
        long.append(timeline.StageTime("other stages", seconds, hit, missed))
    rows = []
    for stage in (*long, timeline.StageTime("the program", summary.own, 0.0, 0.0)):
        split = [f"{seconds:.3f}" if seconds else units.DASH for seconds in (stage.hit, stage.missed)]
        rows.append((stage.stage, f"{stage.seconds:.3f}", *split))
    return Table({"stage": str, **dict.fromkeys(("seconds", "hit", "missed"), units.count)}, rows)


def _builds(kernels: Iterable[timeline.KernelTrace]) -> Table:
    """Return one row for the builds of the same kernels that the same layer served."""
    groups: dict[tuple[str, str], list[float]] = {}
    for kernel in kernels:
        served_by = kernel.served_by or ("compiled" if kernel.compiled else units.DASH)
        groups.setdefault((served_by, " ".join(kernel.kernels) or units.DASH), []).append(kernel.seconds)
    rows = [(f"{sum(seconds):.3f}", len(seconds), *names) for names, seconds in groups.items()]
    return Table({"seconds": units.count, "builds": units.count, "served by": str, "kernels": str}, rows)


def _entries(entries: Iterable[evidence.EntryTrace]) -> Table:
    rows = []
    for entry in entries:
        kernels = " ".join(entry.kernels or ()) or units.DASH
        hits = 0 if entry.broken else entry.hits
        rows.append((entry.layer, hits, entry.stores, entry.bytes, entry.device or units.DASH, kernels))
    numbers = {"hits": units.count, "stores": units.count, "size": units.size}
    return Table({"entries of": str, **numbers, "device": str, "kernels": str}, rows)
