"""Loaded into a traced interpreter: records the program's cache lookups and changes nothing.

This file is copied beside a ``sitecustomize.py`` and runs in any Python from 3.8 on, with or without cachectl, so it
imports the standard library alone. A table beside it, written from the layers'
:class:`cachectl.layers.base.parts.Lookups`, says what to watch. Each event is one line of JSON, appended to a file of
this process, so that the events of a killed program are kept. An error in this file never reaches the program.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

#: The table, in the folder of this file.
TABLE = "cachectl_watches.json"
#: The program may put a pipe or a link in the place of a file of ours.
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


class Notes:
    """Records the events of one process, in a folder for each trace that it is part of.

    The file is opened for each event, because a program may close files that it did not open, and reuse their numbers.
    """

    def __init__(self, folders: list[str], site: str, listeners: dict[str, tuple[str, str]]) -> None:
        self.folders = folders
        self._site = site
        self._listeners = listeners
        self._loaded: dict[str, Any] = {}
        self._replaced: list[tuple[Any, str, Any]] = []

    def load(self, file: str) -> Any:
        """Execute a layer's file, once, and return the module."""
        if file not in self._loaded:
            spec = importlib.util.spec_from_file_location(file[:-3], os.path.join(self._site, file))
            self._loaded[file] = module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        return self._loaded[file]

    def listeners(self) -> dict[str, Any]:
        """Return new listeners to drivers, by the name of the OpenCL platform that each driver offers."""
        return {name: self.load(file).Listener(self, layer) for name, (layer, file) in self._listeners.items()}

    def quietly(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call something, and return ``None`` if it fails."""
        return _quietly(call, *arguments, **options)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute until :meth:`stop`."""
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def stop(self) -> None:
        """Restore the replaced attributes, and stop watching imports."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "notes", None) is not self]
        while self._replaced:
            setattr(*self._replaced.pop())

    def add(self, **event: object) -> None:
        """Append an event."""
        line = _quietly(json.dumps, {"pid": os.getpid(), "at": time.time(), **event}, default=str)
        for folder in self.folders if line else ():
            _quietly(_append, os.path.join(folder, f"{os.getpid()}.events"), line + "\n")


class Lookout:
    """A finder that finds no module itself, and wraps a library as soon as it has been executed."""

    def __init__(self, hooks: dict[str, list[Callable[[Any, Notes], None]]], notes: Notes) -> None:
        self.hooks = hooks
        self.notes = notes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the library through the other finders, and wrap it after its loader has executed it."""
        if name not in self.hooks:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        _quietly(self._wait_for, spec)
        return spec

    def _wait_for(self, spec: Any) -> None:
        execute = spec.loader.exec_module

        @functools.wraps(execute)
        def execute_and_wrap(module: Any) -> None:
            execute(module)
            self.wrap(spec.name, module)

        spec.loader.exec_module = execute_and_wrap

    def wrap(self, name: str, module: Any) -> None:
        """Wrap a library each time it is executed; record it if the library is not as expected."""
        for hook in self.hooks[name]:
            try:
                hook(module, self.notes)
            except Exception as error:  # noqa: BLE001, PERF203 - as in _quietly
                self.notes.add(event="failed", library=name, error=type(error).__name__)


def observe(folders: str, site: str) -> Notes:
    """Wrap the libraries that are loaded now, and others when they are loaded; record events in each of the folders.

    ``site`` is the folder of the table, and of the files that it names.
    """
    with open(os.path.join(site, TABLE), encoding="utf-8") as file:
        table = json.load(file)
    notes = Notes(folders.split(os.pathsep), site, table["listeners"])
    notes.add(event="started", program=sys.argv[:1])
    hooks: dict[str, list[Callable[[Any, Notes], None]]] = {}
    for call in table["calls"]:
        hooks.setdefault(call["module"], []).append(functools.partial(_watch_call, call))
    for name, watcher in table["watchers"]:
        hooks.setdefault(name, []).append(functools.partial(_watch_by, watcher))
    lookout = Lookout(hooks, notes)
    for name in hooks:
        module = sys.modules.get(name)
        # A lazy module is wrapped at its first use.
        if module is not None and type(module).__name__ == "module":
            lookout.wrap(name, module)
    sys.meta_path.insert(0, lookout)
    return notes


def _watch_by(file: str, module: Any, notes: Notes) -> None:
    notes.load(file).watch(module, notes)


def _watch_call(call: dict[str, Any], module: Any, notes: Notes) -> None:
    """Record each call of a function as a store, or as a lookup that returned or raised what means a miss."""
    owner, _, name = call["function"].rpartition(".")
    place = getattr(module, owner) if owner else module
    absent = getattr(module, call["absent"]) if call["absent"] else ()
    function = vars(place)[name]

    @functools.wraps(function)
    def call_and_note(*arguments: Any, **options: Any) -> Any:
        try:
            value = function(*arguments, **options)
        except absent:
            notes.add(event="miss", layer=call["layer"])
            raise
        found = "hit" if value is not None or absent else "miss"
        notes.add(event="store" if call["stores"] else found, layer=call["layer"])
        return value

    notes.put(place, name, call_and_note)


def _quietly(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return call(*arguments, **options)
    except Exception:  # noqa: BLE001 - a trace must never fail the program it looks at
        return None


def _append(path: str, line: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_WAITING, 0o600)
    try:
        os.write(handle, line.encode(errors="surrogateescape"))
    finally:
        os.close(handle)
