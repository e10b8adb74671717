"""The real command: what it prints, where, in which form and with which status."""

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
from homes import CACHECTL, Home

from cachectl.cli.main import VERBS, build_parser, main, verb_module
from cachectl.layers.registry import BUILT_IN
from cachectl.show.table import Columns, Table, plain_table
from cachectl.show.units import count, size

KEY = "3/f/433a72c95049e7"
HEAVY = {"pyopencl", "loopy", "numpy", "mpi4py", "json", "hashlib", "base64", "tarfile", "platform", "bz2"}


@pytest.mark.parametrize("command", [["-c", "import cachectl"], ["-m", "cachectl", "report"]])
def test_nothing_heavy_is_imported(home: Home, command: list[str]) -> None:
    said = home.run(sys.executable, "-X", "importtime", *command).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines() if "|" in line}
    assert "cachectl" in imported
    assert not imported & HEAVY


def test_json_has_the_keys_of_the_contract(cuda: Home) -> None:
    report = cuda.json("report")
    assert {"generated", "total"} <= report.keys()
    assert [layer["layer"] for layer in report["layers"]] == list(BUILT_IN)
    entry = cuda.json("ls cuda --limit 1")["entries"][0]
    purged = cuda.json("purge pocl --dry-run cuda")
    assert (purged["dry_run"], [layer["layer"] for layer in purged["layers"]]) == (True, ["pocl", "cuda"])
    assert purged["total"] == {**purged["total"], "removed": 40, "orphans_removed": 0, "skipped": 0, "failed": 0}
    of_purge = "layer removed orphans_removed bytes_freed skipped failed"
    for items, keys in (
        (report["layers"], "layer title state why scope precious entries files bytes stale_entries stale_bytes roots"),
        (
            [root for layer in report["layers"] for root in layer["roots"]],
            "path source scope exists entries files bytes orphan_files orphan_bytes oldest newest problems",
        ),
        ([entry], "layer key root bytes files created modified used kernels device versions stale stale_because"),
        (purged["layers"], f"{of_purge} entries"),
        (cuda.json("purge cuda")["layers"], of_purge),
    ):
        assert all(item.keys() >= set(keys.split()) for item in items)
    assert not any("stale_entries" in root for layer in report["layers"] for root in layer["roots"])


def test_a_stream_of_text_gets_json_too(cuda: Home) -> None:
    """As in a notebook, or where a program collects what it prints."""
    with redirect_stdout(io.StringIO()) as text:
        assert main(["ls", "--json"], environment=cuda.environment()) == 0
    assert json.loads(text.getvalue())["entries"]


def test_a_terminal_gets_the_same_table_in_bold_unless_it_wants_no_colour(cuda: Home) -> None:
    plain = cuda.cachectl("ls cuda --limit 4").stdout.splitlines()
    command = [*CACHECTL, "ls", "cuda", "--limit", "4"]
    bold = cuda.terminal(*command, errors=subprocess.DEVNULL).stdout.splitlines()
    assert ("\x1b[1m" in bold[0], len(bold)) == (True, len(plain))
    uncoloured = cuda.terminal(*command, errors=subprocess.DEVNULL, NO_COLOR="1").stdout
    assert "\x1b[" not in uncoloured.replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_without_a_command_the_help_is_printed(home: Home) -> None:
    done = home.cachectl(check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == home.cachectl("--help").stdout == home.cachectl("help").stdout
    assert home.cachectl("help purge").stdout == home.cachectl("purge --help").stdout
    assert re.findall(r"^(?:(\w[\w ]*):$|  ([a-z]+) )", done.stdout, re.MULTILINE)[-6:-4] == [
        ("plumbing", ""),
        ("", "get"),
    ]
    assert re.findall(r"^  ([a-z]+)  ?", done.stdout, re.MULTILINE) == list(VERBS)


def test_the_example_in_each_help_is_a_command_of_that_verb() -> None:
    for verb in VERBS:
        example = verb_module(verb).EXAMPLE
        words = shlex.split(re.split("[)>]", example.partition("cachectl ")[2])[0].partition(" -- ")[0])
        assert build_parser(words).parse_args(words).verb == verb


def rows(home: Home, line: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(home.cachectl(f"{line} --csv", check=False).stdout)))


@pytest.mark.parametrize(
    ("line", "items"),
    [
        ("report", "layers"),
        ("ls", "entries"),
        ("layers", "layers"),
        ("verify", "findings"),
        ("doctor cuda", "findings"),
        ("config", "settings"),
    ],
)
def test_each_form_has_the_same_rows(cuda: Home, line: str, items: str) -> None:
    damaged = cuda.path / ".nv/ComputeCache" / KEY
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    document = cuda.json(line, check=False)
    for row, item in zip(rows(cuda, line), document[items], strict=True):
        assert all(row[key] == item[key] for key in row.keys() & item.keys() if isinstance(item[key], str))


def test_csv_has_raw_numbers_and_whole_keys(cuda: Home) -> None:
    entries = {entry["key"]: entry for entry in cuda.json("ls")["entries"]}
    for row in rows(cuda, "ls"):
        assert int(row["age"]) >= 0
        # Unknown is nothing, not 0 or a dash.
        assert (int(row["size"]), row["stale"]) == (entries[row["key"]]["bytes"], "")
    assert [(row["stale"], row["key"] in entries) for row in rows(cuda, "purge cuda -n")] == [("", True)] * 40


LONG_KEY = "0123456789abcdef" * 4
COLUMNS: Columns = {"layer": str, "state": str, "entries": count, "size": size, "key": str}
ROWS = [(name, "enabled", 1234567 + number, 1234567, LONG_KEY) for number, name in enumerate(BUILT_IN)]


@pytest.mark.parametrize("width", [80, 60, 40, 30, 20])
def test_numbers_are_whole_and_names_differ(width: int) -> None:
    lines = plain_table(Table(COLUMNS, ROWS), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(f"{amount:,}" in text for _, _, amount, _, _ in ROWS)
    assert text.count("1.2 MiB") == len(ROWS)
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert len(set(names)) == len(ROWS) + 1


def test_the_mark_of_shortening_suits_the_encoding_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, mark in (("utf-8", "…"), ("ascii", "...")):
        monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding=encoding))
        line = plain_table(Table({"key": str}, [(LONG_KEY,)]), 40)[1]
        assert (mark in line, len(line)) == (True, 40)
