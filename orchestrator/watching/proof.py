"""Proof that a run left every cache alone: changes and reads in the real roots.

*Changes* are found by comparing every name below a root before and after: size, inode and times. The time of a file's
last change of any kind (``ctime``) cannot be set back, so nothing is hashed or opened.

*Reads* are found by the kernel's file events. Without these the proof cannot be given, and says so. Listing a folder is
no read, because it gives nobody a kernel. Events come from every program and every user of this machine, and from no
other machine.

Neither shows which program it was. So a proof fails if another program uses the same roots meanwhile.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.facts import Root
from cachectl.layers.base.layer import Layer
from cachectl.layers.disk.plain import STAGE
from cachectl.layers.host.mounts import network_file_system
from cachectl.watching import events
from cachectl.watching.events import LOST, FileEvents, everybodys_folders

_OPENED, _READ, _WRITTEN, _TOUCHED = "was opened", "was read", "was written", "was touched"
_APPEARED, _VANISHED, _MOVED, _CHANGED = "appeared", "vanished", "was moved", "was changed"
#: The meaning of each event. Opening and reading a folder only lists it, and is left out.
_WORDS: Final[Mapping[int, str]] = {
    events.OPEN: _OPENED,
    events.ACCESS: _READ,
    events.MODIFY: _WRITTEN,
    events.ATTRIBUTES: _TOUCHED,
    events.CREATE: _APPEARED,
    events.MOVED_TO: _APPEARED,
    events.DELETE: _VANISHED,
    events.MOVED_FROM: _VANISHED,
    events.DELETE_SELF: _VANISHED,
    events.MOVE_SELF: _MOVED,
    events.UNMOUNTED: "was unmounted",
}
_LISTING: Final = events.OPEN | events.ACCESS | events.ATTRIBUTES
_ON_THE_WAY: Final = events.ARRIVED | events.LEFT | events.DELETE_SELF | events.MOVE_SELF
_EVERYTHING: Final = sum(_WORDS) - events.UNMOUNTED
#: Limit on the number of different events that are kept.
_MOST: Final = 100_000
#: Begins the name of every folder that cachectl makes in a root.
_OWN: Final = STAGE.removesuffix("stage-")
#: Separates the name of a link from that of the file behind it.
_LEADS_TO: Final = " -> "
#: The stamp of a name: kind, inode, size in bytes, last change of content and of any kind (ns). Folders have no size,
#: because the names in them are compared.
_Stamp = tuple[int, int, int, int, int]


class Verdict(Enum):
    """The verdict on a layer, or on all layers."""

    HOLDS = "holds"
    UNKNOWN = "cannot be given"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Touch:
    """What happened to one path, in words (``was opened``, ``appeared``, ``vanished``)."""

    path: Path
    what: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attestation:
    """The observations in one layer's roots.

    ``compared`` counts the files that were there before, ``folders`` those under watch; ``notes`` are limits of that;
    ``unknown`` lists why something could not be observed; ``touches`` lists what happened; ``roots`` are the places,
    and ``present`` those that existed.
    """

    layer: str
    roots: tuple[Path, ...]
    present: tuple[Path, ...]
    compared: int
    folders: int
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    touches: tuple[Touch, ...]

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: one touch fails, even if something else could not be observed."""
        return Verdict.FAILS if self.touches else Verdict.UNKNOWN if self.unknown else Verdict.HOLDS


@dataclass(frozen=True, slots=True)
class Proof:
    """The attestations of all layers; ``left_out`` names the layers that were meant to stay in use."""

    attestations: tuple[Attestation, ...]
    left_out: tuple[str, ...] = ()

    def of(self, verdict: Verdict) -> tuple[str, ...]:
        """Return the names of the layers with a verdict."""
        return tuple(one.layer for one in self.attestations if one.verdict is verdict)

    @property
    def holds(self) -> bool:
        """Return whether every layer is known to have been left alone; ``False`` if there is no layer."""
        return 0 < len(self.attestations) == len(self.of(Verdict.HOLDS))


class Watch:
    """Watches the real roots of some layers, from its creation to :meth:`end`."""

    def __init__(self, stack: LayerSet, layers: Iterable[Layer], *, left_out: frozenset[str] = frozenset()) -> None:
        named = tuple(layer.name for layer in layers)
        self._left_out = tuple(name for name in named if name in left_out)
        self._layers = tuple(name for name in named if name not in left_out)
        self._failed: dict[str, str] = {}
        claims = list(self._resolved(stack))
        self._places = [place for place in _places(claims, stack.environment) if place.layers & {*self._layers}]
        self._seen: dict[tuple[Path, str], None] = {}
        self._full = False
        self._events = FileEvents(self._note)
        for place in self._places:
            if self._events.why_not is not None:
                place.doubt(f"no file events ({self._events.why_not})")
            elif not os.path.isdir(place.path):
                self._expect(place)
            place.begin(self._events)

    def end(self) -> Proof:
        """Stop watching, look at every root again, and return the proof."""
        self._events.stop()
        for place in self._places:
            if self._events.lost or self._full:
                place.doubt(LOST)
        touches = {place: place.end(self._seen) for place in self._places}
        return Proof(tuple(self._attest(name, touches) for name in self._layers), self._left_out)

    def _resolved(self, stack: LayerSet) -> Iterator[tuple[Layer, Root]]:
        for layer in stack:
            try:
                yield from [(layer, root) for root in layer.roots()]
            except FAILURES as error:  # noqa: PERF203 - a layer that fails stops none of the others
                self._failed[layer.name] = f"its roots are not known: {reason_of(error)}"

    def _note(self, path: Path, mask: int) -> None:
        """Record an event, unless it is of a file that is no layer's."""
        missing = [place for place in self._places if not place.before]
        names = ((place, place.relative(path)) for place in self._places)
        owned = any(name is not None and place.owners(name) for place, name in names)
        if not owned and not any(path in place.path.parents for place in missing):
            return
        for bit, word in _WORDS.items():
            if mask & bit & ~(_LISTING if mask & events.FOLDER else 0):
                self._full = self._full or len(self._seen) >= _MOST
                if not self._full:
                    self._seen[path, word] = None
        if mask & events.ARRIVED:
            for place in missing:
                if path in place.path.parents:
                    self._expect(place)

    def _expect(self, place: _Place) -> None:
        """Watch for a folder that does not exist: each folder on the way to it, once it exists."""
        # Each turn gets one folder nearer, or finds that one has vanished.
        for _ in place.path.parts:
            folder = next(above for above in place.path.parents if os.path.isdir(above))
            why = self._events.watch(folder, _ON_THE_WAY)
            if why is not None and os.path.isdir(folder):
                place.doubt(f"no file events ({why})")
                return
            step = folder / place.path.relative_to(folder).parts[0]
            if not os.path.isdir(step):
                return
            if step == place.path:
                # It arrived before the watch was set.
                self._seen[step, _APPEARED] = None
                return

    def _attest(self, name: str, found: Mapping[_Place, list[tuple[frozenset[str], Touch]]]) -> Attestation:
        mine = [place for place in self._places if name in place.layers]
        failed = [self._failed[name]] if name in self._failed else []
        return Attestation(
            name,
            roots=tuple(place.shown for place in mine),
            present=tuple(place.shown for place in mine if place.before),
            compared=sum(place.files_of(name) for place in mine),
            folders=sum(place.folders for place in mine),
            notes=tuple(note for place in mine if (note := place.limit) is not None),
            unknown=tuple(dict.fromkeys([*failed, *(why for place in mine for why in place.unknown_of(name))])),
            touches=tuple(touch for place in mine for owners, touch in found[place] if name in owners),
        )


# ---------------------------------------------------------------------- places


def _places(claims: Iterable[tuple[Layer, Root]], environment: Environment) -> Iterator[_Place]:
    """Group the roots of all layers by their resolved folders; several layers may keep entries in one."""
    by_path: dict[Path, list[tuple[Layer, Root]]] = {}
    for layer, root in claims:
        by_path.setdefault(Path(os.path.realpath(root.path)), []).append((layer, root))
    common = everybodys_folders(environment)
    names = {path: {layer.name for layer, _ in claimants} for path, claimants in by_path.items()}
    for path, claimants in by_path.items():
        holds_others = (
            path == Path(path.anchor)
            or any(path in (folder, *folder.parents) for folder in common)
            or any(path in other.parents and not names[other] <= names[path] for other in by_path)
        )
        mixed = holds_others or any(_is_mixed(*claim, path) for claim in claimants)
        yield _Place(path, tuple(claimants), everybodys=mixed)


def _is_mixed(layer: Layer, root: Root, path: Path) -> bool:
    """Return whether a user's variable names a folder that already contains other people's folders."""
    value = layer.environment.get(root.source)
    if not value or Path(os.path.realpath(layer.environment.absolute(value))) != path:
        return False
    try:
        with os.scandir(path) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return False
    return any(_owns(layer, root, (name,)) is False for name in folders if not name.startswith(_OWN))


def _owns(layer: Layer, root: Root, parts: tuple[str, ...]) -> bool | None:
    """Ask a layer whether it owns a path; a layer that fails to answer counts as unknown."""
    try:
        return layer.store.owns(root, parts)
    except FAILURES:
        return None


class _Place:
    """One folder in which layers keep entries, before and after the run."""

    def __init__(self, path: Path, claimants: tuple[tuple[Layer, Root], ...], *, everybodys: bool) -> None:
        self.path = path
        self.shown = claimants[0][1].path
        self.layers = frozenset(layer.name for layer, _ in claimants)
        self.before: dict[str, _Stamp] = {}
        self.folders = 0
        self.is_everybodys = everybodys
        self._claimants = claimants
        self._owners: dict[str, frozenset[str]] = {}
        #: Why something could not be observed, with the name below the place.
        self._unknown: dict[tuple[str, str], None] = {}

    def doubt(self, why: str, relative: str = "") -> None:
        """Record why something here could not be observed."""
        self._unknown[relative, why] = None

    @property
    def limit(self) -> str | None:
        """What no event reports here, in words."""
        kind = network_file_system(self.path, mounts=self._claimants[0][0].environment.mounts) if self.folders else None
        return None if kind is None else f"{self.shown} is on {kind}, where only events of this machine are reported"

    # ------------------------------------------------------------------ whose is what

    def owners(self, relative: str) -> frozenset[str]:
        """Return the names of the layers that own a path below the place."""
        if not relative or (len(self.layers) == 1 and not self.is_everybodys):
            return self.layers
        owners = self._owners.get(relative)
        if owners is None:
            parts = tuple(relative.partition(_LEADS_TO)[0].split("/"))
            owners = frozenset(layer.name for layer, root in self._claimants if _owns(layer, root, parts))
            owners = owners if owners or self.is_everybodys else self.layers
            if owners:
                # A shared folder may contain any number of names that belong to no layer.
                self._owners[relative] = owners
        return owners

    def relative(self, path: Path) -> str | None:
        """Return the name of a path below the place; ``None`` for a path elsewhere."""
        if path == self.path:
            return ""
        return str(path)[len(str(self.path)) + 1 :] if str(path).startswith(f"{self.path}/") else None

    def files_of(self, layer: str) -> int:
        """Count the files of a layer that were there before."""
        files = (relative for relative, stamp in self.before.items() if not stat.S_ISDIR(stamp[0]))
        return sum(layer in self.owners(relative) for relative in files)

    def unknown_of(self, layer: str) -> Iterator[str]:
        """Yield why something of a layer could not be observed here."""
        yield from (why for relative, why in self._unknown if layer in self.owners(relative))
        claims = [claim for claim in self._claimants if self.is_everybodys and claim[0].name == layer]
        if any(_owns(*claim, ("?",)) is None for claim in claims):
            yield f"the layer cannot say which files in {self.shown} are its own"

    # ------------------------------------------------------------------ before and after

    def begin(self, reader: FileEvents) -> None:
        """Record the present content, and watch it. A file made in between shows, because it was not there before."""
        self.before, watched = self._look()
        self.folders = sum(relative in self.before and stat.S_ISDIR(self.before[relative][0]) for relative in watched)
        for relative in watched if reader.why_not is None else ():
            path = self.path / relative
            # Of a folder that everybody uses, most events concern others.
            mask = _ON_THE_WAY if not relative and self.is_everybodys else _EVERYTHING
            if (why := reader.watch(path, mask)) is not None and os.path.lexists(path):
                self.doubt(f"no file events ({why})")
                return

    def end(self, seen: Iterable[tuple[Path, str]]) -> list[tuple[frozenset[str], Touch]]:
        """Return what happened, and to which layers."""
        words: dict[str, dict[str, None]] = {}
        for relative, word in (*self._changes(), *self._events_of(seen)):
            words.setdefault(relative, {})[word] = None
        parents = {relative.rpartition("/")[0] for relative in words}
        return [
            (owners, Touch(self.shown / relative if relative else self.shown, _worded(what)))
            for relative, what in words.items()
            # A folder changes whenever something in it comes or goes; that is reported for the thing itself.
            if (owners := self.owners(relative)) and not (relative in parents and set(what) == {_CHANGED})
        ]

    def _changes(self) -> Iterator[tuple[str, str]]:
        after, _ = self._look()
        for relative in (*self.before, *(after.keys() - self.before.keys())):
            old, new = self.before.get(relative), after.get(relative)
            if old is None or new is None:
                yield relative, _APPEARED if old is None else _VANISHED
            elif old != new:
                both_folders = stat.S_ISDIR(old[0]) and stat.S_ISDIR(new[0])
                yield relative, _CHANGED if both_folders else _TOUCHED if old[:-1] == new[:-1] else _WRITTEN
        if any(os.path.realpath(root.path) != str(self.path) for _, root in self._claimants):
            # A link on the path leads elsewhere now.
            yield "", _MOVED

    def _events_of(self, seen: Iterable[tuple[Path, str]]) -> Iterator[tuple[str, str]]:
        for path, word in seen:
            relative = self.relative(path)
            if relative is None:
                if not self.before and word in (_VANISHED, _MOVED) and path in self.path.parents:
                    # The place may have come and gone in it.
                    self.doubt(f"{path} {word}; its content meanwhile is unknown")
            elif relative in self.before or word not in (_OPENED, _READ):
                # A program may read what it wrote itself; no cache served that.
                yield relative, word

    def _look(self) -> tuple[dict[str, _Stamp], list[str]]:
        """Return the names here with their stamps, and the paths to watch; nothing is opened or hashed.

        All files are covered by watching folders, and files with several names, because a read by another name causes
        no event in the folder. In a place where most files belong to others, files of the top folder are watched one
        by one.
        """
        stamps: dict[str, _Stamp] = {}
        watched: list[str] = []
        try:
            top = _stamp(os.lstat(self.path))
        except OSError:
            return stamps, watched
        # Of a folder that several owners share, only its existence counts.
        stamps[""] = (*top[:2], 0, 0, 0) if len(self.layers) > 1 or self.is_everybodys else top
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            watched.append(folder)
            for entry in self._entries(folder):
                relative = f"{folder}/{entry.name}" if folder else entry.name
                with suppress(OSError):
                    if not self.owners(relative):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    stamps[relative] = _stamp(status)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(relative)
                    elif stat.S_ISLNK(status.st_mode):
                        # A dangling or circular link leads nowhere.
                        behind = os.stat(entry.path)
                        if stat.S_ISDIR(behind.st_mode):
                            why = "is a link to a folder elsewhere, which is not watched"
                            self.doubt(f"{self.shown / relative} {why}", relative)
                        else:
                            stamps[f"{relative}{_LEADS_TO}{os.path.realpath(entry.path)}"] = _stamp(behind)
                            watched.append(relative)
                    elif status.st_nlink > 1 or (self.is_everybodys and not folder):
                        watched.append(relative)
        return stamps, watched

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path / folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.doubt(f"{self.shown / folder} cannot be listed: {error.strerror}", folder)
            return []


def _worded(words: Iterable[str]) -> tuple[str, ...]:
    """Drop implied words: a file that was read or written was also opened and touched."""
    observed = set(words)
    implied = {_OPENED} if observed & {_READ, _WRITTEN} else set()
    implied |= {_TOUCHED} if observed & {_WRITTEN, _APPEARED, _VANISHED} else set()
    return tuple(word for word in words if word not in implied)


def _stamp(status: os.stat_result) -> _Stamp:
    kind = stat.S_IFMT(status.st_mode)
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return kind, status.st_ino, size, status.st_mtime_ns, status.st_ctime_ns
