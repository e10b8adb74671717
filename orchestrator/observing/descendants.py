"""The processes that a run starts, seen from outside while it runs, and the caches that they use.

A Python that is started with ``-I`` or a cleared environment does not load the observer, and other programs never do.
Linux shows such processes; on other systems nothing is seen and nothing is claimed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
#: Indexes of fields of ``/proc/PID/stat`` after the name, see proc(5).
_START_OF_STACK: Final = 25
#: Seconds between looks: importing one of the libraries alone takes three times as long.
_SECONDS_BETWEEN: Final = 0.05


@dataclass
class Descendant:
    """One program in a process: its command, its parent's process id, and the caches that it was seen to use.

    ``stack`` is the address where its stack begins: a fork keeps it, and a new program gets another one.
    """

    pid: int
    parent: int
    stack: int
    command: str
    uses: set[str]


class Descendants:
    """The descendants of this process: :meth:`look` records those that are alive.

    ``watched`` is the folder of the events. ``mapped`` and ``opened`` are parts of paths of files that a process has
    mapped or opened if it uses a cache, with the names of the layers.
    """

    def __init__(
        self,
        watched: Path,
        mapped: Iterable[tuple[str, str]] = (),
        opened: Iterable[tuple[str, str]] = (),
        *,
        processes: Path = _PROC,
    ) -> None:
        self._watched = watched
        self._mapped = [(part.encode(), layer) for part, layer in mapped]
        self._opened = tuple(opened)
        self._processes = processes
        #: By process id and stack, because a process may execute another program.
        self._seen: dict[tuple[int, int], Descendant] = {}
        self._latest: dict[int, Descendant] = {}

    def look(self) -> None:
        """Record the processes that are alive now; one that the observer watches is not examined."""
        waiting = [os.getpid()]
        while waiting:
            parent = waiting.pop()
            for pid in self._children(parent):
                waiting.append(pid)
                with suppress(OSError):
                    self._note(pid, parent)

    def unwatched(self) -> tuple[Descendant, ...]:
        """Return the processes that used a cache and were not watched."""
        return tuple(one for one in self._seen.values() if one.uses and not self._is_watched(one))

    def _children(self, parent: int) -> Iterator[int]:
        tasks = self._processes / str(parent) / "task"
        with suppress(OSError):
            for task in os.listdir(tasks):
                with suppress(OSError):
                    yield from map(int, (tasks / task / "children").read_bytes().split())

    def _note(self, pid: int, parent: int) -> None:
        words = (self._processes / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
        fields = (self._processes / str(pid) / "stat").read_bytes().rpartition(b") ")[2].split()
        if not words or fields[0] == b"Z":
            # It has ended.
            return
        stack = int(fields[_START_OF_STACK])
        if (pid, stack) not in self._seen:
            command = " ".join(os.fsdecode(word) for word in words)
            self._seen[pid, stack] = Descendant(pid, parent, stack, command, set())
        one = self._latest[pid] = self._seen[pid, stack]
        if not self._is_watched(one):
            one.uses |= self._uses(pid)

    def _is_watched(self, one: Descendant) -> bool:
        """Return whether the observer watches a process; a fork of a watched process is watched too."""
        if (self._watched / f"{one.pid}.events").exists():
            return True
        parent = self._latest.get(one.parent)
        return parent is not None and parent.stack == one.stack and self._is_watched(parent)

    def _uses(self, pid: int) -> set[str]:
        maps = (self._processes / str(pid) / "maps").read_bytes()
        uses = {layer for part, layer in self._mapped if part in maps}
        folder = self._processes / str(pid) / "fd"
        for number in os.listdir(folder):
            with suppress(OSError):
                path = os.readlink(folder / number)
                uses |= {layer for part, layer in self._opened if part in path}
        return uses


@contextmanager
def looked_after(descendants: Descendants) -> Iterator[None]:
    """Look repeatedly while the block runs."""
    ended = threading.Event()

    def look_on() -> None:
        while not ended.wait(_SECONDS_BETWEEN):
            descendants.look()

    looking = threading.Thread(target=look_on, name="descendants", daemon=True)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
