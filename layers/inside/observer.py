"""Records a traced program's cache lookups, and the time of its start-up, inside its interpreter; changes nothing.

This file is copied next to a ``sitecustomize.py`` and runs in any Python from 3.8 on, with or without cachectl, so it
imports only the standard library. A table next to it, written from the layers'
:class:`cachectl.layers.core.parts.Lookups`, lists what to watch. Each event is one line of JSON, appended to a file of
this process, so that the events of a killed program are kept. An error in this file never reaches the program.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: The table, in the folder of this file.
TABLE = "cachectl_watches.json"
#: One encoder for all events.
_encode = json.JSONEncoder(default=str, allow_nan=False).encode
_PASSED_OVER = "<cachectl, like importlib._bootstrap>"
#: Shorter spans are not noted, in nanoseconds.
_SHORTEST = 20_000
#: The program may replace one of our files by a pipe or a link.
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


def _quietly(call: Callable[..., Any], *arguments: object, **options: object) -> Any:
    try:
        return call(*arguments, **options)
    except Exception:  # noqa: BLE001 - a trace must never fail the program it looks at
        return None


def _kernels_of(item: Any, depth: int = 3) -> list[str]:
    kind = type(item).__name__
    if kind == "TranslationUnit":
        return sorted(str(name) for name in item.entrypoints)
    if kind == "LoopKernel":
        return [str(item.name)]
    parts = item[:8] if isinstance(item, (tuple, list)) and depth else ()
    return next(filter(None, (_kernels_of(part, depth - 1) for part in parts)), [])


class Invocation:
    """One call of a watched function: its arguments, start and result.

    ``error`` is the class of the exception that it raised, whose lifetime a reference would extend. ``before`` is the
    result of what was called before it.
    """

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.arguments = arguments
        self.options = options
        self.before: Any = None
        self.start = 0
        self.value: Any = None
        self.error: type[BaseException] | None = None

    def get(self, place: int, name: str, default: object = None) -> Any:
        """Return an argument by its position or its name."""
        return self.arguments[place] if self.arguments[place:] else self.options.get(name, default)


class Notes:
    """Records the events of one process, in the folder of its trace.

    The file is opened for each event, because a program may close files that it did not open, and reuse their numbers.

    In ``sys.meta_path`` this is a finder that finds no module itself: it wraps a library once it was executed, and
    times imports: those of the table's packages, even inside each other, and those of their modules outside of these.
    """

    #: Monotonic nanoseconds and epoch seconds; a program may replace the clocks of :mod:`time`.
    now = staticmethod(time.monotonic_ns)
    epoch = staticmethod(time.time)
    #: Calls a function, and returns ``None`` if that fails.
    quietly = staticmethod(_quietly)
    #: Returns the names of the kernels in an object of loopy's, or in a key.
    kernels_of = staticmethod(_kernels_of)

    def __init__(self, folder: str, site: str, table: dict[str, Any]) -> None:
        self.folder = folder
        self._site = site
        self._table = table
        self._packages = frozenset(table["imports"])
        #: The variables and working directory of the process that were noted last.
        self._state: tuple[dict[str, str], str | None] = ({}, None)
        #: Variables that were set or unset for C code only, as by ``os.putenv``.
        self._set: dict[str, str | None] = {}
        self._loaded: dict[str, ModuleType] = {}
        self._replaced: list[tuple[object, str, object, object]] = []
        self._pid = 0
        self._origin = os.getpid()
        #: For each thread the open stages and imports, and the kernels of which it made the first launch.
        self.here = threading.local()
        #: The files that watch each module.
        self._watchers: dict[str, list[str]] = {}
        for name, file in table["watchers"]:
            self._watchers.setdefault(name, []).append(file)

    def load(self, file: str) -> ModuleType:
        """Execute a layer's file, once, and return the module."""
        if file not in self._loaded:
            spec = importlib.util.spec_from_file_location(file[:-3], os.path.join(self._site, file))
            self._loaded[file] = module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        return self._loaded[file]

    def listeners(self) -> dict[str, Any]:
        """Return new listeners to drivers, by the name of each driver's OpenCL platform."""
        return {name: self.load(file).Listener(self, layer) for name, (layer, file) in self._table["listeners"].items()}

    def start(self) -> None:
        """Wrap the libraries that are loaded, and others when they are loaded."""
        self._introduce()
        atexit.register(_quietly, self._end)
        for name in self._watchers:
            # A lazy module is wrapped at its first use.
            if type(sys.modules.get(name)).__name__ == "module":
                self._watch(name, sys.modules[name])
        sys.meta_path.insert(0, self)
        for name in ("putenv", "unsetenv"):
            if name in vars(os):
                self.wrap(os, name, self._changed)

    def _changed(self, call: Invocation) -> None:
        """Note that ``os.environ`` or C code's variables changed; all are read again for the next event."""
        value = os.fsdecode(call.get(1, "value")) if len(call.arguments) > 1 else None
        self._set[os.fsdecode(call.get(0, "name"))] = value
        self._state = ({}, "")

    def _end(self) -> None:
        """Note that the process ends normally; a fork that runs this did not start on its own."""
        if os.getpid() == self._origin:
            self.add(event="ended")

    def stop(self) -> None:
        """Restore the replaced attributes, and stop watching imports."""
        self.folder = ""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        self._restore(0)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a library through the other finders, and wrap it after its loader has executed it."""
        is_of_package = name.partition(".")[0] in self._packages
        if not is_of_package and name not in self._watchers:
            return None
        imports = vars(self.here).setdefault("imports", set())
        timed = name in self._packages or (is_of_package and not imports)
        if not timed and name not in self._watchers:
            return None
        begun = self.now()
        # Only those after this one: another observer before it would call this one again.
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else finders
        others = (finder for finder in behind if hasattr(finder, "find_spec"))
        spec: ModuleSpec | None = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)

        def before(_: Invocation) -> None:
            if timed:
                imports.add(name)

        def after(call: Invocation) -> None:
            if timed:
                imports.discard(name)
                self.span("import", begun, name=name)
            if call.error is None:
                self._watch(name, call.get(0, "module"))

        def wrap() -> None:
            loader: Any = spec and spec.loader
            loader.exec_module = self.around(loader.exec_module, after, before)

        _quietly(wrap)
        return spec

    def _watch(self, name: str, module: object) -> None:
        for file in self._watchers.get(name, ()):
            self.fit(name, self._watch_by, file, module)

    def _watch_by(self, file: str, module: object) -> None:
        self.load(file).watch(module, self)

    def fit(self, library: str, watch: Callable[..., None], *arguments: object) -> None:
        """Let a watcher replace functions of a library; if they are not as expected, restore the library."""
        before = len(self._replaced)
        try:
            watch(*arguments)
        except Exception as error:  # noqa: BLE001 - as in _quietly
            self._restore(before)
            self.add(event="failed", library=library, error=f"{type(error).__name__}: {error}")

    def put(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute until :meth:`stop`."""
        self._replaced.append((owner, name, vars(owner)[name], value))
        setattr(owner, name, value)

    def wrap(
        self, owner: object, name: str, after: Callable[..., object], before: Callable[..., object] | None = None
    ) -> None:
        """Replace a function until :meth:`stop`, as by :meth:`around`."""
        self.put(owner, name, self.around(vars(owner)[name], after, before))

    def around(
        self, function: Callable[..., object], after: Callable[..., object], before: Callable[..., object] | None = None
    ) -> Callable[..., object]:
        """Return a function that does the same, and calls ``before`` and ``after`` with each of its calls."""

        def call_and_note(*arguments: object, **options: object) -> object:
            call = Invocation(arguments, options)
            if before is not None:
                call.before = _quietly(before, call)
            call.start = self.now()
            try:
                call.value = function(*arguments, **options)
            except BaseException as error:
                call.error = type(error)
                raise
            else:
                return call.value
            finally:
                _quietly(after, call)

        # A warning names the frame of its caller: Python skips frames with such a file (``warnings``,
        # _is_internal_frame), as those of its own imports.
        call_and_note.__code__ = call_and_note.__code__.replace(co_filename=_PASSED_OVER)
        return functools.wraps(function)(call_and_note)

    def timed(
        self,
        function: Callable[..., object],
        stage: str,
        about: Callable[..., dict[str, object]] | None = None,
        *,
        outermost: bool = False,
    ) -> Callable[..., object]:
        """Return a function whose calls are noted as spans, unless they are part of a span of the same stage.

        With ``outermost`` they are noted only outside of all timed functions. ``about`` returns more event fields.
        """

        def before(_: Invocation) -> bool:
            stages = vars(self.here).setdefault("stages", set())
            if stage in stages or (outermost and stages):
                return False
            stages.add(stage)
            return True

        def after(call: Invocation) -> None:
            if call.before:
                self.here.stages.discard(stage)
                more = _quietly(about, call) if about else None
                self.span(stage, call.start, **{"name": function.__name__, **(more or {})})

        return self.around(function, after, before)

    def _restore(self, left: int) -> None:
        while len(self._replaced) > left:
            owner, name, original, value = self._replaced.pop()
            # If another replacement wraps ours, both stay, but ours does nothing any more.
            if vars(owner).get(name) is value:
                setattr(owner, name, original)

    def add(self, start: int | None = None, **event: object) -> None:
        """Append an event; work has a ``start``, and an ``end`` unless that is now, in monotonic nanoseconds.

        It is preceded by the variables that layers read, if the program changed them.
        """
        self._introduce()
        # Reading all of them takes longer than an event.
        if start is not None and _quietly(os.getcwd) != self._state[1]:
            state = self._state = self._read()
            self._write({"event": "environment", "variables": state[0], "cwd": state[1]})
        if start is not None:
            event = {"start": start, "end": self.now(), "thread": threading.get_native_id(), **event}
        self._write(event)

    def _read(self) -> tuple[dict[str, str], str | None]:
        values = ((name, self._set.get(name, os.environ.get(name))) for name in self._table["variables"])
        return {name: value for name, value in values if value is not None}, _quietly(os.getcwd)

    def _introduce(self) -> None:
        """Append the first event of a process, which may be a fork of another: that it is watched."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._state = self._read()
            ranks = (os.environ.get(name, "") for name in self._table["ranks"])
            self._write(
                {
                    "event": "started",
                    # sys.argv is not set yet when the observer is loaded.
                    "program": list(getattr(sys, "orig_argv", None) or sys.argv),
                    "host": os.uname().nodename if hasattr(os, "uname") else "",
                    "rank": next((int(rank) for rank in ranks if rank.isdecimal()), None),
                    "variables": self._state[0],
                    "cwd": self._state[1],
                    # What decides keys made in Python, and the meaning of relative paths in options.
                    "python": sys.version.split()[0] + " with -O" * bool(sys.flags.optimize),
                    "paths": _quietly(list, map(os.path.abspath, sys.path)),
                    "forked": self._pid != self._origin,
                }
            )

    def _write(self, event: dict[str, object]) -> None:
        line = _quietly(_encode, {"pid": self._pid, "at": self.epoch(), **event})
        if line and self.folder:
            _quietly(_append, os.path.join(self.folder, f"{self._pid}.events"), line + "\n")

    def span(self, stage: str, start: int, **more: object) -> None:
        """Append an event of work that began at ``start`` (monotonic nanoseconds) and ends now."""
        end = self.now()
        if end - start >= _SHORTEST:
            self.add(start, end=end, event="span", stage=stage, **more)


def observe(folder: str, site: str) -> Notes:
    """Watch the libraries of this process by the table in ``site``, and record events in the folder."""
    with open(os.path.join(site, TABLE), encoding="utf-8") as stream:
        notes = Notes(folder, site, json.load(stream))
    notes.start()
    return notes


def _append(path: str, line: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_WAITING, 0o600)
    try:
        os.write(handle, line.encode(errors="surrogateescape"))
    finally:
        os.close(handle)
