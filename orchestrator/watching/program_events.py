"""What the Pythons of a run noted: each line of their files is read once, into a value of its kind.

:mod:`cachectl.layers.inside.observer` writes the lines. The traced program can write to the folder too: only plain
files are read, up to a limit and without blocking, and a line counts only if it has the fields of its kind, each of its
type. Unread files are named, and the numbers of the trace are then lower bounds.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from cachectl.layers.base.documents import parse_json
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import PARSE_ERRORS
from cachectl.layers.core.from_json import read_fact
from cachectl.layers.disk.plain import open_plain

#: Limit on the bytes read of all processes together: some 400,000 events.
_MOST = 128 << 20
#: Limit on the bytes passed on from one process's error stream.
_MOST_MESSAGES = 16 << 20

#: The variable with the folder of events of programs that build portably, without PyOpenCL's folder.
PORTABLE = "CACHECTL_PORTABLE"


# A field without a default is required. The fields of an interval, and of what a build is made from, stand in the line
# of the event. ``variables`` are those that layers declare.


class Interval(NamedTuple):
    """When a thread worked on something, in monotonic nanoseconds."""

    start: int
    end: int
    thread: int

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return (self.end - self.start) / 1e9


class ProcessStart(NamedTuple):
    """A process was watched from here on; one that was ``forked`` from a watched one executed no program itself."""

    pid: int
    program: tuple[str, ...]
    host: str
    variables: Mapping[str, str] = {}
    cwd: str = ""
    python: str = ""
    #: The absolute paths of ``sys.path``.
    paths: tuple[str, ...] = ()
    rank: int | None = None
    forked: bool = False


class ProcessChange(NamedTuple):
    """A process had set variables, or changed its working directory, when it next used a cache."""

    pid: int
    variables: Mapping[str, str]
    cwd: str = ""


class ProcessEnd(NamedTuple):
    """A process ended through Python's last steps."""

    pid: int


class Misfit(NamedTuple):
    """A library is not what its watcher expects, and was left alone."""

    pid: int
    library: str
    error: str = ""


class CacheLookup(NamedTuple):
    """A lookup, whose ``outcome`` is hit or miss; in a ``collision`` the hash was that of another key.

    ``layer`` is what the watcher noted: that of pytools names the dictionary.
    """

    pid: int
    outcome: str
    layer: str
    when: Interval
    key: str = ""
    dictionary: str = ""
    kernels: tuple[str, ...] = ()
    collision: bool = False


class CacheStore(NamedTuple):
    """An entry was stored, of so many ``bytes`` if they are known."""

    pid: int
    layer: str
    when: Interval
    key: str = ""
    dictionary: str = ""
    kernels: tuple[str, ...] = ()
    bytes: int | None = None


class FailedUse(NamedTuple):
    """A lookup or store, as ``use`` says, raised an exception of class ``error``, with the module if it has one.

    ``file`` is the name of the dictionary's database.
    """

    pid: int
    layer: str
    dictionary: str
    key: str
    file: str
    error: str
    use: str


class BuildStart(NamedTuple):
    """A build began, for an OpenCL platform, "" if that is unknown."""

    pid: int
    platform: str = ""


class BuildInputs(NamedTuple):
    """What a build, or a link, is made from; ``cache_dir`` is the folder that it named for PyOpenCL's own cache."""

    kind: str = ""
    kernels: tuple[str, ...] = ()
    source: str = ""
    options: str = ""
    devices: tuple[str, ...] = ()
    platform: str = ""
    version: str = ""
    cache_dir: str = ""


class BuildEnd(NamedTuple):
    """A build, or a link, ended ``at`` a moment in epoch seconds: what was heard of its driver.

    ``binary`` is how PyOpenCL's own cache answered: hit or miss, "" if it was not asked. ``compiled`` is ``None`` if it
    is unknown whether the driver compiled; ``compiles`` are the intervals of the driver's part. ``by_files`` says that
    ``compiled`` is known from the files of entries.
    """

    pid: int
    layer: str
    failed: bool
    heard: bool
    compiles: tuple[tuple[int, int], ...]
    when: Interval
    inputs: BuildInputs
    at: float = 0.0
    driver: str = ""
    binary: str = ""
    compiled: bool | None = None
    by_files: bool = False

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the names of its kernels."""
        return self.inputs.kernels

    @property
    def began(self) -> float:
        """Return when it began, in epoch seconds."""
        return self.at - self.when.seconds

    @property
    def was_compiled(self) -> bool | None:
        """Return whether its driver compiled, which it does not if PyOpenCL had the binary; ``None`` if unknown."""
        return False if self.binary == "hit" else self.compiled

    @property
    def served_by(self) -> str | None:
        """Return the layer that had it; ``None`` if none had, or that is unknown."""
        if self.was_compiled is not False or self.failed:
            return None
        return self.layer if self.binary == "hit" else self.driver or None

    @property
    def is_silent(self) -> bool:
        """Return whether the driver was asked, and said nothing."""
        return not self.driver and self.binary != "hit"


class StageSpan(NamedTuple):
    """A stretch of work of a stage of a start, such as an import or a launch."""

    pid: int
    stage: str
    name: str
    when: Interval
    kernels: tuple[str, ...] = ()


class DriverMessages(NamedTuple):
    """A driver said in a build which paths it ``wrote``, and how many ``lookups`` it made, ``None`` if that is unknown.

    ``upto`` are the bytes of the process's error stream that are accounted for.
    """

    pid: int
    layer: str
    wrote: tuple[str, ...]
    upto: int
    lookups: int | None = None


class SourceText(NamedTuple):
    """The text of a source, by its checksum."""

    pid: int
    source: str
    text: str


class PortableBuild(NamedTuple):
    """A build for which ``--portable`` was asked, which ended ``at`` a moment in epoch seconds.

    ``kept`` is what PyOpenCL's folder was kept for, or "".
    """

    pid: int
    kernels: tuple[str, ...]
    kept: str
    when: Interval
    at: float = 0.0


#: What says which variables a process has.
ProcessState = ProcessStart | ProcessChange
#: A use of a cache.
CacheUse = CacheLookup | CacheStore | BuildEnd
_OfProcess = ProcessState | ProcessEnd | Misfit
_OfBuild = BuildStart | SourceText | DriverMessages | PortableBuild
Event = _OfProcess | _OfBuild | CacheUse | FailedUse | StageSpan
_KINDS: Mapping[str, Callable[..., Event]] = {
    "started": ProcessStart,
    "environment": ProcessChange,
    "ended": ProcessEnd,
    "failed": Misfit,
    "hit": CacheLookup,
    "miss": CacheLookup,
    "store": CacheStore,
    "raised": FailedUse,
    "begun": BuildStart,
    "build": BuildEnd,
    "span": StageSpan,
    "messages": DriverMessages,
    "source": SourceText,
    "portable": PortableBuild,
}
_Kind = TypeVar("_Kind")


def read_events(folder: Path) -> tuple[list[Event], list[str]]:
    """Return the events of every process, one after the other, and a line for each file that could not be read.

    Nothing in the folder makes this raise or wait.
    """
    events: list[Event] = []
    unread: list[str] = []
    left = _MOST
    for path in _files(folder, "events"):
        try:
            data, is_complete = _read(path, 0, left)
        except OSError as error:
            unread.append(f"{path.name}: {error.strerror}")
            continue
        left -= len(data)
        # An incomplete last line was cut here, or while it was written.
        *lines, rest = data.split(b"\n")
        before = len(events)
        for line in lines:
            with suppress(*PARSE_ERRORS):
                fields = parse_json(line)
                event = read_fact(_KINDS[fields["event"]], {**fields, "outcome": fields["event"]})
                when: Interval | None = getattr(event, "when", None)
                # Otherwise seconds would be negative.
                if when is None or when.start <= when.end:
                    events.append(event)
        if not is_complete:
            unread.append(f"{path.name}: over the limit on the size of a trace")
        elif rest or len(events) - before < len(lines):
            unread.append(f"{path.name}: lines that are no events")
    return events, unread


def of_kind(events: Iterable[Event], kind: type[_Kind]) -> list[_Kind]:
    """Return the events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def cut_builds(events: Sequence[Event]) -> dict[int, set[str]]:
    """Return the processes in which a build began and did not end, each with the platforms for which it built."""
    started = of_kind(events, BuildStart)
    cut = Counter(build.pid for build in started) - Counter(build.pid for build in of_kind(events, BuildEnd))
    return {pid: {build.platform for build in started if build.pid == pid} for pid in cut}


def environments(events: Iterable[Event], environment: Environment, names: Iterable[str]) -> dict[int, Environment]:
    """Return the environments of the processes that looked something up or built, as drivers have read them.

    That is when a driver was first asked for its devices, else at the first such work. ``environment`` is that of the
    command, from which each differs in its working directory and in the variables of these ``names``.
    """
    current: dict[int, ProcessState] = {}
    read: dict[int, ProcessState] = {}
    working: set[int] = set()
    for event in events:
        if isinstance(event, ProcessState):
            current[event.pid] = event
        elif event.pid in current and (
            isinstance(event, CacheUse) or (isinstance(event, StageSpan) and event.stage == "driver")
        ):
            read.setdefault(event.pid, current[event.pid])
            if isinstance(event, CacheUse):
                working.add(event.pid)
    unset, views = dict.fromkeys(names), dict[int, Environment]()
    for process in sorted(working):
        variables, folder = read[process].variables, read[process].cwd or str(environment.cwd)
        views[process] = environment.with_variables({**unset, **variables})._replace(cwd=Path(folder))
    return views


def messages_after(folder: Path, events: Iterable[Event]) -> Iterator[bytes]:
    """Yield the end of each process's messages: those after the last event that accounts for them."""
    upto = {str(said.pid): said.upto for said in of_kind(events, DriverMessages)}
    for path in _files(folder, "messages"):
        with suppress(OSError):
            yield _read(path, upto.get(path.stem, 0), _MOST_MESSAGES)[0]


def _files(folder: Path, kind: str) -> list[Path]:
    with suppress(OSError):
        return [folder / name for name in sorted(os.listdir(folder)) if re.fullmatch(rf"[0-9]{{1,20}}\.{kind}", name)]
    return []


def _read(path: Path, start: int, most: int) -> tuple[bytes, bool]:
    """Return a part of a plain file, and whether it reaches the end. Raises :class:`OSError`."""
    with os.fdopen(open_plain(path), "rb") as file:
        file.seek(start)
        return file.read(most), not file.read(1)
