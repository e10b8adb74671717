"""The pytest plug-in in real pytest sessions: cold tests, sessions without caches, and what it costs others."""

import re
import subprocess
from pathlib import Path

from homes import PROGRAMS, PYTEST, Home
from tiers import real, thorough_only

#: What the tests below share: the state that a child finds, and real kernels.
COMMON = f"""
import os, sys
sys.path.insert(0, {str(PROGRAMS)!r})
from session import compile_kernels, counted
SWITCHES = ("LOOPY_NO_CACHE", "PYOPENCL_NO_CACHE", "POCL_KERNEL_CACHE", "CUDA_CACHE_DISABLE", "POCL_CACHE_DIR")

def seen():
    return {{name: os.environ[name] for name in SWITCHES if name in os.environ}}
"""
OFF = {"LOOPY_NO_CACHE": "1", "PYOPENCL_NO_CACHE": "1", "POCL_KERNEL_CACHE": "0", "CUDA_CACHE_DISABLE": "1"}
EMPTY = dict.fromkeys(("loopy", "pyopencl-invoker", "pyopencl", "pocl"), 0)


def session(
    home: Home, tests: str, *arguments: str, check: bool = True, conftest: str = "", **changes: str
) -> subprocess.CompletedProcess[str]:
    folder = home.path / "project"
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "common.py").write_text(COMMON)
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(f"import cachectl\nfrom common import *\n{tests}")
    return home.run(*PYTEST, *arguments, str(folder), check=check, **changes)


@thorough_only
def test_disabled_caches_are_off_for_the_test_and_its_children(home: Home) -> None:
    session(
        home,
        f"""
import json, subprocess, sys
def test_cold(disabled_caches):
    assert seen() == {OFF!r}
    child = "import json, os; print(json.dumps(dict(os.environ)))"
    found = json.loads(subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout)
    assert {OFF!r}.items() <= found.items()
    assert {{"loopy", "pocl", "cuda"}} <= {{name for name, held in disabled_caches.items() if held.status == "off"}}
def test_after():
    assert seen() == {{}}
""",
    )


@real
@thorough_only
def test_isolated_caches_are_on_in_an_empty_root(warm: Home) -> None:
    before = warm.json("report loopy pocl")["total"]
    done = session(
        warm,
        f"""
import os
def test_isolated(isolated_caches):
    assert counted() == {EMPTY!r}
    compile_kernels(0)
    assert counted()["pocl"] == 1
    assert os.environ["POCL_CACHE_DIR"].startswith(str(isolated_caches))
    print("root", isolated_caches)
def test_after():
    assert seen() == {{}}
def test_again(isolated_caches):
    pass
""",
        "-rP",
        check=False,
    )
    assert "2 passed, 1 error" in done.stdout
    assert warm.json("report loopy pocl")["total"] == before
    (root,) = re.findall(r"^root (.*)$", done.stdout, re.MULTILINE)
    assert not Path(root).exists()
    # A library that has opened its cache stays there: the test is an error in one line, not run on the wrong cache.
    _, _, rest = done.stdout.partition("ERROR at setup of test_again ")
    (line,) = [line for line in rest.split("\n===")[0].splitlines()[1:] if line and not line.startswith("---")]
    assert line.startswith("isolated_caches: cannot move in this process: loopy (")
    assert "run the test alone: pytest test_it.py::test_again" in line


@real
@thorough_only
def test_no_kernel_cache_is_the_whole_session(home: Home) -> None:
    done = session(
        home,
        f"""
def test_both(): compile_kernels(0)
def test_nothing_stored():
    assert seen() == {OFF!r}
    assert counted() == {EMPTY!r}
""",
        "--no-kernel-cache",
        # A conftest that starts the driver, as a session's context fixture would, is late enough.
        conftest="import pyopencl as cl\nassert any(p.get_devices() for p in cl.get_platforms())\n",
    )
    assert "2 passed" in done.stdout
    assert "kernel caches (--no-kernel-cache): loopy off, pyopencl-invoker off, pytools off," in done.stdout


@thorough_only
def test_other_peoples_sessions_import_nothing_of_it(home: Home) -> None:
    """A quiet session that asks for nothing loads the plug-in and the package's own first lines."""
    tests = (
        "import sys\ndef test_nothing():\n"
        "    ours = sorted(name for name in sys.modules if name.partition('.')[0] == 'cachectl')\n"
        "    assert ours == ['cachectl', 'cachectl.pytest_plugin']\n"
        "    assert not {'pyopencl', 'loopy', 'numpy', 'pytools', 'sqlite3'} & set(sys.modules)\n"
    )
    session(home, tests, "-q")
