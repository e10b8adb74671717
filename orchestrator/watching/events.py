"""File events while a program runs, as the Linux kernel reports them (inotify), and what they show of caches.

The kernel reports each opening, writing and renaming in watched folders, by whichever process of this machine. It does
not say which process: :mod:`cachectl.watching.processes` looks for other programs that may have used a cache.

The library inotify_simple is not used: it searches for the C library with a compiler at each start, which takes longer
than many commands that are watched, and leaks a descriptor in Python before 3.11.4 if none is free. Source: inotify(7).
"""

from __future__ import annotations

import errno
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES
from cachectl.layers.base.facts import Root, Scope
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import EntryFiles
from cachectl.layers.disk.presence import nearest

# sys/inotify.h
ACCESS, MODIFY, ATTRIBUTES, CLOSE_WRITE, CLOSE, OPEN, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF = (
    1 << bit for bit in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
)
UNMOUNTED, _OVERFLOW, _MASK_ADD, FOLDER = 1 << 13, 1 << 14, 1 << 29, 1 << 30
ARRIVED: Final = CREATE | MOVED_TO
LEFT: Final = DELETE | MOVED_FROM
#: The events that show lookups and stores. Equal events in a row are reported once: the closing is between two openings
#: of a file, unless both are open at once.
_USES: Final = MODIFY | CLOSE_WRITE | CLOSE | OPEN | ARRIVED | LEFT
_REASONS: Final = {
    errno.ENOSPC: "more folders than the system lets one user watch (fs.inotify.max_user_watches)",
    errno.EMFILE: "too many open files, or too many programs that watch files (fs.inotify.max_user_instances)",
}
_HEAD: Final = struct.Struct("=iIII")
#: Bytes of events that are read at once.
_AT_ONCE: Final = 1 << 16
#: Seconds of work for which the last events are read: a program may cause them without end.
_LONGEST: Final = 1.0
LOST: Final = "file events came faster than they could be read"
_TOGETHER: Final = "an entry was open twice at once, and such openings may be reported as one"
_EARLY: Final = "an entry was stored in a new folder before that was watched, so that first hits of it may be missing"
#: How many folders above a place are watched, in case it is removed and made again.
_ABOVE: Final = 2
#: Bytes that are free on a file system that cannot take another entry.
_LITTLE: Final = 16 << 20
#: How many events of entries are recorded, so that memory stays bounded.
_MOST: Final = 1 << 20


class _Inotify:
    """The kernel's queue of events. Raises :class:`OSError` where there is none."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(errno.ENOSYS, "only Linux reports every file that is opened")
        import ctypes

        self._library: Any = ctypes.CDLL(None, use_errno=True)
        self._last_error = ctypes.get_errno
        self.number = self._checked(self._library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def watch(self, path: Path, mask: int) -> int:
        return self._checked(self._library.inotify_add_watch(self.number, os.fsencode(path), mask | _MASK_ADD))

    def _checked(self, result: int) -> int:
        if result < 0:
            number = self._last_error()
            raise OSError(number, os.strerror(number))
        return result

    def read(self) -> list[tuple[int, int, str]]:
        """Return the next events: number of the watch, what happened, name in the folder. Empty if none has come."""
        try:
            data = os.read(self.number, _AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return []
        events, at = [], 0
        while at + _HEAD.size <= len(data):
            watch, mask, _, length = _HEAD.unpack_from(data, at)
            name = data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
            at += _HEAD.size + length
            events.append((watch, mask, os.fsdecode(name)))
        return events


class FileEvents:
    """Paths under watch until :meth:`stop`. A thread passes each event to ``note``, in order: the path, and the mask.

    ``why_not`` is the reason why nothing can be watched here; ``None`` means that watching works.
    """

    def __init__(self, note: Callable[[Path, int], None]) -> None:
        self.why_not: str | None = None
        #: Whether events are missing, because they came too fast.
        self.lost = False
        self._lock = threading.RLock()
        self._note = note
        self._paths: dict[int, list[Path]] = {}
        self._queue: _Inotify | None = None
        try:
            self._start()
        except (OSError, RuntimeError) as error:
            # No descriptor is free, or no thread.
            self.why_not = _reason(error)

    def _start(self) -> None:
        with ExitStack() as opened:
            queue = _Inotify()
            opened.callback(os.close, queue.number)
            self._ending, self._end = os.pipe()
            opened.callback(os.close, self._ending)
            opened.callback(os.close, self._end)
            self._thread = threading.Thread(target=self._drain, args=(queue,), name="cachectl-events", daemon=True)
            self._thread.start()
            self._queue, self._opened = queue, opened.pop_all()

    def watch(self, path: Path, mask: int) -> str | None:
        """Watch a folder's files, or one file; return why that is not possible, or ``None``."""
        if self._queue is None:
            return self.why_not
        with self._lock:
            try:
                paths = self._paths.setdefault(self._queue.watch(path, mask), [])
            except OSError as error:
                return _reason(error)
            if path not in paths:
                paths.append(path)
            return None

    def stop(self) -> None:
        """Pass on the last events, and stop watching."""
        if self._queue is None:
            return
        os.write(self._end, b".")
        self._thread.join()
        begun = time.thread_time()
        while self._take(self._queue):
            if time.thread_time() - begun > _LONGEST:
                self.lost = True
                break
        self._queue = None
        self._opened.close()

    def _drain(self, queue: _Inotify) -> None:
        """Read events as they come, because the kernel queues a limited number."""
        poll = select.poll()
        poll.register(queue.number, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while all(descriptor != self._ending for descriptor, _ in poll.poll()):
            self._take(queue)

    def _take(self, queue: _Inotify) -> bool:
        with self._lock:
            events = queue.read()
            for watch, mask, name in events:
                self.lost = self.lost or bool(mask & _OVERFLOW)
                for path in self._paths.get(watch, ()):
                    self._note(path / name if name else path, mask)
            return bool(events)


def _reason(error: OSError | RuntimeError) -> str:
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, error.strerror or str(error))
    return str(error)


# ---------------------------------------------------------------------- one file


class Use(Enum):
    """One use of a file. A file that was written again right after it was read was perhaps found broken."""

    HIT = "hit"
    STORE = "store"
    BROKEN = "broken"


@dataclass
class History:
    """The uses of one file, in order: it is stored by its creation, by writing to it, or by renaming another to it.

    ``together`` says that it was open twice at once; ``early`` that it was stored, and perhaps read, before its new
    folder was watched.
    """

    #: Each with when it was seen (epoch seconds).
    uses: list[tuple[float, Use]] = field(default_factory=list)
    together: bool = False
    early: bool = False
    #: How often it is open now; ``None`` if its openings began before its events.
    _open: int | None = 0
    #: The next opening is that of the program that creates the file.
    _creating: bool = False
    _writing: bool = False
    _dirty: bool = False
    _gone: bool = False
    #: The file was found when its new folder was listed; its creation may be reported again.
    _listed: bool = False

    def listed(self, at: float) -> None:
        """Record a file that was in a new folder already: its events are missing, or the last ones will come."""
        if not self.uses or self._gone:
            self._appear(at)
            self._listed = self._writing = self.early = True

    def record(self, mask: int, at: float) -> None:
        """Record an event of the file."""
        if mask & CREATE:
            self._appear(at)
            self._creating = self._writing = True
        elif mask & MOVED_TO:
            self._appear(at)
            self._settle()
        elif mask & OPEN:
            self._opened(at)
        elif mask & MODIFY:
            self._dirty = True
        elif mask & (CLOSE | CLOSE_WRITE):
            self.together = self.together or self._open == 0
            self._open = max(0, (self._open or 0) - 1)
            if mask & CLOSE_WRITE:
                self._written()
        elif mask & LEFT:
            self._settle()
            self._gone = True

    def _appear(self, at: float) -> None:
        if not self._listed:
            self.uses.append((at, Use.STORE))
        self._gone = False
        self._open = None

    def _opened(self, at: float) -> None:
        self.together = self.together or bool(self._open)
        self._open = (self._open or 0) + 1
        if self._creating:
            self._creating = False
        else:
            self.uses.append((at, Use.HIT))
            self._dirty = False

    def _written(self) -> None:
        """Record that a program which could write to it has closed it."""
        self.early = self.early and not self._listed
        if self._dirty and self.uses and self.uses[-1][1] is not Use.STORE:
            if self._listed:
                # It was opened by the program that made it.
                self.uses.pop()
            elif not self._writing:
                self.uses[-1] = self.uses[-1][0], Use.STORE
                if self.uses[-2:-1] and self.uses[-2][1] is Use.HIT:
                    self.uses[-2] = self.uses[-2][0], Use.BROKEN
        self._settle()

    def _settle(self) -> None:
        self._creating = self._writing = self._dirty = self._listed = False


# ---------------------------------------------------------------------- entries


@dataclass(frozen=True, slots=True)
class EntryUse:
    """The uses of one entry in a run: when it was hit, and when it was stored (epoch seconds)."""

    root: Root
    key: str
    hits: tuple[float, ...]
    stores: tuple[float, ...]


@dataclass
class Seen:
    """What was seen of one layer. ``shared`` maps files that hold many entries to their openings.

    ``doubts`` lists why uses may be missing.
    """

    entries: list[EntryUse] = field(default_factory=list)
    shared: dict[Path, int] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)


def everybodys_folders(environment: Environment) -> set[Path]:
    """Return the home and temporary folders themselves, in which everybody keeps files, with links resolved."""
    common = (environment.home, environment.home_folder, environment.temporary)
    return {Path(os.path.realpath(folder)) for folder in common}


@dataclass(frozen=True, slots=True)
class _Place:
    """A root of a layer, and its folder with links resolved."""

    layer: Layer
    root: Root
    path: Path
    files: EntryFiles
    #: Whether the layer stores new entries here.
    stores: bool

    def holds(self, path: Path) -> bool:
        """Return whether a path is the place, or lies below it."""
        return path == self.path or str(path).startswith(f"{self.path}/")

    def key_of(self, path: Path) -> str | None:
        """Return the key of the entry that a path below the place is; ``None`` if it is none."""
        key = path.relative_to(self.path).as_posix()
        return key if self.layer.store.is_key(key) and self.owns(path) else None

    def holds_many(self, path: Path) -> bool:
        """Return whether a file below the place holds many entries of the layer."""
        return self.files.shared is not None and bool(self.files.shared.fullmatch(path.name)) and self.owns(path)

    def owns(self, path: Path) -> bool:
        """Return whether a path below the place is the layer's, or leads to its files."""
        return path == self.path or bool(self.layer.store.owns(self.root, path.relative_to(self.path).parts))


class EntryEvents:
    """Watches the files of some layers' entries: :meth:`watching` is the block in which they are used."""

    def __init__(self, layers: Iterable[tuple[Layer, EntryFiles]]) -> None:
        self._doubts: dict[str, list[str]] = {}
        places = list(self._resolved(layers))
        # Too much happens in a folder where everybody keeps files.
        self._unwatched = [place for place in places if place.path in everybodys_folders(place.layer.environment)]
        self._places = [place for place in places if place not in self._unwatched]
        self._histories: dict[Path, History] = {}
        self._recorded = 0
        self._events: FileEvents | None = None

    def _resolved(self, layers: Iterable[tuple[Layer, EntryFiles]]) -> Iterator[_Place]:
        for layer, files in layers:
            self._doubts[layer.name] = []
            try:
                roots = layer.roots()
            except FAILURES:
                self._doubts[layer.name].append("its places are not known")
                continue
            for number, root in enumerate(roots):
                stores = number == 0 and root.scope is Scope.USER
                yield _Place(layer, root, Path(os.path.realpath(root.path)), files, stores)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block."""
        self._events = FileEvents(self._note)
        try:
            if self._events.why_not is None:
                for place in self._places:
                    self._approach(place.path)
                self._check_space()
            yield
        finally:
            self._events.stop()

    def _doubt(self, why: str, path: Path) -> None:
        for place in self._places:
            doubts = self._doubts[place.layer.name]
            if (place.holds(path) or path in place.path.parents) and why not in doubts:
                doubts.append(why)

    def _approach(self, place: Path) -> None:
        """Watch a place, and the folders above it: all of them that exist until it does."""
        with suppress(OSError):
            for folder in {*place.parents[:_ABOVE], nearest(place)} - {place}:
                self._watch(folder, ARRIVED)
        self._descend(place, new=False)

    def _watch(self, folder: Path, mask: int) -> bool:
        if self._events is None or not folder.is_dir():
            return False
        why = self._events.watch(folder, mask)
        if why is not None and folder.is_dir():
            self._doubt(f"{folder} could not be watched: {why}", folder)
        return why is None

    def _check_space(self) -> None:
        """Record places where nothing can be stored: a miss that stores nothing does not show."""
        for place in self._places:
            if place.stores and (why := storing_refused(place.path)) is not None:
                self._doubt(f"{why}: a miss that stores nothing does not show", place.path)

    def _descend(self, folder: Path, *, new: bool) -> None:
        """Watch a folder and those below it; then list it, because files may have been made before it was watched."""
        waiting = [folder]
        while waiting:
            path = waiting.pop()
            if not self._watch(path, _USES if any(place.holds(path) for place in self._places) else ARRIVED):
                continue
            with suppress(OSError), os.scandir(path) as names:
                for name in names:
                    below = path / name.name
                    if name.is_dir(follow_symlinks=False):
                        waiting += [below] if self._leads(below) else []
                    elif new and self._is_wanted(below):
                        self._histories.setdefault(below, History()).listed(time.time())

    def _leads(self, folder: Path) -> bool:
        return any(folder in place.path.parents for place in self._places) or self._is_wanted(folder)

    def _is_wanted(self, path: Path) -> bool:
        for place in self._places:
            if place.holds(path):
                try:
                    if place.owns(path):
                        return True
                except FAILURES:
                    self._doubt("the layer cannot say which files are its own", place.path)
        return False

    def _note(self, path: Path, mask: int) -> None:
        if mask & FOLDER:
            if mask & ARRIVED and self._leads(path):
                self._descend(path, new=bool(mask & CREATE))
        elif path in self._histories or (mask & _USES and self._is_wanted(path)):
            self._recorded += 1
            if self._recorded <= _MOST:
                self._histories.setdefault(path, History()).record(mask, time.time())

    def seen(self) -> dict[str, Seen] | None:
        """Return what was seen of each layer; ``None`` if nothing could be seen."""
        if self._events is None or self._events.why_not is not None:
            return None
        self._check_space()
        lost = self._events.lost or self._recorded > _MOST
        seen = {name: Seen(doubts=[*doubts, *([LOST] if lost else [])]) for name, doubts in self._doubts.items()}
        for place in self._unwatched:
            with suppress(OSError, *FAILURES):
                if any(place.owns(place.path / name) for name in os.listdir(place.path)):
                    why = f"{place.path}, where others keep files too, is not watched"
                    seen[place.layer.name].doubts.append(why)
        for path, history in self._histories.items():
            for place in self._places:
                if history.uses and place.holds(path):
                    _assign(seen[place.layer.name], place, path, history)
        return seen


def _assign(seen: Seen, place: _Place, path: Path, history: History) -> None:
    key = place.key_of(path)
    if key is not None:
        hits, stores = (tuple(at for at, use in history.uses if use is kind) for kind in (Use.HIT, Use.STORE))
        seen.entries.append(EntryUse(place.root, key, hits, stores))
    elif place.holds_many(path):
        seen.shared[path] = len(history.uses)
    else:
        return
    doubt = _TOGETHER if history.together else _EARLY if history.early else None
    if doubt is not None and doubt not in seen.doubts:
        seen.doubts.append(doubt)


def storing_refused(place: Path) -> str | None:
    """Return why files may not be stored below a place, existing or not; ``None`` if nothing is known against it."""
    folder = nearest(place)
    if not folder.is_dir():
        return f"{folder} is not a directory"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    with suppress(OSError):
        space = os.statvfs(folder)
        if space.f_bavail * space.f_frsize < _LITTLE or (space.f_files and space.f_favail == 0):
            return f"the file system of {folder} is full"
    return None
