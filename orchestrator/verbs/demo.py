"""``cachectl demo``: run real kernels on PoCL cold, warm, with caches off, and cold again after a purge."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec

from cachectl import verbs
from cachectl.layer_set import LayerSet
from cachectl.layers.base.documents import parse_json
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import PARSE_ERRORS, CachectlError
from cachectl.show import units
from cachectl.show.table import Table
from cachectl.switching.child import isolated_root, say_left_alone, variables_isolated, variables_off
from cachectl.verbs.purge import plan_purge
from cachectl.verbs.report import report

EXAMPLE = "cachectl demo"
OPTIONS = ()
_KERNELS = 8
#: How many skipped entries are named.
_FEW = 3


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl demo``: warm and off must store nothing, purge must remove all, and cold refill."""
    if missing := [name for name in ("loopy", "pyopencl") if find_spec(name) is None]:
        raise CachectlError(f"the demo needs {' and '.join(missing)}: pip install 'opencl-cachectl[demo]'")
    here = request.environment
    rows: list[tuple[str, str, int, str]] = []
    say_left_alone(tuple(LayerSet(here)), (), request.notice, off=True)
    with isolated_root(here, notice=request.notice) as root:
        stack = LayerSet(here.with_variables(variables_isolated(LayerSet(here), root)))
        off = here.with_variables(variables_off(LayerSet(here), LayerSet(here), root / "off"))
        request.output.say([[f"{_KERNELS} loopy kernels on PoCL; every cache under {root}"], ""])

        def measure(what: str, environment: Environment) -> int:
            """Run the kernels, and return the number of entries afterwards."""
            with request.output.progress(what):
                started = time.perf_counter()
                in_kernels = _run(what, environment)
                entries = report(stack, layers=("loopy", "pyopencl-invoker", "pocl")).total.entries or 0
            rows.append((f"{in_kernels:.2f}", f"{time.perf_counter() - started:.2f}", entries, what))
            return entries

        cold = measure("cold: every cache empty", stack.environment)
        warm = measure("warm: every cache full", stack.environment)
        without = measure("caches off", off)
        purged = plan_purge(stack).apply()
        again = measure("after purge --all: cold again", stack.environment)
    numbers = dict.fromkeys(("kernels s", "process s", "entries after"), units.count)
    removed, skipped = purged.total.removed, purged.total.skipped
    cleared = f"cachectl purge --all: {removed} entries removed, {units.size(purged.total.bytes_freed)}"
    request.output.say([Table({**numbers, "run": str}, rows), "", cleared])
    # A purge skips, and names, entries that another program may be using.
    for outcome in purged.layers:
        request.output.warn_notes(f"{outcome.layer}: skipped", outcome.skipped[:_FEW], verbose=False)
    if 0 < cold == warm == without == again and 0 <= cold - removed <= skipped:
        return 0
    request.notice(f"the demo failed: {cold} entries cold, {warm} warm, {without} off, {removed} purged, {again} again")
    return 1


def _run(what: str, environment: Environment) -> float:
    """Run the demo program, and return the seconds in its kernels."""
    command = [sys.executable, "-m", "cachectl.verbs.demo_kernels", str(_KERNELS)]
    child = subprocess.run(  # noqa: S603 - our own program, by our own interpreter
        command, env=dict(environment.variables), capture_output=True, text=True, check=False
    )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CachectlError(f"the demo program failed ({what}): {reason}")
    try:
        return float(sum(parse_json(child.stdout).values()))
    except PARSE_ERRORS as error:
        raise CachectlError(f"the demo program printed something other than its times ({what})") from error
