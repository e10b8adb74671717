"""What counts cache lookups inside an interpreter; it needs nothing but Python, and changes nothing but clocks.

``cachectl trace`` copies this file into a scratch folder, from which every interpreter of the run loads it before the
program (:mod:`cachectl.trace`); ``cachectl.traced()`` uses it as it stands. It wraps what pytools and PyOpenCL look
their caches up with, and has PoCL write its compiler messages to a file instead of nowhere. Each event is one line
of JSON in a file per process, written at once, so that a killed program still counts.

Whatever goes wrong in here is swallowed: a program must not notice that it is traced.
"""

from __future__ import annotations

import _thread
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

#: The category of PoCL's compiler messages: ``POCL_DEBUG_FLAG_LLVM`` of ``lib/CL/pocl_debug.h``.
_LLVM = 4
#: PoCL keeps 128 work-group functions loaded: they are looked at before as many can have come and gone.
_BUILDS_PER_LOOK = 16
#: How often a program that builds is looked into for PoCL, whose library comes with the first platform.
_MOST_TRIES = 4
_MOST_NAMES = 16
_LINE_BUFFERED = 1
#: Kept in memory at most, of a log that may have grown meanwhile.
_CHUNK = 1 << 24
#: The first of the two lines in which PoCL 3 spells a message.
_HEADER = rb"(?:\x1b\[[0-9;]*m)*\[[^]]*\] POCL: in fn .* at line \d+:\s*$"


class Sink:
    """One trace that wants to know: its folder, and whether it wants sources, names and seconds too."""

    def __init__(self, folder: str, *, detail: bool) -> None:
        self.folder = folder
        self.detail = detail


class _Here(_thread._local):  # noqa: SLF001 - threading would have to be imported before the program
    """What the current thread is in the middle of."""

    def __init__(self) -> None:
        #: The lookup or store that sqlite is asked for: hash, bytes, whether the disk was asked, rows changed.
        self.query: dict[str, Any] | None = None
        #: The steps of a kernel, the innermost last.
        self.steps: list[dict[str, Any]] = []
        #: PyOpenCL's keys that were looked up in vain since its current build began.
        self.missed: list[str] | None = None


class _State:
    """Everything there is one of in a process."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.lock = _thread.RLock()
        self.patches: list[tuple[Any, str, Any, Any]] = []
        self.started = False
        self.pocl = PoclLog()
        self.building = 0

    @property
    def detail(self) -> bool:
        return any(sink.detail for sink in self.sinks)


def emit(**event: object) -> None:
    """Write one event to every trace."""
    for sink in _STATE.sinks:
        _emit_to(sink, event)


def _emit_to(sink: Sink, event: dict[str, object]) -> None:
    with suppress(Exception):
        import json

        _append(sink, json.dumps(event).encode() + b"\n")


def _append(sink: Sink, line: bytes) -> None:
    # Opened anew each time: a descriptor that is kept may be closed by the program, and its number used for another.
    path = os.path.join(sink.folder, f"events-{os.getpid()}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- beginning and ending


def begin(folder: str, *, detail: bool = False) -> None:
    """Count from now on, for one more trace."""
    with suppress(Exception):
        sink = Sink(folder, detail=detail)
        _append(sink, b'{"e": "start"}\n')
        _STATE.sinks.append(sink)
        if not _STATE.started:
            _STATE.started = True
            _at_the_end()
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        for name in tuple(_HOOKS):
            module = sys.modules.get(name)
            if module is not None:
                _hook(module)


def end(folder: str) -> None:
    """Write what is still to be told to one trace, and count for it no more; without any, undo every change."""
    _finish()
    with suppress(Exception):
        ended = [sink for sink in _STATE.sinks if sink.folder == folder]
        if _STATE.pocl.folder == folder:
            _STATE.pocl.release()
        _STATE.sinks = [sink for sink in _STATE.sinks if sink not in ended]
        if not _STATE.sinks:
            _undo()


def _undo() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for owner, name, original, ours in reversed(_STATE.patches):
        # Somebody may have put a stand-in of theirs in front of ours; without traces, ours only passes on.
        if vars(owner).get(name) is ours:
            setattr(owner, name, original)
    _STATE.patches.clear()


def _at_the_end() -> None:
    import atexit

    atexit.register(_finish)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)
    leave = os._exit

    def _exit(status: int) -> Any:  # noqa: ANN401 - it returns to nobody
        # So ends what multiprocessing has forked.
        _finish()
        leave(status)

    os._exit = _exit  # type: ignore[assignment]


def _forked() -> None:
    _STATE.lock = _thread.RLock()
    _STATE.building = 0
    # Its parent reads that log, and counts for both.
    _STATE.pocl.inherited = True
    with suppress(Exception):
        for sink in _STATE.sinks:
            _append(sink, b'{"e": "start"}\n')


def _finish() -> None:
    if not _STATE.sinks:
        return
    with suppress(Exception):
        _STATE.pocl.look()
    with suppress(Exception):
        _STATE.pocl.drain()
    emit(e="end")


# ---------------------------------------------------------------------- wrapping


class _Finder:
    """Sees modules being imported, and hooks those that ask a cache, right after they were executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ANN401 - importlib's protocol
        if name not in _HOOKS or not _STATE.sinks:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    with suppress(Exception):
                        _hook_after(spec.loader)
                    return spec
        return None


def _hook_after(loader: Any) -> None:  # noqa: ANN401 - any loader
    execute = loader.exec_module

    def exec_module(module: Any) -> None:  # noqa: ANN401 - a module
        with suppress(AttributeError):
            del loader.exec_module
        execute(module)
        _hook(module)

    loader.exec_module = exec_module


def _hook(module: Any) -> None:  # noqa: ANN401 - a module
    with suppress(Exception):
        _HOOKS[module.__name__](module)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:  # noqa: ANN401 - a module or a class
    original = vars(owner).get(name)
    if original is None or hasattr(original, "_cachectl_original"):
        return
    from functools import wraps

    ours = wraps(original)(make(original))
    ours._cachectl_original = original  # noqa: SLF001 - the mark by which ours is known
    setattr(owner, name, ours)
    _STATE.patches.append((owner, name, original, ours))


# ---------------------------------------------------------------------- pytools


def _hook_pytools(module: Any) -> None:  # noqa: ANN401 - a module
    for owner in ("_PersistentDictBase", "PersistentDict", "WriteOncePersistentDict"):
        found = getattr(module, owner, None)
        if found is not None:
            _replace(found, "_exec_sql_fn", _telling_rows)
            if not owner.startswith("_"):
                _replace(found, "fetch", _counting_fetches)
                _replace(found, "store", _counting_stores)


@contextmanager
def _query() -> Iterator[dict[str, Any]]:
    before = _HERE.query
    query: dict[str, Any] = {"k": None, "b": None, "disk": False, "rows": None}
    _HERE.query = query
    try:
        yield query
    finally:
        _HERE.query = before


def _telling_rows(original: Any) -> Any:  # noqa: ANN401 - a method
    def _exec_sql_fn(self: Any, fn: Any) -> Any:  # noqa: ANN401 - pytools' own
        result = original(self, fn)
        query = _HERE.query
        if query is not None:
            with suppress(Exception):
                _note_row(query, fn, result)
        return result

    return _exec_sql_fn


def _note_row(query: dict[str, Any], fn: Any, result: Any) -> None:  # noqa: ANN401 - a closure, and a row or a cursor
    """Read from the closure that sqlite was asked with which row it was, and from the answer how large."""
    known = dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in fn.__closure__), strict=False))
    query["disk"] = True
    if "keyhash" in known:
        query["k"] = known["keyhash"]
        query["b"] = None if result is None else len(result[0])
    elif "args" in known and str(known["args"][0]).startswith("INSERT"):
        query["k"], row = known["args"][1]
        query["b"] = len(row)
        query["rows"] = result.rowcount


def _counting_fetches(original: Any) -> Any:  # noqa: ANN401 - a method
    def fetch(self: Any, key: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401 - pytools' own
        if not _STATE.sinks:
            return original(self, key, *rest, **named)
        with _query() as query:
            try:
                value = original(self, key, *rest, **named)
            except KeyError:
                _note_fetch(self, key, query, hit=False)
                raise
            _note_fetch(self, key, query, hit=True)
            return value

    return fetch


def _note_fetch(dictionary: Any, key: Any, query: dict[str, Any], *, hit: bool) -> None:  # noqa: ANN401 - pytools' own
    with suppress(Exception):
        event: dict[str, Any] = {"e": "fetch", "d": dictionary.identifier, "h": hit, "k": query["k"], "b": query["b"]}
        # A generation that keeps no rows tells nothing of memory.
        event["m"] = hit and not query["disk"] and hasattr(type(dictionary), "_exec_sql_fn")
        if _HERE.steps:
            _HERE.steps[-1]["hits" if hit else "misses"] += 1
        if _STATE.detail:
            event["n"] = _names(key)
            event["f"] = str(getattr(dictionary, "filename", "")) or None
        emit(**event)


def _counting_stores(original: Any) -> Any:  # noqa: ANN401 - a method
    def store(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - pytools' own
        if not _STATE.sinks:
            return original(self, *arguments, **named)
        with _query() as query:
            value = original(self, *arguments, **named)
            with suppress(Exception):
                emit(e="store", d=self.identifier, k=query["k"], b=query["b"], s=query["rows"] != 0)
            return value

    return store


def _names(key: Any, depth: int = 3) -> list[str]:  # noqa: ANN401 - whatever a dictionary is keyed by
    """Name the kernels in a key of loopy's or PyOpenCL's; other people's objects are not asked anything."""
    if isinstance(key, tuple):
        # PyOpenCL's begins with the name of the function.
        if depth == 3 and len(key) > 4 and isinstance(key[0], str):  # noqa: PLR2004 - the outermost; its length
            return [key[0]]
        found = [name for part in key[:4] for name in _names(part, depth - 1)] if depth else []
        return sorted(set(found))[:_MOST_NAMES]
    if not type(key).__module__.startswith("loopy."):
        return []
    entrypoints = getattr(key, "entrypoints", None)
    if isinstance(entrypoints, frozenset):
        return sorted(name for name in entrypoints if isinstance(name, str))[:_MOST_NAMES]
    name = getattr(key, "name", None)
    return [name] if isinstance(name, str) and hasattr(key, "instructions") else []


# ---------------------------------------------------------------------- loopy


def _hook_codegen(module: Any) -> None:  # noqa: ANN401 - a module
    def make(original: Any) -> Any:  # noqa: ANN401 - a function
        def generate_code_v2(t_unit: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401 - loopy's own
            with _step("code", lambda: _names(t_unit)):
                return original(t_unit, *rest, **named)

        return generate_code_v2

    _replace(module, "generate_code_v2", make)


def _hook_execution(module: Any) -> None:  # noqa: ANN401 - a module
    def make(original: Any) -> Any:  # noqa: ANN401 - a method
        def get_typed_and_scheduled_translation_unit(self: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401
            with _step("schedule", lambda: [str(self.entrypoint)]):
                return original(self, *rest, **named)

        return get_typed_and_scheduled_translation_unit

    for owner in ("ExecutorBase", "KernelExecutorBase"):
        if hasattr(module, owner):
            _replace(getattr(module, owner), "get_typed_and_scheduled_translation_unit", make)


@contextmanager
def _step(what: str, names: Callable[[], list[str]] | None = None) -> Iterator[dict[str, Any] | None]:
    """Time one step of a kernel, and note what the caches said meanwhile."""
    if not _STATE.detail:
        yield None
        return
    step: dict[str, Any] = {"e": "step", "w": what, "hits": 0, "misses": 0}
    with suppress(Exception):
        step["n"] = None if names is None else names()
    _HERE.steps.append(step)
    started = perf_counter()
    try:
        yield step
    finally:
        step["s"] = perf_counter() - started
        with suppress(Exception):
            _HERE.steps.remove(step)
        emit(**step)


# ---------------------------------------------------------------------- PyOpenCL


def _hook_cache(module: Any) -> None:  # noqa: ANN401 - a module
    def retrieving(original: Any) -> Any:  # noqa: ANN401 - a function
        def retrieve_from_cache(cache_dir: Any, cache_key: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401
            there = False
            with suppress(Exception):
                there = os.path.isdir(os.path.join(cache_dir, cache_key))
            found = original(cache_dir, cache_key, *rest, **named)
            with suppress(Exception):
                if found is None and _HERE.missed is not None:
                    _HERE.missed.append(cache_key)
                if _HERE.steps:
                    _HERE.steps[-1]["hits" if found is not None else "misses"] += 1
                    _HERE.steps[-1].setdefault("keys", []).append(cache_key)
                size = None if found is None else len(found[0])
                emit(e="retrieve", h=found is not None, k=cache_key, c=str(cache_dir), b=size, was=there)
            return found

        return retrieve_from_cache

    def building(original: Any) -> Any:  # noqa: ANN401 - a function
        def _create_built_program_from_source_cached(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            before, _HERE.missed = _HERE.missed, []
            try:
                built = original(*arguments, **named)
                if _HERE.missed:
                    emit(e="stored", k=_HERE.missed)
                return built
            finally:
                _HERE.missed = before

        return _create_built_program_from_source_cached

    _replace(module, "retrieve_from_cache", retrieving)
    _replace(module, "_create_built_program_from_source_cached", building)


def _hook_pyopencl(module: Any) -> None:  # noqa: ANN401 - a module
    program = getattr(module._cl, "_Program", None)  # noqa: SLF001 - what PyOpenCL's own Program calls
    if program is not None:
        _replace(program, "_build", _with_pocl)
        _replace(program, "compile", _with_pocl)
    _replace(module.Program, "build", _timing_builds)


def _with_pocl(original: Any) -> Any:  # noqa: ANN401 - a method
    def _build(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - PyOpenCL's own
        if not _STATE.sinks:
            return original(self, *arguments, **named)
        with suppress(Exception):
            _STATE.pocl.before_build()
        alone = _building(1)
        failed = True
        try:
            built = original(self, *arguments, **named)
            failed = False
            return built
        finally:
            alone = _building(-1) and alone
            with suppress(Exception):
                counts = _STATE.pocl.drain(failed=failed)
                if _HERE.steps and counts is not None and alone:
                    _HERE.steps[-1]["pocl"] = [counts["lookups"], counts["writes"]]

    return _build


def _building(change: int) -> bool:
    """Count a build in or out; tell whether no other is going on."""
    with _STATE.lock:
        others = _STATE.building if change > 0 else _STATE.building - 1
        _STATE.building += change
        return others == 0


def _timing_builds(original: Any) -> Any:  # noqa: ANN401 - a method
    def build(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - PyOpenCL's own
        with _step("program") as step:
            if step is not None:
                with suppress(Exception):
                    _describe_build(step, self, arguments, named)
            return original(self, *arguments, **named)

    return build


def _describe_build(step: dict[str, Any], program: Any, arguments: Any, named: Any) -> None:  # noqa: ANN401
    """Keep the source of a build, and note what else its keys are made of."""
    # Asked for what it has not, a program makes a kernel of that name.
    own = vars(program)
    source, context = own.get("_source"), own.get("_context")
    if not isinstance(source, (str, bytes)) or context is None:
        return
    data = source.encode() if isinstance(source, str) else source
    step["source"] = _keep(data)
    options = arguments[0] if arguments else named.get("options")
    if isinstance(options, (str, list, tuple, type(None))):
        step["options"] = type(program)._process_build_options(context, options)[0].decode()  # noqa: SLF001
    device = context.devices[0]
    platform = device.platform
    step["device"] = [device.name, device.driver_version, platform.name, platform.version]
    from pyopencl.cache import get_device_cache_id

    step["id"] = str(get_device_cache_id(device))


def _keep(source: bytes) -> str:
    """Write a source into every folder that wants details, once; return its name there."""
    import hashlib

    name = hashlib.sha256(source).hexdigest()
    for sink in _STATE.sinks:
        path = os.path.join(sink.folder, f"source-{name}")
        if sink.detail and not os.path.exists(path):
            with open(path, "wb") as file:
                file.write(source)
    return name


# ---------------------------------------------------------------------- PoCL


class PoclLog:
    """PoCL's compiler messages, written to a file of ours.

    Its library is told to write them (the variable ``pocl_debug_messages_filter``, which it exports for its drivers),
    and its reference to the C library's ``stderr``, and no other library's, is turned to a file of ours. What it says
    there beside is handed on to where it would have gone. Nothing is written while kernels run.
    """

    def __init__(self) -> None:
        self.folder: str | None = None
        self.path: str | None = None
        self.inherited = False
        self.tries = 0
        self.builds = 0
        self.offset = 0
        self.seen: set[str] = set()
        #: How to undo it.
        self.back: list[Callable[[], None]] = []
        self.identity: tuple[int, int] | None = None
        self.descriptor = -1

    def before_build(self) -> None:
        """Have the messages written, if PoCL is loaded, and look at what it has loaded from its cache."""
        with _STATE.lock:
            if self.path is None and not self.inherited and self.tries < _MOST_TRIES:
                self.tries += 1
                self._attach(_STATE.sinks[0].folder)
            if self.path is not None and not self._ours():
                # The program has closed what it does not know, and may have a file of its own there.
                self._detach()
            self.builds += 1
            if self.builds % _BUILDS_PER_LOOK == 0:
                self.look()

    def release(self) -> None:
        """Undo it all."""
        with _STATE.lock:
            self._detach()
            self.tries = self.offset = 0
            self.folder = self.path = None
            self.seen = set()

    def _attach(self, folder: str) -> None:
        libraries = [name for name in _mapped() if _is_pocl(name)]
        if not libraries:
            return
        why: str | None = "PoCL lets nobody see its messages"
        if os.environ.get("POCL_DEBUG"):
            why = "POCL_DEBUG is set, and what it asks for is left to go where it goes"
        elif len(libraries) > 1:
            why = "several versions of PoCL are loaded"
        else:
            path = os.path.join(folder, f"pocl-{os.getpid()}")
            with suppress(Exception):
                if self._turn(libraries[0], path):
                    self.folder, self.path, why = folder, path, None
        if why is not None:
            self._detach()
            self.tries = _MOST_TRIES
        emit(e="pocl", why=why)

    def _turn(self, library: str, path: str) -> bool:
        import ctypes

        pocl = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        libc = ctypes.CDLL(None)
        messages = ctypes.c_uint64.in_dll(pocl, "pocl_debug_messages_filter")
        stderr = ctypes.addressof(ctypes.c_void_p.in_dll(libc, "stderr"))
        slots = _holding(library, stderr)
        if not slots:
            return False
        libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
        libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        libc.fileno.argtypes = [ctypes.c_void_p]
        libc.malloc.argtypes = [ctypes.c_size_t]
        stream = libc.fopen(os.fsencode(path), b"ae")
        if not stream:
            return False
        libc.setvbuf(stream, None, _LINE_BUFFERED, 4096)
        self.descriptor = libc.fileno(stream)
        status = os.fstat(self.descriptor)
        self.identity = (status.st_dev, status.st_ino)
        # Never given back: PoCL says something even when the process has ended Python.
        cell = libc.malloc(ctypes.sizeof(ctypes.c_void_p))
        ctypes.c_void_p.from_address(cell).value = stream
        before = messages.value

        def quieten() -> None:
            messages.value = before

        self.back.append(quieten)
        for slot in slots:
            _poke(slot, cell)
            self.back.append(lambda slot=slot: _poke(slot, stderr))  # type: ignore[misc]
        messages.value = before | _LLVM
        return True

    def _ours(self) -> bool:
        if not self.back:
            return True
        try:
            status = os.fstat(self.descriptor)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def _detach(self) -> None:
        for undo in self.back:
            with suppress(Exception):
                undo()
        self.back = []

    def drain(self, *, failed: bool = False) -> dict[str, Any] | None:
        """Count what was said since, hand on what is not for us, and return the counts; ``None`` without a log."""
        with _STATE.lock:
            if self.path is None or self.inherited:
                return None
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(_CHUNK)
            whole = _whole(data)
            counts, other = read_messages(whole)
            self.offset += len(whole)
            if other:
                with suppress(OSError):
                    os.write(2, other)
            if whole:
                counts["failed"] = max(0, counts["lookups"] - len(counts["writes"])) if failed else 0
                emit(e="said", o=self.offset if self.folder is not None else None, l=self.path, **counts)
            return counts

    def look(self) -> None:
        """Note which work-group functions are loaded from a cache."""
        if not self.builds or (self.path is None and not self.inherited):
            return
        found = []
        for name in _mapped():
            if name not in self.seen and is_function(name):
                self.seen.add(name)
                size = changed = None
                with suppress(OSError):
                    status = os.stat(name)
                    size, changed = status.st_size, status.st_mtime
                found.append([name, size, changed])
        if found:
            emit(e="loaded", so=found)


def _mapped() -> list[str]:
    """Name the files that this process has mapped."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n").split(None, 5) for line in file]
    except OSError:
        return []
    return list(dict.fromkeys(line[5].removesuffix(" (deleted)") for line in lines if len(line) > 5))  # noqa: PLR2004


def _is_pocl(path: str) -> bool:
    name = os.path.basename(path)
    return name.startswith("libpocl") and not name.startswith("libpocl-devices") and ".so" in name


def _holding(library: str, address: int) -> list[int]:
    """Return where a library keeps an address, in what it has of data: its references to the variable there."""
    import ctypes

    wanted = address.to_bytes(ctypes.sizeof(ctypes.c_void_p), sys.byteorder)
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.rstrip("\n").split(None, 5) for line in file]
    for line in lines:
        if line[5:] != [library] or line[1][0] != "r" or line[1][2] == "x" or line[2] == "00000000":
            continue
        start, stop = (int(part, 16) for part in line[0].split("-"))
        data = ctypes.string_at(start, stop - start)
        at = data.find(wanted)
        while at >= 0:
            if (start + at) % len(wanted) == 0:
                found.append(start + at)
            at = data.find(wanted, at + 1)
    return found


def _poke(slot: int, value: int) -> None:
    """Write a pointer into this process, also where a library is protected against itself."""
    import ctypes

    descriptor = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, value.to_bytes(ctypes.sizeof(ctypes.c_void_p), sys.byteorder), slot)
    finally:
        os.close(descriptor)


def is_function(path: str) -> bool:
    """Tell whether a path is that of a work-group function in PoCL's cache."""
    parts = path.split("/")[-5:]
    if len(parts) < 5 or not parts[4].endswith(".so"):  # noqa: PLR2004 - XX/YYYY/kernel/size/kernel.so
        return False
    return len(parts[0]) == 2 and len(parts[1]) == 37 and parts[3][:1].isdigit()  # noqa: PLR2004 - PoCL's own lengths


def read_messages(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Count PoCL's compiler messages; return the counts, and what is none of them.

    ``lookups`` counts programs looked for, ``writes`` names the bitcode that was compiled and written, ``functions``
    gives time (as PoCL spells it) and kernel of each work-group function that was compiled. Source:
    ``lib/CL/pocl_llvm_build.cc`` and ``lib/CL/devices/common.c``. PoCL 3 spells a message in two lines, later ones in
    one.
    """
    import re

    counts: dict[str, Any] = {"lookups": 0, "writes": [], "functions": []}
    other: list[bytes] = []
    header = b""
    for line in data.splitlines(keepends=True):
        plain = re.sub(rb"\x1b\[[0-9;]*m", b"", line)
        if re.match(_HEADER, plain, re.IGNORECASE):
            other += [header] if header else []
            header = line
            continue
        message = re.search(rb"\*\*\* INFO \*\*\*\s*\|\s*LLVM\s*\|(.*)", plain)
        if message is None:
            other += [header, line]
        else:
            stamp = re.match(rb"\[([^]]*)\]", re.sub(rb"\x1b\[[0-9;]*m", b"", header or line))
            _count(counts, message[1].decode(errors="surrogateescape"), "" if stamp is None else stamp[1].decode())
        header = b""
    return counts, b"".join([*other, header])


def _whole(data: bytes) -> bytes:
    """Return the messages that have been written to their end."""
    import re

    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    while lines and re.match(_HEADER, lines[-1], re.IGNORECASE):
        lines.pop()
    return b"".join(lines)


def _count(counts: dict[str, Any], text: str, stamp: str) -> None:
    import re

    written = re.search(r"Writing program\.bc to (.*?)\.?\s*$", text)
    built = re.search(r"Temporary (?:kernel\.so|shared-lib) file\s+for kernel (\S+)", text)
    if "building from sources for device" in text:
        counts["lookups"] += 1
    elif written is not None:
        counts["writes"].append(written[1])
    elif built is not None and "FAILED" not in text:
        counts["functions"].append([stamp, built[1]])


# ---------------------------------------------------------------------- what there is one of


_HERE = _Here()
_STATE = _State()
_HOOKS: dict[str, Callable[[Any], None]] = {
    "pytools.persistent_dict": _hook_pytools,
    "pyopencl": _hook_pyopencl,
    "pyopencl.cache": _hook_cache,
    "loopy.codegen": _hook_codegen,
    "loopy.target.execution": _hook_execution,
}
