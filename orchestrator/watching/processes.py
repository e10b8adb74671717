"""The processes that may use a cache while a run lasts, seen from outside: those of the run, and other programs.

A Python that is started with ``-I`` or a cleared environment does not load the observer, and other programs never do.
Linux shows such processes; on other systems nothing is seen and nothing is claimed. Processes of other users show
nothing either.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachectl.layers.base.parts import Lookups

_PROC: Final = Path("/proc")
#: Indexes of fields of ``/proc/PID/stat`` after the name, see proc(5).
_PARENT, _START_OF_STACK = 1, 25
#: Seconds between looks: importing one of the libraries alone takes three times as long. Then how many times the
#: duration of a look, so that looking takes at most a tenth of one processor.
_SECONDS_BETWEEN: Final = 0.05
_TIMES: Final = 9


@dataclass
class _Program:
    """One program in a process of the run: its command, its parent, and the caches that it was seen to use.

    ``stack`` is the address where its stack begins: a fork keeps it, and a new program gets another one.
    """

    pid: int
    parent: int
    stack: int
    command: str
    uses: set[str] = field(default_factory=set)


class Processes:
    """Processes that use caches: :meth:`look` records those that are alive.

    ``folder`` is that of the run's events; ``lookups`` of layers say which files a process has mapped or opened if it
    uses the cache. ``strangers`` maps layers to the commands of programs that are not of the run.
    """

    def __init__(self, folder: Path, lookups: Mapping[str, Lookups]) -> None:
        self._folder = folder
        #: Lookups that count in the process itself, and those that show by files, whoever makes them.
        self._observed = {name: part for name, part in lookups.items() if part.files is None}
        self._by_files = {name: part for name, part in lookups.items() if part.files is not None}
        #: By process id and stack, because a process may execute another program.
        self._seen: dict[tuple[int, int], _Program] = {}
        self._latest: dict[int, _Program] = {}
        self.strangers: dict[str, set[str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the beginning of the block, repeatedly while it runs, and at its end."""
        ended = threading.Event()
        self.look()
        thread = threading.Thread(target=self._look_on, args=(ended,), name="cachectl-processes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.look()

    def _look_on(self, ended: threading.Event) -> None:
        took = 0.0
        while not ended.wait(max(_SECONDS_BETWEEN, _TIMES * took)):
            begun = time.monotonic()
            self.look()
            took = time.monotonic() - begun

    def look(self) -> None:
        """Record the processes that are alive now; one of the run that the observer watches is not examined."""
        run = {os.getpid()}
        waiting = [os.getpid()]
        while waiting:
            parent = waiting.pop()
            for pid in _children(parent):
                waiting.append(pid)
                run.add(pid)
                with suppress(OSError):
                    self._note(pid, parent)
        with suppress(OSError):
            for name in os.listdir(_PROC):
                if name.isdecimal() and int(name) not in run:
                    with suppress(OSError):
                        self._note_stranger(int(name))

    def unwatched(self) -> dict[str, set[str]]:
        """Return the commands of the run that used caches and were not watched, each with the layers."""
        uses: dict[str, set[str]] = {}
        for program in self._seen.values():
            if program.uses and not self._is_watched(program):
                uses.setdefault(program.command, set()).update(program.uses)
        return uses

    def _note(self, pid: int, parent: int) -> None:
        command, fields = _command(pid), _stat(pid)
        if not command or fields[0] == b"Z":
            # It has ended.
            return
        stack = int(fields[_START_OF_STACK])
        program = self._seen.setdefault((pid, stack), _Program(pid, parent, stack, command))
        self._latest[pid] = program
        if not self._is_watched(program):
            program.uses |= _uses(pid, self._observed)

    def _note_stranger(self, pid: int) -> None:
        uses = _uses(pid, self._by_files)
        if uses and not self._is_of_run(pid):
            for layer in uses:
                self.strangers.setdefault(layer, set()).add(_command(pid))

    def _is_watched(self, program: _Program) -> bool:
        """Return whether the observer watches a process; a fork of a watched process is watched too."""
        if (self._folder / f"{program.pid}.events").exists():
            return True
        parent = self._latest.get(program.parent)
        return parent is not None and parent.stack == program.stack and self._is_watched(parent)

    def _is_of_run(self, pid: int) -> bool:
        """Return whether a process, or one above it, was started with the trace's variable, or by this process."""
        if (self._folder / f"{pid}.events").exists():
            return True
        mark = os.fsencode(self._folder)
        while pid > 1:
            # Some programs clear the variables of those that they start, and those of other users are not shown.
            with suppress(OSError):
                if pid == os.getpid() or mark in (_PROC / f"{pid}/environ").read_bytes():
                    return True
            pid = int(_stat(pid)[_PARENT])
        return False


def _children(parent: int) -> Iterator[int]:
    tasks = _PROC / f"{parent}/task"
    # It may end at any moment.
    with suppress(OSError):
        for task in os.listdir(tasks):
            with suppress(OSError):
                yield from map(int, (tasks / task / "children").read_bytes().split())


def _command(pid: int) -> str:
    return os.fsdecode((_PROC / f"{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" "))


def _stat(pid: int) -> list[bytes]:
    return (_PROC / f"{pid}/stat").read_bytes().rpartition(b") ")[2].split()


def _uses(pid: int, lookups: Mapping[str, Lookups]) -> set[str]:
    used = os.fsdecode((_PROC / f"{pid}/maps").read_bytes())
    uses = {layer for layer, part in lookups.items() if any(sign in used for sign in part.mapped)}
    opened = ""
    for number in os.listdir(_PROC / f"{pid}/fd") if any(part.opened for part in lookups.values()) else ():
        with suppress(OSError):
            opened += os.readlink(_PROC / f"{pid}/fd/{number}") + "\n"
    return uses | {layer for layer, part in lookups.items() if any(sign in opened for sign in part.opened)}
