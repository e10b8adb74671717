"""Reads PoCL's messages about its cache during a build, inside the program that builds.

A trace copies this file next to its observer: it imports only the standard library, and runs on Python 3.8.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachectl.layers.inside.observer import Notes

#: The bit of PoCL's filter for messages of its compiler, ``POCL_DEBUG_FLAG_LLVM``.
_ABOUT_LLVM = 4
# PoCL colours its messages if descriptor 2 was a terminal when it set up its devices.
_COLOUR = r"(?:\x1b\[[0-9;]*m)"
_INDENT = rf"(?:{_COLOUR}{{1,2}} {_COLOUR})"
#: The start of a message: time, function and line, then level and category, which a killed process may omit.
_HEAD = re.compile(
    (
        rf"{_COLOUR}?\[\d{{4}}-\d\d-\d\d [0-9:.]+\] ?{_COLOUR}?P[Oo]CL[\w-]*: in fn ([^\n]*?) {_COLOUR}?at line \d+:"
        rf"(\s{{1,2}}{_COLOUR}?(?: \*\*\* \w+ \*\*\* )? \| +\w+ \| (?:{_INDENT}| )?)?"
    ).encode()
)
#: The known texts. The second group is the folder of a program that was not in the cache.
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
#: Functions that look programs up: if one prints another text, a hit cannot be distinguished from a miss.
_LOOKS_UP = re.compile(rb"compile_and_link_program|pocl_driver_\w+|pocl_llvm_(?:\w+_program|\w+_link_ir)")
#: The program may replace one of our files by a pipe or a link.
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


class Listener:
    """Switches PoCL's messages on during a build, and sends them to a file in the folder of the trace.

    During the build the ``stderr`` of C code is another stream; descriptor 2 does not change. Output of other C code is
    passed on after the build. Messages that the program or its user switched on are left alone, and not read.

    Source: ``lib/CL/pocl_debug.c`` (the filter), ``lib/CL/pocl_build.c`` (the messages).
    """

    def __init__(self, notes: Notes, layer: str) -> None:
        self.layer = layer
        self._notes = notes
        self._pid = 0
        self._path = ""
        #: The offset in the file at which the messages of the present builds begin.
        self._start = 0
        self._file: int | None = None
        self._own: int | None = None
        self._filters: list[ctypes.c_uint64] = []
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=functools.partial(notes.quietly, self._forked))

    def _begin(self) -> None:
        # A new lock: another thread may hold the old one during a fork.
        self._lock = threading.Lock()
        self._listening = False
        #: How many builds are running, and how many have ended and failed since none was.
        self._inside = self._ended = self._failed = 0

    def _forked(self) -> None:
        if self._listening and self._inside:
            self._turn_off()
        self._begin()

    def listen(self) -> bool:
        """Start to listen, unless another build does."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._ended = self._failed = 0
                self._listening = self._notes.quietly(self._turn_on) or False
            return True

    def heard(self, *, failed: bool) -> tuple[bool | None, bool]:
        """Stop listening to a build. Return whether PoCL compiled it, ``None`` if unknown, and whether PoCL was heard.

        If PoCL compiled one of several simultaneous builds, it is unknown which. When the last one has ended, messages
        are switched off and noted.
        """
        with self._lock:
            self._inside -= 1
            self._ended += 1
            self._failed += failed
            if not self._listening:
                return None, False
            is_last = not self._inside
            if is_last:
                self._notes.quietly(self._turn_off)
            output = self._new_output()
            rest_of_output, devices, wrote, clear = read_messages(output)
            # A hit prints no message, so it takes proof that PoCL was heard in each build.
            heard_all = clear and devices >= self._ended
            is_miss = bool(wrote) and is_last and self._ended == 1
            if is_last:
                # Unknown if builds failed while others ran.
                lookups = None
                if self._failed == self._ended:
                    # A failed build is not a hit, but may have stored a program for one of several devices.
                    lookups = len(wrote)
                elif not self._failed:
                    lookups = devices
                    # False if the program switched messages off, or this release words them differently.
                    self._listening = heard_all
                # A thread that holds our stream may still print; the next builds are read from here on.
                self._start += len(output)
                self._notes.add(event="messages", layer=self.layer, lookups=lookups, wrote=wrote, upto=self._start)
            listened = self._listening
        if is_last and rest_of_output:
            # Without the lock, because the reader may be slow.
            self._notes.quietly(os.write, 2, rest_of_output)
        return (is_miss if is_miss or (heard_all and not wrote) else None), listened

    def _turn_on(self) -> bool:
        self._filters = self._filters or _filters_of_pocl(self._notes)
        library = ctypes.CDLL(None)
        is_silent = self._filters and not any(variable.value for variable in self._filters)
        # Only in glibc the stream is a variable.
        if not is_silent or not hasattr(library, "gnu_get_libc_version"):
            return False
        # A program may close files that it did not open.
        if self._file is None or self._pid != os.getpid() or not self._is_ours(library):
            self._open(library)
        if self._file is None:
            return False
        stream = ctypes.c_void_p.in_dll(library, "stderr")
        self._own, stream.value = stream.value, self._file
        self._filter(_ABOUT_LLVM)
        return True

    def _turn_off(self) -> None:
        self._filter(0)
        library = ctypes.CDLL(None)
        library.fflush(ctypes.c_void_p(self._file))
        stream = ctypes.c_void_p.in_dll(library, "stderr")
        if stream.value == self._file:
            stream.value = self._own

    def _filter(self, messages: int) -> None:
        for variable in self._filters:
            variable.value = messages

    def _open(self, library: ctypes.CDLL) -> None:
        self._pid = os.getpid()
        self._path = os.path.join(self._notes.folder, f"{self._pid}.messages")
        # After ``exec`` the file of the previous program has the same name.
        self._start = os.path.getsize(self._path) if os.path.exists(self._path) else 0
        self._file = None
        library.fdopen.restype = ctypes.c_void_p
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | _NO_WAITING
        self._file = library.fdopen(os.open(self._path, flags, 0o600), b"ae")
        if self._file is not None:
            line_buffered = 1
            library.setvbuf(ctypes.c_void_p(self._file), None, line_buffered, ctypes.c_size_t(4096))

    def _is_ours(self, library: ctypes.CDLL) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(library.fileno(ctypes.c_void_p(self._file))), os.stat(self._path))
        return False

    def _new_output(self) -> bytes:
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._start)
            return file.read()
        return b""


def _filters_of_pocl(notes: Notes) -> list[ctypes.c_uint64]:
    """Return the message filter of each loaded PoCL: of the system's and a wheel's, either may build a program."""
    with open("/proc/self/maps", "rb") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip(b"\n") for line in maps if b"/libpocl" in line}
    libraries = [notes.quietly(ctypes.CDLL, os.fsdecode(path)) for path in sorted(paths)]
    filters = [notes.quietly(ctypes.c_uint64.in_dll, library, "pocl_debug_messages_filter") for library in libraries]
    # Libraries of devices show the filter of the PoCL to which they belong.
    return list({ctypes.addressof(variable): variable for variable in filters if variable is not None}.values())


def read_messages(output: bytes) -> tuple[bytes, int, list[str], bool]:
    """Read a part of C code's error stream. Return the output of others, and PoCL's messages as three values.

    These are the number of devices it builds for, the folder of each program that was not in its cache, and whether
    hits are certain: not if a function that looks programs up printed an unknown text.
    """
    devices, wrote, clear = 0, [], True
    rest_of_output, *messages = _HEAD.split(output)
    for index in range(0, len(messages), 3):
        function, level, rest = messages[index : index + 3]
        text = _TEXT.search(rest)
        if text is None:
            clear = clear and not _LOOKS_UP.search(function)
            rest_of_output += (rest if level else rest.lstrip(b"\n")).partition(b"\n")[2]
            continue
        devices += text[1] is not None
        if text[2] is not None:
            wrote.append(os.fsdecode(text[2]))
        # PoCL prints a message in several parts, and another thread may have printed between them.
        rest_of_output += rest[: text.start()] + rest[text.end() :]
    return rest_of_output, devices, wrote, clear
