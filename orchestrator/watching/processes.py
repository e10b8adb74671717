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
from pathlib import Path
from typing import Final

from cachectl.layers.base.parts import Lookups
from cachectl.layers.host import processes

#: Indexes of fields of ``/proc/PID/stat`` from the state on, see proc(5).
_PARENT, _START_OF_STACK = 1, 25
#: Seconds between looks: importing one of the libraries alone takes three times as long. Then how many times the
#: duration of a look, so that looking takes at most a tenth of one processor.
_SECONDS_BETWEEN: Final = 0.05
_TIMES: Final = 9


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
        #: The parent, the command and the used layers of each program of the run: by process id and the address where
        #: its stack begins, because a process may execute another program, which gets another stack. A fork keeps it.
        self._programs: dict[tuple[int, int], tuple[int, str, set[str]]] = {}
        #: The latest stack of each process.
        self._stacks: dict[int, int] = {}
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
            for pid in processes.children_of(parent):
                waiting.append(pid)
                run.add(pid)
                self._note(pid, parent)
        with suppress(OSError):
            for name in os.listdir("/proc"):
                if name.isdecimal() and int(name) not in run:
                    uses = _uses(int(name), self._by_files)
                    for layer in uses if uses and not self._is_of_run(int(name)) else ():
                        self.strangers.setdefault(layer, set()).add(_command(int(name)))

    def unwatched(self) -> dict[str, set[str]]:
        """Return the commands of the run that used caches and were not watched, each with the layers."""
        unwatched: dict[str, set[str]] = {}
        for (pid, stack), (_, command, uses) in self._programs.items():
            if uses and not self._is_watched(pid, stack):
                unwatched.setdefault(command, set()).update(uses)
        return unwatched

    def _note(self, pid: int, parent: int) -> None:
        command, fields = _command(pid), processes.stat_fields(pid)
        # One that has ended, or is a zombie, uses nothing.
        if command and fields[:1] not in ([], [b"Z"]):
            stack = self._stacks[pid] = int(fields[_START_OF_STACK])
            _, _, uses = self._programs.setdefault((pid, stack), (parent, command, set()))
            if not self._is_watched(pid, stack):
                uses |= _uses(pid, self._observed)

    def _is_watched(self, pid: int, stack: int) -> bool:
        """Return whether the observer watches a process; a fork of a watched process is watched too."""
        if (self._folder / f"{pid}.events").exists():
            return True
        parent, _, _ = self._programs[pid, stack]
        return self._stacks.get(parent) == stack and self._is_watched(parent, stack)

    def _is_of_run(self, pid: int) -> bool:
        """Return whether a process, or one above it, was started with the trace's variable, or by this process."""
        if (self._folder / f"{pid}.events").exists():
            return True
        mark = os.fsencode(self._folder)
        while pid > 1:
            # Some programs clear the variables of those that they start, and those of other users are not shown.
            if pid == os.getpid() or mark in (processes.read(pid, "environ") or b""):
                return True
            if not (fields := processes.stat_fields(pid)):
                # It has ended, and shows no longer who started it.
                return True
            pid = int(fields[_PARENT])
        return False


def _command(pid: int) -> str:
    return os.fsdecode((processes.read(pid, "cmdline") or b"").rstrip(b"\0").replace(b"\0", b" "))


def _uses(pid: int, lookups: Mapping[str, Lookups]) -> set[str]:
    """Return the layers whose files a process, which may end at any moment, has mapped or opened."""
    mapped = os.fsdecode(processes.read(pid, "maps") or b"")
    opened = ""
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd") if any(part.opened for part in lookups.values()) else ():
            with suppress(OSError):
                opened += os.readlink(f"/proc/{pid}/fd/{number}") + "\n"
    return {
        name
        for name, part in lookups.items()
        if any(sign in mapped for sign in part.mapped) or any(sign in opened for sign in part.opened)
    }
