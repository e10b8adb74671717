"""The directive ``floor-plan``: one line for each folder and module, from the first lines of their docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils import nodes

REPOSITORY = Path(__file__).parents[1]


def plan(folder: Path, repository: Path = REPOSITORY) -> Iterator[tuple[str, str]]:
    """Yield the path and the first docstring line of a folder, of its modules, and then of the folders in it.

    The path of a folder ends with a slash and is relative to the repository; that of a module is its file name.

    Raises:
        ValueError: A module has no docstring, or one whose first line is empty.

    """
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    yield f"{folder.relative_to(repository)}/", first_line(folder / "__init__.py")
    for path in modules:
        yield path.name, first_line(path)
    for inner in sorted(folder.iterdir()):
        if (inner / "__init__.py").is_file():
            yield from plan(inner, repository)


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring.

    Raises:
        ValueError: There is none.

    """
    if line := (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]:
        return line
    raise ValueError(f"{path}: has no docstring, and the floor plan needs its first line")


def setup(app: Any) -> dict[str, bool]:  # noqa: ANN401 - Sphinx, which the tests do not need
    """Register the directive with Sphinx."""
    from docutils.parsers.rst import Directive

    class FloorPlan(Directive):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            return [_table(list(plan(REPOSITORY / self.arguments[0])))]

    app.add_directive("floor-plan", FloorPlan)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _table(lines: list[tuple[str, str]]) -> nodes.Node:
    from docutils import nodes

    group = nodes.tgroup("", nodes.colspec(colwidth=1), nodes.colspec(colwidth=3), cols=2)
    group += nodes.tbody("", *(_row(path, text) for path, text in lines))
    return nodes.table("", group)


def _row(path: str, text: str) -> nodes.Node:
    from docutils import nodes

    name: nodes.Node = nodes.literal("", path)
    if path.endswith("/"):
        name = nodes.strong("", "", name)
    cells = ([name], _inline(text))
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))


def _inline(text: str) -> list[nodes.Node]:
    """Return text with its literals; a role such as ``:class:`X``` becomes a literal too."""
    from docutils import nodes

    parts = re.split(r"``(.+?)``|:\w+:`~?(.+?)`", text)
    found: list[nodes.Node] = []
    for plain, literal, role in zip(parts[::3], [*parts[1::3], None], [*parts[2::3], None], strict=True):
        found += [nodes.Text(plain)] if plain else []
        found += [nodes.literal("", literal or role)] if literal or role else []
    return found
