"""Run the test suites of pytools and PyOpenCL plain, and under cachectl: every test is to end the same.

The suites are those of the installed versions: pytools' comes with its package, PyOpenCL's with its source archive,
which is fetched from the index. Each run has a home of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
MODES: Final[dict[str, tuple[str, ...]]] = {
    "plain": (),
    "run --no-cache": ("run", "--no-cache"),
    "run --isolated": ("run", "--isolated"),
    "trace": ("trace",),
}
#: A suite that crashes more often than this is given up.
_CRASHES: Final = 10


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
    """Run a suite in a home of its own, from behind every test that crashes the interpreter; return its outcomes."""
    home = Path(tempfile.mkdtemp(dir=scratch))
    outcomes = home / "outcomes"
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    variables = {
        **{name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"},
        "HOME": str(home),
        "OUTCOMES": str(outcomes),
        "PYTHONPATH": path,
    }
    cachectl = (sys.executable, "-m", "cachectl", *MODES[mode], "--") if MODES[mode] else ()
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outcomes")
    folder = tests if tests.is_dir() else tests.parent
    target = "." if tests.is_dir() else tests.name
    for _ in range(_CRASHES):
        done = subprocess.run(
            (*cachectl, *pytest, "--rootdir", str(folder), *only, target),
            env=variables,
            cwd=folder,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if 0 <= done.returncode <= 5:  # what pytest itself ends with
            break
    return read_outcomes(outcomes)


def read_outcomes(file: Path) -> dict[str, str]:
    """Return the last word on each test; one that only started has crashed."""
    words: dict[str, str] = {}
    for line in file.read_text().splitlines():
        word, _, test = line.partition(" ")
        words[test] = "crashed" if word == "started" else word
    return words
