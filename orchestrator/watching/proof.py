"""Proof that a run left every cache alone: changes and reads in the real roots.

*Changes* are found by comparing every name below a root before and after: size, inode and times. The time of a file's
last change of any kind (``ctime``) cannot be set back, so nothing is hashed or opened.

*Reads* are found by the kernel's file events. Without these the proof cannot be given, and says so. Listing a folder is
no read, because it gives nobody a kernel. Events come from every program and every user of this machine, and from no
other machine.

Neither shows which program it was, so another program that uses the same roots meanwhile makes a proof fail. Only where
the processes of the command were all looked at, none has loaded what uses the layer, and a program that ran before them
has, with the same roots by its own variables, the layer is *not used*.
"""

from __future__ import annotations

import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

from cachectl import layer_set
from cachectl.layers.base import processes
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.parts import Lookups
from cachectl.switching import child
from cachectl.watching import events, program_events, programs
from cachectl.watching.trace import make_observer, variables_of

#: Seconds without a look at the processes of the command in which a program could have used a cache unseen.
_LONGEST_PAUSE = 0.5
_OPENED, _CHANGED, _APPEARED, _VANISHED, _MOVED = "was opened", "was changed", "appeared", "vanished", "was moved"
#: The meaning of each event. Opening and reading a folder only lists it, and is excluded.
_WORDS: Mapping[int, str] = {
    events.OPEN: _OPENED,
    events.ACCESS: _OPENED,
    events.MODIFY: _CHANGED,
    events.CREATE: _APPEARED,
    events.MOVED_TO: _APPEARED,
    events.DELETE: _VANISHED,
    events.MOVED_FROM: _VANISHED,
    events.DELETE_SELF: _VANISHED,
    events.MOVE_SELF: _MOVED,
    events.UNMOUNTED: "was unmounted",
}
_ON_THE_WAY = events.ARRIVED | events.LEFT | events.DELETE_SELF | events.MOVE_SELF
_EVERYTHING = sum(_WORDS) - events.UNMOUNTED
#: Separates the name of a link from that of the file behind it.
_LEADS_TO = " -> "
#: The stamp of a name: kind, inode, size in bytes, last change of content and of any kind (ns). Folders have no size,
#: because the names in them are compared.
_Stamp = tuple[int, int, int, int, int]


#: The verdict on a layer, or on all layers.
HOLDS, UNUSED, UNKNOWN, FAILS = "holds", "not used", "cannot be given", "fails"


class Attestation(NamedTuple):
    """The observations in one layer's roots.

    ``compared`` counts the files that were there before, ``folders`` those under watch; ``notes`` are limits of that;
    ``unknown`` lists why something could not be observed; ``touches`` lists what happened to a path, in words (``was
    opened``, ``appeared``, ``vanished``). ``unused`` says why no process of the command can have used the layer; it is
    empty if one may have. ``others`` names other programs that used the same roots, and ``is_others`` says that they
    alone can have.
    """

    layer: str
    compared: int
    folders: int
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    touches: tuple[tuple[Path, tuple[str, ...]], ...]
    unused: str = ""
    others: str = ""
    is_others: bool = False

    @property
    def verdict(self) -> str:
        """Return the verdict: one touch fails, even if something else could not be observed."""
        if self.touches:
            return UNUSED if self.is_others else FAILS
        return UNKNOWN if self.unknown else HOLDS


class _Commands:
    """The processes of the command: what they have loaded, and which of them have other variables than it was given.

    Variables are those with which a program was started, which only Linux shows, and of a Python that is observed those
    that it had when it used a library.
    """

    def __init__(self, layers: Sequence[Layer], expected: Environment, notes: Path | None) -> None:
        self._names = {layer.name: frozenset(variables_of(layer)) for layer in layers}
        self._given = expected
        self._notes = notes
        parts = ((layer.name, layer.about.lookups or Lookups()) for layer in layers)
        self._lookups = {name: part for name, part in parts if part.mapped or part.opened}
        self._processes = programs.Processes(None, self._lookups, self._lookups, on_demand=True)
        self.hurry = self._processes.hurry
        self.hurry()
        self._present = frozenset(programs.numbers())
        self._watching = ExitStack()
        self._watching.enter_context(self._processes.watching())
        #: For how long the other programs that use the layers had run before.
        self._seconds = {pid: processes.seconds_run(pid) for pid in self._processes.strangers}
        #: The variables of each process.
        self._variables: list[tuple[int, Mapping[str, str]]] = []

    def end(self) -> None:
        """Stop looking, and read what the processes noted."""
        self._watching.close()
        self._variables = [(pid, program.variables) for (pid, _), program in self._processes.programs.items()]
        if self._notes is not None:
            noted, _ = program_events.read_events(self._notes)
            names = frozenset[str]().union(*self._names.values())
            views = program_events.environments(noted, self._given, names)
            self._variables += ((pid, view.variables) for pid, view in views.items())

    def doubts_of(self, layer: str) -> Iterator[str]:
        """Yield why the layer's real roots may not be the caches that the command used."""
        if self._processes.longest == math.inf:
            yield "the processes of the command were not looked at"
        first_having: dict[str, int] = {}
        for (pid, variables), name in product(self._variables, self._names[layer]):
            if (value := variables.get(name)) is not None and value != self._given.get(name):
                first_having.setdefault(f"{name}={value}", pid)
        yield from (f"PID {pid} has {setting}" for setting, pid in sorted(first_having.items()))

    def others_of(self, layer: Layer, paths: Iterable[Path]) -> dict[int, programs.Program]:
        """Return the other programs that ran meanwhile and use a layer in one of these roots, by their variables."""
        others = {}
        unset = dict.fromkeys(self._names[layer.name])
        for pid, program in self._processes.strangers.items():
            has_run = pid not in self._seconds or processes.seconds_run(pid) != self._seconds[pid]
            if has_run and layer.name in program.uses:
                with suppress(*FAILURES):
                    view = type(layer)(layer.environment.with_variables({**unset, **program.variables}))
                    if not {root.path for root in view.roots()}.isdisjoint(paths):
                        others[pid] = program
        return others

    def why_unused(self, layer: str) -> str:
        """Say why no process of the command can have used a layer; nothing if one may have."""
        looked, lookups = self._processes, self._lookups.get(layer)
        used = any(layer in program.uses for program in looked.programs.values())
        is_complete = not looked.hidden and looked.longest < _LONGEST_PAUSE
        # A file that is opened for a moment can be missed, unlike a library.
        if used or not is_complete or lookups is None or not lookups.mapped:
            return ""
        return f"no process of the command loaded {' or '.join(lookups.mapped)}"

    def are_older(self, others: Mapping[int, programs.Program]) -> bool:
        """Return whether other programs ran before the command; their children count as they do, such as a linker."""
        older = self._present & self._processes.strangers.keys()
        return all(pid in older or program.parent in older for pid, program in others.items())


@contextmanager
def proving(
    stack: layer_set.LayerSet,
    layers: Iterable[Layer],
    expected: Environment,
    *,
    left_out: frozenset[str],
    notice: Callable[[str], None],
) -> Iterator[tuple[Proof, Mapping[str, str]]]:
    """Prove during the block, in which a command runs, that it leaves the real roots of some layers alone.

    Yields the proof, which is complete after the block, and variables for the command besides those ``expected``.
    """
    layers = tuple(layers)
    with ExitStack() as block:

        def observe() -> tuple[Path, dict[str, str]]:
            folder = block.enter_context(child.isolated_root(stack.environment, notice=notice))
            # A driver is not listened to: only the variables of programs count.
            parts = {layer.name: (layer.about.lookups or Lookups())._replace(listeners={}) for layer in stack}
            return make_observer(folder, expected, parts, {name for layer in layers for name in variables_of(layer)})

        unseen = "variables that programs set themselves are not seen"
        notes, variables = child.try_extra(unseen, observe, notice) or (None, {})
        proof = Proof(stack, layers, expected, notes=notes, left_out=left_out)
        try:
            yield proof, variables
        finally:
            proof.end()


class Proof:
    """Watches the real roots of some layers, from its creation to :meth:`end`, and says then what was observed.

    ``expected`` is the command's environment, and ``notes`` the folder of events if its Pythons are observed.
    ``left_out`` names the layers that were meant to stay in use.
    """

    def __init__(
        self,
        stack: layer_set.LayerSet,
        layers: Iterable[Layer],
        expected: Environment,
        *,
        notes: Path | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        named = {layer.name: layer for layer in layers}
        self.left_out = tuple(name for name in named if name in left_out)
        self.attestations: tuple[Attestation, ...] = ()
        self._layers = {name: layer for name, layer in named.items() if name not in left_out}
        places, self._failed = events.places_of(stack)
        self._folders = [_Folder(place) for place in places if not place.layers.isdisjoint(self._layers)]
        self._commands = _Commands([*self._layers.values()], expected, notes)
        self._events = events.FileEvents(self._note)
        for folder in self._folders:
            if not os.path.isdir(folder.path):
                self._expect(folder)
            folder.begin(self._events)

    def of(self, verdict: str) -> tuple[str, ...]:
        """Return the names of the layers with a verdict."""
        return tuple(layer.layer for layer in self.attestations if layer.verdict == verdict)

    @property
    def holds(self) -> bool:
        """Return whether every layer is known to have been left alone; ``False`` if there is no layer."""
        return 0 < len(self.attestations) == len((*self.of(HOLDS), *self.of(UNUSED)))

    def end(self) -> Proof:
        """Stop watching, look at every root again, and return this proof."""
        self._events.stop()
        self._commands.end()
        for folder in self._folders:
            folder.end(lost=self._events.lost)
        self.attestations = tuple(self._attest(name, layer) for name, layer in self._layers.items())
        return self

    def _attest(self, name: str, layer: Layer) -> Attestation:
        folders = [folder for folder in self._folders if name in folder.layers]
        unknown = [self._failed[name]] if name in self._failed else []
        unknown += (reason for folder in folders for reason in folder.unknown_of(name))
        touches = [(path, what) for folder in folders for owners, path, what in folder.touches if name in owners]
        unused = self._commands.why_unused(name)
        # Other variables of what did not use it point at nothing.
        unknown += self._commands.doubts_of(name) if not unused else ()
        roots = [root.path for folder in folders for owner, root in folder.claims if owner.name == name]
        others = self._commands.others_of(layer, roots) if touches else {}
        return Attestation(
            name,
            sum(folder.files_of(name) for folder in folders),
            sum(folder.watched for folder in folders),
            tuple(note for folder in folders for note in folder.notes()),
            tuple(dict.fromkeys(unknown)),
            tuple(touches),
            unused,
            ", ".join(others[pid].command for pid in sorted(others)),
            bool(unused and others) and self._commands.are_older(others),
        )

    def _note(self, path: Path, mask: int) -> None:
        said = mask & ~(events.OPEN | events.ACCESS) if mask & events.FOLDER else mask
        words = [word for bit, word in _WORDS.items() if said & bit]
        self._commands.hurry()
        for folder in self._folders:
            folder.note(path, words)
            if mask & events.ARRIVED and folder.is_below(path):
                self._expect(folder)

    def _expect(self, folder: _Folder) -> None:
        """Watch for a folder that does not exist: each folder on the way to it, once it exists."""
        # Each turn gets one folder nearer, or finds that one has vanished.
        for _ in folder.path.parts:
            above = next(parent for parent in folder.path.parents if os.path.isdir(parent))
            if (reason := self._events.watch(above, _ON_THE_WAY)) is not None:
                folder.doubt(f"no file events ({reason})")
                return
            step = above / folder.path.relative_to(above).parts[0]
            if not os.path.isdir(step):
                return
            if step == folder.path:
                # It arrived before the watch was set.
                folder.note(step, (_APPEARED,))
                return


class _Folder(events.WatchedPlace):
    """One folder in which layers keep entries, before and after the run."""

    def __init__(self, place: events.WatchedPlace) -> None:
        super().__init__(place.path, place.claims, place.everybodys)
        self.shown = place.claims[0][1].path
        #: How many folders are under watch.
        self.watched = 0
        self._before: dict[str, _Stamp] = {}
        #: If several owners have files here, each file has to be asked for its own.
        self._is_shared = len(place.layers) > 1 or place.everybodys
        #: What events said of names below the place, and why something could not be observed there.
        self._seen: dict[tuple[str, str], None] = {}
        self._unknown: dict[tuple[str, str], None] = {}
        #: What happened to each path, to which layers it belongs, and in words.
        self.touches: list[tuple[frozenset[str], Path, tuple[str, ...]]] = []

    def doubt(self, reason: str, relative: str = "") -> None:
        """Record why something here could not be observed."""
        self._unknown[relative, reason] = None

    def _owners_of(self, relative: str) -> frozenset[str]:
        if not relative or not self._is_shared:
            return self.layers
        owners = self.owners(relative.partition(_LEADS_TO)[0])
        return owners if owners or self.everybodys else self.layers

    def files_of(self, layer: str) -> int:
        """Count the files of a layer that were there before."""
        files = (relative for relative, stamp in self._before.items() if not stat.S_ISDIR(stamp[0]))
        return sum(layer in self._owners_of(relative) for relative in files)

    def unknown_of(self, layer: str) -> Iterator[str]:
        """Yield why something of a layer could not be observed here."""
        yield from (reason for relative, reason in self._unknown if layer in self._owners_of(relative))
        if self.everybodys and self.is_unclear(layer):
            yield f"the layer cannot say which files in {self.shown} are its own"

    def notes(self) -> Iterator[str]:
        """Yield the limits of what events show here."""
        kind = processes.network_file_system(self.claims[0][0].environment, self.path)
        if self.watched and kind is not None:
            yield f"{self.shown} is on {kind}, where only events of this machine are reported"

    def begin(self, reader: events.FileEvents) -> None:
        """Record the present content, and watch it. A file made in between shows, because it was not there before."""
        self._before, watched = self._look()
        self.watched = sum(stat.S_ISDIR(self._before[relative][0]) for relative in watched)
        for relative in watched:
            path = self.path / relative
            # Of a folder that everybody uses, most events concern others.
            mask = _ON_THE_WAY if not relative and self.everybodys else _EVERYTHING
            if (reason := reader.watch(path, mask)) is not None:
                self.doubt(f"no file events ({reason})")
                return

    def is_below(self, path: Path) -> bool:
        """Return whether a path leads to this folder, which did not exist at the beginning."""
        return not self._before and path in self.path.parents

    def note(self, path: Path, words: Iterable[str]) -> None:
        """Record an event, unless it is of a file that is no layer's."""
        relative = self.relative(path)
        if relative is None:
            for word in {*words} & {_VANISHED, _MOVED} if self.is_below(path) else ():
                # The place may have come and gone in it.
                self.doubt(f"{path} {word}; its content meanwhile is unknown")
        elif self._owners_of(relative):
            for word in words:
                # A program may read what it wrote itself; no cache served that.
                if relative in self._before or word != _OPENED:
                    self._seen[relative, word] = None

    def end(self, *, lost: bool) -> None:
        """Record what happened to each path, by its content and by the events."""
        if lost:
            self.doubt(events.LOST)
        words: dict[str, dict[str, None]] = defaultdict(dict)
        after, _ = self._look()
        for relative in (*self._before, *(after.keys() - self._before.keys())):
            old, new = self._before.get(relative), after.get(relative)
            if old != new:
                words[relative][_APPEARED if old is None else _VANISHED if new is None else _CHANGED] = None
        if any(os.path.realpath(root.path) != str(self.path) for _, root in self.claims):
            # A link on the path leads elsewhere now.
            words[""][_MOVED] = None
        for relative, word in self._seen:
            words[relative][word] = None
        parents = {relative.rpartition("/")[0] for relative in words}
        for relative, what in words.items():
            # A folder changes whenever something in it comes or goes; that is reported for the thing itself.
            said = tuple(word for word in what if word != _CHANGED or relative not in parents)
            if said and (owners := self._owners_of(relative)):
                self.touches.append((owners, self.shown / relative, said))

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
        stamps[""] = (*top[:2], 0, 0, 0) if self._is_shared else top
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            watched.append(folder)
            for entry in self._entries(folder):
                relative = f"{folder}/{entry.name}" if folder else entry.name
                with suppress(OSError):
                    if not self._owners_of(relative):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    stamps[relative] = _stamp(status)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(relative)
                    elif stat.S_ISLNK(status.st_mode):
                        # A dangling or circular link leads nowhere.
                        behind = os.stat(entry.path)
                        if stat.S_ISDIR(behind.st_mode):
                            reason = "is a link to a folder elsewhere, which is not watched"
                            self.doubt(f"{self.shown / relative} {reason}", relative)
                        else:
                            stamps[f"{relative}{_LEADS_TO}{os.path.realpath(entry.path)}"] = _stamp(behind)
                            watched.append(relative)
                    elif status.st_nlink > 1 or (self.everybodys and not folder):
                        watched.append(relative)
        return stamps, watched

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(f"{self.path}/{folder}") as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.doubt(f"{self.shown / folder} cannot be listed: {error.strerror}", folder)
            return []


def _stamp(status: os.stat_result) -> _Stamp:
    kind = stat.S_IFMT(status.st_mode)
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return kind, status.st_ino, size, status.st_mtime_ns, status.st_ctime_ns
