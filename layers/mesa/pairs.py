"""Mesa's larger files: pairs of a data file with many entries and its index.

They are changed under the locks of Mesa's writers. A program with an open single file remembers the places of entries,
so new files are renamed over the old ones, which the program continues to use. A database is changed in place, as by
Mesa: its number is zero during the change and new afterwards, so every program reads the index again.

Since Mesa 26 the keys of a database have 32 bytes instead of 20, under the same version; one that is older than an
upgrade has frames of both kinds. The names of a single file kept 40 digits: the first 20 bytes of a key. A removal cuts
out exactly the bytes of entries. A file whose index lists what no known format explains is not changed.

Sources: ``src/util/fossilize_db.c`` and ``.h`` (single file), ``src/util/mesa_cache_db.c`` (database),
``src/util/disk_cache.h`` (``CACHE_KEY_SIZE``).
"""

from __future__ import annotations

import os
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Refused, UnknownFormat, Unreachable
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.limits import LARGEST_ENTRY, LARGEST_INDEX
from cachectl.layers.base.text import too_large
from cachectl.layers.disk import atomic, handles, locks, plain
from cachectl.layers.mesa import entries
from cachectl.layers.stores import database
from cachectl.layers.stores.table import Row, TableFile
from cachectl.layers.stores.tree_read import CHANGED

_CHUNK = 1 << 20
_NAME = regex(rb"[0-9a-f]{40}")
#: Magic number and version.
_MAGIC = b"\x81FOSSILIZEDB\0\0\0\x06"
_MAGICS = (_MAGIC, b"\x81FOSSILIZEDB\0\0\0\x05")
#: Before an entry, or its place: name, packed length, kind of packing, checksum, unpacked length.
_FRAME = struct.Struct("<40sIIII")
_PLACED = struct.Struct("<40sIIIIQ")
_PLAIN, _PLACE_SIZE = 1, 8
_DB_MAGIC, _DB_VERSION = b"MESA_DB\0", 1
#: Magic, version, and a number that is equal in files that belong together, and 0 while they are changed.
_DB_HEAD = struct.Struct("<8sIQ")
#: After the key in a frame: checksum, length.
_DB_TAIL = struct.Struct("<II")
#: First bytes of the key, length, last use (ns since the machine started), place.
_DB_PLACED = struct.Struct("<8sIQQ")
_UNKNOWN = "its index lists entries in a format that this cachectl does not know; left alone"
_MIXED = "the database has keys of another length, and Mesa drops every entry of one with both; move it away first"


class Blob(NamedTuple):
    """An entry in a data file, after a frame of ``frame`` bytes at the offset ``begin``; its record in the index."""

    name: str
    begin: int
    length: int
    checksum: int = 0
    frame: int = 0
    record: bytes = b""

    @property
    def end(self) -> int:
        """Return the offset of the end of the entry."""
        return self.begin + self.frame + self.length

    @property
    def row(self) -> Row:
        """Length and checksum identify the content; offsets change when another entry is removed."""
        return Row(self.checksum, self.name, self.length)


class Index(NamedTuple):
    """The entries that an index lists, in the order of both files; the data file has only a part or zeros of others."""

    blobs: list[Blob]
    lost: int

    @property
    def by_name(self) -> dict[str, Blob]:
        """Return the entries by name: a later one overrides an earlier one, as in Mesa's table."""
        return {blob.name: blob for blob in self.blobs}


class Pair(TableFile):
    """A data file with its index. A row is an entry: its key is the name, its id the checksum."""

    index_name: ClassVar[str]
    #: The length of the head of a file, the possible lengths of what precedes an entry, and that of a record.
    head: ClassVar[int]
    frames: ClassVar[tuple[int, ...]]
    record: ClassVar[int]
    #: Whether both files are changed in place, as by Mesa, which empties both if their number has remained zero. Then
    #: no name may be listed twice: Mesa reads the last one, but drops every entry when it next makes room, unless the
    #: frames are contiguous.
    in_place: ClassVar[bool]
    #: The descriptors of both files while they are open, of their folder, and of the root, where files are staged.
    data: int
    index: int
    folder: int
    top: int
    #: The numbers of entries before and after a removal, as far as it has changed the files.
    before = left = 0

    def __init__(self, layer: str, root: Path, file: str, lock_timeout: float) -> None:
        super().__init__(layer, root / file)
        self.root = root
        self.paths = (self.path, self.path.with_name(self.index_name))
        self.lock_timeout = lock_timeout

    @abstractmethod
    def _new_head(self) -> bytes:
        """Return the head of both files, with a new number if it has one."""

    @abstractmethod
    def _complaint(self, data: bytes, index: bytes) -> str | None:
        """Return why Mesa would not use files with these heads, or ``None``. It fills an empty index."""

    @abstractmethod
    def _read_record(self, record: bytes) -> Blob | None:
        """Return name and place, or the known parts; ``None`` if it is not the record of an entry with a place."""

    @abstractmethod
    def _read_frame(self, frame: bytes) -> Blob:
        """Return name, length and checksum."""

    @abstractmethod
    def _describe(self, name: str, content: bytes, begin: int) -> tuple[bytes, bytes]:
        """Return the frame of an entry at an offset of the data file, and its record in the index."""

    def blobs(self) -> dict[str, Blob]:
        """Return the entries by name. Raises :class:`LayerError` if Mesa would not use the files."""
        with self._opened() as is_there:
            return self._listed().by_name if is_there else {}

    def content(self, blob: Blob, limit: int = LARGEST_ENTRY) -> bytes:
        """Read an entry, or its first ``limit`` bytes; nothing if the files are missing."""
        with self._opened() as is_there:
            return self._content(blob, limit) if is_there else b""

    def rows(self) -> list[Row]:
        """Return the entries as rows."""
        return [blob.row for blob in self.blobs().values()]

    def read(self, keys: Sequence[str]) -> list[bytes | LayerError | None]:
        """Return the bytes of entries, ``None`` for each that is missing."""
        with self._opened() as is_there:
            listed = self._listed().by_name if is_there else {}
            return [self._content(listed[name]) if name in listed else None for name in keys]

    def check(self) -> bool:
        """Return whether the files exist. Raises :class:`LayerError` if the index does not fit or is unknown."""
        with self._opened() as is_there:
            if not is_there and plain.status_at(self.path) is not None:
                raise Damaged(self.layer, "its index is missing, so Mesa finds none of its entries", self.path)
            if is_there and (lost := self._listed(known_only=True).lost):
                raise Damaged(self.layer, f"its index lists {lost} entries that the data file lacks", self.path)
            return is_there

    def _content(self, blob: Blob, limit: int = LARGEST_ENTRY) -> bytes:
        if blob.length > limit == LARGEST_ENTRY:
            raise Unreachable(self.layer, f"an entry {too_large(blob.length, limit)}", self.path)
        return os.pread(self.data, min(limit, blob.length), blob.begin + blob.frame)

    def _listed(self, *, known_only: bool = False) -> Index:
        """Read the index, and the frame of each entry. Raises :class:`LayerError` if Mesa would not use the files."""
        heads = (os.pread(handle, self.head, 0) for handle in (self.data, self.index))
        if (reason := self._complaint(*heads)) is not None:
            raise (UnknownFormat if reason == entries.FOREIGN else Damaged)(self.layer, reason, self.path)
        size = os.fstat(self.index).st_size
        if size > LARGEST_INDEX:
            raise Unreachable(self.layer, f"the index {too_large(size, LARGEST_INDEX)}", self.path)
        content = os.pread(self.index, size, self.head)
        # Programs write an entry before its record.
        end = os.fstat(self.data).st_size
        blobs, lost, behind, following = list[Blob](), 0, self.head, [self.head]
        for at in range(0, len(content), self.record):
            record = content[at : at + self.record]
            stated = self._read_record(record) if len(record) == self.record else None
            # Zeros are what a power failure leaves.
            blob, is_lost = None, not any(record)
            if stated is not None and stated.begin >= behind:
                blob, is_cut = self._placed(stated, record, end)
                is_lost = is_cut and (not stated.length or stated.begin in following)
                following = [stated.begin + frame + stated.length for frame in self.frames]
            if blob is not None:
                blobs.append(blob)
                behind = blob.end
            elif is_lost:
                lost += 1
            elif known_only:
                raise UnknownFormat(self.layer, _UNKNOWN, self.path)
        return Index(blobs, lost)

    def _placed(self, stated: Blob, record: bytes, end: int) -> tuple[Blob | None, bool]:
        """Return the entry that a record of the index states, or ``None`` and whether it was cut or zeroed.

        Its key has the length with which name and length match the record; of two, the one that fits the checksum.
        """
        head = os.pread(self.data, max(self.frames), stated.begin) if stated.begin <= end else b""
        read = ((size, self._read_frame(head[:size])) for size in self.frames if size <= len(head))
        same = [
            blob._replace(begin=stated.begin, frame=size, record=record)
            for size, blob in read
            if blob.name.startswith(stated.name) and stated.length in (0, blob.length)
        ]
        whole = [blob for blob in same if blob.end <= end]
        fitting = [blob for blob in whole if len(whole) == 1 or entries.checksum(self._content(blob)) == blob.checksum]
        is_cut = bool(same) or stated.begin + min(self.frames) + stated.length > end or not any(head)
        return (fitting[0], False) if len(fitting) == 1 else (None, is_cut and not whole)

    def size(self) -> int:
        """Return the bytes of both files."""
        return sum(sum(database.sizes_of(path)) for path in self.paths)

    def gone(self, rows: Iterable[Row]) -> int:
        """Return how many entries are missing: more than planned if Mesa cannot use the files any more."""
        try:
            self.left = len(self.blobs())
        except LayerError as error:
            # If nothing can be read any more, what a removal has written counts.
            self.left = 0 if isinstance(error, Damaged) else self.left
        return max(0, self.before - self.left)

    def delete(self, rows: Iterable[Row]) -> frozenset[Row]:
        """Remove entries, except those that have changed; return the removed ones."""
        planned = frozenset(rows)
        with self._opened(locked=True) as is_there:
            index = self._listed(known_only=True) if is_there else Index([], 0)
            listed = index.by_name.values()
            self.before = self.left = len(listed)
            removed = planned.intersection(blob.row for blob in listed)
            if removed:
                self._keep(index.blobs, frozenset(blob for blob in listed if blob.row not in removed))
            return removed

    def insert(self, rows: Sequence[tuple[str, bytes]], *, replace: bool = False) -> list[bool | LayerError]:
        """Add entries one by one."""
        # Then nothing changes, even if the files are locked or closed to this user.
        if self.read([name for name, _ in rows]) == [entry for _, entry in rows]:
            return [False for _ in rows]
        results: list[bool | LayerError] = []
        with self._opened(locked=True, make=True):
            if not any(os.fstat(handle).st_size for handle in (self.data, self.index)):
                self._write_heads(self._new_head())
            listed = self._listed(known_only=True).by_name
            for name, entry in rows:
                try:
                    with self.translated("change"):
                        results.append(self._place(name, entry, listed, replace=replace))
                except LayerError as error:  # noqa: PERF203 - there may be room for a smaller one
                    results.append(error)
        return results

    def _place(self, name: str, content: bytes, listed: dict[str, Blob], *, replace: bool) -> bool:
        """Add or replace a complete entry in the open files; return ``False`` if they have the same one."""
        if listed and all(len(name) != len(existing) for existing in listed):
            raise Refused(self.layer, _MIXED, self.path)
        existing = self._content(listed[name]) if name in listed else None
        if existing == content:
            return False
        if existing is not None and not replace:
            raise EntryExists(self.layer, self.path)
        if existing is not None and self.in_place:
            blobs = self._listed(known_only=True).blobs
            self._keep(blobs, frozenset(blob for blob in blobs if blob.name != name))
            # The entries behind it have moved.
            listed |= self._listed(known_only=True).by_name
        ends = {handle: os.fstat(handle).st_size for handle in (self.data, self.index)}
        frame, record = self._describe(name, content, ends[self.data])
        try:
            for handle, added in ((self.data, frame + content), (self.index, record)):
                # Without an index Mesa writes its head.
                atomic.write_all(handle, (b"" if ends[handle] else self._new_head(), added), ends[handle])
                os.fsync(handle)
        except OSError:
            for handle, end in ends.items():
                with suppress(OSError):
                    atomic.cut(handle, end)
            raise
        return True

    def remove_damaged(self, stamp: tuple[int, ...], in_use: Callable[[Path], str | None]) -> str | None:
        """Remove both files under their locks."""
        with suppress(Damaged):
            self.check()
            return self.changed_since(stamp)
        if (reason := in_use(self.path)) is not None:
            return reason
        with self._opened(locked=True):
            if database.file_stamp(self.path) != stamp:
                return CHANGED
            for path in self.paths:
                atomic.remove_file(path.name, self.folder)
        return None

    def _keep(self, blobs: list[Blob], kept: frozenset[Blob]) -> None:
        """Remove all entries but some from both files, which are open."""
        if self.in_place:
            self._write_heads(self._new_head()[:-8] + bytes(8))
            # Mesa drops all entries after such heads.
            self.left = 0
            self._copy(blobs, kept, self.data, self.index)
            self._write_heads(self._new_head())
            return
        # New files are renamed over the old ones; between the steps programs find nothing rather than wrong bytes.
        with ExitStack() as stack:
            stage = stack.enter_context(atomic.own_folder(self.top, plain.STAGE))
            staged, mode = [], os.fstat(self.data).st_mode & 0o777
            for name in ("empty", "data", "index"):
                staged.append(atomic.create(name, stage, mode))
                stack.callback(os.close, staged[-1])
                atomic.write_all(staged[-1], (self._new_head(),), 0)
            self._copy(blobs, kept, *staged[1:])
            os.fsync(staged[0])
            for name, path in zip(("empty", "data", "index"), (self.paths[1], *self.paths), strict=True):
                atomic.move_in(name, stage, path.name, self.folder)
            self.left = len(kept)
            os.fsync(self.folder)

    def _copy(self, blobs: list[Blob], kept: frozenset[Blob], data: int, index: int) -> None:
        """Write a data file without the entries that are not kept but with all other bytes, and the index."""
        source = target = head = self.head
        records = b""
        for blob in (*blobs, Blob("", os.fstat(self.data).st_size, 0)):
            if blob in kept:
                place = int.from_bytes(blob.record[-8:], "little") - source + target
                records += blob.record[:-8] + place.to_bytes(8, "little")
                continue
            for begin in range(source, blob.begin, _CHUNK) if source != target or data != self.data else ():
                piece = os.pread(self.data, min(_CHUNK, blob.begin - begin), begin)
                atomic.write_all(data, (piece,), begin - source + target)
            source, target = blob.end, target + blob.begin - source
        atomic.cut(data, target)
        atomic.write_all(index, (records,), head)
        atomic.cut(index, head + len(records))
        for handle in (data, index):
            os.fsync(handle)

    def _write_heads(self, head: bytes) -> None:
        """Write the heads of both files, and sync them."""
        for handle in (self.data, self.index):
            atomic.write_all(handle, (head,), 0)
            os.fsync(handle)

    @contextmanager
    def _opened(self, *, locked: bool = False, make: bool = False) -> Iterator[bool]:
        """Open both files without following links below the root; yield whether they exist.

        ``locked`` opens them for a change, and excludes Mesa and other cachectls; ``make`` makes missing ones.
        """
        with self.translated("change" if locked else "read"), ExitStack() as stack:
            if make:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            top = stack.enter_context(handles.opened_root(self.root))
            parts = self.path.relative_to(self.root).parts[:-1]
            folder = None if top is None else stack.enter_context(handles.open_below(top, parts, make=make))
            opened: list[int] = []
            if top is not None and folder is not None:
                self.top, self.folder = top, folder
            # Mesa locks in this order.
            for path in () if folder is None else self.paths:
                if make:
                    with suppress(FileExistsError):
                        os.close(atomic.create(path.name, folder, 0o644))
                if locked:
                    lock = locks.file_lock(self.layer, path, folder=folder, lock_timeout=self.lock_timeout)
                    if (handle := stack.enter_context(lock)) is not None:
                        opened.append(handle)
                else:
                    with suppress(FileNotFoundError):
                        opened.append(plain.open_plain(path.name, dir_fd=folder))
                        stack.callback(os.close, opened[-1])
            is_there = len(opened) == len(self.paths)
            if is_there:
                self.data, self.index = opened
            elif make:
                raise Unreachable(self.layer, "cannot be made", self.path)
            yield is_there


class Fossilize(Pair):
    """The single-file store of one driver and device (``MESA_DISK_CACHE_SINGLE_FILE``)."""

    index_name, in_place = "foz_cache_idx.foz", False
    head, frames, record = len(_MAGIC), (_FRAME.size,), _PLACED.size

    def _new_head(self) -> bytes:
        return _MAGIC

    def _complaint(self, data: bytes, index: bytes) -> str | None:
        # A file that was cut has no magic number, or a zero in it.
        if any(head[:-1] == _MAGIC[:-1] and head[-1] and head not in _MAGICS for head in (index, data)):
            return entries.FOREIGN
        is_whole = all(head in (b"", *_MAGICS) for head in (index, data)) and bool(data or not index)
        return None if is_whole else "a file lacks Mesa's header, so Mesa stores and finds nothing there"

    def _read_record(self, record: bytes) -> Blob | None:
        # The place in the record follows the name.
        name, size, *_, place = _PLACED.unpack(record)
        return Blob(name.decode(), place - len(name), 0) if size == _PLACE_SIZE and _NAME.fullmatch(name) else None

    def _read_frame(self, frame: bytes) -> Blob:
        name, length, _, checksum, _ = _FRAME.unpack(frame)
        return Blob(name.decode("latin-1"), 0, length, checksum)

    def _describe(self, name: str, content: bytes, begin: int) -> tuple[bytes, bytes]:
        key, size = name.encode(), len(content)
        frame = _FRAME.pack(key, size, _PLAIN, entries.checksum(content), size)
        return frame, _PLACED.pack(key, _PLACE_SIZE, _PLAIN, 0, _PLACE_SIZE, begin + len(key))


class Database(Pair):
    """One part of Mesa's database (``MESA_DISK_CACHE_DATABASE``)."""

    index_name, in_place = "mesa_cache.idx", True
    head, record = _DB_HEAD.size, _DB_PLACED.size
    frames = tuple(size + _DB_TAIL.size for size in entries.KEY_SIZES)

    def _new_head(self) -> bytes:
        # As Mesa makes the number, it is never zero.
        number = int(time.time()) << 32 | int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF
        return _DB_HEAD.pack(_DB_MAGIC, _DB_VERSION, number)

    def _complaint(self, data: bytes, index: bytes) -> str | None:
        heads = [_DB_HEAD.unpack(head) for head in (data, index) if len(head) == self.head]
        if any(magic == _DB_MAGIC and version not in (0, _DB_VERSION) for magic, version, _ in heads):
            return entries.FOREIGN
        is_known = heads and heads[0][:2] == (_DB_MAGIC, _DB_VERSION) and heads[0][2]
        is_pair = data == index and (not data or is_known)
        return None if is_pair else "the two files do not belong together: the next program drops every entry"

    def _read_record(self, record: bytes) -> Blob | None:
        beginning, length, _, begin = _DB_PLACED.unpack(record)
        is_placed = any(beginning) and length and self.head <= begin < 1 << 63
        return Blob(beginning.hex(), begin, length) if is_placed else None

    def _read_frame(self, frame: bytes) -> Blob:
        checksum, length = _DB_TAIL.unpack(frame[-_DB_TAIL.size :])
        return Blob(frame[: -_DB_TAIL.size].hex(), 0, length, checksum)

    def _describe(self, name: str, content: bytes, begin: int) -> tuple[bytes, bytes]:
        key, size = bytes.fromhex(name), len(content)
        # Like this clock, Mesa counts from the start of the machine.
        record = _DB_PLACED.pack(key[:8], size, time.monotonic_ns(), begin)
        return key + _DB_TAIL.pack(entries.checksum(content), size), record
