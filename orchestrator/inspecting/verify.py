"""``cachectl verify``: damage in all layers, and the things not checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, LayerError, PluginFailed, reason_of
from cachectl.layers.base.facts import Finding, Root, Severity, Unverified
from cachectl.layers.disk.trust import closed_by_another

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer


@dataclass(frozen=True, slots=True)
class Verification:
    """The damage, and what was not checked."""

    findings: tuple[Finding, ...]
    unverified: tuple[Unverified, ...] | None = None
    as_json: ClassVar[AsJson] = AsJson(
        "cachectl/findings/1", optional=("unverified",), names={"unverified": "not_checked"}
    )

    @property
    def failed(self) -> bool:
        """Return whether damage was found."""
        return bool(self.findings)


def findings(layers: Iterable[Layer]) -> list[Finding]:
    """Return the damage in every root of the given layers."""
    return list(verify(layers).findings)


def verify(layers: Iterable[Layer]) -> Verification:
    """Verify every root of the given layers.

    Things of one layer that were not checked for the same reason are counted together.
    """
    found = [one for layer in layers for one in _examine(layer)]
    counts: Counter[Unverified] = Counter()
    for one in found:
        if isinstance(one, Unverified):
            counts[replace(one, count=0)] += one.count
    return Verification(
        tuple(one for one in found if isinstance(one, Finding)),
        tuple(replace(one, count=count) for one, count in counts.items() if count),
    )


def _examine(layer: Layer) -> Iterator[Finding | Unverified]:
    try:
        roots = layer.roots()
    except FAILURES as error:
        # No place is known: the layer as a whole failed.
        yield failure(layer, Path("*"), error)
        return
    for root in roots:
        yield from _examine_root(layer, root)


def _examine_root(layer: Layer, root: Root) -> Iterator[Finding | Unverified]:
    try:
        yield from layer.store.examine(root)
    except FAILURES as error:
        yield failure(layer, root.path, error)


def failure(layer: Layer, place: Path, error: LayerError | OSError) -> Finding:
    """Return the finding that a layer, or one place of it, could not be read."""
    code, message, fix = "unreadable", reason_of(error), f"make {place} readable"
    if isinstance(error, PluginFailed):
        code, fix = "plugin", f"fix or uninstall the plug-in {layer.name}"
    elif closed := closed_by_another(place, layer.environment.home_folder):
        message, fix = f"{message}; it belongs to {closed.owner}", closed.fix
    return Finding(layer.name, place, None, Severity.FAILS, code, message, fix)
