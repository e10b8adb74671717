"""``cachectl bench``: the time each cache saves a command: all cold, all warm, each off in turn."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser, positive

if TYPE_CHECKING:
    from cachectl.watching.bench import Bench, Saved, Setting


def add_options(parser: Parser) -> None:
    parser.add_shared("unexpected")
    rounds = "how often each setting is run (default: 3)"
    parser.add_argument("-n", "--rounds", type=positive, default=3, metavar="N", help=rounds)
    parser.add_argument("--json", metavar="FILE", help="write JSON to a file, - for standard output instead of tables")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw it, as PNG or SVG by the ending, - for SVG on standard output (needs matplotlib)",
    )
    parser.add_force("JSON or a picture of bench")
    parser.usage = "cachectl bench [-n N] [--json FILE] [--plot FILE] [--force] -- COMMAND..."


def run(call: Call) -> int:
    from cachectl.output_files import PICTURE, STREAM, demand_targets, json_kind
    from cachectl.watching import bench, plot

    given = call.options
    call.demand_command()
    if given.plot is not None:
        plot.check(given.plot)
        if given.plot == given.json == STREAM:
            call.misuse("JSON and the picture cannot both go to standard output; name a FILE")
    written = None if given.json is None else call.output_file(given.json, json_kind("cachectl/bench"))
    drawn = None if given.plot is None else call.output_file(given.plot, PICTURE)
    demand_targets(written, drawn)
    try:
        with output.progress() as show:
            done = call.stack.bench(call.command, rounds=given.rounds, notice=output.warn, show=show)
    except bench.Ended as ended:
        for line in ended.said:
            output.warn(line, "command")
        output.warn(str(ended))
        return ended.status
    if given.json == STREAM:
        output.show_json(done)
    else:
        # Standard output holds the picture.
        with redirect_stdout(sys.stderr) if given.plot == STREAM else nullcontext():
            _show(done)
        if written is not None:
            written.write((output.json_bytes(done),))
    if given.plot == STREAM:
        output.show_bytes(plot.draw(done, STREAM))
    elif drawn is not None:
        drawn.write((plot.draw(done, drawn.name),))
    return done.exit_status


COLUMNS: Final[tuple[output.Column[Setting], ...]] = (
    output.Column("median s", lambda one: f"{one.median:.2f}", right=True),
    output.Column("fastest", lambda one: f"{min(one.seconds):.2f}", right=True),
    output.Column("slowest", lambda one: f"{max(one.seconds):.2f}", right=True),
    output.Column("setting", lambda one: one.setting),
    output.Column("how", lambda one: one.how),
)
SAVED_COLUMNS: Final[tuple[output.Column[Saved], ...]] = (
    output.Column("saves s", lambda one: _difference(one.seconds), right=True),
    output.Column("least", lambda one: _difference(min(one.by_round)), right=True),
    output.Column("most", lambda one: _difference(max(one.by_round)), right=True),
    output.Column("layer", lambda one: one.layer),
)


def _show(done: Bench) -> None:
    """Print the times of each setting, then what each layer saves."""
    output.show_table(COLUMNS, done.settings)
    output.show_lines([""])
    if done.saved:
        output.show_table(SAVED_COLUMNS, done.saved)
    else:
        output.show_lines(["the command fills no cache"])
    if unused := ", ".join(one.layer for one in done.unused):
        output.show_lines([""])
        output.show_wrapped(f"not used: {unused}")


def _difference(seconds: float) -> str:
    # Without -0.00.
    return f"{round(seconds, 2) or 0.0:+.2f}"
