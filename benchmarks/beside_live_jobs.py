"""Purge caches under programs that are compiling: with cachectl, and with the ``rm -rf`` of common advice.

``python -m benchmarks.beside_live_jobs`` starts four programs, each compiling kernels of its own on PoCL and
checking their results (``--program loopy``: 150 each; ``pyopencl``: 60 each, with PyOpenCL's own binary cache live),
and meanwhile empties every cache once a second. It prints how the programs ended: beside ``cachectl purge --all``
(one, then two at once) all are to end well; beside ``rm -rf`` they fail. This comparison is why the tool exists.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import commands

JOB = Path(__file__).with_name("compiling_job.py")
#: The program, and how many kernels of it the full comparison compiles.
KERNELS = {"loopy": 150, "pyopencl": 60}

PURGE = (sys.executable, "-m", "cachectl", "purge", "--all", "--json")
#: The folders that the user documentation of a large loopy code says to remove, as a shell would expand them.
REMOVE = (
    *(shutil.which("sh") or "sh", "-c"),
    "cd $XDG_CACHE_HOME 2>/dev/null && rm -rf pytools/pdict* pyopencl pocl",
)
WAYS: dict[str, tuple[Sequence[str], ...]] = {
    "nothing": (),
    "cachectl purge --all": (PURGE,),
    "two at once": (PURGE, PURGE),
    "rm -rf": (REMOVE,),
}


@dataclass(frozen=True, slots=True)
class Result:
    """How the programs ended beside one way of emptying the caches, and what that way did meanwhile.

    Of purges only those count after which a program was still running: ``removed`` is their entries by layer,
    ``removing`` how many of them removed any, ``refused`` why others did not. ``locks`` counts how often programs were
    about to take the lock of PyOpenCL's cache, by who had it then.
    """

    program: str
    way: str
    programs: int
    failed: int
    purges: int
    removed: dict[str, int]
    removing: int
    refused: tuple[str, ...]
    locks: dict[str, int]
    seconds: float
    first_error: str


class _Purges:
    """Purges run one after the other, or several at once, and what they did together."""

    def __init__(self, commands: Sequence[Sequence[str]], variables: dict[str, str]) -> None:
        self.count = self.removing = 0
        self.refused: list[str] = []
        self.removed: Counter[str] = Counter()
        self._commands = commands
        self._variables = variables

    def once(self, programs: Sequence[subprocess.Popen[str]]) -> None:
        """Run every command, all at the same time, and count what was done under a living program."""
        running = [
            subprocess.Popen(command, env=self._variables, stdout=subprocess.PIPE, text=True)
            for command in self._commands
        ]
        documents = [purge.communicate()[0] for purge in running]
        if any(program.poll() is None for program in programs):
            self.count += len(documents)
            for document in filter(None, documents):
                self._read(json.loads(document))

    def _read(self, document: dict[str, object]) -> None:
        total, layers = document["total"], document["layers"]
        if not isinstance(total, dict) or not isinstance(layers, list):
            raise TypeError(document)
        self.removing += total["removed"] > 0
        self.refused += [note["because"] for layer in layers for note in layer["failed"]]
        self.removed.update({layer["layer"]: layer["removed"] for layer in layers if layer["removed"]})


def beside(program: str, way: str, jobs: int, kernels: int, pause: float, *, until_failure: bool = False) -> Result:
    """Run the programs while their caches are emptied in a way, and say how they ended.

    With ``until_failure`` the first program that fails settles it: the others are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="cachectl-bench-") as folder:
        variables = commands.variables(Path(folder), XDG_CACHE_HOME=f"{folder}/cache", TMPDIR=folder)
        purges = _Purges(WAYS[way], variables)
        started = time.perf_counter()
        running = [_start(program, job * kernels, kernels, variables) for job in range(jobs)]
        while any(job.poll() is None for job in running):
            if until_failure and any(job.poll() for job in running):
                break
            purges.once(running)
            time.sleep(pause)
        # What is stopped now has not failed.
        stopped = [job for job in running if job.poll() is None]
        for job in stopped:
            job.kill()
        ended = [(job, *job.communicate()) for job in running]
        failed = [errors for job, _, errors in ended if job.returncode and job not in stopped]
        locks: Counter[str] = Counter()
        for job, said, _ in ended:
            locks.update(json.loads(said.splitlines()[-1]) if job.returncode == 0 else {})
        return Result(
            program=program,
            way=way,
            programs=jobs,
            failed=len(failed),
            purges=purges.count,
            removed=dict(purges.removed),
            removing=purges.removing,
            refused=tuple(purges.refused),
            locks=dict(locks),
            seconds=round(time.perf_counter() - started, 1),
            first_error=next((_complaint(errors) for errors in failed), ""),
        )


def _start(program: str, first: int, count: int, variables: dict[str, str]) -> subprocess.Popen[str]:
    command = (sys.executable, str(JOB), program, str(first), str(count))
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _complaint(errors: str) -> str:
    """Find the line of a traceback that says what was wrong."""
    lines = errors.strip().splitlines()
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else "")


def main() -> None:
    """Compare the ways, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=sorted(KERNELS), action="append", help="default: each")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--kernels", type=int, help="for each program; default: 150 for loopy, 60 for pyopencl")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between purges")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results: list[Result] = []
    for program in options.program or KERNELS:
        for way in WAYS:
            result = beside(program, way, options.jobs, options.kernels or KERNELS[program], options.pause)
            results.append(result)
            sys.stdout.write(
                f"{program:8} {way:20} {result.failed} of {result.programs} failed  {result.purges:3} purges removed "
                f"{sum(result.removed.values()):5}  {result.seconds:6.1f} s  {result.first_error[:60]}\n"
            )
            sys.stdout.flush()
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
