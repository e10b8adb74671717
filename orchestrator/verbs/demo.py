"""``cachectl demo``: real kernels on PoCL, cold, warm, with caches off, and cold again after a purge."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl import options, table
from cachectl.layers.base.errors import CachectlError
from cachectl.stack import Stack
from cachectl.switching import isolated
from cachectl.switching.run import variables_isolated, variables_off
from cachectl.verbs.report import lines

if TYPE_CHECKING:
    from cachectl.layers.base import facts
    from cachectl.layers.base.environment import Environment

OPTIONS: Final = (
    options.Option(
        "--kernels", type=options.positive, default=8, metavar="N", help="how many kernels to compile (default: 8)"
    ),
)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One run of the demo program: seconds in its kernels and of the whole process, and entries afterwards."""

    what: str
    kernels: float
    process: float
    entries: int


#: How many entries that were left are named.
_FEW: Final = 3
_COLUMNS: Final[tuple[table.Column[DemoRun], ...]] = (
    table.Column("kernels s", lambda run: f"{run.kernels:.2f}", right=True),
    table.Column("process s", lambda run: f"{run.process:.2f}", right=True),
    table.counts("entries after", lambda run: run.entries),
    table.Column("run", lambda run: run.what),
)
_PURGED: Final[tuple[table.Column[facts.Outcome], ...]] = (
    table.Column("layer", lambda outcome: outcome.layer),
    table.counts("removed", lambda outcome: outcome.removed),
    table.sizes("size", lambda outcome: outcome.bytes_freed),
)


def run(request: options.Request) -> int:
    """Carry out ``cachectl demo``: warm and off must store nothing, purge must remove all, and cold refill."""
    missing = [name for name in ("loopy", "pyopencl") if find_spec(name) is None]
    if missing:
        raise CachectlError(
            f"the demo needs {' and '.join(missing)}; the extra demo: pip install 'opencl-cachectl[demo]'"
        )
    here, number = request.environment, request.options.kernels
    with isolated.isolated_root(here, notice=request.notice) as root:
        stack = Stack(here.with_variables(variables_isolated(Stack(here), root)))
        off = here.with_variables(variables_off(Stack(here), Stack(here), root / "off"))

        def measured(what: str, environment: Environment = stack.environment) -> DemoRun:
            with request.working(what):
                return _run(what, environment, stack, number)

        request.say([table.Whole(f"{number} loopy kernels on PoCL; every cache under {root}"), ""])
        runs = [measured("cold: every cache empty"), measured("warm: every cache full"), measured("caches off", off)]
        report = stack.report(layers=("loopy", "pyopencl-invoker", "pyopencl", "pocl"))
        purged = stack.plan_clear().apply()
        runs.append(measured("after purge --all: cold again"))
    request.say([table.Table(_COLUMNS, runs), "", *lines(report, "/"), "", "cachectl purge --all"])
    request.say([table.Table(_PURGED, [outcome for outcome in purged.layers if outcome.removed])])
    for outcome in purged.layers:
        for note in outcome.skipped[:_FEW]:
            request.notice(f"{outcome.layer}: skipped {note.key}: {note.because}")
    cold, warm, without, again = (one.entries for one in runs)
    removed = purged.total.removed
    # A purge leaves, and names, what another program may use whose root is unknown.
    if 0 < cold == warm == without == again and 0 <= cold - removed <= purged.total.skipped:
        return 0
    request.notice(f"the demo failed: {cold} entries cold, {warm} warm, {without} off, {removed} purged, {again} again")
    return 1


def _run(what: str, environment: Environment, stack: Stack, count: int) -> DemoRun:
    started = time.perf_counter()
    command = [sys.executable, "-m", "cachectl.verbs.demo_kernels", str(count)]
    child = subprocess.run(  # noqa: S603 - our own program, by our own interpreter
        command, env=dict(environment.variables), cwd=Path.cwd(), capture_output=True, text=True, check=False
    )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CachectlError(f"the demo program failed ({what}): {reason}")
    seconds = json.loads(child.stdout)
    entries = stack.report(layers=("loopy", "pyopencl-invoker", "pocl")).total.entries or 0
    return DemoRun(what, sum(seconds.values()), time.perf_counter() - started, entries)
