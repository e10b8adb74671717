"""Loaded into a traced interpreter: notes what the program asks of its caches, and changes nothing.

This file is copied beside a ``sitecustomize.py`` and runs in any Python from 3.8 on, with or without cachectl: it
imports the standard library alone. Each event is one line of JSON, appended to a file of this process, so that a
program that is killed has told all the same. Whatever fails in here, the program does not notice.
"""

from __future__ import annotations

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
    """Where one process notes its events.

    The file is opened for each: a program may close what it did not open, and get its number for a file of its own.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._replaced: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Put a stand-in in the place of an attribute, until :meth:`stop`."""
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def stop(self) -> None:
        """Put back whatever was replaced, and look out for no more imports."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "notes", None) is not self]
        while self._replaced:
            setattr(*self._replaced.pop())

    def add(self, **event: object) -> None:
        """Append an event."""
        try:
            line = json.dumps({"pid": os.getpid(), "at": time.time(), **event}, default=str) + "\n"
            path = os.path.join(self.folder, f"{os.getpid()}.events")
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(handle, line.encode(errors="surrogateescape"))
            finally:
                os.close(handle)
        except Exception:  # noqa: BLE001, S110 - a trace must never fail the program it looks at
            pass


class Lookout:
    """A finder that finds nothing itself, but wraps a library as soon as it has been executed."""

    def __init__(self, hooks: dict[str, Callable[[Any, Notes], None]], notes: Notes) -> None:
        self.hooks = hooks
        self.notes = notes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the other finders find a library, and see to it that its loader tells when it is there."""
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
        """Wrap a library, once; one that is not as expected is told of."""
        hook = self.hooks.pop(name, None)
        if hook is not None:
            try:
                hook(module, self.notes)
            except Exception as error:  # noqa: BLE001 - as above
                self.notes.add(event="failed", library=name, error=type(error).__name__)


def observe(folder: str) -> Notes:
    """Wrap the libraries that are loaded now, and the others as soon as they are."""
    notes = Notes(folder)
    notes.add(event="started", program=sys.argv[:1])
    lookout = Lookout(
        {
            "pytools.persistent_dict": watch_dictionaries,
            "pyopencl.cache": watch_binaries,
            "pyopencl": watch_builds,
        },
        notes,
    )
    for name in tuple(lookout.hooks):
        module = sys.modules.get(name)
        # A module that is loaded when it is first used is left to that moment.
        if module is not None and type(module).__name__ == "module":
            lookout.wrap(name, module)
    sys.meta_path.insert(0, lookout)
    return notes


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
        _quietly(silence)
        _here.binary = None
        before = _size(log)
        started = time.perf_counter()
        failed = True
        try:
            built = build(self, *arguments, **options)
            failed = False
            return built
        finally:
            seconds = time.perf_counter() - started
            kernels = _quietly(lambda: _KERNEL.findall(self._source)) or []
            wrote = None if log is None else _contains(log, before, b"Writing program.bc to ")
            platform = _quietly(lambda: self._context.devices[0].platform.name)
            binary = getattr(_here, "binary", None)
            about = {"kernels": kernels, "seconds": seconds, "platform": platform, "binary": binary, "compiled": wrote}
            notes.add(event="build", failed=failed, **about)

    notes.put(module.Program, "build", build_and_tell)


def redirect_messages(notes: Notes) -> str | None:
    """Send what C code prints with ``stderr`` to a file, if PoCL's messages were switched on for the trace alone.

    The descriptor 2 stays as it is: what the program, or Python, prints goes where it went.
    """
    import ctypes

    wanted = os.environ.get(FOLDER + "_DEBUG")
    library = ctypes.CDLL(None)
    # Elsewhere the stream is a constant.
    if wanted is None or "POCL_DEBUG" in os.environ or not hasattr(library, "gnu_get_libc_version"):
        return None
    stream = ctypes.c_void_p.in_dll(library, "stderr")
    library.fopen.restype = ctypes.c_void_p
    path = os.path.join(notes.folder, f"{os.getpid()}.messages")
    opened = library.fopen(os.fsencode(path), b"ae")
    if not opened:
        return None
    line_buffered = 1
    # For C code alone, and until PoCL has read it: no child is to print what nobody asked for.
    library.setenv(b"POCL_DEBUG", wanted.encode(), 1)
    library.setvbuf(ctypes.c_void_p(opened), None, line_buffered, ctypes.c_size_t(4096))
    stream.value = opened
    notes.add(event="messages")
    return path


def silence() -> None:
    """Take PoCL's variable back, once PoCL has started."""
    import ctypes

    if "POCL_DEBUG" not in os.environ:
        ctypes.CDLL(None).unsetenv(b"POCL_DEBUG")


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
