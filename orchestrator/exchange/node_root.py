"""The caches of one node of a job: a folder that is filled from a source, and packed after the programs end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from cachectl.exchange import copying, place, push_pull
from cachectl.exchange import trust as trusting
from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, CachectlError, reason_of
from cachectl.layers.base.text import printable
from cachectl.layers.disk import handles, temporaries
from cachectl.switching import child

#: Bytes of free space that a disk must have for programs to be moved there.
_ROOM = 1 << 20

#: Layer and key: the name of an entry in any root.
Name = tuple[str, str]


def full_reason(error: Exception) -> str:
    """Return the message of an error; for an error of cachectl including the name of its layer."""
    return str(error) if isinstance(error, CachectlError) else reason_of(error)


def missing_words(source: str) -> str:
    """Return the message that a source does not exist, with the option that makes it."""
    shown = printable(place.without_secrets(source))
    return f"{shown} does not exist; --out {shown} makes it"


class Filling(NamedTuple):
    """What a node got from the source: placed entries, the reasons for trusting it, and whether it was usable."""

    placed: int = 0
    trusted: tuple[str, ...] = ()
    usable: bool = True


class NodeRoot:
    """The folder with the caches of all ranks of one node for one job, made empty in the node's temporary folder.

    If that is not this user's with mode 0700, its subfolder ``cachectl-UID`` is used. If another user could replace
    either, nothing is staged: ``root`` is ``None``, ``variables`` are empty, and programs run without staging. Only
    layers that a rerun refills move: tuning results stay in place. Files of other programs in the user cache folder are
    linked. ``notes`` has a line for each problem.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.root: Path | None = None
        self._folders = ExitStack()
        self.variables: Mapping[str, str | None] = {}
        self.notes: list[str] = []
        self._known: frozenset[Name] = frozenset()
        layers = LayerSet(environment).clearable()
        child.say_left_alone(layers, (), self.notes.append, off=False)
        try:
            with child.needed(environment.temporary):
                parent = temporaries.private_folder(environment.temporary, make=True)
                temporaries.remove_abandoned(environment, (parent,))
                folder = temporaries.owned_folder(parent, "cachectl-stage-", environment)
                self.root = self._folders.enter_context(folder)
                handles.probe_room(self.root, _ROOM)
                child.link_cache_home(environment, layers, self.root)
                self.variables = child.variables_isolated(layers, self.root)
        except CachectlError as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        self.notes.append(f"not staged, so programs run with their usual caches: {reason}")
        self.variables = {}
        self.remove()

    def stack(self) -> LayerSet:
        """Return the layers as programs on this node use them."""
        moved = self._environment.with_variables(self.variables)
        return LayerSet(moved if self.root is None else moved._replace(temporary=self.root))

    def fill(self, source: str, trust: trusting.Trust | None) -> Filling:
        """Pull a source. After a failure, programs start cold."""
        if self.root is None:
            return Filling()
        stack = self.stack()
        try:
            pulled = push_pull.pull(stack, source, trust)
        except place.Missing:
            self.notes.append(f"starts cold: {missing_words(source)}")
            return Filling()
        except FAILURES as error:
            self.notes.append(f"starts cold: {full_reason(error)}")
            return Filling(usable=False)
        try:
            if pulled.failed:
                handles.probe_room(self.root, _ROOM)
        except OSError as error:
            self._give_up(f"{self.root.parent}: {full_reason(error)}")
            return Filling()
        self._known = _names_in(stack)
        for layer in pulled.layers:
            copying.say_failed(layer.layer, "not placed", layer.failed, self.notes.append)
        reasons = [f"{note.key}: {note.because}" for note in pulled.unread]
        reasons += [outlook.words for layer in pulled.layers for outlook in layer.outlooks if outlook.hits is False]
        if reasons and not pulled.total.placed:
            self.notes.append(f"starts cold: {reasons[0]}")
        return Filling(pulled.total.placed, pulled.trusted)

    def new(self) -> frozenset[Name]:
        """Return the names of the entries added since programs began; an entry that grew is not new."""
        return _names_in(self.stack()) - self._known if self.root is not None else frozenset()

    def pack(self, others: frozenset[Name]) -> Path | None:
        """Return a bundle of the new entries that others lack; ``None`` if there are none, or after a noted failure.

        Entries that cannot be read are excluded.
        """
        if self.root is None:
            return None
        besides: dict[str, set[str]] = {}
        for layer, key in self._known | others:
            besides.setdefault(layer, set()).add(key)
        file = self.root / "new.zip"
        try:
            push_pull.push(self.stack(), file, besides=besides)
        except FAILURES as error:
            self.notes.append(f"new entries are lost: {full_reason(error)}")
        return file if file.exists() else None

    def take_notes(self) -> list[str]:
        """Return and clear the notes."""
        notes, self.notes = self.notes, []
        return notes

    def remove(self) -> None:
        """Remove the folder and its content."""
        self._folders.close()
        self.root = None


def _names_in(stack: LayerSet) -> frozenset[Name]:
    """Return the names of all entries that a rerun refills; a layer that cannot be listed adds none."""
    return frozenset((layer.name, key) for layer in stack.clearable() for key in copying.keys_of(layer))
