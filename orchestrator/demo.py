"""``cachectl demo``: real kernels on PoCL, cold, warm, with caches off, and cold again after a purge."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.base.errors import CachectlError
from cachectl.stack import Stack
from cachectl.switching.isolated import isolated_root
from cachectl.switching.run import variables_isolated, variables_off

if TYPE_CHECKING:
    from cachectl.clearing.purge import PurgeResult
    from cachectl.inspecting.report import Report
    from cachectl.layers.base.environment import Environment


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One run of the demo program: seconds in its kernels and of the whole process, and entries afterwards."""

    what: str
    kernels: float
    process: float
    entries: int


@dataclass(frozen=True, slots=True)
class Demo:
    """The runs in their order, the report before the purge, and the purge."""

    runs: tuple[DemoRun, ...]
    report: Report
    purged: PurgeResult

    @property
    def failed(self) -> bool:
        """Return whether a run did not show its claim: warm and off store nothing, purge removes all, cold refills.

        A purge leaves, and names, what another program may use whose root is unknown.
        """
        cold, warm, off, again = (run.entries for run in self.runs)
        left = cold - self.purged.total.removed
        return not (0 < cold == warm == off == again and 0 <= left <= self.purged.total.skipped)


def demo(
    here: Environment,
    count: int,
    *,
    started: Callable[[Path], None],
    working: Callable[[str], AbstractContextManager[object]],
    notice: Callable[[str], None],
) -> Demo:
    """Run the demo with ``count`` kernels in an isolated root.

    ``started`` gets the root, ``working`` surrounds each run, ``notice`` gets a line for each thing that went wrong
    with the root. Raises :class:`CachectlError` if a package is missing or a run fails.
    """
    missing = [name for name in ("loopy", "pyopencl") if find_spec(name) is None]
    if missing:
        message = f"the demo needs {' and '.join(missing)}; the extra demo: pip install 'opencl-cachectl[demo]'"
        raise CachectlError(message)
    with isolated_root(here, notice=notice) as root:
        stack = Stack(_changed(here, variables_isolated(Stack(here), root)))
        off = _changed(here, variables_off(Stack(here), Stack(here), root / "off"))

        def run(what: str, environment: Environment = stack.environment) -> DemoRun:
            with working(what):
                return _run(what, environment, stack, count)

        started(root)
        runs = [run("cold: every cache empty"), run("warm: every cache full"), run("caches off", off)]
        report = stack.report(layers=("loopy", "pyopencl-invoker", "pyopencl", "pocl"))
        purged = stack.plan_clear().apply()
        runs.append(run("after purge --all: cold again"))
        return Demo(tuple(runs), report, purged)


def _run(what: str, environment: Environment, stack: Stack, count: int) -> DemoRun:
    started = time.perf_counter()
    command = [sys.executable, "-m", "cachectl.cli.demo_kernels", str(count)]
    child = subprocess.run(  # noqa: S603 - our own program, by our own interpreter
        command, env=dict(environment.variables), cwd=Path.cwd(), capture_output=True, text=True, check=False
    )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
        message = f"the demo program failed ({what}): {reason}"
        raise CachectlError(message)
    seconds = json.loads(child.stdout)
    entries = stack.report(layers=("loopy", "pyopencl-invoker", "pocl")).entries or 0
    return DemoRun(what, sum(seconds.values()), time.perf_counter() - started, entries)


def _changed(environment: Environment, changes: Mapping[str, str | None]) -> Environment:
    put = {name: value for name, value in changes.items() if value is not None}
    return environment.with_variables(put, frozenset(changes) - put.keys())
