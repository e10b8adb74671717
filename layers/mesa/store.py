"""The store of Mesa's shader cache, in one of three forms: a file for each entry, one file with an index, a database.

The latter two are pairs of files, data and index, with many entries. They are changed under the locks of Mesa's
writers. A program that has a single file open remembers where entries lie, so a new pair of files is renamed over the
old one, which the program continues to use. A database is changed in place, as Mesa does: its number is zero meanwhile
and new afterwards, so every program reads the index again.

Source: ``src/util/disk_cache.c`` and ``disk_cache_os.c``; see also :mod:`cachectl.layers.mesa.entries`.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cachectl.layers import core
from cachectl.layers.disk import atomic, handles, locks, plain, trust
from cachectl.layers.host import processes
from cachectl.layers.mesa import cache, entries
from cachectl.layers.stores.files import Files
from cachectl.layers.stores.tree import CHANGED, GONE, Shape

_CHUNK = 1 << 20
_TRIES = 5
_ENTRIES = Shape((core.regex("[0-9a-f]{2}"), core.regex("[0-9a-f]{38}")), mode=0o644)
_TEMPORARIES = Shape(
    (core.regex("[0-9a-f]{2}"), core.regex(r"[0-9a-f]{38}\.tmp")), because="a program that was never stored whole"
)
_OWN = Shape((core.regex("index|marker"),), sums=True)
_NAME = core.regex(r"[^./][^/]*")
_FOSSILIZE = Shape((_NAME, _NAME, core.regex(r"foz_cache(?:_idx)?\.foz")), sums=True)
_FLAT = Shape((core.regex(r"mesa_cache\.(?:db|idx)"),), sums=True)
_PARTED = Shape((core.regex(r"part\d{1,3}"), *_FLAT.levels), sums=True)
_SHAPES: Mapping[str, tuple[Shape, ...]] = {
    cache.MULTI_FILE: (_ENTRIES, _TEMPORARIES, _OWN),
    cache.SINGLE_FILE: (_FOSSILIZE, Shape((_NAME, _NAME, *_OWN.levels), sums=True)),
    cache.DATABASE: (_FLAT, _PARTED, _OWN),
}
#: Files with many entries, and the format of those of each kind of root.
_PAIRED = (_FOSSILIZE, _FLAT, _PARTED)
_FORMATS: Mapping[str, entries.Format] = {
    cache.SINGLE_FILE: entries.Fossilize(),
    cache.DATABASE: entries.Database(),
}

#: Seconds without change after which no living process is still writing a temporary.
_REST_TIME = 3600.0
_INDEX = struct.Struct("<Q")
_INDEX_SIZE = _INDEX.size + 65536 * 20

_NEVER = "Mesa compiles it again in every run, and never replaces it"
_DROPS = "Mesa then drops every entry of the file"


class _Open(NamedTuple):
    """The open data file and its index, their folder, and the root, where files are staged."""

    root: int
    folder: int
    data: int
    places: int


class Pair:
    """A data file with its index, in a folder below a root."""

    def __init__(
        self, form: entries.Format, layer: str, root: Path, folder: str = "", *, environment: core.Environment
    ) -> None:
        self.form = form
        self.layer = layer
        self.root = root
        self.folder = folder
        self.environment = environment

    @property
    def path(self) -> Path:
        """The data file."""
        return self.root / self.folder / self.form.data_name

    def blobs(self) -> list[entries.Blob]:
        """Return the entries. A later one replaces an earlier one of the same name, as in Mesa's table."""
        with self._opened() as files:
            return self._listed(files)

    def damage(self) -> str | None:
        """Return why Mesa cannot use the files, or not all of their entries; ``None`` if it can."""
        with self._opened() as files:
            if files is None or (complaint := self._complaint(files)) is not None:
                return None if files is None else complaint
            names = {name[:16] for name, _ in self._indexed(files)}
            lost = len(names) - len(self._listed(files))
            return f"its index lists {lost} entries that the data file lacks" if lost > 0 else None

    def read(self, blob: entries.Blob, limit: int = -1) -> bytes | None:
        """Read an entry, or its first ``limit`` bytes; ``None`` if the files are missing."""
        with self._opened() as files:
            return None if files is None else _content(files.data, blob, limit)

    def _complaint(self, files: _Open) -> str | None:
        return self.form.complaint(*(os.pread(handle, self.form.head, 0) for handle in (files.data, files.places)))

    def _listed(self, files: _Open | None) -> list[entries.Blob]:
        if files is None or self._complaint(files) is not None:
            return []
        end = os.fstat(files.data).st_size
        found = {blob.name: blob for _, blob in self._indexed(files) if blob is not None and blob.end <= end}
        return list(found.values())

    def _indexed(self, files: _Open) -> Iterator[tuple[str, entries.Blob | None]]:
        """Yield each name in the index, with its entry as the formats do."""
        end, size = (os.fstat(handle).st_size for handle in (files.data, files.places))
        if size > core.LARGEST_INDEX:
            raise OSError(errno.EFBIG, f"the index {core.too_large(size, core.LARGEST_INDEX)}")

        def read(begin: int, length: int) -> bytes | None:
            return os.pread(files.data, length, begin) if 0 <= begin <= end - length else None

        return self.form.blobs(os.pread(files.places, size, 0), read)

    def remove(self, stamps: Mapping[str, tuple[int, ...]]) -> core.Outcome:
        """Remove the entries of these names that have not changed. Raises :class:`LayerError` before any change."""
        before: set[str] = set()
        left: set[str] = set()
        size = rest = 0
        failed: core.LayerError | None = None
        try:
            with self._changing() as files:
                size = rest = self._bytes(files)
                listed = self._listed(files)
                before = left = {blob.name for blob in listed}
                kept = [blob for blob in listed if stamps.get(blob.name) != blob.stamp]
                if files is not None and len(kept) < len(listed):
                    for left, rest in self._keep(files, kept):  # noqa: B007 - the last ones count
                        pass
        except core.LayerError as error:
            if not before:
                raise
            failed = error
            # Fewer entries may be left than were to stay.
            with suppress(core.LayerError), self._opened() as files:
                left, rest = {blob.name for blob in self._listed(files)}, self._bytes(files)
        outcome = core.Outcome(self.layer, len(before - left), max(0, size - rest))
        reasons = {name: CHANGED if name in before else GONE for name in stamps if name in left or name not in before}
        if failed is None:
            return changed(outcome, skipped=tuple(core.Note(entries.key_of(name), reasons[name]) for name in reasons))
        notes = tuple(core.Note(entries.key_of(name), failed.message) for name in stamps if name in left)
        return changed(outcome, failed=notes or (core.Note(str(self.path), str(failed)),))

    def put(self, name: str, content: bytes, *, replace: bool) -> bool:
        """Add an entry; return whether it was not there. Raises :class:`EntryExists` if a different one is there."""
        with self._changing(make=True) as files:
            if files is None:
                raise core.Unreachable(self.layer, "cannot be made", self.path)
            if not os.fstat(files.data).st_size and not os.fstat(files.places).st_size:
                _write_heads(files, self.form.new_head())
            elif (why := self._complaint(files)) is not None:
                raise core.Damaged(self.layer, why, self.path)
            listed = self._listed(files)
            standing = next((blob for blob in listed if blob.name == name), None)
            if standing is None:
                self._append(files, name, content)
                return True
            if _content(files.data, standing, -1) == content:
                return False
            if not replace:
                raise core.EntryExists(self.layer, self.path)
            for _ in self._keep(files, [blob for blob in listed if blob is not standing]):
                pass
        # Other files may have replaced these meanwhile.
        return self.put(name, content, replace=False)

    def _append(self, files: _Open, name: str, content: bytes) -> None:
        """Add an entry whole, or leave both files as they were."""
        ends = {handle: os.fstat(handle).st_size for handle in (files.data, files.places)}
        framed, begin = self.form.framed(name, content), ends[files.data]
        # Mesa counts from the start of the machine, as this clock does.
        blob = entries.Blob(name, begin, begin + self.form.frame, begin + len(framed), 0, time.monotonic_ns())
        try:
            for handle, added in ((files.data, framed), (files.places, self.form.record(blob))):
                # Without an index Mesa writes its head.
                if not ends[handle]:
                    atomic.write_all(handle, (self.form.new_head(),), 0)
                atomic.write_all(handle, (added,), ends[handle] or self.form.head)
                os.fsync(handle)
        except OSError:
            for handle, end in ends.items():
                with suppress(OSError):
                    atomic.cut(handle, end)
            raise

    def _keep(self, files: _Open, kept: list[entries.Blob]) -> Iterator[tuple[set[str], int]]:
        """Reduce both files to some entries; yield after each step which are listed, and the bytes of the files."""
        names = {blob.name for blob in kept}
        old, data = self._bytes(files), self.form.head + sum(blob.end - blob.begin for blob in kept)
        index = self.form.head + sum(len(self.form.record(blob)) for blob in kept)
        if self.form.in_place:
            # After an interruption the number is zero, and Mesa empties both files.
            _write_heads(files, self.form.new_head()[:-8] + bytes(8))
            yield set(), old
            self._copy(files.data, kept, files.data, files.places)
            yield set(), data + index
            os.fsync(files.data)
            os.fsync(files.places)
            _write_heads(files, self.form.new_head())
            yield names, data + index
            return
        with ExitStack() as stack:
            stage = stack.enter_context(atomic.own_folder(files.root, plain.STAGE))
            # Between the steps programs find nothing, instead of wrong bytes.
            steps = {
                "empty": (self.form.index_name, set(), os.fstat(files.data).st_size + self.form.head),
                "data": (self.form.data_name, set(), data + self.form.head),
                "index": (self.form.index_name, names, data + index),
            }
            handles = {}
            for staged in steps:
                handles[staged] = atomic.create(staged, stage, os.fstat(files.data).st_mode & 0o777)
                stack.callback(os.close, handles[staged])
                atomic.write_all(handles[staged], (self.form.new_head(),), 0)
            self._copy(files.data, kept, handles["data"], handles["index"])
            for handle in handles.values():
                os.fsync(handle)
            for staged, (name, listed, rest) in steps.items():
                atomic.move_in(staged, stage, name, files.folder)
                yield listed, rest
            os.fsync(files.folder)

    def _copy(self, source: int, kept: list[entries.Blob], data: int, index: int) -> None:
        """Write some entries one after the other behind the head of a data file, and their records into its index."""
        at = self.form.head
        records = b""
        for blob in sorted(kept, key=lambda blob: blob.begin):
            shift = at - blob.begin
            for begin in range(blob.begin, blob.end, _CHUNK) if shift or source != data else ():
                piece = os.pread(source, min(_CHUNK, blob.end - begin), begin)
                atomic.write_all(data, (piece,), begin + shift)
            records += self.form.record(blob._replace(begin=at, start=blob.start + shift, end=blob.end + shift))
            at = blob.end + shift
        atomic.cut(data, at)
        atomic.write_all(index, (records,), self.form.head)
        atomic.cut(index, self.form.head + len(records))

    def _bytes(self, files: _Open | None) -> int:
        names = () if files is None else (self.form.data_name, self.form.index_name)
        found = (handles.status_of(files.folder, name) for name in names if files is not None)
        return sum(status.st_size for status in found if status is not None)

    @contextmanager
    def _opened(self, flags: int = os.O_RDONLY) -> Iterator[_Open | None]:
        """Open both files for a block; ``None`` if one is missing."""
        verb = "open"
        try:
            with ExitStack() as stack:
                try:
                    files = self._open(stack, flags)
                except FileNotFoundError:
                    files = None
                verb = "change" if flags & os.O_RDWR else "read"
                yield files
        except core.LayerError:
            raise
        except OSError as error:
            advice = "; make room and try again" if error.errno in handles.NO_ROOM else ""
            message = f"cannot {verb}: {error.strerror or error}{advice}"
            raise core.Unreachable(self.layer, message, self.path) from error

    def _open(self, stack: ExitStack, flags: int) -> _Open:
        """Open both files, and make them with ``O_CREAT``. Raises :class:`OSError`."""
        make = bool(flags & os.O_CREAT)
        if make:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = stack.enter_context(handles.opened_root(self.root))
        above = [*filter(None, self.folder.split("/"))]
        folder = None if root is None else stack.enter_context(handles.below(root, above, make=make))
        missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        if root is None or folder is None:
            raise missing
        opened = []
        for name in (self.form.data_name, self.form.index_name):
            if not make and handles.status_of(folder, name) is None:
                raise missing
            opened.append(plain.open_plain(name, dir_fd=folder, flags=flags))
            stack.callback(os.close, opened[-1])
        return _Open(root, folder, *opened)

    @contextmanager
    def _changing(self, *, make: bool = False) -> Iterator[_Open | None]:
        """Open both files, lock them against Mesa and other cachectls, and check that they were not replaced."""
        owner = trust.owner_of(self.path.parent, self.path.name) if self.environment.superuser else 0
        if owner:
            raise core.Refused(self.layer, trust.belonging_to(owner), self.path)
        for _ in range(_TRIES):
            with self._opened(os.O_RDWR | (os.O_CREAT if make else 0)) as files:
                if files is None:
                    yield None
                    return
                # Mesa locks in this order. Closing a file releases its lock.
                names = {self.form.data_name: files.data, self.form.index_name: files.places}
                for handle in names.values():
                    take, seconds = partial(handles.try_flock, handle), self.environment.lock_timeout
                    locks.require(self.layer, self.path, take, seconds, "; try again later, or use --wait")
                if all(handles.is_same_file(name, handle, dir_fd=files.folder) for name, handle in names.items()):
                    yield files
                    return
        message = "is replaced again and again; try again when the programs that use it have ended"
        raise core.Busy(self.layer, message, self.path)


def _write_heads(files: _Open, head: bytes) -> None:
    for handle in (files.data, files.places):
        atomic.write_all(handle, (head,), 0)
        os.fsync(handle)


def _content(data: int, blob: entries.Blob, limit: int) -> bytes:
    if limit < 0 and blob.length > core.LARGEST_ENTRY:
        raise OSError(errno.EFBIG, f"the entry {core.too_large(blob.length, core.LARGEST_ENTRY)}")
    return os.pread(data, blob.length if limit < 0 else min(limit, blob.length), blob.start)


class ShaderCache(Files):
    """Entries in the three forms of Mesa; the role of a root says which one it has."""

    shapes = (_ENTRIES,)
    forms = ("mesa-entry/1",)

    def shapes_of(self, root: core.Root) -> tuple[Shape, ...]:
        """Return the shapes of entries, files and temporaries."""
        return _SHAPES[root.role]

    # ------------------------------------------------------------------ listing

    def scan(
        self, root: core.Root, selection: core.Selection = core.ALL, *, contents: bool = True
    ) -> Iterator[core.Found]:
        """Yield entries, each with its owner; only ``contents`` unpacks kernel names."""
        del selection
        raws: list[entries.RawEntry] = []
        for found in self._raws(root):
            if not isinstance(found, entries.RawEntry):
                yield found
                continue
            raws.append(found)
            if found.header is None:
                yield core.Problem(root.path / found.entry.key, "damaged", f"has no header of an entry: {_NEVER}")
        yield from entries.owned(raws, contents=contents)

    def _raws(self, root: core.Root) -> Iterator[entries.RawEntry | core.Found]:
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
                    yield changed(leaf.entry, fixed=not leaf.entry.is_orphan and leaf.shape not in _PAIRED)
            except core.LayerError as error:
                yield core.unreadable(root.path / key, error)

    def _packed(self, pair: Pair, file: core.Entry) -> Iterator[entries.RawEntry | core.Found]:
        """Yield the entries of a data file, and the rest of it. Raises :class:`LayerError` if it is unreadable."""
        if (why := pair.damage()) is not None:
            yield core.Problem(pair.path, "foreign" if why == entries.FOREIGN else "damaged", why)
        rest = file.bytes
        for blob in pair.blobs():
            rest -= blob.length
            key, bound = entries.key_of(blob.name), file.modified
            entry = core.Entry(self.name, key, pair.root, blob.length, 0, written_before=bound, stamp=blob.stamp)
            yield entries.raw_of(entry, partial(pair.read, blob), blob.checksum)
        yield changed(file, bytes=rest)

    def pairs(self, root: core.Root) -> list[Pair]:
        """Return every pair of files in a root. Raises :class:`Unreachable` if one may have been overlooked."""
        found = (self._pair_of(root, leaf.entry.key) for leaf in self.tree_of(root).leaves())
        return [pair for pair in found if pair is not None]

    def _pair_of(self, root: core.Root, key: str) -> Pair | None:
        """Return the pair of a data file; ``None`` for other files."""
        folder, _, name = key.rpartition("/")
        form = _FORMATS.get(root.role)
        return self._pair(root, folder) if form is not None and name == form.data_name else None

    def _pair(self, root: core.Root, folder: str = "") -> Pair:
        return Pair(_FORMATS[root.role], self.name, root.path, folder, environment=self.environment)

    def _located(self, root: core.Root, key: str) -> tuple[Pair, entries.Blob] | None:
        """Find an entry among the pairs of a root."""
        found = ((pair, blob) for pair in self.pairs(root) for blob in pair.blobs())
        return next((place for place in found if place[1].name == entries.name_of(key)), None)

    # ------------------------------------------------------------------ get and put

    def members(self, root: core.Root, key: str) -> Mapping[str, bytes] | None:
        """Read an entry, which has the same bytes in all forms."""
        if root.role == cache.MULTI_FILE:
            return super().members(root, key)
        found = self._located(root, key)
        data = None if found is None else found[0].read(found[1])
        return None if data is None else {"": data}

    def damages(self, key: str, files: Mapping[str, bytes]) -> Iterator[core.Damage]:
        """Check the checksum. Nothing can check the name."""
        del key
        if (complaint := entries.complaint(files[""])) is not None:
            yield core.Damage(core.Severity.RECOMPILES, f"{complaint}: {_NEVER}")

    def detail(self, key: str, files: Mapping[str, bytes]) -> Mapping[str, str]:
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

    def place(
        self, root: core.Root, whole: Mapping[str, Mapping[str, bytes]], *, replace: bool
    ) -> dict[str, bool | core.EntryError]:
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
        return pair.put(entries.name_of(key), data, replace=replace)

    def _pair_for(self, root: core.Root, data: bytes) -> Pair:
        """Return the pair of files in which Mesa would look for a new entry."""
        if root.role == cache.DATABASE:
            # Newer releases use parts, and remove the files that older ones kept beside them.
            return next((pair for pair in self.pairs(root) if pair.folder), self._pair(root))
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

    def remove_files(
        self, root: core.Root, targets: Iterable[core.Entry], *, tidy: Callable[[], bool] | None
    ) -> core.Outcome:
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
        gone = tuple(core.Note(entries.key_of(name), GONE) for name in sorted(left))
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
                sizes = (leaf.entry.disk or 0 for leaf in self.tree_of(root).leaves() if leaf.entry.is_listed)
                os.pwrite(handle, _INDEX.pack(sum(sizes)), 0)
        finally:
            os.close(handle)

    # ------------------------------------------------------------------ verify

    def verify(self, root: core.Root) -> Iterator[core.Finding]:
        """Check header and checksum of every entry of any driver: Mesa repairs none of them."""
        for found in self._raws(root):
            if isinstance(found, entries.RawEntry):
                yield from self._checked(root, found)
            elif isinstance(found, core.Problem) and found.code == "damaged":
                yield from self._broken(root, found)
            elif isinstance(found, core.Problem):
                yield core.finding_of(self, root, found)

    def _checked(self, root: core.Root, raw: entries.RawEntry) -> Iterator[core.Finding]:
        path = root.path / raw.entry.key
        try:
            data = raw.read()
            complaint = None if data is None else entries.complaint(data, raw.checksum)
        except core.Unreachable as error:
            yield core.finding_of(self, root, core.unreadable(path, error))
            return
        except core.LayerError as error:
            data, complaint = None, error.message
        if data is not None and entries.is_foreign(data):
            yield core.finding_of(self, root, core.Problem(path, "foreign", entries.FOREIGN))
        elif complaint is not None:
            effect = _DROPS if root.role == cache.DATABASE else _NEVER
            yield self.damaged(raw.entry, core.Damage(core.Severity.RECOMPILES, f"{complaint}: {effect}"))

    def _broken(self, root: core.Root, problem: core.Problem) -> Iterator[core.Finding]:
        """Yield a finding for both files of a pair, since one without the other has the same effect."""
        folder, form = problem.path.parent.relative_to(root.path), _FORMATS[root.role]
        damage = core.Damage(core.Severity.RECOMPILES, problem.message)
        for name in (form.index_name, form.data_name):
            key = str(folder / name)
            leaf = self.tree_of(root).find(key)
            entry = core.Entry(self.name, key, root.path, 0, 0) if leaf is None else leaf.entry
            thing = None if leaf is None else core.orphan(entry, problem.message, idle_only=True)
            yield changed(self.damaged(entry, damage, "file"), thing=thing)

    def indexed_bytes(self, root: core.Root) -> int | None:
        """Return the bytes that the index counts; ``None`` if there is no index. Raises :class:`OSError`."""
        try:
            data = plain.read_plain(root.path / "index", limit=_INDEX.size)
        except OSError as error:
            if plain.means_no_file(error):
                return None
            raise
        return _INDEX.unpack(data)[0] if len(data) == _INDEX.size else None
