"""``cachectl trace``: hits, misses and stores of every layer in a run of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser
from cachectl.layers.base.texts import plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cachectl.watching.evidence import EntryTrace, LayerTrace, Miss
    from cachectl.watching.timeline import KernelTime, StageTime, Summary
    from cachectl.watching.trace import KernelTrace, Rebuilt, Trace

T = TypeVar("T")
#: Seconds of repeated builds that are worth a line, and the most lines.
_NOTABLE: Final = 0.1
_MOST: Final = 3


def add_options(parser: Parser) -> None:
    parser.add_shared("unexpected")
    explain = "also list builds and entries, and explain every miss"
    parser.add_argument("--explain", action="store_true", help=explain)
    parser.add_argument("--json", metavar="FILE", help="write JSON to a file, - for standard output")
    timeline = "write where the time went: .json in the Chrome trace format, which Perfetto opens, .html as a page"
    parser.add_argument("--timeline", metavar="FILE", help=timeline)
    parser.add_force("JSON or a timeline of trace")
    parser.usage = (
        "cachectl trace [--explain] [--json FILE] [--timeline FILE.json|FILE.html] [--force]\n       -- COMMAND..."
    )


def run(call: Call) -> int:
    from cachectl.output_files import STREAM, demand_targets, json_kind
    from cachectl.watching import timeline_files

    given = call.options
    call.demand_command()
    if given.timeline is not None:
        timeline_files.check(given.timeline)
    written = None if given.json is None else call.output_file(given.json, json_kind("cachectl/trace"))
    drawn = None if given.timeline is None else call.output_file(given.timeline, timeline_files.TIMELINE)
    demand_targets(written, drawn)
    done = call.stack.trace(call.command, explain=given.explain, notice=output.warn)
    if given.json == STREAM:
        output.show_json(done)
    elif written is not None:
        written.write((output.json_bytes(done),))
    _show(done)
    if drawn is not None and done.timeline is None:
        output.warn(f"no process of the run could be watched, so {drawn.name} was not written")
        return done.exit_status or 1
    if drawn is not None and done.timeline is not None:
        drawn.write((timeline_files.encode(done.timeline, drawn.name),))
    return done.exit_status or 0


COLUMNS: Final[tuple[output.Column[LayerTrace], ...]] = (
    output.Column("layer", lambda layer: layer.layer),
    output.counts("hits", lambda layer: layer.hits),
    output.counts("misses", lambda layer: layer.misses),
    output.counts("stores", lambda layer: layer.stores),
    output.Column("stored", lambda layer: output.size(layer.bytes), right=True),
    output.Column("evidence", lambda layer: layer.evidence),
)
#: Of builds of the same kernels that the same layer served.
KERNEL_COLUMNS: Final[tuple[output.Column[Sequence[KernelTrace]], ...]] = (
    output.Column("seconds", lambda alike: f"{sum(kernel.seconds for kernel in alike):.3f}", right=True),
    output.counts("builds", len),
    output.Column("served by", lambda alike: _served_by(alike[0])),
    output.Column("kernels", lambda alike: " ".join(alike[0].kernels) or output.DASH),
)
ENTRY_COLUMNS: Final[tuple[output.Column[EntryTrace], ...]] = (
    output.Column("entries of", lambda entry: entry.layer),
    output.counts("hits", lambda entry: 0 if entry.broken else entry.hits),
    output.counts("stores", lambda entry: entry.stores),
    output.Column("size", lambda entry: output.size(entry.bytes), right=True),
    output.Column("device", lambda entry: entry.device or output.DASH),
    output.Column("kernels", lambda entry: " ".join(entry.kernels or ()) or output.DASH),
)


STAGE_COLUMNS: Final[tuple[output.Column[StageTime], ...]] = (
    output.Column("stage", lambda one: one.stage),
    output.Column("seconds", lambda one: f"{one.seconds:.3f}", right=True),
    output.Column("hit", lambda one: _seconds(one.hit), right=True),
    output.Column("missed", lambda one: _seconds(one.missed), right=True),
)
SLOWEST_COLUMNS: Final[tuple[output.Column[KernelTime], ...]] = (
    output.Column("seconds", lambda one: f"{one.seconds:.3f}", right=True),
    output.Column("most in", lambda one: one.slowest_stage),
    output.Column("state", lambda one: {True: "warm", False: "cold", None: output.DASH}[one.warm]),
    output.Column("slowest kernels", lambda one: one.kernel),
)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds else output.DASH


def _served_by(kernel: KernelTrace) -> str:
    return kernel.served_by or ("compiled" if kernel.compiled else output.DASH)


def _missed(summary: Summary, done: Trace) -> str:
    off = "".join(f"; {one.layer} is {one.state}" for one in done.layers if one.state in ("disabled", "closed"))
    if not summary.missed and not summary.at_least:
        return f"it took {done.wall_seconds:.2f} s, and no lookup missed{off}"
    about = "at least " if summary.at_least else ""
    return f"of {done.wall_seconds:.2f} s, {about}{summary.missed:.2f} s went into misses{off}"


def _table(columns: Sequence[output.Column[T]], things: Iterable[T]) -> list[str]:
    return output.plain_table(columns, things, output.width(sys.stderr))


def _show(done: Trace) -> None:
    """Print on standard error: standard output belongs to the command."""
    with suppress(OSError):
        sys.stderr.flush()
        os.write(2, done.passed_on)
    shown = [layer for layer in done.layers if layer.was_used]
    if shown:
        output.show_errors(_table(COLUMNS, shown))
    stopped = [layer for layer in done.layers if layer.state is not None]
    output.show_errors(f"{layer.layer}: {layer.state} ({layer.state_why})" for layer in stopped)
    others = len(done.layers) - len({layer.layer for layer in (*shown, *stopped)})
    output.show_errors([f"{plural(others, 'more layer' if shown or stopped else 'layer')}: no use seen"])
    for one in done.unwatched:
        output.show_errors([f"not counted, could not be watched: {one.command} (it used {', '.join(one.layers)})"])
    if done.summary is not None and done.summary.stages:
        output.show_errors(["", *_table(STAGE_COLUMNS, done.summary.stages)])
        output.show_errors(["", _missed(done.summary, done)])
        if done.summary.slowest:
            output.show_errors(["", *_table(SLOWEST_COLUMNS, done.summary.slowest)])
    if worth := [one for one in done.rebuilt if one.seconds >= _NOTABLE][:_MOST]:
        output.show_errors(["", *map(_rebuilt_line, worth)])
    if done.misses is not None:
        _explain(done, done.misses)


def _explain(done: Trace, misses: Sequence[Miss]) -> None:
    if done.kernels:
        alike: dict[tuple[tuple[str, ...], str], list[KernelTrace]] = {}
        for kernel in done.kernels:
            alike.setdefault((kernel.kernels, _served_by(kernel)), []).append(kernel)
        output.show_errors(["", *_table(KERNEL_COLUMNS, alike.values())])
    if done.entries:
        output.show_errors(["", *_table(ENTRY_COLUMNS, done.entries)])
    output.show_errors(["", *_folded(misses)])


def _rebuilt_line(one: Rebuilt) -> str:
    again = f"one process built the same program {one.builds:,} times, all but the first in {one.seconds:.2f} s"
    return f"{' '.join(one.kernels)}: {again}; keep the program or its kernels, and it is built once"


def _folded(misses: Sequence[Miss]) -> Iterator[str]:
    """Yield a line for the first miss of each reason in each part of a layer, and one for the others of that reason."""
    groups: dict[tuple[str, str | None, str], list[Miss]] = {}
    for miss in misses:
        groups.setdefault((miss.layer, miss.part, miss.because), []).append(miss)
    for (layer, part, because), alike in groups.items():
        names = list(dict.fromkeys(" ".join(miss.kernels) or output.DASH for miss in alike))
        yield f"{': '.join(filter(None, (layer, part, names[0])))}: {because}"
        if names[1:]:
            yield f"  … and {plural(len(names) - 1, 'more kernel')}: the same"
