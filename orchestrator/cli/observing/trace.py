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

    from cachectl.entry_files.lookups import EntryTrace
    from cachectl.observing.summary import Forecast, KernelTime, StageTime
    from cachectl.observing.trace import KernelTrace, LayerTrace, Miss, Rebuilt, Trace
    from cachectl.timelines.compare import Comparison, KernelChange, StageChange

T = TypeVar("T")
#: Seconds of repeated builds that are worth a line, and the most lines.
_NOTABLE: Final = 0.1
_MOST: Final = 3


def add_options(parser: Parser) -> None:
    parser.add_shared("unexpected")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="also list the builds of kernels: the layer that served them, their time",
    )
    parser.add_argument("--explain", action="store_true", help="also explain every miss")
    timeline = "write where the time went: .json in the Chrome trace format, which Perfetto opens, .html as a page"
    parser.add_argument("--timeline", metavar="FILE", help=timeline)
    compare = "run nothing: compare two timelines in .json files"
    parser.add_argument("--compare", nargs=2, metavar="FILE", help=compare)
    parser.add_argument("--json", metavar="FILE", help="write JSON to a file, - for standard output")
    parser.add_force("JSON or a timeline of trace")
    parser.add_shared("--all-layers")
    parser.usage = (
        "cachectl trace [--kernels] [--explain] [--all-layers] [--timeline FILE]\n"
        "       [--json FILE] [--force] -- COMMAND...\n"
        "       cachectl trace --compare A.json B.json [--json FILE [--force]]"
    )


def run(call: Call) -> int:
    from cachectl.output_files import STREAM, demand_targets, json_kind
    from cachectl.timelines import files

    given = call.options
    if given.compare is not None:
        return _compare(call)
    call.demand_command()
    if given.timeline is not None:
        files.check(given.timeline)
    written = None if given.json is None else call.output_file(given.json, json_kind("cachectl/trace"))
    drawn = None if given.timeline is None else call.output_file(given.timeline, files.TIMELINE)
    demand_targets(written, drawn)
    done = call.stack.trace(call.command, kernels=given.kernels, explain=given.explain, notice=output.warn)
    if given.json == STREAM:
        output.show_json(done)
    elif written is not None:
        written.write((output.json_bytes(done),))
    _show(done, all_layers=given.all_layers)
    if drawn is not None and done.timeline is None:
        output.warn(f"no process of the run could be watched, so {drawn.name} was not written")
        return done.exit_status or 1
    if drawn is not None and done.timeline is not None:
        drawn.write((files.encode(done.timeline, drawn.name),))
    return done.exit_status or 0


def _compare(call: Call) -> int:
    from cachectl.layers.base.errors import BadRequest
    from cachectl.output_files import STREAM, demand_targets, json_kind
    from cachectl.timelines import files
    from cachectl.timelines.compare import compare

    given = call.options
    if call.command or given.timeline is not None:
        message = "--compare reads two timelines and runs no command; leave out the command and --timeline"
        raise BadRequest(message)
    written = None if given.json is None else call.output_file(given.json, json_kind("cachectl/compare"))
    demand_targets(written)
    before, after = map(files.read, given.compare)
    found = compare(before, after, tuple(given.compare))
    if given.json == STREAM:
        output.show_json(found)
        return 0
    if written is not None:
        written.write((output.json_bytes(found),))
    _show_comparison(found)
    return 0


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
CHANGED_STAGES: Final[tuple[output.Column[StageChange], ...]] = (
    output.Column("stage", lambda one: one.stage),
    output.Column("before", lambda one: f"{one.before:.3f}", right=True),
    output.Column("after", lambda one: f"{one.after:.3f}", right=True),
    output.Column("change", lambda one: f"{one.after - one.before:+.3f}", right=True),
)
CHANGED_KERNELS: Final[tuple[output.Column[KernelChange], ...]] = (
    output.Column("before", lambda one: one.before or output.DASH),
    output.Column("after", lambda one: one.after or output.DASH),
    output.Column("seconds", lambda one: f"{one.seconds_after - one.seconds_before:+.3f}", right=True),
    output.Column("layers", lambda one: " ".join(one.layers) or output.DASH),
    output.Column("kernel", lambda one: one.kernel),
)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds else output.DASH


def _served_by(kernel: KernelTrace) -> str:
    return kernel.served_by or ("compiled" if kernel.compiled else output.DASH)


def _forecast(warm: Forecast, wall: float) -> str:
    if not warm.saves and not warm.at_least:
        return f"it took {wall:.2f} s, and no lookup missed"
    about = "at least" if warm.at_least else "about"
    return f"it took {wall:.2f} s; with every cache filled, {about} {warm.saves:.2f} s less: {warm.seconds:.2f} s"


def _show_comparison(found: Comparison) -> None:
    output.show_lines(
        [f"before {found.wall_before:.2f} s: {found.before}", f"after {found.wall_after:.2f} s: {found.after}", ""]
    )
    output.show_table(CHANGED_STAGES, found.stages)
    output.show_lines([""])
    if found.kernels:
        output.show_table(CHANGED_KERNELS, found.kernels)
    output.show_lines([f"as cold or warm as before: {plural(found.unchanged, 'kernel')}"])


def _table(columns: Sequence[output.Column[T]], things: Iterable[T]) -> list[str]:
    return output.plain_table(columns, things, output.width(sys.stderr))


def _show(done: Trace, *, all_layers: bool) -> None:
    """Print on standard error: standard output belongs to the command."""
    with suppress(OSError):
        sys.stderr.flush()
        os.write(2, done.passed_on)
    shown = [layer for layer in done.layers if all_layers or layer.hits or layer.misses or layer.stores]
    if shown:
        output.show_errors(_table(COLUMNS, shown))
    output.show_errors(output.more_layers(len(done.layers) - len(shown), shown, "no use seen"))
    for one in done.unwatched:
        output.show_errors([f"not counted, could not be watched: {one.command} (it used {', '.join(one.layers)})"])
    if done.summary is not None and done.summary.stages:
        output.show_errors(["", *_table(STAGE_COLUMNS, done.summary.stages)])
        output.show_errors(["", _forecast(done.summary.warm, done.wall_seconds)])
        if done.summary.slowest:
            output.show_errors(["", *_table(SLOWEST_COLUMNS, done.summary.slowest)])
    if worth := [one for one in done.rebuilt if one.seconds >= _NOTABLE][:_MOST]:
        output.show_errors(["", *map(_rebuilt_line, worth)])
    if done.kernels:
        alike: dict[tuple[tuple[str, ...], str], list[KernelTrace]] = {}
        for kernel in done.kernels:
            alike.setdefault((kernel.kernels, _served_by(kernel)), []).append(kernel)
        output.show_errors(["", *_table(KERNEL_COLUMNS, alike.values())])
    if done.entries:
        output.show_errors(["", *_table(ENTRY_COLUMNS, done.entries)])
    if done.misses is not None:
        output.show_errors(["", *_folded(done.misses)])


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
