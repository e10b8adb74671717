"""Whether a run left every cache alone: what was written in the real roots, what was read there, and how that is known.

- *Written* is told by comparing every name below a root before and after: size, inode, times of change. The time of a
  file's last change of any kind (``ctime``) cannot be set back, so nothing needs to be hashed, or even opened.
- *Read* is told by the kernel's file events or, where these cannot be had, by access times. Where neither can, the
  proof cannot be given, and says so. Listing a folder is no reading: it gives nobody a kernel.

Neither knows whose doing it was: another program that uses the same roots meanwhile makes a proof fail, as it should.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.disk.plain import STAGE
from cachectl.layers.host.mounts import network_file_system
from cachectl.observing.access_times import prime, read_since, why_not_kept
from cachectl.observing.file_events import MOVED, OPENED, READ, VANISHED, Event, FileEvents, nearest
from cachectl.observing.snapshot import LEADS_TO, Mark, Snapshot, changed, is_folder

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.facts import Root
    from cachectl.layers.base.layer import Layer

_READING: Final = frozenset({OPENED, READ})
#: Begins the name of every folder that cachectl makes in a root.
_OWN: Final = STAGE.removesuffix("stage-")
_LOST: Final = "file events came faster than they could be taken"


class Verdict(Enum):
    """What can be said of a layer, or of all of them."""

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
    """What is known of one layer's roots.

    ``compared`` counts the files that were there before; ``means`` says how reading would have shown; ``unknown``
    why something could not be observed; ``touches`` what happened; ``roots`` are the places, and ``there`` those of
    them that existed.
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
        """Judge: a touch is enough to fail, whatever else could not be observed."""
        return Verdict.FAILS if self.touches else Verdict.UNKNOWN if self.unknown else Verdict.HOLDS


@dataclass(frozen=True, slots=True)
class Proof:
    """The attestations of all layers; ``left_out`` are those that were meant to stay in use."""

    attestations: tuple[Attestation, ...]
    left_out: tuple[str, ...] = ()

    def of(self, verdict: Verdict) -> tuple[str, ...]:
        """Name the layers of which that is the verdict."""
        return tuple(one.layer for one in self.attestations if one.verdict is verdict)

    @property
    def holds(self) -> bool:
        """Tell whether every layer is known to have been left alone; of none at all nothing is known."""
        return 0 < len(self.attestations) == len(self.of(Verdict.HOLDS))


class Watch:
    """The real roots of some layers under watch, from now to :meth:`end`.

    ``events`` and ``access_times`` say which means may be used to see reading; both where they can be had.
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
            # By now nothing of ours comes or goes any more.
            place.settle()

    def end(self) -> Proof:
        """Stop watching, look at every root again, and say what is known."""
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
    """Gather the roots of all layers by the folder they really are; several layers may keep theirs in one."""
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
    """Tell whether a user's variable names a folder that has other people's folders in it already."""
    value = layer.environment.get(root.source)
    if not value or Path(os.path.realpath(layer.environment.absolute(value))) != path:
        return False
    try:
        with os.scandir(path) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return False
    return any(_claims(layer, root, (name,)) is False for name in folders if not name.startswith(_OWN))


def _holds_others(path: Path, everybodys: Iterable[Path], by_path: dict[Path, list[tuple[Layer, Root]]]) -> bool:
    """Tell whether a folder is, or contains, a home, a temporary folder, or the root of another layer."""
    if path == Path(path.anchor) or any(path in (folder, *folder.parents) for folder in everybodys):
        return True
    ours = {layer.name for layer, _ in by_path[path]}
    return any(
        path in other.parents and not {layer.name for layer, _ in claimants} <= ours
        for other, claimants in by_path.items()
    )


class _Place:
    """One folder in which layers keep their entries, as it was and as it is."""

    def __init__(self, path: Path, claimants: tuple[tuple[Layer, Root], ...], *, everybodys: bool) -> None:
        self.path = path
        self.shown = claimants[0][1].path
        self.layers = frozenset(layer.name for layer, _ in claimants)
        self.before: dict[str, Mark] = {}
        #: How reading would show, beside events of so many folders.
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
        #: Why nothing tells that the place comes, where it is not there; then the folder above it does, by its times.
        self._blind: str | None = None
        self._above: tuple[Path, tuple[int, ...]] | None = None

    # ------------------------------------------------------------------ whose is what

    def owners(self, relative: str) -> frozenset[str]:
        """Name the layers to which a path below the place belongs."""
        if not relative or (len(self.layers) == 1 and not self._everybodys):
            return self.layers
        found = self._owners.get(relative)
        if found is None:
            found = self._claimed(tuple(relative.partition(LEADS_TO)[0].split("/")))
            if found:
                # In a folder that is everybody's there is no end of names that are no layer's.
                self._owners[relative] = found
        return found

    def _claimed(self, parts: tuple[str, ...]) -> frozenset[str]:
        claimed = frozenset(layer.name for layer, root in self._claimants if _claims(layer, root, parts))
        return claimed if claimed or self._everybodys else self.layers

    def files_of(self, layer: str) -> int:
        """Count the files of a layer that were there before."""
        files = (relative for relative, mark in self.before.items() if not is_folder(mark))
        return sum(layer in self.owners(relative) for relative in files)

    def unknown_of(self, layer: str) -> Iterator[str]:
        """Say what of a layer could not be observed here."""
        yield from (why for relative, why in self._unknown if layer in self.owners(relative))
        if layer in self._silent:
            yield f"the layer does not say what in {self.shown} is its own"

    # ------------------------------------------------------------------ before

    def begin(self, events: FileEvents, *, access_times: bool) -> None:
        """Note what is there, and see to it that reading it will show."""
        if not os.path.isdir(self.path):
            self._blind = events.expect(self.path)
            self._watched = self._blind is None
            self.before = self._look().marks
            return
        look = self._look()
        self.before = look.marks
        # What comes between the look and the watch was not there before, so it shows.
        why = next((why for name in look.watch if (why := self._watch(events, name)) is not None), None)
        if why is None:
            self._watched = True
            self.folders = look.folders
            self.means = self._of_this_machine()
        else:
            self._fall_back(f"no file events ({why})", look, access_times=access_times)

    def settle(self) -> None:
        """Note the folder in which the place would come, where no event tells of that."""
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
        """Use access times: prime what is there, then note it, since priming counts as a change."""
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
            self.means = f"access times of {_counted(len(self._primed), 'file')}"
        if reason is not None:
            self._unknown.append(("", f"{why}, and {reason}"))
        self.before = self._look().marks

    # ------------------------------------------------------------------ after

    def end(self, events: tuple[Event, ...], *, lost: bool) -> list[tuple[frozenset[str], Touch]]:
        """Say what has happened, and to which layers; ``lost`` tells that some events were."""
        if lost and self._watched:
            self._unknown.append(("", _LOST))
        if not self.before:
            self._unknown += [("", why) for why in dict.fromkeys(self._passed(events))]
        words: dict[str, dict[str, None]] = {}
        for relative, word in (*self._changes(), *self._told(events), *self._read()):
            words.setdefault(relative, {})[word] = None
        touched = {relative.rpartition("/")[0] for relative in words}
        return [
            (owners, Touch(self.shown / relative if relative else self.shown, _worded(relative_words)))
            for relative, relative_words in words.items()
            # A folder changes whenever something in it comes or goes, which is said of that.
            if (owners := self.owners(relative))
            and not (relative in touched and set(relative_words) == {"was changed"})
        ]

    def _changes(self) -> Iterator[tuple[str, str]]:
        after = self._look().marks
        for relative in (*self.before, *(after.keys() - self.before.keys())):
            word = changed(self.before.get(relative), after.get(relative))
            if word is not None:
                yield relative, word
        if any(os.path.realpath(root.path) != str(self.path) for _, root in self._claimants):
            # A link on the way to it leads elsewhere now.
            yield "", "was moved"

    def _told(self, events: Iterable[Event]) -> Iterator[tuple[str, str]]:
        for event in events:
            if event.path != self.path and self.path not in event.path.parents:
                continue
            relative = "" if event.path == self.path else str(event.path.relative_to(self.path))
            # What a program reads of its own making is nothing that a cache served.
            own_making = event.what in _READING and relative not in self.before
            if (self._watched or not self.before) and not own_making:
                yield relative, event.what

    def _passed(self, events: Iterable[Event]) -> Iterator[str]:
        """Say where the place may have come and gone unseen."""
        for event in events:
            if event.what in (VANISHED, MOVED) and event.path in self.path.parents:
                yield f"{event.path} {event.what}, and what was in it meanwhile is not known"
        if self._above is not None and _times(self._above[0]) != self._above[1]:
            yield f"{self._above[0]} was changed, and what came and went in it is not known: {self._blind}"

    def _read(self) -> Iterator[tuple[str, str]]:
        return ((self._files[path], READ) for path in read_since(self._primed))

    # ------------------------------------------------------------------ looking

    def _look(self) -> Snapshot:
        look = Snapshot(str(self.path), self.owners, one_by_one=self._everybodys)
        self._unknown += [doubt for relative, why in look.doubts if (doubt := self._doubt(relative, why))]
        if (mark := look.marks.get("")) is not None and (len(self.layers) > 1 or self._everybodys):
            # Of a folder that is not one layer's alone, no more than that it is there.
            look.marks[""] = (*mark[:2], 0, 0, 0)
        return look

    def _doubt(self, relative: str, why: str) -> tuple[str, str] | None:
        doubt = (relative, f"{self.shown / relative} {why}")
        return None if doubt in self._unknown else doubt


def _means(places: Iterable[_Place]) -> tuple[str, ...]:
    """Name the means by which reading would have shown in some places, each once."""
    seen = tuple(places)
    folders = sum(place.folders for place in seen)
    others = dict.fromkeys(place.means for place in seen if place.means is not None)
    return (*((f"file events on {_counted(folders, 'folder')}",) if folders else ()), *others)


def _claims(layer: Layer, root: Root, parts: tuple[str, ...]) -> bool | None:
    """Ask a layer for a path; one that fails to answer is taken for one that does not say."""
    try:
        return layer.store.owns(root, parts)
    except FAILURES:
        return None


def _says_nothing(layer: Layer, root: Root) -> bool:
    return _claims(layer, root, ("?",)) is None


def _times(folder: Path) -> tuple[int, ...]:
    """Return what changes of a folder when something in it comes or goes."""
    try:
        status = folder.lstat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _worded(words: Iterable[str]) -> tuple[str, ...]:
    """Leave out what goes without saying: that what was read or written was opened, and touched."""
    observed = set(words)
    implied = {OPENED} if observed & {READ, "was written"} else set()
    implied |= {"was touched"} if observed & {"was written", "appeared", "vanished"} else set()
    return tuple(word for word in words if word not in implied)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
