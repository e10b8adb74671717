"""What layers have in common whose entries are programs, one file each, that tell by themselves what they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.errors import Damaged, LayerError, Unreachable
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    Entry,
    Finding,
    Found,
    Housekeeping,
    Orphan,
    Outcome,
    Problem,
    Quarantined,
    Removable,
    Root,
    Severity,
    Target,
)
from cachectl.layers.base.layer import Layer, each_part, remove_counted
from cachectl.layers.host.processes import spell, using
from cachectl.layers.stores.tree import REFUSALS, Leaf, Shape, Tree, scan_each

if TYPE_CHECKING:
    from cachectl.layers.formats.contents import Contents


class ProgramFiles(Layer):
    """A folder of programs under names that are hashes of what is not in them, so that no name can be checked."""

    #: The trees that entries lie in, by the number of folders above an entry; the first one has the temporaries.
    shapes: ClassVar[tuple[Shape, ...]]
    #: Those of the files that belong to the cache as a whole.
    books: ClassVar[tuple[Shape, ...]]
    #: What a program has loaded that may be writing here.
    libraries: ClassVar[tuple[str, ...]]
    #: What the driver makes of an entry that cannot be read, where that is known.
    unread: ClassVar[str | None] = None

    @abstractmethod
    def describe(self, data: bytes) -> Contents:
        """Read what an entry is; bytes that are not whole tell nothing."""

    @abstractmethod
    def complaint(self, data: bytes) -> tuple[Severity, str] | None:
        """Say what is wrong with the bytes of an entry, and what the driver makes of it."""

    def is_book(self, leaf: Leaf) -> bool:
        """Tell whether a file beside the entries is what its name says."""
        del leaf
        return True

    def changing(self, root: Root) -> AbstractContextManager[bool]:
        """Do what a change of entries needs around it; what is yielded: that nobody makes a folder meanwhile."""
        del root
        return nullcontext(enter_result=False)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse what needs directory handles where there are none."""
        return REFUSALS

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield entries, left temporaries, and the files of the cache as a whole."""
        for tree, leaf in self._walk(root, *self.shapes, *self.books):
            if isinstance(leaf, Problem):
                yield leaf
            elif leaf.stray is not None:
                yield leaf.orphan(root.path)
            elif tree.shape in self.books:
                if self.is_book(leaf):
                    yield Housekeeping(leaf.key, root.path, leaf.bytes, modified=leaf.modified)
            elif not contents:
                yield leaf.entry(self.name, root.path)
            else:
                yield from self._described(root, tree, leaf)

    def leaves(self, root: Root) -> Iterator[Leaf]:
        """Yield the entries as they lie on the disk. Raises :class:`Unreachable` where some cannot be looked at."""
        for _, leaf in self._walk(root, *self.shapes):
            if isinstance(leaf, Leaf):
                if leaf.stray is None:
                    yield leaf
            elif leaf.hides:
                raise Unreachable(self.name, leaf.message, leaf.path)

    def _walk(self, root: Root, *shapes: Shape) -> Iterator[tuple[Tree, Leaf | Problem]]:
        return scan_each(Tree(self.name, root.path, shape) for shape in shapes)

    def _described(self, root: Root, tree: Tree, leaf: Leaf) -> Iterator[Found]:
        try:
            data = tree.read_file(leaf.key)
        except LayerError as error:
            yield Problem(root.path / leaf.key, "unreadable", error.message)
            yield leaf.entry(self.name, root.path)
            return
        if data is None:
            return
        if (wrong := self.complaint(data)) is not None:
            yield Problem(root.path / leaf.key, "damaged", wrong[1])
        about = self.describe(data)
        yield Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            files=1,
            modified=leaf.modified,
            kernels=about.kernels,
            device=about.device,
            versions=about.versions,
            detail={"kind": about.kind},
            mark=leaf.mark,
        )

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Tell by the names of entries and temporaries, and of the files beside them."""
        del root
        return any(shape.claims(parts) for shape in (*self.shapes, *self.books))

    def _shape_of(self, key: str) -> Shape:
        above = key.count("/")
        return next((shape for shape in self.shapes if len(shape.levels) == above + 1), self.shapes[0])

    def _tree_of(self, root: Root, key: str) -> Tree:
        return Tree(self.name, root.path, self._shape_of(key))

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Tell by the pattern of entries."""
        return self._shape_of(key).accepts(key)

    def read(self, root: Root, key: str) -> Artifact | None:
        """Read an entry file as it stands."""
        data = self._tree_of(root, key).read(key)
        if data is None:
            return None
        if (wrong := self.complaint(data)) is not None:
            raise Damaged(self.name, wrong[1], root.path / key)
        about = self.describe(data)
        detail = {"kind": about.kind, "kernels": " ".join(about.kernels or ()), "device": about.device or ""}
        return Artifact(self.name, key, self.forms[0], data, {**detail, **about.versions})

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Place a whole program under the name it was taken from."""
        if (wrong := self.complaint(artifact.data)) is not None:
            raise Damaged(self.name, wrong[1], key)
        with self.changing(root):
            self._tree_of(root, key).write(key, artifact.data, replace=replace)

    # ------------------------------------------------------------------ clear

    def idle_gate(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Leave a temporary alone that a program may still be writing."""
        users = using(self.libraries, processes=self.environment.processes)
        reason = None if users == () else f"{spell(users)} may be writing it"
        for target in targets:
            yield target, reason if isinstance(target, Orphan) and target.idle_only else None

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Remove entries: to a program that looks for one it is a miss, and one that has it mapped keeps it."""
        planned = [
            (Tree(self.name, root.path, shape), [target for target in targets if self._shape_of(target.key) is shape])
            for shape in self.shapes
        ]

        def remove(alone: bool) -> Outcome:
            parts = ((str(root.path), partial(tree.remove, own, tidy=alone)) for tree, own in planned if own)
            return each_part(self.name, parts)

        return remove_counted(self.name, self.changing(root), remove)

    # ------------------------------------------------------------------ quarantine

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Rename an entry into quarantine."""
        with self.changing(root):
            return self._tree_of(root, target.key).set_aside(target, thing)

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Rename an entry back."""
        with self.changing(root):
            self._tree_of(root, thing.key).bring_back(thing, replace=replace)

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check that every entry is a whole program of a kind that the driver stores."""
        for tree, leaf in self._walk(root, *self.shapes):
            if isinstance(leaf, Problem):
                yield self.told(root, leaf)
            elif leaf.stray is None:
                yield from self._examined(root, tree, leaf)

    def _examined(self, root: Root, tree: Tree, leaf: Leaf) -> Iterator[Finding]:
        try:
            data = tree.read_file(leaf.key)
            wrong = None if data is None else self.complaint(data)
        except Unreachable as error:
            yield self.unreadable(root, leaf.key, error)
            return
        except LayerError as error:
            wrong = Severity.RECOMPILES, "; ".join(filter(None, (error.message, self.unread)))
        if wrong is not None:
            severity, message = wrong
            fix, thing = f"cachectl purge {self.name} --key {leaf.key}", leaf.entry(self.name, root.path)
            yield Finding(self.name, root.path, leaf.key, severity, "damaged", message, fix, thing)
