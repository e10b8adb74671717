"""``cachectl demo``: the whole story on PoCL, in an isolated root."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from cachectl.cli import options
from cachectl.cli.clearing.purge import show_purge
from cachectl.cli.inspecting.report import show_report
from cachectl.cli.output import Column, counts, show_lines, show_table, warn, working

if TYPE_CHECKING:
    from cachectl.cli.call import Call
    from cachectl.observing.demo import DemoRun


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    kernels = "how many kernels to compile (default: 8)"
    parser.add_argument("--kernels", type=options.positive, default=8, metavar="N", help=kernels)


COLUMNS: Final[tuple[Column[DemoRun], ...]] = (
    Column("kernels s", lambda run: f"{run.kernels:.2f}", right=True),
    Column("process s", lambda run: f"{run.process:.2f}", right=True),
    counts("entries after", lambda run: run.entries),
    Column("run", lambda run: run.what),
)


def run(call: Call) -> int:
    """Run the demo, and print what each run shows."""
    from cachectl.observing.demo import demo

    count = call.options.kernels
    done = demo(
        call.environment,
        count,
        started=lambda root: show_lines([f"{count} loopy kernels on PoCL; every cache under {root}", ""]),
        working=working,
        notice=warn,
    )
    show_table(COLUMNS, done.runs)
    show_lines([""])
    show_report(done.report, home="/")
    show_lines(["", "cachectl purge --all"])
    show_purge(done.purged, call.now)
    if not done.failed:
        return 0
    cold, warm, off, again = (one.entries for one in done.runs)
    removed = done.purged.total.removed
    warn(f"the story did not hold: {cold} entries cold, {warm} warm, {off} off, {removed} purged, {again} again")
    return 1
