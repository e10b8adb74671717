"""Which cache served a run: hits, misses and stores of a command and its children, layer by layer.

Programs of the run note events (:mod:`cachectl.layers.inside.observer`), the kernel reports those of files
(:mod:`cachectl.watching.events`), and processes are looked at from outside (:mod:`cachectl.watching.programs`).
:mod:`cachectl.watching.evidence` makes numbers of all that.
"""

from __future__ import annotations

import os
import py_compile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path

from cachectl.layer_set import LayerSet
from cachectl.layers.base.documents import encode_json
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, BadRequest
from cachectl.layers.core import spelling
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.parts import Lookups
from cachectl.layers.host import launcher
from cachectl.layers.inside import observer
from cachectl.switching import child, disabled, overlay
from cachectl.watching import evidence, ledger, program_events, programs, timeline, verdict
from cachectl.watching.events import EntryEvents
from cachectl.watching.program_events import PORTABLE, BuildEnd

_FOLDER = "CACHECTL_TRACE"
_LEDGER = "the ledger of traces is not used"
_SITE = """
import os, sys

def observe():
    try:
        import {module}
        {module}.observe(os.environ["{variable}"], os.path.dirname({module}.__file__))
    except Exception:
        pass

def run_what_this_stands_before():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    here = os.path.dirname(__file__)
    behind = sys.path[sys.path.index(here) + 1 :] if here in sys.path else sys.path
    rest = [p for p in behind if not os.path.exists(os.path.join(p, "{module}.py"))]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)

# Another of its kind may stand behind one of another kind.
if os.environ.get("{variable}") and "{module}" not in sys.modules:
    observe()
run_what_this_stands_before()
"""


class Recorder:
    """Watches a run: :meth:`start` before it, and :meth:`finish` after it, which returns its trace.

    ``notice`` gets a line for each library that could not be watched. The run is compared with the last ones, and kept,
    if the recorder ``remembers``. ``off`` are layers that are off whatever their variables say, with the reasons.
    """

    def __init__(
        self,
        stack: LayerSet,
        folder: Path,
        notice: Callable[[str], None],
        *,
        remembers: bool = True,
        off: Mapping[str, str] = {},
    ) -> None:
        self._environment = stack.environment
        self._notice = notice
        self._layers: dict[str, evidence.Evidence] = {}
        for layer in stack:
            watch = partial(evidence.Evidence, layer, off=off.get(layer.name))
            if (watched := child.try_extra(f"{layer.name} is not traced", watch, notice)) is not None:
                self._layers[layer.name] = watched
        self._parts = {name: layer.part for name, layer in self._layers.items()}
        self._names = {"HOME", PORTABLE, *(name for part in self._parts.values() for name in part.variables)}
        self._names |= {name for layer in self._layers.values() for name in variables_of(layer.layer)}
        self._notes, self._variables = make_observer(folder, stack.environment, self._parts, self._names)
        # Those that are listened to in programs of the run are used by others, too.
        by_files = {name: part for name, part in self._parts.items() if part.files or part.listeners}
        observed = {name: part for name, part in self._parts.items() if not part.files}
        locked = set[Path]()
        for name in (name for name, part in self._parts.items() if part.opened):
            with suppress(*FAILURES):
                locked.update(root.path for root in self._layers[name].layer.roots())
        self._processes = programs.Processes(self._notes, observed, by_files, locked=locked)
        watched_layers = (layer.layer for layer in self._layers.values() if layer.part.files)
        self._files = EntryEvents(watched_layers, arrived=self._processes.hurry)
        # Before the run: another one that ends meanwhile is no earlier one.
        self._book = child.try_extra(_LEDGER, lambda: ledger.read(self._environment), notice) if remembers else None
        self._watching = ExitStack()
        self._began = (0, 0)
        self._trace: timeline.Trace | None = None

    @property
    def trace(self) -> timeline.Trace:
        """Return the trace. Raises :class:`BadRequest` before the end of the run."""
        if self._trace is None:
            raise BadRequest("the run has not ended, so there is no trace of it")
        return self._trace

    def start(self) -> dict[str, str]:
        """Begin to watch; return the variables that make a child and its children watched."""
        with ExitStack() as block:
            block.enter_context(self._files.watching())
            block.enter_context(self._processes.watching())
            self._watching = block.pop_all()
        # Preparations are no part of the timeline.
        self._began = time.monotonic_ns(), time.time_ns()
        return self._variables

    def stop(self) -> None:
        """Stop watching, also without a trace."""
        self._watching.close()

    def finish(
        self, command: Iterable[str] = (), exit_status: int | None = None, *, explain: bool = False
    ) -> timeline.Trace:
        """Return the trace of the run, which has ended; with ``explain`` also how sources changed."""
        wall = (time.monotonic_ns() - self._began[0]) / 1e9
        self._trace = timeline.Trace(tuple(command), exit_status, wall, started=self._began[1] / 1e9)
        child.try_extra("no verdict", lambda: self._complete(explain=explain), self._notice)
        return self.trace

    def _complete(self, *, explain: bool) -> None:
        self.stop()
        unwatched = self._processes.unwatched()
        noted, unread = program_events.read_events(self._notes)
        noted = evidence.find_owners(noted, self._parts)
        self._look_at_files(noted)
        used = tuple(entry for layer in self._layers.values() for entry in layer.used or ())
        events = evidence.complete_builds(noted, used)
        cut = program_events.cut_builds(events)
        cut_platforms = frozenset(platform for platforms in cut.values() for platform in platforms)
        layers = tuple(
            layer.trace(
                events, [program for program, names in unwatched.items() if name in names], unread, cut_platforms
            )
            for name, layer in self._layers.items()
        )
        events = events if cut else evidence.settle_builds(events, layers)
        # A process that ended in a build did not pass its output on itself.
        passed_on = b""
        for rest in program_events.messages_after(self._notes, events):
            output = rest
            for part in self._parts.values():
                output = part.other_output(output)
            passed_on += output
        processes = timeline.read_processes(events)
        wall = self.trace.wall_seconds
        spans = timeline.read_spans(events, self._began, wall, self._parts)
        self._trace = trace = replace(
            self.trace,
            layers=layers,
            kernels=tuple(
                timeline.KernelTrace(build.kernels, build.served_by, build.was_compiled, build.when.seconds)
                for build in program_events.of_kind(events, BuildEnd)
            ),
            entries=used,
            unwatched=tuple(
                {"command": program, "layers": tuple(sorted(names))} for program, names in unwatched.items()
            ),
            passed_on=passed_on,
            processes=processes,
            spans=spans,
            summary=timeline.summarize(spans, wall) if processes else None,
        )
        judge = verdict.Judge(self._layers, trace, events, self._book, self._processes.lockers.values())
        missed = judge.missed(explain=explain)
        self._trace = replace(trace, missed=missed, late=judge.late, verdict=judge.verdict(missed), warm=judge.is_warm)
        if self._book is not None:
            child.try_extra(_LEDGER, lambda: ledger.change(self._environment, judge.remember), self._notice)
        for line in evidence.misfits(events).values():
            self._notice(f"{line}, and was left alone")

    def _look_at_files(self, noted: Iterable[program_events.Event]) -> None:
        """Give each layer the environments of programs, and what file events and processes show of it."""
        files, strangers = self._files, self._processes.strangers.values()
        platforms = frozenset(build.inputs.platform for build in program_events.of_kind(noted, BuildEnd))
        environments = program_events.environments(noted, self._environment, self._names)
        for name, layer in self._layers.items():
            layer.live_in(environments)
            commands = ", ".join(sorted({program.command for program in strangers if name in program.uses}))
            layer.is_shared = bool(commands)
            if name in files.doubts and files.why_not is None:
                layer.take(files.uses_of(name), files.doubts[name], platforms)
            if commands:
                layer.doubts[f"another program that may use the cache ran meanwhile: {commands}"] = None


@contextmanager
def judged(
    stack: LayerSet,
    folder: Path,
    say: Callable[[timeline.Trace], None],
    notice: Callable[[str], None],
    *,
    remembers: bool = True,
) -> Iterator[Mapping[str, str]]:
    """Watch a run that does not need it; yield the variables for that, and give ``say`` the trace at its end."""

    def start() -> tuple[Recorder, dict[str, str]]:
        recorder = Recorder(stack, folder, notice, remembers=remembers)
        return recorder, recorder.start()

    recorder, variables = child.try_extra("no verdict", start, notice) or (None, {})
    try:
        yield variables
    finally:
        trace = None if recorder is None else recorder.finish()
    # A command without Python cannot be watched.
    if trace is not None and trace.processes and trace.verdict:
        say(trace)


def variables_of(layer: Layer) -> Iterator[str]:
    """Yield the variables that decide about a layer's state and places."""
    yield from spelling.read_by(layer)
    yield from (rule.variable for rule in layer.places.rules(layer.environment.platform) if rule.variable)


def make_observer(
    folder: Path,
    environment: Environment,
    parts: Mapping[str, Lookups],
    names: Iterable[str],
    *,
    kind: str = "trace",
) -> tuple[Path, dict[str, str]]:
    """Make what each Python of a run loads first: the observer, its table, and copies of the layers' files.

    ``parts`` are the lookups that are observed, and ``names`` the variables that are noted. Of two of one ``kind`` on a
    path only the first is used. Returns the folder of events, and the variables that a command needs.
    """
    site, notes = folder / "site", folder / "events"
    site.mkdir()
    notes.mkdir()
    module, variable = f"cachectl_{kind}_observer", f"CACHECTL_{kind.upper()}"
    files = {file for part in parts.values() for file in (*part.watchers.values(), *part.listeners.values())}
    copies = {file: f"cachectl_watch_{number}.py" for number, file in enumerate(sorted(files))}
    for file, name in {**copies, Path(observer.__file__): f"{module}.py"}.items():
        (site / name).write_bytes(file.read_bytes())
        with suppress(OSError):
            _copy_compiled(file, site / name)
    (site / "sitecustomize.py").write_text(_SITE.format(module=module, variable=variable))
    listeners = ((name, *listener) for name, part in parts.items() for listener in part.listeners.items())
    table = {
        "watchers": sorted({(name, copies[file]) for part in parts.values() for name, file in part.watchers.items()}),
        "listeners": {platform: (name, copies[file]) for name, platform, file in listeners},
        "imports": sorted({package for part in parts.values() for package in part.imports}),
        "ranks": [rank for _, rank in launcher.RANKS],
        "variables": sorted(names),
    }
    (site / observer.TABLE).write_bytes(encode_json(table))
    paths = os.pathsep.join(filter(None, [str(site), environment.get("PYTHONPATH")]))
    return notes, {variable: str(notes), "PYTHONPATH": paths}


def _copy_compiled(file: Path, copy: Path) -> None:
    """Give a copy of a module the compiled form of this Python, which each process of a run would make otherwise."""
    compiled = Path(cache_from_source(str(file)))
    if not compiled.exists():
        py_compile.compile(str(copy), doraise=False)
        return
    # It is taken by the time and size of the source.
    os.utime(copy, ns=(0, file.stat().st_mtime_ns))
    target = Path(cache_from_source(str(copy)))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(compiled.read_bytes())


#: A second block would watch and count the replacements of the first.
_ONE = threading.Lock()


@contextmanager
def traced() -> Iterator[Recorder]:
    """Count the cache lookups of a block, in this process and the children it starts.

    :returns: a context, whose recorder has the ``trace`` when the block has ended, however it ends
    :raises BadRequest: if another block of this process is being traced
    """
    if not _ONE.acquire(blocking=False):
        raise BadRequest("another block of this process is being traced")
    lines: list[str] = []
    try:
        stack = LayerSet()
        with ExitStack() as block:
            folder = block.enter_context(child.isolated_root(stack.environment, notice=lines.append))
            recorder = Recorder(stack, folder, lines.append, off=disabled.STAY_OFF)
            variables, owner = recorder.start(), os.getpid()

            def end() -> None:
                # A forked child leaves the trace, and the ledger, to the process that began it.
                if os.getpid() == owner:
                    recorder.finish()
                else:
                    recorder.stop()

            block.callback(end)
            block.enter_context(overlay.applied(overlay.variables(variables)))
            block.callback(observer.observe(variables[_FOLDER], str(folder / "site")).stop)
            yield recorder
    finally:
        _ONE.release()
        for line in lines:
            # The line of the user's block is behind its context manager.
            warnings.warn(f"trace: {line}", RuntimeWarning, stacklevel=3)
