"""A job cold and staged: ``python benchmarks/staging.py [NODES] [RANKS] [ROUNDS]``, nodes parted by ``CACHECTL_NODE``.

Each rank compiles and checks eight loopy kernels on PoCL. Its seconds are those from a kernel's source to its checked
result, imports left out.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import commands

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "thirteen.py"


def job(folder: Path, nodes: int, ranks: int, *options: str) -> tuple[float, list[dict[str, float]], str]:
    """Run one job; return its seconds from start to end, those of each rank, and what was said."""
    mpiexec = shutil.which("mpiexec") or str(Path(sys.executable).with_name("mpiexec"))
    stage = (sys.executable, "-m", "cachectl", "stage", *options)
    words = [mpiexec]
    for node in range(nodes):
        words += [*([":"] if node else []), "-n", str(ranks), "env", f"CACHECTL_NODE={node}", *stage]
        words += ["--", sys.executable, str(PROGRAM), "8", "0"]
    variables = commands.variables(folder, TMPDIR=str(folder))
    started = time.perf_counter()
    outcome = subprocess.run(words, env=variables, cwd=folder, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    # Lines of ranks that write at once may come as one.
    each = [json.loads(line) for line in re.findall(r'{"seconds": {[^}]*}[^}]*}', outcome.stdout)]
    return seconds, [{"first": one["seconds"]["lk0"], "all": one["total"]} for one in each], outcome.stderr.strip()


def main() -> None:
    """Run cold and staged jobs by turns, and print medians and extremes over all ranks and rounds."""
    nodes, ranks, rounds = (int(word) for word in (*sys.argv[1:], *("4", "2", "3")[len(sys.argv) - 1 :]))
    by_setting: dict[str, list[tuple[float, list[dict[str, float]]]]] = {"cold": [], "staged": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(rounds):
            seconds, each, _ = job(folder, nodes, ranks, "--out", "warm.zip")
            by_setting["cold"].append((seconds, each))
            seconds, each, said = job(folder, nodes, ranks, "warm.zip", "--trust")
            by_setting["staged"].append((seconds, each))
    sys.stdout.write(f"{said}\n")
    sys.stdout.write(f"{nodes} nodes, {ranks} ranks each, {rounds} rounds: median (fastest to slowest) in seconds\n")
    for setting, jobs in by_setting.items():
        columns = {"first kernel": [one["first"] for _, each in jobs for one in each]}
        columns["eight kernels"] = [one["all"] for _, each in jobs for one in each]
        columns["whole job"] = [seconds for seconds, _ in jobs]
        words = (f"{what} {statistics.median(s):.2f} ({min(s):.2f} to {max(s):.2f})" for what, s in columns.items())
        sys.stdout.write(f"{setting:>7}: {', '.join(words)}\n")


if __name__ == "__main__":
    main()
