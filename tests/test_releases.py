"""trace, disabled() and report with the oldest releases of the libraries that install on this Python.

They are installed by pip into an environment of their own. All other tests run the newest ones.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import requires
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from homes import ICD_FILES, Home, working_pocl
from support.dictionaries import rows_of
from support.tracing import numbers
from tiers import absent, real

import cachectl
from cachectl import layers

pytestmark = [real, pytest.mark.environment]
PROGRAMS = Path(__file__).parent / "programs"

#: The oldest releases for Pythons until 3.12, for 3.13 and for 3.14: the first set that pip can install.
OLDEST = (
    ("loopy==2024.1", "pytools==2024.1.3", "pyopencl==2024.1", "islpy<2025", "pymbolic<2024.2", "numpy<2"),
    ("loopy==2025.1", "pyopencl==2025.1", "islpy<2026"),
    ("loopy==2025.2", "pyopencl==2025.2.7", "islpy==2026.1"),
)

#: After a build outside, everything is built in a block with all layers off, and then once more outside.
SWITCHING = """
import json, warnings
warnings.simplefilter("ignore")
import pyopencl as cl
from binaries import device
from session import compile_kernels, counted
import cachectl

def build(number):
    source = f"__kernel void pk{number}(__global int *a) {{ a[0] = {number}; }}"
    cl.Program(cl.Context([device()]), source).build()
    compile_kernels(number)

build(0)
seen = {"before": counted()}
with cachectl.disabled() as held:
    seen["status"] = {name: hold.status for name, hold in held.items()}
    build(0)
    build(1)
seen["after"] = counted()
build(1)
seen["then"] = counted()
print(json.dumps(seen))
"""


class Libraries(NamedTuple):
    """A Python that has the libraries, and the variables with which it also finds cachectl and the test programs."""

    python: str
    variables: Mapping[str, Any]
    #: Whether PyOpenCL has a cache of its own on PoCL: until 2024.2.2.
    keeps_binaries_on_pocl: bool


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    folder = tmp_path_factory.mktemp("libraries")
    # With a folder, the loader of PyOpenCL's wheel adds the PoCL of its own environment, and no other driver.
    (folder / "vendors").mkdir()
    python, site = _install_oldest(folder / "venv"), folder / "site"
    shutil.copytree(Path(cachectl.__file__).parent, site / "cachectl")
    shutil.copytree(Path(layers.__file__).parent, site / "cachectl/layers", dirs_exist_ok=True)
    paths = (str(PROGRAMS), str(site))
    pocl = working_pocl()
    vendors = str(folder / "vendors") if pocl == str(ICD_FILES[0]) else pocl
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OCL_ICD_VENDORS": vendors}
    asked = (python, "-c", "import importlib.metadata as m; print(m.version('pyopencl'))")
    release = subprocess.check_output(asked, text=True).split(".")
    return Libraries(python, variables, tuple(map(int, release[:2])) <= (2024, 1))


def _install_oldest(folder: Path) -> str:
    """Make an environment of the first set that can be installed. Skips where pip reaches no index."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin/python")
    needed = [line for line in requires("opencl-cachectl") or () if "extra ==" not in line]
    for oldest in OLDEST:
        done = _pip(python, "install", "--prefer-binary", *oldest, "pocl-binary-distribution", *needed)
        if done.returncode == 0:
            return python
    if _pip(python, "download", "--no-deps", "--dest", str(folder), "pytools").returncode:
        absent(f"needs the package index, which pip does not reach: {done.stderr.strip()[-200:]}")
    pytest.fail(f"none of the oldest sets can be installed: {done.stderr.strip()[-500:]}")


def _pip(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def stored(home: Home, beginning: str) -> int:
    """Count what dictionaries hold: folders of entries until pytools 2024.1.3, then rows."""
    found = 0
    for path in (home.path / ".cache/pytools").glob(f"pdict-v?-{beginning}*"):
        if path.is_dir():
            found += sum(1 for _ in path.glob("*/*/*/contents"))
        else:
            found += rows_of(path)
    return found


def test_trace_counts_what_the_libraries_do(home: Home, libraries: Libraries) -> None:
    """Stores are the entries that are there then; PyOpenCL's own log has its lookups; a warm run only hits."""
    command = (libraries.python, str(PROGRAMS / "kernels.py"), "2")
    for state in ("cold", "warm"):
        done = home.cachectl("trace --json trace.json --", *command, **libraries.variables)
        document = json.loads((home.path / "trace.json").read_text())
        for layer, beginning in (("loopy", "loopy-"), ("pyopencl-invoker", "pyopencl-")):
            hits, misses, stores = numbers(document, layer)
            if state == "cold":
                assert stores == stored(home, beginning) > 0
                assert misses == stores
            else:
                assert hits
                assert (misses, stores) == (0, 0)
        messages = json.loads(done.stdout.splitlines()[-1])["said"]
        said = [line.split("binary cache ")[1][:4].strip() for line in messages if "binary cache" in line]
        hits, misses, stores = numbers(document, "pyopencl")
        assert (hits, misses, stores) == (said.count("hit"), said.count("miss"), said.count("miss"))
        assert bool(said) == libraries.keeps_binaries_on_pocl
        assert numbers(document, "pocl") == ((0, 2, 2) if state == "cold" else (2, 0, 0))
        assert "cannot be watched" not in done.stderr
    # PyOpenCL's own cache is bypassed on PoCL since 2024.2.3; before, it is on, and holds what the program built.
    report = _run(home, libraries, "-m", "cachectl", "report", "pyopencl", "--json")["layers"][0]
    expected = ("enabled", 2) if libraries.keeps_binaries_on_pocl else ("bypassed", 0)
    assert (report["state"], report["entries"]) == expected


def test_a_started_process_is_switched_off(home: Home, libraries: Libraries) -> None:
    """Builds in the block work, and leave nothing behind; afterwards the same are stored."""
    seen = _run(home, libraries, "-c", SWITCHING)
    assert seen["status"]["pocl"] == "salted"
    assert {seen["status"][name] for name in ("loopy", "pyopencl-invoker", "pyopencl", "pytools")} == {"off"}
    assert seen["after"] == seen["before"]
    assert seen["then"]["loopy"] > seen["after"]["loopy"] > 0
    assert seen["then"]["pocl"] == seen["after"]["pocl"] + 2
    kept = 2 if libraries.keeps_binaries_on_pocl else 0
    assert seen["then"]["pyopencl"] == seen["after"]["pyopencl"] + kept


def _run(home: Home, libraries: Libraries, *arguments: str) -> Any:  # noqa: ANN401 - whatever JSON it prints
    done = home.run(libraries.python, *arguments, **libraries.variables)
    return json.loads(done.stdout[done.stdout.index("{") :])
