"""The benchmarks measure real work on sound caches; how long it takes is not asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import trees
from benchmarks.commands import cachectl, output, variables


def test_the_caches_that_are_made_are_sound(tmp_path: Path) -> None:
    made = (trees.pocl(tmp_path, 30), trees.cuda(tmp_path, 20), trees.pyopencl(tmp_path, 20))
    trees.expect(tmp_path, *made, trees.loopy(tmp_path, 25), trees.others(tmp_path, 3, 10))
    assert json.loads(output((*cachectl(), "verify", "--json"), variables(tmp_path)))["findings"] == []
    listed = json.loads(output((*cachectl(), "ls", "--kernel", trees.SOUGHT, "--json"), variables(tmp_path)))
    found = [entry["layer"] for entry in listed["entries"]]
    # One in each tree, and one in each of loopy's five dictionaries.
    assert sorted(found) == ["cuda", *["loopy"] * 5, "pocl", "pyopencl"]


@pytest.mark.thorough
def test_the_table_is_of_real_runs(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    names = ("version", "report", "purge-rows", "disabled")
    line = f"-m benchmarks --scale 0.001 --repeat 2 --json {file} --scratch {tmp_path} --only"
    # The benchmarks stand beside the tests, not in what is installed.
    done = subprocess.check_output((sys.executable, *line.split(), *names), cwd=Path(__file__).parents[1], text=True)
    assert "NOT as large" in done
    lines = {line["name"]: line for line in json.loads(file.read_text())["lines"]}
    assert tuple(lines) == names
    for name, line in lines.items():
        if "missing" in line:
            assert "not installed" in line["missing"]
            continue
        lowest, highest = line["spread"]
        assert (len(line["runs"]), 0 < lowest <= highest) == (2, True)
        assert all(run["ours"]["wall"] > 0 and (run["peer"] is None) == (name == "disabled") for run in line["runs"])
    # What was made has gone.
    assert os.listdir(tmp_path) == ["table.json"]
