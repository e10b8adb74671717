"""The store of layers whose entries are files, or folders of files, in trees: placed one by one or many together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from cachectl.layers.base import facts
from cachectl.layers.base.errors import EntryExists, LayerError
from cachectl.layers.base.store import Store, attempt
from cachectl.layers.stores.tree import REFUSALS, Guard, Tree


class TreeStore(Store):
    """Entries in trees. A store says which files an artifact consists of, and what is held while they are placed."""

    #: The mode of the files of an entry.
    file_mode = 0o600

    def refusals(self) -> Mapping[facts.Ability, str]:
        """Return the abilities that need directory handles, if the platform has none."""
        return REFUSALS

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

    def write(self, root: facts.Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        """Place an entry whole, after it was checked."""
        files = self.files_of(key, artifact)
        if replace:
            self.demand_replaceable(root, key, files)
        with self.changing(root):
            self._writable(root, key).write_members(key, files, replace=replace, guard=self.guard(root, key))

    def _writable(self, root: facts.Root, key: str) -> Tree:
        tree = self.tree_of(root, key)
        tree.file_mode = self.file_mode
        return tree

    def _write_together(
        self, root: facts.Root, artifacts: Sequence[facts.Artifact]
    ) -> Mapping[str, bool | LayerError | OSError]:
        """Place the entries whose keys are free."""
        done: dict[str, bool | LayerError | OSError] = {}
        groups: dict[Hashable, dict[str, Mapping[str, bytes]]] = {}
        for artifact in artifacts:
            key = artifact.key
            if self.tree_of(root, key).standing(key) is None:
                files = attempt(partial(self.files_of, key, artifact))
                if isinstance(files, (LayerError, OSError)):
                    done[key] = files
                else:
                    groups.setdefault(self.group(key), {})[key] = files
        try:
            with self.changing(root) if groups else nullcontext():
                for group in groups.values():
                    key = next(iter(group))
                    done.update(self._writable(root, key).write_new(group, guard=self.guard(root, key)))
        except (LayerError, OSError) as error:
            # What was placed is unsettled.
            failed = [key for group in groups.values() for key in group if done.get(key, True) is True]
            done.update(dict.fromkeys(failed, error))
        # Another process may just have placed the same.
        return {key: result for key, result in done.items() if not isinstance(result, EntryExists)}
