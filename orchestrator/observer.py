"""Loaded into a traced interpreter: notes what the program asks of its caches, and changes nothing.

This file is copied beside a ``sitecustomize.py`` and runs in any Python from 3.8 on, with or without cachectl: it
imports the standard library alone. Each event is one line of JSON, appended to a file of this process, so that a
program that is killed has told all the same. Whatever fails in here, the program does not notice.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

FOLDER = "CACHECTL_TRACE"
# As in cachectl.layers.formats.opencl_source, which this file does not import.
_ATTRIBUTE = r"(?:__attribute__\s{0,9}\(\((?:(?!\)\)).){0,200}\){2,9}\s{0,99}){0,9}"
_KERNEL = re.compile(
    r"\b(?:__)?kernel\s{1,99}" + _ATTRIBUTE + r"void\s{1,99}" + _ATTRIBUTE + r"(\w{1,999})\s{0,99}\(", re.DOTALL
)
_here = threading.local()


class Notes:
    """The file of events of one process, opened when the first is noted; a forked child has its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._replaced: list[tuple[Any, str, Any]] = []
        self._process = 0
        self._handle = -1
        self._lock = threading.Lock()

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Put a stand-in in the place of an attribute, until :meth:`stop`."""
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def stop(self) -> None:
        """Put back whatever was replaced."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def add(self, **event: object) -> None:
        """Append an event."""
        try:
            line = json.dumps({"pid": os.getpid(), "at": time.time(), **event}, default=str) + "\n"
            with self._lock:
                if self._process != os.getpid():
                    path = os.path.join(self.folder, f"{os.getpid()}.events")
                    self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                    self._process = os.getpid()
                os.write(self._handle, line.encode(errors="surrogateescape"))
        except Exception:  # noqa: BLE001, S110 - a trace must never fail the program it looks at
            pass


def observe(folder: str) -> Notes:
    """Wrap the libraries when they are imported, those that are already with the next import of anything."""
    notes = Notes(folder)
    notes.add(event="started", program=sys.argv[:1])
    hooks = {
        "pytools.persistent_dict": watch_dictionaries,
        "pyopencl.cache": watch_binaries,
        "pyopencl": watch_builds,
    }
    real_import = builtins.__import__

    def importing(name: str, *arguments: Any, **options: Any) -> Any:
        module = real_import(name, *arguments, **options)
        if hooks:
            _quietly(look)
        return module

    def look() -> None:
        # A copy: another thread may import at the same time.
        for wanted in tuple(hooks):
            hook = hooks.pop(wanted, None) if _whole(wanted) else None
            if hook is not None:
                _quietly(hook, sys.modules[wanted], notes)

    notes.put(builtins, "__import__", importing)
    return notes


def _whole(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception:  # noqa: BLE001 - as above
        return None


# ---------------------------------------------------------------------- pytools


def watch_dictionaries(module: Any, notes: Notes) -> None:
    """Count lookups on the disk, and stores, of every persistent dictionary."""
    once, plain = module.WriteOncePersistentDict, module.PersistentDict
    missing = module.NoSuchEntryError
    notes.put(plain, "fetch", _looking(notes, plain.fetch, missing))
    if hasattr(once, "_fetch_uncached"):
        # What it has in memory does not count.
        notes.put(once, "_fetch_uncached", _looking(notes, once._fetch_uncached, KeyError))  # noqa: SLF001
        notes.put(once, "fetch", _remembering(notes, once.fetch, missing))
    else:
        notes.put(once, "fetch", _looking(notes, once.fetch, missing))
    notes.put(plain, "store", _storing(notes, plain.store))
    notes.put(once, "store", _storing(notes, once.store))


def _note(notes: Notes, dictionary: Any, event: str, key: object) -> None:
    _here.told = True
    notes.add(
        event=event,
        layer="pytools",
        dictionary=_quietly(lambda: dictionary.identifier),
        kernels=_quietly(kernels_of, key),
    )


def _looking(notes: Notes, fetch: Callable[..., Any], absent: type[Exception]) -> Callable[..., Any]:
    @functools.wraps(fetch)
    def fetch_and_tell(self: Any, key: Any) -> Any:
        asked = getattr(_here, "key", key)
        try:
            value = fetch(self, key)
        except absent:
            _note(notes, self, "miss", asked)
            raise
        _note(notes, self, "hit", asked)
        return value

    return fetch_and_tell


def _storing(notes: Notes, store: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(store)
    def store_and_tell(self: Any, key: Any, *arguments: Any, **options: Any) -> Any:
        before = _quietly(_changes, self)
        value = store(self, key, *arguments, **options)
        # What was there already is not stored again, if that was asked for.
        if before is None or _quietly(_changes, self) != before:
            _note(notes, self, "store", key)
        return value

    return store_and_tell


def _remembering(notes: Notes, fetch: Callable[..., Any], missing: type[Exception]) -> Callable[..., Any]:
    @functools.wraps(fetch)
    def fetch_with_key(self: Any, key: Any) -> Any:
        outer = vars(_here).copy()
        _here.key = key
        _here.told = False
        before = _quietly(_lookups, self)
        found = True
        try:
            return fetch(self, key)
        except missing:
            found = False
            raise
        finally:
            told = _here.told
            vars(_here).clear()
            vars(_here).update(outer)
            # A dictionary that was opened before it could be watched asks the disk past us.
            if not told and before is not None and _quietly(_lookups, self) != before:
                _note(notes, self, "hit" if found else "miss", key)

    return fetch_with_key


def _changes(dictionary: Any) -> int:
    """Count the changes that a dictionary's connection has made."""
    return int(dictionary.conn.total_changes)


def _lookups(dictionary: Any) -> int:
    """Count how often a write-once dictionary had to ask the disk."""
    return int(dictionary._fetch.cache_info().misses)  # noqa: SLF001


def kernels_of(key: Any, depth: int = 3) -> list[str]:
    """Name the kernels that a key of loopy's is about."""
    kind = type(key).__name__
    if kind == "TranslationUnit":
        return sorted(str(name) for name in key.entrypoints)
    if kind == "LoopKernel":
        return [str(key.name)]
    if isinstance(key, (tuple, list)) and depth:
        for part in key[:8]:
            names = kernels_of(part, depth - 1)
            if names:
                return names
    return []


# ---------------------------------------------------------------------- PyOpenCL


def watch_binaries(module: Any, notes: Notes) -> None:
    """Count lookups and stores of PyOpenCL's own cache."""
    retrieve, create = module.retrieve_from_cache, module._create_built_program_from_source_cached  # noqa: SLF001

    @functools.wraps(retrieve)
    def retrieve_and_tell(cache_dir: Any, cache_key: Any) -> Any:
        found = retrieve(cache_dir, cache_key)
        source = getattr(_here, "source", "")
        event = "miss" if found is None else "hit"
        if found is None:
            getattr(_here, "missed", []).append(os.path.join(str(cache_dir), str(cache_key)))
        digest = hashlib.sha256(source.encode(errors="replace")).hexdigest()
        notes.add(event=event, layer="pyopencl", key=cache_key, kernels=_KERNEL.findall(source), source=digest)
        _here.binary = event
        return found

    @functools.wraps(create)
    def create_and_tell(ctx: Any, src: Any, *arguments: Any, **options: Any) -> Any:
        _here.missed = []
        _here.source = src.decode(errors="replace") if isinstance(src, bytes) else str(src)
        made = create(ctx, src, *arguments, **options)
        for folder in _here.missed:
            size = _quietly(lambda folder=folder: sum(item.stat().st_size for item in os.scandir(folder)))
            if size is not None:
                notes.add(event="store", layer="pyopencl", key=os.path.basename(folder), bytes=size)
        return made

    notes.put(module, "retrieve_from_cache", retrieve_and_tell)
    notes.put(module, "_create_built_program_from_source_cached", create_and_tell)


def watch_builds(module: Any, notes: Notes) -> None:
    """Time every build, and have PoCL's messages go to a file of ours."""
    log = _quietly(redirect_messages, notes)
    build = module.Program.build

    @functools.wraps(build)
    def build_and_tell(self: Any, *arguments: Any, **options: Any) -> Any:
        _here.binary = None
        before = _size(log)
        started = time.perf_counter()
        try:
            return build(self, *arguments, **options)
        finally:
            seconds = time.perf_counter() - started
            kernels = _quietly(lambda: _KERNEL.findall(self._source)) or []
            wrote = None if log is None else _contains(log, before, b"Writing program.bc to ")
            platform = _quietly(lambda: self._context.devices[0].platform.name)
            binary = getattr(_here, "binary", None)
            about = {"kernels": kernels, "seconds": seconds, "platform": platform, "binary": binary, "compiled": wrote}
            notes.add(event="build", **about)

    notes.put(module.Program, "build", build_and_tell)


def redirect_messages(notes: Notes) -> str | None:
    """Send what C code prints with ``stderr`` to a file, if PoCL's messages were switched on for the trace alone.

    The descriptor 2 stays as it is: what the program, or Python, prints goes where it went.
    """
    import ctypes

    wanted = os.environ.get(FOLDER + "_DEBUG")
    if wanted is None or os.environ.get("POCL_DEBUG") != wanted:
        return None
    library = ctypes.CDLL(None)
    stream = ctypes.c_void_p.in_dll(library, "stderr")
    library.fopen.restype = ctypes.c_void_p
    path = os.path.join(notes.folder, f"{os.getpid()}.messages")
    opened = library.fopen(os.fsencode(path), b"a")
    if not opened:
        return None
    line_buffered = 1
    library.setvbuf(ctypes.c_void_p(opened), None, line_buffered, ctypes.c_size_t(4096))
    stream.value = opened
    notes.add(event="messages")
    return path


def _size(path: str | None) -> int:
    try:
        return 0 if path is None else os.stat(path).st_size
    except OSError:
        return 0


def _contains(path: str, start: int, words: bytes) -> bool | None:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return words in file.read()
    except OSError:
        return None
