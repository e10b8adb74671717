"""Entries that are placed together: each whole or not at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cachectl.layers.stores.tree import OWN_TEMPORARY, Shape, Tree

SHAPE = Shape((re.compile("[a-f]{2}"), re.compile("[0-9]{4}")), folders=True)
MEMBERS = {"program": b"p" * 5000, "kernel/code": b"c" * 3000, "empty": b""}
#: Places 30 entries in a root, and is killed before the given call of those that change it.
KILLED = """
import os, re, signal, sys
from itertools import count
from pathlib import Path
calls = count()
def dying(function):
    def call(*arguments, **options):
        if next(calls) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
for name in ("open", "write", "mkdir", "rename", "unlink", "rmdir"):
    setattr(os, name, dying(getattr(os, name)))
from cachectl.layers.stores.tree import Shape, Tree
shape = Shape((re.compile("[a-f]{2}"), re.compile("[0-9]{4}")), folders=True)
members = {"program": b"p" * 5000, "kernel/code": b"c" * 3000, "empty": b""}
placed = Tree("test", Path(sys.argv[1]), shape).write_new({f"ab/{n:04}": members for n in range(30)})
print(len(placed), next(calls))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree("test", tmp_path / "root", SHAPE)


def test_a_file_in_the_way_stays_and_other_entries_are_placed(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tree.root / "ab").mkdir(parents=True)
    (tree.root / "ab" / "0001").mkdir()
    (tree.root / "ab" / "0002").symlink_to(tmp_path / "outside")
    (tree.root / "ab" / "0003").write_text("no folder")
    (tree.root / "cd").symlink_to(tmp_path / "outside")
    tree.write_members("ef/0000", {"program": b"another"}, replace=False)
    free = {f"{folder}/{number:04}" for folder in ("ab", "ba", "ff") for number in range(10, 40)}
    taken = {"ab/0001", "ab/0002", "ab/0003", "cd/0000", "ef/0000"}
    odd = {"no key", "ab/../0000"}
    placed = tree.write_new({**dict.fromkeys(sorted(free | taken | odd), MEMBERS), "ab/0050": {}})
    assert placed == dict.fromkeys(free, True)
    assert all(tree.read_members(key) == MEMBERS for key in free)
    assert tree.read_members("ef/0000") == {"program": b"another"}
    assert os.listdir(tmp_path / "outside") == []
    assert os.listdir(tree.root / "ab" / "0001") == []
    assert (tree.root / "ab" / "0003").read_text() == "no folder"
    assert not [name for name in os.listdir(tree.root) if OWN_TEMPORARY.fullmatch(name)]


def test_a_kill_leaves_whole_entries_and_a_stage_that_is_cleared(tmp_path: Path) -> None:
    def run(root: Path, call: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(root), str(call)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    placed, calls = map(int, run(tmp_path / "whole", -1).stdout.split())
    assert placed == 30
    partly = 0
    for call in range(calls // 6, calls, calls // 4):
        root = tmp_path / str(call)
        assert run(root, call).returncode == -signal.SIGKILL
        tree = Tree("test", root, SHAPE)
        standing = [tree.read_members(path.relative_to(root).as_posix()) for path in root.glob("ab/*")]
        assert all(members == MEMBERS for members in standing)
        partly += 0 < len(standing) < 30
    assert partly
