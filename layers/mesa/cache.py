"""The layer ``mesa``: what Rusticl, and Mesa's drivers under it, have compiled for OpenCL.

GL and Vulkan keep their programs in the same folders. Which entries are OpenCL's is told by what they hold: all
entries of one driver and device were stored by one build of one library, and Rusticl is a library of its own; so where
one of them holds a kernel, all are OpenCL's. Sources: ``src/util/disk_cache.c`` and ``disk_cache_os.c`` (places,
switches, sizes), ``src/util/u_debug.c`` (booleans).
"""

from __future__ import annotations

import os
import re
import shlex
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import Damaged, LayerError, Refused, Unreachable
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    Condition,
    Entry,
    Finding,
    Foresight,
    Found,
    Hazard,
    Housekeeping,
    Note,
    Orphan,
    Outcome,
    Problem,
    Quarantined,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
)
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import dataclass, module, regex, replace
from cachectl.layers.base.store import Store, counting, each_part, remove_counted
from cachectl.layers.base.switches import misread, off
from cachectl.layers.disk.atomic import write_synced
from cachectl.layers.disk.handles import opened_root
from cachectl.layers.disk.plain import open_plain, read_plain
from cachectl.layers.disk.presence import is_there, means_no_file, status_at
from cachectl.layers.host.drivers import opencl_drivers
from cachectl.layers.host.processes import spell, using
from cachectl.layers.mesa.stores import Blob, DatabaseFile, FossilizeFile, MesaFile
from cachectl.layers.stores.quarantine import Quarantine, demand
from cachectl.layers.stores.tree import REFUSALS, Leaf, Shape, Tree, scan_each

if TYPE_CHECKING:
    from cachectl.layers.mesa import entries as mesa_entries
else:
    mesa_entries = module("cachectl.layers.mesa.entries")

#: What is mapped into every process that has one of the stores open, whichever driver it is.
OPENED: Final = ("mesa_shader_cache",)
DRIVERS: Final = ("Rusticl", "Mesa Clover")

MULTI_FILE: Final = "multi-file"
SINGLE_FILE: Final = "single-file"
DATABASE: Final = "database"
_FOLDERS: Final = {
    MULTI_FILE: "mesa_shader_cache",
    SINGLE_FILE: "mesa_shader_cache_sf",
    DATABASE: "mesa_shader_cache_db",
}
_SELECTORS: Final = {SINGLE_FILE: "MESA_DISK_CACHE_SINGLE_FILE", DATABASE: "MESA_DISK_CACHE_DATABASE"}

#: What names read-only files of a single-file store beside its own, ``src/util/fossilize_db.c``.
_SHIPPED: Final = ("MESA_DISK_CACHE_READ_ONLY_FOZ_DBS", "MESA_DISK_CACHE_READ_ONLY_FOZ_DBS_DYNAMIC_LIST")

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
#: What an entry of a file is called while it is in quarantine.
_ASIDE: Final = "entry"

#: Seconds without change after which no living process is still writing a temporary.
_REST_TIME: Final = 3600.0
#: How many entries of one driver are unpacked, the smallest first, before it counts as one that cannot be told.
_LOOKS: Final = 256
_INDEX: Final = struct.Struct("<Q")
_INDEX_SIZE: Final = _INDEX.size + 65536 * 20
_BLOCK: Final = 512
_DEFAULT_CAP: Final = 1 << 30
_NEARLY: Final = 0.9
#: By how much the count of the index may differ before that costs anything, in bytes.
_TOLERANCE: Final = 1 << 24
_LIMIT: Final = regex(r"\s*([+-]?\d{1,18})(.?)", re.ASCII | re.DOTALL)
_UNITS: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TRUE: Final = frozenset({"1", "t", "true", "y", "yes"})
_FALSE: Final = frozenset({"0", "f", "false", "n", "no"})

_GRAPHICS: Final = "is of GL or Vulkan, which share the folder"
_UNTOLD: Final = "cannot be distinguished from what GL and Vulkan keep in the same folder"
_NEVER: Final = "Mesa compiles it again in every run, and never replaces it"


@dataclass(frozen=True, slots=True)
class _Raw:
    """An entry as it lies in its store: its header, and what reads it whole."""

    entry: Entry
    header: mesa_entries.Header | None
    read: Callable[[], bytes | None]


class ShaderCache(Store):
    """The three stores of Mesa: a file for each entry, one file with an index, and a database of two files."""

    forms = ("mesa-entry/1",)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse what needs directory handles where there are none."""
        return REFUSALS

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Tell by the names of entries, files and temporaries."""
        return any(shape.claims(parts) for shape in _shapes(root))

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield entries, each with whose it is; kernel names are unpacked only on request."""
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
            elif leaf.stray is not None:
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
        """Yield the entries of one file and what else it holds. Raises :class:`LayerError` where it is unreadable."""
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
        yield Housekeeping(relative, root.path, size[0] - total, 2, size[1])

    def _blob_raw(self, root: Root, file: MesaFile, blob: Blob, modified: float) -> _Raw:
        key = _key(blob.name)
        entry = Entry(self.name, key, root.path, blob.length, 0, written_before=modified, mark=blob.mark)
        return _raw(entry, lambda limit: file.read(blob, limit))

    def _leaves(self, root: Root) -> Iterator[Found | Leaf]:
        """Yield the files of a root, what of cachectl's own lies there, and what could not be looked at."""
        for _, leaf in scan_each(self._tree(root, shape) for shape in _shapes(root)):
            yield leaf if isinstance(leaf, Problem) or leaf.stray is None else leaf.orphan(root.path)

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
        return FossilizeFile if root.role == SINGLE_FILE else DatabaseFile

    def _is_data(self, root: Root, leaf: Leaf) -> bool:
        return leaf.key.rpartition("/")[2] == self._kind(root).data_name

    def _file_of(self, root: Root, leaf: Leaf) -> MesaFile:
        return self._file(root, tuple(leaf.key.split("/")[:-1]))

    def _file(self, root: Root, folder: tuple[str, ...]) -> MesaFile:
        return self._kind(root)(self.name, root.path, folder, self.environment.patience)

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
        """Name both files of each store of a root: which of them holds an entry, only reading it tells."""
        if root.role == MULTI_FILE:
            return super().held_in(root, keys)
        both = tuple(path for file in self._files(root) for path in (file.path, file.path.with_name(file.index_name)))
        return {key: both if _ENTRIES.accepts(key) else (root.path / key,) for key in keys}

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Tell by the pattern of entries."""
        return _ENTRIES.accepts(key)

    def read(self, root: Root, key: str) -> Artifact | None:
        """Read an entry as it stands, header included: the same bytes in each store."""
        if not _ENTRIES.accepts(key):
            return None
        data = self._bytes(root, key)
        if data is None:
            return None
        header = mesa_entries.read_header(data)
        if (complaint := mesa_entries.complaint(data)) is not None or header is None:
            raise Damaged(self.name, f"{complaint}; {_NEVER}", root.path / key)
        names = " ".join(_kernels(data) or ())
        return Artifact(
            self.name, key, self.forms[0], data, {"kernels": names, "device": header.device, "driver": header.driver}
        )

    def _bytes(self, root: Root, key: str) -> bytes | None:
        if root.role == MULTI_FILE:
            return self._tree(root).read(key)
        found = self._located(root, _name(key))
        return None if found is None else found[0].read(found[1])

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Place an entry whose checksum holds into the store that is in use; its name cannot be checked."""
        header = mesa_entries.read_header(artifact.data)
        if (complaint := mesa_entries.complaint(artifact.data)) is not None or header is None:
            raise Damaged(self.name, complaint or "has no header", key)
        if root.role == MULTI_FILE:
            with self._counting(root):
                self._tree(root).write(key, artifact.data, replace=replace, file_mode=0o644)
            return
        self._file_for(root, header, _name(key)).put(_name(key), artifact.data, replace=replace)

    def _file_for(self, root: Root, header: mesa_entries.Header, name: str) -> MesaFile:
        """Return the file that an entry goes into: where it is already, else where Mesa would look for it."""
        found = self._located(root, name)
        if found is not None:
            return found[0]
        if root.role == SINGLE_FILE:
            if not all(map(_NAME.fullmatch, header.maker)):
                raise Damaged(self.name, f"{header.maker} makes no folder", root.path)
            return self._file(root, header.maker)
        # Newer releases have parts, and remove what older ones kept beside these.
        parts = [file for file in self._files(root) if file.folder]
        return parts[0] if parts else self._file(root, ())

    # ------------------------------------------------------------------ clear

    def idle_gate(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Leave alone temporaries that a living program may still be writing; entries may go at any time.

        Machine code goes with the last kernel of its driver and device: without one nothing says that it is OpenCL's.
        """
        targets = list(targets)
        targets += self._without_kernel(targets)
        users = using(OPENED, processes=self.environment.processes)
        now = self.environment.clock()
        for target in targets:
            age = now - (target.modified or now)
            busy = isinstance(target, Orphan) and target.idle_only and users != () and age <= _REST_TIME
            yield target, f"changed {max(0, age):.0f} s ago, and Mesa is in use by {spell(users)}" if busy else None

    def _without_kernel(self, targets: Iterable[Removable]) -> Iterator[Entry]:
        """Yield the entries of OpenCL that nothing would recognise once the targets have gone."""
        going: dict[Path, set[str]] = {}
        for target in targets:
            if isinstance(target, Entry) and target.guest is None:
                going.setdefault(target.root, set()).add(target.key)
        for path, keys in going.items():
            root = _root_at(path)
            found = list(self._raws(root))
            if any(isinstance(one, Problem) and one.hides for one in found):
                # A kernel that cannot be read may be the one that is left.
                continue
            raws = [one for one in found if isinstance(one, _Raw)]
            unread: dict[Path, LayerError] = {}
            guests = _guests(raws, unread)
            for maker, group in _makers(raws).items():
                rest = [raw for raw in group if raw.entry.key not in keys]
                told_by_kernels = guests[maker] is None and mesa_entries.RUSTICL not in maker and len(rest) < len(group)
                if told_by_kernels and not any(_kernels(_content(raw, unread)) for raw in rest) and not unread:
                    yield from (_described(raw, guests, unread, contents=False) for raw in rest)

    def foresee_removal(self, root: Root, targets: tuple[Target, ...]) -> Foresight:
        """Add what a file has of each entry beside its bytes."""
        seen = super().foresee_removal(root, targets)
        if root.role == MULTI_FILE:
            return seen
        names = {_name(target.key) for target in seen.going if _ENTRIES.accepts(target.key)}
        strays = sum(target.bytes for target in seen.going if not _ENTRIES.accepts(target.key))
        freed = sum(file.foresee_removal(names) for file in self._files(root))
        return replace(seen, bytes_freed=strays + freed)

    def lock_files(self, root: Root, keys: Iterable[str]) -> Iterable[Path]:
        """Name the data files, of which Mesa locks the one that it writes to; entries that are files have no lock."""
        del keys
        return () if root.role == MULTI_FILE else [file.path for file in self._files(root)]

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Remove entries: by unlinking, or under the lock of their file; then the size is counted anew."""
        if root.role != MULTI_FILE:
            return self._remove_from_files(root, targets)
        return remove_counted(self.name, self._counting(root), lambda _: self._remove_kernels_last(root, targets))

    def _remove_kernels_last(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        last = self._last_kernels(root, targets)
        outcome = self._remove_files(root, tuple(target for target in targets if target.key not in last))
        gone = {key for key, others in last.items() if not any(_may_stand(root.path / other) for other in others)}
        outcome = outcome.plus(self._remove_files(root, tuple(target for target in targets if target.key in gone)))
        kept = "is left until the machine code of its driver can be removed"
        skipped = tuple(Note(key, kept) for key in last.keys() - gone)
        return outcome.plus(Outcome(self.name, skipped=skipped))

    def _last_kernels(self, root: Root, targets: tuple[Target, ...]) -> dict[str, list[str]]:
        """Map a kernel of each driver and device to the other targets of these, which must go before it.

        Without a kernel nothing says whose they are: after an interruption no purge would remove them. A target that
        cannot be read may be of any driver.
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

    def _remove_files(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        idle = using(OPENED, processes=self.environment.processes) == ()
        temporary = [target for target in targets if target.key.endswith(".tmp")]
        others = [target for target in targets if not target.key.endswith(".tmp")]
        planned = ((self._tree(root), others), (self._tree(root, _TEMPORARIES), temporary))
        parts = [(str(root.path), partial(tree.remove, own, tidy=idle)) for tree, own in planned if own]
        return each_part(self.name, parts)

    def _remove_from_files(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        wanted = {_name(target.key): target for target in targets if _ENTRIES.accepts(target.key)}
        strays = tuple(target for target in targets if not _ENTRIES.accepts(target.key))
        outcome = Outcome(self.name)
        if strays:
            remove = partial(self._tree(root, _shapes(root)[0]).remove, strays)
            outcome = each_part(self.name, [(str(root.path), remove)])
        left = set(wanted)
        trouble: str | None = None
        # All are listed before one is changed, so that no failed listing hides what was removed.
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
        notes = tuple(Note(_key(name), trouble or "already gone") for name in sorted(left))
        return outcome.plus(Outcome(self.name, failed=notes) if trouble else Outcome(self.name, skipped=notes))

    def _remove_from(self, file: MesaFile, wanted: Mapping[str, Target], left: set[str]) -> Outcome:
        """Remove wanted entries from one file, and take their names out of those that are left to be found."""
        marks = {blob.name: wanted[blob.name].mark for blob in file.blobs() if blob.name in wanted}
        if not marks:
            return Outcome(self.name)
        removed = file.remove(marks)
        left.difference_update(marks)
        notes = tuple(Note(_key(name), why) for name, why in removed.stay.items())
        if removed.failed is None:
            return Outcome(self.name, removed.entries, removed.bytes, skipped=notes)
        failed = notes or (Note(str(file.path), removed.failed),)
        return Outcome(self.name, removed.entries, removed.bytes, failed=failed)

    def _counting(self, root: Root) -> AbstractContextManager[None]:
        return counting(self.name, root.path / "index", partial(self._count_anew, root))

    def _count_anew(self, root: Root) -> None:
        """Write the true size into the index, from which Mesa tells when to drop entries; it only ever adds there."""
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
        """Sum what the entries take on the disk, as Mesa counts it. Raises :class:`OSError` where some is unknown."""
        total = 0
        for leaf in self._tree(root).scan():
            if isinstance(leaf, Leaf):
                status = status_at(root.path / leaf.key) if leaf.stray is None else None
                total += 0 if status is None else status.st_blocks * _BLOCK
            elif leaf.hides:
                raise Unreachable(self.name, leaf.message, leaf.path)
        return total

    # ------------------------------------------------------------------ quarantine

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Rename an entry, or a whole file, into quarantine; an entry of a file is copied there, then taken out."""
        if root.role == MULTI_FILE:
            with self._counting(root):
                return self._tree(root).set_aside(target, thing)
        if not _ENTRIES.accepts(target.key):
            return self._tree(root, _shape_of(root, target.key)).set_aside(target, thing)
        found = self._located(root, _name(target.key))
        if found is None:
            return "already gone"
        file, blob = found
        content = file.read(blob)
        with opened_root(root.path) as handle:
            if handle is None or content is None or blob.mark != target.mark:
                return "changed since it was planned"
            with Quarantine(self.name, root.path).shelf(handle, thing) as shelf:
                write_synced(shelf.handle, _ASIDE, content)
                stay: Mapping[str, str] = {blob.name: "was not taken out"}
                try:
                    removed = file.remove({blob.name: blob.mark})
                    stay = removed.stay
                finally:
                    if stay:
                        os.unlink(_ASIDE, dir_fd=shelf.handle)
                shelf.taken = not stay
                if removed.failed is not None and stay:
                    raise Unreachable(self.name, removed.failed, file.path)
                return stay.get(blob.name)

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Put an entry, or a whole file, back as bad as it was."""
        if root.role == MULTI_FILE or not _ENTRIES.accepts(thing.key):
            shape = _ENTRIES if root.role == MULTI_FILE else _shape_of(root, thing.key)
            with self._counting(root) if root.role == MULTI_FILE else nullcontext():
                self._tree(root, shape).bring_back(thing, replace=replace)
            return
        with Quarantine(self.name, root.path).taken(thing) as folder:
            demand(self.name, folder, _ASIDE)
            data = read_plain(_ASIDE, dir_fd=folder)
            header = mesa_entries.read_header(data)
            if header is None:
                raise Refused(self.name, "has no header that says which file it came from", thing.name)
            self._file_for(root, header, _name(thing.key)).put(_name(thing.key), data, replace=replace)

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check header and checksum of every entry, of whatever driver: Mesa mends none of them."""
        if root.role != MULTI_FILE:
            yield from self._verify_files(root)
            return
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield self.told(root, leaf)
            elif leaf.stray is None:
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

    def _damaged(self, root: Root, thing: Removable, message: str) -> Finding:
        fix = f"cachectl purge {self.name} --key {thing.key}"
        return Finding(self.name, root.path, thing.key, Severity.RECOMPILES, "damaged", message, fix, thing)

    def _drifted(self, root: Root) -> Iterator[Finding]:
        try:
            counted = self.counted_bytes(root)
            held = 0 if counted is None else self._held(root)
        except OSError as error:
            yield self.unreadable(root, "index", error)
            return
        if counted is not None and counted > 2 * held + _TOLERANCE:
            message = f"counts {counted:,} bytes where {held:,} are: Mesa drops entries too early"
            fix = "nothing: the next put or purge in this layer counts anew"
            yield Finding(self.name, root.path, "index", Severity.WASTES, "index", message, fix)

    def counted_bytes(self, root: Root) -> int | None:
        """Return the bytes that the index counts; ``None`` where there is none. Raises :class:`OSError`."""
        try:
            data = read_plain(root.path / "index", limit=_INDEX.size)
        except OSError as error:
            if means_no_file(error):
                return None
            raise
        return _INDEX.unpack(data)[0] if len(data) == _INDEX.size else None

    def _verify_files(self, root: Root) -> Iterator[Finding]:
        found = list(self._leaves(root))
        leaves = {leaf.key: leaf for leaf in found if isinstance(leaf, Leaf)}
        for leaf in found:
            if isinstance(leaf, Problem):
                yield self.told(root, leaf)
            elif isinstance(leaf, Leaf) and self._is_data(root, leaf):
                try:
                    yield from self._verify_file(root, self._file_of(root, leaf), leaves)
                except LayerError as error:
                    yield self.unreadable(root, leaf.key, error)

    def _verify_file(self, root: Root, file: MesaFile, leaves: Mapping[str, Leaf]) -> Iterator[Finding]:
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
                complaint = "its checksum does not hold"
            if complaint is not None:
                what = "Mesa then drops every entry of the file" if root.role == DATABASE else _NEVER
                entry = self._blob_raw(root, file, blob, 0).entry
                yield self._damaged(root, entry, f"{complaint}: {what}")

    def _broken(self, root: Root, file: MesaFile, why: str, leaves: Mapping[str, Leaf]) -> Iterator[Finding]:
        """Name both files: one without the other would do the same harm."""
        for name in (file.index_name, file.data_name):
            key = "/".join((*file.folder, name))
            thing = leaves[key].orphan(root.path, why) if key in leaves else None
            fix = f"cachectl verify --quarantine {self.name}"
            yield Finding(self.name, root.path, key, Severity.RECOMPILES, "file", why, fix, thing)


class MesaShaderCache(Layer):
    """Kernels, and machine code for them, in the shader cache of Mesa."""

    name = "mesa"
    title = "Mesa shader cache (Rusticl)"
    on_network = Hazard(
        Severity.HARMLESS, "every lookup goes over the network, and the size is counted in a file that programs map"
    )
    among_ranks = Hazard(
        Severity.HARMLESS,
        "of those that compile the same at once, one stores it; a single file or a database they lock",
    )
    store = ShaderCache()

    # ------------------------------------------------------------------ where and whether

    def roots(self) -> tuple[Root, ...]:
        """Resolve as Mesa does when a device is first asked for, the store that is in use first.

        Releases before 2025 pass over ``HOME``, and take the account's home folder: where the two differ, both count.
        """
        order = sorted(_FOLDERS, key=lambda role: role != self._store())
        return tuple(
            Root(base / _FOLDERS[role], Scope.USER, source, role) for base, source in self._bases() for role in order
        )

    def _bases(self) -> list[tuple[Path, str]]:
        environment = self.environment
        if environment.platform == "win32":
            return []
        variable = self._place()
        if variable is not None:
            value = environment.get(variable)
            return [(environment.absolute(value), variable)] if value else []
        home, account = environment.get("HOME"), environment.home / ".cache"
        if not home or environment.absolute(home) == environment.home:
            return [(account, "default (home folder)")]
        return [(environment.absolute(home) / ".cache", "default (HOME)"), (account, "default of older Mesa (account)")]

    def _place(self) -> str | None:
        """Name the variable that says where; one that is empty counts, and leaves Mesa without a place."""
        named = ("MESA_SHADER_CACHE_DIR", "MESA_GLSL_CACHE_DIR", "XDG_CACHE_HOME")
        return next((variable for variable in named if self.environment.get(variable) is not None), None)

    def _store(self) -> str:
        return next((store for store, variable in _SELECTORS.items() if self._is_set(variable)), MULTI_FILE)

    def _is_set(self, variable: str) -> bool:
        return (self.environment.get(variable) or "").lower() in _TRUE

    def _switch(self) -> str:
        """Name the switch that counts: the old one only where the new one is not there."""
        new, old = "MESA_SHADER_CACHE_DISABLE", "MESA_GLSL_CACHE_DISABLE"
        return new if self.environment.get(new) is not None else old

    def state(self) -> State:
        """Judge the variables: only what Mesa takes for true switches off, and a place that is empty does too."""
        environment, switch, place = self.environment, self._switch(), self._place()
        if environment.platform == "win32":
            return State(Condition.ABSENT, "Mesa keeps no cache on Windows")
        if self._is_set(switch):
            return State(Condition.DISABLED, f"{switch}={environment.get(switch)}")
        if place is not None and not environment.get(place):
            return State(Condition.DISABLED, f"{place} is set but empty: Mesa finds no place for a cache; unset it")
        registered = bool(set(DRIVERS) & set(opencl_drivers(environment)))
        if not registered and not any(root.exists for root in self.roots()):
            return State(Condition.ABSENT, "no OpenCL driver of Mesa is registered here, and none has left a cache")
        hint = "" if registered else "; no OpenCL driver of Mesa is registered here"
        if registered and not environment.get("RUSTICL_ENABLE"):
            hint = "; RUSTICL_ENABLE names no device, so there may be none"
        return State(Condition.ENABLED, f"on by default{hint}")

    def switched(self, *, on: bool) -> Switch:
        """Give the variable, which Mesa reads when a device is first asked for; its old name must not say otherwise."""
        if on:
            both = frozenset({"MESA_SHADER_CACHE_DISABLE", "MESA_GLSL_CACHE_DISABLE"})
            return Switch(self.name, unset=both, latches=OPENED)
        return Switch(self.name, {"MESA_SHADER_CACHE_DISABLE": "true"}, latches=OPENED)

    def relocate(self, folder: Path) -> Switch:
        """Give the place: older releases make no more than one folder, and append their own to it."""
        return Switch(self.name, {"MESA_SHADER_CACHE_DIR": str(folder)}, latches=OPENED)

    # ------------------------------------------------------------------ diagnose

    def diagnose(self) -> Iterator[Finding]:
        """Yield what is wrong with the variables and the place, and a cache that is nearly as large as it may be."""
        yield from self._switched()
        yield from self._placed()
        yield from self._limited()
        yield from self._unlisted()

    def _unlisted(self) -> Iterator[Finding]:
        """Find files that somebody ships, which programs take entries from whatever is purged here."""
        for variable in _SHIPPED:
            if self.environment.get(variable):
                outcome = "names files that programs also take entries from: they are neither listed nor purged"
                yield misread(self, variable, Severity.HARMLESS, outcome)

    def _switched(self) -> Iterator[Finding]:
        switch = self._switch()
        value = self.environment.get(switch)
        if self._is_set(switch):
            yield off(self, switch)
        elif value is not None and value.lower() not in _FALSE:
            yield misread(self, switch, Severity.HARMLESS, "is no boolean that Mesa knows, so it does nothing")
        if self._is_set("MESA_GLSL_DISABLE_IO_OPT"):
            outcome = "switches the cache off in releases since 2025"
            yield misread(self, "MESA_GLSL_DISABLE_IO_OPT", Severity.RECOMPILES, outcome)

    def _placed(self) -> Iterator[Finding]:
        environment, variable = self.environment, self._place()
        if environment.platform == "win32" or not set(DRIVERS) & set(opencl_drivers(environment)):
            return
        value = None if variable is None else environment.get(variable)
        if variable is None:
            if len(self._bases()) > 1:
                outcome = f"is not the home of the account, {environment.home}, which releases before 2025 use instead"
                fix = f"export MESA_SHADER_CACHE_DIR={shlex.quote(str(self._bases()[0][0]))}"
                yield misread(self, "HOME", Severity.HARMLESS, outcome, fix)
        elif not value:
            yield misread(self, variable, Severity.RECOMPILES, "is empty: Mesa finds no place and keeps nothing")
        elif not Path(value).is_absolute():
            outcome = "is not absolute: Mesa makes a cache of its own in every folder it is started from"
            fix = f"export {variable}={shlex.quote(str(environment.absolute(value)))}"
            yield misread(self, variable, Severity.RECOMPILES, outcome, fix)
        elif not Path(value).parent.is_dir():
            outcome = "lies in no folder, and releases before 2024 make only the last one: they keep nothing"
            yield misread(self, variable, Severity.RECOMPILES, outcome, f"mkdir -p {shlex.quote(value)}")

    def _limited(self) -> Iterator[Finding]:
        new, old = "MESA_SHADER_CACHE_MAX_SIZE", "MESA_GLSL_CACHE_MAX_SIZE"
        variable = new if self.environment.get(new) is not None else old
        value = self.environment.get(variable)
        limit, plain = (_DEFAULT_CAP, True) if value is None else read_limit(value)
        if not plain:
            outcome = f"is taken for {limit:,} bytes: what is not K or M counts as gigabytes"
            yield misread(self, variable, Severity.HARMLESS, outcome, f"export {variable}=1G")
        for root in self.roots():
            counted = self.store.counted_bytes(root) if root.role == MULTI_FILE else None
            if counted is not None and counted >= _NEARLY * limit:
                message = f"counts {counted:,} of at most {limit:,} bytes: Mesa drops entries to make room"
                fix = f"export {new}={max(2, 2 * (limit >> 30))}G"
                yield Finding(self.name, root.path, None, Severity.RECOMPILES, "cap", message, fix)


def read_limit(value: str) -> tuple[int, bool]:
    """Read a size as Mesa does, in bytes, and tell whether it says what it seems to.

    A number without a unit is gigabytes, and so is one with a unit that Mesa does not know; 0 is the default.
    """
    match = _LIMIT.match(value)
    if match is None:
        return _DEFAULT_CAP, False
    unit = match[2].lower()
    amount = max(0, int(match[1])) * _UNITS.get(unit, 1 << 30)
    return amount or _DEFAULT_CAP, unit in _UNITS


def _raw(entry: Entry, read: Callable[[int], bytes | None]) -> _Raw:
    head = read(mesa_entries.HEAD)
    return _Raw(entry, None if head is None else mesa_entries.read_header(head), lambda: read(-1))


def _guests(raws: Iterable[_Raw], unread: dict[Path, LayerError]) -> dict[tuple[str, str], str | None]:
    """Say of every driver and device whose its entries are; ``None`` where they are OpenCL's."""
    return {maker: _guest(group, unread) for maker, group in _makers(raws).items()}


def _may_stand(path: Path) -> bool:
    """Return whether an entry is there, as far as is known."""
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
    # Of what a driver stores, kernels are smaller than the code made from them.
    for raw in sorted(group, key=lambda raw: raw.entry.bytes)[:_LOOKS]:
        if _kernels(_content(raw, unread)):
            return None
    return _UNTOLD


def _content(raw: _Raw, unread: dict[Path, LayerError]) -> bytes:
    """Read an entry; what cannot be read is noted, and empty."""
    try:
        return raw.read() or b""
    except LayerError as error:
        unread[raw.entry.root / raw.entry.key] = error
        return b""


def _housekeeping(root: Root, leaf: Leaf) -> Housekeeping:
    return Housekeeping(leaf.key, root.path, leaf.bytes, 1, leaf.modified, fixed=True)


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
        return replace(raw.entry, guest=_UNTOLD)
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
    """Return the root of a store, which the name of its folder identifies."""
    return Root(path, Scope.USER, "", next(role for role, folder in _FOLDERS.items() if folder == path.name))


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
