"""Tables on narrow screens: names stay distinct, numbers are whole, and no line is too long."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from cachectl.cli import output
from cachectl.layers.base.registry import BUILT_IN

if TYPE_CHECKING:
    from homes import Home

Row = tuple[str, str, int]
COLUMNS: tuple[output.Column[Row], ...] = (
    output.Column[Row]("layer", lambda row: row[0]),
    output.Column[Row]("state", lambda row: row[1]),
    output.counts("entries", lambda row: row[2]),
    output.sizes("size", lambda row: row[2]),
    output.Column[Row]("key", lambda _: "0123456789abcdef" * 4),
)
ROWS = [(name, "enabled", 1234567 + number) for number, name in enumerate(BUILT_IN)]


@pytest.mark.parametrize("width", [80, 60, 40, 30, 20])
def test_numbers_are_whole_and_names_differ(width: int) -> None:
    lines = output.plain_table(COLUMNS, ROWS, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(f"{amount:,}" in text for _, _, amount in ROWS)
    assert text.count("1.2 MiB") == len(ROWS)
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert len(set(names)) == len(ROWS) + 1


def test_columns_without_content_take_no_room() -> None:
    columns = (COLUMNS[0], output.Column[Row]("", lambda _: ""), COLUMNS[1])
    assert output.plain_table(columns, ROWS[:1]) == ["layer  state", "loopy  enabled"]


def test_report_in_40_columns_names_every_layer_and_number(home: Home) -> None:
    folder = home.path / ".cache" / "pocl" / "kcache"
    folder.mkdir(parents=True)
    command = (sys.executable, "-m", "cachectl", "report", "-v")
    shown = home.terminal(*command, columns=40, only_output=True, NO_COLOR="1").stdout
    table = shown.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 40
    assert [line.split()[0] for line in table if not line.startswith(" ")] == ["layer", *BUILT_IN, "total"]
    assert not re.search("…|\\.\\.\\.", "".join(table))


def test_a_finding_is_wrapped_between_words_and_its_command_is_whole(home: Home) -> None:
    command = (sys.executable, "-m", "cachectl", "doctor", "pocl")
    shown = home.terminal(
        *command, columns=40, only_output=True, check=False, NO_COLOR="1", POCL_KERNEL_CACHE="true"
    ).stdout
    *message, fix = shown.splitlines()[: shown[: shown.index("fix:")].count("\n") + 1]
    assert len(message) > 1
    assert all(len(line) <= 40 or " " not in line.strip() for line in message)
    assert fix.startswith("  fix: ")
