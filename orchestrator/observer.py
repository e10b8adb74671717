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
_MESSAGE_OF_POCL = re.compile(rb"^(?:\*\* Final POCL_DEBUG flags|\[[-0-9: .]+\]\s?P[Oo]CL: |  \*\*\* \w+ \*\*\*  \|)")
POCL = "Portable Computing Language"
_WORSE = ("miss", "hit")
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


def _note(notes: Notes, dictionary: Any, event: str, key: object, **more: object) -> None:
    _here.told = True
    notes.add(
        event=event,
        layer="pytools",
        dictionary=_quietly(lambda: dictionary.identifier),
        kernels=_quietly(kernels_of, key),
        **more,
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
            _note(notes, self, "store", key, bytes=_quietly(_newest, self))
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


def _newest(dictionary: Any) -> int:
    """Return the bytes of the value that a dictionary's connection has stored last."""
    newest = "SELECT length(key_value) FROM dict WHERE rowid = last_insert_rowid()"
    with dictionary.mutex:
        return int(dictionary.conn.execute(newest).fetchone()[0])


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
        about = getattr(_here, "about", {})
        event = "miss" if found is None else "hit"
        if found is None:
            getattr(_here, "missed", []).append(os.path.join(str(cache_dir), str(cache_key)))
        notes.add(event=event, layer="pyopencl", key=cache_key, **about)
        # Of a program for several devices all must be there.
        _here.binary = event if getattr(_here, "binary", None) is None else min(_here.binary, event, key=_WORSE.index)
        return found

    @functools.wraps(create)
    def create_and_tell(ctx: Any, src: Any, *arguments: Any, **options: Any) -> Any:
        _here.missed = []
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
    messages = _quietly(Messages, notes)
    build = module.Program.build
    crowd = Crowd()

    @functools.wraps(build)
    def build_and_tell(self: Any, *arguments: Any, **options: Any) -> Any:
        if messages:
            _quietly(messages.settle)
        _here.binary = None
        about = _here.about = _quietly(_about, self, arguments, options) or {}
        before = messages.size() if messages else 0
        mine = crowd.enter()
        started = time.perf_counter()
        failed = True
        try:
            built = build(self, *arguments, **options)
            failed = False
            return built
        finally:
            seconds = time.perf_counter() - started
            alone = crowd.leave(mine)
            heard = bool(messages and messages.heard)
            compiled = None
            if messages and heard and about.get("platform") == POCL:
                compiled = messages.tell_of_compiling(before, alone=alone)
            outcome = {"failed": failed, "binary": _here.binary, "heard": heard, "compiled": compiled}
            notes.add(event="build", seconds=seconds, **outcome, **about)
            if messages:
                _quietly(messages.pass_on)

    notes.put(module.Program, "build", build_and_tell)


def _about(program: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    # One that is made of binaries has none.
    source = getattr(program, "_source", "")
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    devices = program._context.devices  # noqa: SLF001
    return {
        "kernels": _KERNEL.findall(text),
        "source": hashlib.sha256(text.encode(errors="replace")).hexdigest(),
        "options": str(arguments[0] if arguments else options.get("options", "")),
        "devices": [device.name for device in devices],
        "platform": devices[0].platform.name,
    }


class Crowd:
    """Tells whether a build had the process to itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._entered = 0

    def enter(self) -> int:
        """Begin, and get a ticket; 0 where somebody is at it already."""
        with self._lock:
            self._inside += 1
            self._entered += 1
            return self._entered if self._inside == 1 else 0

    def leave(self, ticket: int) -> bool:
        """End, and tell whether nobody else was there meanwhile."""
        with self._lock:
            self._inside -= 1
            return ticket == self._entered


# ---------------------------------------------------------------------- PoCL


class Messages:
    """PoCL's messages, in a file of ours instead of C code's error stream.

    They are switched on for the trace alone. The descriptor 2 stays as it is: what the program, or Python, prints goes
    where it went. What other C code prints goes there too, a little later: when the next build or the process ends.
    """

    def __init__(self, notes: Notes) -> None:
        import atexit
        import ctypes

        self._notes = notes
        self._wanted = os.environ.get(FOLDER + "_DEBUG")
        self._library = ctypes.CDLL(None)
        self._lock = threading.Lock()
        self._settled = False
        self.heard = False
        # Elsewhere the stream is a constant.
        if self._wanted is None or "POCL_DEBUG" in os.environ or not hasattr(self._library, "gnu_get_libc_version"):
            return
        self._library.fopen.restype = ctypes.c_void_p
        self._stream = ctypes.c_void_p.in_dll(self._library, "stderr")
        self._own = self._stream.value
        # For C code alone, and until PoCL has read it: no child is to print what nobody asked for.
        self._library.setenv(b"POCL_DEBUG", self._wanted.encode(), 1)
        self._listen()
        atexit.register(_quietly, self.pass_on)

    def _listen(self) -> None:
        import ctypes

        self._pid = os.getpid()
        self._passed = 0
        self._path = os.path.join(self._notes.folder, f"{self._pid}.messages")
        opened = self._library.fopen(os.fsencode(self._path), b"ae")
        if opened:
            line_buffered = 1
            self._library.setvbuf(ctypes.c_void_p(opened), None, line_buffered, ctypes.c_size_t(4096))
            self._stream.value = opened
        self.heard = bool(opened)
        if opened:
            self._notes.add(event="messages")

    def settle(self) -> None:
        """Take PoCL's variable back, once drivers have started; without PoCL there is nothing to hear."""
        with self._lock:
            if not self._settled:
                self._settled = True
                if "POCL_DEBUG" not in os.environ:
                    self._library.unsetenv(b"POCL_DEBUG")
                if self.heard and not _is_loaded(b"/libpocl"):
                    self._stream.value = self._own
                    self.heard = False
                    self._notes.add(event="no messages")
            if self.heard and os.getpid() != self._pid:
                # Forked: the parent goes on with its own file.
                self._listen()

    def size(self) -> int:
        """Return the bytes that are there now."""
        try:
            return os.stat(self._path).st_size
        except (OSError, AttributeError):
            return 0

    def tell_of_compiling(self, start: int, *, alone: bool) -> bool | None:
        """Tell whether PoCL has compiled since then; of builds at the same time one cannot always know which."""
        try:
            with open(self._path, "rb") as file:
                file.seek(start)
                wrote = b"Writing program.bc to " in file.read()
        except OSError:
            return None
        return wrote if alone or not wrote else None

    def pass_on(self) -> None:
        """Print the whole lines that are not PoCL's, where C code's errors belong."""
        if not self.heard or os.getpid() != self._pid:
            return
        with self._lock, open(self._path, "rb") as file:
            file.seek(self._passed)
            lines = file.read().rpartition(b"\n")
            self._passed += len(lines[0] + lines[1])
            others = not_of_pocl(lines[0] + lines[1])
            if others:
                os.write(2, others)
                self._notes.add(event="passed on", upto=self._passed)


def not_of_pocl(messages: bytes) -> bytes:
    """Return the lines of C code's error stream that are not PoCL's."""
    return b"".join(line for line in messages.splitlines(keepends=True) if not _MESSAGE_OF_POCL.match(line))


def _is_loaded(library: bytes) -> bool:
    try:
        with open("/proc/self/maps", "rb") as maps:
            return library in maps.read()
    except OSError:
        return True
