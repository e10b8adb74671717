"""The benchmarks measure real work on sound caches; how long it takes is not asserted."""

import json
from pathlib import Path

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
