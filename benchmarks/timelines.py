"""What a timeline costs: a warm program run plain and under ``trace --timeline`` by turns.

``python -m benchmarks.timelines [--rounds N] [COMMAND...]`` prints the median seconds of the program plain, under the
trace, and of the whole command, which also starts cachectl, and the processor seconds of the first two. Without a
command it is ``tests/programs/thirteen.py`` with 30 loopy kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import commands

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "tests" / "programs" / "thirteen.py"))
TRACE = (sys.executable, "-m", "cachectl", "trace", "--force", "--timeline")


#: Runs a command, and writes its processor seconds to a file; ``-E`` keeps this one program out of the trace.
SPEND = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
open(sys.argv[1], "w").write(str(used.ru_utime + used.ru_stime))
sys.exit(status)
"""


def run(command: Sequence[str], home: Path) -> float:
    """Return the wall seconds of a command in a home."""
    started = time.perf_counter()
    environment = commands.variables(home, XDG_CACHE_HOME=str(home / ".cache"))
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def turn(command: Sequence[str], home: Path) -> tuple[tuple[float, float], ...]:
    """Return plain seconds and those with a trace: of the program's processors, of its wall, and of all commands."""
    used, timeline = home / "used", home / "timeline.json"
    command = (sys.executable, "-S", "-E", "-c", SPEND, str(used), *command)
    plain = run(command, home)
    processor = float(used.read_text())
    whole = run((*TRACE, str(timeline), "--", *command), home)
    wall = float(json.loads(timeline.read_bytes())["otherData"]["wall_seconds"])
    return (processor, float(used.read_text())), (plain, wall), (plain, whole)


def overhead(command: Sequence[str], rounds: int) -> None:
    """Print what a timeline costs."""
    with tempfile.TemporaryDirectory() as folder:
        run(command, Path(folder))
        turns = [turn(command, Path(folder)) for _ in range(rounds)]
    sys.stdout.write("plain s  traced s  slower  by turns          what\n")
    for name, pairs in zip(("processors", "wall", "wall, with cachectl"), zip(*turns, strict=True), strict=True):
        slower = sorted(traced / plain - 1 for plain, traced in pairs)
        plain, traced = (statistics.median(side) for side in zip(*pairs, strict=True))
        usual = statistics.median(slower)
        sys.stdout.write(
            f"{plain:7.3f}  {traced:8.3f}  {usual:+6.1%}  {slower[0]:+6.1%} to {slower[-1]:+6.1%}  {name}\n"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("command", nargs="*")
    given = parser.parse_args(arguments)
    overhead(given.command or (*PROGRAM, "30"), given.rounds)


if __name__ == "__main__":
    main()
