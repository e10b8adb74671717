"""Run the test suites of pytools and PyOpenCL plain, and under cachectl: every test is to end the same.

``python tests/upstream/run_upstream.py [--suite …] [--mode …] [--repeat N] [-k EXPRESSION]``. The
suites are those of the installed versions: pytools' comes with its package, PyOpenCL's with its source archive, which
is fetched from the index. Each run has a home of its own. A test that ends differently in two plain runs says nothing
about cachectl, so ``--repeat`` runs each mode several times, and results that vary by themselves are recognised.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
MODES: Final[dict[str, tuple[str, ...]]] = {
    "plain": (),
    "run --no-cache": ("run", "--no-cache"),
    "run --isolated": ("run", "--isolated"),
    "trace": ("trace",),
}
SUITES: Final = ("pytools", "pyopencl")
#: A suite that crashes more often than this is given up.
_CRASHES: Final = 10


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a suite: the outcome of each test, and the wall seconds."""

    suite: str
    mode: str
    outcomes: Mapping[str, str]
    seconds: float


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
    return Path(spec.origin).parent / "test" / "test_persistent_dict.py"


def run_suite(suite: str, tests: Path, mode: str, scratch: Path, *, only: Sequence[str] = ()) -> Run:
    """Run a suite to its end in a home of its own, from behind every test that crashes the interpreter."""
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
    started = time.perf_counter()
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
    return Run(suite, mode, read_outcomes(outcomes), time.perf_counter() - started)


def read_outcomes(file: Path) -> dict[str, str]:
    """Return the last word on each test; one that only started has crashed."""
    words: dict[str, str] = {}
    for line in file.read_text().splitlines():
        word, _, test = line.partition(" ")
        words[test] = "crashed" if word == "started" else word
    return words


def differences(plain: Sequence[Run], other: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """Return the tests that never end as they do plain, with their outcomes there and here."""
    tests = {test for run in (*plain, *other) for test in run.outcomes}
    found: dict[str, tuple[str, str]] = {}
    for test in sorted(tests):
        usual = {run.outcomes.get(test, "absent") for run in plain}
        seen = {run.outcomes.get(test, "absent") for run in other}
        if not usual & seen:
            found[test] = ("/".join(sorted(usual)), "/".join(sorted(seen)))
    return found


def summary(run: Run) -> str:
    """Count outcomes in words."""
    counts = {word: list(run.outcomes.values()).count(word) for word in sorted(set(run.outcomes.values()))}
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def main() -> int:
    """Compare, print what came of it, and return 1 where something ends differently."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, action="append", help="default: each")
    parser.add_argument("--mode", choices=[*MODES][1:], action="append", help="default: each")
    parser.add_argument("--tests", type=Path, help="PyOpenCL's tests, where they are unpacked already")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("-k", metavar="EXPRESSION", help="as pytest's")
    options = parser.parse_args()
    only = ("-k", options.k) if options.k else ()
    different = False
    with tempfile.TemporaryDirectory(prefix="cachectl-upstream-") as name:
        scratch = Path(name)
        for suite in options.suite or SUITES:
            tests = pytools_tests() if suite == "pytools" else options.tests or fetch_pyopencl(scratch)
            plain: list[Run] = []
            for mode in ("plain", *(options.mode or [*MODES][1:])):
                done = [run_suite(suite, tests.resolve(), mode, scratch, only=only) for _ in range(options.repeat)]
                plain = plain or done
                for run in done:
                    sys.stdout.write(f"{suite:9} {mode:15} {run.seconds:6.1f} s  {summary(run)}\n")
                for test, (usual, seen) in differences(plain, done).items():
                    different = True
                    sys.stdout.write(f"  {test}: {usual} plain, {seen} here\n")
                sys.stdout.flush()
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
