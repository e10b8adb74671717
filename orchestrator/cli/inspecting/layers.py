"""``cachectl layers``: adapters, what each can do here, and why not."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cachectl.cli import options
from cachectl.cli.output import Column, show_table, show_wrapped, warn

if TYPE_CHECKING:
    from cachectl.cli.call import Call
    from cachectl.inspecting.layers import LayerAbilities, Layers


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_layers(parser)
    options.add_json(parser)


def run(call: Call) -> int:
    """List layers and their abilities."""
    return call.show(call.stack.abilities(layers=call.options.layers), _show)


def _column(ability: str) -> Column[LayerAbilities]:
    return Column(ability, lambda layer: "no" if layer.abilities[ability] else "yes")


def _show(done: Layers) -> None:
    from cachectl.layers.base.facts import Ability

    abilities = (_column(ability.value) for ability in Ability)
    show_table((Column("layer", lambda layer: layer.layer), *abilities), done.layers)
    for layer in done.layers:
        for ability, reason in layer.abilities.items():
            if reason is not None:
                show_wrapped(f"{layer.layer}: no {ability}: {reason}", indent="  ")
    for plugin in done.broken:
        warn(f"plug-in {plugin.name}: {plugin.why}")
