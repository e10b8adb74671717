"""The store of layers whose entries are folders of files that only together are of use to the library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Damaged, LayerError, Unreachable
from cachectl.layers.base.store import Damage, unreadable
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.tree import Leaf, Shape, Tree
from cachectl.layers.stores.tree_store import TreeStore


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
    def damages(self, contents: Mapping[str, bytes]) -> Iterator[Damage]:
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

    def is_key(self, key: str) -> bool:
        """Compare with the pattern of entries."""
        return self.shape.accepts(key)

    def owns(self, root: facts.Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of entries and orphans."""
        return self.shape_of(root).owns(parts)

    def scan(self, root: facts.Root, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield entries with the problems of their files, and orphans."""
        yield from self.found_in(root, self.tree_of(root), contents=contents)

    def found_in(self, root: facts.Root, tree: Tree, *, contents: bool) -> Iterator[facts.Found]:
        """Yield what a tree of a root holds."""
        for leaf in tree.scan():
            if isinstance(leaf, facts.Problem):
                yield leaf
            elif leaf.orphan_rule is not None:
                yield leaf.orphan(root.path)
            elif all(member.path in self.beside for member in leaf.members):
                yield leaf.orphan(root.path, "a build that failed" if leaf.members else "an empty program folder")
            else:
                yield from self.described(root, tree, leaf, contents=contents)

    def read(self, root: facts.Root, key: str) -> facts.Artifact | None:
        """Read an entry as a deterministic tar. Raises :class:`Damaged`, also while a program is writing it."""
        members = self.tree_of(root).read_members(key) or {}
        files = {path: data for path, data in members.items() if self.is_carried(path)}
        if not files.keys() - self.beside:
            return None
        self._require_whole(key, files)
        return facts.Artifact(self.name, key, self.forms[0], pack(files), self.detail(key, files))

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check every file, since libraries hardly do."""
        try:
            files = unpack(artifact.data)
        except ValueError as error:
            raise Damaged(self.name, str(error), key) from error
        if not files.keys() - self.beside:
            raise Damaged(self.name, "the artifact holds no program", key)
        for path in files:
            if self.shape.members is not None and not self.shape.members.fullmatch(path):
                raise Damaged(self.name, f"{path!r} is no file of an entry", key)
        self._require_whole(key, files)
        return files

    def _require_whole(self, key: str, files: Mapping[str, bytes]) -> None:
        for damage in self.damages(files):
            raise Damaged(self.name, damage.message, key)

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check the files of each entry; one with a file that cannot be read may be whole."""
        tree = self.tree_of(root)
        for leaf in tree.scan():
            if isinstance(leaf, facts.Problem):
                yield self.to_finding(root, leaf)
            elif leaf.orphan_rule is None and leaf.members:
                yield from self._examined(root, tree, leaf)

    def _examined(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Finding]:
        contents: dict[str, bytes] = {}
        unread: list[facts.Finding] = []
        damages: list[Damage] = []
        for path in filter(self.is_checked, (member.path for member in leaf.members)):
            try:
                contents[path] = tree.read_file(leaf.key, path) or b""
            except Unreachable as error:  # noqa: PERF203 - one must not end the rest
                unread.append(self.to_finding(root, unreadable(root.path / leaf.key / path, error)))
            except LayerError as error:
                damages.append(Damage(facts.Severity.FAILS, f"{path}: {error.message}"))
        yield from unread
        for damage in damages or ([] if unread else self.damages(contents)):
            thing, fix = leaf.entry(self.name, root.path), f"cachectl purge --damaged {self.name}"
            yield facts.Finding(self.name, root.path, leaf.key, damage.severity, "damaged", damage.message, fix, thing)
