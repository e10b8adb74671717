"""``python -m benchmarks.house``: the size of the code, and whether it keeps its floor plan.

Prints one line per figure: the value of version 0.1.0, the value now, the limit where there is one, and where the value
is reached. All figures come from the text of the files in a checkout; no module of it is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[1]

#: The two folders that are installed.
TOPS: Final = ("layers", "orchestrator")
_HEAD: Final = ("what", "0.1.0", "now", "at most", "held")


@dataclass(frozen=True)
class Figure:
    """One line of the table; ``then`` is the value of 0.1.0, ``most`` the limit, and ``where`` what has the value."""

    what: str
    then: int | None
    now: int
    most: int | None = None
    where: str = ""

    @property
    def held(self) -> bool | None:
        """Return whether the limit holds, or ``None`` if there is none."""
        return None if self.most is None else self.now <= self.most


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, read once."""
    return ast.parse(path.read_text())


def modules(repository: Path = REPOSITORY) -> dict[str, Path]:
    """Return the file of each module, by its name without the leading ``cachectl.``; packages end with ``__init__``."""
    found = {}
    for top in TOPS:
        for path in sorted((repository / top).rglob("*.py")):
            parts = path.relative_to(repository).with_suffix("").parts
            found[".".join(parts if top == "layers" else parts[1:])] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, also inside functions and for type checkers."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(name: str, known: Mapping[str, Path]) -> set[str]:
    """Return the known modules that a module imports."""
    found = set()
    for text in imports(known[name]):
        path = text.removeprefix("cachectl.")
        if path != text:
            found.add(path if path in known else path.rpartition(".")[0])
    return (found & known.keys()) - {name}


def circles(known: Mapping[str, Path]) -> list[list[str]]:
    """Return each group of modules that import one another, directly or over others."""
    graph = {name: imported(name, known) for name in known}
    reached = {name: _reached(name, graph) for name in known}
    groups = {tuple(sorted(far for far in reached[name] if name in reached[far])) for name in known}
    return sorted(list(group) for group in groups if group)


def _reached(name: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        new = graph[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def folders(known: Mapping[str, Path]) -> Counter[Path]:
    """Count the modules side by side in each folder, without ``__init__.py``."""
    return Counter(path.parent for path in known.values() if path.name != "__init__.py")


def adapters(repository: Path) -> list[Path]:
    """Return the file or the product's folder of each built-in layer, in ``layers/``."""
    modules = {path.partition(":")[0].split(".")[2] for path in registered(repository).values()}
    paths = ((repository / "layers" / name, repository / "layers" / f"{name}.py") for name in sorted(modules))
    return [folder if folder.is_dir() else file for folder, file in paths]


def lines(path: Path) -> int:
    """Count the lines of a file, or of all modules in a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return sum(len(file.read_text().splitlines()) for file in files)


def import_lines(path: Path) -> int:
    """Count the lines that import statements take, wherever they stand in a file."""
    statements = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom))
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in statements)


def members(path: Path, base: str = "Layer") -> list[str]:
    """Return the public attributes and methods that the subclasses of a base in a file define."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef) and any(base in ast.unparse(parent) for parent in node.bases):
            found += [name for statement in node.body for name in _defined(statement) if not name.startswith("_")]
    return found


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef):
        yield statement.name
    for target in _targets(statement):
        yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def registered(repository: Path) -> dict[str, str]:
    """Return the table of built-in layers in the registry: names, and ``cachectl.layers.module:Class``."""
    registry = next((repository / "layers").rglob("registry.py"))
    return {
        str(key.value): str(value.value)
        for node in ast.walk(parsed(registry))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and _is_path(value.value)
    }


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith("cachectl.layers.")


def layer_names(path: Path, names: set[str], classes: set[str]) -> list[str]:
    """Return each use of a built-in layer in a file: strings equal to its name, identifiers with its name or class."""
    words = {name.replace("-", "_") for name in names}
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and node.value in names:
            found.append(str(node.value))
        found += [text for text in _identifiers(node) if text in classes or words & _words(text)]
    return found


def _identifiers(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.ImportFrom):
        # A library such as pyopencl has the name of a layer, and is none: only our modules count.
        ours = (node.module or "").startswith("cachectl.")
        return [f"{node.module}.{alias.name}".rpartition("cachectl.")[2] for alias in node.names] if ours else ()
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    return (node.id,) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else ()


def _words(identifier: str) -> set[str]:
    parts = re.split(r"[._]", identifier.lower())
    return {"_".join(parts[start:end]) for start in range(len(parts)) for end in (start + 1, start + 2)}


def renderers(known: Mapping[str, Path]) -> list[str]:
    """Return the functions of the orchestrator that show facts.

    These are the functions of modules called ``render…`` or ``output``, and elsewhere those whose names have the word
    ``json``, ``render`` or ``show``.
    """
    found = []
    for name, path in known.items():
        if name.startswith("layers"):
            continue
        whole = path.stem.startswith("render") or path.stem == "output"
        functions = [node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
        found += [one for one in functions if whole or {"json", "render", "show"} & set(one.split("_"))]
    return found


def measure(repository: Path = REPOSITORY) -> list[Figure]:
    """Return every figure of a checkout."""
    known = modules(repository)
    files = {path: lines(path) for path in adapters(repository)}
    single = max((path for path in files if path.is_file()), key=files.__getitem__)
    product = max((path for path in files if path.is_dir()), key=files.__getitem__, default=None)
    crowd, count = folders(known).most_common(1)[0]
    said = [name for path in (repository / "tests" / "sample_plugin").glob("*.py") for name in members(path)]
    groups = circles(known)
    table = registered(repository)
    names, classes = set(table), {path.rpartition(":")[2] for path in table.values()}
    outside = Counter(
        {name: len(layer_names(path, names, classes)) for name, path in known.items() if not name.startswith("layers")}
    )
    return [
        Figure("files", 110, len(known)),
        Figure("lines of layers/ and orchestrator/", 24_900, sum(map(lines, known.values())), 19_500),
        Figure("lines of the largest adapter's file", 682, files[single], 350, single.name),
        Figure("lines of the largest product's folder", 2_025, files.get(product or Path(), 0), 1_000, _name(product)),
        Figure("modules side by side in one folder", 47, count, 15, str(crowd.relative_to(repository))),
        Figure("attributes and methods of the sample layer", 16, len(said), 5, " ".join(said)),
        Figure("import circles", 1, len(groups), 0, "; ".join(map(" ".join, groups))),
        Figure("lines of import statements", 1_680, sum(map(import_lines, known.values())), 900),
        Figure("names of layers outside layers/", 137, outside.total(), 0, _most(outside)),
        Figure("functions that show facts", 83, len(renderers(known))),
    ]


def _name(path: Path | None) -> str:
    return "" if path is None else f"{path.name}/"


def _most(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(5) if count)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("repository", nargs="?", type=Path, default=REPOSITORY, help="another checkout to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    figures = measure(options.repository)
    if options.json:
        sys.stdout.write(json.dumps([{**asdict(one), "held": one.held} for one in figures], indent=1) + "\n")
        return 0
    rows = [_HEAD, *map(_row, figures)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
    for row, where in zip(rows, ("where", *(one.where for one in figures)), strict=True):
        first, *numbers = row
        cells = (first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)))
        sys.stdout.write("  ".join((*cells, where)).rstrip() + "\n")
    return 0


def _row(figure: Figure) -> tuple[str, ...]:
    held = {None: "-", True: "yes", False: "no"}[figure.held]
    return (figure.what, *(_number(value) for value in (figure.then, figure.now, figure.most)), held)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


if __name__ == "__main__":
    raise SystemExit(main())
