"""The floor plan: arrows between folders go one way, no module imports in a circle, and no folder is crowded."""

import ast
import re

from benchmarks.house import REPOSITORY, changes_files, circles, folders, imported, modules, parsed, removes

MOST_MODULES = 15

#: The rooms of what is known of caches: each may import those before it. The last are the products.
FLOORS = ("base", "disk", "formats", "core", "stores", "host", "inside", "products")
#: The rooms above with those that each may import; all may import the floors below. Single modules are rooms.
ALLOWED = {
    "show": set(),
    "layer_set": set(),
    "config": set(),
    "transfer": set(),
    "removal": {"layer_set"},
    "pages.__init__": {"show"},
    "switching": {"layer_set"},
    "watching": {"layer_set", "pages.__init__", "show", "switching"},
    "listing": {"layer_set", "watching"},
    "grouping": {"listing"},
    "pages": {"listing", "pages.__init__"},
    "exchange": {"layer_set", "listing", "switching", "transfer", "watching"},
    "stage": {"exchange", "layer_set", "switching"},
    "verbs.__init__": {"config", "exchange", "layer_set", "show", "switching"},
    "verbs": {
        *("config", "exchange", "grouping", "layer_set", "listing", "pages", "pages.__init__", "removal", "show"),
        *("stage", "switching", "transfer", "verbs.__init__", "watching"),
    },
    "stack": {"exchange", "layer_set", "listing", "switching", "verbs"},
    # It loads the module of a verb by its name.
    "cli": {"listing", "show", "verbs.__init__"},
    "notebook": {"removal", "show", "verbs", "watching"},
    "pytest_plugin": {"switching"},
    "__init__": {"config", "exchange", "notebook", "stack", "switching", "watching"},
    "__main__": {"cli"},
}

MODULES = modules()


def room(module: str) -> str:
    first = module.removeprefix("layers.").removesuffix(".__init__").partition(".")[0]
    if module.startswith("layers"):
        # A product is an adapter as a whole, whatever files it has.
        return first if first in FLOORS else "products"
    # What all files of these rooms share stands below them.
    return module if module in ("verbs.__init__", "pages.__init__") else first


def pairs() -> set[tuple[str, str]]:
    """Return each room with each other room that one of its modules imports."""
    found = {(room(name), room(target)) for name in MODULES for target in imported(name, MODULES)}
    return {(here, there) for here, there in found if here != there}


def test_no_module_imports_itself_over_others() -> None:
    """A layer names its store as text, and a store reads what its layer declares: that is one adapter."""
    assert not [circle for circle in circles(MODULES) if {room(name) for name in circle} != {"products"}]


def test_arrows_between_rooms_go_one_way() -> None:
    below = {here: set(FLOORS[:number]) for number, here in enumerate(FLOORS)}
    allowed = below | {here: {*FLOORS, *there} for here, there in ALLOWED.items()}
    arrows = pairs()
    assert {(here, there) for here, there in arrows if there not in allowed[here]} == set()
    assert not [arrow for arrow in arrows if arrow[::-1] in arrows]
    assert {(here, there) for here in ALLOWED for there in ALLOWED[here]} <= arrows


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
    assert removing == {"layers.disk.atomic", "layers.stores.rows", "layers.stores.tree_remove"}


def test_what_can_change_a_file_is_listed() -> None:
    """Each module, with what it changes and the check before that, has a row in the page about the architecture."""
    page = (REPOSITORY / "docs/architecture.md").read_text()
    section = page.partition("## Who can change a file")[2].partition("\n## ")[0]
    listed = {name for row in re.findall(r"(?m)^\| (`.*?) \|", section) for name in re.findall(r"`([\w./]+)`", row)}
    changing = {name for name, path in MODULES.items() if any(map(changes_files, ast.walk(parsed(path))))}
    assert {MODULES[module].relative_to(REPOSITORY).as_posix() for module in changing} == listed


def test_every_change_of_a_store_stands_behind_the_gate() -> None:
    """In the function that has a store write, remove or recover, another user's chance to interfere is ruled out."""
    changing = []
    for module, path in MODULES.items():
        for function in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)):
            inside = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            gates = [node.lineno for node in inside if ast.unparse(node.func) == "require_changeable"]
            for node in inside:
                if re.search(r"\bstore\.(write|remove|recover)$", ast.unparse(node.func)):
                    is_shared = module.startswith(("exchange.", "verbs.store"))
                    changing.append((module, is_shared or any(line < node.lineno for line in gates)))
    assert {module for module, _ in changing} == {"layers.core.layer", "removal", "verbs.store"}
    assert all(is_guarded for _, is_guarded in changing)
