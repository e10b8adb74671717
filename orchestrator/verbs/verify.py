"""``cachectl verify``: check every entry for damage."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping

from cachectl import layer_set, listing, verbs
from cachectl.layers.base.text import plural
from cachectl.layers.core.codes import UNREADABLE
from cachectl.layers.core.finding import Finding
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Root
from cachectl.show import units
from cachectl.show.table import Table

EXAMPLE = "cachectl verify pocl"
OPTIONS = (verbs.LAYERS, verbs.VERBOSE_FINDINGS, verbs.PLACES, verbs.WAIT, verbs.FORM)


def verify(stack: layer_set.LayerSet, layers: Iterable[str] = ()) -> listing.Findings:
    """Check every entry for damage. Whatever cannot be read is a finding.

    :raises BadRequest: for an unknown layer
    """
    not_checked: dict[str, str] = {}

    def check(layer: Layer, root: Root) -> Iterator[Finding]:
        yield from layer.store.verify(root)
        if layer.about.unchecked and root.exists:
            not_checked[layer.name] = layer.about.unchecked

    findings: list[Finding] = []
    closed: set[object] = set()
    for layer, root, result in layer_set.in_each_root(stack.named(layers), check):
        finding = result if isinstance(result, Finding) else listing.failure(layer, root and root.path, result)
        finding = listing.judged(layer, finding)
        state = (layer, finding.root, finding.key)
        # Several parts of a store may report the same unreadable root.
        if finding.code != UNREADABLE.name or state not in closed:
            findings.append(finding)
        closed |= {state} if finding.code == UNREADABLE.name else set()
    return listing.Findings(tuple(findings), not_checked)


def run(request: verbs.Request) -> listing.Findings:
    """Carry out ``cachectl verify``."""
    with request.output.progress("verifying"):
        return verify(request.stack, request.options.layers)


def show(result: listing.Findings, request: verbs.Request) -> Iterator[object]:
    """Yield the findings; with ``-v`` also harmless ones, and what no check can show."""
    yield from findings_lines(result, "no damage found", verbose=request.options.verbose)
    if request.options.verbose:
        yield from not_checked_lines(result.not_checked)


def of_users(options: argparse.Namespace) -> verbs.OfUsers:
    """Show findings; without ``-v`` and CSV, those of one layer, code and fix are joined."""
    texts = ("layer", "severity", "message", "fix")
    return verbs.OfUsers("findings", texts, same=texts if options.verbose or options.csv else ("layer", "code", "fix"))


def table(result: listing.Findings, _request: object) -> Table:
    """Return the findings."""
    rows = []
    for finding in result.findings:
        where = (str(finding.root), finding.key or "")
        rows.append((finding.layer, finding.severity.value, finding.code, *where, finding.message, finding.fix))
    titles = ("layer", "severity", "code", "root", "key", "message", "fix")
    return Table(dict.fromkeys(titles, str), rows)


def findings_lines(result: listing.Findings, nothing: str, *, verbose: bool) -> Iterator[object]:
    """Yield findings with their effects, joined by code and fix; each fix is on a separate line, to be copied.

    Unless ``verbose``, harmless findings are only counted. If there are no others, yield ``nothing``.
    """
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    harmless = 0
    for finding in result.findings:
        if not verbose and listing.is_harmless(finding):
            harmless += 1
            continue
        where = finding.key if finding.key is not None else str(finding.root)
        layers = ", ".join(finding.layers or (finding.layer,))
        state = (layers, finding.code, finding.severity.value, finding.fix)
        groups.setdefault(state, []).append(f"{where}: {finding.message}")
    for (layers, code, effect, fix), texts in groups.items():
        if len(texts) == 1:
            yield f"{layers}: {texts[0]} ({effect})"
        else:
            yield f"{layers}: {len(texts):,} times {code} ({effect})"
            yield from (f"  {text}" for text in units.examples(texts, verbose=verbose))
        yield [f"  fix: {fix}"]
    if not groups:
        yield nothing
    if harmless:
        yield f"{plural(harmless, 'harmless finding')}: -v shows all"


def not_checked_lines(not_checked: Mapping[str, str] | None) -> Iterator[object]:
    """Yield by layer what was not checked, each reason once."""
    yield from (f"{layers}: not checked: {reason}" for layers, reason in units.merged(not_checked or {}))
