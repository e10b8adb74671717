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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.entry_files.fanotify import Access, Fanotify
from cachectl.entry_files.history import History, Use, counted
from cachectl.entry_files.inotify import FileEvent, Inotify
from cachectl.layers.base.errors import FAILURES
from cachectl.layers.base.facts import Root
from cachectl.layers.base.parts import EntryFiles

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

# sys/inotify.h
_MODIFY, _CLOSE_WRITE, _CLOSE, _OPEN = (1 << bit for bit in (1, 3, 4, 5))
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = (1 << bit for bit in (6, 7, 8, 9))
_OVERFLOW, _ONLY_FOLDERS, _MASK_ADD, _FOLDER = 1 << 14, 0x01000000, 0x20000000, 0x40000000
_COMING: Final = _CREATE | _MOVED_TO
#: Equal events in a row are reported once: the closing is between two openings of a file.
_ALL: Final = _MODIFY | _CLOSE_WRITE | _CLOSE | _OPEN | _MOVED_FROM | _COMING | _DELETE
_UNSEEN: Final = "a process had ended before it could be seen whether it was of this run"
#: How many folders above a place are watched, in case it is removed and made again.
_ABOVE: Final = 2


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
    told_apart: bool = False
    #: Whether nothing could be seen.
    blind: bool = False


@dataclass(frozen=True, slots=True)
class _Claim:
    """A place of a layer: the root, and its folder with links resolved."""

    layer: Layer
    root: Root
    path: Path
    files: EntryFiles

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
        self._accesses: list[Access] = []
        self._members: dict[int, bool | None] = {}
        self._lost = False
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
            for root in roots:
                yield _Claim(layer, root, Path(os.path.realpath(root.path)), files)

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
        ending, end = os.pipe()
        stack.callback(os.close, ending)
        stack.callback(os.close, end)
        thread = threading.Thread(target=self._drain, args=(ending,), name="cachectl-entry-events", daemon=True)
        thread.start()
        stack.callback(self._take)
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
        for folder in (*(place.parents[:_ABOVE]), *((near,) if near is not None and near != place else ())):
            if folder.is_dir():
                self._watch(folder, _COMING)
        self._descend(place, new=False)

    def _watch(self, folder: Path, mask: int) -> bool:
        if self._notify is None:
            return False
        try:
            self._folders[self._notify.watch(folder, mask | _MASK_ADD | _ONLY_FOLDERS)] = folder
            if mask == _ALL and self._fanotify is not None:
                self._fanotify.watch(folder)
        except OSError as error:
            if folder.is_dir():
                self._fail(f"{folder} could not be watched: {error.strerror}", folder)
            return False
        return True

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
                        self._history(path).listed(time.time())

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
        if self._fanotify is not None:
            poll.register(self._fanotify.fileno(), select.POLLIN)
        poll.register(ending, select.POLLIN)
        while all(descriptor != ending for descriptor, _ in poll.poll()):
            self._take()

    def _take(self) -> None:
        """Read what has come. Who did it comes first: a process may end."""
        for access in () if self._fanotify is None else self._fanotify.read():
            if not self._is_wanted(access.path):
                continue
            if access.process not in self._members:
                self._members[access.process] = self._of_run(access.process)
            self._accesses.append(access)
        for event in () if self._notify is None else self._notify.read():
            self._note(event)

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
            history.created(now)
        elif mask & _MOVED_TO:
            history.arrived(now, _identity(path))
        elif mask & _OPEN:
            history.opened(now)
        elif mask & _MODIFY:
            history.modified()
        elif mask & _CLOSE_WRITE:
            history.written()
        elif mask & (_DELETE | _MOVED_FROM):
            history.gone()

    # ------------------------------------------------------------------ what was seen

    def seen(self) -> dict[str, Seen]:
        """Return what was seen of each layer."""
        lost = self._lost or (self._fanotify is not None and self._fanotify.lost)
        told_apart, blind = self._fanotify is not None, self._notify is None
        found = {name: Seen(gaps=list(gaps), told_apart=told_apart, blind=blind) for name, gaps in self._gaps.items()}
        # A process that could not be examined may have noted events since.
        members = {process: self._of_run(process) if own is None else own for process, own in self._members.items()}
        processes = _Processes(self._accesses, members) if self._fanotify is not None else None
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

    def _assign(self, seen: Seen, claim: _Claim, path: Path, history: History, processes: _Processes | None) -> None:
        key = claim.key_of(path)
        if key is None and not claim.holds_many(path):
            return
        uses, doubt = (history.uses, None) if processes is None else processes.of_run(path, history.uses)
        seen.doubts += [doubt] if doubt is not None and doubt not in seen.doubts else []
        hits, stores = counted(uses)
        if key is None:
            seen.others |= {path: len(uses)} if uses else {}
        elif uses:
            times = tuple(use.at for use in hits), tuple(use.at for use in stores)
            seen.entries.append(EntryUse(claim.root, key, *times))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


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
        mark, above = os.fsencode(self._folder), process
        try:
            while above > 1 and above != os.getpid():
                # Some programs clear the variables of those that they start.
                if mark in Path(f"/proc/{above}/environ").read_bytes():
                    return True
                fields = Path(f"/proc/{above}/stat").read_bytes().rpartition(b") ")[2].split()
                above = int(fields[1])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, IndexError):
            # Another user's.
            return False
        return self._here and above == os.getpid()


class _Processes:
    """Distinguishes uses by processes of the run from those by other programs."""

    def __init__(self, accesses: Sequence[Access], members: dict[int, bool | None]) -> None:
        self._members = members
        self._accesses: dict[Path, list[int]] = {}
        self._openings: dict[tuple[int, int], list[int]] = {}
        self._writers: dict[tuple[int, int], int] = {}
        self._all = accesses
        self._strangers = False in members.values()
        for number, access in enumerate(accesses):
            self._accesses.setdefault(access.path, []).append(number)
            if access.opened:
                self._openings.setdefault(access.file, []).append(number)
            if access.written:
                self._writers[access.file] = access.process

    def of_run(self, path: Path, uses: Sequence[Use]) -> tuple[list[Use], str | None]:
        """Return the uses by processes of the run, and why others may be among them."""
        renamed = {use.file for use in uses if use.file is not None}
        openings = [use for use in uses if use.file is None]
        opened = self._opened(path, renamed)
        for use in uses:
            if use.file is not None:
                use.process = self._writers.get(use.file)
        if len(opened) < len(openings):
            return self._together(path, uses, opened)
        # Several programs that open a file at once are one file event.
        uses = [*uses, *(Use(openings[-1].at if openings else 0.0, stored=False) for _ in opened[len(openings) :])]
        for use, access in zip([use for use in uses if use.file is None], opened, strict=True):
            use.process = access.process
        mine = [None if use.process is None else self._members.get(use.process) for use in uses]
        doubt = self._strangers and None in mine
        return [use for use, own in zip(uses, mine, strict=True) if own is not False], _UNSEEN if doubt else None

    def _opened(self, path: Path, renamed: Collection[tuple[int, int]]) -> list[Access]:
        """Return the openings of a file under its name: that of a file that gets the name later is none."""
        later = {self._openings[file][0] for file in renamed if file in self._writers and self._openings.get(file)}
        numbers = {
            *self._accesses.get(path, ()),
            *(number for file in renamed for number in self._openings.get(file, ())),
        }
        return [self._all[number] for number in sorted(numbers - later) if self._all[number].opened]

    def _together(self, path: Path, uses: Sequence[Use], opened: Sequence[Access]) -> tuple[list[Use], str | None]:
        """Judge uses of which some were reported as one: if other programs are among them, count those of the run."""
        seen = (*opened, *(self._all[number] for number in self._accesses.get(path, ())))
        mine = {self._members.get(access.process) for access in seen}
        if mine == {True} or not self._strangers:
            return list(uses), None
        if mine == {False}:
            return [], None
        own = [access for access in seen if self._members.get(access.process)]
        stores = len({id(access) for access in own if access.written})
        readings = len({id(access) for access in own if access.opened}) - stores
        last = uses[-1].at
        counted_uses = [Use(last, stored=place >= readings) for place in range(max(0, readings) + stores)]
        return counted_uses, "some uses by several programs were reported as one"
