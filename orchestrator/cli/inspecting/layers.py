"""``cachectl layers``: adapters, what each can do here, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from cachectl.inspecting.layers import LayerAbilities, Layers


def add_options(parser: Parser) -> None:
    parser.add_layers()
    parser.add_form()


def run(call: Call) -> int:
    done = call.stack.abilities(layers=call.options.layers)
    return call.show(done, _show, lambda done: (_columns(), done.layers))


def _columns() -> tuple[output.Column[LayerAbilities], ...]:
    from cachectl.layers.base.facts import Ability

    return (output.Column("layer", lambda layer: layer.layer), *(_column(ability.value) for ability in Ability))


def _column(ability: str) -> output.Column[LayerAbilities]:
    return output.Column(ability, lambda layer: "no" if layer.abilities[ability] else "yes")


def _show(done: Layers) -> None:
    output.show_table(_columns(), done.layers)
    for layer in done.layers:
        for ability, reason in layer.abilities.items():
            if reason is not None:
                output.show_wrapped(f"{layer.layer}: no {ability}: {reason}", indent="  ")
    for plugin in done.broken:
        output.warn(f"plug-in {plugin.name}: {plugin.why}")
