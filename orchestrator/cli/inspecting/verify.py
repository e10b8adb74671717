"""``cachectl verify``: look for damage, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from cachectl.inspecting.verify import Verification
    from cachectl.layers.base.facts import Finding


def add_options(parser: Parser) -> None:
    parser.add_layers()
    parser.add_places(users=True, root=True)
    parser.add_form("--wait")


def run(call: Call) -> int:
    with call.working("verifying"):
        done = call.stack.verify(layers=call.options.layers)
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
    show_findings(done.findings, "no damage found")
    for layer, content in (done.not_checked or {}).items():
        output.warn(f"{layer}: not checked: {content}")


def show_findings(findings: Sequence[Finding], nothing: str) -> None:
    """Print each finding with its effect and its fix; or ``nothing`` if there is none."""
    for finding in findings:
        where = finding.key if finding.key is not None else str(finding.root)
        output.show_message(f"{finding.layer}: {where}: {finding.message} ({finding.severity.value})", indent="  ")
        # A command must stay whole to be copied.
        output.show_lines([f"  fix: {finding.fix}"])
    if not findings:
        output.show_lines([nothing])
