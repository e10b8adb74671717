"""Findings of ``verify`` and ``doctor``: damage in layers, and how findings are shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl import verbs
from cachectl.layers.base import errors, facts
from cachectl.layers.disk import trust

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found, and what was not checked by layer."""

    findings: tuple[facts.Finding, ...]
    not_checked: Mapping[str, str] | None = None
    as_json: ClassVar[facts.AsJson] = facts.AsJson("cachectl/findings/1", optional=("not_checked",))

    @property
    def failed(self) -> bool:
        """Return whether anything is damaged, or worse than harmless."""
        return any(finding.thing or finding.severity is not facts.Severity.HARMLESS for finding in self.findings)


def damage(layers: Iterable[Layer]) -> Findings:
    """Return the damage in every root of the given layers."""
    findings: list[facts.Finding] = []
    not_checked: dict[str, str] = {}
    for layer in layers:
        # Until a place is known, the layer as a whole fails.
        place = Path("*")
        try:
            roots = layer.roots()
        except errors.FAILURES as error:
            findings.append(failure(layer, place, error))
            continue
        for root in roots:
            try:
                findings += layer.store.verify(root)
                if layer.about.unchecked and root.exists:
                    not_checked[layer.name] = layer.about.unchecked
            except errors.FAILURES as error:  # noqa: PERF203 - one must not end the rest
                findings.append(failure(layer, root.path, error))
    return Findings(tuple(findings), not_checked)


def failure(layer: Layer, place: Path, error: Exception) -> facts.Finding:
    """Return the finding that a layer, or one place of it, could not be read."""
    code, message, fix = "unreadable", errors.reason_of(error), f"make {place} readable"
    if not isinstance(error, (errors.LayerError, OSError)):
        code, fix = "plugin", f"fix or uninstall the plug-in {layer.name}"
    elif place.is_absolute() and (closed := trust.closed_by_another(place, layer.environment.home_folder)):
        message, fix = f"{message}; it belongs to {closed.owner}", closed.fix
    return facts.Finding(layer.name, place, None, facts.Severity.FAILS, code, message, fix)


def table(result: Findings, _request: object) -> verbs.Table:
    """Return the findings."""
    rows = []
    for one in result.findings:
        place = str(one.root or "")
        rows.append((one.layer, one.severity.value, one.code, place, one.key or "", one.message, one.fix))
    return verbs.Table(("layer", "severity", "code", "root", "key", "message", "fix"), rows)


def lines(result: Findings, nothing: str) -> Iterator[object]:
    """Yield each finding with its effect, and its fix on a line of its own to copy; or ``nothing`` if there is none."""
    for finding in result.findings:
        where = finding.key if finding.key is not None else str(finding.root)
        yield f"{finding.layer}: {where}: {finding.message} ({finding.severity.value})"
        yield verbs.Whole(f"  fix: {finding.fix}")
    if not result.findings:
        yield nothing
