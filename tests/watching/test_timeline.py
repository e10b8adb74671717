"""Where a start goes: spans of real programs on one clock, their sums, and the files they are written to."""

import ast
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from homes import Home
from support.pages import read_timeline_file
from support.tracing import trace
from tiers import real, thorough_only

from cachectl.layer_set import LayerSet
from cachectl.layers.core.parts import Compilation, Lookups
from cachectl.layers.inside import observer
from cachectl.watching import program_events as noted
from cachectl.watching import timeline as timelines
from cachectl.watching.evidence import EntryTrace, complete_builds
from cachectl.watching.timeline import STAGES, Span, Trace, own_times, read_spans, summarize

SECOND = 1_000_000_000


def timed(home: Home, *command: str) -> Trace:
    file = home.path / "timeline.json"
    home.cachectl(f"trace --timeline {file} --", *command)
    return read_timeline_file(file)


# ---------------------------------------------------------------------- real programs


@thorough_only
@real
def test_a_start_is_timed_stage_by_stage(home: Home) -> None:
    """A cold start passes every stage; a warm one has lookups that hit instead, each with its layer and kernel."""
    cold = timed(home, sys.executable, f"{home.programs}/kernels.py", "1")
    # PyOpenCL's own cache is off for PoCL.
    assert {span.stage for span in cold.spans} == set(STAGES)
    (process,) = cold.processes
    assert (process["rank"], process["host"], "kernels.py" in process["command"]) == (None, os.uname().nodename, True)
    assert {"loopy", "islpy", "numpy"} <= {span.name for span in cold.spans if span.stage == "import"}
    (compiled, shaped) = [span for span in cold.spans if span.stage == "compile"]
    assert (compiled.layer, compiled.outcome, shaped.layer, shaped.kernel) == ("pocl", "miss", "pocl", "lk0")
    document = trace(home, "kernels.py", "1")
    stages = {one["stage"]: one for one in document["summary"]["stages"]}
    assert {"import", "create", "lookup", "launch"} <= stages.keys() <= {*STAGES} - {"compile", "store", "schedule"}
    assert stages["lookup"]["hit"] == stages["lookup"]["seconds"] > 0 == document["summary"]["missed"]
    whole = document["summary"]["own"] + sum(one["seconds"] for one in document["summary"]["stages"])
    assert (document["verdict"].partition(":")[0], document["missed"]) == ("Warm", [])
    assert whole == pytest.approx(document["wall_seconds"], rel=0.01)


@pytest.mark.cluster
def test_ranks_are_aligned(home: Home, mpiexec: str) -> None:
    """Four ranks leave a barrier at the same moment, give or take what the scheduler of two processors adds."""
    timeline = timed(home, mpiexec, "-n", "4", sys.executable, f"{home.programs}/barriers.py")
    ranks = [one["rank"] for one in timeline.processes if "barriers.py" in one["command"] and one["rank"] is not None]
    assert ranks == [*range(4)]
    moments: dict[str, list[float]] = {}
    for span in timeline.spans:
        if span.name.startswith("barrier-"):
            moments.setdefault(span.name, []).append(span.start)
    assert [len(starts) for starts in moments.values()] == [4] * 8
    assert min(max(starts) - min(starts) for starts in moments.values()) <= 0.005


CHILDREN = """
import os, signal, sys, threading
from pytools.persistent_dict import WriteOncePersistentDict
def look(name):
    try:
        WriteOncePersistentDict(name).fetch(1)
    except KeyError:
        pass
thread = threading.Thread(target=look, args=("in-a-thread",))
thread.start(); thread.join()
if (child := os.fork()) == 0:
    look("in-a-fork")
    os._exit(0)
os.waitpid(child, 0)
look("before-the-kill")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_threads_forks_and_what_a_killed_program_did(home: Home) -> None:
    """All are on one clock, and have the rank that a launcher gave them."""
    command = (sys.executable, "-c", CHILDREN)
    done = home.cachectl("trace --timeline t.json --", *command, check=False, PMI_RANK="3")
    assert done.returncode == 128 + signal.SIGKILL
    timeline = read_timeline_file(home.path / "t.json")
    assert {process["rank"] for process in timeline.processes} == {3}
    spans = {span.name: span for span in timeline.spans if span.stage == "lookup"}
    in_thread, in_fork, last = (spans[name] for name in ("in-a-thread", "in-a-fork", "before-the-kill"))
    assert in_thread.process == last.process != in_fork.process
    assert in_thread.thread != last.thread == last.process
    assert in_thread.start < in_fork.start < last.start


def test_code_run_in_programs_needs_the_standard_library_alone() -> None:
    parts = [layer.about.lookups for layer in LayerSet() if layer.about.lookups is not None]
    paths = {path for part in parts for path in (*part.watchers.values(), *part.listeners.values())}
    paths |= {Path(observer.__file__), Path(observer.__file__).with_name("portable_builds.py")}
    assert len(paths) > 5
    for path in paths:
        tree = ast.parse(path.read_text())
        # Only type checkers read these imports.
        checked = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        tree.body = [node for node in tree.body if node not in checked]
        nodes = [*ast.walk(tree)]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names, path


# ---------------------------------------------------------------------- events


def read(events: Sequence[noted.Event], *compilations: Compilation) -> list[Span]:
    """Read events of a run that began at 100 s of the monotonic clock, and 1000 s of the epoch."""

    def read_times(path: str) -> tuple[Compilation, ...]:
        assert path == "/program"
        return compilations

    driver = Lookups(compilations=read_times)
    return read_spans(
        [noted.ProcessStart(1, ("program",), "here"), *events], (100 * SECOND, 1000 * SECOND), 50.0, {"drv": driver}
    )


def when(start: float, end: float) -> noted.Interval:
    return noted.Interval(int(start * SECOND), int(end * SECOND), 1)


def built(start: int, end: int) -> noted.BuildEnd:
    """Return a build in which the driver's part began a second after it, and ended a second before it."""
    driver, inputs = ((start + 1) * SECOND, (end - 1) * SECOND), noted.BuildInputs(kernels=("k",))
    return noted.BuildEnd(1, "one", *(False, True), (driver,), when(start, end), inputs)


def test_a_driver_that_missed_looked_up_and_compiled() -> None:
    """The times of what it stored split its part of a build; what a launch compiles is part of the wait for it."""
    said = noted.DriverMessages(1, "drv", ("/program",), upto=0, lookups=1)
    build = built(101, 111)._replace(driver="drv", compiled=True)
    launch = noted.StageSpan(1, "launch", "enqueue", when(112, 113), kernels=("k",))
    wait = noted.StageSpan(1, "launch", "wait", when(113, 120), kernels=("k",))
    times: tuple[Compilation, Compilation] = ((None, 1003.0, 1008.0), ("k", None, 1018.0))
    spans = read([said, build, launch, wait], *times)
    assert [(span.stage, span.start, span.seconds) for span in spans] == [
        ("build", 1.0, 10.0),
        ("lookup", 2.0, 8.0),
        ("compile", 3.0, 5.0),
        ("launch", 12.0, 1.0),
        ("launch", 13.0, 7.0),
        ("compile", 13.0, 5.0),
    ]
    assert [own for _, own in own_times(spans)] == [2.0, 3.0, 5.0, 1.0, 2.0, 5.0]
    # Where files have no such times, all of it counts as compiled.
    assert [(span.stage, span.seconds) for span in read([said, build])] == [("build", 10.0), ("compile", 8.0)]


@pytest.mark.parametrize(
    ("compiled", "shown"),
    [(True, ("compile", "miss", "drv")), (False, ("lookup", "hit", "drv")), (None, ("compile", None, None))],
)
def test_a_build_by_a_driver_that_says_nothing(compiled: bool | None, shown: tuple[str | None, ...]) -> None:
    """The entries of its kernels show whether it compiled; the summary uses that."""
    build = built(100, 110)._replace(at=1010.0)
    stores = int(compiled is True)
    entry = EntryTrace("drv", "key", 1 - stores, stores, None, ("k",), "gpu", at=(1005.0,))
    spans = read(complete_builds([build], [] if compiled is None else [entry]))
    (span,) = [span for span in spans if span.name == "driver"]
    assert (span.stage, span.outcome, span.layer) == shown
    summary = summarize(spans, 20)
    assert (summary.at_least, summary.missed) == (compiled is None, 8 if compiled else 0)


# ---------------------------------------------------------------------- sums


def span(stage: str, start: float, seconds: float, **more: Any) -> Span:  # noqa: ANN401 - fields
    return Span(1, 1, stage, more.pop("name", stage), start, seconds, **more)


KEY = {"layer": "one", "kernel": "k"}


def test_misses_last_from_the_lookup_to_the_end_of_the_store() -> None:
    """What lies within others counts once, and a wait for several kernels is part of none."""
    spans = (
        span("lookup", 1, 1, name="outer", outcome="miss", **KEY),
        span("lookup", 4, 1, name="inner", outcome="miss", **KEY),
        span("codegen", 5, 1, kernel="k"),
        span("store", 6, 1, name="inner", outcome="store", **KEY),
        span("store", 7, 0.5, name="outer", outcome="store", **KEY),
        span("compile", 8, 4, outcome="miss", **KEY),
        span("launch", 12, 1, name="wait", kernel="k other"),
    )
    summary = summarize(spans, 20)
    assert (summary.missed, summary.at_least) == (6.5 + 4, False)
    seconds = {one.stage: (one.seconds, one.hit, one.missed) for one in summary.stages}
    assert seconds["lookup"] == (2, 0, 2)
    assert (seconds["store"], seconds["compile"], seconds["launch"]) == ((1.5, 0, 0), (4, 0, 4), (1, 0, 0))
    assert summary.own == 20 - 9.5


# ---------------------------------------------------------------------- files


def test_a_page_can_be_written_of_a_run_with_a_process(home: Home) -> None:
    home.refused("trace --timeline c.json -- true", says="cachectl: ")
    assert not (home.path / "c.json").exists()
    program = "from pytools.persistent_dict import WriteOncePersistentDict"
    home.cachectl("trace --timeline a.html --", sys.executable, "-c", program)
    written = (home.path / "a.html").read_bytes()
    assert (b"pytools" in written, timelines.TIMELINE.is_begun_by(written)) == (True, True)
    assert not timelines.TIMELINE.is_begun_by(b"mine")
