"""The stores of layers whose entries are files, or folders of files, in trees below the root."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace as changed
from functools import partial
from typing import ClassVar

from cachectl.layers.base import facts, lazy, store
from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Unreachable
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.host import processes
from cachectl.layers.stores import archive
from cachectl.layers.stores.tree import REFUSALS, Guard, Leaf, Shape, Tree, always, scan_each


class TreeStore(store.Store):
    """Entries in trees. A store says which files an artifact consists of, and what is held while they are placed."""

    #: The mode of the files of an entry.
    file_mode = 0o600
    refusals = REFUSALS

    @abstractmethod
    def tree_of(self, root: facts.Root, key: str) -> Tree:
        """Return the tree of an entry."""

    @abstractmethod
    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Return the files of an artifact by their paths in the entry; an entry that is a file has the path ``""``.

        Raises :class:`Damaged` if its library could not use them.
        """

    def changing(self, root: facts.Root) -> AbstractContextManager[object]:
        """Return what is held while entries of a root change."""
        del root
        return nullcontext()

    def guard(self, root: facts.Root, key: str) -> Guard:
        """Return what makes the context in which an entry is renamed."""
        del root, key
        return nullcontext

    def group(self, key: str) -> Hashable:
        """Return the same for entries with the same tree and the same guard."""
        del key
        return None

    def demand_replaceable(self, root: facts.Root, key: str, files: Mapping[str, bytes]) -> None:
        """Raise :class:`LayerError` if an entry must not be replaced by these files now."""

    @abstractmethod
    def read_entry(self, root: facts.Root, key: str) -> facts.Artifact | None:
        """Read one entry. Raises :class:`Damaged` if it is not whole."""

    def read(self, root: facts.Root, keys: Sequence[str]) -> Mapping[str, facts.Artifact | store.EntryError]:
        """Read entries one by one."""
        return store.read_each(partial(self.read_entry, root), keys)

    def write(
        self, root: facts.Root, artifacts: Sequence[facts.Artifact], *, replace: bool = False
    ) -> Mapping[str, bool | store.EntryError]:
        """Check entries, then place those of one tree and one guard together."""
        results: dict[str, bool | store.EntryError] = {}
        groups: dict[Hashable, dict[str, Mapping[str, bytes]]] = {}
        for artifact in artifacts:
            key = artifact.key
            try:
                files = self.files_of(key, artifact)
                if self._is_there(root, artifact, files, replace=replace):
                    results[key] = False
                    continue
                if replace:
                    self.demand_replaceable(root, key, files)
            except (LayerError, OSError) as error:
                results[key] = error
            else:
                groups.setdefault(self.group(key), {})[key] = files
        try:
            # Also if nothing is placed: that repairs the index.
            with self.changing(root) if groups or False in results.values() else nullcontext():
                for entries in groups.values():
                    results.update(self._place(root, entries, replace=replace))
        except (LayerError, OSError) as error:
            # What was placed is unsettled.
            for key in (key for entries in groups.values() for key in entries):
                if results.get(key, True) is True:
                    results[key] = error
        return results

    def _is_there(
        self, root: facts.Root, artifact: facts.Artifact, files: Mapping[str, bytes], *, replace: bool
    ) -> bool:
        """Return whether the same entry is there; its folder may have files that no artifact has."""
        try:
            return self.tree_of(root, artifact.key).is_same(artifact.key, files, replace=replace)
        except EntryExists:
            with suppress(LayerError, OSError):
                present = self.read_entry(root, artifact.key)
                if present is not None and present.data == artifact.data:
                    return True
            raise

    def _place(
        self, root: facts.Root, entries: Mapping[str, Mapping[str, bytes]], *, replace: bool
    ) -> Mapping[str, bool | LayerError]:
        first = next(iter(entries))
        tree = self.tree_of(root, first)
        tree.file_mode = self.file_mode
        results = tree.write(entries, guard=self.guard(root, first), replace=replace)
        for key, result in results.items():
            # Another process may just have placed the same.
            if isinstance(result, EntryExists) and tree.standing(key) == entries[key]:
                results[key] = False
        return results

    def unpacked(self, key: str, artifact: facts.Artifact, shape: Shape) -> dict[str, bytes]:
        """Return the files of an artifact. Raises :class:`Damaged` unless they are those of an entry of a shape."""
        try:
            files = archive.unpack(artifact.data) if shape.is_packed else {"": artifact.data}
        except ValueError as error:
            raise Damaged(self.name, f"not the tar of an entry: {error}", key) from error
        name = key.rpartition("/")[2]
        if (strange := shape.strange(name, files)) is not None:
            raise Damaged(self.name, f"{strange!r} is no file of an entry", key)
        if shape.companions is not None and name not in files:
            raise Damaged(self.name, f"lacks the file {name!r}", key)
        return files

    def examined(
        self,
        root: facts.Root,
        found: Iterable[tuple[Tree, Leaf | facts.Problem]],
        examine: Callable[[facts.Root, Tree, Leaf], Iterator[facts.Finding]],
    ) -> Iterator[facts.Finding]:
        """Yield the findings of each entry, and one for each thing that could not be read or is in the way."""
        for tree, leaf in found:
            if isinstance(leaf, facts.Problem):
                yield store.finding_of(self, root, leaf)
            elif leaf.orphan_rule is None:
                yield from examine(root, tree, leaf)


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
    :func:`cachectl.layers.stores.archive.unpack` opens. ``writers`` are name prefixes of libraries that may be writing
    an entry. ``unread`` is the effect of an unreadable entry on the library, if known.
    """

    def __init__(
        self,
        *patterns: str | Shape,
        codec: store.Codec,
        index: Index | None = None,
        writers: tuple[str, ...] = (),
        unread: str | None = None,
    ) -> None:
        self.shapes = tuple(
            Shape((lazy.regex(one),), folders=False) if isinstance(one, str) else one for one in patterns
        )
        self.codec = codec
        self.index = Index() if index is None else index
        self.writers = writers
        self.unread = unread
        self.forms = (codec.form,)

    # ------------------------------------------------------------------ listing

    def scan(self, root: facts.Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield entries, leaked temporaries, and the files of the cache as a whole."""
        del selection
        for tree, leaf in self._walk(root, *self.shapes, *self.index.shapes):
            if isinstance(leaf, facts.Problem):
                yield leaf
            elif leaf.orphan_rule is not None:
                yield leaf.orphan(self.name, root.path)
            elif tree.shape in self.index.shapes:
                if self.index.is_book(leaf):
                    yield changed(leaf.entry(self.name, root.path), sums=0)
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

    def kind_of(self, root: facts.Root, path: str) -> str:
        """Compare with the names of entries, temporaries, and files beside them."""
        del root
        if self._shape_of(path).accepts(path):
            return store.ENTRY
        parts = path.split("/")
        return store.OWN if any(shape.owns(parts) for shape in (*self.shapes, *self.index.shapes)) else store.FOREIGN

    def _shape_of(self, key: str) -> Shape:
        above = key.count("/")
        return next((shape for shape in self.shapes if len(shape.levels) == above + 1), self.shapes[0])

    def tree_of(self, root: facts.Root, key: str) -> Tree:
        """Return the tree of an entry, by the depth of its key."""
        return Tree(self.name, root.path, self._shape_of(key))

    # ------------------------------------------------------------------ get and put

    def read_entry(self, root: facts.Root, key: str) -> facts.Artifact | None:
        """Read an entry as its codec describes it."""
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
        files = self.unpacked(key, artifact, self._shape_of(key))
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

    def in_use(self, targets: Iterable[facts.Entry]) -> Iterator[tuple[facts.Entry, str | None]]:
        """Leave temporaries that a program may still be writing."""
        users = processes.using(self.writers, processes=self.environment.processes)
        reason = None if users == () else f"{processes.process_names(users)} may be writing it"
        for target in targets:
            yield target, reason if target.idle_only else None

    def remove(self, root: facts.Root, targets: tuple[facts.Entry, ...]) -> facts.Outcome:
        """Remove entries: programs that look for one miss, and programs that have one mapped keep it."""
        planned: dict[Shape, list[facts.Entry]] = {}
        for target in targets:
            books = (shape for shape in self.index.shapes if shape.accepts(target.key))
            planned.setdefault(next(books, None) or self._shape_of(target.key), []).append(target)

        def remove(alone: bool) -> facts.Outcome:
            tidy = always if alone else None
            trees = ((Tree(self.name, root.path, shape), own) for shape, own in planned.items())
            parts = [(str(root.path), partial(tree.remove, own, tidy=tidy)) for tree, own in trees]
            return store.each_part(facts.Outcome(self.name), parts)

        return store.remove_counted(self.name, self.index.changing(self, root), remove)

    # ------------------------------------------------------------------ verify

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check every entry, and the files beside the entries."""
        complete = True
        for finding in self.examined(root, self._walk(root, *self.shapes), self._examined):
            complete = complete and finding.code != "unreadable"
            yield finding
        if complete:
            yield from self.index.verify(self, root)

    def _examined(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Finding]:
        try:
            data = tree.read(leaf.key)
            damage = None if data is None else self.codec.check(data)
        except Unreachable as error:
            yield store.finding_of(self, root, store.unreadable(root.path / leaf.key, error))
            return
        except LayerError as error:
            effect = "" if self.unread is None else f"; {self.unread}"
            damage = store.Damage(facts.Severity.RECOMPILES, error.message + effect)
        if damage is not None:
            fix, thing = f"cachectl purge --damaged {self.name}", leaf.entry(self.name, root.path)
            yield facts.Finding(self.name, root.path, leaf.key, damage.severity, "damaged", damage.message, fix, thing)


class Folders(TreeStore):
    """Entries that are folders. A store describes an entry, and says what is wrong with the contents of its files."""

    #: The shape of entries.
    shape: ClassVar[Shape]
    #: Files that a folder may have without being an entry.
    beside: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def described(self, root: facts.Root, tree: Tree, leaf: Leaf, *, contents: bool) -> Iterator[facts.Found]:
        """Yield an entry, and the problems of its files."""

    @abstractmethod
    def damages(self, contents: Mapping[str, bytes]) -> Iterator[store.Damage]:
        """Yield what is wrong with an entry, by the contents of its checked files."""

    @abstractmethod
    def is_checked(self, path: str) -> bool:
        """Return whether the content of a file of an entry is checked."""

    def is_carried(self, path: str) -> bool:
        """Return whether a file of an entry is of use elsewhere."""
        del path
        return True

    def detail(self, key: str, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return what an artifact says of itself."""
        del key, files
        return {}

    def shape_of(self, root: facts.Root) -> Shape:
        """Return the shape of a root, which may have orphans of its own."""
        del root
        return self.shape

    def tree_of(self, root: facts.Root, key: str = "") -> Tree:
        """Return the tree of a root."""
        del key
        return Tree(self.name, root.path, self.shape_of(root))

    def kind_of(self, root: facts.Root, path: str) -> str:
        """Compare with the names of entries and orphans."""
        return self.shape_of(root).kind_of(path)

    def selected(self, root: facts.Root, selection: Selection) -> Tree:
        """Return a tree of a root with at least the selected entries."""
        del selection
        return self.tree_of(root)

    def scan(self, root: facts.Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield entries with the problems of their files, and orphans."""
        tree = self.selected(root, selection)
        for leaf in tree.scan():
            if isinstance(leaf, facts.Problem):
                yield leaf
            elif leaf.orphan_rule is not None:
                yield leaf.orphan(self.name, root.path)
            elif all(member.path in self.beside for member in leaf.members):
                why = "a build that failed" if leaf.members else "an empty program folder"
                yield leaf.orphan(self.name, root.path, why)
            else:
                yield from self.described(root, tree, leaf, contents=contents)

    def read_entry(self, root: facts.Root, key: str) -> facts.Artifact | None:
        """Read an entry as a deterministic tar; it is not whole while a program is writing it."""
        members = self.tree_of(root).read_members(key) or {}
        files = {path: data for path, data in members.items() if self.is_carried(path)}
        if not files.keys() - self.beside:
            return None
        self._require_whole(key, files)
        return facts.Artifact(self.name, key, self.forms[0], archive.pack(files), self.detail(key, files))

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check every file, since libraries hardly do."""
        files = self.unpacked(key, artifact, self.shape)
        if not files.keys() - self.beside:
            raise Damaged(self.name, "the artifact holds no program", key)
        self._require_whole(key, files)
        return files

    def _require_whole(self, key: str, files: Mapping[str, bytes]) -> None:
        for damage in self.damages(files):
            raise Damaged(self.name, damage.message, key)

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check the files of each entry; one with a file that cannot be read may be whole."""
        yield from self.examined(root, scan_each([self.tree_of(root)]), self._examined)

    def _examined(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Finding]:
        contents: dict[str, bytes] = {}
        unread: list[facts.Finding] = []
        damages: list[store.Damage] = []
        for path in filter(self.is_checked, (member.path for member in leaf.members)):
            try:
                contents[path] = tree.read_file(leaf.key, path) or b""
            except Unreachable as error:  # noqa: PERF203 - one must not end the rest
                unread.append(store.finding_of(self, root, store.unreadable(root.path / leaf.key / path, error)))
            except LayerError as error:
                damages.append(store.Damage(facts.Severity.FAILS, f"{path}: {error.message}"))
        yield from unread
        if not leaf.members:
            return
        for damage in damages or ([] if unread else self.damages(contents)):
            thing, fix = leaf.entry(self.name, root.path), f"cachectl purge --damaged {self.name}"
            yield facts.Finding(self.name, root.path, leaf.key, damage.severity, "damaged", damage.message, fix, thing)
