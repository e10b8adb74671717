"""The store of Mesa's shader cache, in one of three forms: a file for each entry, one file with an index, a database.

Source: ``src/util/disk_cache.c`` and ``disk_cache_os.c``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Final

from cachectl.layers.base import errors, facts
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.base.store import (
    ENTRY,
    FOREIGN,
    OWN,
    EntryError,
    counting,
    each_part,
    finding_of,
    remove_counted,
    unreadable,
    write_each,
)
from cachectl.layers.disk import plain
from cachectl.layers.host import processes
from cachectl.layers.mesa import cache, entries
from cachectl.layers.mesa.pairs import Blob, Database, Format, Fossilize, Pair
from cachectl.layers.stores import files
from cachectl.layers.stores.tree import Leaf, Shape, Tree, always, scan_each

_ENTRIES: Final = Shape((regex("[0-9a-f]{2}"), regex("[0-9a-f]{38}")), folders=False)
_TEMPORARIES: Final = Shape((regex("[0-9a-f]{2}"), regex(r"[0-9a-f]{38}\.tmp")), folders=False)
_OWN: Final = Shape((regex("index|marker"),), folders=False)
_NAME: Final = regex(r"[^./][^/]*")
_FOSSILIZE: Final = Shape((_NAME, _NAME, regex(r"foz_cache(?:_idx)?\.foz")), folders=False)
_FLAT: Final = Shape((regex(r"mesa_cache\.(?:db|idx)"),), folders=False)
_PARTED: Final = Shape((regex(r"part\d{1,3}"), *_FLAT.levels), folders=False)
_SHAPES: Final[Mapping[str, tuple[Shape, ...]]] = {
    cache.MULTI_FILE: (_ENTRIES, _TEMPORARIES, _OWN),
    cache.SINGLE_FILE: (_FOSSILIZE, Shape((_NAME, _NAME, *_OWN.levels), folders=False)),
    cache.DATABASE: (_FLAT, _PARTED, _OWN),
}
#: Files with many entries, and the format of those of each kind of root.
_PAIRED: Final = (_FOSSILIZE, _FLAT, _PARTED)
_FORMATS: Final[Mapping[str, Format]] = {cache.SINGLE_FILE: Fossilize(), cache.DATABASE: Database()}

#: Seconds without change after which no living process is still writing a temporary.
_REST_TIME: Final = 3600.0
_INDEX: Final = struct.Struct("<Q")
_INDEX_SIZE: Final = _INDEX.size + 65536 * 20

_NEVER: Final = "Mesa compiles it again in every run, and never replaces it"
_DROPS: Final = "Mesa then drops every entry of the file"


class ShaderCache(files.TreeStore):
    """Entries in the three forms of Mesa; the role of a root says which one it has."""

    forms = ("mesa-entry/1",)
    file_mode = 0o644

    def kind_of(self, root: facts.Root, path: str) -> str:
        """Compare with the names of entries, files and temporaries."""
        if _ENTRIES.accepts(path):
            return ENTRY
        return OWN if any(shape.owns(path.split("/")) for shape in _SHAPES[root.role]) else FOREIGN

    def tree_of(self, root: facts.Root, key: str = "", shape: Shape = _ENTRIES) -> Tree:
        """Return the tree of the files of one shape."""
        del key
        return Tree(self.name, root.path, shape)

    # ------------------------------------------------------------------ listing

    def scan(self, root: facts.Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield entries, each with its owner; only ``contents`` unpacks kernel names."""
        del selection
        raws: list[entries.RawEntry] = []
        for found in self._raws(root):
            if not isinstance(found, entries.RawEntry):
                yield found
                continue
            raws.append(found)
            if found.header is None:
                yield facts.Problem(root.path / found.entry.key, "damaged", f"has no header of an entry: {_NEVER}")
        yield from entries.owned(raws, contents=contents)

    def _raws(self, root: facts.Root) -> Iterator[entries.RawEntry | facts.Found]:
        """Yield the entries of any form, and everything else in a root."""
        for tree, leaf in self._leaves(root):
            if isinstance(leaf, facts.Problem):
                yield leaf
            elif leaf.orphan_rule is not None:
                yield leaf.orphan(self.name, root.path)
            elif tree.shape is _TEMPORARIES:
                yield leaf.orphan(self.name, root.path, "a program that was never stored whole")
            else:
                try:
                    if tree.shape is _ENTRIES:
                        yield entries.raw_of(leaf.entry(self.name, root.path), partial(tree.read_file, leaf.key))
                    elif (pair := self._pair_of(root, leaf)) is not None:
                        # All or none: kernels show whose the machine code beside them is.
                        yield from list(self._packed(pair, leaf))
                    else:
                        yield replace(leaf.entry(self.name, root.path), sums=0, fixed=tree.shape not in _PAIRED)
                except errors.LayerError as error:
                    yield unreadable(root.path / leaf.key, error)

    def _packed(self, pair: Pair, leaf: Leaf) -> Iterator[entries.RawEntry | facts.Found]:
        """Yield the entries of a data file, and the rest of it. Raises :class:`LayerError` if it is unreadable."""
        if (why := pair.damage()) is not None:
            yield facts.Problem(pair.path, "foreign" if why == entries.FOREIGN else "damaged", why)
        rest = leaf.bytes
        for blob in pair.blobs():
            rest -= blob.length
            key, bound = entries.key_of(blob.name), leaf.modified
            entry = facts.Entry(self.name, key, pair.root, blob.length, 0, written_before=bound, stamp=blob.stamp)
            yield entries.raw_of(entry, partial(pair.read, blob), blob.checksum)
        yield replace(leaf.entry(self.name, pair.root), bytes=rest, sums=0)

    def _leaves(self, root: facts.Root) -> Iterator[tuple[Tree, Leaf | facts.Problem]]:
        return scan_each(self.tree_of(root, shape=shape) for shape in _SHAPES[root.role])

    def _whole(self, found: Iterable[tuple[Tree, Leaf | facts.Problem]]) -> Iterator[Leaf]:
        """Yield leaves without orphans. Raises :class:`Unreachable` if some may have been overlooked."""
        for _, leaf in found:
            if isinstance(leaf, facts.Problem):
                if leaf.hides:
                    raise errors.Unreachable(self.name, leaf.message, leaf.path)
            elif leaf.orphan_rule is None:
                yield leaf

    def pairs(self, root: facts.Root) -> list[Pair]:
        """Return every pair of files in a root. Raises :class:`Unreachable` if one may have been overlooked."""
        found = (self._pair_of(root, leaf) for leaf in self._whole(self._leaves(root)))
        return [pair for pair in found if pair is not None]

    def _pair_of(self, root: facts.Root, leaf: Leaf) -> Pair | None:
        """Return the pair of a data file; ``None`` for other files."""
        folder, _, name = leaf.key.rpartition("/")
        form = _FORMATS.get(root.role)
        return self._pair(root, folder) if form is not None and name == form.data_name else None

    def _pair(self, root: facts.Root, folder: str = "") -> Pair:
        return Pair(_FORMATS[root.role], self.name, root.path, folder, environment=self.environment)

    def _located(self, root: facts.Root, key: str) -> tuple[Pair, Blob] | None:
        """Find an entry among the pairs of a root."""
        found = ((pair, blob) for pair in self.pairs(root) for blob in pair.blobs())
        return next((place for place in found if place[1].name == entries.name_of(key)), None)

    # ------------------------------------------------------------------ get and put

    def read_entry(self, root: facts.Root, key: str) -> facts.Artifact | None:
        """Read an entry with its header, which has the same bytes in all forms."""
        if not _ENTRIES.accepts(key):
            return None
        if root.role == cache.MULTI_FILE:
            data = self.tree_of(root).read(key)
        else:
            found = self._located(root, key)
            data = None if found is None else found[0].read(found[1])
        if data is None:
            return None
        header = entries.read_header(data)
        if (complaint := entries.complaint(data)) is not None or header is None:
            raise errors.Damaged(self.name, f"{complaint}; {_NEVER}", root.path / key)
        about = {"kernels": " ".join(entries.kernels_in(data) or ()), "device": header.device, "driver": header.driver}
        return facts.Artifact(self.name, key, self.forms[0], data, about)

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check the checksum. Nothing can check the name."""
        if (complaint := entries.complaint(artifact.data)) is not None:
            raise errors.Damaged(self.name, complaint, key)
        return {"": artifact.data}

    def changing(self, root: facts.Root) -> AbstractContextManager[None]:
        """Keep the size in the index right."""
        return counting(self.name, root.path / "index", partial(self._recount, root))

    def write(
        self, root: facts.Root, artifacts: Sequence[facts.Artifact], *, replace: bool = False
    ) -> Mapping[str, bool | EntryError]:
        """Place entries into the form in use."""
        if root.role == cache.MULTI_FILE:
            return super().write(root, artifacts, replace=replace)

        def check(artifact: facts.Artifact) -> None:
            self.files_of(artifact.key, artifact)

        def put(artifact: facts.Artifact) -> None:
            pair = self._pair_for(root, artifact.key, artifact.data)
            pair.put(entries.name_of(artifact.key), artifact.data, replace=replace)

        return write_each(self, root, artifacts, put, check=check, replace=replace)

    def _pair_for(self, root: facts.Root, key: str, data: bytes) -> Pair:
        """Return the pair of files that has an entry, else that in which Mesa would look for it."""
        found = self._located(root, key)
        if found is not None:
            return found[0]
        if root.role == cache.DATABASE:
            # Newer releases use parts, and remove the files that older ones kept beside them.
            return next((pair for pair in self.pairs(root) if pair.folder), self._pair(root))
        header = entries.read_header(data)
        maker = ("", "") if header is None else header.maker
        if not all(map(_NAME.fullmatch, maker)):
            raise errors.Damaged(self.name, f"its driver and device {maker} cannot name a folder", root.path)
        return self._pair(root, "/".join(maker))

    # ------------------------------------------------------------------ clear

    def in_use(self, targets: Iterable[facts.Entry]) -> Iterator[tuple[facts.Entry, str | None]]:
        """Skip files that a running process may be writing or have open. Entries may be removed at any time."""
        users = processes.using(cache.OPENED, processes=self.environment.processes)
        now = self.environment.clock()
        for target in targets:
            reason = None
            if target.idle_only and users != ():
                is_pair = any(shape.accepts(target.key) for shape in _PAIRED)
                if is_pair or now - (target.modified or now) <= _REST_TIME:
                    reason = f"may be open in {processes.process_names(users)}"
            yield target, reason

    def remove(self, root: facts.Root, targets: tuple[facts.Entry, ...]) -> facts.Outcome:
        """Unlink entries and count the size again; in larger files, remove them under the lock of their file."""
        if root.role == cache.MULTI_FILE:
            # Kernels are small. Without one, nothing shows that the machine code of a driver is OpenCL's.
            largest_first = sorted(targets, key=lambda target: target.bytes, reverse=True)
            return remove_counted(self.name, self.changing(root), lambda _: self._remove_files(root, largest_first))
        wanted = {entries.name_of(target.key): target.stamp for target in targets if _ENTRIES.accepts(target.key)}
        outcome = self._remove_files(root, [target for target in targets if not _ENTRIES.accepts(target.key)])
        left = set(wanted)
        parts = []
        # List all files before changing one, so that no failure to list hides what was removed.
        for pair in self.pairs(root) if wanted else ():
            stamps = {blob.name: wanted[blob.name] for blob in pair.blobs() if blob.name in wanted}
            if stamps:
                parts.append((str(pair.path), partial(pair.remove, stamps)))
                left -= stamps.keys()
        gone = facts.Outcome(
            self.name, skipped=tuple(facts.Note(entries.key_of(name), "already gone") for name in sorted(left))
        )
        return outcome.plus(gone).plus(each_part(facts.Outcome(self.name), parts))

    def _remove_files(self, root: facts.Root, targets: Iterable[facts.Entry]) -> facts.Outcome:
        """Remove files by their shapes; any tree removes cachectl's own."""
        tidy = always if processes.using(cache.OPENED, processes=self.environment.processes) == () else None
        groups: dict[Shape, list[facts.Entry]] = {}
        for target in targets:
            groups.setdefault(_shape_of(root, target.key), []).append(target)
        removals = (
            (str(root.path), partial(self.tree_of(root, shape=shape).remove, own, tidy=tidy))
            for shape, own in groups.items()
        )
        return each_part(facts.Outcome(self.name), removals)

    def _recount(self, root: facts.Root) -> None:
        """Write the true size into the index, to which Mesa only adds, and by which it decides when to drop entries.

        It is that of the blocks on the disk. Raises :class:`Unreachable` if some entries cannot be counted.
        """
        try:
            handle = plain.open_plain(root.path / "index", flags=os.O_RDWR)
        except OSError as error:
            if plain.means_no_file(error):
                return
            raise
        try:
            if os.fstat(handle).st_size == _INDEX_SIZE:
                leaves = self._whole(scan_each([self.tree_of(root)]))
                os.pwrite(handle, _INDEX.pack(sum(leaf.disk or 0 for leaf in leaves)), 0)
        finally:
            os.close(handle)

    # ------------------------------------------------------------------ verify

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check header and checksum of every entry of any driver: Mesa repairs none of them."""
        for found in self._raws(root):
            if isinstance(found, entries.RawEntry):
                yield from self._examined(root, found)
            elif isinstance(found, facts.Problem) and found.code == "damaged":
                yield from self._broken(root, found)
            elif isinstance(found, facts.Problem):
                yield finding_of(self, root, found)

    def _examined(self, root: facts.Root, raw: entries.RawEntry) -> Iterator[facts.Finding]:
        path, complaint = root.path / raw.entry.key, None
        try:
            data = raw.read()
        except errors.Unreachable as error:
            yield finding_of(self, root, unreadable(path, error))
            return
        except errors.LayerError as error:
            data, complaint = None, error.message
        if data is not None and entries.is_foreign(data):
            yield finding_of(self, root, facts.Problem(path, "foreign", entries.FOREIGN))
            return
        complaint = complaint if data is None else entries.complaint(data, raw.checksum)
        if complaint is not None:
            effect = _DROPS if root.role == cache.DATABASE else _NEVER
            yield self._damaged(root, raw.entry.key, "damaged", f"{complaint}: {effect}", raw.entry)

    def _broken(self, root: facts.Root, problem: facts.Problem) -> Iterator[facts.Finding]:
        """Yield a finding for both files of a pair, since one without the other has the same effect."""
        folder, form = problem.path.parent.relative_to(root.path), _FORMATS[root.role]
        for name in (form.index_name, form.data_name):
            key = str(folder / name)
            leaf = self.tree_of(root, shape=_shape_of(root, key)).find(key)
            thing = None if leaf is None else leaf.orphan(self.name, root.path, problem.message)
            yield self._damaged(root, key, "file", problem.message, thing)

    def _damaged(self, root: facts.Root, key: str, code: str, message: str, thing: facts.Entry | None) -> facts.Finding:
        place, fix = (self.name, root.path, key), f"cachectl purge --damaged {self.name}"
        return facts.Finding(*place, facts.Severity.RECOMPILES, code, message, fix, thing)

    def indexed_bytes(self, root: facts.Root) -> int | None:
        """Return the bytes that the index counts; ``None`` if there is no index. Raises :class:`OSError`."""
        try:
            data = plain.read_plain(root.path / "index", limit=_INDEX.size)
        except OSError as error:
            if plain.means_no_file(error):
                return None
            raise
        return _INDEX.unpack(data)[0] if len(data) == _INDEX.size else None


def _shape_of(root: facts.Root, key: str) -> Shape:
    """Return the shape of a file by its key."""
    shapes = _SHAPES[root.role]
    return next((shape for shape in shapes if shape.accepts(key)), shapes[0])
