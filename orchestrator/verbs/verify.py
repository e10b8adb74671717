"""``cachectl verify``: look for damage, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from cachectl import layer_set, listing, verbs
from cachectl.layers.core.codes import UNREADABLE
from cachectl.layers.core.finding import Finding
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Root
from cachectl.show.table import Table

EXAMPLE = "cachectl verify pocl"
OPTIONS = (verbs.LAYERS, verbs.VERBOSE_FINDINGS, verbs.PLACES, verbs.WAIT, verbs.FORM)


def verify(stack: layer_set.LayerSet, layers: Iterable[str] = ()) -> listing.Findings:
    """Check every entry for damage. What cannot be read is a finding.

    :param layers: names; none means all
    :raises BadRequest: for an unknown layer
    """
    not_checked: dict[str, str] = {}

    def check(layer: Layer, root: Root) -> Iterator[Finding]:
        yield from layer.store.verify(root)
        if layer.about.unchecked and root.exists:
            not_checked[layer.name] = layer.about.unchecked

    findings: list[Finding] = []
    closed: set[object] = set()
    for layer, root, found in layer_set.in_each_root(stack.named(layers), check):
        finding = found if isinstance(found, Finding) else listing.failure(layer, root and root.path, found)
        finding = listing.judged(layer, finding)
        state = (layer, finding.root, finding.key)
        # The parts of a store that cannot read one root are one state.
        if finding.code != UNREADABLE.name or state not in closed:
            findings.append(finding)
        closed |= {state} if finding.code == UNREADABLE.name else set()
    return listing.Findings(tuple(findings), not_checked)


def run(request: verbs.Request) -> listing.Findings:
    """Carry out ``cachectl verify``."""
    with request.output.progress("verifying"):
        return verify(request.stack, request.options.layers)


def show(result: listing.Findings, request: verbs.Request) -> Iterator[object]:
    """Yield each finding; with ``-v`` also what no check of an entry can show."""
    yield from findings_lines(result, "no damage found")
    if request.options.verbose:
        yield from not_checked_lines(result.not_checked)


OF_USERS = verbs.OfUsers("findings", ("layer", "severity", "message", "fix"))


def table(result: listing.Findings, _request: object) -> Table:
    """Return the findings."""
    rows = []
    for finding in result.findings:
        where = (str(finding.root), finding.key or "")
        rows.append((finding.layer, finding.severity.value, finding.code, *where, finding.message, finding.fix))
    titles = ("layer", "severity", "code", "root", "key", "message", "fix")
    return Table(dict.fromkeys(titles, str), rows)


def findings_lines(result: listing.Findings, nothing: str) -> Iterator[object]:
    """Yield each finding with its effect, and its fix on a line of its own to copy; or ``nothing`` if there is none."""
    for finding in result.findings:
        where = finding.key if finding.key is not None else str(finding.root)
        yield f"{', '.join(finding.layers or (finding.layer,))}: {where}: {finding.message} ({finding.severity.value})"
        yield [f"  fix: {finding.fix}"]
    if not result.findings:
        yield nothing


def not_checked_lines(not_checked: Mapping[str, str] | None) -> Iterator[object]:
    """Yield what was not checked by layer, each reason once."""
    layers_by_reason: dict[str, list[str]] = {}
    for layer, reason in (not_checked or {}).items():
        layers_by_reason.setdefault(reason, []).append(layer)
    for reason, layers in layers_by_reason.items():
        yield f"{', '.join(layers)}: not checked: {reason}"
