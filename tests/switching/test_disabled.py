"""``cachectl.disabled()`` and ``cachectl.isolated()`` in real programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from homes import Home

pytestmark = pytest.mark.real


def counts(loopy: int = 0, invoker: int = 0, pocl: int = 0) -> dict[str, int]:
    return {"loopy": loopy, "pyopencl-invoker": invoker, "pyopencl": 0, "pocl": pocl}


#: What each scene of ``session.py`` shows; those of the default tier come first.
SCENES: dict[str, dict[str, Any]] = {
    # PoCL latched its switch while it started; loopy and PyOpenCL cache again.
    "before_first_use": {"status": ["off"], "inside": counts(), "after": counts(10, 2)},
    "nested_and_raising": {"inside": [False, True], "outside": [True, False], "restored": True},
    "user_dictionary": {"inside": [False, False], "outside": [True, False], "restored": True},
    "after_first_use": {
        "before": counts(5, 1, 1),
        "inside": counts(5, 1, 2),
        "after": counts(10, 2, 2),
        "pocl": "salted",
        "warned": [],
    },
    "children": {"inside": counts(), "after": counts(10, 2, 2)},
    "threads": {"one_left": [False, "1"], "none_left": [True, None], "restored": True},
    # What the libraries opened in the block they go on using, so it stays until the process ends.
    "kernels_after_isolated": {"goes_on": True, "outside": 0},
    "dictionary_after_isolated": {"found": ["one", "two"]},
    "forked": {"there": True, "gone": True},
    # A variable that is set after the driver has started proves nothing; one from before the process began does.
    "too_late_a_variable": {"pocl": "salted"},
    "off_from_the_first": {"pocl": "off"},
}
DEFAULT = 3


@pytest.mark.parametrize(
    "scene",
    [*SCENES][:DEFAULT] + [pytest.param(scene, marks=pytest.mark.thorough) for scene in [*SCENES][DEFAULT:]],
)
def test_a_block_switches_off_and_restores(home: Home, scene: str) -> None:
    changes = {"POCL_KERNEL_CACHE": "0"} if scene == "off_from_the_first" else {}
    seen = home.python("session.py", scene, **changes)
    assert {name: seen[name] for name in SCENES[scene]} == SCENES[scene]
    assert "root" not in seen or not Path(seen["root"]).exists()


def test_isolated_starts_empty_and_leaves_nothing(warm: Home) -> None:
    seen = warm.python("session.py isolated")
    assert seen["inside"] == counts(10, 2, 2)
    assert seen["under_root"]
    assert seen["outside"][0] == seen["outside"][1]
    assert not Path(seen["root"]).exists()


@pytest.mark.thorough
def test_isolated_after_the_libraries_have_opened_their_caches_says_so(home: Home) -> None:
    seen = home.python("session.py isolated_too_late")
    assert "entered" not in seen
    assert {"loopy", "pocl", "pyopencl-invoker"} <= set(seen["still_on"])
    assert (seen["restored"], seen["made"]) == (True, False)
    # One line that names what works, and that does.
    assert seen["said"].startswith("cannot move in this process: loopy (")
    assert "run: cachectl run --isolated -- COMMAND" in seen["said"]
    assert "\n" not in seen["said"]
    assert seen["instead"] == ["off", "salted"]
