"""The forms of output: each has the same rows; on narrow screens names stay distinct, and numbers whole."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace

import pytest
from homes import Home

from cachectl.cli import output
from cachectl.layers.base.registry import BUILT_IN
from cachectl.table import Column, Table, counts, sizes


@pytest.fixture
def cuda(cuda: Home) -> Home:
    """Damage one file of the recorded ComputeCache."""
    damaged = cuda.path / ".nv/ComputeCache/3/f/433a72c95049e7"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    return cuda


def rows(home: Home, *arguments: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(home.cachectl(*arguments, "--csv", check=False).stdout)))


@pytest.mark.parametrize(
    ("arguments", "items"),
    [
        (("report",), "layers"),
        (("ls",), "entries"),
        (("layers",), "layers"),
        (("verify",), "findings"),
        (("doctor", "cuda"), "findings"),
        (("config",), "settings"),
    ],
)
def test_each_form_has_the_same_rows(cuda: Home, arguments: tuple[str, ...], items: str) -> None:
    document = cuda.json(*arguments, check=False)
    found = rows(cuda, *arguments)
    assert len(found) == len(document[items])
    for row, item in zip(found, document[items], strict=True):
        assert all(row[key] == item[key] for key in row.keys() & item.keys() if isinstance(item[key], str))


def test_csv_has_raw_numbers_and_whole_keys(cuda: Home) -> None:
    entries = {entry["key"]: entry for entry in cuda.json("ls")["entries"]}
    for row in rows(cuda, "ls"):
        assert int(row["size"]) == entries[row["key"]]["bytes"]
        assert int(row["age"]) >= 0
        # Unknown is nothing, not 0 or a dash.
        assert row["stale"] == ""
    (row,) = (row for row in rows(cuda, "report") if row["layer"] == "cuda")
    assert int(row["size"]) == cuda.json("report")["total"]["bytes"]


def test_a_dry_run_has_a_row_for_each_entry(cuda: Home) -> None:
    for command in (("purge", "cuda", "-n"), ("prune", "--max-size", "0B", "-n")):
        assert {row["state"] for row in rows(cuda, *command)} == {"live"}
        assert len(rows(cuda, *command)) == 40


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
