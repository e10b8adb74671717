"""``cachectl verify``: damage in all layers, and the things not checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, LayerError, PluginFailed, reason_of
from cachectl.layers.base.facts import Finding, Severity
from cachectl.layers.disk.trust import closed_by_another

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer


@dataclass(frozen=True, slots=True)
class Verification:
    """The damage, and what was not checked by layer."""

    findings: tuple[Finding, ...]
    not_checked: Mapping[str, str] | None = None
    as_json: ClassVar[AsJson] = AsJson("cachectl/findings/1", optional=("not_checked",))

    @property
    def failed(self) -> bool:
        """Return whether damage was found."""
        return bool(self.findings)


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
            try:
                found += layer.store.verify(root)
                if layer.store.unchecked and root.exists:
                    not_checked[layer.name] = layer.store.unchecked
            except FAILURES as error:  # noqa: PERF203 - one must not end the rest
                found.append(failure(layer, root.path, error))
    return Verification(tuple(found), not_checked)


def failure(layer: Layer, place: Path, error: LayerError | OSError) -> Finding:
    """Return the finding that a layer, or one place of it, could not be read."""
    code, message, fix = "unreadable", reason_of(error), f"make {place} readable"
    if isinstance(error, PluginFailed):
        code, fix = "plugin", f"fix or uninstall the plug-in {layer.name}"
    elif place.is_absolute() and (closed := closed_by_another(place, layer.environment.home_folder)):
        message, fix = f"{message}; it belongs to {closed.owner}", closed.fix
    return Finding(layer.name, place, None, Severity.FAILS, code, message, fix)
