"""The store of the CUDA ComputeCache: one file for each entry, and an index that the driver keeps under a lock.

The format is in :mod:`cachectl.layers.formats.compute_cache`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Damaged, LayerError, Unreachable
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.store import Codec, Damage, counting, unreadable
from cachectl.layers.cuda import LIBRARIES
from cachectl.layers.disk.atomic import overwrite
from cachectl.layers.disk.handles import blocks_at, opened_root, status_of
from cachectl.layers.disk.locks import record_lock
from cachectl.layers.disk.plain import read_locked
from cachectl.layers.disk.presence import means_no_file
from cachectl.layers.formats import compute_cache
from cachectl.layers.formats.details import Details
from cachectl.layers.host.processes import using
from cachectl.layers.stores.files import Files, Index
from cachectl.layers.stores.tree import Leaf, Shape, Tree

INDEX: Final = "index"
_DIGIT: Final = regex("[0-9a-f]")
_SHAPE: Final = Shape((_DIGIT, _DIGIT, regex("[0-9a-f]{14}")), folders=False)
_INDEX: Final = Shape((regex(INDEX),), folders=False)
#: The largest index that is read, in bytes: four million entries.
_LARGEST_INDEX: Final = 1 << 26


class ComputeCodec(Codec):
    """A header, the key, and what the driver compiled."""

    form = "cuda-entry/65"

    def describe(self, data: bytes) -> Details:
        """Return what the key says."""
        key = compute_cache.key_of(data)
        if key is None:
            return Details()
        return Details(None, compute_cache.kernels(key), compute_cache.device(key), compute_cache.driver(key))

    def check(self, data: bytes) -> Damage | None:
        """Check version and lengths. Only the whole check compares the name and the checksum."""
        wrong = compute_cache.form_complaint(data)
        return None if wrong is None else Damage(facts.Severity.HARMLESS, wrong)


class _Standing(NamedTuple):
    """The entries of a root by their ids: sizes and times of change, and the paths that could not be read."""

    sizes: Mapping[int, int]
    changes: Mapping[int, int]
    unread: tuple[Path, ...]


class ComputeIndex(Index):
    """The list of entries and their sizes. Where it is missing or empty, the driver drops every entry."""

    shapes = (_INDEX,)

    def read(self, root: facts.Root) -> bytes | None:
        """Return the bytes of the index; ``None`` where there is no plain file. Raises :class:`OSError`."""
        try:
            return read_locked(root.path / INDEX, limit=_LARGEST_INDEX)
        except OSError as error:
            if means_no_file(error):
                return None
            raise

    @contextmanager
    def changing(self, store: Files, root: facts.Root) -> Iterator[bool]:
        """Hold the driver's lock around a change of entries, then make the index list exactly the entries there are.

        The index is also written if the change fails. Raises :class:`Unsettled` where only the writing fails. Listed
        entries keep their order, which is the order of eviction; others follow by age. The file is overwritten in
        place, then shortened: the driver accepts one that is too long meanwhile. An index of another version is left
        alone. Yields whether no process has a driver loaded.
        """
        path = root.path / INDEX
        with ExitStack() as stack:
            folder = stack.enter_context(_opened(store, root))
            handle = None
            if folder is not None and _has_index(store, root, folder):
                lock_timeout = store.environment.lock_timeout
                lock = record_lock(store.name, path, folder=folder, lock_timeout=lock_timeout, create=False)
                handle = stack.enter_context(lock)
            stack.enter_context(counting(store.name, path, partial(self._recount, store, root, folder, handle)))
            yield using(LIBRARIES, processes=store.environment.processes) == ()

    def _recount(self, store: Files, root: facts.Root, folder: int | None, handle: int | None) -> None:
        """Write the index, which is open and locked, or make it if there are entries and no index.

        ``folder`` is the open root, or ``None`` if the root did not exist before the change.
        """
        if folder is None:
            with _opened(store, root) as made:
                if made is not None:
                    self._recount(store, root, made, handle)
        elif handle is not None:
            self._rewrite(store, root, folder, handle)
        elif self._records(store, root, folder, None):
            path, lock_timeout = root.path / INDEX, store.environment.lock_timeout
            with record_lock(store.name, path, folder=folder, lock_timeout=lock_timeout) as created:
                self._rewrite(store, root, folder, created)

    def _rewrite(self, store: Files, root: facts.Root, folder: int, handle: int) -> None:
        old = os.pread(handle, min(os.fstat(handle).st_size, _LARGEST_INDEX), 0)
        if old and not compute_cache.is_index(old):
            return
        new = compute_cache.write_index(self._records(store, root, folder, compute_cache.read_index(old)))
        if new != old:
            overwrite(handle, old, new)

    def _records(
        self, store: Files, root: facts.Root, folder: int, index: compute_cache.SizeIndex | None
    ) -> list[tuple[int, int]]:
        """Return the records that the index should have. Entries that cannot be read keep their records."""
        old = index or ()
        standing = _standing(store, root, folder)
        sizes = dict(standing.sizes)
        for identifier, size in old if standing.unread else ():
            path = root.path / compute_cache.key_from(identifier)
            if any(place in (path, *path.parents) for place in standing.unread):
                sizes.setdefault(identifier, size)
        order = {identifier: place for place, (identifier, _) in enumerate(old)}
        listed = sorted(sizes, key=lambda one: (order.get(one, len(order)), standing.changes.get(one, 0)))
        return [(identifier, sizes[identifier]) for identifier in listed]

    def verify(self, store: Files, root: facts.Root) -> Iterator[facts.Finding]:
        """Compare the index with the entries, if all of them can be read."""
        standing = _standing(store, root)
        if standing.unread:
            return
        try:
            index = self.read(root)
        except OSError as error:
            yield store.to_finding(root, unreadable(root.path / INDEX, error))
            return
        if (complaint := _index_complaint(index, standing.sizes)) is not None:
            fix, thing = "nothing: the next put or purge in this layer writes it again", None
            if index and not compute_cache.is_index(index):
                fix = "nothing: cachectl does not use an index of another version"
                if compute_cache.may_be_index(index):
                    fix = f"cachectl purge --damaged {store.name}"
                    found = store.tree_of(root, INDEX).find(INDEX)
                    thing = None if found is None else found.orphan(root.path, complaint)
            yield facts.Finding(store.name, root.path, INDEX, facts.Severity.WASTES, "index", complaint, fix, thing)


class ComputeCache(Files):
    """One file for each entry, two levels deep, recognised by its name and its header."""

    file_mode = 0o644

    def __init__(self) -> None:
        self.compute_index = ComputeIndex()
        # The driver rewrites a damaged entry in place.
        super().__init__(_SHAPE, codec=ComputeCodec(), index=self.compute_index)

    # ------------------------------------------------------------------ listing

    def scan(self, root: facts.Root, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield entries by name and header; files of another format version are opaque."""
        tree = Tree(self.name, root.path, _SHAPE)
        index = None
        try:
            index = self.compute_index.read(root)
        except OSError as error:
            yield facts.Problem(root.path / INDEX, "unreadable", f"cannot be read: {error.strerror}")
        for leaf in tree.scan(head=compute_cache.HEADER.size):
            if isinstance(leaf, facts.Problem):
                yield leaf
            elif leaf.orphan_rule is not None:
                yield leaf.orphan(root.path)
            elif _is_entry(leaf, index):
                yield from self._describe(root, tree, leaf, contents=contents)
            else:
                message = "has the name of an entry but not its format; left alone"
                yield facts.Problem(root.path / leaf.key, "unrecognised", message)
        if index is not None:
            if compute_cache.read_index(index) is None:
                yield facts.Problem(root.path / INDEX, "index", "is not whole")
            yield facts.Housekeeping(INDEX, root.path, len(index), disk=blocks_at(root.path / INDEX))

    def _describe(self, root: facts.Root, tree: Tree, leaf: Leaf, *, contents: bool) -> Iterator[facts.Found]:
        header = compute_cache.read_header(leaf.head)
        if header is not None and not header.known:
            yield replaced(leaf.entry(self.name, root.path), detail={"format": "unknown"})
            return
        if header is None or header.file_size != leaf.bytes:
            yield facts.Problem(
                root.path / leaf.key, "damaged", f"is {leaf.bytes} bytes long, which its header does not say"
            )
            header = None
        data = None
        if contents and header is not None:
            data = tree.read_file(leaf.key, limit=compute_cache.HEADER.size + header.key_length)
        entry = leaf.entry(self.name, root.path, self.codec.describe(data or b""))
        key = compute_cache.key_of(data or b"")
        yield entry if key is None else replaced(entry, detail={"half": compute_cache.half(key)})

    def tree_of(self, root: facts.Root, key: str) -> Tree:
        """Return the tree of entries, or that of the index."""
        return Tree(self.name, root.path, _INDEX if key == INDEX else _SHAPE)

    # ------------------------------------------------------------------ put, and tagged entries

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check name and checksum."""
        if (complaint := compute_cache.complaint(key, artifact.data)) is not None:
            raise Damaged(self.name, complaint, key)
        return {"": artifact.data}

    def find_tagged(
        self, root: facts.Root, tag: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[facts.Removable, str]]:
        """Look for the tag in the keys."""
        del known
        tree = self.tree_of(root, "")
        yield from tree.tagged(tag, since, lambda leaf: compute_cache.key_of(tree.read_file(leaf.key) or b""))

    # ------------------------------------------------------------------ verify

    def _examined(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Finding]:
        try:
            data = tree.read_file(leaf.key)
            complaint = None if data is None else compute_cache.complaint(leaf.key, data)
        except Unreachable as error:
            yield self.to_finding(root, unreadable(root.path / leaf.key, error))
            return
        except LayerError as error:
            data, complaint = tree.read_file(leaf.key, limit=compute_cache.HEADER.size), error.message
        if complaint is not None and not self._is_damaged_entry(root, leaf, data or b""):
            yield self.to_finding(root, facts.Problem(root.path / leaf.key, "foreign", f"{complaint}; left alone"))
        elif complaint is not None:
            message = f"{complaint}; the driver compiles it again and rewrites it"
            fix, thing = f"cachectl purge --damaged {self.name}", leaf.entry(self.name, root.path)
            yield facts.Finding(self.name, root.path, leaf.key, facts.Severity.HARMLESS, "damaged", message, fix, thing)

    def _is_damaged_entry(self, root: facts.Root, leaf: Leaf, data: bytes) -> bool:
        """Return whether a file belongs to the cache and is not of another version."""
        header, index = compute_cache.read_header(data), None
        with suppress(OSError):
            index = self.compute_index.read(root)
        own = _is_entry(leaf._replace(head=data[: compute_cache.HEADER.size]), index)
        return own and (header is None or not header.foreign)


def _is_entry(leaf: Leaf, index: bytes | None) -> bool:
    """Return whether a file belongs to the cache: by its header, else only if the index of the root says so."""
    header = compute_cache.read_header(leaf.head)
    if header is not None and header.known:
        return True
    listed = None if index is None else compute_cache.read_index(index)
    if listed is not None and compute_cache.identifier_of(leaf.key) in dict(listed):
        return True
    return index is not None and compute_cache.has_version_of(index, leaf.head)


@contextmanager
def _opened(store: Files, root: facts.Root) -> Iterator[int | None]:
    """Open the root; ``None`` where it does not exist."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(opened_root(root.path))
        except OSError as error:
            raise Unreachable(store.name, f"cannot be read: {error.strerror}", root.path) from error
        yield folder


def _has_index(store: Files, root: facts.Root, folder: int) -> bool:
    try:
        return status_of(folder, INDEX) is not None
    except OSError as error:
        raise Unreachable(store.name, f"cannot be read: {error.strerror}", root.path / INDEX) from error


def _standing(store: Files, root: facts.Root, folder: int | None = None) -> _Standing:
    """Return the entries of a root that are complete by their headers; ``folder`` is the root if it is open."""
    sizes: dict[int, int] = {}
    changes: dict[int, int] = {}
    unread: list[Path] = []
    tree = Tree(store.name, root.path, _SHAPE, folder)
    for leaf in tree.scan():
        if isinstance(leaf, facts.Problem):
            unread += [leaf.path] if leaf.hides else []
            continue
        try:
            head = None if leaf.orphan_rule is not None else tree.read_file(leaf.key, limit=compute_cache.HEADER.size)
        except Unreachable:
            unread.append(root.path / leaf.key)
            continue
        header = None if head is None else compute_cache.read_header(head)
        if header is not None and header.known and header.file_size == leaf.bytes:
            identifier = compute_cache.identifier_of(leaf.key)
            sizes[identifier], changes[identifier] = leaf.bytes - compute_cache.HEADER.size, leaf.newest
    return _Standing(sizes, changes, tuple(unread))


def _index_complaint(data: bytes | None, sizes: Mapping[int, int]) -> str | None:
    """Return what the driver makes of an index, given the sizes of the entries; ``None`` where nothing is wrong."""
    index = compute_cache.read_index(data) if data else None
    if index is None:
        state = "is not whole" if data else "is empty or missing"
        return f"the index {state}: the driver drops every entry when it next stores one" if sizes or data else None
    return None if dict(index) == sizes else "the index does not list the entries that are there"
