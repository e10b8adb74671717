"""Which cache served a run: hits, misses and stores of a command and its children, layer by layer.

Programs of the run note events (:mod:`cachectl.layers.inside.observer`), the kernel reports those of files
(:mod:`cachectl.watching.events`), and processes are looked at from outside (:mod:`cachectl.watching.programs`).
:mod:`cachectl.watching.evidence` makes numbers of all that.
"""

from __future__ import annotations

import os
import py_compile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path

from cachectl.layer_set import LayerSet
from cachectl.layers.base.documents import encode_json
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.core import spelling
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.parts import Lookups
from cachectl.layers.host import launcher
from cachectl.layers.inside import observer
from cachectl.switching import child, disabled, overlay
from cachectl.watching import evidence, ledger, programs, timeline, verdict
from cachectl.watching.events import EntryEvents

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

if os.environ.get("{variable}"):
    observe()
run_what_this_stands_before()
"""


@contextmanager
def tracing(
    stack: LayerSet,
    folder: Path,
    notice: Callable[[str], None],
    *,
    explain: bool = False,
    remembers: bool = True,
    off: Mapping[str, str] = {},
) -> Iterator[tuple[timeline.Trace, dict[str, str]]]:
    """Watch a run during the block.

    Yields its trace, which is complete when the block has ended, however it ends, and the variables that make a child
    and its children watched. ``notice`` gets a line for each library that could not be watched. The run is compared
    with the last ones, and kept, if the trace ``remembers``. ``off`` are layers that are off whatever their
    variables say, with the reasons.
    """
    layers: dict[str, evidence.Evidence] = {}
    for layer in stack:
        watch = partial(evidence.Evidence, layer, off=off.get(layer.name))
        if (watched := child.try_extra(f"{layer.name} is not traced", watch, notice)) is not None:
            layers[layer.name] = watched
    parts = {name: layer.part for name, layer in layers.items()}
    names = {"HOME", programs.PORTABLE, *(name for part in parts.values() for name in part.variables)}
    names |= {name for layer in layers.values() for name in variables_of(layer.layer)}
    texts = {file: text for layer in layers.values() for file, text in layer.watchers.items()}
    notes, variables = make_observer(folder, stack.environment, parts, names, texts)
    files = EntryEvents(watched_layer.layer for watched_layer in layers.values() if watched_layer.part.files)
    # Those that are listened to in programs of the run are used by others, too.
    by_files = {name: part for name, part in parts.items() if part.files or part.listeners}
    observed = {name: part for name, part in parts.items() if not part.files}
    processes = programs.Processes(notes, observed, by_files)
    trace = timeline.Trace()

    def complete() -> None:
        watching.close()
        events = _count(trace, layers, files, processes, notes, names=names)
        # The process ended in the build, and so did not pass it on itself.
        for heard in programs.messages_after(notes, events):
            output = heard
            for part in parts.values():
                output = part.other_output(output)
            trace.passed_on += output
        trace.started, trace.processes = began[1] / 1e9, timeline.read_processes(events)
        if trace.processes:
            trace.spans = timeline.read_spans(events, began, trace.wall_seconds, parts)
            trace.summary = timeline.summarize(trace.spans, trace.wall_seconds)
        judge = verdict.Judge(layers, trace, events, book)
        trace.missed = judge.missed(explain=explain)
        trace.late = judge.late
        trace.verdict, trace.warm = judge.verdict(trace.missed), judge.is_warm
        if book is not None:
            child.try_extra(_LEDGER, lambda: ledger.change(stack.environment, judge.remember), notice)
        for line in evidence.misfits(events).values():
            notice(f"{line}, and was left alone")

    # Before the run: another one that ends meanwhile is no earlier one.
    book = child.try_extra(_LEDGER, lambda: ledger.read(stack.environment), notice) if remembers else None
    with ExitStack() as block:
        block.enter_context(files.watching())
        block.enter_context(processes.watching())
        watching = block.pop_all()
    # Preparations are no part of the timeline.
    began = timeline.clocks()
    try:
        yield trace, variables
    finally:
        trace.wall_seconds = (timeline.clocks()[0] - began[0]) / 1e9
        child.try_extra("no verdict", complete, notice)


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
    watched, watching = ExitStack(), tracing(stack, folder, notice, remembers=remembers)
    entered = child.try_extra("no verdict", partial(watched.enter_context, watching), notice)
    traced, variables = entered or (None, {})
    with watched:
        yield variables
    # A command without Python cannot be watched.
    if traced is not None and traced.processes and traced.verdict:
        say(traced)


def _count(
    trace: timeline.Trace,
    layers: Mapping[str, evidence.Evidence],
    files: EntryEvents,
    processes: programs.Processes,
    notes: Path,
    *,
    names: Iterable[str],
) -> list[programs.Event]:
    """Complete what a trace says of each layer, entry and kernel; return the events of the programs."""
    unwatched = processes.unwatched()
    events, unread = programs.read_events(notes)
    for layer in layers.values():
        layer.live_in(programs.environments(events, layer.layer.environment, names))
    for name, layer in layers.items():
        if name in files.doubts and files.why_not is None:
            layer.take(files.uses_of(name), files.doubts[name])
        if strangers := ", ".join(sorted({one.command for one in processes.strangers.values() if name in one.uses})):
            layer.is_shared = True
            layer.doubts[f"another program that may use the cache ran meanwhile: {strangers}"] = None
    trace.entries = tuple(entry for layer in layers.values() for entry in layer.used or ())
    evidence.complete_builds(events, trace.entries)
    trace.layers = tuple(
        layer.trace(events, [program for program, names in unwatched.items() if name in names], unread)
        for name, layer in layers.items()
    )
    evidence.settle_builds(events, trace.layers)
    trace.kernels = tuple(_kernel(event) for event in events if event["event"] == "build")
    trace.unwatched = tuple(
        {"command": program, "layers": tuple(sorted(names))} for program, names in unwatched.items()
    )
    return events


def variables_of(layer: Layer) -> Iterator[str]:
    """Yield the variables that decide about a layer's state and places."""
    yield from spelling.read_by(layer)
    yield from (rule.variable for rule in layer.places.rules(layer.environment.platform) if rule.variable)


def make_observer(
    folder: Path,
    environment: Environment,
    parts: Mapping[str, Lookups],
    names: Iterable[str],
    texts: Mapping[Path, bytes],
    *,
    kind: str = "trace",
) -> tuple[Path, dict[str, str]]:
    """Make what each Python of a run loads first: the observer, its table, and copies of the layers' files.

    ``parts`` are the lookups that are observed, ``names`` the variables that are noted, and ``texts`` the files with
    their content. Of two of one ``kind`` on a path only the first is used. Returns the folder of events, and the
    variables that a command needs.
    """
    site, notes = folder / "site", folder / "events"
    site.mkdir()
    notes.mkdir()
    copies = {file: f"cachectl_watch_{number}.py" for number, file in enumerate(sorted(texts))}
    own, module, variable = Path(observer.__file__), f"cachectl_{kind}_observer", f"CACHECTL_{kind.upper()}"
    for file, name, text in [
        (own, f"{module}.py", own.read_bytes()),
        *((f, copies[f], texts[f]) for f in texts),
    ]:
        (site / name).write_bytes(text)
        with suppress(OSError):
            _copy_compiled(file, site / name)
    (site / "sitecustomize.py").write_text(_SITE.format(module=module, variable=variable))
    watchers: set[tuple[str, str]] = set()
    listeners: dict[str, tuple[str, str]] = {}
    for name, part in parts.items():
        watchers.update((module, copies[file]) for module, file in part.watchers.items())
        listeners.update({platform: (name, copies[file]) for platform, file in part.listeners.items()})
    imports = sorted({package for part in parts.values() for package in part.imports})
    ranks = [rank for _, rank in launcher.RANKS]
    table = {"watchers": sorted(watchers), "imports": imports, "listeners": listeners, "ranks": ranks}
    table["variables"] = sorted(names)
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


def _kernel(event: programs.Event) -> timeline.KernelTrace:
    is_binary = event.get("binary") == "hit"
    compiled = False if is_binary else event.get("compiled")
    served_by = None
    if compiled is False and not event["failed"]:
        served_by = event["layer"] if is_binary else event.get("driver")
    return timeline.KernelTrace(tuple(event.get("kernels") or ()), served_by, compiled, float(event["seconds"]))


#: A second block would watch and count the replacements of the first.
_ONE = threading.Lock()


@contextmanager
def traced() -> Iterator[timeline.Trace]:
    """Count the cache lookups of a block, in this process and the children it starts.

    :returns: a context, which gives a trace that is empty until the block has ended, however it ends
    :raises BadRequest: if another block of this process is being traced
    """
    if not _ONE.acquire(blocking=False):
        raise BadRequest("another block of this process is being traced")
    lines: list[str] = []
    try:
        stack = LayerSet()
        try:
            with (
                child.isolated_root(stack.environment, notice=lines.append) as folder,
                tracing(stack, folder, lines.append, off=disabled.STAY_OFF) as (trace, variables),
                overlay.applied(overlay.variables(variables)),
            ):
                recorder = observer.observe(variables[_FOLDER], str(folder / "site"))
                try:
                    yield trace
                finally:
                    recorder.stop()
        finally:
            for line in lines:
                # The line of the user's block is behind its context manager.
                warnings.warn(f"trace: {line}", RuntimeWarning, stacklevel=3)
    finally:
        _ONE.release()
