"""``cachectl verify``: look for damage, entry by entry."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cachectl.cli import options
from cachectl.cli.output import plural, show_lines, warn, working

if TYPE_CHECKING:
    from cachectl.cli.call import Call
    from cachectl.inspecting.verify import Verification
    from cachectl.layers.base.facts import Finding, Unverified


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_layers(parser)
    parser.add_argument(
        "--quarantine", action="store_true", help="move what is damaged aside; cachectl restore brings it back"
    )
    parser.add_argument(
        "--deep", action="store_true", help="also have installed tools read what cachectl cannot: bitcode, by llvm-dis"
    )
    options.add_changing(parser)
    options.add_json(parser)


def run(call: Call) -> int:
    """Verify, and with ``--quarantine`` move what is damaged aside."""
    with working("verifying"):
        done = call.stack.verify(layers=call.options.layers, deep=call.options.deep, quarantine=call.options.quarantine)
    return call.show(done, _show)


def _show(done: Verification) -> None:
    from cachectl.cli.clearing.purge import warn_of_outcomes

    show_findings(done.findings, "no damage found", done.moved)
    if moved := sum(outcome.removed for outcome in done.outcomes or ()):
        show_lines([f"{moved} moved aside; cachectl restore lists them and brings them back"])
    warn_of_outcomes(done.outcomes or ())
    if done.unverified:
        warn(f"not checked: {'; '.join(map(_unverified, done.unverified))}")


def _unverified(one: Unverified) -> str:
    return f"{one.what} {plural(one.count, one.thing)}" + (f" ({one.remedy})" if one.remedy else "")


def show_findings(
    findings: Sequence[Finding], nothing: str, moved: Callable[[Finding], bool] = lambda _: False
) -> None:
    """Print each finding with its effect and its fix, unless it was ``moved``; or ``nothing`` if there is none."""
    for finding in findings:
        where = finding.key if finding.key is not None else str(finding.root)
        fix = "moved aside" if moved(finding) else f"fix: {finding.fix}"
        show_lines([f"{finding.layer}: {where}: {finding.message} ({finding.severity.value})", f"  {fix}"])
    if not findings:
        show_lines([nothing])
