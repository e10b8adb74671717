"""The directives ``abilities``, what each layer can do, and ``floor-plan``, one line for each folder and module.

Both are Markdown, made from the built-in layers, and from the first lines of docstrings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.switch import Ability
from cachectl.layers.registry import BUILT_IN, built_in_layer

if TYPE_CHECKING:
    from docutils import nodes

REPOSITORY = Path(__file__).parents[1]


def abilities() -> Iterator[str]:
    """Yield the table of layers on Linux without any variable set, and the reasons that its numbers refer to."""
    home, reasons = Path("/home/you"), list[str]()
    yield from _heading("layer", *(ability.value for ability in Ability))
    for name in BUILT_IN:
        cells = [f"`{name}`"]
        for reason in built_in_layer(name, Environment({"HOME": str(home)}, home)).abilities().values():
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {reason}." for number, reason in enumerate(reasons, 1))


def floor_plan(folder: Path) -> Iterator[str]:
    """Yield the table of a folder, of its modules, and then of the folders in it.

    Raises:
        ValueError: A module has no docstring, or one whose first line is empty.

    """
    yield from _heading("where", "what")
    for place, path in _modules(folder):
        line = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        if not line:
            raise ValueError(f"{path}: has no docstring, and the floor plan needs its first line")
        # Roles become literals.
        text = re.sub(r":\w+:`~?(.+?)`", r"`\1`", line).replace("``", "`")
        yield f"| {place} | {text} |"


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of a folder, of its modules, and of the folders in it, each with its file."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    yield f"**`{folder.relative_to(REPOSITORY)}/`**", folder / "__init__.py"
    yield from ((f"`{path.name}`", path) for path in modules)
    for inner in sorted(folder.iterdir()):
        if (inner / "__init__.py").is_file():
            yield from _modules(inner)


def _heading(*titles: str) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"


def setup(app: Any) -> dict[str, bool]:  # noqa: ANN401 - Sphinx, which the tests do not need
    """Register the directives with Sphinx."""
    from docutils.parsers.rst import Directive
    from docutils.statemachine import StringList

    def parsed(directive: Directive, lines: Iterable[str]) -> list[nodes.Node]:
        from docutils import nodes

        parent = nodes.Element()
        directive.state.nested_parse(StringList([*lines], __file__), directive.content_offset, parent)
        return parent.children

    class Abilities(Directive):
        def run(self) -> list[nodes.Node]:
            return parsed(self, abilities())

    class FloorPlan(Directive):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            return parsed(self, floor_plan(REPOSITORY / self.arguments[0]))

    app.add_directive("abilities", Abilities)
    app.add_directive("floor-plan", FloorPlan)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
