"""``cachectl verify``: look for damage, entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import CHANGING, Parser

if TYPE_CHECKING:
    from cachectl.inspecting.verify import Verification
    from cachectl.layers.base.facts import Finding


def add_options(parser: Parser) -> None:
    parser.add_layers()
    parser.add_argument(
        "--quarantine", action="store_true", help="move damaged things to quarantine; cachectl restore restores them"
    )
    parser.add_places(users=True, root=True)
    parser.add_form(*CHANGING)


def run(call: Call) -> int:
    with call.working("verifying"):
        done = call.stack.verify(layers=call.options.layers, quarantine=call.options.quarantine)
    return call.show(done, _show, lambda done: (FINDING_COLUMNS, done.findings))


FINDING_COLUMNS: Final[tuple[output.Column[Finding], ...]] = (
    output.Column("layer", lambda finding: finding.layer),
    output.Column("severity", lambda finding: finding.severity.value),
    output.Column("code", lambda finding: finding.code),
    output.Column("root", lambda finding: str(finding.root or "")),
    output.Column("key", lambda finding: finding.key or ""),
    output.Column("message", lambda finding: finding.message),
    output.Column("fix", lambda finding: finding.fix),
)


def _show(done: Verification) -> None:
    from cachectl.cli.clearing.purge import warn_of_outcomes

    show_findings(done.findings, "no damage found", done.moved)
    if moved := sum(outcome.removed for outcome in done.outcomes or ()):
        output.show_lines([f"{moved} moved aside; cachectl restore lists and restores them"])
    warn_of_outcomes(done.outcomes or ())
    for layer, content in (done.not_checked or {}).items():
        output.warn(f"{layer}: not checked: {content}")


def show_findings(
    findings: Sequence[Finding], nothing: str, moved: Callable[[Finding], bool] = lambda _: False
) -> None:
    """Print each finding with its effect and its fix, unless it was ``moved``; or ``nothing`` if there is none."""
    for finding in findings:
        where = finding.key if finding.key is not None else str(finding.root)
        fix = "moved aside" if moved(finding) else f"fix: {finding.fix}"
        output.show_message(f"{finding.layer}: {where}: {finding.message} ({finding.severity.value})", indent="  ")
        # A command must stay whole to be copied.
        output.show_lines([f"  {fix}"])
    if not findings:
        output.show_lines([nothing])
