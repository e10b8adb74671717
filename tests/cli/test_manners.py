"""What people see all day: equal messages, progress, and words that command line and Python share."""

import re
from pathlib import Path

import pytest
from homes import Home

from cachectl.config import Limits
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.core.selection import Selection


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
    with pytest.raises(TypeError, match=re.escape("no 'older'; did you mean older_than?")):
        Selection(older=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no 'bytes'; there are stale, older_than, max_size"):
        Limits(bytes=1)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="write a number and"):
        Limits(max_size="1")


def test_help_is_a_word_too(home: Home) -> None:
    for words, meant in (("help", "--help"), ("help purge", "purge --help")):
        assert home.cachectl(words).stdout == home.cachectl(meant).stdout
