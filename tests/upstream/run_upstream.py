"""Run the test suites of pytools and PyOpenCL plain, and under cachectl: every test is to end the same.

The suites are those of the installed versions: pytools' comes with its package, PyOpenCL's with its source archive,
which is fetched from the index. Each run has a home of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path


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


def run_suite(tests: Path, mode: str, scratch: Path, *, only: Sequence[str] = ()) -> dict[str, str]:
    """Run a suite in a home of its own; return the outcome of each test, as far as no test crashed the interpreter."""
    home = tempfile.mkdtemp(dir=scratch)
    variables = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"} | {"HOME": home}
    cachectl = (sys.executable, "-m", "cachectl", *mode.split(), "--") if mode else ()
    pytest = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", ".", "--color=no", *only)
    command = (*cachectl, *pytest, tests.name)
    done = subprocess.run(command, env=variables, cwd=tests.parent, check=False, stdout=subprocess.PIPE, text=True)
    return dict(re.findall(r"^(\S+::.+) ([A-Z]+)(?: \(.*\))? +\[ *\d+%\]$", done.stdout, re.MULTILINE))
