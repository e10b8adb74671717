"""Purge caches under programs that are compiling: with cachectl, and with the ``rm -rf`` people are told to use.

``python -m benchmarks.beside_live_jobs`` starts four programs, each compiling 150 loopy kernels of its own on
PoCL and checking their results, and meanwhile empties every cache once a second. It prints how the programs
ended: beside ``cachectl purge --all`` (one, then two at once) all are to end well; beside ``rm -rf`` they fail.
This comparison is why the tool exists.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

PROGRAM: Final = """
import sys, warnings
warnings.filterwarnings("ignore")
import loopy, numpy as np, pyopencl as cl
first, count = int(sys.argv[1]), int(sys.argv[2])
pocl = next(p for p in cl.get_platforms() if p.name == "Portable Computing Language")
context = cl.Context(pocl.get_devices())
queue = cl.CommandQueue(context)
numbers = np.arange(16, dtype=np.float64)
for index in range(first, first + count):
    kernel = loopy.make_kernel(
        "{[i]: 0 <= i < 16}", f"out[i] = {index + 2} * a[i] + {index}", name=f"job{index}", lang_version=(2018, 2)
    )
    _, (out,) = kernel.executor(context)(queue, a=numbers)
    assert np.allclose(out, (index + 2) * numbers + index), index
"""

#: What the user documentation of a large loopy code tells people to remove, as a shell would expand it.
ADVICE: Final = ("pytools/pdict*", "pyopencl", "pocl")


@dataclass(frozen=True, slots=True)
class Result:
    """How the programs ended beside one way of emptying the caches."""

    way: str
    programs: int
    failed: int
    purges: int
    seconds: float
    first_error: str


def beside(way: str, commands: Sequence[Sequence[str]], jobs: int, kernels: int, pause: float) -> Result:
    """Run the programs while the commands empty their caches, and say how they ended."""
    with tempfile.TemporaryDirectory(prefix="cachectl-bench-") as folder:
        variables = {**os.environ, "HOME": folder, "XDG_CACHE_HOME": f"{folder}/cache"}
        started = time.perf_counter()
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(job * kernels), str(kernels)],
                env=variables, stderr=subprocess.PIPE, text=True,
            )
            for job in range(jobs)
        ]  # fmt: skip
        purges = 0
        while any(program.poll() is None for program in programs):
            for purge in [subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL) for command in commands]:
                purge.wait()
                purges += 1
            time.sleep(pause)
        errors = [program.communicate()[1].strip().splitlines()[-1:] for program in programs]
        failed = sum(program.returncode != 0 for program in programs)
        first = next(
            (lines[0] for program, lines in zip(programs, errors, strict=True) if program.returncode and lines), ""
        )
        return Result(way, jobs, failed, purges, time.perf_counter() - started, first)


def main() -> None:
    """Compare the ways, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=150)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between purges")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    purge = [sys.executable, "-m", "cachectl", "purge", "--all"]
    remove = [shutil.which("sh") or "sh", "-c", "cd $XDG_CACHE_HOME 2>/dev/null && rm -rf " + " ".join(ADVICE)]
    ways: tuple[tuple[str, list[list[str]]], ...] = (
        ("nothing", []),
        ("cachectl purge --all", [purge]),
        ("two at once", [purge, purge]),
        ("rm -rf", [remove]),
    )
    results = [beside(way, commands, options.jobs, options.kernels, options.pause) for way, commands in ways]
    for result in results:
        sys.stdout.write(
            f"{result.way:22} {result.failed} of {result.programs} failed  {result.purges:3} purges  "
            f"{result.seconds:6.1f} s  {result.first_error[:60]}\n"
        )
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
