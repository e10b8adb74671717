"""The floor plan: arrows between folders go one way, no module imports in a circle, and no folder is crowded."""

import ast

from benchmarks.house import circles, folders, imported, modules, parsed, removes

MOST_MODULES = 15

#: Each room with the rooms that its modules may import from, beside their own. ``layers`` are the adapters.
ALLOWED = {
    "layers.formats": {"layers.core"},
    "layers.inside": {"layers.core"},
    "layers.disk": {"layers.core", "layers.core.facts", "layers.host"},
    "layers.host": {"layers.core", "layers.disk", "layers.formats"},
    "layers.stores": {"layers.core", "layers.disk", "layers.formats", "layers.host"},
    "layers.core": {"layers.disk", "layers.formats", "layers.host", "layers.stores"},
    "layers": {"layers.core", "layers.disk", "layers.formats", "layers.host", "layers.inside", "layers.stores"},
    "": {"layers", "switching", "watching", "pages", "exchange", "verbs"},
    "verbs": {"", "layers", "switching", "watching", "exchange", "pages"},
    "pages": {"", "layers"},
    "switching": {"", "layers"},
    "watching": {"", "layers", "switching", "pages"},
    "exchange": {"", "layers", "switching"},
}


MODULES = modules()


def room(module: str) -> str:
    parent = module.removesuffix(".__init__").rpartition(".")[0] if "." in module else ""
    # A product that needs several files has a folder, and is an adapter as a whole.
    return "layers" if parent.startswith("layers.") and parent not in ALLOWED else parent


def test_no_module_imports_itself_over_others() -> None:
    assert not circles(MODULES)


def test_arrows_between_rooms_go_one_way() -> None:
    wrong = []
    for name in MODULES:
        here = room(name)
        if here.partition(".")[0] == "cli":
            continue
        allowed = ALLOWED[here] | {here}
        for target in imported(name, MODULES):
            there = room(target)
            # What is known of caches is one side, whatever its rooms.
            there = "layers" if there.startswith("layers") and not here.startswith("layers") else there
            if there not in allowed:
                wrong.append(f"{name} -> {target}")
    assert not [one for one in wrong if not one.startswith(("__main__", "pytest_plugin"))]


def test_no_folder_is_crowded() -> None:
    counts = {folder: count for folder, count in folders(MODULES).items() if folder.name != "verbs"}
    assert not {str(folder): count for folder, count in counts.items() if count > MOST_MODULES}


def test_removal_has_one_door() -> None:
    """To audit what can delete, three modules are read, and those that call them."""
    removing = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and removes(node)
    }
    assert removing == {"layers.disk.atomic", "layers.stores.rows", "layers.stores.tree"}
