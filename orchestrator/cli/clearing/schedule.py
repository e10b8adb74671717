"""``cachectl schedule``: prune by itself, from a timer of systemd, a line of cron, or an epilog of Slurm."""

from __future__ import annotations

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser


def add_options(parser: Parser) -> None:
    from cachectl.clearing.schedule import KINDS

    parser.add_argument(
        "kind",
        metavar="|".join(KINDS),
        choices=KINDS,
        help="what runs cachectl prune: daily, or when a job of Slurm ends",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--install", action="store_true", help="install it, or bring it up to date (default: print it)")
    what.add_argument("--remove", action="store_true", help="remove it")
    parser.add_argument("--file", metavar="FILE", help="the epilog (default: /etc/slurm/epilog.d/cachectl-prune)")


def run(call: Call) -> int:
    schedule = call.stack.schedule(call.options.kind, file=call.options.file)
    if call.options.remove:
        output.show_lines(schedule.remove())
        return 0
    if call.options.install:
        output.show_lines(schedule.install())
    else:
        output.show_raw(schedule.text.splitlines())
    # The epilog prunes by the settings of others.
    if call.options.kind != "slurm-epilog" and call.config.limits(call.now, call.stack, output.warn).none:
        output.warn("prune has no limit yet, so it would fail; cachectl config shows where to set one")
    return 0
