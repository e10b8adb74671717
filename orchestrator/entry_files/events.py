"""Lookups and stores of caches that keep each entry in a file, seen from outside while a command runs.

The kernel reports each opening, writing and renaming in the folders of these caches (inotify), and root also learns
which process it was (:mod:`cachectl.entry_files.fanotify`). Layers say whose files these are
(:class:`cachectl.layers.base.parts.EntryFiles`). A lookup that finds no file is not reported: it shows by the store
that follows.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.entry_files.fanotify import Access, Fanotify
from cachectl.entry_files.history import History, Use, counted
from cachectl.entry_files.inotify import FileEvent, Inotify
from cachectl.layers.base.errors import FAILURES
from cachectl.layers.base.facts import Root, Scope
from cachectl.layers.base.parts import EntryFiles
from cachectl.layers.disk.presence import nearest

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

# sys/inotify.h
_MODIFY, _CLOSE_WRITE, _CLOSE, _OPEN = (1 << bit for bit in (1, 3, 4, 5))
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = (1 << bit for bit in (6, 7, 8, 9))
_OVERFLOW, _ONLY_FOLDERS, _MASK_ADD, _FOLDER = 1 << 14, 0x01000000, 0x20000000, 0x40000000
_COMING: Final = _CREATE | _MOVED_TO
#: Equal events in a row are reported once: the closing is between two openings of a file, unless both are open at once.
_ALL: Final = _MODIFY | _CLOSE_WRITE | _CLOSE | _OPEN | _MOVED_FROM | _COMING | _DELETE
_TOGETHER: Final = "an entry was open twice at once, and such openings may be reported as one"
_EARLY: Final = "an entry was stored in a new folder before that was watched, so that first hits of it may be missing"
_UNSEEN: Final = "a process had ended before it could be seen whether it was of this run"
#: How many folders above a place are watched, in case it is removed and made again.
_ABOVE: Final = 2
#: Bytes that are free on a file system that cannot take another entry.
_LITTLE: Final = 16 << 20
#: Seconds of work for which events are read in a row: a program may cause them without end.
_IN_A_ROW: Final = 1.0
#: Seconds between readings after which no opening has one of its two events in either.
_APART: Final = 0.005
#: How many uses are kept, so that memory stays bounded.
_MOST: Final = 1 << 20
#: How long events of whole file systems may queue.
_MILLISECONDS: Final = 100


@dataclass(frozen=True, slots=True)
class EntryUse:
    """The uses of one entry in a run: when it was hit, and how often it was stored. Times are epoch seconds."""

    root: Root
    key: str
    hits: tuple[float, ...]
    stores: tuple[float, ...]


@dataclass
class Seen:
    """What was seen of one layer. ``others`` maps files of another form, which hold many entries, to their openings.

    ``gaps`` lists why some uses may be missing, ``doubts`` why some may be another program's.
    """

    entries: list[EntryUse] = field(default_factory=list)
    others: dict[Path, int] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    #: Whether the uses of other programs are left out.
    by_process: bool = False
    #: Whether nothing could be seen.
    blind: bool = False


@dataclass(frozen=True, slots=True)
class _Claim:
    """A place of a layer: the root, and its folder with links resolved."""

    layer: Layer
    root: Root
    path: Path
    files: EntryFiles
    #: Whether the layer stores new entries here.
    stores: bool

    @property
    def is_everybodys(self) -> bool:
        """Whether the place is a home or temporary folder itself."""
        environment = self.layer.environment
        common = (environment.home, environment.home_folder, environment.temporary)
        return self.path in {Path(os.path.realpath(folder)) for folder in common}

    def owned(self) -> bool:
        """Return whether the place has a file of the layer's at its top."""
        try:
            return any(self.owns(self.path / name) for name in os.listdir(self.path))
        except (OSError, *FAILURES):
            return False

    def holds(self, path: Path) -> bool:
        """Return whether a path is the place, or lies below it."""
        return str(path).startswith(str(self.path)) and (path == self.path or f"{path}"[len(str(self.path))] == "/")

    def leads(self, path: Path) -> bool:
        """Return whether the place lies below a path."""
        return str(self.path).startswith(f"{path}/")

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
    """Watches the files of some layers' entries: :meth:`watching` is the block in which they are used.

    ``of_run`` says whether a process belongs to the run, ``None`` if that can no longer be known.
    """

    def __init__(self, layers: Iterable[tuple[Layer, EntryFiles]], of_run: Callable[[int], bool | None]) -> None:
        self._of_run = of_run
        self._gaps: dict[str, list[str]] = {}
        claims = list(self._claimed(layers))
        # Too much happens in a folder where everybody keeps files.
        self._unwatched = [claim for claim in claims if claim.is_everybodys]
        self._claims = [claim for claim in claims if not claim.is_everybodys]
        self._folders: dict[int, Path] = {}
        self._histories: dict[Path, History] = {}
        self._accesses: dict[Path, list[Access]] = {}
        #: The number of times that all events had been read. Those read between two may be in any order.
        self._moment = 0
        self._taken_at = 0.0
        self._uses = 0
        self._members: dict[int, bool | None] = {}
        self._lost = False
        #: The layers on a file system that does not report processes.
        self._together: set[str] = set()
        self._notify: Inotify | None = None
        self._fanotify: Fanotify | None = None

    def _claimed(self, layers: Iterable[tuple[Layer, EntryFiles]]) -> Iterator[_Claim]:
        for layer, files in layers:
            self._gaps[layer.name] = []
            try:
                roots = layer.roots()
            except FAILURES:
                self._gaps[layer.name].append("its places are not known")
                continue
            for number, root in enumerate(roots):
                stores = number == 0 and root.scope is Scope.USER
                yield _Claim(layer, root, Path(os.path.realpath(root.path)), files, stores)

    # ------------------------------------------------------------------ watching

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block."""
        with ExitStack() as stack:
            if self._claims:
                self._start(stack)
            yield

    def _start(self, stack: ExitStack) -> None:
        try:
            self._notify = Inotify()
        except OSError as error:
            self._fail(f"no file events: {error.strerror}")
            return
        stack.callback(self._notify.close)
        with suppress(OSError):
            self._fanotify = Fanotify()
            stack.callback(self._fanotify.close)
        for claim in self._claims:
            self._approach(claim.path)
        self._check_space()
        ending, end = os.pipe()
        stack.callback(os.close, ending)
        stack.callback(os.close, end)
        thread = threading.Thread(target=self._drain, args=(ending,), name="cachectl-entry-events", daemon=True)
        thread.start()
        stack.callback(self._finish)
        stack.callback(thread.join)
        stack.callback(os.write, end, b".")

    def _fail(self, why: str, path: Path | None = None) -> None:
        for claim in self._claims:
            if path is None or claim.holds(path) or claim.leads(path):
                gaps = self._gaps[claim.layer.name]
                if why not in gaps:
                    gaps.append(why)

    def _approach(self, place: Path) -> None:
        """Watch a place, or the folders above it until it exists."""
        near = next((folder for folder in (place, *place.parents) if folder.is_dir()), None)
        if near is not None:
            self._see_processes(near)
        for folder in (*(place.parents[:_ABOVE]), *((near,) if near is not None and near != place else ())):
            if folder.is_dir():
                self._watch(folder, _COMING)
        self._descend(place, new=False)

    def _watch(self, folder: Path, mask: int) -> bool:
        if self._notify is None:
            return False
        try:
            self._folders[self._notify.watch(folder, mask | _MASK_ADD | _ONLY_FOLDERS)] = folder
            if mask == _ALL:
                self._see_processes(folder)
        except OSError as error:
            if folder.is_dir():
                self._fail(f"{folder} could not be watched: {error.strerror}", folder)
            return False
        return True

    def _check_space(self) -> None:
        """Record places where nothing can be stored: a miss that stores nothing does not show."""
        for claim in self._claims:
            if claim.stores:
                below = [folder for folder in self._folders.values() if claim.holds(folder)]
                for folder in (nearest(claim.path), *below):
                    if folder.is_dir() and (why := _refusal(folder)) is not None:
                        self._fail(f"{why}: a miss that stores nothing does not show", claim.path)
                        break

    def _see_processes(self, folder: Path) -> None:
        if self._fanotify is not None:
            try:
                self._fanotify.watch(folder)
            except OSError:
                if folder.is_dir():
                    # Its file system reports none.
                    claims = (claim for claim in self._claims if claim.holds(folder) or claim.leads(folder))
                    self._together |= {claim.layer.name for claim in claims}

    def _descend(self, folder: Path, *, new: bool) -> None:
        """Watch a folder and those below it; then list it, because files may have been made before it was watched."""
        waiting = [folder]
        while waiting:
            at = waiting.pop()
            if not any(claim.holds(at) for claim in self._claims):
                # It leads to a place.
                self._watch(at, _COMING)
            elif not self._watch(at, _ALL):
                continue
            with suppress(OSError), os.scandir(at) as names:
                for name in names:
                    path = at / name.name
                    if name.is_dir(follow_symlinks=False):
                        waiting += [path] if self._leads(path) else []
                    elif new and self._is_wanted(path):
                        self._change(self._history(path)).listed(time.time())

    def _leads(self, folder: Path) -> bool:
        return any(claim.leads(folder) for claim in self._claims) or self._is_wanted(folder)

    def _is_wanted(self, path: Path) -> bool:
        for claim in self._claims:
            if claim.holds(path):
                try:
                    if claim.owns(path):
                        return True
                except FAILURES:
                    self._fail("the layer cannot say which files are its own", claim.path)
        return False

    def _history(self, path: Path) -> History:
        return self._histories.setdefault(path, History())

    # ------------------------------------------------------------------ events

    def _drain(self, ending: int) -> None:
        """Read events as they come, because the kernel queues a limited number, and processes end."""
        poll = select.poll()
        if self._notify is not None:
            poll.register(self._notify.fileno(), select.POLLIN)
        poll.register(ending, select.POLLIN)
        # Each opening in the whole file system would wake it.
        while all(descriptor != ending for descriptor, _ in poll.poll(_MILLISECONDS)):
            self._take()

    def _take(self) -> bool:
        """Read what has come, until nothing comes: then both descriptors have reported the same. Return whether so."""
        begun = time.thread_time()
        self._moment += time.monotonic() - self._taken_at > _APART
        while self._took():
            if time.thread_time() - begun > _IN_A_ROW:
                return False
        self._moment += 1
        self._taken_at = time.monotonic()
        return True

    def _finish(self) -> None:
        """Read the last events. Another program may cause them without end."""
        self._lost = not self._take() or self._lost

    def _took(self) -> bool:
        """Read once. Who did it comes first: a process may end."""
        some = False
        for access in () if self._fanotify is None else self._fanotify.read(self._moment):
            if not self._is_wanted(access.path):
                continue
            some = True
            if self._is_too_much():
                continue
            if access.process not in self._members:
                self._members[access.process] = self._of_run(access.process)
            self._accesses.setdefault(access.path, []).append(access)
        for event in () if self._notify is None else self._notify.read():
            some = True
            if not self._is_too_much():
                self._note(event)
        return some or (self._fanotify is not None and self._fanotify.behind)

    def _is_too_much(self) -> bool:
        self._uses += 1
        self._lost = self._lost or self._uses > _MOST
        return self._uses > _MOST

    def _note(self, event: FileEvent) -> None:
        if event.mask & _OVERFLOW:
            self._lost = True
            return
        folder = self._folders.get(event.watch)
        if folder is None or not event.name:
            return
        path = folder / event.name
        if event.mask & _FOLDER:
            if event.mask & _COMING and self._leads(path):
                self._descend(path, new=bool(event.mask & _CREATE))
        elif path in self._histories or self._is_wanted(path):
            self._record(path, event.mask)

    def _record(self, path: Path, mask: int) -> None:
        history, now = self._history(path), time.time()
        if mask & _CREATE:
            self._change(history).created(now)
        elif mask & _MOVED_TO:
            history.arrived(now)
        elif mask & _OPEN:
            history.openings[self._moment] += 1
            history.opened(now)
        elif mask & _MODIFY:
            self._change(history).modified()
        elif mask & (_CLOSE | _CLOSE_WRITE):
            history.closed()
            if mask & _CLOSE_WRITE:
                history.written()
        elif mask & (_DELETE | _MOVED_FROM):
            history.gone()

    def _change(self, history: History) -> History:
        if history.changed is None:
            history.changed = self._moment
        return history

    # ------------------------------------------------------------------ what was seen

    def seen(self) -> dict[str, Seen]:
        """Return what was seen of each layer."""
        lost = self._lost or (self._fanotify is not None and self._fanotify.lost)
        self._check_space()
        blind = self._notify is None
        apart = {name: self._fanotify is not None and name not in self._together for name in self._gaps}
        found = {name: Seen(gaps=list(gaps), by_process=apart[name], blind=blind) for name, gaps in self._gaps.items()}
        # A process that could not be examined may have noted events since.
        members = {process: self._of_run(process) if own is None else own for process, own in self._members.items()}
        processes = _Processes(self._accesses, members)
        for claim in self._unwatched:
            if claim.owned():
                found[claim.layer.name].gaps.append(f"{claim.path}, where others keep files too, is not watched")
        for one in found.values():
            one.gaps += ["file events came faster than they could be read"] if lost else []
        for path, history in self._histories.items():
            for claim in self._claims:
                if claim.holds(path):
                    self._assign(found[claim.layer.name], claim, path, history, processes)
        return found

    def _assign(self, seen: Seen, claim: _Claim, path: Path, history: History, processes: _Processes) -> None:
        key = claim.key_of(path)
        if key is None and not claim.holds_many(path):
            return
        doubt = _TOGETHER if history.together else _EARLY if history.early else None
        uses, doubt = processes.of_run(path, history) if seen.by_process else (history.uses, doubt)
        seen.doubts += [doubt] if doubt is not None and uses and doubt not in seen.doubts else []
        hits, stores = counted(uses)
        if key is None:
            seen.others |= {path: len(uses)} if uses else {}
        elif uses:
            times = tuple(use.at for use in hits), tuple(use.at for use in stores)
            seen.entries.append(EntryUse(claim.root, key, *times))


def _refusal(folder: Path) -> str | None:
    """Return why files may not be stored in a folder; ``None`` if nothing is known against it."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    with suppress(OSError):
        space = os.statvfs(folder)
        if space.f_bavail * space.f_frsize < _LITTLE or (space.f_files and space.f_favail == 0):
            return f"the file system of {folder} is full"
    return None


class Members:
    """Answers whether a process belongs to a run: it, or one above it, was started with the trace's variable.

    ``folder`` is that of the run's events; ``here`` says whether this process itself belongs to the run.
    """

    def __init__(self, folder: Path, *, here: bool) -> None:
        self._folder = folder
        self._here = here

    def __call__(self, process: int) -> bool | None:
        """Return whether it does; ``None`` if the process has ended and left no events. 0 is one out of sight."""
        if process in (0, os.getpid()):
            return process != 0 and self._here
        if (self._folder / f"{process}.events").exists():
            return True
        mark, above, ended = os.fsencode(self._folder), process, False
        try:
            while above > 1 and above != os.getpid():
                # Some programs clear the variables of those that they start.
                try:
                    if mark in Path(f"/proc/{above}/environ").read_bytes():
                        return True
                except ProcessLookupError:
                    # Nobody has waited for it yet.
                    ended = True
                fields = Path(f"/proc/{above}/stat").read_bytes().rpartition(b") ")[2].split()
                above = int(fields[1])
        except (FileNotFoundError, ProcessLookupError):
            return None
        except (OSError, ValueError, IndexError):
            # Another user's.
            return False
        return (self._here and above == os.getpid()) or (None if ended else False)


class _Processes:
    """Distinguishes uses by processes of the run from those by other programs."""

    def __init__(self, accesses: Mapping[Path, Sequence[Access]], members: Mapping[int, bool | None]) -> None:
        self._accesses = accesses
        self._alone = False not in members.values()
        self._unseen = {process for process, own in members.items() if own is None}
        self._members = dict.fromkeys(members, True) if self._alone else members

    def of_run(self, path: Path, history: History) -> tuple[list[Use], str | None]:
        """Return the uses by processes of the run, and why some may be missing."""
        accesses = self._accesses.get(path, ())
        users = {self._members.get(access.process) for access in accesses}
        periods = list(_periods(accesses, history))
        together = history.together or any(period.is_short for period in periods)
        if users <= {True} and (self._alone or users) and not history.early:
            unseen = any(access.process in self._unseen for access in accesses)
            return history.uses, _TOGETHER if together else _UNSEEN if unseen else None
        uses: list[Use] = []
        doubts = [] if accesses or not history.uses else [_TOGETHER]
        doubts += [
            _EARLY for access in accesses if history.early and access.closed and (access.written or access.arrived)
        ]
        for period in periods:
            users = {self._members.get(access.process) for access in period.accesses if access.opened}
            # Several openings by one process may be reported once, but each is an event without a process too.
            more = max(0, period.openings - period.opened) if users == {True} else 0
            if len(users) > 1 or (period.openings and not users) or (period.is_short and users == {True}):
                doubts.append(_UNSEEN if None in users else _TOGETHER)
            for access in period.accesses:
                if self._members.get(access.process):
                    changed = history.changed is not None and history.changed <= access.moment
                    _follow(uses, access, changed=changed, more=more * access.opened)
                    more *= not access.opened
        return uses, next(iter(doubts), None)


@dataclass
class _Period:
    """The uses of a file in moments that follow each other: the two events of an opening may be in two moments."""

    accesses: list[Access] = field(default_factory=list)
    openings: int = 0

    @property
    def opened(self) -> int:
        """How often processes opened it; several openings by one process may be one."""
        return sum(access.opened for access in self.accesses)

    @property
    def is_short(self) -> bool:
        """Whether openings by several processes were reported as one."""
        return self.opened > self.openings and len({access.process for access in self.accesses if access.opened}) > 1


def _periods(accesses: Iterable[Access], history: History) -> Iterator[_Period]:
    by_moment: dict[int, list[Access]] = {moment: [] for moment in history.openings}
    for access in accesses:
        by_moment.setdefault(access.moment, []).append(access)
    period, last = _Period(), None
    for moment in sorted(by_moment):
        if last is not None and moment > last + 1:
            yield period
            period = _Period()
        period.accesses += by_moment[moment]
        period.openings += history.openings[moment]
        last = moment
    if last is not None:
        yield period


def _follow(uses: list[Use], access: Access, *, changed: bool, more: int) -> None:
    """Add what a process did with a file; ``changed`` says whether anyone has written to the file."""
    uses += [Use(access.at, stored=False, process=access.process) for _ in range(access.opened + more)]
    if access.arrived:
        uses.append(Use(access.at, stored=True, process=access.process))
    if access.written and changed:
        before = [use for use in uses if use.process == access.process][-2:]
        if before and not before[-1].stored:
            before[-1].stored = True
            before[0].redone = not before[0].stored
