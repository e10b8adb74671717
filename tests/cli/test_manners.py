"""What people see all day: equal messages, progress, and words that command line and Python share."""

import re
import sys
from pathlib import Path

import pytest
from homes import Home

from cachectl.config import Limits
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.core.selection import Selection
from cachectl.show import units
from cachectl.stack import Stack


def cut(cuda: Home, number: int) -> list[Path]:
    """Cut off the end of some entries of a ComputeCache."""
    entries = sorted((cuda.path / ".nv/ComputeCache").glob("?/?/*"))[:number]
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-9])
    return entries


def test_equal_messages_are_one_line(cuda: Home) -> None:
    """Each has a count and three examples, and with ``-v`` all."""
    entries = cut(cuda, 9)
    lines = cuda.cachectl("verify cuda", check=False).stdout.splitlines()
    assert [lines[0].split(" (")[0], lines[4:]] == [
        "cuda: 9 times damaged",
        ["  6 more; -v shows all", "  fix: cachectl purge --damaged cuda"],
    ]
    assert len(cuda.cachectl("verify cuda -v", check=False).stdout.splitlines()) >= 11
    (said,) = cuda.cachectl("ls cuda", check=False).stderr.splitlines()
    examples = said.count(str(entries[0].parents[2]))
    assert (said[:18], examples, said[-20:]) == ("cachectl: cuda: 9:", 3, "6 more; -v shows all")
    assert len(cuda.cachectl("ls cuda -v", check=False).stderr.splitlines()) == 9


def test_layers_are_listed_by_commas_or_repetition(cuda: Home) -> None:
    by_commas = cuda.json("ls loopy,cuda")
    assert by_commas == cuda.json("ls loopy cuda")
    shell = "env --disable --shell sh --layer"
    assert cuda.cachectl(f"{shell} loopy,cuda").stdout == cuda.cachectl(f"{shell} loopy --layer cuda").stdout
    assert "unknown layer 'nosuch'" in cuda.refused("ls cuda,nosuch", says="", status=2)


def test_keywords_are_the_names_of_options(cuda: Home) -> None:
    """A wrong one is answered with the right one."""
    selected = Selection(older_than="30d", now=86400 * 31.0)
    assert (selected.before, Selection(older_than=60, now=61.0).before, Limits(max_size="2K").bytes) == (86400, 1, 2048)
    entries = cuda.stack["cuda"].entries
    assert len(list(entries(Selection(older_than="1s", now=2.0**40)))) == len(list(entries())) > 0
    with pytest.raises(TypeError, match=re.escape("no keyword 'older'; did you mean older_than?")):
        Selection(older=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no keyword 'bytes'; it has stale, older_than, max_size"):
        Limits(bytes=1)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="write a number and"):
        Limits(max_size="1")


def test_a_limit_holds_in_the_currency_of_report(warm: Home) -> None:
    """A purge frees at least what its plan says; what stays above a limit is said."""
    held = warm.json("report")["total"]["bytes"]
    assert warm.json(f"prune -n --max-size {held}B")["total"]["removed"] == 0
    planned, done = (warm.json(f"prune --max-size {held - 1}B{dry_run}")["total"] for dry_run in (" -n", ""))
    left = warm.json("report")["total"]["bytes"]
    assert (left < held, planned["bytes_freed"] <= done["bytes_freed"] == held - left) == (True, True)
    said = warm.cachectl("prune --max-size 0B").stderr
    left = warm.json("report")["total"]["bytes"]
    assert f"{units.size(left)} stay, although the limit is 0 B: files without entries" in said


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, ""), (0.9, "copying [#####...............] 1/4")])
def test_progress_is_drawn_after_half_a_second_and_removed(home: Home, seconds: float, shown: str) -> None:
    lines = f"with output.progress('reading') as step: step(0, 'copying', 4); step(); time.sleep({seconds})"
    program = f"import time\nfrom cachectl.cli import output\n{lines}"
    screen = home.terminal(sys.executable, "-c", program).stdout
    assert screen == (f"\r\x1b[K{shown}\r\x1b[K" if shown else "")


def test_what_is_looked_at_changed_and_copied_is_counted(cuda: Home, tmp_path: Path) -> None:
    steps: list[tuple[object, ...]] = []

    def took(*begun: object) -> int:
        """Return how much was counted since the last phase of those names and totals began."""
        at = max(place for place, step in enumerate(steps) if step[1:] == begun)
        return round(sum(step[0] if step else 1 for step in steps[at:]))  # type: ignore[misc]

    here = cuda.environment()
    stack = Stack(here._replace(step=lambda *step: steps.append(step)))
    held = len(list(stack.entries(layers=["cuda"])))
    assert 0 < held <= sum(not step for step in steps)
    stack.push(tmp_path / "store", layers=["cuda"])
    assert [step[0] for step in steps if step[1:] == ("copying", held)] == [*range(1, held + 1)]
    stack.purge(layers=["cuda"])
    assert took("removing", held) == held
