"""``cachectl demo``: cold, warm, off and cold again, on PoCL in an isolated root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.clearing.purge import show_purge
from cachectl.cli.inspecting.report import show_report
from cachectl.cli.parser import Parser, positive

if TYPE_CHECKING:
    from cachectl.demo import DemoRun


def add_options(parser: Parser) -> None:
    kernels = "how many kernels to compile (default: 8)"
    parser.add_argument("--kernels", type=positive, default=8, metavar="N", help=kernels)


COLUMNS: Final[tuple[output.Column[DemoRun], ...]] = (
    output.Column("kernels s", lambda run: f"{run.kernels:.2f}", right=True),
    output.Column("process s", lambda run: f"{run.process:.2f}", right=True),
    output.counts("entries after", lambda run: run.entries),
    output.Column("run", lambda run: run.what),
)


def run(call: Call) -> int:
    from cachectl.demo import demo

    count = call.options.kernels
    done = demo(
        call.environment,
        count,
        started=lambda root: output.show_lines([f"{count} loopy kernels on PoCL; every cache under {root}", ""]),
        working=output.working,
        notice=output.warn,
    )
    output.show_table(COLUMNS, done.runs)
    output.show_lines([""])
    show_report(done.report, home="/")
    output.show_lines(["", "cachectl purge --all"])
    show_purge(done.purged)
    if not done.failed:
        return 0
    cold, warm, off, again = (one.entries for one in done.runs)
    removed = done.purged.total.removed
    output.warn(f"the demo failed: {cold} entries cold, {warm} warm, {off} off, {removed} purged, {again} again")
    return 1
