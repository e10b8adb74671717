"""Proof that a run left every cache alone: changes and reads in the real roots, and how they would have shown.

*Changes* are found by comparing every name below a root before and after: size, inode and times. The time of a file's
last change of any kind (``ctime``) cannot be set back, so nothing is hashed or opened.

*Reads* are found by the kernel's file events or, if these cannot be had, by access times. Without either the proof
cannot be given, and says so. Listing a folder is no read, because it gives nobody a kernel.

Neither shows which program it was. So a proof fails if another program uses the same roots meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.texts import plural
from cachectl.layers.disk.plain import STAGE
from cachectl.layers.host.mounts import network_file_system
from cachectl.observing.access_times import prime, read_since, why_not_kept
from cachectl.observing.file_events import MOVED, OPENED, READ, VANISHED, Event, FileEvents, nearest
from cachectl.observing.snapshot import LEADS_TO, Snapshot, Stamp, changed, is_folder

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.facts import Root
    from cachectl.layers.base.layer import Layer

_READING: Final = frozenset({OPENED, READ})
#: Begins the name of every folder that cachectl makes in a root.
_OWN: Final = STAGE.removesuffix("stage-")
_LOST: Final = "file events came faster than they could be read"


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

    ``compared`` counts the files that were there before; ``means`` names the means by which reads would have shown;
    ``unknown`` lists why something could not be observed; ``touches`` lists what happened; ``roots`` are the places,
    and ``there`` those that existed.
    """

    layer: str
    roots: tuple[Path, ...]
    there: tuple[Path, ...]
    compared: int
    means: tuple[str, ...]
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
    """Watches the real roots of some layers, from its creation to :meth:`end`.

    ``events`` and ``access_times`` say which means may be used to detect reads; by default both are used.
    """

    def __init__(
        self,
        stack: LayerSet,
        layers: Iterable[Layer],
        *,
        left_out: frozenset[str] = frozenset(),
        events: FileEvents | None = None,
        access_times: bool = True,
    ) -> None:
        named = tuple(layers)
        self._left_out = tuple(layer.name for layer in named if layer.name in left_out)
        self._layers = tuple(layer.name for layer in named if layer.name not in left_out)
        self._failed: dict[str, str] = {}
        everything = self._resolved(stack)
        self._places = [
            place for place in _places(everything, stack.environment) if place.layers & frozenset(self._layers)
        ]
        self._events = FileEvents() if events is None else events
        for place in self._places:
            place.begin(self._events, access_times=access_times)
        for place in self._places:
            # Our own files no longer come or go.
            place.settle()

    def end(self) -> Proof:
        """Stop watching, look at every root again, and return the proof."""
        events = self._events.stop()
        found = [(place, place.end(events, lost=self._events.lost)) for place in self._places]
        return Proof(tuple(self._attest(name, found) for name in self._layers), self._left_out)

    def _resolved(self, stack: LayerSet) -> list[tuple[Layer, Root]]:
        resolved: list[tuple[Layer, Root]] = []
        for layer in stack:
            try:
                resolved.extend((layer, root) for root in layer.roots())
            except FAILURES as error:  # noqa: PERF203 - a layer that fails stops none of the others
                self._failed[layer.name] = f"its roots are not known: {reason_of(error)}"
        return resolved

    def _attest(self, name: str, found: Iterable[tuple[_Place, list[tuple[frozenset[str], Touch]]]]) -> Attestation:
        mine = [(place, touches) for place, touches in found if name in place.layers]
        failed = [self._failed[name]] if name in self._failed else []
        return Attestation(
            name,
            roots=tuple(place.shown for place, _ in mine),
            there=tuple(place.shown for place, _ in mine if place.before),
            compared=sum(place.files_of(name) for place, _ in mine),
            means=_means([place for place, _ in mine]),
            unknown=tuple(dict.fromkeys([*failed, *(why for place, _ in mine for why in place.unknown_of(name))])),
            touches=tuple(touch for _, touches in mine for owners, touch in touches if name in owners),
        )


# ---------------------------------------------------------------------- places


def _places(everything: list[tuple[Layer, Root]], environment: Environment) -> list[_Place]:
    """Group the roots of all layers by their resolved folders; several layers may keep entries in one."""
    by_path: dict[Path, list[tuple[Layer, Root]]] = {}
    for layer, root in everything:
        by_path.setdefault(Path(os.path.realpath(root.path)), []).append((layer, root))
    common = (environment.home, environment.home_folder, environment.temporary)
    everybodys = {Path(os.path.realpath(folder)) for folder in common}
    return [
        _Place(
            path,
            tuple(claimants),
            everybodys=_holds_others(path, everybodys, by_path) or any(_is_mixed(*one, path) for one in claimants),
        )
        for path, claimants in by_path.items()
    ]


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


def _holds_others(path: Path, everybodys: Iterable[Path], by_path: dict[Path, list[tuple[Layer, Root]]]) -> bool:
    """Return whether a folder is, or contains, a home, a temporary folder, or the root of another layer."""
    if path == Path(path.anchor) or any(path in (folder, *folder.parents) for folder in everybodys):
        return True
    ours = {layer.name for layer, _ in by_path[path]}
    return any(
        path in other.parents and not {layer.name for layer, _ in claimants} <= ours
        for other, claimants in by_path.items()
    )


class _Place:
    """One folder in which layers keep entries, before and after the run."""

    def __init__(self, path: Path, claimants: tuple[tuple[Layer, Root], ...], *, everybodys: bool) -> None:
        self.path = path
        self.shown = claimants[0][1].path
        self.layers = frozenset(layer.name for layer, _ in claimants)
        self.before: dict[str, Stamp] = {}
        #: The means by which reads would show, beside events of so many folders.
        self.means: str | None = None
        self.folders = 0
        self._claimants = claimants
        self._everybodys = everybodys
        self._owners: dict[str, frozenset[str]] = {}
        self._silent = {layer.name for layer, root in claimants if everybodys and _says_nothing(layer, root)}
        self._unknown: list[tuple[str, str]] = []
        self._primed: dict[str, int] = {}
        self._files: dict[str, str] = {}
        self._watched = False
        #: For a missing place: why no event reports its creation. Then the times of the folder above show it.
        self._blind: str | None = None
        self._above: tuple[Path, tuple[int, ...]] | None = None

    # ------------------------------------------------------------------ whose is what

    def owners(self, relative: str) -> frozenset[str]:
        """Return the names of the layers that own a path below the place."""
        if not relative or (len(self.layers) == 1 and not self._everybodys):
            return self.layers
        found = self._owners.get(relative)
        if found is None:
            found = self._claimed(tuple(relative.partition(LEADS_TO)[0].split("/")))
            if found:
                # A shared folder may contain any number of names that belong to no layer.
                self._owners[relative] = found
        return found

    def _claimed(self, parts: tuple[str, ...]) -> frozenset[str]:
        claimed = frozenset(layer.name for layer, root in self._claimants if _owns(layer, root, parts))
        return claimed if claimed or self._everybodys else self.layers

    def files_of(self, layer: str) -> int:
        """Count the files of a layer that were there before."""
        files = (relative for relative, stamp in self.before.items() if not is_folder(stamp))
        return sum(layer in self.owners(relative) for relative in files)

    def unknown_of(self, layer: str) -> Iterator[str]:
        """Return why something of a layer could not be observed here."""
        yield from (why for relative, why in self._unknown if layer in self.owners(relative))
        if layer in self._silent:
            yield f"the layer cannot say which files in {self.shown} are its own"

    # ------------------------------------------------------------------ before

    def begin(self, events: FileEvents, *, access_times: bool) -> None:
        """Record the present content, and make sure that reads of it will show."""
        if not os.path.isdir(self.path):
            self._blind = events.expect(self.path)
            self._watched = self._blind is None
            self.before = self._look().stamps
            return
        look = self._look()
        self.before = look.stamps
        # A file made between the look and the watch shows, because it was not there before.
        why = next((why for name in look.watch if (why := self._watch(events, name)) is not None), None)
        if why is None:
            self._watched = True
            self.folders = look.folders
            self.means = self._of_this_machine()
        else:
            self._fall_back(f"no file events ({why})", look, access_times=access_times)

    def settle(self) -> None:
        """Record the state of the folder above the place if no event reports the creation of the place."""
        if self._blind is not None:
            above = nearest(self.path)
            self._above = (above, _times(above))

    def _watch(self, events: FileEvents, relative: str) -> str | None:
        top = not relative and self._everybodys
        path = self.path / relative
        why = events.watch(path, (lambda name: bool(self.owners(name))) if top else None)
        return why if why is not None and os.path.lexists(path) else None

    def _of_this_machine(self) -> str | None:
        kind = network_file_system(self.path, mounts=self._claimants[0][0].environment.mounts)
        return None if kind is None else f"{self.shown} is on {kind}, where only events of this machine are reported"

    def _fall_back(self, why: str, look: Snapshot, *, access_times: bool) -> None:
        """Use access times. Files are primed before they are recorded, because priming counts as a change."""
        if not look.files:
            self.means = "nothing there to be read"
            return
        if not access_times:
            self._unknown.append(("", why))
            return
        reason = why_not_kept(self.path)
        if reason is None:
            self._files = look.files
            self._primed, reason = prime(look.files)
            self.means = f"access times of {plural(len(self._primed), 'file')}"
        if reason is not None:
            self._unknown.append(("", f"{why}, and {reason}"))
        self.before = self._look().stamps

    # ------------------------------------------------------------------ after

    def end(self, events: tuple[Event, ...], *, lost: bool) -> list[tuple[frozenset[str], Touch]]:
        """Return what happened, and to which layers; ``lost`` says that some events were lost."""
        if lost and self._watched:
            self._unknown.append(("", _LOST))
        if not self.before:
            self._unknown += [("", why) for why in dict.fromkeys(self._passed(events))]
        words: dict[str, dict[str, None]] = {}
        for relative, word in (*self._changes(), *self._seen_in(events), *self._read()):
            words.setdefault(relative, {})[word] = None
        touched = {relative.rpartition("/")[0] for relative in words}
        return [
            (owners, Touch(self.shown / relative if relative else self.shown, _worded(relative_words)))
            for relative, relative_words in words.items()
            # A folder changes whenever something in it comes or goes; that is reported for the thing itself.
            if (owners := self.owners(relative))
            and not (relative in touched and set(relative_words) == {"was changed"})
        ]

    def _changes(self) -> Iterator[tuple[str, str]]:
        after = self._look().stamps
        for relative in (*self.before, *(after.keys() - self.before.keys())):
            word = changed(self.before.get(relative), after.get(relative))
            if word is not None:
                yield relative, word
        if any(os.path.realpath(root.path) != str(self.path) for _, root in self._claimants):
            # A link on the path leads elsewhere now.
            yield "", "was moved"

    def _seen_in(self, events: Iterable[Event]) -> Iterator[tuple[str, str]]:
        for event in events:
            if event.path != self.path and self.path not in event.path.parents:
                continue
            relative = "" if event.path == self.path else str(event.path.relative_to(self.path))
            # A program may read what it wrote itself; no cache served that.
            own_making = event.what in _READING and relative not in self.before
            if (self._watched or not self.before) and not own_making:
                yield relative, event.what

    def _passed(self, events: Iterable[Event]) -> Iterator[str]:
        """Return where the place may have come and gone unseen."""
        for event in events:
            if event.what in (VANISHED, MOVED) and event.path in self.path.parents:
                yield f"{event.path} {event.what}; its content meanwhile is unknown"
        if self._above is not None and _times(self._above[0]) != self._above[1]:
            yield f"{self._above[0]} was changed; what came and went in it is unknown: {self._blind}"

    def _read(self) -> Iterator[tuple[str, str]]:
        return ((self._files[path], READ) for path in read_since(self._primed))

    # ------------------------------------------------------------------ looking

    def _look(self) -> Snapshot:
        look = Snapshot(str(self.path), self.owners, one_by_one=self._everybodys)
        self._unknown += [doubt for relative, why in look.doubts if (doubt := self._doubt(relative, why))]
        if (stamp := look.stamps.get("")) is not None and (len(self.layers) > 1 or self._everybodys):
            # Of a folder that several owners share, only its existence counts.
            look.stamps[""] = (*stamp[:2], 0, 0, 0)
        return look

    def _doubt(self, relative: str, why: str) -> tuple[str, str] | None:
        doubt = (relative, f"{self.shown / relative} {why}")
        return None if doubt in self._unknown else doubt


def _means(places: Iterable[_Place]) -> tuple[str, ...]:
    """Return the means by which reads in some places would have shown, each once."""
    seen = tuple(places)
    folders = sum(place.folders for place in seen)
    others = dict.fromkeys(place.means for place in seen if place.means is not None)
    return (*((f"file events on {plural(folders, 'folder')}",) if folders else ()), *others)


def _owns(layer: Layer, root: Root, parts: tuple[str, ...]) -> bool | None:
    """Ask a layer whether it owns a path; a layer that fails to answer counts as unknown."""
    try:
        return layer.store.owns(root, parts)
    except FAILURES:
        return None


def _says_nothing(layer: Layer, root: Root) -> bool:
    return _owns(layer, root, ("?",)) is None


def _times(folder: Path) -> tuple[int, ...]:
    """Return the status values of a folder that change when something in it comes or goes."""
    try:
        status = folder.lstat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _worded(words: Iterable[str]) -> tuple[str, ...]:
    """Drop implied words: a file that was read or written was also opened and touched."""
    observed = set(words)
    implied = {OPENED} if observed & {READ, "was written"} else set()
    implied |= {"was touched"} if observed & {"was written", "appeared", "vanished"} else set()
    return tuple(word for word in words if word not in implied)
