"""``cachectl trace``: hits, misses and stores of every layer in a run of a command."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from cachectl.observing.trace import KernelTrace, LayerTrace, Trace


def add_options(parser: Parser) -> None:
    parser.add_shared("unexpected")
    parser.add_argument(
        "--kernels", action="store_true", help="also list each build: the layer that served it, its time"
    )
    parser.add_argument("--explain", action="store_true", help="also explain every miss")
    parser.add_argument("--json", metavar="FILE", help="write JSON to a file, - for standard output")
    parser.add_force("JSON of trace")
    parser.add_shared("--all-layers")
    parser.usage = "cachectl trace [--kernels] [--explain] [--all-layers] [--json FILE [--force]] -- COMMAND..."


def run(call: Call) -> int:
    from cachectl.moving.output_files import demand_targets, json_kind
    from cachectl.moving.whole_files import STREAM

    given = call.options
    call.demand_command()
    written = None if given.json is None else call.output_file(given.json, json_kind("cachectl/trace"))
    demand_targets(written)
    done = call.stack.trace(call.command, kernels=given.kernels, explain=given.explain, notice=output.warn)
    if given.json == STREAM:
        output.show_json(done)
    elif written is not None:
        written.write((output.json_bytes(done),))
    _show(done, all_layers=given.all_layers)
    return done.exit_status or 0


COLUMNS: Final[tuple[output.Column[LayerTrace], ...]] = (
    output.Column("layer", lambda layer: layer.layer),
    output.counts("hits", lambda layer: layer.hits),
    output.counts("misses", lambda layer: layer.misses),
    output.counts("stores", lambda layer: layer.stores),
    output.Column("stored", lambda layer: output.size(layer.bytes), right=True),
    output.Column("evidence", lambda layer: layer.evidence),
)
KERNEL_COLUMNS: Final[tuple[output.Column[KernelTrace], ...]] = (
    output.Column("seconds", lambda kernel: f"{kernel.seconds:.3f}", right=True),
    output.Column("served by", lambda kernel: kernel.served_by or ("compiled" if kernel.compiled else output.DASH)),
    output.Column("kernels", lambda kernel: " ".join(kernel.kernels) or output.DASH),
)


def _show(done: Trace, *, all_layers: bool) -> None:
    """Print on standard error: standard output belongs to the command."""
    with suppress(OSError):
        sys.stderr.flush()
        os.write(2, done.passed_on)
    shown = [layer for layer in done.layers if all_layers or layer.hits or layer.misses or layer.stores]
    if shown:
        output.show_errors(output.plain_table(COLUMNS, shown, output.width(sys.stderr)))
    output.show_errors(output.more_layers(len(done.layers) - len(shown), shown, "no use seen"))
    for one in done.unwatched:
        output.show_errors([f"not counted, could not be watched: {one.command} (it used {', '.join(one.layers)})"])
    if done.kernels is not None:
        output.show_errors(["", *output.plain_table(KERNEL_COLUMNS, done.kernels, output.width(sys.stderr))])
    if done.misses is not None:
        output.show_errors(
            ["", *(f"{miss.layer}: {' '.join(miss.kernels) or output.DASH}: {miss.because}" for miss in done.misses)]
        )
