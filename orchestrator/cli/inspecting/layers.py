"""``cachectl layers``: adapters, what each can do here, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from cachectl.inspecting.layers import LayerAbilities, Layers


def add_options(parser: Parser) -> None:
    parser.add_shared("layers", "--json")


def run(call: Call) -> int:
    return call.show(call.stack.abilities(layers=call.options.layers), _show)


def _column(ability: str) -> output.Column[LayerAbilities]:
    return output.Column(ability, lambda layer: "no" if layer.abilities[ability] else "yes")


def _show(done: Layers) -> None:
    from cachectl.layers.base.facts import Ability

    abilities = (_column(ability.value) for ability in Ability)
    output.show_table((output.Column("layer", lambda layer: layer.layer), *abilities), done.layers)
    for layer in done.layers:
        for ability, reason in layer.abilities.items():
            if reason is not None:
                output.show_wrapped(f"{layer.layer}: no {ability}: {reason}", indent="  ")
    for plugin in done.broken:
        output.warn(f"plug-in {plugin.name}: {plugin.why}")
