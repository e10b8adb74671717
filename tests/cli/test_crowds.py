"""Entries that vanish while a verb looks at them, and roots that are links."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from homes import Home
from support.databases import FILE, dictionary
from support.hostile import put_binary, put_dictionary, put_object, put_program
from support.trouble import environment

from cachectl.findings import damage
from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.selection import ALL
from cachectl.stack import Stack

MAKERS = {"pytools": put_dictionary, "pocl/kcache": put_program, "pyopencl": put_binary, "miopen": put_object}
VERBS: dict[str, Callable[[Stack], object]] = {
    "report": lambda stack: stack.report(),
    "ls": lambda stack: list(stack.entries(ALL, notice=lambda _: None)),
    "verify": damage,
    "purge": lambda stack: stack.plan_clear().apply(),
}


def small_home(home: Path) -> Path:
    for place, make in MAKERS.items():
        make(home / ".cache" / place)
    return home


def look(stack: Stack, verb: str, folder: Path, at: int = -1) -> int:
    """Do a verb while a folder vanishes just before a certain look at the disk; return how many looks there were."""
    looks = 0

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever the call takes
            nonlocal looks
            looks += 1
            if looks == at:
                subprocess.run(["rm", "-rf", str(folder)], check=True)
            return call(*arguments, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("listdir", "stat", "lstat", "open", "rename", "unlink"):
            patch.setattr(os, name, watched(getattr(os, name)))
        VERBS[verb](stack)
    return looks


@pytest.mark.parametrize("verb", VERBS)
def test_files_that_vanish_at_any_moment_cause_no_traceback(tmp_path: Path, verb: str) -> None:
    home, pristine = tmp_path / "home", small_home(tmp_path / "pristine")
    stack = Stack(environment(home, tmp_path / "aside"), plugins=False)
    shutil.copytree(pristine, home)
    # The first run looks for facts about the machine, which are then known.
    VERBS[verb](stack)
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(pristine, home)
    looks = look(stack, verb, home)
    assert looks > 20
    for at in range(1, looks + 1, max(1, looks // 40)):
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(pristine, home)
        assert look(stack, verb, home, at) >= at
        assert not home.exists()


def test_a_root_that_is_a_link_is_followed_and_stays(home: Home) -> None:
    dictionary(home.path / "scratch" / FILE, 3)
    root = home.path / ".cache/pytools"
    root.parent.mkdir()
    root.symlink_to(home.path / "scratch")
    assert home.json("report pytools")["total"]["entries"] == 3
    home.process("purge pytools")
    assert root.is_symlink()
    assert home.json("report pytools")["total"]["entries"] == 0


def test_a_link_turned_elsewhere_after_the_plan_does_no_harm(home: Home, tmp_path: Path) -> None:
    root = home.path / "root"
    root.symlink_to(small_home(home.path / "one") / ".cache")
    variables = {"XDG_CACHE_HOME": str(root)}
    stack = Stack(environment(home.path, tmp_path / "aside").with_variables(variables), plugins=False)
    planned = stack.plan_clear(layers=["pocl", "pyopencl"])
    assert planned.plans[0].entries
    root.unlink()
    root.symlink_to(small_home(home.path / "two") / ".cache")
    before = snapshot(home.path / "two")
    result = planned.apply()
    assert [(outcome.removed, bool(outcome.skipped)) for outcome in result.layers] == [(0, True)] * 2
    assert snapshot(home.path / "two") == before


def test_a_root_that_is_a_link_to_itself_is_a_problem_of_its_layer_alone(home: Home) -> None:
    root = home.path / ".cache/pocl/kcache"
    root.parent.mkdir(parents=True)
    root.symlink_to(root)
    pocl, cuda = home.json("report pocl cuda", check=False)["layers"]
    assert (pocl["entries"], cuda["entries"]) == (None, 0)
    assert "Too many levels of symbolic links" in pocl["roots"][0]["problems"][0]["message"]
