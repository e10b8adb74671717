"""``cachectl verify``: damage in all layers, and the things not checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, LayerError, PluginFailed, reason_of
from cachectl.layers.base.facts import Finding, Note, Outcome, Root, Severity, Unverified
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
    """The damage, the things not checked, and the things moved to quarantine if requested."""

    findings: tuple[Finding, ...]
    unverified: tuple[Unverified, ...] | None = None
    outcomes: tuple[Outcome, ...] | None = None
    as_json: ClassVar[AsJson] = AsJson(
        "cachectl/findings/1",
        hidden=("outcomes",),
        also=("quarantine",),
        optional=("unverified", "quarantine"),
        names={"unverified": "not_checked"},
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


def verify(layers: Iterable[Layer], *, deep: bool = False) -> Verification:
    """Verify every root of the given layers; ``deep`` also runs installed tools that can check more.

    Things of one layer that were not checked for the same reason are counted together.
    """
    found = [one for layer in layers for one in _examine(layer, deep=deep)]
    counts: Counter[Unverified] = Counter()
    for one in found:
        if isinstance(one, Unverified):
            counts[replace(one, count=0)] += one.count
    return Verification(
        tuple(one for one in found if isinstance(one, Finding)),
        tuple(replace(one, count=count) for one, count in counts.items() if count),
    )


def _examine(layer: Layer, *, deep: bool) -> Iterator[Finding | Unverified]:
    try:
        roots = layer.roots()
    except FAILURES as error:
        # No place is known: the layer as a whole failed.
        yield failure(layer, Path("*"), error)
        return
    for root in roots:
        yield from _examine_root(layer, root, deep=deep)


def _examine_root(layer: Layer, root: Root, *, deep: bool) -> Iterator[Finding | Unverified]:
    try:
        yield from layer.store.examine(root, deep=deep)
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
