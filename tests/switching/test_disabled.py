"""``cachectl.disabled()`` and ``cachectl.isolated()`` in real programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from homes import Home

pytestmark = pytest.mark.real

NOTHING = {"loopy": 0, "pyopencl-invoker": 0, "pyopencl": 0, "pocl": 0}


def test_disabled_before_opencl_is_used_keeps_every_layer_empty(home: Home) -> None:
    seen = home.python("session.py", "before_first_use")
    assert set(seen["status"].values()) == {"off"}
    assert seen["inside"] == NOTHING
    # PoCL latched its switch while it started; loopy and PyOpenCL cache again.
    assert seen["after"] == {"loopy": 10, "pyopencl-invoker": 2, "pyopencl": 0, "pocl": 0}


@pytest.mark.thorough
def test_disabled_after_a_driver_has_started_salts(home: Home) -> None:
    seen = home.python("session.py", "after_first_use")
    assert seen["before"] == {"loopy": 5, "pyopencl-invoker": 1, "pyopencl": 0, "pocl": 1}
    assert seen["inside"] == {"loopy": 5, "pyopencl-invoker": 1, "pyopencl": 0, "pocl": 2}
    assert seen["after"] == {"loopy": 10, "pyopencl-invoker": 2, "pyopencl": 0, "pocl": 2}
    assert seen["pocl"] == "salted"
    assert seen["warned"] == []


@pytest.mark.thorough
def test_children_of_the_block_are_off_too(home: Home) -> None:
    seen = home.python("session.py", "children")
    assert seen["inside"] == NOTHING
    assert seen["after"] == {"loopy": 10, "pyopencl-invoker": 2, "pyopencl": 0, "pocl": 2}


def test_isolated_starts_empty_and_leaves_nothing(warm: Home) -> None:
    seen = warm.python("session.py", "isolated")
    assert seen["inside"] == {"loopy": 10, "pyopencl-invoker": 2, "pyopencl": 0, "pocl": 2}
    assert seen["under_root"]
    assert seen["outside"][0] == seen["outside"][1]
    assert not Path(seen["root"]).exists()


@pytest.mark.thorough
def test_isolated_after_the_libraries_have_opened_their_caches_says_so(home: Home) -> None:
    seen = home.python("session.py", "isolated_too_late")
    assert "entered" not in seen
    assert {"loopy", "pocl", "pyopencl-invoker"} <= set(seen["still_on"])
    assert seen["restored"]
    assert not seen["made"]
    # One line that names what works, and that does.
    assert seen["said"].startswith("cannot move in this process: loopy (")
    assert "run: cachectl run --isolated -- COMMAND" in seen["said"]
    assert seen["said"].endswith("cachectl.disabled() works here")
    assert "\n" not in seen["said"]
    assert seen["instead"] == ["off", "salted"]


@pytest.mark.thorough
def test_layers_may_be_named_by_lists(home: Home) -> None:
    seen = home.python("session.py", "lists")
    assert [seen[way] for way in ("list", "generator", "several", "mixed")] == [["loopy", "pocl"]] * 4
    assert (seen["one"], seen["none"]) == (["loopy"], [])
    assert {"loopy", "pocl", "cuda"} < set(seen["all"])
    unknown, *wrong = seen["refused"]
    assert unknown.startswith("unknown layer 'no-such-layer'")
    assert wrong == [f"layers are named by str, not by {kind}" for kind in ("NoneType", "bytes", "list")]


@pytest.mark.thorough
def test_blocks_that_overlap_in_threads_are_restored_by_the_last(home: Home) -> None:
    seen = home.python("session.py", "threads")
    assert seen["one_left"] == [False, "1"]
    assert seen["none_left"] == [True, None]
    assert seen["restored"]


def test_nesting_and_exceptions_restore_exactly(home: Home) -> None:
    seen = home.python("session.py", "nested_and_raising")
    assert seen["inside"] == [False, True]
    assert seen["outside"] == [True, False]
    assert seen["restored"]


def test_a_users_own_dictionary_is_off_and_on_again(home: Home) -> None:
    seen = home.python("session.py", "user_dictionary")
    assert seen["inside"] == [False, False]
    assert seen["outside"] == [True, False]
    assert seen["restored"]


@pytest.mark.thorough
def test_a_process_works_on_after_an_isolated_block(home: Home) -> None:
    seen = home.python("session.py", "kernels_after_isolated")
    # What the libraries opened in the block they go on using, so it stays until the process ends.
    assert seen["goes_on"]
    assert not Path(seen["root"]).exists()
    assert seen["outside"]["pocl"] == 0


@pytest.mark.thorough
def test_a_forked_child_leaves_its_parents_root(home: Home) -> None:
    seen = home.python("session.py", "forked")
    assert seen["there"]
    assert seen["gone"]


@pytest.mark.thorough
def test_a_variable_set_after_the_driver_started_proves_nothing(home: Home) -> None:
    assert home.python("session.py", "too_late_a_variable")["pocl"] == "salted"


@pytest.mark.thorough
def test_a_variable_set_before_the_process_began_proves_it(home: Home) -> None:
    assert home.python("session.py", "off_from_the_first", POCL_KERNEL_CACHE="0")["pocl"] == "off"


@pytest.mark.thorough
def test_a_dictionary_opened_in_an_isolated_block_goes_on_working(home: Home) -> None:
    seen = home.python("session.py", "dictionary_after_isolated")
    assert seen["found"] == ["one", "two"]
    assert not Path(seen["root"]).exists()
