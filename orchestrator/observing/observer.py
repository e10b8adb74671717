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

#: The bit of PoCL's filter for messages of its compiler, ``POCL_DEBUG_FLAG_LLVM``.
_ABOUT_LLVM = 4
# PoCL colours its messages where descriptor 2 was a terminal when it set up its devices.
_COLOUR = r"(?:\x1b\[[0-9;]*m)"
_INDENT = rf"(?:{_COLOUR}{{1,2}} {_COLOUR})"
#: The first part of a message: time, function and line; then level and category, which a killed process may leave out.
_HEAD = re.compile(
    (
        rf"{_COLOUR}?\[\d{{4}}-\d\d-\d\d [0-9:.]+\] ?{_COLOUR}?P[Oo]CL[\w-]*: in fn ([^\n]*?) {_COLOUR}?at line \d+:"
        rf"(\s{{1,2}}{_COLOUR}?(?: \*\*\* \w+ \*\*\* )? \| +\w+ \| (?:{_INDENT}| )?)?"
    ).encode()
)
#: The texts that are understood. The second group is the folder of a program that was not in the cache.
_TEXTS = (
    r"building program (?:with options|for \d+ devs) ",
    r"(BUILDING for device: )",
    r"building from [\w ]+ for device ",
    r"all build options: ",
    r"(?s:Writing program\.bc to (.*?)/program\.bc\.)",
    r"Found cached (?:compiled SPIRV )?binary at ",
    r"Cached compiled SPIRV binary not found",
    r"(?:SPIR|LLVM-SPIR|LLVM IR) binary detected",
    r"Using [^\n]* as the built-in lib",
    r"(?:creating|releasing) LLVM context",
    r"Created context \d+ ",
)
_TEXT = re.compile(rf"{_INDENT}? {{0,4}}(?:{'|'.join(_TEXTS)})[^\n]*\n".encode())
#: Functions that look programs up: where one prints another text, a hit cannot be distinguished from a miss.
_LOOKS_UP = re.compile(rb"compile_and_link_program|pocl_driver_\w+|pocl_llvm_(?:\w+_program|\w+_link_ir)")
# As in cachectl.layers.formats.opencl_source, which this file does not import.
_ATTRIBUTE = r"(?:__attribute__\s{0,9}\(\((?:(?!\)\)).){0,200}\){2,9}\s{0,99}){0,9}"
_KERNEL = re.compile(
    r"\b(?:__)?kernel\s{1,99}" + _ATTRIBUTE + r"void\s{1,99}" + _ATTRIBUTE + r"(\w{1,999})\s{0,99}\(", re.DOTALL
)
POCL = "Portable Computing Language"
_WORSE = ("miss", "hit")
#: The program may put a pipe or a link in the place of a file of ours.
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_here = threading.local()


class Notes:
    """Where one process notes its events: in a folder for each trace that it is part of.

    The file is opened for each: a program may close what it did not open, and get its number for a file of its own.
    """

    def __init__(self, folders: list[str]) -> None:
        self.folders = folders
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
        line = _quietly(json.dumps, {"pid": os.getpid(), "at": time.time(), **event}, default=str)
        for folder in self.folders if line else ():
            _quietly(_append, os.path.join(folder, f"{os.getpid()}.events"), line + "\n")


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
        """Wrap a library, each time it is executed; one that is not as expected is told of."""
        try:
            self.hooks[name](module, self.notes)
        except Exception as error:  # noqa: BLE001 - as in _quietly
            self.notes.add(event="failed", library=name, error=type(error).__name__)


def observe(folders: str) -> Notes:
    """Wrap the libraries that are loaded now, and the others as soon as they are; note in each of the folders."""
    notes = Notes(folders.split(os.pathsep))
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
    """Time every build, and have PoCL tell of it."""
    pocl = Pocl(notes)

    def building(kind: str, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def build_and_tell(*arguments: Any, **options: Any) -> Any:
            _here.binary = None
            about = _here.about = _quietly(_about, kind, arguments, options) or {}
            # Another driver says nothing of its cache.
            ticket = pocl.listen() if about.get("platform", POCL) == POCL else None
            started = time.perf_counter()
            failed = True
            try:
                built = build(*arguments, **options)
                failed = False
                return built
            finally:
                seconds = time.perf_counter() - started
                compiled, heard = pocl.heard(ticket, kind, failed=failed) if ticket else (None, False)
                outcome = {"failed": failed, "binary": _here.binary, "heard": heard, "compiled": compiled}
                notes.add(event="build", kind=kind, seconds=seconds, **outcome, **about)

        return build_and_tell

    notes.put(module.Program, "build", building("build", module.Program.build))
    notes.put(module.Program, "compile", building("compile", module.Program.compile))
    notes.put(module, "link_program", building("link", module.link_program))


def _about(kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    program, *rest = arguments
    # The first argument of link_program is a context. A program that is made of binaries has no source.
    context = program if kind == "link" else program._context  # noqa: SLF001
    source = getattr(program, "_source", "")
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    place = 1 if kind == "link" else 0
    return {
        "kernels": _KERNEL.findall(text),
        "source": hashlib.sha256(text.encode(errors="replace")).hexdigest(),
        "options": str(rest[place] if rest[place:] else options.get("options", "")),
        "devices": [device.name for device in context.devices],
        "platform": context.devices[0].platform.name,
    }


# ---------------------------------------------------------------------- PoCL


class Pocl:
    """What PoCL says while it builds: its messages, switched on and sent to a file of ours for as long as it does.

    They go to the ``stderr`` of C code, which is another stream meanwhile; the descriptor 2 stays as it is. What other
    C code prints in the meantime is passed on when the build has ended. Where the program, or its user, has switched
    messages on already, they are left as they are, and nothing is heard.

    Source: ``lib/CL/pocl_debug.c`` (the filter), ``lib/CL/pocl_build.c`` (what is said).
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._pid = 0
        self._path = ""
        self._start = 0
        self._file: int | None = None
        self._own: int | None = None
        self._filter: Any = None
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=functools.partial(_quietly, self._forked))

    def _begin(self) -> None:
        # A fork may happen while another thread holds the lock.
        self._lock = threading.Lock()
        self._inside = 0
        self._entered = 0
        self._listening = False
        self._kinds: list[str] = []
        self._failed = 0

    def listen(self) -> tuple[int, int]:
        """Begin to listen, unless somebody is at it already; return a ticket, and where in the messages this was."""
        with self._lock:
            self._inside += 1
            self._entered += 1
            if self._inside == 1:
                self._kinds, self._failed = [], 0
                self._listening = _quietly(self._turn_on) or False
            return (self._entered if self._inside == 1 else 0), self._size()

    def heard(self, ticket: tuple[int, int], kind: str, *, failed: bool) -> tuple[bool | None, bool]:
        """End listening to one build. Return whether PoCL compiled it, ``None`` if unknown, and whether PoCL was heard.

        If builds ran at the same time and PoCL compiled one of them, it is unknown which. Messages are switched
        off when the last build has ended.
        """
        others = b""
        with self._lock:
            self._inside -= 1
            self._kinds.append(kind)
            self._failed += failed
            if not self._listening:
                return None, False
            meanwhile = Messages(self._said(ticket[1]))
            alone = ticket[0] == self._entered
            if not self._inside:
                others = _quietly(self._end_of_episode) or b""
            listened = self._listening
        if others:
            # Not under the lock: whoever reads it may be slow.
            _quietly(os.write, 2, others)
        if meanwhile.wrote:
            return (True if alone else None), listened
        # A hit prints no message: it needs proof that PoCL was heard in this build.
        return (False if meanwhile.devices and meanwhile.clear else None), listened

    def _turn_on(self) -> bool:
        import ctypes

        if self._filter is None:
            self._filter = _filter_of_pocl()
        # Elsewhere the stream is no variable.
        library = ctypes.CDLL(None)
        if self._filter is None or self._filter.value or not hasattr(library, "gnu_get_libc_version"):
            return False
        self._open(library)
        if self._file is None:
            return False
        stream = ctypes.c_void_p.in_dll(library, "stderr")
        self._own, stream.value = stream.value, self._file
        self._filter.value = _ABOUT_LLVM
        return True

    def _turn_off(self) -> None:
        import ctypes

        self._filter.value = 0
        library = ctypes.CDLL(None)
        library.fflush(ctypes.c_void_p(self._file))
        stream = ctypes.c_void_p.in_dll(library, "stderr")
        if stream.value == self._file:
            stream.value = self._own

    def _open(self, library: Any) -> None:
        """Have the file open that is this process's, and still ours: a program may close what it did not open."""
        import ctypes

        if self._file is not None and self._pid == os.getpid() and self._is_ours(library):
            return
        self._pid = os.getpid()
        self._path = os.path.join(self._notes.folders[0], f"{self._pid}.messages")
        # After ``exec`` the file of the previous program has the same name.
        self._start = self._size()
        self._file = None
        library.fdopen.restype = ctypes.c_void_p
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | _NO_WAITING
        self._file = library.fdopen(os.open(self._path, flags, 0o600), b"ae")
        if self._file is not None:
            line_buffered = 1
            library.setvbuf(ctypes.c_void_p(self._file), None, line_buffered, ctypes.c_size_t(4096))

    def _is_ours(self, library: Any) -> bool:
        import ctypes

        try:
            return os.path.samestat(os.fstat(library.fileno(ctypes.c_void_p(self._file))), os.stat(self._path))
        except OSError:
            return False

    def _end_of_episode(self) -> bytes:
        """Note what PoCL did since the first of these builds began; return what other C code printed meanwhile."""
        self._turn_off()
        said = self._said(self._start)
        messages = Messages(said)
        # A thread that holds our stream may still print: the next episode reads on from here.
        self._start += len(said)
        lookups = None
        if self._failed == len(self._kinds):
            # A failure is no hit, but may have stored a program for one of several devices.
            lookups = len(messages.wrote)
        elif not self._failed:
            lookups = messages.devices
            # False where the program switched messages off, or the release words them differently.
            self._listening = messages.clear and lookups >= len(self._kinds)
        self._notes.add(event="pocl", lookups=lookups, wrote=messages.wrote, upto=self._start)
        return messages.others

    def _said(self, start: int) -> bytes:
        try:
            with open(self._path, "rb") as file:
                file.seek(start)
                return file.read()
        except OSError:
            return b""

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def _forked(self) -> None:
        if self._listening and self._inside:
            self._turn_off()
        self._begin()


def _filter_of_pocl() -> Any:
    """Return the variable that says what PoCL prints, ``None`` where no PoCL is loaded, or has it no more."""
    import ctypes

    with open("/proc/self/maps", "rb") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip(b"\n") for line in maps if b"/libpocl" in line}
    libraries = (_quietly(ctypes.CDLL, os.fsdecode(path)) for path in paths)
    found = (_quietly(ctypes.c_uint64.in_dll, library, "pocl_debug_messages_filter") for library in libraries)
    return next((variable for variable in found if variable is not None), None)


class Messages:
    """A part of C code's error stream, read: what PoCL says in it, and what others printed.

    ``devices`` is how many devices PoCL says it builds for. ``wrote`` has the folder of each program that was not in
    its cache. ``clear`` is false if a function that looks programs up printed an unknown text: no hit is certain then.
    ``others`` is the rest of the stream, unchanged.
    """

    def __init__(self, said: bytes) -> None:
        self.devices = 0
        self.wrote: list[str] = []
        self.clear = True
        self.others, *messages = _HEAD.split(said)
        for index in range(0, len(messages), 3):
            function, level, rest = messages[index : index + 3]
            text = _TEXT.search(rest)
            if text is None:
                self.clear = self.clear and not _LOOKS_UP.search(function)
                self.others += (rest if level else rest.lstrip(b"\n")).partition(b"\n")[2]
                continue
            self.devices += text[1] is not None
            if text[2] is not None:
                self.wrote.append(os.fsdecode(text[2]))
            # PoCL prints a message in several parts, and another thread may have printed between them.
            self.others += rest[: text.start()] + rest[text.end() :]
