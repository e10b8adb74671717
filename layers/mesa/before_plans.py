"""Dry runs and quarantine of Mesa's store, until the protocol of stores no longer has them: then this file goes."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Unreachable
from cachectl.layers.base.facts import Root
from cachectl.layers.disk.atomic import write_synced
from cachectl.layers.disk.handles import opened_root
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.stores.quarantine import Quarantine, demand
from cachectl.layers.stores.tree import Tree
from cachectl.layers.stores.tree_store import TreeStore

if TYPE_CHECKING:
    from cachectl.layers.mesa.formats import Blob
    from cachectl.layers.mesa.pairs import Pair

_ASIDE: Final = "entry"


class Before(TreeStore):
    """The members that go."""

    @abstractmethod
    def tree(self, root: Root) -> Tree:
        """Return the tree of entries that are files."""

    @abstractmethod
    def pairs(self, root: Root) -> list[Pair]:
        """Return every pair of files in a root."""

    @abstractmethod
    def located(self, root: Root, name: str) -> tuple[Pair, Blob] | None:
        """Find an entry among the pairs of a root."""

    @abstractmethod
    def pair_for(self, root: Root, data: bytes, name: str) -> Pair:
        """Return the pair of files for an entry."""

    def _tree_for(self, root: Root, key: str) -> Tree:
        from cachectl.layers.mesa.store import shape_of

        return Tree(self.name, root.path, shape_of(root, key))

    def _is_packed(self, root: Root, key: str) -> bool:
        return root.role != "multi-file" and self.is_key(key)

    def held_in(self, root: Root, keys: Sequence[str]) -> Mapping[str, tuple[Path, ...]]:
        """Return both files of every pair in a root: only reading shows which of them has an entry."""
        if root.role == "multi-file":
            return super().held_in(root, keys)
        both = [path for pair in self.pairs(root) for path in (pair.path, pair.path.with_name(pair.form.index_name))]
        return {key: tuple(both) if self.is_key(key) else (root.path / key,) for key in keys}

    def lock_files(self, root: Root, keys: Iterable[str]) -> Iterable[Path]:
        """Return the data files: Mesa locks the one that it writes to."""
        del keys
        return () if root.role == "multi-file" else [pair.path for pair in self.pairs(root)]

    def bring_from(self, base: Root, root: Root) -> facts.Brought:
        """Link entries that are files, which Mesa replaces by a rename; copy those of a larger file one by one."""
        from cachectl.layers.stores.bases import Rules, bring_tree

        if root.role != "multi-file":
            return super().bring_from(base, root)
        return bring_tree(self.name, base.path, root.path, self.tree(root).shape, Rules("always"))

    def foresee_removal(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Foresight:
        """Also count the headers and records that a file keeps for each entry."""
        seen = super().foresee_removal(root, targets)
        if root.role == "multi-file":
            return seen
        names = {target.key.replace("/", "") for target in seen.going if self.is_key(target.key)}
        freed = sum(target.bytes for target in seen.going if not self.is_key(target.key))
        for pair in self.pairs(root):
            gone = [blob for blob in pair.blobs() if blob.name in names]
            freed += sum(blob.end - blob.begin + len(pair.form.record(blob)) for blob in gone)
        return replace(seen, bytes_freed=freed)

    def quarantine(self, root: Root, target: facts.Target, thing: facts.Quarantined) -> str | None:
        """Rename an entry, or a whole file, into quarantine; copy an entry of a file there, then remove it."""
        if not self._is_packed(root, target.key):
            with self.changing(root) if root.role == "multi-file" else nullcontext():
                return self._tree_for(root, target.key).quarantine(target, thing)
        found = self.located(root, target.key.replace("/", ""))
        if found is None:
            return "already gone"
        pair, blob = found
        content = pair.read(blob)
        with opened_root(root.path) as handle:
            if handle is None or content is None or blob.stamp != target.stamp:
                return "changed since it was planned"
            with Quarantine(self.name, root.path).shelf(handle, thing) as shelf:
                write_synced(shelf.handle, _ASIDE, content)
                stay: Mapping[str, str] = {blob.name: "was not taken out"}
                try:
                    removed = pair.remove({blob.name: blob.stamp})
                    stay = removed.stay
                finally:
                    if stay:
                        os.unlink(_ASIDE, dir_fd=shelf.handle)
                shelf.taken = not stay
                if removed.failed is not None and stay:
                    raise Unreachable(self.name, removed.failed, pair.path)
                return stay.get(blob.name)

    def restore(self, root: Root, thing: facts.Quarantined, *, replace: bool) -> None:
        """Put an entry, or a whole file, back unchanged."""
        if not self._is_packed(root, thing.key):
            with self.changing(root) if root.role == "multi-file" else nullcontext():
                self._tree_for(root, thing.key).restore(thing, replace=replace)
            return
        with Quarantine(self.name, root.path).taken(thing) as folder:
            demand(self.name, folder, _ASIDE)
            data = read_plain(_ASIDE, dir_fd=folder)
            name = thing.key.replace("/", "")
            self.pair_for(root, data, name).put(name, data, replace=replace)
