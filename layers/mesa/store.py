"""The store of Mesa's shader cache, in one of three forms: a file for each entry, one file with an index, a database.

Source: ``src/util/disk_cache.c`` and ``disk_cache_os.c``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from cachectl.layers.base import errors, facts
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.base.store import Damage, EntryError, attempt, counting, each_part, finding_of, unreadable
from cachectl.layers.disk import plain
from cachectl.layers.host import processes
from cachectl.layers.mesa import cache, entries
from cachectl.layers.mesa.pairs import Blob, Database, Format, Fossilize, Pair
from cachectl.layers.stores import files
from cachectl.layers.stores.tree import GONE, Shape

_ENTRIES: Final = Shape((regex("[0-9a-f]{2}"), regex("[0-9a-f]{38}")), mode=0o644)
_TEMPORARIES: Final = Shape(
    (regex("[0-9a-f]{2}"), regex(r"[0-9a-f]{38}\.tmp")), because="a program that was never stored whole"
)
_OWN: Final = Shape((regex("index|marker"),), sums=True)
_NAME: Final = regex(r"[^./][^/]*")
_FOSSILIZE: Final = Shape((_NAME, _NAME, regex(r"foz_cache(?:_idx)?\.foz")), sums=True)
_FLAT: Final = Shape((regex(r"mesa_cache\.(?:db|idx)"),), sums=True)
_PARTED: Final = Shape((regex(r"part\d{1,3}"), *_FLAT.levels), sums=True)
_SHAPES: Final[Mapping[str, tuple[Shape, ...]]] = {
    cache.MULTI_FILE: (_ENTRIES, _TEMPORARIES, _OWN),
    cache.SINGLE_FILE: (_FOSSILIZE, Shape((_NAME, _NAME, *_OWN.levels), sums=True)),
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


class ShaderCache(files.Files):
    """Entries in the three forms of Mesa; the role of a root says which one it has."""

    shapes = (_ENTRIES,)
    forms = ("mesa-entry/1",)

    def shapes_of(self, root: facts.Root) -> tuple[Shape, ...]:
        """Return the shapes of entries, files and temporaries."""
        return _SHAPES[root.role]

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
        tree = self.tree_of(root)
        for leaf in tree.scan():
            if isinstance(leaf, facts.Problem):
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
                    yield replace(leaf.entry, fixed=not leaf.entry.is_orphan and leaf.shape not in _PAIRED)
            except errors.LayerError as error:
                yield unreadable(root.path / key, error)

    def _packed(self, pair: Pair, file: facts.Entry) -> Iterator[entries.RawEntry | facts.Found]:
        """Yield the entries of a data file, and the rest of it. Raises :class:`LayerError` if it is unreadable."""
        if (why := pair.damage()) is not None:
            yield facts.Problem(pair.path, "foreign" if why == entries.FOREIGN else "damaged", why)
        rest = file.bytes
        for blob in pair.blobs():
            rest -= blob.length
            key, bound = entries.key_of(blob.name), file.modified
            entry = facts.Entry(self.name, key, pair.root, blob.length, 0, written_before=bound, stamp=blob.stamp)
            yield entries.raw_of(entry, partial(pair.read, blob), blob.checksum)
        yield replace(file, bytes=rest)

    def pairs(self, root: facts.Root) -> list[Pair]:
        """Return every pair of files in a root. Raises :class:`Unreachable` if one may have been overlooked."""
        found = (self._pair_of(root, leaf.entry.key) for leaf in self.tree_of(root).leaves())
        return [pair for pair in found if pair is not None]

    def _pair_of(self, root: facts.Root, key: str) -> Pair | None:
        """Return the pair of a data file; ``None`` for other files."""
        folder, _, name = key.rpartition("/")
        form = _FORMATS.get(root.role)
        return self._pair(root, folder) if form is not None and name == form.data_name else None

    def _pair(self, root: facts.Root, folder: str = "") -> Pair:
        return Pair(_FORMATS[root.role], self.name, root.path, folder, environment=self.environment)

    def _located(self, root: facts.Root, key: str) -> tuple[Pair, Blob] | None:
        """Find an entry among the pairs of a root."""
        found = ((pair, blob) for pair in self.pairs(root) for blob in pair.blobs())
        return next((place for place in found if place[1].name == entries.name_of(key)), None)

    # ------------------------------------------------------------------ get and put

    def members(self, root: facts.Root, key: str) -> Mapping[str, bytes] | None:
        """Read an entry, which has the same bytes in all forms."""
        if root.role == cache.MULTI_FILE:
            return super().members(root, key)
        found = self._located(root, key)
        data = None if found is None else found[0].read(found[1])
        return None if data is None else {"": data}

    def damages(self, key: str, files: Mapping[str, bytes]) -> Iterator[Damage]:
        """Check the checksum. Nothing can check the name."""
        del key
        if (complaint := entries.complaint(files[""])) is not None:
            yield Damage(facts.Severity.RECOMPILES, f"{complaint}: {_NEVER}")

    def detail(self, key: str, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return kernels, device and driver."""
        del key
        header = entries.read_header(files[""])
        device, driver = ("", "") if header is None else (header.device, header.driver)
        return {"kernels": " ".join(entries.kernels_in(files[""]) or ()), "device": device, "driver": driver}

    @contextmanager
    def changing(self, root: facts.Root) -> Iterator[bool]:
        """Keep the size in the index right; yield whether no process has a driver loaded."""
        with counting(self.name, root.path / "index", partial(self._recount, root)):
            yield processes.using(cache.OPENED, processes=self.environment.processes) == ()

    def place(
        self,
        root: facts.Root,
        whole: Mapping[str, Mapping[str, bytes]],
        results: dict[str, bool | EntryError],
        *,
        replace: bool,
    ) -> None:
        """Place entries into the form in use."""
        if root.role == cache.MULTI_FILE:
            super().place(root, whole, results, replace=replace)
            return
        for key, members in whole.items():
            results[key] = attempt(partial(self._put, root, key, members[""], replace=replace))

    def _put(self, root: facts.Root, key: str, data: bytes, *, replace: bool) -> bool:
        return self._pair_for(root, key, data).put(entries.name_of(key), data, replace=replace)

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

    def remove_files(
        self, root: facts.Root, targets: Iterable[facts.Entry], *, tidy: Callable[[], bool] | None
    ) -> facts.Outcome:
        """Unlink the files of entries; in larger files, remove entries under the lock of their file."""
        if root.role == cache.MULTI_FILE:
            # Kernels are small. Without one, nothing shows that the machine code of a driver is OpenCL's.
            largest_first = sorted(targets, key=lambda target: target.bytes, reverse=True)
            return super().remove_files(root, largest_first, tidy=tidy)
        wanted: dict[str, tuple[int, ...]] = {}
        others = []
        for target in targets:
            if _ENTRIES.accepts(target.key):
                wanted[entries.name_of(target.key)] = target.stamp
            else:
                others.append(target)
        outcome = super().remove_files(root, others, tidy=tidy)
        left = set(wanted)
        parts = []
        # List all files before changing one, so that no failure to list hides what was removed.
        for pair in self.pairs(root) if wanted else ():
            stamps = {blob.name: wanted[blob.name] for blob in pair.blobs() if blob.name in wanted}
            if stamps:
                parts.append((str(pair.path), partial(pair.remove, stamps)))
                left -= stamps.keys()
        gone = tuple(facts.Note(entries.key_of(name), GONE) for name in sorted(left))
        return outcome.plus(facts.Outcome(self.name, skipped=gone)).plus(each_part(self.name, parts))

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
                sizes = (leaf.entry.disk or 0 for leaf in self.tree_of(root).leaves() if leaf.entry.is_listed)
                os.pwrite(handle, _INDEX.pack(sum(sizes)), 0)
        finally:
            os.close(handle)

    # ------------------------------------------------------------------ verify

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check header and checksum of every entry of any driver: Mesa repairs none of them."""
        for found in self._raws(root):
            if isinstance(found, entries.RawEntry):
                yield from self._checked(root, found)
            elif isinstance(found, facts.Problem) and found.code == "damaged":
                yield from self._broken(root, found)
            elif isinstance(found, facts.Problem):
                yield finding_of(self, root, found)

    def _checked(self, root: facts.Root, raw: entries.RawEntry) -> Iterator[facts.Finding]:
        path = root.path / raw.entry.key
        try:
            data = raw.read()
            complaint = None if data is None else entries.complaint(data, raw.checksum)
        except errors.Unreachable as error:
            yield finding_of(self, root, unreadable(path, error))
            return
        except errors.LayerError as error:
            data, complaint = None, error.message
        if data is not None and entries.is_foreign(data):
            yield finding_of(self, root, facts.Problem(path, "foreign", entries.FOREIGN))
        elif complaint is not None:
            effect = _DROPS if root.role == cache.DATABASE else _NEVER
            yield self.damaged(raw.entry, Damage(facts.Severity.RECOMPILES, f"{complaint}: {effect}"))

    def _broken(self, root: facts.Root, problem: facts.Problem) -> Iterator[facts.Finding]:
        """Yield a finding for both files of a pair, since one without the other has the same effect."""
        folder, form = problem.path.parent.relative_to(root.path), _FORMATS[root.role]
        damage = Damage(facts.Severity.RECOMPILES, problem.message)
        for name in (form.index_name, form.data_name):
            key = str(folder / name)
            leaf = self.tree_of(root).find(key)
            entry = facts.Entry(self.name, key, root.path, 0, 0) if leaf is None else leaf.entry
            thing = None if leaf is None else facts.orphan(entry, problem.message, idle_only=True)
            yield replace(self.damaged(entry, damage, "file"), thing=thing)

    def indexed_bytes(self, root: facts.Root) -> int | None:
        """Return the bytes that the index counts; ``None`` if there is no index. Raises :class:`OSError`."""
        try:
            data = plain.read_plain(root.path / "index", limit=_INDEX.size)
        except OSError as error:
            if plain.means_no_file(error):
                return None
            raise
        return _INDEX.unpack(data)[0] if len(data) == _INDEX.size else None
