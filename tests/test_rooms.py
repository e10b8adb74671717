"""The floor plan: arrows between folders go one way, no module imports in a circle, and no folder is crowded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
MOST_MODULES = 15

#: Each room with the rooms that its modules may import from, beside their own. ``layers`` are the adapters.
ALLOWED = {
    "layers.formats": {"layers.base"},
    "layers.disk": {"layers.base", "layers.host"},
    "layers.host": {"layers.base", "layers.disk"},
    "layers.stores": {"layers.base", "layers.disk", "layers.formats", "layers.host"},
    "layers.base": {"layers.disk", "layers.formats", "layers.host", "layers.stores"},
    "layers": {"layers.base", "layers.disk", "layers.formats", "layers.host", "layers.stores"},
    "": {"layers", "inspecting", "clearing", "switching", "observing", "moving", "cluster"},
    "inspecting": {"", "layers"},
    "clearing": {"", "layers", "inspecting"},
    "switching": {"", "layers"},
    "observing": {"", "layers", "inspecting", "switching", "moving"},
    "moving": {"", "layers", "inspecting", "switching"},
    "cluster": {"", "layers", "inspecting", "clearing", "switching", "moving"},
}


def modules() -> dict[str, Path]:
    found = {}
    for top in ("layers", "orchestrator"):
        for path in sorted((REPOSITORY / top).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts if top == "layers" else parts[1:])] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(name: str) -> set[str]:
    """Return the modules of cachectl that a module imports, also inside functions and for type checkers."""
    found = set()
    for text in imports(name):
        path = text.removeprefix("cachectl.")
        if path == text:
            continue
        found.add(path if path in MODULES else path.rpartition(".")[0])
    return (found & MODULES.keys()) - {name}


def room(module: str) -> str:
    parent = module.removesuffix(".__init__").rpartition(".")[0] if "." in module else ""
    # A product that needs several files has a folder, and is an adapter as a whole.
    return "layers" if parent.startswith("layers.") and parent not in ALLOWED else parent


def test_no_module_imports_itself_over_others() -> None:
    graph = {name: imported(name) for name in MODULES}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"in a circle, or importing from one: {sorted(graph)}"


def test_arrows_between_rooms_go_one_way() -> None:
    wrong = []
    for name in MODULES:
        here = room(name)
        if here == "cli":
            continue
        allowed = ALLOWED[here] | {here}
        for target in imported(name):
            there = room(target)
            # What is known of caches is one side, whatever its rooms.
            there = "layers" if there.startswith("layers") and not here.startswith("layers") else there
            if there not in allowed:
                wrong.append(f"{name} -> {target}")
    assert not [one for one in wrong if not one.startswith(("__main__", "pytest_plugin"))]


def test_no_folder_is_crowded() -> None:
    crowds: dict[Path, int] = {}
    for path in MODULES.values():
        if path.name != "__init__.py":
            crowds[path.parent] = crowds.get(path.parent, 0) + 1
    assert not {str(folder): count for folder, count in crowds.items() if count > MOST_MODULES}
