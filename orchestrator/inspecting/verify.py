"""``cachectl verify``: damage in all layers, and the things not checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, LayerError, PluginFailed, reason_of
from cachectl.layers.base.facts import Finding, Note, Outcome, Root, Severity
from cachectl.layers.disk.trust import closed_by_another

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer


@dataclass(frozen=True, slots=True)
class Moved:
    """How many things of one layer were moved to quarantine, and why others were not."""

    layer: str
    moved: int
    skipped: tuple[Note, ...]
    failed: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """The damage, what was not checked by layer, and the things moved to quarantine if requested."""

    findings: tuple[Finding, ...]
    not_checked: Mapping[str, str] | None = None
    outcomes: tuple[Outcome, ...] | None = None
    as_json: ClassVar[AsJson] = AsJson(
        "cachectl/findings/1",
        hidden=("outcomes",),
        also=("quarantine",),
        optional=("not_checked", "quarantine"),
    )

    @property
    def quarantine(self) -> tuple[Moved, ...] | None:
        """Return the things moved of each layer; ``None`` if that was not requested."""
        if self.outcomes is None:
            return None
        return tuple(Moved(one.layer, one.removed, one.skipped, one.failed) for one in self.outcomes)

    @property
    def failed(self) -> bool:
        """Return whether damage was found and is still in place."""
        return bool(self.findings) and not (self.outcomes is not None and self.repaired)

    @property
    def repaired(self) -> bool:
        """Return whether nothing harmful is left in place."""
        left = [finding for finding in self.findings if finding.thing is None]
        # An unreadable place may hold damage.
        harmless = all(finding.severity is Severity.HARMLESS and finding.code != "unreadable" for finding in left)
        return harmless and not any(outcome.failed or outcome.skipped for outcome in self.outcomes or ())

    def moved(self, finding: Finding) -> bool:
        """Return whether the thing of a finding is in quarantine now."""
        if finding.thing is None:
            return False
        for outcome in self.outcomes or ():
            if outcome.layer == finding.layer:
                left = {note.key for note in (*outcome.skipped, *outcome.failed)}
                return not left & {"*", finding.thing.key}
        return False


def findings(layers: Iterable[Layer]) -> list[Finding]:
    """Return the damage in every root of the given layers."""
    return list(verify(layers).findings)


def verify(layers: Iterable[Layer]) -> Verification:
    """Verify every root of the given layers."""
    found: list[Finding] = []
    not_checked: dict[str, str] = {}
    for layer in layers:
        try:
            roots = layer.roots()
        except FAILURES as error:
            # No place is known: the layer as a whole failed.
            found.append(failure(layer, Path("*"), error))
            continue
        for root in roots:
            found += _findings_of(layer, root)
            if layer.store.unchecked and root.exists:
                not_checked[layer.name] = layer.store.unchecked
    return Verification(tuple(found), not_checked)


def _findings_of(layer: Layer, root: Root) -> Iterator[Finding]:
    try:
        yield from layer.store.verify(root)
    except FAILURES as error:
        yield failure(layer, root.path, error)


def failure(layer: Layer, place: Path, error: LayerError | OSError) -> Finding:
    """Return the finding that a layer, or one place of it, could not be read."""
    code, message, fix = "unreadable", reason_of(error), f"make {place} readable"
    if isinstance(error, PluginFailed):
        code, fix = "plugin", f"fix or uninstall the plug-in {layer.name}"
    elif place.is_absolute() and (closed := closed_by_another(place, layer.environment.home_folder)):
        message, fix = f"{message}; it belongs to {closed.owner}", closed.fix
    return Finding(layer.name, place, None, Severity.FAILS, code, message, fix)
