"""Tables on narrow screens: names stay distinct, numbers are whole, and no line is too long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cachectl.cli import output
from cachectl.layers.base.registry import BUILT_IN
from cachectl.table import Column, Table, counts, sizes

Row = tuple[str, str, int]
COLUMNS: tuple[Column[Row], ...] = (
    Column[Row]("layer", lambda row: row[0]),
    Column[Row]("state", lambda row: row[1]),
    counts("entries", lambda row: row[2]),
    sizes("size", lambda row: row[2]),
    Column[Row]("key", lambda _: "0123456789abcdef" * 4),
)
ROWS = [(name, "enabled", 1234567 + number) for number, name in enumerate(BUILT_IN)]


@pytest.mark.parametrize("width", [80, 60, 40, 30, 20])
def test_numbers_are_whole_and_names_differ(width: int) -> None:
    lines = output.plain_table(Table(COLUMNS, ROWS), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(f"{amount:,}" in text for _, _, amount in ROWS)
    assert text.count("1.2 MiB") == len(ROWS)
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert len(set(names)) == len(ROWS) + 1


def test_the_mark_of_shortening_suits_the_encoding_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, line, _) = output.plain_table(Table(COLUMNS[4:], ROWS[:1], ("0123456789" * 10,)), 40)
    assert "…" in line
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="ascii"))
    (_, line, _) = output.plain_table(Table(COLUMNS[4:], ROWS[:1], ("0123456789" * 10,)), 40)
    assert "..." in line
    assert len(line) == 40


def test_columns_without_content_take_no_room() -> None:
    columns = (COLUMNS[0], Column[Row]("", lambda _: ""), COLUMNS[1])
    assert output.plain_table(Table(columns, ROWS[:1])) == ["layer  state", "loopy  enabled"]
