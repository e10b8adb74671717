"""The programs of a run: the events that they recorded, and what processes show from outside.

The traced program can write to the folder of events too: only plain files are read, up to a limit and without blocking,
and a line counts only if it has the fields of an event, each of its type. Unread files are named, and the numbers of
the trace are then lower bounds.

A Python that is started with ``-I`` or a cleared environment does not load the observer, and other programs never do.
Linux shows such processes; on other systems nothing is seen and nothing is claimed. Processes of other users show
nothing either.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cachectl.layers.base import processes
from cachectl.layers.base.documents import parse_json
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import PARSE_ERRORS
from cachectl.layers.core.parts import Lookups
from cachectl.layers.disk.plain import open_plain

#: Limit on the bytes read of all processes together: some 400,000 events.
_MOST = 128 << 20
#: Limit on the bytes passed on from one process's error stream.
_MOST_MESSAGES = 16 << 20
_LARGEST_NUMBER = 1 << 62

#: The variable with the folder of events of programs that build portably, without PyOpenCL's folder.
PORTABLE = "CACHECTL_PORTABLE"

Event = dict[str, Any]
_WHEN = ("start", "end", "thread")
#: The events of a process that uses caches.
_WORK = ("hit", "miss", "store", "build")
#: The fields that every event of a kind has. Other fields may be missing, or unknown (null).
_FIELDS: Mapping[str, Sequence[str]] = {
    "started": ("program", "host"),
    "environment": ("variables",),
    "ended": (),
    "failed": ("library",),
    "begun": ("kind",),
    **dict.fromkeys(("hit", "miss", "store"), ("layer", *_WHEN)),
    "build": ("layer", "seconds", "failed", "heard", "compiles", *_WHEN),
    "span": ("stage", "name", *_WHEN),
    "messages": ("layer", "wrote", "upto"),
    "source": ("source", "text"),
    "portable": ("kernels", "kept", *_WHEN),
    "raised": ("layer", "dictionary", "key", "file", "error", *_WHEN),
}
#: The fields that are used, each with a value of its form: a list or an object holds values of one form, a tuple one
#: value of each.
_FORMS: Mapping[str, object] = {
    **dict.fromkeys(("event", "error", "kind", "host", "library", "layer", "name", "stage", "dictionary", "file"), ""),
    **dict.fromkeys(
        ("key", "source", "text", "options", "platform", "version", "driver", "binary", "python", "cwd", "cache_dir"),
        "",
    ),
    "kept": "",
    **dict.fromkeys(("pid", "start", "end", "thread", "upto", "bytes", "rank", "lookups"), 0),
    **dict.fromkeys(("at", "seconds"), 0.0),
    **dict.fromkeys(("failed", "heard", "compiled", "collision", "forked"), False),
    **{name: [""] for name in ("program", "paths", "wrote", "kernels", "devices")},
    "compiles": [(0, 0)],
    "variables": {"": ""},
}
#: Indexes of fields of ``/proc/PID/stat`` from the state on, see proc(5).
_PARENT, _START_OF_STACK = 1, 25
#: Seconds between looks: importing one of the libraries alone takes three times as long. Then how many times the
#: duration of a look, so that looking takes at most a tenth of one processor.
_SECONDS_BETWEEN = 0.05
_TIMES = 9


# ---------------------------------------------------------------------- events


def read_events(folder: Path) -> tuple[list[Event], list[str]]:
    """Return the events of every process, one after the other, and a line for each file that could not be read.

    Nothing in the folder makes this raise or wait.
    """
    events: list[Event] = []
    unread: list[str] = []
    left = _MOST
    for path in _files(folder, "events"):
        try:
            data, whole = _read(path, 0, left)
        except OSError as error:
            unread.append(f"{path.name}: {error.strerror}")
            continue
        left -= len(data)
        # An incomplete last line was cut here, or while it was written.
        *lines, rest = data.split(b"\n")
        valid = [event for event in map(_event, lines) if event is not None]
        events += valid
        if not whole:
            unread.append(f"{path.name}: over the limit on the size of a trace")
        elif rest or len(valid) < len(lines):
            unread.append(f"{path.name}: lines that are no events")
    return events, unread


def environments(events: Iterable[Event], environment: Environment, names: Iterable[str]) -> dict[int, Environment]:
    """Return the environments of the processes that looked something up or built, as drivers have read them.

    That is when a driver was first asked for its devices, else at the first such work. ``environment`` is that of the
    command, from which each differs in its working folder and in the variables of these ``names``.
    """
    current: dict[int, Event] = {}
    read: dict[int, Event] = {}
    working: set[int] = set()
    for event in events:
        process = event["pid"]
        if event["event"] in ("started", "environment") and event.get("variables") is not None:
            current[process] = event
        elif process in current and (event["event"] in _WORK or event.get("stage") == "driver"):
            read.setdefault(process, current[process])
            working |= {process} if event["event"] in _WORK else set()
    unset, views = dict.fromkeys(names), dict[int, Environment]()
    for process in sorted(working):
        variables, folder = read[process]["variables"], read[process].get("cwd") or str(environment.cwd)
        views[process] = environment.with_variables({**unset, **variables})._replace(cwd=Path(folder))
    return views


def messages_after(folder: Path, events: Sequence[Event]) -> Iterator[bytes]:
    """Yield the end of each process's messages: those after the last event that accounts for them."""
    for path in _files(folder, "messages"):
        said = (event for event in events if event["event"] == "messages" and str(event["pid"]) == path.stem)
        with suppress(OSError):
            yield _read(path, max((event["upto"] for event in said), default=0), _MOST_MESSAGES)[0]


def _files(folder: Path, kind: str) -> list[Path]:
    with suppress(OSError):
        return [folder / name for name in sorted(os.listdir(folder)) if re.fullmatch(rf"[0-9]{{1,20}}\.{kind}", name)]
    return []


def _read(path: Path, start: int, most: int) -> tuple[bytes, bool]:
    """Return a part of a plain file, and whether it reaches the end. Raises :class:`OSError`."""
    with os.fdopen(open_plain(path), "rb") as file:
        file.seek(start)
        return file.read(most), not file.read(1)


def _event(line: bytes) -> Event | None:
    """Return an event in which every field is valid; ``None`` if the line holds none."""
    try:
        event: Event = parse_json(line)
        needed = ("pid", *_FIELDS[event["event"]])
    except PARSE_ERRORS:
        return None
    if any(event.get(name) is None for name in needed):
        return None
    used = ((value, _FORMS[name]) for name, value in event.items() if value is not None and name in _FORMS)
    return event if all(_fits(value, form) for value, form in used) else None


def _fits(value: Any, form: Any) -> bool:  # noqa: ANN401 - JSON
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(_fits, value, form))
    if isinstance(form, dict):
        return isinstance(value, dict) and all(_fits(text, "") for pair in value.items() for text in pair)
    if type(form) in (int, float):
        return type(value) in (int, type(form)) and 0 <= value <= _LARGEST_NUMBER
    return type(value) is type(form) and "\0" not in str(value)


# ---------------------------------------------------------------------- processes


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
    run; they are looked for in each look, or ``on_demand``, when :meth:`hurry` is called.
    """

    def __init__(
        self,
        folder: Path | None,
        observed: Mapping[str, Lookups],
        by_files: Mapping[str, Lookups],
        *,
        on_demand: bool = False,
    ) -> None:
        self._folder = folder
        self._observed = observed
        self._by_files = by_files
        self._on_demand = on_demand
        #: By process id and the address where its stack begins, because a process may execute another program, which
        #: gets another stack. A fork keeps it.
        self.programs: dict[tuple[int, bytes], Program] = {}
        #: The latest stack of each process.
        self._stacks: dict[int, bytes] = {}
        self._own_stack = processes.stat_fields(os.getpid())[_START_OF_STACK:][:1]
        #: Children that were started before the run are not of it.
        self._earlier = processes.children_of(os.getpid())
        self.strangers: dict[int, Program] = {}
        #: Processes of the run that did not show what they had mapped.
        self.hidden: set[int] = set()
        #: The longest time between looks in seconds; infinite if no thread could look.
        self.longest = 0.0
        self._hurry = threading.Event()
        #: When the programs that are not of the run are looked at again, by the monotonic clock.
        self._next = 0.0

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
        while True:
            self._hurry.wait(max(_SECONDS_BETWEEN, _TIMES * took))
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
        looks_at_others = begun >= self._next and (self._hurry.is_set() or not self._on_demand)
        self._hurry.clear()
        run = {os.getpid()}
        waiting = [os.getpid()]
        while waiting:
            parent = waiting.pop()
            for pid in processes.children_of(parent) - self._earlier:
                waiting.append(pid)
                run.add(pid)
                self._note(pid, parent)
        for pid in {*numbers()} - run if looks_at_others else ():
            uses = _uses(pid, self._by_files)
            if uses and not self._is_of_run(pid):
                program = Program(0, processes.process_names((pid,)), processes.first_variables(pid) or {}, set())
                self.strangers.setdefault(pid, program).uses.update(uses)
        if looks_at_others and self._on_demand:
            self._next = time.monotonic() + _TIMES * (time.monotonic() - begun)

    def unwatched(self) -> dict[str, set[str]]:
        """Return the commands of the run that used caches and were not watched, each with the layers."""
        unwatched: dict[str, set[str]] = {}
        for (pid, stack), program in self.programs.items():
            if program.uses and not self._is_watched(pid, stack):
                unwatched.setdefault(program.command, set()).update(program.uses)
        return unwatched

    def _note(self, pid: int, parent: int) -> None:
        command, fields = _command(pid), processes.stat_fields(pid)
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


def _command(pid: int) -> str:
    return os.fsdecode((processes.read(pid, "cmdline") or b"").rstrip(b"\0").replace(b"\0", b" "))


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
