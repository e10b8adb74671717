"""What a timeline costs: a warm program run plain and under ``trace --timeline`` by turns.

``python -m benchmarks.timelines [--rounds N] [COMMAND...]`` prints the median seconds of the program plain, under the
trace, and of the whole command, which also starts cachectl. Without a command it is ``tests/programs/hundred.py 30``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "tests" / "programs" / "hundred.py"), "30")
TRACE = (sys.executable, "-m", "cachectl", "trace", "--force", "--timeline")


def seconds_of(command: Sequence[str], home: Path) -> float:
    """Return the wall seconds of a command in a home."""
    started = time.perf_counter()
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def turn(command: Sequence[str], home: Path) -> tuple[float, float, float]:
    """Return the seconds of a program plain, under the trace, and of the trace as a whole."""
    plain = seconds_of(command, home)
    timeline = home / "timeline.json"
    whole = seconds_of((*TRACE, str(timeline), "--", *command), home)
    return plain, float(json.loads(timeline.read_bytes())["otherData"]["wall_seconds"]), whole


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("command", nargs="*", default=PROGRAM)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seconds_of(given.command, Path(folder))
        turns = [turn(given.command, Path(folder)) for _ in range(given.rounds)]
    names = ("plain", "under the trace", "the trace as a whole")
    sys.stdout.write("median s   slower  by turns          run\n")
    for index, name in enumerate(names):
        slower = sorted(one[index] / one[0] - 1 for one in turns)
        median = statistics.median(one[index] for one in turns)
        least, usual, most = slower[0], statistics.median(slower), slower[-1]
        sys.stdout.write(f"{median:8.3f}  {usual:+6.1%}  {least:+6.1%} to {most:+6.1%}  {name}\n")


if __name__ == "__main__":
    main()
