"""The layer that the documentation writes is a layer: it passes the suite, as it stands on the page."""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.base.conformance import LayerConformance
from cachectl.layers.base.facts import Ability
from cachectl.layers.base.registry import BUILT_IN

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

PAGE = Path(__file__).parents[1] / "docs" / "adding-a-layer.md"


class TestToyc(LayerConformance):
    def make(self, environment: Environment) -> Layer:
        listing = re.search(r":caption: toyc_cachectl\.py\n\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
        assert listing is not None
        assert len(listing[1].splitlines()) <= 40
        module = types.ModuleType("toyc_cachectl")
        exec(compile(listing[1], "toyc_cachectl.py", "exec"), vars(module))  # noqa: S102 - our own page
        layer: Layer = module.Toyc(environment)
        return layer

    def seed(self, environment: Environment) -> None:
        folder = environment.home / ".cache" / "toyc"
        folder.mkdir(parents=True)
        for number, kernel in enumerate((b"add", b"mul")):
            (folder / f"{number:016x}.toyc").write_bytes(b"TOYC " + kernel + b"\n" + bytes(100))


def test_the_table_of_abilities_says_what_the_layers_say() -> None:
    spec = importlib.util.spec_from_file_location("abilities", PAGE.with_name("abilities.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layers = module.everybodys_layers()
    (heading, *rows), reasons = module.table(layers)
    assert heading == ["layer", *(ability.value for ability in Ability)]
    assert [row[0] for row in rows] == list(BUILT_IN)
    for layer, (_, *cells) in zip(layers, rows, strict=True):
        told = [None if cell == "yes" else reasons[int(cell[4:-1]) - 1] for cell in cells]
        assert told == list(layer.abilities().values())
    assert len(reasons) == len(set(reasons)) > 2
