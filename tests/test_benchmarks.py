"""The benchmarks measure real work on sound caches; how long it takes is not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import trees
from benchmarks.commands import Failed, cachectl, output, spend, variables
from benchmarks.races import Result
from benchmarks.table import lines

REPOSITORY = Path(__file__).parents[1]


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The benchmarks stand beside the tests, not in what is installed.
    return subprocess.run(
        (sys.executable, "-m", "benchmarks", *arguments), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def test_the_caches_that_are_made_are_sound(tmp_path: Path) -> None:
    made = (trees.pocl(tmp_path, 30), trees.cuda(tmp_path, 20), trees.pyopencl(tmp_path, 20))
    trees.expect(tmp_path, *made, trees.loopy(tmp_path, 25), trees.others(tmp_path, 3, 10))
    assert json.loads(output((*cachectl(), "verify", "--json"), variables(tmp_path)))["findings"] == []
    listed = json.loads(output((*cachectl(), "ls", "--kernel", trees.SOUGHT, "--json"), variables(tmp_path)))
    found = [entry["layer"] for entry in listed["entries"]]
    # One in each tree, and one in each of loopy's five dictionaries.
    assert sorted(found) == ["cuda", *["loopy"] * 5, "pocl", "pyopencl"]


def test_a_cache_with_other_entries_than_were_made_is_noticed(tmp_path: Path) -> None:
    made = trees.pocl(tmp_path, 12)
    program = next((tmp_path / ".cache" / "pocl" / "kcache").glob("*/*"))
    (program / "stranger").write_text("not PoCL's")
    with pytest.raises(Failed, match="'pocl': 12"):
        trees.expect(tmp_path, made)


def test_every_command_prints_into_a_file(tmp_path: Path) -> None:
    # GNU grep stops at its first match where it prints to the null device, even if it is to count them all.
    looks = "import os, stat; raise SystemExit(not stat.S_ISREG(os.fstat(1).st_mode))"
    assert spend((sys.executable, "-c", looks), variables(tmp_path)).wall > 0


@pytest.mark.thorough
def test_the_table_is_of_real_runs(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    names = ("version", "report", "purge-rows", "disabled")
    done = measure(
        "--scale", "0.001", "--repeat", "2", "--json", str(file), "--scratch", str(tmp_path), "--only", *names
    )
    assert done.returncode == 0, done.stderr
    assert "NOT as large" in done.stdout
    document = json.loads(file.read_text())
    assert [line["name"] for line in document["lines"]] == list(names)
    for line in document["lines"]:
        if "missing" in line:
            assert "not installed" in line["missing"]
            continue
        assert len(line["runs"]) == 2
        lowest, highest = line["spread"]
        assert 0 < lowest <= highest
        assert all(run["ours"]["wall"] > 0 for run in line["runs"])
        assert all((run["peer"] is None) == (line["name"] == "disabled") for run in line["runs"])
    # What was made has gone.
    assert os.listdir(tmp_path) == ["table.json"]


@pytest.mark.thorough
def test_growth_is_measured_at_every_size(tmp_path: Path) -> None:
    file = tmp_path / "growth.json"
    options = ("--growth", "--scale", "0.0005", "--repeat", "1", "--json", str(file), "--only", "report-programs")
    done = measure(*options)
    assert done.returncode == 0, done.stderr
    points = json.loads(file.read_text())["growth"]
    assert [point["entries"] for point in points] == [10, 10, 50, 500]


def test_a_line_that_is_unknown_is_refused() -> None:
    done = measure("--only", "nothing")
    assert (done.returncode, "version" in done.stderr) == (2, True)


def test_a_missing_command_is_not_judged() -> None:
    line = next(line for line in lines() if line.name == "report")
    result = Result(line, missing="du: not installed")
    assert result.held is None
