"""Every console block of README and the documentation is run in a home with real kernels, and its output compared.

A block whose first command would change this machine, or needs another one, begins with ``<!-- not run: WHY -->``.
``<!-- first: COMMAND -->`` prepares what a block shows. In an output, ages and keys may differ, numbers and sizes by
one or a factor of ten, fractions below ten as they like; a line ``...`` stands for any lines. A command without output
in its block need only succeed.

``CACHECTL_EXAMPLES=write pytest --all tests/test_examples.py`` writes the outputs again. Look at them, then keep them.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from homes import PROGRAMS, Home, made_once, make_home
from tiers import real, thorough

from cachectl.layers.core.selection import parse_size

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
#: The program of the page about bench, and what it imports.
MEASURED = ("kernels.py", "binaries.py")
#: The width of the terminal.
COLUMNS = 88
BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>not run|first): (?P<text>.+?) -->\n)?^```console\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PAGES = tuple(
    page
    for page in sorted(DOCS.rglob("*.md"))
    if any(block["marker"] != "not run" for block in BLOCK.finditer(page.read_text(encoding="utf-8")))
)
#: What differs from run to run: keys and hashes, dates, numbers with their units, noise, and what is between columns.
VARIABLE = (
    (r"\b[A-Z]{2}/[A-Z]{6,}(…[A-Z]+)?\b", "KEY"),
    (r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}(…|\b)", "HASH"),
    (r"\b\d{8}T\d{6}Z\b|\b\d{4}-\d\d-\d\d \d\d:\d\d\b", "DATE"),
    (r"(?<![\w.])[+-]?\d[\d.,]*( (B|KiB|MiB|GiB|bytes))?[smhdw]?\b", "N"),
    (r"(?<=\w)\d[\d.,]*", "N"),
    # Whether a difference of bench is seen depends on what else the machine does.
    (r" +no difference seen$", ""),
    (r"\s+", " "),
)


class Step(NamedTuple):
    """A command of a block, and the lines that the page shows below it."""

    command: str
    shown: tuple[str, ...]


def steps(body: str) -> Iterator[Step]:
    """Yield the commands of a block; one that ends with a backslash goes on in the next line."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, rest = part.partition("\n")
        while command.endswith("\\"):
            more, _, rest = rest.partition("\n")
            command = f"{command}\n{more}"
        yield Step(command, tuple(rest.rstrip().splitlines()))


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home in which the simulation of the documentation has run; copy it before changing anything."""

    def fill(home: Path) -> None:
        user = reader(home)
        for program in (DOCS / "examples/simulation.py", *(PROGRAMS / name for name in MEASURED)):
            shutil.copy(program, home)
        user.run(sys.executable, "simulation.py")
        (home / ".ssh").mkdir(mode=0o700)
        user.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ann@example.org", "-f", ".ssh/id_ed25519")
        (home / ".ssh/allowed_signers").write_text("ann@example.org " + (home / ".ssh/id_ed25519.pub").read_text())

    return made_once(tmp_path_factory, "simulated", fill)


def reader(path: Path) -> Home:
    """Return the home of a reader, whose shell finds cachectl and its Python first."""
    home = make_home(path)
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    temporary = path.parent / "tmp"
    temporary.mkdir(mode=0o700, exist_ok=True)
    own = {"PATH": search, "PYOPENCL_CTX": "portable", "TMPDIR": str(temporary), "NO_COLOR": "1", "TERM": "xterm"}
    return Home(path, {name: value for name, value in home.variables.items() if name != "COLUMNS"} | own)


@real
@pytest.mark.parametrize(
    "page", [REPOSITORY / "README.md", *thorough(*PAGES)], ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_the_console_blocks_show_what_commands_print(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if page.name == "store.md":
        # It names the version of PoCL, which only the wheel's is known by.
        request.getfixturevalue("wheel_pocl")
    text = page.read_text(encoding="utf-8")
    blocks = [block for block in BLOCK.finditer(text) if block["marker"] != "not run"]
    shutil.copytree(request.getfixturevalue("simulated"), tmp_path / "home", symlinks=True)
    home = reader(tmp_path / "home")
    write = os.environ.get("CACHECTL_EXAMPLES") == "write"
    wrong, written = [], text
    for block in blocks:
        commands = list(steps(block["body"]))
        outputs = list(results(home, block["text"] if block["marker"] else "true", commands))
        for step, (status, output) in zip(commands, outputs, strict=True):
            if (step.shown and not alike(step.shown, output)) or (status and not step.shown):
                wrong.append("\n".join((f"$ {step.command}", *output, f"status {status}")))
        if write:
            fresh = ""
            for step, (_, output) in zip(commands, outputs, strict=True):
                lines = step.shown if not step.shown or "..." in step.shown else output
                fresh += "\n".join(
                    (f"$ {step.command}", *lines, *([""] if lines and step is not commands[-1] else ()), "")
                )
            written = written.replace(block["body"], fresh)
    if write:
        page.write_text(written, encoding="utf-8")
    assert not wrong, "\n".join(wrong)


@real
@pytest.mark.thorough
def test_the_variables_of_the_container_recipe_move_every_layer_and_start_warm(simulated: Path, tmp_path: Path) -> None:
    shutil.copytree(simulated, tmp_path / "home", symlinks=True)
    home, warm = reader(tmp_path / "home"), str(tmp_path / "opt/warm")
    page = (DOCS / "howto/containers.md").read_text(encoding="utf-8")
    recipe = page.partition("```dockerfile\n")[2].partition("```")[0].replace("/opt/warm", warm)
    variables = dict(re.findall(r"([A-Z_]+)=(\S+)", recipe))
    printed = home.cachectl("env --shell sh --root", warm).stdout
    assert dict(re.findall(r"export ([A-Z_]+)=(/\S+)", printed)) == variables
    program = ("bash", "-c", recipe.partition("RUN ")[2])
    home.run(*program, **variables)
    assert home.cachectl("trace", "--", *program, **variables).stderr.startswith("Warm: every lookup hit")


def results(home: Home, first: str, commands: list[Step]) -> Iterator[tuple[int, list[str]]]:
    """Yield the status and the output, with messages, of each command of a block, run by one shell."""
    script = "".join(f"{step.command}\nprintf '\\0%d\\0' $?; printf '\\0' >&2\n" for step in commands)
    script = f"{{ {first}\n}} >/dev/null 2>&1\n{script}".replace("/opt/", f"{home.path.parent}/opt/")
    with tempfile.TemporaryFile() as errors:
        printed = home.terminal("bash", "-c", script, columns=COLUMNS, errors=errors.fileno()).stdout
        errors.seek(0)
        messages = errors.read().decode().replace("\r\n", "\n")
    parts = printed.split("\0")
    for output, ended, said in zip(parts[0::2], parts[1::2], messages.split("\0"), strict=False):
        shown = (output + said).rstrip().replace(str(home.path), "/home/ann").replace(str(home.path.parent), "")
        yield int(ended), [line.rstrip() for line in shown.splitlines()]


def alike(shown: tuple[str, ...], output: list[str]) -> bool:
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else f"({re.escape(plain(line))})\n" for line in shown)
    text = "".join(f"{plain(line)}\n" for line in output)
    found = re.fullmatch(pattern, text)
    if found is None:
        return False
    lines = [output[text.count("\n", 0, found.start(group))] for group in range(1, found.re.groups + 1)]
    pairs = zip((line for line in shown if line != "..."), lines, strict=True)
    return all(near(*pair) for one, other in pairs for pair in zip(numbers(one), numbers(other), strict=True))


def numbers(line: str) -> list[float]:
    """Return the counts, and the sizes in bytes, of a line: what a reader compares with his own."""
    for pattern, word in VARIABLE[:3]:
        line = re.sub(pattern, word, line)
    found = re.finditer(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)( [KMG]iB)?(?![\d.]*[smhdw]\b)", line)
    plain_numbers = ((one[1].replace(",", ""), one[2]) for one in found)
    return [parse_size(number + unit) if unit else float(number) for number, unit in plain_numbers]


def near(one: float, other: float) -> bool:
    """Return whether two numbers are near enough for a reader; fractions of seconds may be any."""
    low, high = sorted((one, other))
    return high - low <= 1 or low * 10 >= high or (high < 10 and low % 1 + high % 1 > 0)


def plain(line: str) -> str:
    for pattern, word in VARIABLE:
        line = re.sub(pattern, word, line)
    return line.strip()
