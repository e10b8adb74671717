"""``cachectl layers``: what each layer can do here, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.facts import Scope
from cachectl.layers.base.registry import Broken

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer


@dataclass(frozen=True, slots=True)
class LayerAbilities:
    """One layer and its abilities by name: ``None``, or the reason why it lacks that ability here."""

    layer: str
    title: str
    scope: Scope
    precious: bool
    abilities: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers with their abilities, and the plug-ins that could not be loaded."""

    layers: tuple[LayerAbilities, ...]
    broken: tuple[Broken, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/layers/1")

    @property
    def failed(self) -> bool:
        """Return ``False``: listing layers does not fail."""
        return False


def layer_abilities(layers: Iterable[Layer], broken: Iterable[Broken] = ()) -> Layers:
    """Return the abilities of each layer."""
    return Layers(tuple(map(_abilities, layers)), tuple(broken))


def _abilities(layer: Layer) -> LayerAbilities:
    abilities = {ability.value: reason for ability, reason in layer.abilities().items()}
    return LayerAbilities(layer.name, layer.title, layer.scope, layer.precious, abilities)
