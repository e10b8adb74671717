"""The store of layers that keep each entry in a file, or a folder of files, below the root."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from cachectl.layers.base import facts, store
from cachectl.layers.base.errors import Damaged, LayerError, Unreachable
from cachectl.layers.base.lazy import regex
from cachectl.layers.host.processes import process_names, using
from cachectl.layers.stores.archive import unpack
from cachectl.layers.stores.tree import Leaf, Shape, Tree, always, scan_each
from cachectl.layers.stores.tree_store import TreeStore


class Index:
    """Files that a cache keeps beside its entries, and their update when entries change.

    This base class is for a cache without such files.
    """

    #: Shapes of the files that belong to the cache as a whole.
    shapes: tuple[Shape, ...] = ()

    def is_book(self, leaf: Leaf) -> bool:
        """Return whether a file of these shapes has the content that its name promises."""
        del leaf
        return True

    def changing(self, store: Files, root: facts.Root) -> AbstractContextManager[bool]:
        """Return a context to hold while entries change; it yields whether no program can make a folder meanwhile."""
        del store, root
        return nullcontext(enter_result=False)

    def verify(self, store: Files, root: facts.Root) -> Iterator[facts.Finding]:
        """Yield differences between these files and the entries. Called only if every entry could be read."""
        del store, root
        yield from ()


class Files(TreeStore):
    """Entries that are files, or folders of files, under names of a pattern.

    ``patterns`` are regular expressions of file names, or the shapes of trees, which differ in their depth; leaked
    temporaries are orphans of the first. The codec reads an entry that is a folder as the tar of its files, which
    :func:`cachectl.layers.stores.archive.unpack` opens. ``writers`` are name prefixes of libraries that
    may be writing an entry. ``unread`` is the effect of an unreadable entry on the library, if known.
    """

    def __init__(
        self,
        *patterns: str | Shape,
        codec: store.Codec,
        index: Index | None = None,
        writers: tuple[str, ...] = (),
        unread: str | None = None,
    ) -> None:
        self.shapes = tuple(Shape((regex(one),), folders=False) if isinstance(one, str) else one for one in patterns)
        self.codec = codec
        self.index = Index() if index is None else index
        self.writers = writers
        self.unread = unread
        self.forms = (codec.form,)

    # ------------------------------------------------------------------ listing

    def scan(self, root: facts.Root, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield entries, leaked temporaries, and the files of the cache as a whole."""
        for tree, leaf in self._walk(root, *self.shapes, *self.index.shapes):
            if isinstance(leaf, facts.Problem):
                yield leaf
            elif leaf.orphan_rule is not None:
                yield leaf.orphan(root.path)
            elif tree.shape in self.index.shapes:
                if self.index.is_book(leaf):
                    yield facts.Housekeeping(leaf.key, root.path, leaf.bytes, modified=leaf.modified, disk=leaf.disk)
            elif not contents:
                yield leaf.entry(self.name, root.path)
            else:
                yield from self._described(root, tree, leaf)

    def leaves(self, root: facts.Root) -> Iterator[Leaf]:
        """Yield the leaves of all entries. Raises :class:`Unreachable` if some cannot be read."""
        for _, leaf in self._walk(root, *self.shapes):
            if isinstance(leaf, facts.Problem):
                if leaf.hides:
                    raise Unreachable(self.name, leaf.message, leaf.path)
            elif leaf.orphan_rule is None:
                yield leaf

    def _walk(self, root: facts.Root, *shapes: Shape) -> Iterator[tuple[Tree, Leaf | facts.Problem]]:
        return scan_each(Tree(self.name, root.path, shape) for shape in shapes)

    def _described(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Found]:
        try:
            data = tree.read(leaf.key)
        except LayerError as error:
            yield facts.Problem(root.path / leaf.key, "unreadable", error.message)
            yield leaf.entry(self.name, root.path)
            return
        if data is not None:
            if (damage := self.codec.check(data)) is not None:
                yield facts.Problem(root.path / leaf.key, "damaged", damage.message)
            yield leaf.entry(self.name, root.path, self.codec.describe(data))

    def owns(self, root: facts.Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of entries, temporaries, and files beside them."""
        del root
        return any(shape.owns(parts) for shape in (*self.shapes, *self.index.shapes))

    def is_key(self, key: str) -> bool:
        """Compare with the pattern of entries."""
        return self._shape_of(key).accepts(key)

    def _shape_of(self, key: str) -> Shape:
        above = key.count("/")
        return next((shape for shape in self.shapes if len(shape.levels) == above + 1), self.shapes[0])

    def tree_of(self, root: facts.Root, key: str) -> Tree:
        """Return the tree of an entry, by the depth of its key."""
        return Tree(self.name, root.path, self._shape_of(key))

    # ------------------------------------------------------------------ get and put

    def read(self, root: facts.Root, key: str) -> facts.Artifact | None:
        """Read an entry file. Raises :class:`Damaged`."""
        data = self.tree_of(root, key).read(key)
        if data is None:
            return None
        if (damage := self.codec.check(data)) is not None:
            raise Damaged(self.name, damage.message, root.path / key)
        about = self.codec.describe(data)
        detail = {"kernels": " ".join(about.kernels or ()), "device": about.device or ""}
        return facts.Artifact(self.name, key, self.codec.form, data, {**about.words, **detail, **about.versions})

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check the whole entry."""
        shape = self._shape_of(key)
        try:
            files = unpack(artifact.data) if shape.folders else {"": artifact.data}
        except ValueError as error:
            raise Damaged(self.name, f"not the tar of an entry: {error}", key) from error
        if shape.members is not None and (strange := [path for path in files if not shape.members.fullmatch(path)]):
            raise Damaged(self.name, f"{strange[0]!r} is no file of an entry", key)
        if (damage := self.codec.check(artifact.data)) is not None:
            raise Damaged(self.name, damage.message, key)
        return files

    def changing(self, root: facts.Root) -> AbstractContextManager[object]:
        """Keep the index right."""
        return self.index.changing(self, root)

    def group(self, key: str) -> Hashable:
        """Return the depth of a key, by which trees differ."""
        return key.count("/")

    # ------------------------------------------------------------------ clear

    def in_use(self, targets: Iterable[facts.Removable]) -> Iterator[tuple[facts.Removable, str | None]]:
        """Leave temporaries that a program may still be writing."""
        users = using(self.writers, processes=self.environment.processes)
        reason = None if users == () else f"{process_names(users)} may be writing it"
        for target in targets:
            yield target, reason if isinstance(target, facts.Orphan) and target.idle_only else None

    def remove(self, root: facts.Root, targets: tuple[facts.Removable, ...]) -> facts.Outcome:
        """Remove entries: programs that look for one miss, and programs that have one mapped keep it."""
        planned: dict[Shape, list[facts.Removable]] = {}
        for target in targets:
            books = (shape for shape in self.index.shapes if shape.accepts(target.key))
            planned.setdefault(next(books, None) or self._shape_of(target.key), []).append(target)

        def remove(alone: bool) -> facts.Outcome:
            tidy = always if alone else None
            trees = ((Tree(self.name, root.path, shape), own) for shape, own in planned.items())
            parts = [(str(root.path), own, partial(tree.remove, own, tidy=tidy)) for tree, own in trees]
            return store.each_part(self.name, parts)

        return store.remove_counted(self.name, self.index.changing(self, root), remove)

    # ------------------------------------------------------------------ verify

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check every entry, and the files beside the entries."""
        complete = True
        for tree, leaf in self._walk(root, *self.shapes):
            findings: Iterable[facts.Finding] = ()
            if isinstance(leaf, facts.Problem):
                findings = [self.to_finding(root, leaf)]
            elif leaf.orphan_rule is None:
                findings = self._examined(root, tree, leaf)
            for finding in findings:
                complete = complete and finding.code != "unreadable"
                yield finding
        if complete:
            yield from self.index.verify(self, root)

    def _examined(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Finding]:
        try:
            data = tree.read(leaf.key)
            damage = None if data is None else self.codec.check(data)
        except Unreachable as error:
            yield self.to_finding(root, store.unreadable(root.path / leaf.key, error))
            return
        except LayerError as error:
            effect = "" if self.unread is None else f"; {self.unread}"
            damage = store.Damage(facts.Severity.RECOMPILES, error.message + effect)
        if damage is not None:
            fix, thing = f"cachectl purge --damaged {self.name}", leaf.entry(self.name, root.path)
            yield facts.Finding(self.name, root.path, leaf.key, damage.severity, "damaged", damage.message, fix, thing)
