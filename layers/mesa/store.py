"""The store of Mesa's shader cache in its three forms: a file for each entry, one file with an index, a database.

Source: ``src/util/disk_cache.c`` and ``disk_cache_os.c``; see also :mod:`cachectl.layers.mesa.entries` and
:mod:`cachectl.layers.mesa.pairs`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial

from cachectl.layers.base import processes
from cachectl.layers.base.errors import Damaged
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.entry import Entry, Found, Problem
from cachectl.layers.core.finding import RECOMPILES, Finding
from cachectl.layers.core.plan import Outcome
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.core.store import ENTRY, FOREIGN, Damage, counting, damage_findings, finding_of, unreadable
from cachectl.layers.disk import plain
from cachectl.layers.mesa import cache, entries, pairs
from cachectl.layers.stores import files, row_store
from cachectl.layers.stores import tree_read as trees

_FOLDER = regex("[0-9a-f]{2}")
#: Keys are a SHA-1, or since Mesa 26 a BLAKE3.
_ENTRIES = trees.Shape((_FOLDER, regex("[0-9a-f]{38}(?:[0-9a-f]{24})?")), mode=0o644)
_TEMPORARIES = trees.Shape(
    (_FOLDER, regex(r"[0-9a-f]{38}(?:[0-9a-f]{24})?\.tmp")), because="a program that was never completely stored"
)
#: Names where Mesa would make them, but of a form that no release has made.
_UNKNOWN = trees.resembling("[0-9a-f]{1,4}", r"[0-9a-f]{16,}(?:\.tmp)?")
_OWN = trees.Shape((regex("index|marker"),), sums=True)
_NAME = regex(r"[^./][^/]*")
_FLAT = trees.Shape((regex(r"mesa_cache\.(?:db|idx)"),), sums=True)
_SHAPES: Mapping[str, tuple[trees.Shape, ...]] = {
    cache.MULTI_FILE: (_ENTRIES, _TEMPORARIES, _UNKNOWN, _OWN),
    cache.SINGLE_FILE: (
        trees.Shape((_NAME, _NAME, regex(r"foz_cache(?:_idx)?\.foz")), sums=True),
        trees.Shape((_NAME, _NAME, *_OWN.levels), sums=True),
        trees.resembling(_NAME, _NAME, r"foz_cache[\w.-]*"),
    ),
    cache.DATABASE: (
        _FLAT,
        trees.Shape((regex(r"part\d{1,9}"), *_FLAT.levels), sums=True),
        _OWN,
        trees.resembling(r"mesa_cache[\w.-]*"),
        trees.resembling(r"part[\w.-]+", r"mesa_cache[\w.-]*"),
    ),
}
#: The format of the larger files of a root, and the keys of their entries.
_FORMATS: Mapping[str, tuple[type[pairs.Pair], re.Pattern[str]]] = {
    cache.SINGLE_FILE: (pairs.Fossilize, regex(r"(?:[^./][^/]*/){2}foz_cache\.foz(?:::[0-9a-f]{40})?")),
    cache.DATABASE: (pairs.Database, regex(r"(?:part\d{1,9}/)?mesa_cache\.db(?:::[0-9a-f]{40}(?:[0-9a-f]{24})?)?")),
}
_INDEX = struct.Struct("<Q")
#: By the length of keys: Mesa extends an index, and never shortens one.
_INDEX_SIZES = tuple(_INDEX.size + 65536 * size for size in entries.KEY_SIZES)
_DROPS = "Mesa then drops every entry of the file"


class ShaderCache(row_store.Rows):
    """Entries in the three forms of Mesa; the role of a root says which one it has."""

    tables: PairTables
    rest: EntryFiles
    clearing_needs_room = False

    def __init__(self) -> None:
        super().__init__(PairTables(), EntryFiles())

    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        """Yield entries, each with its owner; kernel names are unpacked only with ``contents``."""
        listed: list[Entry] = []
        for item in super().scan(root, selection):
            if isinstance(item, Entry) and item.is_listed:
                listed.append(item)
            else:
                yield item
        tree = self.rest.tree_of(root)

        @lru_cache
        def opened(file: str) -> tuple[pairs.Pair, Mapping[str, pairs.Blob]]:
            pair = self.tables.opened(root, file)
            return pair, pair.blobs()

        def read(entry: Entry) -> bytes | None:
            file, _, name = entry.key.partition(self.separator)
            if not name:
                return tree.read_file(file)
            pair, blobs = opened(file)
            return pair.content(blobs[name]) if name in blobs else None

        yield from entries.owned(listed, read, contents=contents)

    def remove(self, root: Root, targets: tuple[Entry, ...]) -> Outcome:
        """Remove kernels, which are small, last: they prove that a driver's machine code is OpenCL's."""
        return super().remove(root, tuple(sorted(targets, key=lambda target: target.length, reverse=True)))


class PairTables(row_store.TableFormat):
    """Data files with their indexes."""

    codec = entries.EntryCodec()
    separator = "::"
    when_damaged = RECOMPILES

    def _tree_of(self, root: Root) -> trees.Tree:
        return trees.Tree(self.name, root.path, *_SHAPES[root.role])

    def is_table(self, file: str) -> bool:
        """Compare with the names of data files."""
        return is_data_file(file)

    def kind_of(self, root: Root, path: str) -> str:
        """Compare with the names of entries in the files of the root."""
        is_row = root.role in _FORMATS and self.separator in path
        return ENTRY if is_row and _FORMATS[root.role][1].fullmatch(path) is not None else FOREIGN

    def is_usable(self, root: Root, file: str) -> bool:
        """Return whether a data file exists, not behind a link."""
        return self._tree_of(root).find(file) is not None

    def tables(self, root: Root) -> Iterator[str | Problem]:
        """Yield the path of each data file."""
        for leaf in self._tree_of(root).scan() if root.role in _FORMATS else ():
            if isinstance(leaf, Problem):
                yield leaf
            elif is_data_file(leaf.entry.key):
                yield leaf.entry.key

    def opened(self, root: Root, file: str) -> pairs.Pair:
        """Return a data file with its index."""
        return _FORMATS[root.role][0](self.name, root.path, file, self.environment.lock_timeout)

    def list_rows(self, root: Root, file: str, template: Entry, *, part: bytes, contents: bool) -> Iterator[Found]:
        """Yield the entries of a data file; in one that Mesa cannot use, it finds none."""
        pair = self.opened(root, file)
        try:
            for blob in pair.blobs().values():
                yield entries.with_header(self.entry_of(template, blob.row), pair.content(blob, entries.HEAD))
            pair.check()
        except Damaged as error:
            yield Problem(pair.path, "damaged", error.message)

    def check_rows(self, root: Root, file: str) -> Iterator[Finding]:
        """Check header and both checksums of every entry, of any driver: Mesa repairs none."""
        pair, template = self.opened(root, file), Entry(self.name, file, root.path, 0, 0)
        effect = _DROPS if root.role == cache.DATABASE else entries.NEVER
        for blob in pair.blobs().values():
            data = pair.content(blob)
            if (complaint := entries.complaint(data, blob.checksum)) is not None:
                damages = [Damage(RECOMPILES, f"{complaint}: {effect}")]
                entry = self.entry_of(template, blob.row)
                yield from damage_findings(self, root, entry, damages, self.codec.foreign(data))
        pair.check()


class EntryFiles(files.Files):
    """The file of each entry, and the other files of each form."""

    shapes = (_ENTRIES,)
    codec = PairTables.codec
    forms = (codec.form,)
    writers = cache.OPENED
    # After that time no live process is still writing a temporary.
    rest_time = 3600.0

    def shapes_of(self, root: Root) -> tuple[trees.Shape, ...]:
        """Return the shapes of entries, files and temporaries."""
        return _SHAPES[root.role]

    def kind_of(self, root: Root, path: str) -> str:
        """Compare with the names of files; only in one form is an entry a file."""
        kind = super().kind_of(root, path)
        return FOREIGN if kind == ENTRY and root.role != cache.MULTI_FILE else kind

    def leaves(self, root: Root) -> Iterator[trees.Leaf | Problem]:
        """Yield entries with their headers, and everything else but the data files."""
        for leaf in self.tree_of(root).scan(head=entries.HEAD):
            if isinstance(leaf, Problem) or not is_data_file(leaf.entry.key):
                yield leaf

    def described(self, tree: trees.Tree, leaf: trees.Leaf, selection: Selection, *, contents: bool) -> Iterator[Found]:
        """Yield an entry with what its header says."""
        yield entries.with_header(leaf.entry, leaf.head)

    @contextmanager
    def changing(self, root: Root) -> Iterator[trees.Tidy]:
        """Keep the size in the index right; yield whether no process has a driver loaded."""
        with counting(self.name, root.path / "index", partial(self._recount, root)):
            yield lambda: processes.using(cache.OPENED, processes=self.environment.processes) == ()

    def _recount(self, root: Root) -> None:
        """Write the size on disk into the index, to which Mesa only adds. May raise :class:`Unreachable`."""
        try:
            handle = plain.open_plain(root.path / "index", flags=os.O_RDWR)
        except OSError as error:
            if plain.means_no_file(error):
                return
            raise
        try:
            if os.fstat(handle).st_size in _INDEX_SIZES:
                counted = (_ENTRIES, _UNKNOWN)
                sizes = (leaf.entry.bytes for leaf in self.tree_of(root).leaves() if leaf.shape in counted)
                os.pwrite(handle, _INDEX.pack(sum(sizes)), 0)
        finally:
            os.close(handle)

    def check_index(self, root: Root) -> Iterator[Finding]:
        """Yield that the index of the entries cannot be read: Mesa then keeps nothing."""
        if root.role != cache.MULTI_FILE:
            return
        try:
            self.indexed_bytes(root)
        except OSError as error:
            yield finding_of(self, root, unreadable(root.path / "index", error))

    def indexed_bytes(self, root: Root) -> int:
        """Return the bytes that the index counts; 0 if there is no index. Raises :class:`OSError`."""
        try:
            return int.from_bytes(plain.read_plain(root.path / "index", limit=_INDEX.size), "little")
        except OSError as error:
            if plain.means_no_file(error):
                return 0
            raise


def is_data_file(file: str) -> bool:
    """Compare a path below a root with the names of data files."""
    return any(name.fullmatch(file) is not None for _, name in _FORMATS.values())
