"""The directive ``abilities``: a table of what each built-in layer can do, generated from the layers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachectl.layers.core.environment import Environment
from cachectl.layers.core.facts import Ability
from cachectl.layers.core.registry import BUILT_IN, built_in_layer

if TYPE_CHECKING:
    from docutils import nodes

    from cachectl.layers.core.layer import Layer

Table = tuple[list[list[str]], list[str]]


def default_layers() -> list[Layer]:
    """Return the built-in layers for a home on Linux without any variable set."""
    home = Path("/home/you")
    return [built_in_layer(name, Environment({"HOME": str(home)}, home)) for name in BUILT_IN]


def table(layers: Iterable[Layer]) -> Table:
    """Return rows of cells, the heading first, and the reasons to which the numbers in the cells refer."""
    rows, reasons = [["layer", *(ability.value for ability in Ability)]], list[str]()
    for layer in layers:
        cells = [layer.name]
        for reason in layer.abilities().values():
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
        rows.append(cells)
    return rows, reasons


def setup(app: Any) -> dict[str, bool]:  # noqa: ANN401 - Sphinx, which the tests do not need
    """Register the directive with Sphinx."""
    from docutils.parsers.rst import Directive

    class Abilities(Directive):
        def run(self) -> list[nodes.Node]:
            rows, reasons = table(default_layers())
            return [_table(rows), _list(reasons)]

    app.add_directive("abilities", Abilities)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _table(rows: list[list[str]]) -> nodes.Node:
    from docutils import nodes

    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in rows[0]), cols=len(rows[0]))
    lines = [
        nodes.row("", *(nodes.entry("", nodes.paragraph("", "", _cell(row, place))) for place in range(len(row))))
        for row in rows
    ]
    group += nodes.thead("", lines[0])
    group += nodes.tbody("", *lines[1:])
    return nodes.table("", group)


def _cell(row: list[str], place: int) -> nodes.Node:
    from docutils import nodes

    named = place == 0 and row[0] != "layer"
    return nodes.literal("", row[place]) if named else nodes.Text(row[place])


def _list(reasons: list[str]) -> nodes.Node:
    from docutils import nodes

    items = (nodes.list_item("", nodes.paragraph("", reason)) for reason in reasons)
    return nodes.enumerated_list("", *items, enumtype="arabic", prefix="", suffix=".")
