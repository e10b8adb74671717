"""The store of the CUDA ComputeCache: one file for each entry, and an index that the driver keeps under a lock.

The format is in :mod:`cachectl.layers.formats.compute_cache`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from cachectl.layers import cuda
from cachectl.layers.base import errors, facts, lazy
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.base.store import Codec, Damage, counting, finding_of, unreadable
from cachectl.layers.disk import atomic, handles, locks, plain, presence
from cachectl.layers.formats import compute_cache, details
from cachectl.layers.host import processes
from cachectl.layers.stores import files
from cachectl.layers.stores.tree import Leaf, Shape, Tree

INDEX: Final = "index"
_DIGIT: Final = lazy.regex("[0-9a-f]")
_SHAPE: Final = Shape((_DIGIT, _DIGIT, lazy.regex("[0-9a-f]{14}")), folders=False)
_INDEX: Final = Shape((lazy.regex(INDEX),), folders=False)
#: The largest index that is read, in bytes: four million entries.
_LARGEST_INDEX: Final = 1 << 26


class ComputeCodec(Codec):
    """A header, the key, and what the driver compiled."""

    form = "cuda-entry/65"

    def describe(self, data: bytes) -> details.Details:
        """Return what the key says."""
        key = compute_cache.key_of(data)
        if key is None:
            return details.Details()
        return details.Details(None, compute_cache.kernels(key), compute_cache.device(key), compute_cache.driver(key))

    def check(self, data: bytes) -> Damage | None:
        """Check version and lengths. Only the whole check compares the name and the checksum."""
        wrong = compute_cache.form_complaint(data)
        return None if wrong is None else Damage(facts.Severity.HARMLESS, wrong)


class ComputeIndex(files.Index):
    """The list of entries and their sizes. Where it is missing or empty, the driver drops every entry."""

    shapes = (_INDEX,)

    def read(self, root: facts.Root) -> bytes | None:
        """Return the bytes of the index; ``None`` where there is no plain file. Raises :class:`OSError`."""
        try:
            return plain.read_locked(root.path / INDEX, limit=_LARGEST_INDEX)
        except OSError as error:
            if presence.means_no_file(error):
                return None
            raise

    @contextmanager
    def changing(self, store: files.Files, root: facts.Root) -> Iterator[bool]:
        """Hold the driver's lock around a change of entries, then make the index list exactly the entries there are.

        The index is also written if the change fails. Raises :class:`Unsettled` where only the writing fails. Listed
        entries keep their order, which is the order of eviction; others follow by age. The file is overwritten in
        place, then shortened: the driver accepts one that is too long meanwhile. An index of another version is left
        alone. Yields whether no process has a driver loaded.
        """
        path, environment, handle = root.path / INDEX, store.environment, None
        with ExitStack() as stack:
            folder = stack.enter_context(handles.opened_root(root.path))
            if folder is not None and handles.status_of(folder, INDEX) is not None:
                lock_timeout = environment.lock_timeout
                lock = locks.record_lock(store.name, path, folder=folder, lock_timeout=lock_timeout, create=False)
                handle = stack.enter_context(lock)
            stack.enter_context(counting(store.name, path, partial(self._recount, store, root, folder, handle)))
            yield processes.using(cuda.LIBRARIES, processes=environment.processes) == ()

    def _recount(self, store: files.Files, root: facts.Root, folder: int | None, handle: int | None) -> None:
        """Write the index: the locked one, or a new one if there are entries. The root is made with the first entry."""
        with ExitStack() as stack:
            if folder is None:
                folder = stack.enter_context(handles.opened_root(root.path))
            if folder is None or (handle is None and not _standing(store, root, folder)[0]):
                return
            if handle is None:
                path, lock_timeout = root.path / INDEX, store.environment.lock_timeout
                handle = stack.enter_context(
                    locks.record_lock(store.name, path, folder=folder, lock_timeout=lock_timeout)
                )
            old = os.pread(handle, min(os.fstat(handle).st_size, _LARGEST_INDEX), 0)
            if not old or compute_cache.is_index(old):
                listed = compute_cache.read_index(old) or ()
                new = compute_cache.write_index(_records(*_standing(store, root, folder), listed, root.path))
                if new != old:
                    atomic.overwrite(handle, old, new)

    def verify(self, store: files.Files, root: facts.Root) -> Iterator[facts.Finding]:
        """Compare the index with the entries, if all of them can be read."""
        leaves, unread = _standing(store, root)
        if unread:
            return
        sizes = {number: leaf.bytes - compute_cache.HEADER.size for number, leaf in leaves.items()}
        try:
            data = self.read(root)
        except OSError as error:
            yield finding_of(store, root, unreadable(root.path / INDEX, error))
            return
        index = compute_cache.read_index(data) if data else None
        if index is None and (sizes or data):
            state = "is not whole" if data else "is empty or missing"
            complaint = f"the index {state}: the driver drops every entry when it next stores one"
        elif index is not None and dict(index) != sizes:
            complaint = "the index does not list the entries that are there"
        else:
            return
        fix, thing = "nothing: the next put or purge in this layer writes it again", None
        if data and not compute_cache.is_index(data):
            fix = "nothing: cachectl does not use an index of another version"
            if compute_cache.may_be_index(data):
                fix, leaf = (f"cachectl purge --damaged {store.name}", store.tree_of(root, INDEX).find(INDEX))
                thing = None if leaf is None else leaf.orphan(root.path, complaint)
        yield facts.Finding(store.name, root.path, INDEX, facts.Severity.WASTES, "index", complaint, fix, thing)


class ComputeCache(files.Files):
    """One file for each entry, two levels deep, recognised by its name and its header."""

    file_mode = 0o644

    def __init__(self) -> None:
        self.compute_index = ComputeIndex()
        # The driver rewrites a damaged entry in place.
        super().__init__(_SHAPE, codec=ComputeCodec(), index=self.compute_index)

    def scan(self, root: facts.Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[facts.Found]:
        """Add an index that is not whole."""
        yield from super().scan(root, selection, contents=contents)
        try:
            index = self.compute_index.read(root)
        except OSError as error:
            yield unreadable(root.path / INDEX, error)
        else:
            if index and compute_cache.read_index(index) is None:
                yield facts.Problem(root.path / INDEX, "index", "is not whole")

    def _walk(self, root: facts.Root, *shapes: Shape) -> Iterator[tuple[Tree, Leaf | facts.Problem]]:
        """Leave alone what has the name of an entry, but not its format; add the headers of entries."""
        index = None
        # A scan reports it.
        with suppress(OSError):
            index = self.compute_index.read(root)
        for tree, leaf in super()._walk(root, *shapes):
            if isinstance(leaf, facts.Problem) or leaf.orphan_rule is not None or tree.shape is not _SHAPE:
                yield tree, leaf
                continue
            path = root.path / leaf.key
            try:
                head = tree.read_file(leaf.key, limit=compute_cache.HEADER.size) or b""
            except errors.LayerError as error:
                yield tree, unreadable(path, error)
                continue
            if _is_entry(leaf.key, head, index):
                yield tree, leaf._replace(head=head)
            else:
                message = "has the name of an entry but not its format; left alone"
                yield tree, facts.Problem(path, "unrecognised", message)

    def _described(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Found]:
        """Describe an entry by its key; one of another format version is opaque."""
        header, data = compute_cache.read_header(leaf.head), b""
        if header is not None and not header.known:
            yield replace(leaf.entry(self.name, root.path), detail={"format": "unknown"})
            return
        if header is None or header.file_size != leaf.bytes:
            message = f"is {leaf.bytes} bytes long, which its header does not say"
            yield facts.Problem(root.path / leaf.key, "damaged", message)
        else:
            data = tree.read_file(leaf.key, limit=compute_cache.HEADER.size + header.key_length) or b""
        key, entry = (compute_cache.key_of(data), leaf.entry(self.name, root.path, self.codec.describe(data)))
        yield entry if key is None else replace(entry, detail={"half": compute_cache.half(key)})

    def tree_of(self, root: facts.Root, key: str) -> Tree:
        """Return the tree of entries, or that of the index."""
        return Tree(self.name, root.path, _INDEX if key == INDEX else _SHAPE)

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check name and checksum."""
        if (complaint := compute_cache.complaint(key, artifact.data)) is not None:
            raise errors.Damaged(self.name, complaint, key)
        return {"": artifact.data}

    def find_tagged(
        self, root: facts.Root, tag: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[facts.Removable, str]]:
        """Look for the tag in the keys."""
        del known
        tree = self.tree_of(root, "")
        yield from tree.tagged(tag, since, lambda leaf: compute_cache.key_of(tree.read_file(leaf.key) or b""))

    def _examined(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Finding]:
        try:
            data = tree.read_file(leaf.key)
            complaint = None if data is None else compute_cache.complaint(leaf.key, data)
        except errors.Unreachable as error:
            yield finding_of(self, root, unreadable(root.path / leaf.key, error))
            return
        except errors.LayerError as error:
            complaint = error.message
        header = compute_cache.read_header(leaf.head)
        if complaint is not None and header is not None and header.foreign:
            yield finding_of(self, root, facts.Problem(root.path / leaf.key, "foreign", f"{complaint}; left alone"))
        elif complaint is not None:
            message = f"{complaint}; the driver compiles it again and rewrites it"
            fix, thing = f"cachectl purge --damaged {self.name}", leaf.entry(self.name, root.path)
            yield facts.Finding(self.name, root.path, leaf.key, facts.Severity.HARMLESS, "damaged", message, fix, thing)


def _is_entry(key: str, head: bytes, index: bytes | None) -> bool:
    """Return whether a file belongs to the cache: by its header, else only if the index of the root says so."""
    header = compute_cache.read_header(head)
    if header is not None and header.known:
        return True
    listed = None if index is None else compute_cache.read_index(index)
    if listed is not None and compute_cache.identifier_of(key) in dict(listed):
        return True
    return index is not None and compute_cache.has_version_of(index, head)


def _standing(store: files.Files, root: facts.Root, folder: int | None = None) -> tuple[dict[int, Leaf], list[Path]]:
    """Return the entries of a root by id that are whole by their headers, and the paths of those that cannot be read.

    ``folder`` is the root if it is open.
    """
    leaves: dict[int, Leaf] = {}
    unread: list[Path] = []
    for leaf in Tree(store.name, root.path, _SHAPE, folder).scan(head=compute_cache.HEADER.size):
        if isinstance(leaf, facts.Problem):
            unread += [leaf.path] if leaf.hides else []
        elif leaf.orphan_rule is None:
            header = compute_cache.read_header(leaf.head)
            if header is not None and header.known and header.file_size == leaf.bytes:
                leaves[compute_cache.identifier_of(leaf.key)] = leaf
    return leaves, unread


def _records(
    leaves: Mapping[int, Leaf], unread: Sequence[Path], old: compute_cache.SizeIndex, root: Path
) -> list[tuple[int, int]]:
    """Return the records that the index should have. Entries that cannot be read keep their records."""
    kept = []
    for number, size in dict(old).items():
        path = root / compute_cache.key_from(number)
        if number in leaves:
            kept.append((number, leaves[number].bytes - compute_cache.HEADER.size))
        elif any(place in (path, *path.parents) for place in unread):
            kept.append((number, size))
    new = sorted(leaves.keys() - dict(old).keys(), key=lambda number: leaves[number].newest)
    return [*kept, *((number, leaves[number].bytes - compute_cache.HEADER.size) for number in new)]
