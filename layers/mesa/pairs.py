"""Mesa's larger files: pairs of a data file with many entries, and its index.

They are changed under the locks of Mesa's writers. A program that has a single file open remembers where entries lie,
so a new pair of files is renamed over the old one, which the program continues to use. A database is changed in place,
as Mesa does: its number is zero meanwhile and new afterwards, so every program reads the index again.

Sources: ``src/util/fossilize_db.c`` and ``.h`` (single file), ``src/util/mesa_cache_db.c`` (database).
"""

from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from cachectl.layers import core
from cachectl.layers.disk import atomic, handles, locks, plain, trust
from cachectl.layers.mesa import entries
from cachectl.layers.stores import tree

_CHUNK = 1 << 20
_TRIES = 5
_NAME = core.regex(rb"[0-9a-f]{40}")
#: Magic number and version.
_MAGIC = b"\x81FOSSILIZEDB\0\0\0\x06"
_MAGICS = (_MAGIC, b"\x81FOSSILIZEDB\0\0\0\x05")
#: Packed length, kind of packing, checksum, unpacked length.
_HEADER = struct.Struct("<IIII")
_PLAIN = 1
_PLACE = struct.Struct("<Q")
_DB_MAGIC = b"MESA_DB\0"
_DB_VERSION = 1
#: Magic, version, and a number that is equal in files that belong together, and 0 while they are changed.
_DB_HEAD = struct.Struct("<8sIQ")
#: Key, checksum, length.
_DB_ENTRY = struct.Struct("<20sII")
#: The key's beginning, length, nanoseconds of the last use since the machine started, place.
_DB_RECORD = struct.Struct("<QIQQ")


class Blob(NamedTuple):
    """An entry in a data file: ``begin`` is that of its frame, ``start`` that of its own bytes."""

    name: str
    begin: int
    start: int
    end: int
    checksum: int
    used: int = 0

    @property
    def key(self) -> str:
        """The key of the entry."""
        return f"{self.name[:2]}/{self.name[2:]}"

    @property
    def stamp(self) -> tuple[int, int]:
        """Length and checksum identify the content; offsets change when another entry is removed."""
        return (self.end - self.start, self.checksum)


class Pair(ABC):
    """A data file with its index, in a folder below a root. A subclass is a format of them.

    ``head`` and ``frame`` are the lengths of the head of a file and of the frame of an entry.
    """

    data_name: ClassVar[str]
    index_name: ClassVar[str]
    head: ClassVar[int]
    frame: ClassVar[int]

    def __init__(self, layer: str, root: Path, folder: str, environment: core.Environment) -> None:
        self.layer = layer
        self.root = root
        self.folder = folder
        self.environment = environment
        self.path = root / folder / self.data_name
        #: The keys that are listed after the last step of a change, and the bytes of both files.
        self.left: set[str] = set()
        self.rest = 0
        self._close()

    # ------------------------------------------------------------------ the format

    @abstractmethod
    def new_head(self) -> bytes:
        """Return the head of both files, with a new number where it has one."""

    @abstractmethod
    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Return why Mesa would not use the files, given their heads; ``None`` if it would. It fills an empty index."""

    @abstractmethod
    def indexed(self, index: bytes) -> Iterator[tuple[str, Blob | None]]:
        """Yield each name in an index with its entry, ``None`` if another, or none, is at its place.

        It ends at the first record that is no entry with a place, as Mesa does.
        """

    @abstractmethod
    def framed(self, name: str, content: bytes) -> bytes:
        """Return an entry behind its frame."""

    @abstractmethod
    def record(self, blob: Blob) -> bytes:
        """Return the record of an entry in the index."""

    @abstractmethod
    def keep(self, kept: list[Blob]) -> None:
        """Reduce both files, which are open, to some entries; note after each step what is left."""

    # ------------------------------------------------------------------ reading

    def blobs(self) -> tuple[dict[str, Blob], str | None]:
        """Return the entries by key, and why Mesa cannot use the files, or not all of them; ``None`` if it can.

        A later entry replaces an earlier one of the same name, as in Mesa's table.
        """
        with self._opened() as is_there:
            return self._listed() if is_there else ({}, None)

    def read(self, blob: Blob, limit: int = -1) -> bytes | None:
        """Read an entry, or its first ``limit`` bytes; ``None`` if the files are missing."""
        with self._opened() as is_there:
            return self._content(blob, limit) if is_there else None

    def _content(self, blob: Blob, limit: int = -1) -> bytes:
        length, _ = blob.stamp
        if limit < 0 and length > core.LARGEST_ENTRY:
            raise core.Unreachable(self.layer, f"an entry {core.too_large(length, core.LARGEST_ENTRY)}", self.path)
        return os.pread(self.data, length if limit < 0 else min(limit, length), blob.start)

    def _complaint(self) -> str | None:
        return self.complaint(*(os.pread(handle, self.head, 0) for handle in (self.data, self.index)))

    def _listed(self) -> tuple[dict[str, Blob], str | None]:
        if (why := self._complaint()) is not None:
            return {}, why
        end, size = self._sizes()
        if size > core.LARGEST_INDEX:
            raise core.Unreachable(self.layer, f"the index {core.too_large(size, core.LARGEST_INDEX)}", self.path)
        found: dict[str, Blob] = {}
        names = set()
        for name, blob in self.indexed(os.pread(self.index, size, 0)):
            names.add(name[:16])
            if blob is not None and blob.end <= end:
                found[blob.key] = blob
        lost = len(names) - len(found)
        return found, f"its index lists {lost} entries that the data file lacks" if lost > 0 else None

    def frame_at(self, begin: int) -> bytes:
        """Return the frame at a place of the data file; nothing if it is not there."""
        is_there = 0 <= begin <= os.fstat(self.data).st_size - self.frame
        return os.pread(self.data, self.frame, begin) if is_there else b""

    def _sizes(self) -> tuple[int, int]:
        return os.fstat(self.data).st_size, os.fstat(self.index).st_size

    # ------------------------------------------------------------------ changes

    def remove(self, stamps: dict[str, tuple[int, ...]]) -> core.Outcome:
        """Remove the entries of these keys that have not changed. Raises :class:`LayerError` before any change."""
        before: set[str] = set()
        size = 0
        skipped: tuple[core.Note, ...] = ()
        failed: tuple[core.Note, ...] = ()
        try:
            with self._changing() as is_there:
                listed = self._listed()[0] if is_there else {}
                before, size = set(listed), self._bytes()
                self.left, self.rest = before, size
                kept = [blob for key, blob in listed.items() if stamps.get(key) != blob.stamp]
                if len(kept) < len(listed):
                    self.keep(kept)
        except core.LayerError as error:
            if not before:
                raise
            # Fewer entries may be left than were to stay.
            with suppress(core.LayerError), self._opened() as is_there:
                self.left, self.rest = set(self._listed()[0] if is_there else ()), self._bytes()
            notes = tuple(core.Note(key, error.message) for key in stamps if key in self.left)
            failed = notes or (core.Note(str(self.path), str(error)),)
        else:
            reasons = {key: tree.CHANGED if key in before else tree.GONE for key in stamps}
            stay = (key for key in stamps if key in self.left or key not in before)
            skipped = tuple(core.Note(key, reasons[key]) for key in stay)
        return core.Outcome(self.layer, len(before - self.left), max(0, size - self.rest), skipped, failed)

    def put(self, key: str, content: bytes, *, replace: bool) -> bool:
        """Add an entry; return whether it was not there. Raises :class:`EntryExists` if a different one is there."""
        with self._changing(make=True) as is_there:
            if not is_there:
                raise core.Unreachable(self.layer, "cannot be made", self.path)
            if not any(self._sizes()):
                self.write_heads(self.new_head())
            elif (why := self._complaint()) is not None:
                raise core.Damaged(self.layer, why, self.path)
            listed, _ = self._listed()
            standing = listed.pop(key, None)
            if standing is None:
                self._append(key.replace("/", ""), content)
                return True
            if self._content(standing) == content:
                return False
            if not replace:
                raise core.EntryExists(self.layer, self.path)
            self.keep([*listed.values()])
        # Other files may have replaced these meanwhile.
        return self.put(key, content, replace=False)

    def _append(self, name: str, content: bytes) -> None:
        """Add an entry whole, or leave both files as they were."""
        framed, begin = self.framed(name, content), os.fstat(self.data).st_size
        # Mesa counts from the start of the machine, as this clock does.
        blob = Blob(name, begin, begin + self.frame, begin + len(framed), 0, time.monotonic_ns())
        ends = dict(zip((self.data, self.index), self._sizes(), strict=True))
        try:
            for handle, added in ((self.data, framed), (self.index, self.record(blob))):
                # Without an index Mesa writes its head.
                atomic.write_all(handle, (b"" if ends[handle] else self.new_head(), added), ends[handle])
                os.fsync(handle)
        except OSError:
            for handle, end in ends.items():
                with suppress(OSError):
                    atomic.cut(handle, end)
            raise

    def copy(self, kept: list[Blob], data: int, index: int) -> None:
        """Write some entries one after the other behind the head of a data file, and their records into its index."""
        at = self.head
        records = b""
        for blob in sorted(kept, key=lambda blob: blob.begin):
            shift = at - blob.begin
            for begin in range(blob.begin, blob.end, _CHUNK) if shift or data != self.data else ():
                piece = os.pread(self.data, min(_CHUNK, blob.end - begin), begin)
                atomic.write_all(data, (piece,), begin + shift)
            records += self.record(blob._replace(begin=at, start=blob.start + shift, end=blob.end + shift))
            at = blob.end + shift
        atomic.cut(data, at)
        atomic.write_all(index, (records,), self.head)
        atomic.cut(index, self.head + len(records))

    def write_heads(self, head: bytes) -> None:
        """Write the heads of both files, and sync them."""
        for handle in (self.data, self.index):
            atomic.write_all(handle, (head,), 0)
            os.fsync(handle)

    def bytes_with(self, kept: list[Blob]) -> int:
        """Return the bytes of both files with some entries."""
        return 2 * self.head + sum(blob.end - blob.begin + len(self.record(blob)) for blob in kept)

    def _bytes(self) -> int:
        """Return the bytes of both files as they are named now; 0 if they are not open."""
        names = (self.data_name, self.index_name) if self.above >= 0 else ()
        found = (handles.status_of(self.above, name) for name in names)
        return sum(status.st_size for status in found if status is not None)

    # ------------------------------------------------------------------ handles

    def _close(self) -> None:
        #: The root, in which files are staged, the folder and both files, while they are open.
        self.top = self.above = self.data = self.index = -1

    @contextmanager
    def _opened(self, flags: int = os.O_RDONLY) -> Iterator[bool]:
        """Open both files for a block, and make them with ``O_CREAT``; yield whether they are there."""
        verb, is_there = "open", False
        try:
            with ExitStack() as stack:
                stack.callback(self._close)
                with suppress(FileNotFoundError):
                    is_there = self._open(stack, flags)
                verb = "change" if flags & os.O_RDWR else "read"
                yield is_there
        except core.LayerError:
            raise
        except OSError as error:
            advice = "; make room and try again" if error.errno in handles.NO_ROOM else ""
            message = f"cannot {verb}: {error.strerror or error}{advice}"
            raise core.Unreachable(self.layer, message, self.path) from error

    def _open(self, stack: ExitStack, flags: int) -> bool:
        make = bool(flags & os.O_CREAT)
        if make:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        top = stack.enter_context(handles.opened_root(self.root))
        parts = self.folder.split("/") if self.folder else []
        above = None if top is None else stack.enter_context(handles.below(top, parts, make=make))
        if top is None or above is None:
            return False
        files = []
        for name in (self.data_name, self.index_name):
            if not make and handles.status_of(above, name) is None:
                return False
            files.append(plain.open_plain(name, dir_fd=above, flags=flags))
            stack.callback(os.close, files[-1])
        self.top, self.above, (self.data, self.index) = top, above, files
        return True

    @contextmanager
    def _changing(self, *, make: bool = False) -> Iterator[bool]:
        """Open both files, lock them against Mesa and other cachectls, and check that they were not replaced."""
        owner = trust.owner_of(self.path.parent, self.path.name) if self.environment.superuser else 0
        if owner:
            raise core.Refused(self.layer, trust.belonging_to(owner), self.path)
        for _ in range(_TRIES):
            with self._opened(os.O_RDWR | (os.O_CREAT if make else 0)) as is_there:
                # Mesa locks in this order. Closing a file releases its lock.
                files = {self.data_name: self.data, self.index_name: self.index} if is_there else {}
                for handle in files.values():
                    take, seconds = partial(handles.try_flock, handle), self.environment.lock_timeout
                    locks.require(self.layer, self.path, take, seconds, "; try again later, or use --wait")
                if all(handles.is_same_file(name, handle, dir_fd=self.above) for name, handle in files.items()):
                    yield is_there
                    return
        message = "is replaced again and again; try again when the programs that use it have ended"
        raise core.Busy(self.layer, message, self.path)


class Fossilize(Pair):
    """The single-file store of one driver and device (``MESA_DISK_CACHE_SINGLE_FILE``)."""

    data_name, index_name = "foz_cache.foz", "foz_cache_idx.foz"
    head, frame = len(_MAGIC), 40 + _HEADER.size

    def new_head(self) -> bytes:
        """Return magic number and version."""
        return _MAGIC

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Check the magic numbers."""
        if any(head[:-1] == _MAGIC[:-1] and head[-1] and head not in _MAGICS for head in (index, data)):
            return entries.FOREIGN
        whole = all(head in (b"", *_MAGICS) for head in (index, data)) and bool(data or not index)
        return None if whole else "a file lacks Mesa's header, so Mesa stores and finds nothing there"

    def indexed(self, index: bytes) -> Iterator[tuple[str, Blob | None]]:
        """Compare the name."""
        size = self.frame + _PLACE.size
        for at in range(self.head, len(index) - size + 1, size):
            name = index[at : at + 40]
            if _HEADER.unpack_from(index, at + 40)[0] != _PLACE.size or not _NAME.fullmatch(name):
                return
            # Places are those of headers, and names stand before them.
            begin = _PLACE.unpack_from(index, at + self.frame)[0] - 40
            frame, blob = self.frame_at(begin), None
            if frame[:40] == name:
                length, _, checksum, _ = _HEADER.unpack_from(frame, 40)
                start = begin + self.frame
                blob = Blob(name.decode(), begin, start, start + length, checksum)
            yield name.decode(), blob

    def framed(self, name: str, content: bytes) -> bytes:
        """Put name and header before an entry."""
        checksum = entries.checksum(content)
        return name.encode() + _HEADER.pack(len(content), _PLAIN, checksum, len(content)) + content

    def record(self, blob: Blob) -> bytes:
        """Return name, header and place."""
        head = _HEADER.pack(_PLACE.size, _PLAIN, 0, _PLACE.size)
        return blob.name.encode() + head + _PLACE.pack(blob.begin + 40)

    def keep(self, kept: list[Blob]) -> None:
        """Rename new files over the old ones; between the steps programs find nothing, instead of wrong bytes."""
        with ExitStack() as stack:
            stage = stack.enter_context(atomic.own_folder(self.top, plain.STAGE))
            staged, mode = [], os.fstat(self.data).st_mode & 0o777
            for name in ("empty", "data", "index"):
                staged.append(atomic.create(name, stage, mode))
                stack.callback(os.close, staged[-1])
                atomic.write_all(staged[-1], (self.new_head(),), 0)
            _, data, index = staged
            self.copy(kept, data, index)
            for handle in staged:
                os.fsync(handle)
            # Read before the first step: later nothing may be readable.
            old, new = os.fstat(self.data).st_size, os.fstat(data).st_size
            atomic.move_in("empty", stage, self.index_name, self.above)
            self.left, self.rest = set(), old + self.head
            atomic.move_in("data", stage, self.data_name, self.above)
            self.rest = new + self.head
            atomic.move_in("index", stage, self.index_name, self.above)
            self.left, self.rest = {blob.key for blob in kept}, self.bytes_with(kept)
            os.fsync(self.above)


class Database(Pair):
    """One part of Mesa's database (``MESA_DISK_CACHE_DATABASE``)."""

    data_name, index_name = "mesa_cache.db", "mesa_cache.idx"
    head, frame = _DB_HEAD.size, _DB_ENTRY.size

    def new_head(self) -> bytes:
        """Return a head with a new number as Mesa makes it, never zero."""
        number = int(time.time()) << 32 | int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF
        return _DB_HEAD.pack(_DB_MAGIC, _DB_VERSION, number)

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Compare the heads. Mesa empties both files if they do not match."""
        if not data and not index:
            return None
        heads = [_DB_HEAD.unpack(head) for head in (data, index) if len(head) == self.head]
        if any(magic == _DB_MAGIC and version not in (0, _DB_VERSION) for magic, version, _ in heads):
            return entries.FOREIGN
        if data == index and heads and heads[0][:2] == (_DB_MAGIC, _DB_VERSION) and heads[0][2]:
            return None
        return "the two files do not belong together: the next program drops every entry"

    def indexed(self, index: bytes) -> Iterator[tuple[str, Blob | None]]:
        """Compare the beginning of the name, and the length."""
        for at in range(self.head, len(index) - _DB_RECORD.size + 1, _DB_RECORD.size):
            beginning, stated, used, begin = _DB_RECORD.unpack_from(index, at)
            if not (beginning and stated and self.head <= begin < 1 << 63):
                return
            name, frame, blob = beginning.to_bytes(8, "little").hex(), self.frame_at(begin), None
            if frame:
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
        return _DB_RECORD.pack(beginning, blob.end - blob.start, blob.used, blob.begin)

    def keep(self, kept: list[Blob]) -> None:
        """Change the files in place. After an interruption the number is zero, and Mesa empties both."""
        self.write_heads(self.new_head()[:-8] + bytes(8))
        self.left = set()
        self.copy(kept, self.data, self.index)
        self.rest = self.bytes_with(kept)
        os.fsync(self.data)
        os.fsync(self.index)
        self.write_heads(self.new_head())
        self.left = {blob.key for blob in kept}
