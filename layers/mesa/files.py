"""Two forms of Mesa's cache: many entries in one file, with an index beside it.

Both are changed under the lock that Mesa's own writers take. A program that has a single file open remembers where
entries lie, so a new pair of files is renamed over the old one, which the program continues to use. A database is
changed in place, as Mesa does: its number is zero meanwhile and new afterwards, so every program reads the index again.
"""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from cachectl.layers.base.errors import Busy, Damaged, EntryExists, LayerError, Unreachable
from cachectl.layers.base.limits import LARGEST_ENTRY, LARGEST_INDEX, too_large
from cachectl.layers.disk.atomic import create, write_all
from cachectl.layers.disk.handles import NO_ROOM, blocks_of, descend, opened_root, own_folder, status_of
from cachectl.layers.disk.locking import release_flock, try_flock, wait_until
from cachectl.layers.disk.plain import STAGE, open_plain
from cachectl.layers.disk.presence import means_absent
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.mesa import indexes as mesa_files
from cachectl.layers.mesa.indexes import Place

_CHUNK: Final = 1 << 20
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Blob:
    """One entry of a file: the offsets of its header and its bytes, and their checksum in the file."""

    name: str
    offset: int
    start: int
    length: int
    checksum: int
    used: int = 0

    @property
    def stamp(self) -> tuple[int, ...]:
        """Identifies the content; offsets change when another entry is removed."""
        return (self.length, self.checksum)


@dataclass(frozen=True, slots=True)
class Removed:
    """The result of a removal: reasons of entries that stay, number of removed ones, and the bytes freed.

    ``failed`` is the reason of a failure halfway.
    """

    stay: Mapping[str, str]
    entries: int
    bytes: int
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    """Both open files, their folder, and the root, where files are staged."""

    root: int
    folder: int
    data: int
    index: int


class MesaFile(ABC):
    """One data file with its index, in a folder below a root."""

    data_name: ClassVar[str]
    index_name: ClassVar[str]

    def __init__(self, layer: str, root: Path, folder: tuple[str, ...], lock_timeout: float) -> None:
        self.layer = layer
        self.root = root
        self.folder = folder
        self.lock_timeout = lock_timeout

    @property
    def path(self) -> Path:
        """The data file."""
        return self.root.joinpath(*self.folder, self.data_name)

    # ------------------------------------------------------------------ what differs

    @abstractmethod
    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Return why Mesa would not use the pair, given the first bytes of each; ``None`` where it would."""

    @abstractmethod
    def _places(self, index: bytes) -> Iterator[Place]:
        """Yield the places in the index."""

    @abstractmethod
    def _at(self, data: int, place: Place, end: int) -> Blob | None:
        """Return the entry at a place of the data file, which has ``end`` bytes; ``None`` where there is none."""

    @abstractmethod
    def _drop(self, files: _Open, gone: set[Blob]) -> None:
        """Remove entries from both files."""

    @abstractmethod
    def _length_with(self, blobs: Iterable[Blob]) -> int:
        """Return how many bytes both files would have with exactly these entries."""

    @abstractmethod
    def _append(self, files: _Open, name: str, content: bytes) -> None:
        """Add an entry at the end of both files."""

    @abstractmethod
    def _begin(self, files: _Open) -> None:
        """Write the headers of empty files."""

    # ------------------------------------------------------------------ reading

    def size(self) -> tuple[int, float, int | None] | None:
        """Return the bytes of both files, the last change (epoch seconds) and bytes of disk blocks.

        ``None`` if a file is missing.
        """
        with self._opened(write=False) as files:
            if files is None:
                return None
            both = [os.fstat(handle) for handle in (files.data, files.index)]
            blocks = [block for block in map(blocks_of, both) if block is not None]
            disk = sum(blocks) if len(blocks) == len(both) else None
            return sum(status.st_size for status in both), max(status.st_mtime for status in both), disk

    def damage(self) -> str | None:
        """Return why Mesa cannot use the files at all; ``None`` where it can."""
        with self._opened(write=False) as files:
            return None if files is None else self.complaint(_head(files.data), _head(files.index))

    def blobs(self) -> list[Blob]:
        """Return the entries. A later one replaces an earlier one of the same name, as in Mesa's table."""
        with self._opened(write=False) as files:
            return [] if files is None else self._listed(files)

    def lost(self) -> int:
        """Return how many entries the index lists that the data file lacks."""
        with self._opened(write=False) as files:
            if files is None:
                return 0
            names = {place.name[:16] for place in self._places(_whole(files.index))}
            return len(names) - len(self._listed(files))

    def find(self, name: str) -> Blob | None:
        """Return the entry of a name."""
        return next((blob for blob in self.blobs() if blob.name == name), None)

    def read(self, blob: Blob, limit: int = -1) -> bytes | None:
        """Read an entry, or its first ``limit`` bytes; ``None`` where the files are missing."""
        with self._opened(write=False) as files:
            return None if files is None else self._content(files, blob, limit)

    def _content(self, files: _Open, blob: Blob, limit: int) -> bytes:
        if limit < 0 and blob.length > LARGEST_ENTRY:
            raise OSError(errno.EFBIG, f"the entry {too_large(blob.length, LARGEST_ENTRY)}")
        return os.pread(files.data, blob.length if limit < 0 else min(limit, blob.length), blob.start)

    def _listed(self, files: _Open) -> list[Blob]:
        if self.complaint(_head(files.data), _head(files.index)) is not None:
            return []
        end = os.fstat(files.data).st_size
        found = (self._at(files.data, place, end) for place in self._places(_whole(files.index)))
        return list({blob.name: blob for blob in found if blob is not None}.values())

    # ------------------------------------------------------------------ changing

    def remove(self, stamps: Mapping[str, tuple[int, ...]]) -> Removed:
        """Remove the entries of these names that have not changed. Raises :class:`LayerError` before any change."""
        size: int | None = None
        done: Removed | None = None
        there: dict[str, Blob] = {}
        try:
            with self._changing() as files:
                if files is None:
                    return Removed(dict.fromkeys(stamps, "already gone"), 0, 0)
                there = {blob.name: blob for blob in self._listed(files)}
                stay = {name: "already gone" for name in stamps if name not in there}
                stay |= {
                    name: "changed since it was planned"
                    for name in stamps.keys() & there
                    if there[name].stamp != stamps[name]
                }
                gone = {there[name] for name in stamps if name not in stay}
                size = self._bytes(files)
                if gone:
                    self._drop(files, gone)
                done = Removed(stay, len(gone), 0)
                return Removed(stay, len(gone), max(0, size - self._bytes(files)))
        except LayerError as error:
            if done is not None:
                return replace(done, failed=f"its entries are gone, but their bytes are not counted: {error.message}")
            if size is None:
                raise
            return self._removed_in_spite_of(error, stamps, there.keys(), size)

    def _removed_in_spite_of(
        self, error: LayerError, stamps: Mapping[str, tuple[int, ...]], there: Collection[str], size: int
    ) -> Removed:
        """Return what a removal that failed halfway has removed, which may be more than was planned."""
        with self._opened(write=False) as files:
            left = {blob.name for blob in self._listed(files)} if files is not None else set()
            now = self._bytes(files) if files is not None else 0
        stay = {name: error.message for name in stamps if name in left}
        return Removed(stay, len(set(there) - left), max(0, size - now), error.message)

    def _bytes(self, files: _Open) -> int:
        found = (status_of(files.folder, name) for name in (self.data_name, self.index_name))
        return sum(status.st_size for status in found if status is not None)

    def put(self, name: str, content: bytes, *, replace: bool) -> None:
        """Add an entry. Raises :class:`EntryExists` where a different one stands and ``replace`` is not set."""
        with self._changing(make=True) as files:
            if files is None:
                raise Unreachable(self.layer, "cannot be made", self.path)
            self._begin(files)
            if (why := self.complaint(_head(files.data), _head(files.index))) is not None:
                raise Damaged(self.layer, f"{why}; cachectl purge --damaged {self.layer} removes it", self.path)
            standing = next((blob for blob in self._listed(files) if blob.name == name), None)
            if standing is None:
                self._append_whole(files, name, content)
                return
            if self._content(files, standing, -1) == content:
                return
            if not replace:
                raise EntryExists(self.layer, self.path)
            self._drop(files, {standing})
        # Other files may have replaced these meanwhile.
        self.put(name, content, replace=False)

    def _append_whole(self, files: _Open, name: str, content: bytes) -> None:
        """Add an entry whole, or leave both files as they were."""
        ends = {handle: os.fstat(handle).st_size for handle in (files.data, files.index)}
        try:
            self._append(files, name, content)
        except OSError:
            for handle, end in ends.items():
                with suppress(OSError):
                    os.ftruncate(handle, end)
            raise

    # ------------------------------------------------------------------ the files

    @contextmanager
    def _opened(self, *, write: bool, make: bool = False) -> Iterator[_Open | None]:
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if make else 0)
        with ExitStack() as stack:
            try:
                if make:
                    self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                root = stack.enter_context(opened_root(self.root))
                folder = None if root is None else descend(stack, root, self.folder, make=make)
                if root is None or folder is None:
                    yield None
                    return
                handles = []
                for name in (self.data_name, self.index_name):
                    handles.append(open_plain(name, dir_fd=folder, flags=flags))
                    stack.callback(os.close, handles[-1])
            except OSError as error:
                if not means_absent(error):
                    raise self._unreachable("open", error) from error
                yield None
                return
            try:
                yield _Open(root, folder, *handles)
            except LayerError:
                raise
            except OSError as error:
                raise self._unreachable("change" if write else "read", error) from error

    def _unreachable(self, verb: str, error: OSError) -> Unreachable:
        advice = "; make room and try again" if error.errno in NO_ROOM else ""
        return Unreachable(self.layer, f"cannot {verb}: {error.strerror or error}{advice}", self.path)

    @contextmanager
    def _changing(self, *, make: bool = False) -> Iterator[_Open | None]:
        """Open both files, lock them against Mesa and other cachectls, and check that they were not replaced."""
        for _ in range(_TRIES):
            with self._opened(write=True, make=make) as files:
                if files is None:
                    yield None
                    return
                # Mesa locks in this order.
                with self._locked(files.data), self._locked(files.index):
                    if self._is_current(files):
                        yield files
                        return
        raise Busy(
            self.layer, "is replaced again and again; try again when the programs that use it have ended", self.path
        )

    def _is_current(self, files: _Open) -> bool:
        pairs = ((self.data_name, files.data), (self.index_name, files.index))
        found = [(status_of(files.folder, name), os.fstat(handle)) for name, handle in pairs]
        return all(there is not None and os.path.samestat(there, ours) for there, ours in found)

    @contextmanager
    def _locked(self, handle: int) -> Iterator[None]:
        if not wait_until(lambda: try_flock(handle), self.lock_timeout):
            message = f"locked by another process for more than {self.lock_timeout:g} s; try again later, or use --wait"
            raise Busy(self.layer, message, self.path)
        try:
            yield
        finally:
            # Closing the file releases the lock in any case.
            with suppress(OSError):
                release_flock(handle)


class FossilizeFile(MesaFile):
    """The single-file store of one driver and device (``MESA_DISK_CACHE_SINGLE_FILE``)."""

    data_name = "foz_cache.foz"
    index_name = "foz_cache_idx.foz"

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Check the headers. Mesa writes those of an empty pair itself."""
        if not index:
            # Mesa then rewrites the index, and the data file stays readable by offset.
            return None if not data or mesa_files.is_fossilize(data[:16]) else "the data file is not Mesa's"
        for what, head in (("index", index), ("data file", data)):
            if not mesa_files.is_fossilize(head[:16]):
                return f"the {what} lacks Mesa's header, so Mesa stores and finds nothing there"
        return None

    def _places(self, index: bytes) -> Iterator[Place]:
        return mesa_files.foz_places(index)

    def _at(self, data: int, place: Place, end: int) -> Blob | None:
        name, size = place.name.encode(), mesa_files.FOZ_HEADER.size
        if not len(name) <= place.offset <= end - size:
            return None
        head = os.pread(data, len(name) + size, place.offset - len(name))
        if len(head) != len(name) + size or not head.startswith(name):
            return None
        length, _, checksum, _ = mesa_files.FOZ_HEADER.unpack(head[len(name) :])
        start = place.offset + size
        return Blob(place.name, place.offset, start, length, checksum) if start + length <= end else None

    def _begin(self, files: _Open) -> None:
        for handle in (files.data, files.index):
            if os.fstat(handle).st_size == 0:
                write_all(handle, (mesa_files.FOZ_MAGIC,), 0)

    def _append(self, files: _Open, name: str, content: bytes) -> None:
        end = os.fstat(files.data).st_size
        write_all(files.data, (mesa_files.foz_entry(name, content, mesa_entries.checksum(content)),), end)
        os.fsync(files.data)
        record = mesa_files.foz_record(Place(name, end + len(name)))
        write_all(files.index, (record,), os.fstat(files.index).st_size)
        os.fsync(files.index)

    def _drop(self, files: _Open, gone: set[Blob]) -> None:
        """Rename a new pair over the old one.

        An empty index is renamed first: between the steps programs find nothing, instead of wrong bytes.
        """
        kept = [blob for blob in self._listed(files) if blob not in gone]
        with ExitStack() as stack:
            stage, _ = stack.enter_context(own_folder(files.root, STAGE))
            empty, data, index = (self._staged(stack, stage, name, files) for name in ("empty", "data", "index"))
            write_all(empty[1], (mesa_files.FOZ_MAGIC,), 0)
            places = self._copied(files.data, kept, data[1])
            records = b"".join(map(mesa_files.foz_record, places))
            write_all(index[1], (mesa_files.FOZ_MAGIC + records,), 0)
            for _, handle in (empty, data, index):
                os.fsync(handle)
            for (staged, _), name in ((empty, self.index_name), (data, self.data_name), (index, self.index_name)):
                os.rename(staged, name, src_dir_fd=stage, dst_dir_fd=files.folder)
            os.fsync(files.folder)

    def _length_with(self, blobs: Iterable[Blob]) -> int:
        lengths = (
            blob.start + blob.length - blob.offset + len(blob.name) + len(mesa_files.foz_record(Place(blob.name, 0)))
            for blob in blobs
        )
        return 2 * len(mesa_files.FOZ_MAGIC) + sum(lengths)

    def _staged(self, stack: ExitStack, stage: int, name: str, files: _Open) -> tuple[str, int]:
        handle = create(name, stage)
        stack.callback(os.close, handle)
        os.fchmod(handle, os.fstat(files.data).st_mode & 0o777)
        return name, handle

    def _copied(self, source: int, kept: Iterable[Blob], target: int) -> list[Place]:
        at = len(mesa_files.FOZ_MAGIC)
        write_all(target, (mesa_files.FOZ_MAGIC,), 0)
        places = []
        for blob in kept:
            begin = blob.offset - len(blob.name)
            length = blob.start + blob.length - begin
            _copy(source, begin, length, target, at)
            places.append(Place(blob.name, at + len(blob.name)))
            at += length
        return places


class DatabaseFile(MesaFile):
    """One part of Mesa's database (``MESA_DISK_CACHE_DATABASE``)."""

    data_name = "mesa_cache.db"
    index_name = "mesa_cache.idx"

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Check the headers. Mesa empties both files if they do not match."""
        numbers = {mesa_files.db_number(data), mesa_files.db_number(index)}
        if not data and not index:
            return None
        if len(numbers) != 1 or not numbers.pop():
            return "the two files do not belong together: the next program drops every entry"
        return None

    def _places(self, index: bytes) -> Iterator[Place]:
        return mesa_files.db_places(index)

    def _at(self, data: int, place: Place, end: int) -> Blob | None:
        size = mesa_files.DB_ENTRY.size
        if place.offset > end - size:
            return None
        head = os.pread(data, size, place.offset)
        if len(head) != size:
            return None
        key, checksum, length = mesa_files.DB_ENTRY.unpack(head)
        start = place.offset + size
        if not key.hex().startswith(place.name) or length != place.length or start + length > end:
            return None
        return Blob(key.hex(), place.offset, start, length, checksum, place.used)

    def _begin(self, files: _Open) -> None:
        if not _head(files.data) and not _head(files.index):
            self._renumber(files)

    def _renumber(self, files: _Open) -> None:
        number = _number()
        for handle in (files.data, files.index):
            write_all(handle, (mesa_files.db_head(number),), 0)
            os.fsync(handle)

    def _append(self, files: _Open, name: str, content: bytes) -> None:
        end = os.fstat(files.data).st_size
        write_all(files.data, (mesa_files.db_entry(name, content, mesa_entries.checksum(content)),), end)
        os.fsync(files.data)
        # Mesa counts from the start of the machine, as this clock does.
        record = mesa_files.db_record(Place(name, end, len(content), time.monotonic_ns()))
        write_all(files.index, (record,), os.fstat(files.index).st_size)
        os.fsync(files.index)

    def _drop(self, files: _Open, gone: set[Blob]) -> None:
        """Close the gaps in place. After an interruption the number is zero, and Mesa empties both files."""
        kept = sorted((blob for blob in self._listed(files) if blob not in gone), key=lambda blob: blob.offset)
        for handle in (files.data, files.index):
            write_all(handle, (mesa_files.db_head(0),), 0)
            os.fsync(handle)
        at = mesa_files.DB_HEADER.size
        places = []
        for blob in kept:
            length = blob.start + blob.length - blob.offset
            if blob.offset != at:
                _copy(files.data, blob.offset, length, files.data, at)
            places.append(Place(blob.name, at, blob.length, blob.used))
            at += length
        os.ftruncate(files.data, at)
        records = b"".join(map(mesa_files.db_record, places))
        write_all(files.index, (records,), mesa_files.DB_HEADER.size)
        os.ftruncate(files.index, mesa_files.DB_HEADER.size + len(records))
        self._renumber(files)

    def _length_with(self, blobs: Iterable[Blob]) -> int:
        lengths = (
            blob.start + blob.length - blob.offset + len(mesa_files.db_record(Place(blob.name, 0, blob.length)))
            for blob in blobs
        )
        return 2 * mesa_files.DB_HEADER.size + sum(lengths)


def _number() -> int:
    """Return a new number as Mesa makes it, never zero."""
    return int(time.time()) << 32 | int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF


def _head(handle: int) -> bytes:
    return os.pread(handle, 64, 0)


def _whole(handle: int) -> bytes:
    size = os.fstat(handle).st_size
    if size > LARGEST_INDEX:
        raise OSError(errno.EFBIG, f"the index {too_large(size, LARGEST_INDEX)}")
    return os.pread(handle, size, 0)


def _copy(source: int, begin: int, length: int, target: int, at: int) -> None:
    """Copy a range in pieces; within one file only towards its beginning."""
    done = 0
    while done < length:
        piece = os.pread(source, min(_CHUNK, length - done), begin + done)
        if not piece:
            raise OSError(None, "the file is shorter than it was")
        write_all(target, (piece,), at + done)
        done += len(piece)
