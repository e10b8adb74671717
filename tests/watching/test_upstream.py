"""Tests of pytools and PyOpenCL end under ``cachectl run`` as they do without.

A quick part of both suites, of the installed versions: pytools' comes with its package, PyOpenCL's with its source
archive, which is fetched from the index. Each run has a home of its own. A test that ends differently in two plain
runs says nothing about cachectl.
"""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from homes import CACHECTL, make_home
from tiers import absent, real

#: These take most of the time, and are about pytools alone.
QUICK = ("-k", "not concurrency and not speed")


def run_suite(tests: Path, mode: str, scratch: Path, *only: str) -> dict[str, str]:
    """Run a suite in a home of its own; return the outcome of each test, as far as no test crashed the interpreter."""
    home = make_home(Path(tempfile.mkdtemp(dir=scratch)))
    cachectl = (*CACHECTL, *mode.split(), "--") if mode else ()
    suite = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", ".", "--color=no", *only, tests.name)
    command = (*cachectl, "env", "-C", str(tests.parent), sys.executable, *suite)
    done = home.run(*command, check=False)
    return dict(re.findall(r"^(\S+::.+) ([A-Z]+)(?: \(.*\))? +\[ *\d+%\]$", done.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the tests of both; PyOpenCL's come from the index, which CI must reach."""
    folder = tmp_path_factory.mktemp("pyopencl")
    release = f"pyopencl=={importlib.metadata.version('pyopencl')}"
    command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "pyopencl", release)
    if subprocess.run(command, cwd=folder, check=False).returncode:
        absent("PyOpenCL's source archive is not to be had")
    (archive,) = folder.glob("pyopencl-*.tar.gz")
    subprocess.run(("tar", "-xf", archive, "--wildcards", "*/test/*"), cwd=folder, check=True)
    (tests,) = folder.glob("pyopencl-*/test")
    pytools = Path(str(importlib.import_module("pytools").__file__)).parent
    return {"pytools": pytools / "test/test_persistent_dict.py", "pyopencl": tests / "test_wrapper.py"}


@pytest.mark.upstream
@real
@pytest.mark.parametrize("suite", ["pytools", "pyopencl"])
def test_upstream_tests_end_as_they_do_without(suites: dict[str, Path], suite: str, tmp_path: Path) -> None:
    only = QUICK if suite == "pytools" else ()
    plain, *others = (
        run_suite(suites[suite], mode, tmp_path, *only) for mode in ("", "run --no-cache", "run --isolated", "trace")
    )
    assert list(plain.values()).count("PASSED") > 20
    assert others == [plain] * len(others)
