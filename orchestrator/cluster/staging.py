"""Staging on one node: fill a folder on its own disk from a bundle, and find the new entries at the end.

Nothing here uses MPI or knows other nodes. Programs run after any failure: with an empty folder if the bundle is
unusable, and as without staging if the disk is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from cachectl.inspecting.entries import listed
from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, CachectlError, reason_of
from cachectl.layers.base.selection import ALL
from cachectl.layers.disk.handles import probe_room
from cachectl.layers.disk.private_folders import NotPrivate, private_folder
from cachectl.moving.exporting import pack, unseen
from cachectl.moving.importing import Import, Trust, import_copy
from cachectl.switching.isolated import link_cache_home, make_isolated_root_in, remove_abandoned, remove_isolated_root
from cachectl.switching.run import variables_isolated

if TYPE_CHECKING:
    from collections.abc import Collection

#: Bytes of free space that a disk needs before programs are moved there.
_ROOM: Final = 1 << 20

#: Layer and key: the name of an entry in any root.
Name = tuple[str, str]


@dataclass
class NodeRoot:
    """The folder with the caches of all ranks of one node, for one job.

    Without a folder ``root`` is ``None`` and ``variables`` are empty: programs run as without staging. ``notes`` has a
    line for each problem.
    """

    environment: Environment
    root: Path | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    placed: int = 0
    useless: int = 0
    notes: list[str] = field(default_factory=list)
    _known: frozenset[Name] = frozenset()

    @classmethod
    def make(cls, environment: Environment, scratch: Path) -> NodeRoot:
        """Make an empty folder in ``scratch``, which is made if missing, and move every layer there.

        ``scratch`` is used directly if it is this user's own with mode 0700, else through its folder ``cachectl-UID``,
        which is. If another user could replace either, nothing is staged, and a note says so. Only layers that a rerun
        refills move: tuning results stay in place. Files of other programs in the user cache folder are linked.
        """
        made = cls(environment)
        try:
            parent = private_folder(scratch, make=True)
            remove_abandoned(environment, (parent,))
            made.root = make_isolated_root_in(parent, environment, "cachectl-stage-")
            probe_room(made.root, _ROOM)
            layers = LayerSet(environment).clearable()
            link_cache_home(environment, layers, made.root)
            made.variables = variables_isolated(layers, made.root)
        except NotPrivate as error:
            made.give_up(str(error))
        except (OSError, CachectlError) as error:
            made.give_up(f"{scratch}: {_reason(error)}")
        return made

    def give_up(self, why: str) -> None:
        """Stop using the folder: programs run as without staging, and a note gives the reason."""
        self.notes.append(f"not staged, so programs run cold or with the caches they have anyway: {why}")
        self.variables = {}
        self.placed = 0
        self.remove()

    def stack(self) -> LayerSet:
        """Return the layers as programs of this node find them."""
        unset = frozenset(name for name, value in self.variables.items() if value is None)
        put = {name: value for name, value in self.variables.items() if value is not None}
        moved = self.environment.with_variables(put, unset)
        return LayerSet(moved if self.root is None else replace(moved, temporary=self.root))

    def receive(self) -> BinaryIO | None:
        """Open a file for the bytes of a bundle on the node's own disk; ``None`` if that fails."""
        if self.root is None:
            return None
        try:
            return unseen(replace(self.environment, temporary=self.root))
        except OSError as error:
            self.give_up(_reason(error))
            return None

    def fill(self, copy: BinaryIO, name: str, sha256: str) -> None:
        """Place the entries of a bundle with this checksum that programs here can hit. A failure leaves them cold."""
        if self.root is None:
            return
        stack = self.stack()
        try:
            done = import_copy(stack, copy, name, Trust(sha256=sha256))
        except (OSError, CachectlError) as error:
            self.notes.append(f"starts cold: {_reason(error)}")
            return
        try:
            if done.failed:
                probe_room(self.root, _ROOM)
        except OSError as error:
            self.give_up(f"{self.root.parent}: {_reason(error)}")
            return
        self._note(done)
        self._known = frozenset(names_in(stack))

    def _note(self, done: Import) -> None:
        self.placed = sum(layer.placed + layer.there for layer in done.layers)
        self.useless = sum(layer.cannot_hit for layer in done.layers)
        failed = sum(len(layer.kept) + len(layer.failed) for layer in done.layers)
        total = self.placed + self.useless + failed
        for layer in done.layers:
            if layer.failed:
                first = layer.failed[0]
                self.notes.append(f"{layer.layer}: {len(layer.failed)} entries not placed: {first.because}")
            whys = [one.outlook.because for one in layer.foreseen if one.outlook.hits is False]
            if whys:
                cold = "starts cold" if not self.placed else f"{layer.layer} starts cold"
                self.notes.append(f"{cold}: {layer.cannot_hit} of {total} entries cannot hit: {whys[0]}")

    def new(self) -> frozenset[Name]:
        """Return the names of the entries added since programs began. An entry that only grew is not new."""
        return frozenset(names_in(self.stack())) - self._known if self.root is not None else frozenset()

    def pack(self, names: Collection[Name]) -> BinaryIO | None:
        """Return a bundle of these entries, rewound; ``None``, and a note, if it cannot be written."""
        packed = self.receive()
        if packed is None:
            return None
        try:
            pack(self.stack(), packed, names)
            packed.seek(0)
        except (OSError, CachectlError) as error:
            packed.close()
            self.notes.append(f"{len(names)} new entries are lost: {_reason(error)}")
            return None
        return packed

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        if self.root is not None:
            remove_isolated_root(self.root)
            self.root = None


class Sink:
    """A file that stops writing after the first failure and records the error."""

    def __init__(self, node: NodeRoot) -> None:
        self._node = node
        self.file = node.receive()

    def write(self, chunk: bytes | memoryview) -> None:
        """Append, unless that has failed before."""
        if self.file is None:
            return
        try:
            self.file.write(chunk)
            self.file.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if self.file is not None:
            # Closing flushes and so fails like the write, but it frees the handle.
            _quietly(self.file.close)
            self.file = None
        self._node.give_up(_reason(error))


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except OSError:
        return


def names_in(stack: LayerSet) -> set[Name]:
    """Return the names of all entries that a rerun refills; a layer that cannot be listed adds none."""
    names: set[Name] = set()
    for layer in stack.clearable():
        try:
            found = list(listed((layer,), ALL, lambda _: None))
        except FAILURES:
            continue
        names.update((layer.name, entry.key) for entry in found if entry.guest is None)
    return names


def _reason(error: OSError | CachectlError) -> str:
    return reason_of(error) if isinstance(error, OSError) else str(error)
