"""The processes of a run, and those of others that use caches meanwhile, as they show from outside.

A Python that is started with ``-I`` or a cleared environment does not load the observer, and other programs never do.
Linux shows such processes; on other systems nothing is seen and nothing is claimed. Processes of other users show
nothing either.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base import processes
from cachectl.layers.core.parts import Lookups

#: Indexes of fields of ``/proc/PID/stat`` from the state on, see proc(5).
_PARENT, _START_OF_STACK = 1, 25
#: Seconds between looks: importing one of the libraries alone takes three times as long. Then how many times the
#: duration of a look, so that looking takes at most a tenth of one processor.
_SECONDS_BETWEEN = 0.05
_TIMES = 9


class Program(NamedTuple):
    """A program that a process executed: its parent, command, and the variables that it was given.

    ``uses`` grows: the layers whose files it has been seen to map or open.
    """

    parent: int
    command: str
    variables: Mapping[str, str]
    uses: set[str]


class Processes:
    """Processes that use caches: :meth:`look` records those that are alive.

    ``folder`` is that of the run's events, ``None`` if no observer runs. ``observed`` are the lookups of layers that
    count in the process itself, by which programs of the run are known that used them unseen; ``by_files`` those that
    are seen by their files, by any program. ``strangers`` has by process id programs that use these and are not of the
    run; they are looked for in each look, or ``on_demand``, when :meth:`hurry` is called. ``lockers`` names those that
    locked a file in one of the folders ``locked``.
    """

    def __init__(
        self,
        folder: Path | None,
        observed: Mapping[str, Lookups],
        by_files: Mapping[str, Lookups],
        *,
        on_demand: bool = False,
        locked: Iterable[Path] = (),
    ) -> None:
        self._folder = folder
        self._observed = observed
        self._by_files = by_files
        self._locked = tuple(locked)
        #: By process id and the address where its stack begins, because a process may execute another program, which
        #: gets another stack. A fork keeps it.
        self.programs: dict[tuple[int, bytes], Program] = {}
        #: The latest stack of each process.
        self._stacks: dict[int, bytes] = {}
        #: Children that were started before the run are not of it.
        self._earlier = processes.children_of(os.getpid())
        self.strangers: dict[int, Program] = {}
        self.lockers: dict[int, str] = {}
        #: Processes of the run that did not show what they had mapped.
        self.hidden: set[int] = set()
        #: The longest time between looks in seconds; infinite if no thread could look.
        self.longest = 0.0
        self._hurry = threading.Event()
        #: When the programs that are not of the run can be looked at again, by the monotonic clock; ``None`` if always.
        self._next = 0.0 if on_demand else None

    @cached_property
    def _own_stack(self) -> list[bytes]:
        return processes.stat_fields(os.getpid())[_START_OF_STACK:][:1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the beginning of the block, repeatedly while it runs, and at its end."""
        ended = threading.Event()
        self.look()
        thread = threading.Thread(target=self._look_on, args=(ended,), name="cachectl-processes", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.longest = math.inf
        try:
            yield
        finally:
            ended.set()
            self._hurry.set()
            if self.longest < math.inf:
                thread.join()
            self.look()

    def hurry(self) -> None:
        """Look now, because a file of a cache was used."""
        self._hurry.set()

    def _look_on(self, ended: threading.Event) -> None:
        took, last = 0.0, time.monotonic()
        # Even in a hurry it looks at most half of the time.
        while not ended.wait(took):
            self._hurry.wait(max(_SECONDS_BETWEEN, _TIMES * took) - took)
            if ended.is_set():
                return
            begun = time.monotonic()
            self.longest = max(self.longest, begun - last)
            last = begun
            self.look()
            took = time.monotonic() - begun

    def look(self) -> None:
        """Record the processes that are alive now; one of the run that the observer watches is not examined."""
        begun = time.monotonic()
        looks_at_others = self._next is None or (begun >= self._next and self._hurry.is_set())
        self._hurry.clear()
        run = [os.getpid()]
        for parent in run:
            for pid in processes.children_of(parent) - self._earlier:
                run.append(pid)
                self._note(pid, parent)
        for pid in {*numbers()}.difference(run) if looks_at_others else ():
            uses = _uses(pid, self._by_files)
            if uses and not self._is_of_run(pid):
                fields = processes.stat_fields(pid)
                parent = int(fields[_PARENT]) if fields else 0
                program = Program(parent, processes.process_names((pid,)), processes.first_variables(pid) or {}, set())
                self.strangers.setdefault(pid, program).uses.update(uses)
        files = (file for folder in self._locked for file in folder.glob("*"))
        for pid in {*processes.lockers_of(files)}.difference(run, self.lockers) if self._locked else ():
            self.lockers[pid] = processes.process_names((pid,))
        if looks_at_others and self._next is not None:
            self._next = time.monotonic() + _TIMES * (time.monotonic() - begun)

    def unwatched(self) -> dict[str, set[str]]:
        """Return the commands of the run that used caches and were not watched, each with the layers."""
        unwatched: dict[str, set[str]] = {}
        for (pid, stack), program in self.programs.items():
            if program.uses and not self._is_watched(pid, stack):
                unwatched.setdefault(program.command, set()).update(program.uses)
        return unwatched

    def _note(self, pid: int, parent: int) -> None:
        words, fields = processes.read(pid, "cmdline") or b"", processes.stat_fields(pid)
        command = os.fsdecode(words.rstrip(b"\0").replace(b"\0", b" "))
        # One that has ended, or is a zombie, uses nothing.
        if not command or fields[:1] in ([], [b"Z"]):
            return
        stack = self._stacks[pid] = fields[_START_OF_STACK]
        if (pid, stack) not in self.programs:
            self.programs[pid, stack] = Program(parent, command, processes.first_variables(pid) or {}, set())
        if not self._is_watched(pid, stack):
            uses = _uses(pid, self._observed)
            self.programs[pid, stack].uses.update(uses or ())
            if uses is None and processes.stat_fields(pid)[:1] not in ([], [b"Z"]):
                self.hidden.add(pid)

    def _has_noted(self, pid: int) -> bool:
        return self._folder is not None and (self._folder / f"{pid}.events").exists()

    def _is_watched(self, pid: int, stack: bytes) -> bool:
        """Return whether the observer watches a process. A fork of a watched process, or of this one, is watched."""
        parent = self.programs[pid, stack].parent
        is_fork = [stack] == self._own_stack or (self._stacks.get(parent) == stack and self._is_watched(parent, stack))
        return is_fork or self._has_noted(pid)

    def _is_of_run(self, pid: int) -> bool:
        """Return whether a process, or one above it, was started with the trace's variable, or by this process."""
        mark, is_of_run = str(self._folder), self._has_noted(pid)
        while pid > 1 and not is_of_run and pid not in self._earlier:
            fields = processes.stat_fields(pid)
            # Some programs clear the variables of those that they start, and those of other users are not shown. One
            # that has ended shows no longer who started it.
            marked = mark in (processes.first_variables(pid) or {}).values()
            is_of_run = pid == os.getpid() or marked or not fields
            pid = int(fields[_PARENT]) if fields else 0
        return is_of_run


def numbers() -> list[int]:
    """Return the ids of the processes of this machine, as far as it shows them."""
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _uses(pid: int, lookups: Mapping[str, Lookups]) -> set[str] | None:
    """Return the layers whose files a process, which may end at any moment, has mapped or opened.

    ``None`` if it does not show them.
    """
    maps = processes.read(pid, "maps")
    mapped, opened = os.fsdecode(maps or b""), ""
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd") if any(part.opened for part in lookups.values()) else ():
            with suppress(OSError):
                opened += os.readlink(f"/proc/{pid}/fd/{number}") + "\n"
    used = {
        name
        for name, part in lookups.items()
        if any(sign in mapped for sign in part.mapped) or any(sign in opened for sign in part.opened)
    }
    return used or (None if maps is None else used)
