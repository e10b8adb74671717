"""``python -m benchmarks.house``: the size of the code, measure by measure, beside its ceilings in ``house.toml``.

``--check`` fails if a measure is above its ceiling; ``--lower`` writes the ceilings that were reached, and 2 %, where
they are lower. The figures come from the text of the files, but for three: modules and frames of real commands.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[1]

#: The two folders that are installed.
TOPS = ("layers", "orchestrator")
_WEB = frozenset({".js", ".css", ".html", ".toml", ".json", ".sh"})
_REMOVING = re.compile(
    r"(os|shutil)\.(unlink|remove|rmdir|rename|replace|truncate|ftruncate|rmtree|removedirs)"
    r"|.*\.(unlink|rmdir|rmtree|rm_file|rm)"
)
_REMOVING_ROWS = re.compile(r"\s*(delete from|drop table|vacuum)", re.IGNORECASE)
#: Tokens that are no code.
_LAYOUT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)

#: Runs a command in a process of its own; prints how many of our modules it loaded and how deep our frames were when
#: a file was removed.
_PROBE = """
import os, sys
# Compiled modules are renamed into their places too.
sys.dont_write_bytecode = True
deepest = 0
def hook(event, arguments):
    global deepest
    if event in ("os.remove", "os.rename", "os.rmdir"):
        frame, ours = sys._getframe(1), 0
        while frame is not None:
            ours += "cachectl" in frame.f_globals.get("__name__", "").split(".")[:1]
            frame = frame.f_back
        deepest = max(deepest, ours)
sys.addaudithook(hook)
from cachectl.cli.main import main
out, sys.stdout, sys.stderr = sys.stdout, open(os.devnull, "w"), open(os.devnull, "w")
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(sum(name.partition(".")[0] == "cachectl" for name in sys.modules), deepest, file=out)
"""


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


def lines(paths: Iterable[Path]) -> int:
    """Count the lines of files."""
    return sum(path.read_text(errors="replace").count("\n") for path in paths)


def tokens(path: Path) -> int:
    """Count the tokens of a file's code: no comments, and no docstrings."""
    count, before = 0, tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        is_docstring = token.type == tokenize.STRING and before in _LAYOUT - {tokenize.COMMENT, tokenize.DEDENT}
        if token.type not in _LAYOUT and not is_docstring:
            count += 1
            before = token.type
        elif token.type in _LAYOUT:
            before = token.type
    return count


def removes(node: ast.Call) -> bool:
    """Return whether a call removes, renames or truncates a file, or removes rows."""
    texts = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
    removes_rows = any(isinstance(text, str) and _REMOVING_ROWS.match(text) for text in texts)
    return removes_rows or _REMOVING.fullmatch(ast.unparse(node.func)) is not None


def members(known: Mapping[str, Path], name: str) -> list[str]:
    """Return the public methods of a class of the layers and of its bases in the same file; attributes are data."""
    for module, path in known.items():
        classes = {node.name: node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)}
        if name in classes and module.startswith("layers"):
            bases = [ast.unparse(base).partition("[")[0] for base in classes[name].bases]
            chosen = [classes[one] for one in (name, *bases) if one in classes]
            found = {item.name for node in chosen for item in node.body if isinstance(item, ast.FunctionDef)}
            return sorted(one for one in found if not one.startswith("_"))
    return []


def measure(repository: Path = REPOSITORY) -> dict[str, int]:
    """Return every measure that the text of a checkout gives."""
    known = modules(repository)
    web = [path for top in TOPS for path in (repository / top).rglob("*") if path.suffix in _WEB]
    tests = sorted((repository / "tests").rglob("*.py"))
    import_lines, names, classes, dataclasses, removing = 0, [], Counter[str](), 0, set()
    for module, path in known.items():
        imported_names = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                import_lines += (node.end_lineno or node.lineno) - node.lineno + 1
                imported_names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                classes[node.name] += 1
                dataclasses += any("dataclass" in ast.unparse(one) for one in node.decorator_list)
            elif isinstance(node, ast.Call) and removes(node):
                removing.add(module)
        names.append(len(imported_names))
    names.sort()
    schemas = {one for path in known.values() for one in re.findall(r"cachectl/[a-z-]+/\d", path.read_text())}
    return {
        "lines": lines(known.values()),
        "tokens": sum(map(tokens, known.values())),
        "web_lines": lines(web),
        "test_lines": lines(tests),
        "test_tokens": sum(map(tokens, tests)),
        "import_lines": import_lines,
        "names_p90": names[int(len(names) * 0.9)],
        "names_max": names[-1],
        "classes": classes.total(),
        "dataclasses": dataclasses,
        "schemas": len(schemas),
        "classes_named_twice": sum(count > 1 and not name.startswith("_") for name, count in classes.items()),
        "removing_modules": len(removing),
        "layer_members": len(members(known, "Layer")),
        "store_members": len(members(known, "Store")),
    }


def measure_commands() -> dict[str, int]:
    """Return how many of our modules commands load, and our frames from ``main`` to the call that removes a file."""
    # Trees imports the package, which a checkout that is only measured by its text need not have.
    from benchmarks import trees
    from benchmarks.commands import variables

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        trees.pocl(home, 3)
        found = {}
        for verb, *options in (("report",), ("dir",), ("purge", "--all")):
            command = (sys.executable, "-c", _PROBE, verb, *options)
            done = subprocess.run(command, env=variables(home), capture_output=True, text=True, check=True)
            loaded, frames = map(int, done.stdout.split())
            found[f"modules_of_{verb}"] = loaded
        return {**found, "frames_of_purge": frames}


def ceilings(repository: Path = REPOSITORY) -> dict[str, dict[str, int]]:
    """Return the ceiling and the goal of each measure."""
    return tomllib.loads((repository / "house.toml").read_text())


def lowered(text: str, figures: Mapping[str, int]) -> str:
    """Return ``house.toml`` with each ceiling that can fall at what was reached and 2 %, but not below its goal."""
    for name, limits in tomllib.loads(text).items():
        reached = max(int(figures[name] * 1.02), limits["goal"])
        if reached < limits["ceiling"]:
            text = re.sub(rf"(?m)^({name} *= .*ceiling = )\d+", rf"\g<1>{reached}", text)
    return text


def main(arguments: list[str] | None = None) -> int:
    """Print each measure with its ceiling and its goal; return 1 if ``--check`` finds one above its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a measure is above its ceiling")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to what was reached and 2 %%")
    parser.add_argument("--json", action="store_true", help="print the measures as JSON")
    options = parser.parse_args(arguments)
    figures, limits = {**measure(), **measure_commands()}, ceilings()
    if options.json:
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    else:
        sys.stdout.write(f"{'':20}{'now':>9}{'ceiling':>9}{'goal':>9}\n")
        for name, value in figures.items():
            above = "  above its ceiling" if value > limits[name]["ceiling"] else ""
            sys.stdout.write(f"{name:20}{value:9,}{limits[name]['ceiling']:9,}{limits[name]['goal']:9,}{above}\n")
    if options.lower:
        file = REPOSITORY / "house.toml"
        file.write_text(lowered(file.read_text(), figures))
    is_above = any(value > limits[name]["ceiling"] for name, value in figures.items())
    return 1 if options.check and is_above else 0


if __name__ == "__main__":
    raise SystemExit(main())
