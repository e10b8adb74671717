"""``cachectl layers``: what each layer can do here, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cachectl import options
from cachectl.layers.base import facts, registry
from cachectl.table import Column, Table

if TYPE_CHECKING:
    from cachectl import layer_set
    from cachectl.layers.base.layer import Layer

OPTIONS: Final = (options.LAYERS, options.FORM)


@dataclass(frozen=True, slots=True)
class LayerAbilities:
    """One layer and its abilities by name: ``None``, or the reason why it lacks that ability here."""

    layer: str
    title: str
    scope: facts.Scope
    precious: bool
    abilities: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers with their abilities, and the plug-ins that could not be loaded."""

    layers: tuple[LayerAbilities, ...]
    broken: tuple[registry.Broken, ...]


def layers(stack: layer_set.LayerSet, names: Iterable[str] = ()) -> Layers:
    """Return the abilities of the named layers, or of all."""
    named = tuple(names)
    return Layers(tuple(map(_abilities, stack.named(named))), () if named else stack.broken)


def _abilities(layer: Layer) -> LayerAbilities:
    abilities = {ability.value: reason for ability, reason in layer.abilities().items()}
    return LayerAbilities(layer.name, layer.title, layer.about.scope, layer.about.precious, abilities)


def run(request: options.Request) -> Layers:
    """Carry out ``cachectl layers``."""
    return layers(request.stack, request.options.layers)


def _column(ability: str) -> Column[LayerAbilities]:
    return Column(ability, lambda layer: "no" if layer.abilities[ability] else "yes")


def table(done: Layers, _request: options.Request) -> Table[LayerAbilities]:
    """Return whether each layer has each ability."""
    name: Column[LayerAbilities] = Column("layer", lambda layer: layer.layer)
    return Table((name, *(_column(ability.value) for ability in facts.Ability)), done.layers)


def show(done: Layers, request: options.Request) -> Iterator[object]:
    """Yield the table, and the reason for each ability that is missing."""
    yield table(done, request)
    for layer in done.layers:
        for ability, reason in layer.abilities.items():
            if reason is not None:
                yield f"{layer.layer}: no {ability}: {reason}"
