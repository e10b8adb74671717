"""``cachectl.disabled()`` and ``isolated()`` in real programs, also after a driver has started: builds are salted."""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from homes import ICD_FILES, Home
from support.mesa import RUSTICL
from tiers import needing, thorough, thorough_only

from cachectl.switching.salt import Salting

pytestmark = pytest.mark.real


#: What PoCL says of a program that it compiles, and of a kernel that it compiles for a work-group shape.
MISSES = ("Writing program.bc", "Built a ")
HITS = ("Using a cached",)


def log_parts(log: str) -> dict[str, Counter[str]]:
    """Count PoCL's misses and hits in each part of its debug log, by the mark that begins the part."""
    parts: dict[str, Counter[str]] = {}
    part: Counter[str] = Counter()
    for line in log.splitlines():
        if line.startswith("-- "):
            part = parts[line[3:]] = Counter()
        part.update(said for said in (*MISSES, *HITS) if said in line)
    return parts


@thorough_only
def test_a_kernel_built_before_is_rebuilt_in_the_block_and_the_cache_is_as_it_was(home: Home) -> None:
    seen = home.python("salted.py rebuilt", POCL_DEBUG="general,llvm")
    status, why = seen["status"]["pocl"]
    assert status == "salted"
    assert "binaries or IL" in why
    assert {held for name, (held, _) in seen["status"].items() if name != "pocl"} == {"off"}
    parts = log_parts(seen["stderr"])
    assert sum(parts["warm"][said] for said in MISSES) == 0
    # A plain program and a loopy kernel, whose executor had compiled it before.
    assert parts["block"] == {"Writing program.bc": 2, "Built a ": 2}
    # The block's own copy serves a second launch, and after it the first is there again.
    assert not parts["again"]
    assert not parts["left"]
    assert seen["cold"] > 2 * seen["warm"]
    assert all(seen[name] for name in ("right", "stored", "same", "restored", "methods"))


#: Warnings as errors, the oldest and the newest OpenCL C, and options that change what the compiler keeps.
OPTIONS = ("-Werror", "-cl-std=CL1.1 -Werror", "-cl-std=CL1.2", "-cl-std=CL3.0 -Werror", "-g", "-cl-opt-disable")
#: What scenes of ``salted.py`` show, and how many programs PoCL keeps after them. All are of longer tiers.
SCENES: dict[str, dict[str, Any]] = {
    # PoCL compiles new shapes into the folder that has gone; the next block takes that away too.
    "kernel_lives_on": {
        "same": True,
        "sums": [64.0] * 3,
        "from_program": 64.0,
        "came_back": True,
        "swept": True,
        "once_more": 64.0,
    },
    # Programs that a waiting command may compile are removed at the end.
    "command_in_flight": {"stays": True, "programs": 0},
    "never_done": {"stays": True, "programs": 1},
    "others_entries_stay": {"kept": 2, "removed": 1},
    "threads_and_exceptions": {"sums": [64.0] * 3, "same": True, "restored": True},
    # Touched, built again, compiled, linked, and the grain of salt that is linked along.
    "ways_to_build": {"sums": [64.0] * 3, "stored": 5, "left": [], "sources": []},
    # Two units, the unit that carries the salt of the link, and the program linked of them.
    "options_and_units": {"sums": [64.0] * (len(OPTIONS) + 1), "stored": len(OPTIONS) + 4, "same": True},
    # PyOpenCL's own cache does not answer either.
    "binary_cache": {
        "status": {"pocl": "salted"},
        "how": ["source build resulting from a binary cache miss", False],
        "stored": True,
        "same": True,
    },
    "spawned": {"status": "salted", "sums": [64.0] * 2, "new": [], "rows": 0},
    # A forked child goes on salting, and its parent cleans up.
    "forked": {"ended": 0, "stored": 2, "same": True},
    # A kernel that stores entries after the block: they are removed when the process ends.
    "at_the_end": {"came_back": True, "programs": 0},
}


@thorough_only
@pytest.mark.parametrize("scene", SCENES)
def test_a_block_misses_and_leaves_nothing(home: Home, any_pocl: Mapping[str, Any], scene: str) -> None:
    seen = home.python("salted.py", scene, *(OPTIONS if scene == "options_and_units" else ()), **any_pocl)
    seen["programs"] = len(programs(home))
    assert {name: seen[name] for name in SCENES[scene]} == SCENES[scene]
    # Entries that cannot be removed at the end are reported.
    assert ("entries of 1 salted build stay" in seen["stderr"]) == (scene == "never_done")
    if scene == "ways_to_build":
        assert "nonsense" in seen["failed"][0]
        assert "on purpose" in seen["failed"][1]
    assert "pocl stored" not in seen["stderr"]


def programs(home: Home) -> list[str]:
    """List the folders of programs that PoCL keeps."""
    return sorted(str(path) for path in (home.path / ".cache/pocl/kcache").glob("??/*"))


@thorough_only
@pytest.mark.parametrize("driver", ["rusticl", *needing("intel_driver")])
def test_builds_for_another_platform_are_not_salted(request: pytest.FixtureRequest, home: Home, driver: str) -> None:
    """The SPIR-V translator of Rusticl aborts the process on the salt."""
    # Mesa looks for the home of the account.
    platform, variables = "rusticl", {**RUSTICL, "MESA_SHADER_CACHE_DIR": str(home.path / "mesa")}
    if driver != "rusticl":
        platform, variables = "Intel(R) OpenCL", dict(request.getfixturevalue(driver))
    # The loader reads a folder beside the wheel's own.
    vendors = home.path / "vendors"
    vendors.mkdir()
    for registered in map(Path, (variables["OCL_ICD_VENDORS"], home.variables["OCL_ICD_VENDORS"])):
        if registered.is_file() and registered != ICD_FILES[0]:
            shutil.copy(registered, vendors)
    variables["OCL_ICD_VENDORS"] = str(vendors)
    seen = home.python("salted.py other_platform", platform, **variables)
    if not seen["found"]:
        pytest.skip(f"has no device of {platform}")
    assert (seen["status"], seen["salted"], seen["sums"]) == ("salted", [True, False], [64.0] * 3)


@thorough_only
def test_binaries_taken_after_the_block_are_whole(home: Home) -> None:
    """PoCL makes them from the folder that has gone; without its bitcode they crash the program that loads them."""
    seen = home.python("salted.py binaries_after")
    assert (seen["same"], seen["sums"]) == (True, [64.0, 128.0])
    # Not from the cache, but from the binary.
    shutil.rmtree(home.path / ".cache")
    assert home.python("salted.py binaries_elsewhere")["sums"] == [64.0, 128.0]


@thorough_only
def test_a_driver_that_pyopencl_did_not_start_stays_on_and_is_named(home: Home) -> None:
    """What cannot be switched off is refused, or warned of."""
    seen = home.python("salted.py without_pyopencl")
    assert ("entered" in seen, list(seen["refused"]), seen["held"]) == (False, ["pocl"], {"pocl": "on"})
    assert [line for line in seen["warned"] if line.startswith("pocl stays as it is")]


def counts(loopy: int = 0, invoker: int = 0, pocl: int = 0) -> dict[str, int]:
    return {"loopy": loopy, "pyopencl-invoker": invoker, "pyopencl": 0, "pocl": pocl}


#: What each scene of ``session.py`` shows; those of the default tier come first.
BLOCKS: dict[str, dict[str, Any]] = {
    # PoCL latched its switch while it started; loopy and PyOpenCL cache again.
    "before_first_use": {"status": ["off"], "inside": counts(), "after": counts(5, 1)},
    "nested_and_raising": {"inside": [False, True], "outside": [True, False], "restored": True},
    # The driver is on, because it started in the inner block.
    "isolated_inside": {"started": 1, "pocl": "salted", "after": counts(), "notes": []},
    "user_dictionary": {"inside": [False, False], "outside": [True, False], "restored": True},
    "after_first_use": {
        "before": counts(5, 1, 1),
        "inside": counts(5, 1, 2),
        "after": counts(10, 2, 2),
        "pocl": "salted",
        "warned": [],
    },
    "threads": {"one_left": [False, "1"], "none_left": [True, None], "restored": True},
    # What the libraries opened in the block they go on using, so it stays until the process ends.
    "kernels_after_isolated": {"goes_on": True, "outside": 0},
    # Only a variable that was set before the process began, and is set now, proves something.
    "too_late_a_variable": {"pocl": "salted"},
    "off_from_the_first": {"pocl": "off"},
    "off_until_it_started": {"pocl": "salted"},
}


@pytest.mark.parametrize("scene", [*[*BLOCKS][1:4], *thorough("before_first_use", *[*BLOCKS][4:])])
def test_a_block_switches_off_and_restores(home: Home, scene: str) -> None:
    changes = {"POCL_KERNEL_CACHE": "0"} if scene.startswith("off_") else {}
    seen = home.python("session.py", scene, **changes)
    assert {name: seen[name] for name in BLOCKS[scene]} == BLOCKS[scene]
    assert "root" not in seen or not Path(seen["root"]).exists()


@thorough_only
def test_isolated_starts_empty_and_leaves_nothing(warm: Home) -> None:
    seen = warm.python("session.py isolated")
    assert (seen["inside"], seen["under_root"]) == (counts(5, 1, 1), True)
    assert seen["outside"][0] == seen["outside"][1]
    assert not Path(seen["root"]).exists()


@thorough_only
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


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_warning_that_is_an_error_is_raised_unless_the_block_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that was handled around the block has nothing to do with it."""
    salting = Salting()
    monkeypatch.setattr(salting, "sweep", lambda: (0, ["an entry stays"]))
    monkeypatch.setattr("atexit.register", lambda _: None)
    monkeypatch.setattr("os.register_at_fork", lambda **_: None)
    for enter in (lambda: salting.salted(frozenset(), (), 0.0), salting.build):
        try:
            raise LookupError
        except LookupError:
            with pytest.raises(RuntimeWarning), enter():
                pass
        with pytest.raises(LookupError), enter():
            raise LookupError
