"""The whole story on PoCL, in a scratch root: cold, warm, caches off, report, purge, cold again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cachectl.cli import render
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.host.installing import command_to_install
from cachectl.stack import Stack
from cachectl.switching.isolated import scratch_folder
from cachectl.switching.run import variables_isolated, variables_off


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the demo program: the sum of its kernels' seconds, the whole process, and rows and entries."""

    what: str
    kernels: float
    process: float
    entries: int


def demo(count: int, here: Environment) -> int:
    """Tell the story with ``count`` kernels; return 0 where every step showed what it claims, else 1."""
    missing = [name for name in ("loopy", "pyopencl") if find_spec(name) is None]
    if missing:
        message = f"the demo needs {' and '.join(missing)}; to add: {command_to_install('loopy', 'pyopencl[pocl]')}"
        raise CachectlError(message)
    with scratch_folder(here, notice=render.warn) as root:
        stack = Stack(_changed(here, variables_isolated(Stack(here), root)))
        off = _changed(here, variables_off(Stack(here), Stack(here), root / "off"))
        render.show_lines([f"{count} loopy kernels on PoCL; every cache under {root}", ""])
        runs = [
            _run("cold: every cache empty", stack.environment, stack, count),
            _run("warm: every cache full", stack.environment, stack, count),
            _run("caches off", off, stack, count),
        ]
        report = stack.report(layers=("loopy", "pyopencl-invoker", "pyopencl", "pocl"))
        purged = stack.plan_clear().apply()
        runs.append(_run("after purge --all: cold again", stack.environment, stack, count))
        _show_runs(runs)
        render.show_report(report, home="/")
        render.show_lines(["", "cachectl purge --all"])
        render.show_purge(purged, stack.environment.clock())
        return 0 if _holds(runs, sum(outcome.removed for outcome in purged.outcomes)) else 1


def _run(what: str, environment: Environment, stack: Stack, count: int) -> Run:
    started = time.perf_counter()
    command = [sys.executable, "-m", "cachectl.cli.demo_kernels", str(count)]
    with render.working(what):
        child = subprocess.run(  # noqa: S603 - our own program, by our own interpreter
            command, env=dict(environment.variables), cwd=Path.cwd(), capture_output=True, text=True, check=False
        )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
        message = f"the demo program failed ({what}): {reason}"
        raise CachectlError(message)
    seconds = json.loads(child.stdout)
    entries = stack.report(layers=("loopy", "pyopencl-invoker", "pocl")).entries or 0
    return Run(what, sum(seconds.values()), time.perf_counter() - started, entries)


def _show_runs(runs: list[Run]) -> None:
    rows = tuple((f"{run.kernels:.2f}", f"{run.process:.2f}", render.count(run.entries), run.what) for run in runs)
    headings = ("kernels s", "process s", "entries after", "run")
    render.show_table(render.Table(headings, rows, frozenset({0, 1, 2})))
    render.show_lines([""])


def _holds(runs: list[Run], removed: int) -> bool:
    """Hold the runs against the story: warm adds nothing, off adds nothing, purge removes all, cold refills."""
    cold, warm, off, again = (run.entries for run in runs)
    holds = cold > 0 and cold == warm == off == again == removed
    if not holds:
        render.warn(
            f"the story did not hold: {cold} entries cold, {warm} warm, {off} off, {removed} purged, {again} again"
        )
    return holds


def _changed(environment: Environment, changes: dict[str, str | None]) -> Environment:
    put = {name: value for name, value in changes.items() if value is not None}
    return environment.with_variables(put, frozenset(changes) - put.keys())
