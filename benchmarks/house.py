"""``python -m benchmarks.house``: the size of the code, measure by measure, beside its ceilings in ``house.toml``.

``--check`` fails if a measure is above its ceiling; ``--lower`` writes the ceilings that were reached, and 2 %, where
they are lower. The figures come from the text of the files, but for those of real commands.
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
#: Classes of data that declare what a layer is, or collect what a run shows: they may have more fields than a fact.
_DECLARATIONS = frozenset({"About", "Lookups", "Surroundings", "Trace"})
_VAGUE = {"found", "thing", "things", "done", "why", "one", "whole", "there", "gone", "standing", "then", "given"}
_VAGUE |= {"asked", "said", "told", "known", "other", "others", "seen", "held"}
#: What a string looks like that names a module of ours to be imported.
_DOTTED = re.compile(r"cachectl(?:\.\w+)+")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: What else changes a file or a folder, flags with which a file is opened for that, and such modes of ``open``.
_CHANGING = re.compile(
    r"os\.(p?writev?|[fl]?chmod|[fl]?chown|utime|mkdir|makedirs|link|symlink|renames|copy_file_range|sendfile)"
    r"|os\.(setxattr|removexattr)|shutil\.(copy\w*|move)|tempfile\.(mk\w+|\w*Temporary\w+)|sqlite3\.connect"
    r"|.*\.(write_bytes|write_text|mkdir|makedirs|touch|symlink_to|hardlink_to|l?chmod|rename)"
    r"|.*\.(pipe_file|put_file|extractall)"
)
_FOR_CHANGES = re.compile(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND|TMPFILE)")
_MODE = re.compile(r"'[rbt]*[wax+][rbt+]*'")
#: Tokens that are no code.
_LAYOUT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)

#: Runs a command in a process of its own; prints how many of our functions it executed, and how deep our
#: frames were when a file was removed.
_PROBE = """
import os, sys
# Compiled modules are renamed into their places too.
sys.dont_write_bytecode = True
deepest, executed = 0, set()
def hook(event, arguments):
    global deepest
    if event in ("os.remove", "os.rename", "os.rmdir"):
        frame, ours = sys._getframe(1), 0
        while frame is not None:
            ours += "cachectl" in frame.f_globals.get("__name__", "").split(".")[:1]
            frame = frame.f_back
        deepest = max(deepest, ours)
def called(frame, event, argument):
    if event == "call" and frame.f_globals.get("__name__", "").partition(".")[0] == "cachectl":
        executed.add(frame.f_code)
sys.addaudithook(hook)
from cachectl.cli.main import main
out, sys.stdout, sys.stderr = sys.stdout, open(os.devnull, "w"), open(os.devnull, "w")
sys.setprofile(called)
try:
    main(sys.argv[1:])
except SystemExit:
    pass
sys.setprofile(None)
# The bodies of modules, of classes and of expressions are no functions.
functions = [code for code in executed if code.co_flags & 2 and not code.co_name.startswith("<")]
print(len(functions), deepest, file=out)
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
    """Yield the dotted names that a file imports: inside functions, for type checkers and by strings, too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            yield node.value


def imported(name: str, known: Mapping[str, Path]) -> set[str]:
    """Return the known modules that a module imports; a package is its ``__init__``."""
    targets: set[str] = set()
    for text in imports(known[name]):
        path = text.removeprefix("cachectl.")
        parent = path.rpartition(".")[0]
        names = (path, f"{path}.__init__", parent, f"{parent}.__init__") if path != text else ()
        targets.update(one for one in names[:2] if one in known)
        if not targets.intersection(names):
            targets.update(one for one in names[2:] if one in known)
    return targets - {name}


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


def changes_files(node: ast.AST) -> bool:
    """Return whether code names what changes files, or opens one for that; what is only named may be called elsewhere.

    A file changes if it is written, made, removed or renamed, or its mode is changed.
    """
    if isinstance(node, ast.Attribute):
        name = ast.unparse(node)
        return bool(_REMOVING.fullmatch(name) or _CHANGING.fullmatch(name) or _FOR_CHANGES.fullmatch(node.attr))
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return any(_REMOVING.fullmatch(name) or _CHANGING.fullmatch(name) for name in names)
    if not isinstance(node, ast.Call):
        return False
    values = [*node.args, *(keyword.value for keyword in node.keywords)][1:]
    is_opened = ast.unparse(node.func).rpartition(".")[2] in ("open", "fdopen")
    return removes(node) or (is_opened and any(_MODE.fullmatch(ast.unparse(value)) for value in values))


def attributes(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the attributes, such as ``core.Entry``, that a file reads of modules of ours; the longest of each."""
    modules_here: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            modules_here |= {one.asname or "cachectl" for one in node.names if one.name.startswith("cachectl")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cachectl"):
            parent = (node.module or "").removeprefix("cachectl").removeprefix(".")
            full_names = {alias.asname or alias.name: f"{parent}.{alias.name}".lstrip(".") for alias in node.names}
            modules_here |= {name for name, full in full_names.items() if full in known or f"{full}.__init__" in known}
    dotted = {
        ".".join(chain[:4])
        for node in ast.walk(parsed(path))
        if (chain := _chain(node))[:1] and chain[0] in modules_here
    }
    return {name for name in dotted if not any(longer.startswith(f"{name}.") for longer in dotted)}


def _chain(node: ast.AST) -> list[str]:
    """Return the names of an attribute of an attribute of a name; none for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if names and isinstance(node, ast.Name) else []


def imported_names(path: Path) -> set[str]:
    """Return the names that imports of a file make."""
    nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def methods(classes: Iterable[ast.ClassDef]) -> dict[str, set[str]]:
    """Return the methods of each class, with those that it inherits from the others."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for node in classes:
        own.setdefault(node.name, set()).update(item.name for item in node.body if isinstance(item, _FUNCTIONS))
        named = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        bases.setdefault(node.name, set()).update(named - {node.name})

    def collected(name: str, below: tuple[str, ...]) -> set[str]:
        inherited = (collected(base, (*below, name)) for base in bases[name] if base in own and base not in below)
        return own[name].union(*inherited)

    return {name: collected(name, ()) for name in own}


def fields(node: ast.ClassDef) -> int:
    """Count the fields of a class: those of a tuple or dataclass, else the attributes that ``__init__`` sets."""
    if any(
        text in ast.unparse(one) for one in (*node.bases, *node.decorator_list) for text in ("NamedTuple", "dataclass")
    ):
        annotated = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        return sum("ClassVar" not in ast.unparse(item.annotation) for item in annotated)
    makers = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    stored = (inner for maker in makers for inner in ast.walk(maker) if isinstance(inner, ast.Attribute))
    return len({inner.attr for inner in stored if isinstance(inner.ctx, ast.Store)})


def lines_called_once(path: Path) -> int:
    """Count the lines of private functions that their file names once."""
    nodes = list(ast.walk(parsed(path)))
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    private = [node for node in nodes if isinstance(node, _FUNCTIONS) and re.match("_(?!_)", node.name)]
    sizes = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in private}
    return sum(size for name, size in sizes.items() if uses[name] == 1)


def vague_names(path: Path) -> int:
    """Count the uses of names that say nothing of what they hold."""
    nodes = list(ast.walk(parsed(path)))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return sum(
        name.strip("_") in _VAGUE for name in (*names, *(node.arg for node in nodes if isinstance(node, ast.arg)))
    )


def doc_words(repository: Path) -> int:
    """Count the words of README and docs outside code."""
    texts = (path.read_text() for path in (repository / "README.md", *(repository / "docs").rglob("*.md")))
    words = (re.sub(r"```.*?```|`[^`]*`", " ", text, flags=re.DOTALL).split() for text in texts)
    return sum(any(map(str.isalnum, word)) for page in words for word in page)


def measure(repository: Path = REPOSITORY) -> dict[str, int]:
    """Return every measure that the text of a checkout gives."""
    known = modules(repository)
    paths = list(known.values())
    web = [path for top in TOPS for path in (repository / top).rglob("*") if path.suffix in _WEB]
    tests = sorted((repository / "tests").rglob("*.py"))
    nodes = {module: list(ast.walk(parsed(path))) for module, path in known.items()}
    classes = [node for inside in nodes.values() for node in inside if isinstance(node, ast.ClassDef)]
    seen = sorted(len(imported_names(path) | attributes(path, known)) for path in paths)
    removing = {module for module in nodes for node in nodes[module] if isinstance(node, ast.Call) and removes(node)}
    twice = Counter(node.name for node in classes if not node.name.startswith("_"))
    return {
        "lines": lines(paths),
        "tokens": sum(map(tokens, paths)),
        "longest_file": max(lines([path]) for path in paths),
        "web_lines": lines(web),
        "test_lines": lines(tests),
        "test_tokens": sum(map(tokens, tests)),
        "names_seen_p90": seen[int(len(seen) * 0.9)],
        "names_seen_most": seen[-1],
        "methods_most": max(map(len, methods(classes).values())),
        "fields_most": max(fields(node) for node in classes if node.name not in _DECLARATIONS),
        "lines_called_once": sum(map(lines_called_once, paths)),
        "any": sum(isinstance(node, ast.Name) and node.id == "Any" for inside in nodes.values() for node in inside),
        "vague_names": sum(map(vague_names, paths)),
        "schemas": len({one for path in paths for one in re.findall(r"cachectl/[a-z-]+/\d", path.read_text())}),
        "classes_named_twice": sum(count > 1 for count in twice.values()),
        "removing_modules": len(removing),
        "doc_words": doc_words(repository),
    }


def measure_commands() -> dict[str, int]:
    """Return how many functions commands execute, and the frames from ``main`` to the call that removes a file."""
    # Trees imports the package, which a checkout that is only measured by its text need not have.
    from benchmarks import trees
    from benchmarks.commands import variables

    figures: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        trees.pocl(home, 3)
        for verb, *options in (("report",), ("push", f"{folder}/bundle.zip"), ("purge", "--all")):
            command = (sys.executable, "-c", _PROBE, verb, *options)
            outcome = subprocess.run(command, env=variables(home), capture_output=True, text=True, check=True)
            figures[f"functions_of_{verb}"], figures["frames_of_purge"] = map(int, outcome.stdout.split())
    return figures


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
        sys.stdout.write(f"{'':21}{'now':>9}{'ceiling':>9}{'goal':>9}\n")
        for name, value in figures.items():
            above = "  above its ceiling" if value > limits[name]["ceiling"] else ""
            sys.stdout.write(f"{name:21}{value:9,}{limits[name]['ceiling']:9,}{limits[name]['goal']:9,}{above}\n")
    if options.lower:
        file = REPOSITORY / "house.toml"
        file.write_text(lowered(file.read_text(), figures))
    is_above = any(value > limits[name]["ceiling"] for name, value in figures.items())
    return 1 if options.check and is_above else 0


if __name__ == "__main__":
    raise SystemExit(main())
