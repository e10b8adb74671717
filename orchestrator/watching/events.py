"""File events while a program runs, as the Linux kernel reports them (inotify), and what they show of caches.

The kernel reports each opening, writing and renaming in watched folders, by whichever process of this machine. It does
not say which process: :mod:`cachectl.watching.programs` looks for other programs that may have used a cache.

The library inotify_simple is not used: it searches for the C library with a compiler at each start, which takes longer
than many commands that are watched, and leaks a descriptor in Python before 3.11.4 if none is free. Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Root, Scope
from cachectl.layers.core.store import ENTRY, OWN
from cachectl.layers.disk.place import why_closed
from cachectl.layers.disk.plain import nearest

# sys/inotify.h
ACCESS, MODIFY, ATTRIBUTES, CLOSE_WRITE, CLOSE, OPEN, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF = (
    1 << bit for bit in range(12)
)
UNMOUNTED, _OVERFLOW, _MASK_ADD, FOLDER = 1 << 13, 1 << 14, 1 << 29, 1 << 30
ARRIVED = CREATE | MOVED_TO
LEFT = DELETE | MOVED_FROM
#: The events that show lookups and stores. Equal events in a row are reported once: the closing is between two openings
#: of a file, unless both are open at once.
_USES = MODIFY | CLOSE_WRITE | CLOSE | OPEN | ARRIVED | LEFT
_REASONS = {
    errno.ENOSPC: "more folders than the system lets one user watch (fs.inotify.max_user_watches)",
    errno.EMFILE: "too many open files, or too many programs that watch files (fs.inotify.max_user_instances)",
}
_HEAD = struct.Struct("=iIII")
#: Bytes of events that are read at once.
_AT_ONCE = 1 << 16
#: Milliseconds after which the reader looks whether the run has ended.
_PAUSE = 20
#: Seconds of work for which the last events are read: a program may cause them without end.
_LONGEST = 1.0
#: The most events of entries that are kept.
_MOST = 1 << 20
LOST = "file events came faster than they could be read"
_TOGETHER = "an entry was open twice at once, and such openings may be reported as one"
_EARLY = "an entry was stored in a new folder before that was watched, so that first hits of it may be missing"
_REMADE = "an entry was removed and stored again after it was read, so that this reading may have been a hit"
#: How many folders above a place are watched, in case it is removed and made again.
_ABOVE = 2


def open_queue() -> tuple[Any, int]:
    """Return the C library, and the kernel's queue of events. Raises :class:`OSError` where there is none."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "only Linux reports every file that is opened")
    library = ctypes.CDLL(None, use_errno=True)
    return library, _checked(library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, _REASONS.get(number, os.strerror(number)))
    return result


class FileEvents:
    """Paths under watch until :meth:`stop`. A thread passes each event to ``note``, in order: the path, and the mask.

    ``why_not`` is the reason why nothing can be watched here; ``None`` means that watching works. ``lost`` says that
    events are missing, because they came too fast.
    """

    def __init__(self, note: Callable[[Path, int], None]) -> None:
        self.why_not: str | None = None
        self.lost = False
        self._lock = threading.RLock()
        self._note = note
        #: A folder may have several names.
        self._paths: dict[int, dict[Path, None]] = {}
        self._ended = threading.Event()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._drain, name="cachectl-events", daemon=True)
        try:
            self._library, self._queue = open_queue()
        except OSError as error:
            self.why_not = reason_of(error)
            return
        try:
            self._thread.start()
        except RuntimeError as error:
            self.why_not = str(error)
            os.close(self._queue)

    def watch(self, path: Path, mask: int) -> str | None:
        """Watch a folder's files, or one file; return why that is not possible, ``None`` also if nothing is there."""
        if self.why_not is not None:
            return self.why_not
        with self._lock:
            try:
                watch = self._library.inotify_add_watch(self._queue, os.fsencode(path), mask | _MASK_ADD)
                self._paths.setdefault(_checked(watch), {})[path] = None
            except OSError as error:
                return error.strerror if os.path.lexists(path) else None
            return None

    def stop(self) -> None:
        """Pass on the last events, and stop watching; a forked child leaves them to its parent."""
        if self.why_not is not None or os.getpid() != self._owner:
            return
        self._ended.set()
        self._thread.join()
        begun = time.thread_time()
        while self._take():
            if time.thread_time() - begun > _LONGEST:
                self.lost = True
                break
        self.why_not = "watching has ended"
        os.close(self._queue)

    def _drain(self) -> None:
        """Read events as they come, because the kernel queues a limited number."""
        poll = select.poll()
        poll.register(self._queue, select.POLLIN)
        while not self._ended.is_set():
            if poll.poll(_PAUSE):
                self._take()

    def _take(self) -> bool:
        """Pass on the next events; return whether there were any."""
        with self._lock:
            try:
                data = os.read(self._queue, _AT_ONCE)
            except (BlockingIOError, InterruptedError):
                return False
            at = 0
            while at + _HEAD.size <= len(data):
                watch, mask, _, length = _HEAD.unpack_from(data, at)
                name = os.fsdecode(data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0"))
                at += _HEAD.size + length
                self.lost = self.lost or bool(mask & _OVERFLOW)
                for path in tuple(self._paths.get(watch, ())):
                    self._note(path / name if name else path, mask)
            return True


# ---------------------------------------------------------------------- places


@dataclass(eq=False)
class WatchedPlace:
    """A folder with links resolved, and the layers that keep entries in it, each with its root.

    ``everybodys`` says that files of others lie there too, as in the home and temporary folders.
    """

    path: Path
    claims: list[tuple[Layer, Root]] = field(default_factory=list)
    everybodys: bool = False

    @property
    def layers(self) -> frozenset[str]:
        """Return the names of the layers."""
        return frozenset(layer.name for layer, _ in self.claims)

    def relative(self, path: Path) -> str | None:
        """Return the name of a path below the place, "" for the place itself; ``None`` for a path elsewhere."""
        if path == self.path:
            return ""
        below = str(path).removeprefix(f"{self.path}/")
        return None if below == str(path) else below

    def owners(self, relative: str) -> frozenset[str]:
        """Return the names of the layers that recognise a path below the place as theirs, or as leading to theirs."""
        return frozenset(layer.name for layer, root in self.claims if kind_of(layer, root, relative) in (ENTRY, OWN))

    def is_unclear(self, name: str) -> bool:
        """Return whether a layer cannot say which files here are its own."""
        return any(layer.name == name and kind_of(layer, root, "?") is None for layer, root in self.claims)


def kind_of(layer: Layer, root: Root, path: str) -> str | None:
    """Ask a layer what a path is to it; a layer that fails to answer counts as unknown."""
    try:
        return layer.store.kind_of(root, path)
    except FAILURES:
        return None


def places_of(layers: Iterable[Layer]) -> tuple[list[WatchedPlace], dict[str, str]]:
    """Return the folders in which layers keep entries, and the layers whose folders are not known, with the reason."""
    places: dict[Path, WatchedPlace] = {}
    common: set[Path] = set()
    unknown: dict[str, str] = {}
    for layer in layers:
        here = layer.environment
        for folder in map(os.path.realpath, (here.home, here.home_folder, here.temporary)):
            common |= {Path(folder), *Path(folder).parents}
        try:
            roots = [(Path(os.path.realpath(root.path)), root) for root in layer.roots()]
        except FAILURES as error:
            unknown[layer.name] = f"its roots are not known: {reason_of(error)}"
            continue
        for path, root in roots:
            places.setdefault(path, WatchedPlace(path)).claims.append((layer, root))
    for path, place in places.items():
        inside = (inner for inner in places.values() if path in inner.path.parents)
        place.everybodys = path in common or any(not inner.layers <= place.layers for inner in inside)
    return list(places.values()), unknown


# ---------------------------------------------------------------------- entries


@dataclass
class History:
    """The uses of one file: when each was seen (epoch seconds), and whether it was a store, else a hit.

    A file is stored by its creation, by writing to it, or by renaming another to it. ``doubts`` lists why uses may be
    missing.
    """

    uses: list[tuple[float, bool]] = field(default_factory=list)
    doubts: set[str] = field(default_factory=set)
    #: How often it was opened, or made.
    openings: int = 0
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
            self._listed = self._writing = True
            self.doubts.add(_EARLY)

    def record(self, mask: int, at: float) -> None:
        """Record an event of the file."""
        if mask & ARRIVED:
            self._appear(at)
            if mask & CREATE:
                self._creating = self._writing = True
            else:
                self._settle()
        elif mask & OPEN:
            self._opened(at)
        elif mask & MODIFY:
            self._dirty = True
        elif mask & (CLOSE | CLOSE_WRITE):
            if self._open == 0:
                self.doubts.add(_TOGETHER)
            self._open = max(0, (self._open or 0) - 1)
            if mask & CLOSE_WRITE:
                self._written()
        elif mask & LEFT:
            self._settle()
            self._gone = True

    def _appear(self, at: float) -> None:
        if self._gone and self.uses and not self.uses[-1][1]:
            # NVIDIA's driver removes an entry that it found broken when it read it, and makes it again.
            self.uses.pop()
            self.doubts.add(_REMADE)
        if not self._listed:
            self.uses.append((at, True))
            self.openings += 1
        self._gone = False
        self._open = None

    def _opened(self, at: float) -> None:
        if self._open:
            self.doubts.add(_TOGETHER)
        self._open = (self._open or 0) + 1
        if not self._creating:
            self.uses.append((at, False))
            self.openings += 1
            self._dirty = False
        self._creating = False

    def _written(self) -> None:
        """Record that a program which could write to it has closed it."""
        if self._listed:
            self.doubts.discard(_EARLY)
        if self._dirty and self.uses and not self.uses[-1][1]:
            if self._listed:
                # It was opened by the program that made it.
                self.uses.pop()
                self.openings -= 1
            elif not self._writing:
                # It was perhaps found broken by who read it right before, which was no hit.
                broken = len(self.uses) > 1 and not self.uses[-2][1]
                self.uses[-1 - broken :] = [(self.uses[-1][0], True)]
        self._settle()

    def _settle(self) -> None:
        self._creating = self._writing = self._dirty = self._listed = False


#: A file in a root of a layer that was used: the root, the name below it, and its history.
Use = tuple[Root, str, History]


class EntryEvents:
    """Watches the files of some layers' entries: :meth:`watching` is the block in which they are used.

    ``arrived`` is called when a file of an entry was made. ``why_not`` is the reason if nothing could be watched.
    ``doubts`` says for each layer why uses may be missing.
    """

    _events: FileEvents

    def __init__(self, layers: Iterable[Layer], *, arrived: Callable[[], None] = lambda: None) -> None:
        layers = tuple(layers)
        self._arrived = arrived
        places, unknown = places_of(layers)
        self.why_not: str | None = None
        self.doubts: dict[str, dict[str, None]] = {layer.name: {} for layer in layers}
        for name, reason in unknown.items():
            self.doubts[name][reason] = None
        # Too much happens in a folder where everybody keeps files.
        self._places = [place for place in places if not place.everybodys]
        self._unwatched = [place for place in places if place.everybodys]
        self._histories: dict[Path, History] = {}
        self._left = _MOST

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block."""
        self._events = FileEvents(self._note)
        self.why_not = self._events.why_not
        try:
            for place in self._places:
                # Folders above it: all that exist until it does.
                with suppress(OSError):
                    for folder in {*place.path.parents[:_ABOVE], nearest(place.path)} - {place.path}:
                        self._watch(folder, ARRIVED)
                self._descend(place.path, new=False)
            yield
        finally:
            self._events.stop()
            self._doubt_places()

    def _watch(self, folder: Path, mask: int) -> bool:
        reason = self._events.watch(folder, mask)
        for place in self._places if reason is not None else ():
            if place.relative(folder) is not None or folder in place.path.parents:
                self._doubt(place, f"{folder} could not be watched: {reason}")
        return reason is None

    def _doubt(self, place: WatchedPlace, reason: str) -> None:
        for name in place.layers:
            self.doubts[name][reason] = None

    def _descend(self, folder: Path, *, new: bool) -> None:
        """Watch a folder and those below it; then list it, because files may have been made before it was watched."""
        is_in_place = any(place.relative(folder) is not None for place in self._places)
        if self._watch(folder, _USES if is_in_place else ARRIVED):
            with suppress(OSError), os.scandir(folder) as names:
                for name in names:
                    below = folder / name.name
                    if name.is_dir(follow_symlinks=False):
                        if self._leads(below):
                            self._descend(below, new=new)
                    elif new and self._is_owned(below):
                        self._histories.setdefault(below, History()).listed(time.time())

    def _leads(self, folder: Path) -> bool:
        return any(folder in (place.path, *place.path.parents) for place in self._places) or self._is_owned(folder)

    def _is_owned(self, path: Path) -> bool:
        return any((name := place.relative(path)) and place.owners(name) for place in self._places)

    def _note(self, path: Path, mask: int) -> None:
        if mask & FOLDER:
            if mask & ARRIVED and self._leads(path):
                self._descend(path, new=bool(mask & CREATE))
        elif path in self._histories or (mask & _USES and self._is_owned(path)):
            self._left -= 1
            if mask & ARRIVED:
                self._arrived()
            if self._left < 0:
                self._events.lost = True
            else:
                self._histories.setdefault(path, History()).record(mask, time.time())

    def uses_of(self, name: str) -> Iterator[Use]:
        """Yield the files that were used in the roots of a layer, when the block has ended."""
        for path, history in self._histories.items():
            for place in self._places if history.uses else ():
                if key := place.relative(path):
                    yield from ((root, key, history) for layer, root in place.claims if layer.name == name)

    def _doubt_places(self) -> None:
        for place in self._places:
            if self._events.lost:
                self._doubt(place, LOST)
            if any(map(place.is_unclear, place.layers)):
                self._doubt(place, "the layer cannot say which files are its own")
            # Other roots are fallbacks.
            is_first = any(root == layer.roots()[0] and root.scope is Scope.USER for layer, root in place.claims)
            if is_first and (reason := why_closed(place.path, place.claims[0][0].environment.home_folder)) is not None:
                self._doubt(place, f"{reason}: a miss that stores nothing does not show")
        for place in self._unwatched:
            with suppress(OSError):
                if any(map(place.owners, os.listdir(place.path))):
                    self._doubt(place, f"{place.path}, where others keep files too, is not watched")
