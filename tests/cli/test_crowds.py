"""Many entries, entries that vanish, and roots that are links."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.databases import FILE, dictionary
from support.hostile import put_binary, put_dictionary, put_object, put_program
from support.trouble import environment

from cachectl.findings import damage
from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.selection import ALL
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


def small_home(home: Path) -> Path:
    for place, make in (
        ("pytools", put_dictionary),
        ("pocl/kcache", put_program),
        ("pyopencl", put_binary),
        ("miopen", put_object),
    ):
        make(home / ".cache" / place)
    return home


class Vanishing:
    """Lets everything vanish just before, or just after, a certain look at the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.looks = 0
        self.at: int | None = None
        self._busy = False
        for name in ("listdir", "stat", "lstat", "open", "rename", "unlink"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever the call takes
            if self._busy:
                return call(*arguments, **options)
            self.looks += 1
            if self.looks == self.at:
                self._busy = True
                subprocess.run(["rm", "-rf", str(self.folder)], check=True)
                self._busy = False
            return call(*arguments, **options)

        return watched


@pytest.mark.parametrize("verb", ["report", "ls", "verify", "purge"])
def test_files_that_vanish_at_any_moment_cause_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    verbs: dict[str, Callable[[Stack], object]] = {
        "report": lambda stack: stack.report(),
        "ls": lambda stack: list(stack.entries(ALL, notice=lambda _: None)),
        "verify": damage,
        "purge": lambda stack: stack.plan_clear().apply(),
    }
    home, pristine = tmp_path / "home", small_home(tmp_path / "pristine")
    stack = Stack(environment(home, tmp_path / "aside"), plugins=False)
    shutil.copytree(pristine, home)
    # The first run looks for facts about the machine, which are then known.
    verbs[verb](stack)
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(pristine, home)
    with monkeypatch.context() as patch:
        vanishing = Vanishing(patch, home)
        verbs[verb](stack)
        looks = vanishing.looks
    assert looks > 20
    for at in range(1, looks + 1, max(1, looks // 40)):
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(pristine, home)
        with monkeypatch.context() as patch:
            vanishing = Vanishing(patch, home)
            vanishing.at = at
            verbs[verb](stack)
        assert vanishing.looks >= at
        assert not home.exists()


def test_a_root_that_is_a_link_is_followed_and_stays(home: Home) -> None:
    dictionary(home.path / "scratch" / FILE, 3)
    root = home.path / ".cache" / "pytools"
    root.parent.mkdir()
    root.symlink_to(home.path / "scratch")
    assert home.json("report", "pytools")["total"]["entries"] == 3
    assert home.run(sys.executable, "-m", "cachectl", "purge", "pytools").returncode == 0
    assert root.is_symlink()
    assert home.json("report", "pytools")["total"]["entries"] == 0


def test_a_link_turned_elsewhere_after_the_plan_does_no_harm(home: Home, tmp_path: Path) -> None:
    pristine = small_home(home.path / "one")
    small_home(home.path / "two")
    root = home.path / "root"
    root.symlink_to(pristine / ".cache")
    stack = Stack(
        environment(home.path, tmp_path / "aside").with_variables({"XDG_CACHE_HOME": str(root)}), plugins=False
    )
    planned = stack.plan_clear(layers=["pocl", "pyopencl"])
    assert planned.plans[0].entries
    root.unlink()
    root.symlink_to(home.path / "two" / ".cache")
    before = snapshot(home.path / "two")
    result = planned.apply()
    assert [outcome.removed for outcome in result.layers] == [0, 0]
    assert all(outcome.skipped for outcome in result.layers)
    assert snapshot(home.path / "two") == before


def test_a_root_that_is_a_link_to_itself_is_a_problem_of_its_layer_alone(home: Home) -> None:
    root = home.path / ".cache" / "pocl" / "kcache"
    root.parent.mkdir(parents=True)
    root.symlink_to(root)
    done = home.cachectl("report", "pocl", "cuda", "--json", check=False)
    pocl, cuda = json.loads(done.stdout)["layers"]
    assert (done.returncode, pocl["entries"], cuda["entries"]) == (1, None, 0)
    assert "Too many levels of symbolic links" in pocl["roots"][0]["problems"][0]["message"]
