"""Tests of pytools and PyOpenCL end under ``cachectl run`` as they do without.

A quick part of both suites, of the installed versions: pytools' comes with its package, PyOpenCL's with its source
archive, which is fetched from the index. Each run has a home of its own. A test that ends differently in two plain
runs says nothing about cachectl.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

#: These take most of the time, and are about pytools alone.
QUICK = ("-k", "not concurrency and not speed")


def fetch_pyopencl(folder: Path) -> Path:
    """Fetch the source archive of the installed PyOpenCL, and return the folder of its tests."""
    version = importlib.metadata.version("pyopencl")
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "pyopencl")
    subprocess.run((*command, "--dest", str(folder), f"pyopencl=={version}"), check=True)
    (archive,) = folder.glob("pyopencl-*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            if "/test/" in member.name and member.isfile() and ".." not in member.name:
                tar.extract(member, folder, set_attrs=False)
    (tests,) = folder.glob("pyopencl-*/test")
    return tests


def pytools_tests() -> Path:
    """Return the persistent-dictionary tests of the installed pytools."""
    spec = importlib.util.find_spec("pytools")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pytools")
    return Path(spec.origin).parent / "test/test_persistent_dict.py"


def run_suite(tests: Path, mode: str, scratch: Path, *only: str) -> dict[str, str]:
    """Run a suite in a home of its own; return the outcome of each test, as far as no test crashed the interpreter."""
    home = tempfile.mkdtemp(dir=scratch)
    variables = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"} | {"HOME": home}
    cachectl = (sys.executable, "-m", "cachectl", *mode.split(), "--") if mode else ()
    suite = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", ".", "--color=no", *only)
    command = (*cachectl, *suite, tests.name)
    done = subprocess.run(command, env=variables, cwd=tests.parent, check=False, stdout=subprocess.PIPE, text=True)
    return dict(re.findall(r"^(\S+::.+) ([A-Z]+)(?: \(.*\))? +\[ *\d+%\]$", done.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the tests of both; PyOpenCL's come from the index, which CI must reach."""
    try:
        folder = fetch_pyopencl(tmp_path_factory.mktemp("pyopencl"))
    except subprocess.CalledProcessError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"PyOpenCL's source archive is not to be had: {error}")
    return {"pytools": pytools_tests(), "pyopencl": folder / "test_wrapper.py"}


@pytest.mark.upstream
@pytest.mark.real
@pytest.mark.parametrize("suite", ["pytools", "pyopencl"])
def test_upstream_tests_end_as_they_do_without(suites: dict[str, Path], suite: str, tmp_path: Path) -> None:
    only = QUICK if suite == "pytools" else ()
    plain, *others = (
        run_suite(suites[suite], mode, tmp_path, *only) for mode in ("", "run --no-cache", "run --isolated", "trace")
    )
    assert list(plain.values()).count("PASSED") > 20
    assert others == [plain] * len(others)
