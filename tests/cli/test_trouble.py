"""Full disks, read-only folders, locks, links, and files that vanish: one line for each cause, and nothing lost."""

import os
import re
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from homes import Home, age, run_in, unpack_compute_cache
from support.dictionaries import FILE, dictionary, equal_rows
from support.hostile import hash_tree, put_binary, put_dictionary, put_object, put_program
from support.layers import environment_of
from tiers import real, thorough, thorough_only

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.selection import ALL
from cachectl.stack import Stack

#: Layers that the filled home has entries of.
LAYERS = ("loopy", "pyopencl-invoker", "pyopencl", "pocl", "cuda")
PURGE, PRUNE = ("purge", "--all"), ("prune", "--max-size", "1B")


def settle(filled: Home, home: Path) -> None:
    """Give a home what loopy, PyOpenCL, PoCL and CUDA left in others."""
    shutil.copytree(filled.path / ".cache", home / ".cache", symlinks=True)
    unpack_compute_cache(home / ".nv/ComputeCache")
    # No program of the tester's can be busy with what is old.
    age(home)


def run(home: Path, *arguments: str, by: Sequence[str] = ()) -> tuple[int, Counter[str], str]:
    """Run the command over a home; return its status, how many lines each layer got, and the lines."""
    done = run_in(home, *arguments, by=by)
    lines = done.stderr.splitlines()
    assert all(line.startswith("cachectl: ") for line in lines), done.stderr
    return done.returncode, Counter(line.split(": ")[1] for line in lines), done.stderr


def environment(home: Path, aside: Path) -> Environment:
    return environment_of(home)._replace(temporary=aside, lock_timeout=0.1)


def holding(home: Path, aside: Path) -> set[str]:
    stack = Stack(environment(home, aside))
    return {entry.layer for entry in stack.entries(ALL, notice=lambda _: None)}


def assert_no_leftovers(home: Path) -> None:
    assert not [path for path in home.rglob("*") if re.fullmatch(r"\.cachectl-.*|.*-journal|lock", path.name)]


@contextmanager
def locked(file: Path) -> Iterator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("begin immediate")
        yield


@real
@pytest.mark.parametrize("verb", [PURGE, *thorough((PRUNE,))])
@pytest.mark.parametrize(
    ("trouble", "layer", "pattern", "words"),
    [
        ("mount", "pocl", ".cache/pocl", "ead-only"),
        ("mount", "all", "", "ead-only|readonly"),
        ("0", "pocl", ".cache/pocl/kcache/??", "cannot be read: Permission denied"),
        ("500", "pyopencl", ".cache/pyopencl/*", "Permission denied"),
        ("lock", "loopy", ".cache/pytools/pdict-v5-loopy-*", r"locked by PID \d+ \(.*\) for more than 0.1 s"),
        *thorough(
            ("mount", "cuda", ".nv/ComputeCache", "ead-only"),
            ("mount", "pyopencl", ".cache/pyopencl", "ead-only"),
            ("0", "cuda", ".nv/ComputeCache/?", "cannot be read: Permission denied"),
        ),
    ],
)
def test_a_root_in_trouble_is_one_line_and_stops_no_other_layer(  # noqa: PLR0917 - a table
    mount: Callable[..., Path],
    filled: Home,
    tmp_path: Path,
    held_to_modes: tuple[str, ...],
    trouble: str,
    layer: str,
    pattern: str,
    words: str,
    verb: tuple[str, ...],
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    settle(filled, home)
    places = sorted(tmp_path.glob(f"home/{pattern}".rstrip("/")))
    layers, place = set(LAYERS) if layer == "all" else {layer}, places[0]
    if trouble != "lock":
        del places[1:]
    before = hash_tree(*places)
    with ExitStack() as stack:
        if trouble == "mount":
            mount("--bind", str(place), on=place)
            mount("-o", "remount,ro,bind", on=place)
        elif trouble == "lock":
            for file in places:
                stack.enter_context(locked(file))
        else:
            stack.callback(place.chmod, place.stat().st_mode)
            place.chmod(int(trouble, 8))
        status, lines, said = run(home, *verb, "--wait", "0.1", by=held_to_modes if trouble.isdigit() else ())
    # A limit says what stays above it, besides.
    counted = {name: count for name, count in lines.items() if "stay, although" not in name}
    assert (status, counted) == (1, dict.fromkeys(layers, 1)), said
    assert all(re.search(words, line) for line in said.splitlines() if "stay, although" not in line)
    assert hash_tree(*places) == before
    assert holding(home, tmp_path / "aside") == layers
    assert_no_leftovers(home)


MAKERS = {"pytools": put_dictionary, "pocl/kcache": put_program, "pyopencl": put_binary, "miopen": put_object}
VERBS: dict[str, Callable[[Stack], object]] = {
    "report": lambda stack: stack.report(),
    "ls": lambda stack: list(stack.entries(ALL, notice=lambda _: None)),
    "verify": lambda stack: stack.verify(),
    "purge": lambda stack: stack.plan_clear().apply(),
}


def small_home(home: Path) -> Path:
    for place, make in MAKERS.items():
        make(home / ".cache" / place)
    return home


def look(stack: Stack, verb: str, home: Path, at: int = 0) -> int:
    """Do a verb in a home that vanishes just before a certain look at the disk; return how many looks there were."""
    shutil.rmtree(home, ignore_errors=True)
    small_home(home)
    looks = 0

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever the call takes
            nonlocal looks
            looks += 1
            if looks == at:
                subprocess.run(["rm", "-rf", str(home)], check=True)
            return call(*arguments, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("listdir", "stat", "lstat", "open", "rename", "unlink"):
            patch.setattr(os, name, watched(getattr(os, name)))
        VERBS[verb](stack)
    return looks


@thorough_only
@pytest.mark.parametrize("verb", ["purge", *thorough("report", "ls", "verify")])
def test_files_that_vanish_at_any_moment_cause_no_traceback(tmp_path: Path, verb: str) -> None:
    home = tmp_path / "home"
    stack = Stack(environment(home, tmp_path / "aside"))
    # The first run looks for facts about the machine, which are then known.
    looks = [look(stack, verb, home) for _ in range(2)][1]
    assert looks > 20
    for at in range(1, looks + 1, max(1, looks // 40)):
        assert (look(stack, verb, home, at) >= at, home.exists()) == (True, False)


def test_a_root_that_is_a_link_is_followed_and_stays(home: Home) -> None:
    dictionary(home.path / "scratch" / FILE, equal_rows(3))
    root = home.path / ".cache/pytools"
    root.parent.mkdir()
    root.symlink_to(home.path / "scratch")
    assert home.json("report pytools")["total"]["entries"] == 3
    home.cachectl("purge pytools")
    assert root.is_symlink()
    assert home.json("report pytools")["total"]["entries"] == 0


def test_a_link_turned_elsewhere_after_the_plan_does_no_harm(home: Home, tmp_path: Path) -> None:
    root = home.path / "root"
    root.symlink_to(small_home(home.path / "one") / ".cache")
    variables = {"XDG_CACHE_HOME": str(root)}
    stack = Stack(environment(home.path, tmp_path / "aside").with_variables(variables))
    planned = stack.plan_clear(layers=["pocl", "pyopencl"])
    assert planned.layers[0].entries
    root.unlink()
    root.symlink_to(small_home(home.path / "two") / ".cache")
    before = snapshot(home.path / "two")
    result = planned.apply()
    assert [(outcome.removed, bool(outcome.skipped)) for outcome in result.layers] == [(0, True)] * 2
    assert snapshot(home.path / "two") == before
