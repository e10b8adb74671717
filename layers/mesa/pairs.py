"""A pair of files of Mesa, data and index, with many entries: read, and changed under the locks of Mesa's writers.

A program that has a single file open remembers where entries lie, so a new pair of files is renamed over the old one,
which the program continues to use. A database is changed in place, as Mesa does: its number is zero meanwhile and new
afterwards, so every program reads the index again.

Sources: ``src/util/fossilize_db.c`` and ``.h`` (single file), ``src/util/mesa_cache_db.c`` (database).
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from cachectl.layers.base import errors, facts, lazy
from cachectl.layers.base.environment import Environment
from cachectl.layers.disk import atomic, handles, plain, trust
from cachectl.layers.disk.handles import NO_ROOM, below, opened_root, status_of
from cachectl.layers.mesa import entries

_CHUNK: Final = 1 << 20
_TRIES: Final = 5
_NAME: Final = lazy.regex(rb"[0-9a-f]{40}")
#: Magic number and version.
_MAGIC: Final = b"\x81FOSSILIZEDB\0\0\0\x06"
_MAGICS: Final = (_MAGIC, b"\x81FOSSILIZEDB\0\0\0\x05")
#: Packed length, kind of packing, checksum, unpacked length.
_HEADER: Final = struct.Struct("<IIII")
_PLAIN: Final = 1
_PLACE: Final = struct.Struct("<Q")
_DB_MAGIC: Final = b"MESA_DB\0"
_DB_VERSION: Final = 1
#: Magic, version, and a number that is equal in files that belong together, and 0 while they are changed.
_DB_HEAD: Final = struct.Struct("<8sIQ")
#: Key, checksum, length.
_DB_ENTRY: Final = struct.Struct("<20sII")
#: The key's beginning, length, nanoseconds of the last use since the machine started, place.
_DB_RECORD: Final = struct.Struct("<QIQQ")


class Blob(NamedTuple):
    """An entry in a data file: ``begin`` is that of its frame, ``start`` that of its own bytes."""

    name: str
    begin: int
    start: int
    end: int
    checksum: int
    used: int = 0

    @property
    def length(self) -> int:
        """The length of its own bytes."""
        return self.end - self.start

    @property
    def stamp(self) -> tuple[int, ...]:
        """Identifies the content; offsets change when another entry is removed."""
        return (self.length, self.checksum)


#: Reads so many bytes at a place of a data file; ``None`` if they are not there.
Reader: TypeAlias = Callable[[int, int], bytes | None]


class Fossilize:
    """The single-file store of one driver and device (``MESA_DISK_CACHE_SINGLE_FILE``).

    ``head`` and ``frame`` are the lengths of the head of a file and of the frame of an entry; a format is changed
    ``in_place`` if programs notice that.
    """

    data_name, index_name = "foz_cache.foz", "foz_cache_idx.foz"
    head, frame = len(_MAGIC), 40 + _HEADER.size
    in_place = False

    def new_head(self) -> bytes:
        """Return the head of both files of a pair, with a new number where it has one."""
        return _MAGIC

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Return why Mesa would not use a pair, given its heads; ``None`` if it would. It fills an empty index."""
        if any(head[:-1] == _MAGIC[:-1] and head[-1] and head not in _MAGICS for head in (index, data)):
            return entries.FOREIGN
        whole = all(head in (b"", *_MAGICS) for head in (index, data)) and bool(data or not index)
        return None if whole else "a file lacks Mesa's header, so Mesa stores and finds nothing there"

    def blobs(self, index: bytes, read: Reader) -> Iterator[tuple[str, Blob | None]]:
        """Yield each name in an index with its entry, ``None`` if another, or none, is at its place.

        It ends at the first record that is no entry with a place, as Mesa does.
        """
        size = self.frame + _PLACE.size
        for at in range(self.head, len(index) - size + 1, size):
            name = index[at : at + 40]
            if _HEADER.unpack_from(index, at + 40)[0] != _PLACE.size or not _NAME.fullmatch(name):
                return
            # Places are those of headers, and names stand before them.
            begin = _PLACE.unpack_from(index, at + self.frame)[0] - 40
            frame, blob = read(begin, self.frame), None
            if frame is not None and frame[:40] == name:
                length, _, checksum, _ = _HEADER.unpack_from(frame, 40)
                start = begin + self.frame
                blob = Blob(name.decode(), begin, start, start + length, checksum)
            yield name.decode(), blob

    def framed(self, name: str, content: bytes) -> bytes:
        """Return an entry behind its frame, name and header."""
        return name.encode() + _HEADER.pack(len(content), _PLAIN, entries.checksum(content), len(content)) + content

    def record(self, blob: Blob) -> bytes:
        """Return the record of an entry: name, header and place."""
        head = _HEADER.pack(_PLACE.size, _PLAIN, 0, _PLACE.size)
        return blob.name.encode() + head + _PLACE.pack(blob.begin + 40)


class Database:
    """One part of Mesa's database (``MESA_DISK_CACHE_DATABASE``), with the members of :class:`Fossilize`."""

    data_name, index_name = "mesa_cache.db", "mesa_cache.idx"
    head, frame = _DB_HEAD.size, _DB_ENTRY.size
    in_place = True

    def new_head(self) -> bytes:
        """Return a head with a new number as Mesa makes it, never zero."""
        number = int(time.time()) << 32 | int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF
        return _DB_HEAD.pack(_DB_MAGIC, _DB_VERSION, number)

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Check the heads. Mesa empties both files if they do not match."""
        if not data and not index:
            return None
        heads = [_DB_HEAD.unpack(head) for head in (data, index) if len(head) == self.head]
        if any(magic == _DB_MAGIC and version not in (0, _DB_VERSION) for magic, version, _ in heads):
            return entries.FOREIGN
        if data == index and heads and heads[0][:2] == (_DB_MAGIC, _DB_VERSION) and heads[0][2]:
            return None
        return "the two files do not belong together: the next program drops every entry"

    def blobs(self, index: bytes, read: Reader) -> Iterator[tuple[str, Blob | None]]:
        """Compare the beginning of the name, and the length."""
        for at in range(self.head, len(index) - _DB_RECORD.size + 1, _DB_RECORD.size):
            beginning, stated, used, begin = _DB_RECORD.unpack_from(index, at)
            if not (beginning and stated and self.head <= begin < 1 << 63):
                return
            name, frame, blob = beginning.to_bytes(8, "little").hex(), read(begin, self.frame), None
            if frame is not None:
                key, checksum, length = _DB_ENTRY.unpack(frame)
                start = begin + self.frame
                if key.hex().startswith(name) and length == stated:
                    blob = Blob(key.hex(), begin, start, start + length, checksum, used)
            yield name, blob

    def framed(self, name: str, content: bytes) -> bytes:
        """Put key, checksum and length before an entry."""
        return _DB_ENTRY.pack(bytes.fromhex(name), entries.checksum(content), len(content)) + content

    def record(self, blob: Blob) -> bytes:
        """Return the beginning of the key, length, last use and place."""
        beginning = int.from_bytes(bytes.fromhex(blob.name)[:8], "little")
        return _DB_RECORD.pack(beginning, blob.length, blob.used, blob.begin)


Format: TypeAlias = Fossilize | Database


class _Open(NamedTuple):
    """The open data file and its index, their folder, and the root, where files are staged."""

    root: int
    folder: int
    data: int
    places: int


class Pair:
    """A data file with its index, in a folder below a root."""

    def __init__(self, form: Format, layer: str, root: Path, folder: str = "", *, environment: Environment) -> None:
        self.form = form
        self.layer = layer
        self.root = root
        self.folder = folder
        self.environment = environment

    @property
    def path(self) -> Path:
        """The data file."""
        return self.root / self.folder / self.form.data_name

    def blobs(self) -> list[Blob]:
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

    def read(self, blob: Blob, limit: int = -1) -> bytes | None:
        """Read an entry, or its first ``limit`` bytes; ``None`` if the files are missing."""
        with self._opened() as files:
            return None if files is None else _content(files.data, blob, limit)

    def _complaint(self, files: _Open) -> str | None:
        return self.form.complaint(*(os.pread(handle, self.form.head, 0) for handle in (files.data, files.places)))

    def _listed(self, files: _Open | None) -> list[Blob]:
        if files is None or self._complaint(files) is not None:
            return []
        end = os.fstat(files.data).st_size
        return list(
            {blob.name: blob for _, blob in self._indexed(files) if blob is not None and blob.end <= end}.values()
        )

    def _indexed(self, files: _Open) -> Iterator[tuple[str, Blob | None]]:
        """Yield each name in the index, with its entry as the formats do."""
        end, size = (os.fstat(handle).st_size for handle in (files.data, files.places))
        if size > errors.LARGEST_INDEX:
            raise OSError(errno.EFBIG, f"the index {errors.too_large(size, errors.LARGEST_INDEX)}")

        def read(begin: int, length: int) -> bytes | None:
            return os.pread(files.data, length, begin) if 0 <= begin <= end - length else None

        return self.form.blobs(os.pread(files.places, size, 0), read)

    def remove(self, stamps: Mapping[str, tuple[int, ...]]) -> facts.Outcome:
        """Remove the entries of these names that have not changed. Raises :class:`LayerError` before any change."""
        listed: list[Blob] = []
        left: set[str] = set()
        size = rest = 0
        failed: errors.LayerError | None = None
        try:
            with self._changing() as files:
                size = rest = self._bytes(files)
                listed = self._listed(files)
                kept = [blob for blob in listed if stamps.get(blob.name) != blob.stamp]
                left = {blob.name for blob in listed}
                if files is not None and len(kept) < len(listed):
                    # After an error more may be gone than was planned.
                    for left, rest in self._keep(files, kept):  # noqa: B007 - the last ones count
                        pass
        except errors.LayerError as error:
            if not listed:
                raise
            failed = error
            # A step may have been half done.
            with suppress(errors.LayerError), self._opened() as files:
                left, rest = {blob.name for blob in self._listed(files)}, self._bytes(files)
        outcome = facts.Outcome(self.layer, sum(blob.name not in left for blob in listed), max(0, size - rest))
        if failed is not None:
            notes = [facts.Note(entries.key_of(name), failed.message) for name in stamps if name in left]
            return replaced(outcome, failed=tuple(notes) or (facts.Note(str(self.path), str(failed)),))
        stay = dict.fromkeys(left, "changed since it was planned")
        stay |= dict.fromkeys(stamps.keys() - {blob.name for blob in listed}, "already gone")
        notes = [facts.Note(entries.key_of(name), stay[name]) for name in stamps if name in stay]
        return replaced(outcome, skipped=tuple(notes))

    def put(self, name: str, content: bytes, *, replace: bool) -> None:
        """Add an entry. Raises :class:`EntryExists` if a different one has the name and ``replace`` is not set."""
        with self._changing(make=True) as files:
            if files is None:
                raise errors.Unreachable(self.layer, "cannot be made", self.path)
            if not os.fstat(files.data).st_size and not os.fstat(files.places).st_size:
                _write_heads(files, self.form.new_head())
            elif (why := self._complaint(files)) is not None:
                raise errors.Damaged(self.layer, why, self.path)
            listed = self._listed(files)
            standing = next((blob for blob in listed if blob.name == name), None)
            if standing is None:
                self._append(files, name, content)
                return
            if _content(files.data, standing, -1) == content:
                return
            if not replace:
                raise errors.EntryExists(self.layer, self.path)
            for _ in self._keep(files, [blob for blob in listed if blob is not standing]):
                pass
        # Other files may have replaced these meanwhile.
        self.put(name, content, replace=False)

    def _append(self, files: _Open, name: str, content: bytes) -> None:
        """Add an entry whole, or leave both files as they were."""
        ends = {handle: os.fstat(handle).st_size for handle in (files.data, files.places)}
        framed, begin = self.form.framed(name, content), ends[files.data]
        # Mesa counts from the start of the machine, as this clock does.
        blob = Blob(name, begin, begin + self.form.frame, begin + len(framed), 0, time.monotonic_ns())
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

    def _keep(self, files: _Open, kept: list[Blob]) -> Iterator[tuple[set[str], int]]:
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

    def _copy(self, source: int, kept: list[Blob], data: int, index: int) -> None:
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
        found = (status_of(files.folder, name) for name in names if files is not None)
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
        except errors.LayerError:
            raise
        except OSError as error:
            advice = "; make room and try again" if error.errno in NO_ROOM else ""
            message = f"cannot {verb}: {error.strerror or error}{advice}"
            raise errors.Unreachable(self.layer, message, self.path) from error

    def _open(self, stack: ExitStack, flags: int) -> _Open:
        """Open both files, and make them with ``O_CREAT``. Raises :class:`OSError`."""
        make = bool(flags & os.O_CREAT)
        if make:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = stack.enter_context(opened_root(self.root))
        above = [*filter(None, self.folder.split("/"))]
        folder = None if root is None else stack.enter_context(below(root, above, make=make))
        missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        if root is None or folder is None:
            raise missing
        opened = []
        for name in (self.form.data_name, self.form.index_name):
            if not make and status_of(folder, name) is None:
                raise missing
            opened.append(plain.open_plain(name, dir_fd=folder, flags=flags))
            stack.callback(os.close, opened[-1])
        return _Open(root, folder, *opened)

    @contextmanager
    def _changing(self, *, make: bool = False) -> Iterator[_Open | None]:
        """Open both files, lock them against Mesa and other cachectls, and check that they were not replaced."""
        owner = trust.owner_of(self.path.parent, self.path.name) if self.environment.superuser else 0
        if owner:
            raise errors.Refused(self.layer, trust.belonging_to(owner), self.path)
        for _ in range(_TRIES):
            with self._opened(os.O_RDWR | (os.O_CREAT if make else 0)) as files:
                if files is None:
                    yield None
                    return
                # Mesa locks in this order. Closing a file releases its lock.
                names = {self.form.data_name: files.data, self.form.index_name: files.places}
                for handle in names.values():
                    self._lock(handle)
                if all(handles.is_same_file(name, handle, dir_fd=files.folder) for name, handle in names.items()):
                    yield files
                    return
        message = "is replaced again and again; try again when the programs that use it have ended"
        raise errors.Busy(self.layer, message, self.path)

    def _lock(self, handle: int) -> None:
        seconds = self.environment.lock_timeout
        if not handles.wait_until(partial(handles.try_flock, handle), seconds):
            message = f"locked by another process for more than {seconds:g} s; try again later, or use --wait"
            raise errors.Busy(self.layer, message, self.path)


def _write_heads(files: _Open, head: bytes) -> None:
    for handle in (files.data, files.places):
        atomic.write_all(handle, (head,), 0)
        os.fsync(handle)


def _content(data: int, blob: Blob, limit: int) -> bytes:
    if limit < 0 and blob.length > errors.LARGEST_ENTRY:
        raise OSError(errno.EFBIG, f"the entry {errors.too_large(blob.length, errors.LARGEST_ENTRY)}")
    return os.pread(data, blob.length if limit < 0 else min(limit, blob.length), blob.start)
