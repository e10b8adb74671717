"""The forms of output: tables, JSON and CSV have the same rows."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from homes import Home


@pytest.fixture
def cuda(cuda: Home) -> Home:
    """Damage one file of the recorded ComputeCache."""
    damaged = cuda.path / ".nv" / "ComputeCache" / "3/f/433a72c95049e7"
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
