"""The store of Mesa's shader cache, in one of three forms: a file for each entry, one file with an index, a database.

GL and Vulkan keep their programs in the same folders, and only contents show which entries are OpenCL's. All entries of
one driver and device were stored by one build of one library, and Rusticl is a library of its own. So if one of them
contains a kernel, all are OpenCL's. Source: ``src/util/disk_cache.c`` and ``disk_cache_os.c``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Damaged, LayerError, Refused, Unreachable
from cachectl.layers.base.facts import Entry, Found, Problem, Root, Severity
from cachectl.layers.base.lazy import module, regex
from cachectl.layers.base.store import Store, counting, each_part, remove_counted
from cachectl.layers.disk.atomic import write_synced
from cachectl.layers.disk.handles import opened_root
from cachectl.layers.disk.plain import open_plain, read_plain
from cachectl.layers.disk.presence import is_there, means_no_file, status_at
from cachectl.layers.host.processes import process_names, using
from cachectl.layers.stores.quarantine import Quarantine, demand
from cachectl.layers.stores.tree import Leaf, Shape, Tree, scan_each
from cachectl.layers.stores.tree_store import TreeStore

if TYPE_CHECKING:
    from cachectl.layers.mesa import entries as mesa_entries
    from cachectl.layers.mesa.files import Blob, MesaFile
else:
    mesa_entries = module("cachectl.layers.mesa.entries")

#: What every process maps that has one of the stores open, whichever driver it uses.
OPENED: Final = ("mesa_shader_cache",)

MULTI_FILE: Final = "multi-file"
SINGLE_FILE: Final = "single-file"
DATABASE: Final = "database"
FOLDERS: Final = {
    MULTI_FILE: "mesa_shader_cache",
    SINGLE_FILE: "mesa_shader_cache_sf",
    DATABASE: "mesa_shader_cache_db",
}

_PAIR: Final = regex("[0-9a-f]{2}")
_REST: Final = regex("[0-9a-f]{38}")
_ENTRIES: Final = Shape((_PAIR, _REST), folders=False)
_TEMPORARIES: Final = Shape((_PAIR, regex(r"[0-9a-f]{38}\.tmp")), folders=False)
_OWN: Final = Shape((regex("index|marker"),), folders=False)
_NAME: Final = regex(r"[^./][^/]*")
_FOSSILIZE: Final = Shape((_NAME, _NAME, regex(r"foz_cache(?:_idx)?\.foz")), folders=False)
_FOSSILIZE_OWN: Final = Shape((_NAME, _NAME, _OWN.levels[0]), folders=False)
_PART: Final = regex(r"part\d{1,3}")
_DATABASES: Final = regex(r"mesa_cache\.(?:db|idx)")
_FLAT: Final = Shape((_DATABASES,), folders=False)
_PARTED: Final = Shape((_PART, _DATABASES), folders=False)
#: The file name of an entry of a larger file in quarantine.
_ASIDE: Final = "entry"

#: Seconds without change after which no living process is still writing a temporary.
_REST_TIME: Final = 3600.0
#: How many entries of one driver are unpacked, the smallest first, to find a kernel.
_LOOKS: Final = 256
_INDEX: Final = struct.Struct("<Q")
_INDEX_SIZE: Final = _INDEX.size + 65536 * 20
_BLOCK: Final = 512
#: The difference in bytes that the count of the index may have before it costs anything.
_TOLERANCE: Final = 1 << 24

_GRAPHICS: Final = "is of GL or Vulkan, which share the folder"
_UNKNOWN: Final = "cannot be distinguished from what GL and Vulkan keep in the same folder"
#: Why the last kernel of a driver stays.
_KEPT: Final = "is left until the machine code of its driver can be removed"
_NEVER: Final = "Mesa compiles it again in every run, and never replaces it"


class _Raw(NamedTuple):
    """An entry with its header, and a function that reads all of it."""

    entry: Entry
    header: mesa_entries.Header | None
    read: Callable[[], bytes | None]


class ShaderCache(TreeStore):
    """Entries in the three forms of Mesa; the role of a root says which one it has."""

    forms = ("mesa-entry/1",)
    file_mode = 0o644

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of entries, files and temporaries."""
        return any(shape.owns(parts) for shape in _shapes(root))

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield entries, each with its owner; only ``contents`` unpacks kernel names."""
        raws: list[_Raw] = []
        for found in self._raws(root):
            if isinstance(found, _Raw):
                raws.append(found)
            else:
                yield found
        unread: dict[Path, LayerError] = {}
        guests = _guests(raws, unread)
        for raw in raws:
            if raw.header is None:
                yield Problem(root.path / raw.entry.key, "damaged", f"has no header of an entry: {_NEVER}")
            yield _described(raw, guests, unread, contents=contents)
        for path, error in unread.items():
            yield Problem(path, "unreadable", error.message)

    def _raws(self, root: Root) -> Iterator[_Raw | Found]:
        return self._files_scan(root) if root.role != MULTI_FILE else self._tree_scan(root)

    def _tree_scan(self, root: Root) -> Iterator[_Raw | Found]:
        shapes = (_ENTRIES, _TEMPORARIES, _OWN)
        for tree, leaf in scan_each(self._tree(root, shape) for shape in shapes):
            if isinstance(leaf, Problem):
                yield leaf
            elif leaf.orphan_rule is not None:
                yield leaf.orphan(root.path)
            elif tree.shape is _ENTRIES:
                entry = leaf.entry(self.name, root.path)
                try:
                    yield _raw(entry, lambda limit, key=leaf.key, tree=tree: tree.read_file(key, limit=limit))  # type: ignore[misc]
                except LayerError as error:
                    yield Problem(root.path / leaf.key, "unreadable", error.message)
            elif tree.shape is _TEMPORARIES:
                yield leaf.orphan(root.path, "a program that was never stored whole")
            else:
                yield _housekeeping(root, leaf)

    def _files_scan(self, root: Root) -> Iterator[_Raw | Found]:
        for leaf in self._leaves(root):
            if not isinstance(leaf, Leaf):
                yield leaf
            elif self._is_data(root, leaf):
                try:
                    yield from self._file_scan(root, self._file_of(root, leaf))
                except LayerError as error:
                    yield Problem(root.path / leaf.key, "unreadable", error.message)
            elif leaf.key.rpartition("/")[2] != self._kind(root).index_name:
                yield _housekeeping(root, leaf)

    def _file_scan(self, root: Root, file: MesaFile) -> Iterator[_Raw | Found]:
        """Yield the entries of one file, and the rest of it. Raises :class:`LayerError` where it is unreadable."""
        size = file.size()
        if size is None:
            return
        if (why := file.damage()) is not None:
            yield Problem(file.path, "damaged", why)
        total = 0
        for blob in file.blobs():
            total += blob.length
            yield self._blob_raw(root, file, blob, size[1])
        relative = os.path.relpath(file.path, root.path)
        yield facts.Housekeeping(relative, root.path, size[0] - total, 2, size[1], disk=size[2])

    def _blob_raw(self, root: Root, file: MesaFile, blob: Blob, modified: float) -> _Raw:
        key = _key(blob.name)
        entry = Entry(self.name, key, root.path, blob.length, 0, written_before=modified, stamp=blob.stamp)
        return _raw(entry, lambda limit: file.read(blob, limit))

    def _leaves(self, root: Root) -> Iterator[Found | Leaf]:
        """Yield the files of a root, cachectl's own files there, and problems."""
        for _, leaf in scan_each(self._tree(root, shape) for shape in _shapes(root)):
            yield leaf if isinstance(leaf, Problem) or leaf.orphan_rule is None else leaf.orphan(root.path)

    def _files(self, root: Root) -> list[MesaFile]:
        """Return every file of entries in a root. Raises :class:`Unreachable` where one may have been overlooked."""
        files = []
        for leaf in self._leaves(root):
            if isinstance(leaf, Leaf) and self._is_data(root, leaf):
                files.append(self._file_of(root, leaf))
            elif isinstance(leaf, Problem) and leaf.hides:
                raise Unreachable(self.name, leaf.message, leaf.path)
        return files

    def _kind(self, root: Root) -> type[MesaFile]:
        from cachectl.layers.mesa.files import DatabaseFile, FossilizeFile

        return FossilizeFile if root.role == SINGLE_FILE else DatabaseFile

    def _is_data(self, root: Root, leaf: Leaf) -> bool:
        return leaf.key.rpartition("/")[2] == self._kind(root).data_name

    def _file_of(self, root: Root, leaf: Leaf) -> MesaFile:
        return self._file(root, tuple(leaf.key.split("/")[:-1]))

    def _file(self, root: Root, folder: tuple[str, ...]) -> MesaFile:
        return self._kind(root)(self.name, root.path, folder, self.environment.lock_timeout)

    def _tree(self, root: Root, shape: Shape = _ENTRIES) -> Tree:
        return Tree(self.name, root.path, shape)

    def _located(self, root: Root, name: str) -> tuple[MesaFile, Blob] | None:
        """Find an entry among the files of a root."""
        for file in self._files(root):
            blob = file.find(name)
            if blob is not None:
                return file, blob
        return None

    def held_in(self, root: Root, keys: Sequence[str]) -> Mapping[str, tuple[Path, ...]]:
        """Return both files of every store in a root: only reading shows which of them has an entry."""
        if root.role == MULTI_FILE:
            return super().held_in(root, keys)
        both = tuple(path for file in self._files(root) for path in (file.path, file.path.with_name(file.index_name)))
        return {key: both if _ENTRIES.accepts(key) else (root.path / key,) for key in keys}

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Compare with the pattern of entries."""
        return _ENTRIES.accepts(key)

    def read(self, root: Root, key: str) -> facts.Artifact | None:
        """Read an entry with its header, which has the same bytes in all forms."""
        if not _ENTRIES.accepts(key):
            return None
        data = self._bytes(root, key)
        if data is None:
            return None
        header = mesa_entries.read_header(data)
        if (complaint := mesa_entries.complaint(data)) is not None or header is None:
            raise Damaged(self.name, f"{complaint}; {_NEVER}", root.path / key)
        names = " ".join(_kernels(data) or ())
        return facts.Artifact(
            self.name, key, self.forms[0], data, {"kernels": names, "device": header.device, "driver": header.driver}
        )

    def _bytes(self, root: Root, key: str) -> bytes | None:
        if root.role == MULTI_FILE:
            return self._tree(root).read(key)
        found = self._located(root, _name(key))
        return None if found is None else found[0].read(found[1])

    def tree_of(self, root: Root, key: str) -> Tree:
        """Return the tree of entries that are files."""
        del key
        return self._tree(root)

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check the checksum. Nothing can check the name."""
        self._header_of(key, artifact)
        return {"": artifact.data}

    def _header_of(self, key: str, artifact: facts.Artifact) -> mesa_entries.Header:
        header = mesa_entries.read_header(artifact.data)
        if (complaint := mesa_entries.complaint(artifact.data)) is not None or header is None:
            raise Damaged(self.name, complaint or "has no header", key)
        return header

    def changing(self, root: Root) -> AbstractContextManager[None]:
        """Keep the size in the index right."""
        return self._counting(root)

    def write(self, root: Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        """Place an entry into the form in use."""
        if root.role == MULTI_FILE:
            super().write(root, key, artifact, replace=replace)
            return
        header = self._header_of(key, artifact)
        self._file_for(root, header, _name(key)).put(_name(key), artifact.data, replace=replace)

    def write_new(self, root: Root, artifacts: Sequence[facts.Artifact]) -> list[bool | LayerError | OSError]:
        """Place files together, and entries of larger files one by one."""
        if root.role == MULTI_FILE:
            return super().write_new(root, artifacts)
        return Store.write_new(self, root, artifacts)

    def _file_for(self, root: Root, header: mesa_entries.Header, name: str) -> MesaFile:
        """Return the file that has an entry, else the file where Mesa would look for it."""
        found = self._located(root, name)
        if found is not None:
            return found[0]
        if root.role == SINGLE_FILE:
            if not all(map(_NAME.fullmatch, header.maker)):
                raise Damaged(self.name, f"its driver and device {header.maker} cannot name a folder", root.path)
            return self._file(root, header.maker)
        # Newer releases use parts, and remove the files that older ones kept beside them.
        parts = [file for file in self._files(root) if file.folder]
        return parts[0] if parts else self._file(root, ())

    # ------------------------------------------------------------------ clear

    def in_use(self, targets: Iterable[facts.Removable]) -> Iterator[tuple[facts.Removable, str | None]]:
        """Skip temporaries that a running process may be writing. Entries may be removed at any time.

        Machine code is removed with the last kernel of its driver and device: without a kernel, nothing shows
        that it is OpenCL's.
        """
        targets = list(targets)
        targets += self._without_kernel(targets)
        users = using(OPENED, processes=self.environment.processes)
        now = self.environment.clock()
        for target in targets:
            age = now - (target.modified or now)
            busy = isinstance(target, facts.Orphan) and target.idle_only and users != () and age <= _REST_TIME
            yield (
                target,
                f"changed {max(0, age):.0f} s ago, and Mesa is in use by {process_names(users)}" if busy else None,
            )

    def _without_kernel(self, targets: Iterable[facts.Removable]) -> Iterator[Entry]:
        """Yield the entries of OpenCL that nothing could recognise without the targets."""
        going: dict[Path, set[str]] = {}
        for target in targets:
            if isinstance(target, Entry) and target.guest is None:
                going.setdefault(target.root, set()).add(target.key)
        for path, keys in going.items():
            root = _root_at(path)
            found = list(self._raws(root))
            if any(isinstance(one, Problem) and one.hides for one in found):
                # A kernel that cannot be read may remain.
                continue
            raws = [one for one in found if isinstance(one, _Raw)]
            unread: dict[Path, LayerError] = {}
            guests = _guests(raws, unread)
            for maker, group in _makers(raws).items():
                rest = [raw for raw in group if raw.entry.key not in keys]
                known_by_kernels = (
                    guests[maker] is None and mesa_entries.RUSTICL not in maker and len(rest) < len(group)
                )
                if known_by_kernels and not any(_kernels(_content(raw, unread)) for raw in rest) and not unread:
                    yield from (_described(raw, guests, unread, contents=False) for raw in rest)

    def foresee_removal(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Foresight:
        """Also count the headers and records that a file keeps for each entry."""
        seen = super().foresee_removal(root, targets)
        if root.role == MULTI_FILE:
            return self._without_last(seen, self._last_kernels(root, targets))
        names = {_name(target.key) for target in seen.going if _ENTRIES.accepts(target.key)}
        orphans = sum(target.bytes for target in seen.going if not _ENTRIES.accepts(target.key))
        freed = sum(file.foresee_removal(names) for file in self._files(root))
        return replace(seen, bytes_freed=orphans + freed)

    def _without_last(self, seen: facts.Foresight, last: Mapping[str, Sequence[str]]) -> facts.Foresight:
        """Take out kernels that stay because something that must be removed before them stays."""
        failing = {note.key for note in seen.failed}
        kept = {key for key, others in last.items() if key not in failing and not failing.isdisjoint(others)}
        return replace(
            seen,
            going=tuple(target for target in seen.going if target.key not in kept),
            bytes_freed=seen.bytes_freed - sum(target.bytes for target in seen.going if target.key in kept),
            skipped=(*seen.skipped, *(facts.Note(key, _KEPT) for key in sorted(kept))),
        )

    def lock_files(self, root: Root, keys: Iterable[str]) -> Iterable[Path]:
        """Return the data files: Mesa locks the one that it writes to. Entries that are files have no lock."""
        del keys
        return () if root.role == MULTI_FILE else [file.path for file in self._files(root)]

    def remove(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Outcome:
        """Unlink entries, or remove them under the lock of their file; then count the size again."""
        if root.role != MULTI_FILE:
            return self._remove_from_files(root, targets)
        return remove_counted(self.name, self._counting(root), lambda _: self._remove_kernels_last(root, targets))

    def _remove_kernels_last(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Outcome:
        last = self._last_kernels(root, targets)
        outcome = self._remove_files(root, tuple(target for target in targets if target.key not in last))
        gone = {key for key, others in last.items() if not any(_may_stand(root.path / other) for other in others)}
        outcome = outcome.plus(self._remove_files(root, tuple(target for target in targets if target.key in gone)))
        skipped = tuple(facts.Note(key, _KEPT) for key in last.keys() - gone)
        return outcome.plus(facts.Outcome(self.name, skipped=skipped))

    def _last_kernels(self, root: Root, targets: tuple[facts.Target, ...]) -> dict[str, list[str]]:
        """Map a kernel of each driver and device to the other targets of these, which must be removed before it.

        Without a kernel nothing shows whose they are, so after an interruption no purge would remove them. A target
        that cannot be read may belong to any driver.
        """
        keys = {target.key for target in targets if _ENTRIES.accepts(target.key)}
        raws = [found for found in self._raws(root) if isinstance(found, _Raw) and found.entry.key in keys]
        unread = sorted(keys - {raw.entry.key for raw in raws})
        last: dict[str, list[str]] = {}
        for maker, group in _makers(raws).items():
            by_size = sorted(group, key=lambda raw: raw.entry.bytes) if mesa_entries.RUSTICL not in maker else []
            kernel = next((raw.entry.key for raw in by_size if _kernels(_content(raw, {}))), None)
            if kernel is not None:
                last[kernel] = [*(raw.entry.key for raw in group if raw.entry.key != kernel), *unread]
        return last

    def _remove_files(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Outcome:
        idle = using(OPENED, processes=self.environment.processes) == ()
        temporary = [target for target in targets if target.key.endswith(".tmp")]
        others = [target for target in targets if not target.key.endswith(".tmp")]
        planned = ((self._tree(root), others), (self._tree(root, _TEMPORARIES), temporary))
        parts = [(str(root.path), own, partial(tree.remove, own, tidy=idle)) for tree, own in planned if own]
        return each_part(self.name, parts)

    def _remove_from_files(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Outcome:
        wanted = {_name(target.key): target for target in targets if _ENTRIES.accepts(target.key)}
        orphans = tuple(target for target in targets if not _ENTRIES.accepts(target.key))
        outcome = facts.Outcome(self.name)
        if orphans:
            remove = partial(self._tree(root, _shapes(root)[0]).remove, orphans)
            outcome = each_part(self.name, [(str(root.path), orphans, remove)])
        left = set(wanted)
        trouble: str | None = None
        # List all files before changing one, so that no failure to list hides what was removed.
        for leaf in list(self._leaves(root)):
            if isinstance(leaf, Problem) and leaf.hides:
                trouble = leaf.message
            elif isinstance(leaf, Leaf) and self._is_data(root, leaf):
                try:
                    removed = self._remove_from(self._file_of(root, leaf), wanted, left)
                except LayerError as error:
                    trouble = error.message
                else:
                    outcome = outcome.plus(removed)
        notes = tuple(facts.Note(_key(name), trouble or "already gone") for name in sorted(left))
        return outcome.plus(
            facts.Outcome(self.name, failed=notes) if trouble else facts.Outcome(self.name, skipped=notes)
        )

    def _remove_from(self, file: MesaFile, wanted: Mapping[str, facts.Target], left: set[str]) -> facts.Outcome:
        """Remove the wanted entries of one file, and drop their names from ``left``."""
        stamps = {blob.name: wanted[blob.name].stamp for blob in file.blobs() if blob.name in wanted}
        if not stamps:
            return facts.Outcome(self.name)
        removed = file.remove(stamps)
        left.difference_update(stamps)
        notes = tuple(facts.Note(_key(name), why) for name, why in removed.stay.items())
        if removed.failed is None:
            return facts.Outcome(self.name, removed.entries, removed.bytes, skipped=notes)
        failed = notes or (facts.Note(str(file.path), removed.failed),)
        return facts.Outcome(self.name, removed.entries, removed.bytes, failed=failed)

    def _counting(self, root: Root) -> AbstractContextManager[None]:
        return counting(self.name, root.path / "index", partial(self._recount, root))

    def _recount(self, root: Root) -> None:
        """Write the true size into the index, to which Mesa only adds, and by which it decides when to drop entries."""
        try:
            handle = open_plain(root.path / "index", flags=os.O_RDWR)
        except OSError as error:
            if means_no_file(error):
                return
            raise
        try:
            if os.fstat(handle).st_size == _INDEX_SIZE:
                os.pwrite(handle, _INDEX.pack(self._held(root)), 0)
        finally:
            os.close(handle)

    def _held(self, root: Root) -> int:
        """Return the bytes that the entries take on the disk, as Mesa counts them. Raises :class:`Unreachable`."""
        total = 0
        for leaf in self._tree(root).scan():
            if isinstance(leaf, Leaf):
                status = status_at(root.path / leaf.key) if leaf.orphan_rule is None else None
                total += 0 if status is None else status.st_blocks * _BLOCK
            elif leaf.hides:
                raise Unreachable(self.name, leaf.message, leaf.path)
        return total

    # ------------------------------------------------------------------ quarantine

    def quarantine(self, root: Root, target: facts.Target, thing: facts.Quarantined) -> str | None:
        """Rename an entry, or a whole file, into quarantine; copy an entry of a file there, then remove it."""
        if root.role == MULTI_FILE:
            with self._counting(root):
                return self._tree(root).quarantine(target, thing)
        if not _ENTRIES.accepts(target.key):
            return self._tree(root, _shape_of(root, target.key)).quarantine(target, thing)
        found = self._located(root, _name(target.key))
        if found is None:
            return "already gone"
        file, blob = found
        content = file.read(blob)
        with opened_root(root.path) as handle:
            if handle is None or content is None or blob.stamp != target.stamp:
                return "changed since it was planned"
            with Quarantine(self.name, root.path).shelf(handle, thing) as shelf:
                write_synced(shelf.handle, _ASIDE, content)
                stay: Mapping[str, str] = {blob.name: "was not taken out"}
                try:
                    removed = file.remove({blob.name: blob.stamp})
                    stay = removed.stay
                finally:
                    if stay:
                        os.unlink(_ASIDE, dir_fd=shelf.handle)
                shelf.taken = not stay
                if removed.failed is not None and stay:
                    raise Unreachable(self.name, removed.failed, file.path)
                return stay.get(blob.name)

    def restore(self, root: Root, thing: facts.Quarantined, *, replace: bool) -> None:
        """Put an entry, or a whole file, back unchanged."""
        if root.role == MULTI_FILE or not _ENTRIES.accepts(thing.key):
            shape = _ENTRIES if root.role == MULTI_FILE else _shape_of(root, thing.key)
            with self._counting(root) if root.role == MULTI_FILE else nullcontext():
                self._tree(root, shape).restore(thing, replace=replace)
            return
        with Quarantine(self.name, root.path).taken(thing) as folder:
            demand(self.name, folder, _ASIDE)
            data = read_plain(_ASIDE, dir_fd=folder)
            header = mesa_entries.read_header(data)
            if header is None:
                raise Refused(self.name, "has no header that says which file it came from", thing.name)
            self._file_for(root, header, _name(thing.key)).put(_name(thing.key), data, replace=replace)

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Check header and checksum of every entry of any driver: Mesa repairs none of them."""
        if root.role != MULTI_FILE:
            yield from self._verify_files(root)
            return
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield self.to_finding(root, leaf)
            elif leaf.orphan_rule is None:
                try:
                    data = tree.read_file(leaf.key)
                    complaint = None if data is None else mesa_entries.complaint(data)
                except Unreachable as error:
                    yield self.unreadable(root, leaf.key, error)
                    continue
                except LayerError as error:
                    complaint = error.message
                if complaint is not None:
                    yield self._damaged(root, leaf.entry(self.name, root.path), f"{complaint}: {_NEVER}")
        yield from self._drifted(root)

    def _damaged(self, root: Root, thing: facts.Removable, message: str) -> facts.Finding:
        fix = f"cachectl purge {self.name} --key {thing.key}"
        return facts.Finding(self.name, root.path, thing.key, Severity.RECOMPILES, "damaged", message, fix, thing)

    def _drifted(self, root: Root) -> Iterator[facts.Finding]:
        try:
            counted = self.indexed_bytes(root)
            held = 0 if counted is None else self._held(root)
        except OSError as error:
            yield self.unreadable(root, "index", error)
            return
        if counted is not None and counted > 2 * held + _TOLERANCE:
            message = f"counts {counted:,} bytes where {held:,} are: Mesa drops entries too early"
            fix = "nothing: the next put or purge in this layer counts again"
            yield facts.Finding(self.name, root.path, "index", Severity.WASTES, "index", message, fix)

    def indexed_bytes(self, root: Root) -> int | None:
        """Return the bytes that the index counts; ``None`` where there is no index. Raises :class:`OSError`."""
        try:
            data = read_plain(root.path / "index", limit=_INDEX.size)
        except OSError as error:
            if means_no_file(error):
                return None
            raise
        return _INDEX.unpack(data)[0] if len(data) == _INDEX.size else None

    def _verify_files(self, root: Root) -> Iterator[facts.Finding]:
        found = list(self._leaves(root))
        leaves = {leaf.key: leaf for leaf in found if isinstance(leaf, Leaf)}
        for leaf in found:
            if isinstance(leaf, Problem):
                yield self.to_finding(root, leaf)
            elif isinstance(leaf, Leaf) and self._is_data(root, leaf):
                try:
                    yield from self._verify_file(root, self._file_of(root, leaf), leaves)
                except LayerError as error:
                    yield self.unreadable(root, leaf.key, error)

    def _verify_file(self, root: Root, file: MesaFile, leaves: Mapping[str, Leaf]) -> Iterator[facts.Finding]:
        if (why := file.damage()) is not None:
            yield from self._broken(root, file, why, leaves)
        elif lost := file.lost():
            yield from self._broken(root, file, f"its index lists {lost} entries that the data file lacks", leaves)
        for blob in file.blobs():
            data = file.read(blob)
            if data is None:
                continue
            complaint = mesa_entries.complaint(data)
            if complaint is None and blob.checksum not in (0, mesa_entries.checksum(data)):
                complaint = "its checksum does not match"
            if complaint is not None:
                what = "Mesa then drops every entry of the file" if root.role == DATABASE else _NEVER
                entry = self._blob_raw(root, file, blob, 0).entry
                yield self._damaged(root, entry, f"{complaint}: {what}")

    def _broken(self, root: Root, file: MesaFile, why: str, leaves: Mapping[str, Leaf]) -> Iterator[facts.Finding]:
        """Yield a finding for both files, since one without the other has the same effect."""
        for name in (file.index_name, file.data_name):
            key = "/".join((*file.folder, name))
            thing = leaves[key].orphan(root.path, why) if key in leaves else None
            fix = f"cachectl verify --quarantine {self.name}"
            yield facts.Finding(self.name, root.path, key, Severity.RECOMPILES, "file", why, fix, thing)


def _raw(entry: Entry, read: Callable[[int], bytes | None]) -> _Raw:
    head = read(mesa_entries.HEAD)
    return _Raw(entry, None if head is None else mesa_entries.read_header(head), lambda: read(-1))


def _guests(raws: Iterable[_Raw], unread: dict[Path, LayerError]) -> dict[tuple[str, str], str | None]:
    """Map every driver and device to the owner of its entries; ``None`` for OpenCL."""
    return {maker: _guest(group, unread) for maker, group in _makers(raws).items()}


def _may_stand(path: Path) -> bool:
    """Return whether an entry exists, or may exist."""
    try:
        return is_there(path)
    except OSError:
        return True


def _makers(raws: Iterable[_Raw]) -> dict[tuple[str, str], list[_Raw]]:
    """Sort entries by driver and device."""
    groups: dict[tuple[str, str], list[_Raw]] = {}
    for raw in raws:
        if raw.header is not None:
            groups.setdefault(raw.header.maker, []).append(raw)
    return groups


def _guest(group: list[_Raw], unread: dict[Path, LayerError]) -> str | None:
    headers = [raw.header for raw in group if raw.header is not None]
    if any(header.graphics for header in headers):
        return _GRAPHICS
    if headers[0].is_rusticl:
        return None
    # Kernels are smaller than the code that a driver makes from them.
    for raw in sorted(group, key=lambda raw: raw.entry.bytes)[:_LOOKS]:
        if _kernels(_content(raw, unread)):
            return None
    return _UNKNOWN


def _content(raw: _Raw, unread: dict[Path, LayerError]) -> bytes:
    """Read an entry; an unreadable one is empty, and added to ``unread``."""
    try:
        return raw.read() or b""
    except LayerError as error:
        unread[raw.entry.root / raw.entry.key] = error
        return b""


def _housekeeping(root: Root, leaf: Leaf) -> facts.Housekeeping:
    return facts.Housekeeping(leaf.key, root.path, leaf.bytes, 1, leaf.modified, fixed=True, disk=leaf.disk)


def _kernels(data: bytes) -> tuple[str, ...] | None:
    try:
        return mesa_entries.kernels(mesa_entries.inflate(data))
    except ValueError:
        return None


def _described(
    raw: _Raw, guests: Mapping[tuple[str, str], str | None], unread: dict[Path, LayerError], *, contents: bool
) -> Entry:
    header = raw.header
    if header is None:
        return replace(raw.entry, guest=_UNKNOWN)
    guest = guests[header.maker]
    kernels = _kernels(_content(raw, unread)) if contents and guest is None else None
    return replace(
        raw.entry,
        kernels=kernels,
        device=header.device,
        versions={"driver": header.driver},
        detail={"of": "OpenCL" if guest is None else "GL or Vulkan" if guest == _GRAPHICS else "unknown"},
        guest=guest,
    )


def _root_at(path: Path) -> Root:
    """Return the root at a path: the name of its folder says its form."""
    return Root(path, facts.Scope.USER, "", next(role for role, folder in FOLDERS.items() if folder == path.name))


def _shapes(root: Root) -> tuple[Shape, ...]:
    if root.role == MULTI_FILE:
        return (_ENTRIES, _TEMPORARIES, _OWN)
    return (_FOSSILIZE, _FOSSILIZE_OWN) if root.role == SINGLE_FILE else (_FLAT, _PARTED, _OWN)


def _shape_of(root: Root, key: str) -> Shape:
    """Return the shape of a whole file by its key."""
    return next((shape for shape in _shapes(root) if shape.accepts(key)), _shapes(root)[0])


def _name(key: str) -> str:
    return key.replace("/", "")


def _key(name: str) -> str:
    return f"{name[:2]}/{name[2:]}"
