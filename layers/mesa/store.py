"""The store of Mesa's shader cache, in one of three forms: a file for each entry, one file with an index, a database.

Source: ``src/util/disk_cache.c`` and ``disk_cache_os.c``; see also :mod:`cachectl.layers.mesa.entries` and
:mod:`cachectl.layers.mesa.pairs`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from cachectl.layers import core
from cachectl.layers.disk import plain
from cachectl.layers.host import processes
from cachectl.layers.mesa import cache, entries, pairs
from cachectl.layers.stores import tree as trees
from cachectl.layers.stores.files import Files

_ENTRIES = trees.Shape((core.regex("[0-9a-f]{2}"), core.regex("[0-9a-f]{38}")), mode=0o644)
_TEMPORARIES = trees.Shape(
    (core.regex("[0-9a-f]{2}"), core.regex(r"[0-9a-f]{38}\.tmp")), because="a program that was never stored whole"
)
_OWN = trees.Shape((core.regex("index|marker"),), sums=True)
_NAME = core.regex(r"[^./][^/]*")
_FOSSILIZE = trees.Shape((_NAME, _NAME, core.regex(r"foz_cache(?:_idx)?\.foz")), sums=True)
_FLAT = trees.Shape((core.regex(r"mesa_cache\.(?:db|idx)"),), sums=True)
_PARTED = trees.Shape((core.regex(r"part\d{1,3}"), *_FLAT.levels), sums=True)
_SHAPES: Mapping[str, tuple[trees.Shape, ...]] = {
    cache.MULTI_FILE: (_ENTRIES, _TEMPORARIES, _OWN),
    cache.SINGLE_FILE: (_FOSSILIZE, trees.Shape((_NAME, _NAME, *_OWN.levels), sums=True)),
    cache.DATABASE: (_FLAT, _PARTED, _OWN),
}
#: Files with many entries, and the format of those of each kind of root.
_PAIRED = (_FOSSILIZE, _FLAT, _PARTED)
_FORMATS: Mapping[str, type[pairs.Pair]] = {cache.SINGLE_FILE: pairs.Fossilize, cache.DATABASE: pairs.Database}

#: Seconds without change after which no living process is still writing a temporary.
_REST_TIME = 3600.0
_INDEX = struct.Struct("<Q")
_INDEX_SIZE = _INDEX.size + 65536 * 20

_DROPS = "Mesa then drops every entry of the file"


class ShaderCache(Files):
    """Entries in the three forms of Mesa; the role of a root says which one it has."""

    shapes = (_ENTRIES,)
    forms = ("mesa-entry/1",)

    def shapes_of(self, root: core.Root) -> tuple[trees.Shape, ...]:
        """Return the shapes of entries, files and temporaries."""
        return _SHAPES[root.role]

    # ------------------------------------------------------------------ listing

    def scan(
        self, root: core.Root, selection: core.Selection = core.ALL, *, contents: bool = True
    ) -> Iterator[core.Found]:
        """Yield entries, each with its owner; only ``contents`` unpacks kernel names."""
        del selection
        raws: list[entries.Raw] = []
        for found in self._raws(root):
            if not isinstance(found, (core.Entry, core.Problem)):
                raws.append(found)
            else:
                yield found
        yield from entries.owned(raws, contents=contents)

    def _raws(self, root: core.Root) -> Iterator[entries.Raw | core.Found]:
        """Yield the entries of any form, and everything else in a root."""
        tree = self.tree_of(root)
        for leaf in tree.scan():
            if isinstance(leaf, core.Problem):
                yield leaf
                continue
            key = leaf.entry.key
            try:
                if leaf.entry.is_listed:
                    yield entries.raw_of(leaf.entry, partial(tree.read_file, key))
                elif not leaf.entry.is_orphan and (pair := self._pair_of(root, key)) is not None:
                    # All or none: kernels show whose the machine code beside them is.
                    yield from list(self._packed(pair, leaf.entry))
                else:
                    yield leaf.entry._replace(fixed=not leaf.entry.is_orphan and leaf.shape not in _PAIRED)
            except core.LayerError as error:
                yield core.unreadable(root.path / key, error)

    def _packed(self, pair: pairs.Pair, file: core.Entry) -> Iterator[entries.Raw | core.Found]:
        """Yield the entries of a data file, and the rest of it. Raises :class:`LayerError` if it is unreadable."""
        blobs, why = pair.blobs()
        if why is not None:
            yield core.Problem(pair.path, "foreign" if why == entries.FOREIGN else "damaged", why)
        for key, blob in blobs.items():
            size, _ = blob.stamp
            entry = core.Entry(self.name, key, pair.root, size, 0, written_before=file.modified, stamp=blob.stamp)
            yield entries.raw_of(entry, partial(pair.read, blob))
        yield file._replace(bytes=max(0, file.bytes - sum(blob.stamp[0] for blob in blobs.values())))

    def _pairs(self, root: core.Root) -> list[pairs.Pair]:
        """Return every pair of files in a root. Raises :class:`Unreachable` if one may have been overlooked."""
        found = (self._pair_of(root, leaf.entry.key) for leaf in self.tree_of(root).leaves())
        return [pair for pair in found if pair is not None]

    def _pair_of(self, root: core.Root, key: str) -> pairs.Pair | None:
        """Return the pair of a data file; ``None`` for other files."""
        folder, _, name = key.rpartition("/")
        is_data = root.role in _FORMATS and name == _FORMATS[root.role].data_name
        return self._pair(root, folder) if is_data else None

    def _pair(self, root: core.Root, folder: str = "") -> pairs.Pair:
        return _FORMATS[root.role](self.name, root.path, folder, self.environment)

    def _located(self, root: core.Root, key: str) -> tuple[pairs.Pair, pairs.Blob] | None:
        """Find an entry among the pairs of a root."""
        found = ((pair, pair.blobs()[0].get(key)) for pair in self._pairs(root))
        return next(((pair, blob) for pair, blob in found if blob is not None), None)

    # ------------------------------------------------------------------ get and put

    def members(self, root: core.Root, key: str) -> trees.Members | None:
        """Read an entry, which has the same bytes in all forms."""
        if root.role == cache.MULTI_FILE:
            return super().members(root, key)
        found = self._located(root, key)
        data = None if found is None else found[0].read(found[1])
        return None if data is None else {"": data}

    def damages(self, key: str, files: trees.Members) -> Iterator[core.Damage]:
        """Check the checksum. Nothing can check the name."""
        del key
        if (complaint := entries.complaint(files[""])) is not None:
            yield core.Damage(core.RECOMPILES, f"{complaint}: {entries.NEVER}")

    def detail(self, key: str, files: trees.Members) -> Mapping[str, str]:
        """Return kernels, device and driver."""
        del key
        header = entries.read_header(files[""])
        device, driver = ("", "") if header is None else (header.device, header.driver)
        return {"kernels": " ".join(entries.kernels_in(files[""]) or ()), "device": device, "driver": driver}

    @contextmanager
    def changing(self, root: core.Root) -> Iterator[bool]:
        """Keep the size in the index right; yield whether no process has a driver loaded."""
        with core.counting(self.name, root.path / "index", partial(self._recount, root)):
            yield processes.using(cache.OPENED, processes=self.environment.processes) == ()

    def place(self, root: core.Root, whole: Mapping[str, trees.Members], *, replace: bool) -> trees.Placed:
        """Place entries into the form in use."""
        if root.role == cache.MULTI_FILE:
            return super().place(root, whole, replace=replace)
        put = partial(self._put, root, replace=replace)
        return {key: core.attempt(partial(put, key, files[""])) for key, files in whole.items()}

    def _put(self, root: core.Root, key: str, data: bytes, *, replace: bool) -> bool:
        pair, blob = self._located(root, key) or (self._pair_for(root, data), None)
        # Files that are locked or closed to this user need no change then. Damage must not stop a replacement.
        with suppress(core.LayerError, OSError):
            if blob is not None and pair.read(blob) == data:
                return False
        return pair.put(key, data, replace=replace)

    def _pair_for(self, root: core.Root, data: bytes) -> pairs.Pair:
        """Return the pair of files in which Mesa would look for a new entry."""
        if root.role == cache.DATABASE:
            # Newer releases use parts, and remove the files that older ones kept beside them.
            return next((pair for pair in self._pairs(root) if pair.folder), self._pair(root))
        header = entries.read_header(data)
        maker = ("", "") if header is None else header.maker
        if not all(map(_NAME.fullmatch, maker)):
            raise core.Damaged(self.name, f"its driver and device {maker} cannot name a folder", root.path)
        return self._pair(root, "/".join(maker))

    # ------------------------------------------------------------------ clear

    def in_use(self, targets: Iterable[core.Entry]) -> Iterator[tuple[core.Entry, str | None]]:
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

    def remove_files(self, root: core.Root, targets: Iterable[core.Entry], *, tidy: trees.Tidy) -> core.Outcome:
        """Unlink the files of entries; in larger files, remove entries under the lock of their file."""
        if root.role == cache.MULTI_FILE:
            # Kernels are small. Without one, nothing shows that the machine code of a driver is OpenCL's.
            largest_first = sorted(targets, key=lambda target: target.bytes, reverse=True)
            return super().remove_files(root, largest_first, tidy=tidy)
        planned = list(targets)
        wanted = {target.key: target.stamp for target in planned if _ENTRIES.accepts(target.key)}
        others = (target for target in planned if target.key not in wanted)
        outcome, left, parts = super().remove_files(root, others, tidy=tidy), set(wanted), []
        # List all files before changing one, so that no failure to list hides what was removed.
        for pair in self._pairs(root) if wanted else ():
            if stamps := {key: wanted[key] for key in pair.blobs()[0] if key in wanted}:
                parts.append((str(pair.path), partial(pair.remove, stamps)))
                left -= stamps.keys()
        gone = tuple(core.Note(key, trees.GONE) for key in sorted(left))
        return core.each_part(outcome.plus(core.Outcome(self.name, skipped=gone)), parts)

    def _recount(self, root: core.Root) -> None:
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
                sizes = (leaf.entry.bytes for leaf in self.tree_of(root).leaves() if leaf.entry.is_listed)
                os.pwrite(handle, _INDEX.pack(sum(sizes)), 0)
        finally:
            os.close(handle)

    # ------------------------------------------------------------------ verify

    def verify(self, root: core.Root) -> Iterator[core.Finding]:
        """Check header and checksum of every entry of any driver: Mesa repairs none of them."""
        for found in self._raws(root):
            if not isinstance(found, (core.Entry, core.Problem)):
                yield from self._checked(root, found)
            elif isinstance(found, core.Problem) and found.code == "damaged":
                yield from self._broken(root, found)
            elif isinstance(found, core.Problem):
                yield core.finding_of(self, root, found)

    def _checked(self, root: core.Root, raw: entries.Raw) -> Iterator[core.Finding]:
        entry, _, read = raw
        path = root.path / entry.key
        # Only the stamp of an entry of a larger file has a checksum.
        checksum = 0 if entry.files else entry.stamp[1]
        try:
            data = read()
            complaint = None if data is None else entries.complaint(data, checksum)
        except core.Unreachable as error:
            yield core.finding_of(self, root, core.unreadable(path, error))
            return
        except core.LayerError as error:
            data, complaint = None, error.message
        if data is not None and entries.is_foreign(data):
            yield core.finding_of(self, root, core.Problem(path, "foreign", entries.FOREIGN))
        elif complaint is not None:
            effect = _DROPS if root.role == cache.DATABASE else entries.NEVER
            yield self.damaged(entry, core.Damage(core.RECOMPILES, f"{complaint}: {effect}"))

    def _broken(self, root: core.Root, problem: core.Problem) -> Iterator[core.Finding]:
        """Yield a finding for both files of a pair, since one without the other has the same effect."""
        folder, form = problem.path.parent.relative_to(root.path), _FORMATS[root.role]
        damage = core.Damage(core.RECOMPILES, problem.message)
        for name in (form.index_name, form.data_name):
            key = str(folder / name)
            leaf = self.tree_of(root).find(key)
            entry = core.Entry(self.name, key, root.path, 0, 0) if leaf is None else leaf.entry
            thing = None if leaf is None else core.orphan(entry, problem.message, idle_only=True)
            yield self.damaged(entry, damage, "file")._replace(thing=thing)

    def indexed_bytes(self, root: core.Root) -> int | None:
        """Return the bytes that the index counts; ``None`` if there is no index. Raises :class:`OSError`."""
        try:
            data = plain.read_plain(root.path / "index", limit=_INDEX.size)
        except OSError as error:
            if plain.means_no_file(error):
                return None
            raise
        return _INDEX.unpack(data)[0] if len(data) == _INDEX.size else None
