"""Mesa's larger files: pairs of a data file with many entries and its index.

They are changed under the locks of Mesa's writers. A program with an open single file remembers the places of entries,
so a new pair of files is renamed over the old one, which the program continues to use. A database is changed in place,
as by Mesa: its number is zero during the change and new afterwards, so every program reads the index again.

Since Mesa 26 the keys of a database have 32 bytes instead of 20, under the same version; a database that is older than
an upgrade has frames of both kinds. The names of a single file kept 40 digits: the first 20 bytes of a key. A removal
cuts out exactly the bytes of entries, and carries over all others. A file whose index lists what no known format
explains is not changed.

Sources: ``src/util/fossilize_db.c`` and ``.h`` (single file), ``src/util/mesa_cache_db.c`` (database),
``src/util/disk_cache.h`` (``CACHE_KEY_SIZE``).
"""

from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

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
_DB_MAGIC = b"MESA_DB\0"
_DB_VERSION = 1
#: Magic, version, and a number that is equal in files that belong together, and 0 while they are changed.
_DB_HEAD = struct.Struct("<8sIQ")
#: After the key in a frame: checksum, length.
_DB_TAIL = struct.Struct("<II")
#: First bytes of the key, length, last use (ns since the machine started), place.
_DB_PLACED = struct.Struct("<QIQQ")
#: The end of a record in every index.
_END_OF_RECORD = struct.Struct("<Q")
_UNKNOWN = "its index lists entries in a format that this cachectl does not know; left alone"
_MIXED = "the database has keys of another length, and Mesa drops every entry of one with both; move it away first"


class Blob(NamedTuple):
    """An entry in a data file: ``begin`` is the offset of its frame, which its own bytes follow.

    ``frame`` is the length of the frame, ``record`` the entry's record in the index.
    """

    name: str
    begin: int
    length: int
    checksum: int = 0
    used: int = 0
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
    """The entries that an index lists, in the order of the index and of the data file.

    ``lost`` counts listed entries of which the data file has only a part or zeros, with any length of keys; ``unknown``
    counts those that no known format explains.
    """

    blobs: list[Blob]
    lost: int
    unknown: int

    @property
    def by_name(self) -> dict[str, Blob]:
        """Return the entries by name: a later one overrides an earlier one, as in Mesa's table."""
        return {blob.name: blob for blob in self.blobs}


class PairFormat(ABC):
    """The bytes of a data file and its index."""

    data_name: str
    index_name: str
    #: The length of the head of a file.
    head: int
    #: The possible lengths of what precedes an entry, and a record of the index.
    frames: tuple[int, ...]
    placed: struct.Struct
    #: Whether both files are changed in place, as by Mesa: after an interruption the number is zero, and Mesa empties
    #: both. Then no name may be listed twice: Mesa reads the last one, but expects contiguous frames when it next makes
    #: room, and would drop every entry.
    in_place: bool

    @abstractmethod
    def new_head(self) -> bytes:
        """Return the head of both files, with a new number if it has one."""

    @abstractmethod
    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Return why Mesa would not use files with these heads, or ``None``. It fills an empty index."""

    @abstractmethod
    def read_record(self, record: tuple[int | bytes, ...]) -> Blob | None:
        """Return what a record of the index states; ``None`` if it is not that of an entry with a place."""

    @abstractmethod
    def read_frame(self, frame: bytes) -> Blob:
        """Return what the frame of an entry says."""

    @abstractmethod
    def write_frame(self, name: str, content: bytes) -> bytes:
        """Return the frame of an entry."""

    @abstractmethod
    def write_record(self, blob: Blob) -> bytes:
        """Return the record of an entry in the index."""


class Pair(TableFile):
    """A data file with its index. A row is an entry: its key is the name, its id the checksum."""

    #: The descriptors of both files while they are open, of their folder, and of the root, where files are staged.
    data: int
    index: int
    folder: int
    top: int
    #: The number of entries that a removal has kept so far, once files have changed.
    left: int | None = None

    def __init__(self, layer: str, root: Path, file: str, form: PairFormat, lock_timeout: float) -> None:
        super().__init__(layer, root / file)
        self.root = root
        self.form = form
        self.paths = (self.path, self.path.with_name(form.index_name))
        self.lock_timeout = lock_timeout
        #: The number of entries before a deletion.
        self.before = 0

    def blobs(self) -> list[Blob]:
        """Return the entries. Raises :class:`LayerError` if Mesa would not use the files."""
        with self._opened() as is_there:
            return [*self._listed().by_name.values()] if is_there else []

    def content(self, blob: Blob, limit: int = LARGEST_ENTRY) -> bytes:
        """Read an entry, or its first ``limit`` bytes; nothing if the files are missing."""
        with self._opened() as is_there:
            return self._content(blob, limit) if is_there else b""

    def rows(self) -> list[Row]:
        """Return the entries as rows."""
        return [blob.row for blob in self.blobs()]

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
            if is_there and (lost := self._understood().lost):
                message = f"its index lists {lost} entries that the data file lacks"
                raise Damaged(self.layer, message, self.path)
            return is_there

    def _content(self, blob: Blob, limit: int = LARGEST_ENTRY) -> bytes:
        if blob.length > limit == LARGEST_ENTRY:
            raise Unreachable(self.layer, f"an entry {too_large(blob.length, limit)}", self.path)
        return os.pread(self.data, min(limit, blob.length), blob.begin + blob.frame)

    def _understood(self) -> Index:
        """Return the index as :meth:`_listed` does. Raises :class:`Refused` if a part of it is not understood."""
        index = self._listed()
        if index.unknown:
            raise UnknownFormat(self.layer, _UNKNOWN, self.path)
        return index

    def _listed(self) -> Index:
        """Read the index, and the frame of each entry. Raises :class:`LayerError` if Mesa would not use the files."""
        form, placed = self.form, self.form.placed
        heads = (os.pread(handle, form.head, 0) for handle in (self.data, self.index))
        if (reason := form.complaint(*heads)) is not None:
            raise (UnknownFormat if reason == entries.FOREIGN else Damaged)(self.layer, reason, self.path)
        _, size = self._sizes()
        if size > LARGEST_INDEX:
            raise Unreachable(self.layer, f"the index {too_large(size, LARGEST_INDEX)}", self.path)
        content = os.pread(self.index, size, form.head)
        # Programs write an entry before its record.
        end, _ = self._sizes()
        blobs: list[Blob] = []
        lost, unknown, behind, following = 0, 0, form.head, [form.head]
        for at in range(0, len(content), placed.size):
            record = content[at : at + placed.size]
            stated = form.read_record(placed.unpack(record)) if len(record) == placed.size else None
            if stated is None or stated.begin < behind:
                # Zeros are what a power failure leaves.
                lost, unknown = (lost, unknown + 1) if any(record) else (lost + 1, unknown)
                continue
            blob, is_cut = self._placed(stated, record, end)
            if blob is not None:
                blobs.append(blob)
                behind = blob.end
            elif is_cut and (not stated.length or stated.begin in following):
                lost += 1
            else:
                unknown += 1
            following = [stated.begin + frame + stated.length for frame in form.frames]
        return Index(blobs, lost, unknown)

    def _placed(self, stated: Blob, record: bytes, end: int) -> tuple[Blob | None, bool]:
        """Return the entry that a record of the index states, or ``None`` and whether it was cut or zeroed.

        Its key has the length with which name and length match the record; of two, the one that fits the checksum.
        """
        head = os.pread(self.data, max(self.form.frames), stated.begin) if stated.begin <= end else b""
        same: list[Blob] = []
        for size in self.form.frames:
            if size <= len(head):
                blob = self.form.read_frame(head[:size])
                if blob.name.startswith(stated.name) and stated.length in (0, blob.length):
                    same.append(blob._replace(begin=stated.begin, frame=size, record=record))
        whole = [blob for blob in same if blob.end <= end]
        fitting = [blob for blob in whole if len(whole) == 1 or entries.checksum(self._content(blob)) == blob.checksum]
        is_cut = bool(same) or stated.begin + min(self.form.frames) + stated.length > end or not any(head)
        return (fitting[0], False) if len(fitting) == 1 else (None, is_cut and not whole)

    def _sizes(self) -> tuple[int, int]:
        return os.fstat(self.data).st_size, os.fstat(self.index).st_size

    def size(self) -> int:
        """Return the bytes of both files."""
        return sum(sum(database.sizes_of(path)) for path in self.paths)

    def gone(self, rows: Iterable[Row]) -> int:
        """Return how many entries are missing: more than planned if Mesa cannot use the files any more."""
        try:
            left = len(self.blobs())
        except Damaged:
            left = 0
        except LayerError:
            # Nothing can be read any more, but the files have changed.
            if self.left is None:
                raise
            left = self.left
        return max(0, self.before - left)

    def delete(self, rows: Iterable[Row]) -> frozenset[Row]:
        """Remove entries, except those that have changed; return the removed ones."""
        planned = frozenset(rows)
        with self._changing() as is_there:
            index = self._understood() if is_there else Index([], 0, 0)
            listed = [*index.by_name.values()]
            self.before = len(listed)
            kept = frozenset(blob for blob in listed if blob.row not in planned)
            if len(kept) < len(listed):
                self._keep(index.blobs, kept)
            return planned.intersection(blob.row for blob in listed)

    def insert(self, rows: Sequence[tuple[str, bytes]], *, replace: bool = False) -> list[bool | LayerError]:
        """Add entries one by one."""
        # Then nothing changes, even if the files are locked or closed to this user.
        if self.read([name for name, _ in rows]) == [entry for _, entry in rows]:
            return [False for _ in rows]
        results: list[bool | LayerError] = []
        with self._changing(make=True):
            if not any(self._sizes()):
                self._write_heads(self.form.new_head())
            listed = self._understood().by_name
            for name, entry in rows:
                if listed and all(len(name) != len(existing) for existing in listed):
                    results.append(Refused(self.layer, _MIXED, self.path))
                    continue
                existing = self._content(listed[name]) if name in listed else None
                if existing not in (None, entry) and not replace:
                    results.append(EntryExists(self.layer, self.path))
                    continue
                try:
                    if existing != entry:
                        with self.translated("change"):
                            if existing is not None and self.form.in_place:
                                blobs = self._understood().blobs
                                self._keep(blobs, frozenset(blob for blob in blobs if blob.name != name))
                                listed = self._understood().by_name
                            self._append(name, entry)
                except LayerError as error:
                    # The earlier ones are in place, and there may be room for a smaller one.
                    results.append(error)
                else:
                    results.append(existing != entry)
        return results

    def _append(self, name: str, content: bytes) -> None:
        """Add a complete entry, or leave both files as they were."""
        ends = dict(zip((self.data, self.index), self._sizes(), strict=True))
        # Like this clock, Mesa counts from the start of the machine.
        record = self.form.write_record(Blob(name, ends[self.data], len(content), 0, time.monotonic_ns()))
        try:
            for handle, added in ((self.data, self.form.write_frame(name, content) + content), (self.index, record)):
                # Without an index Mesa writes its head.
                atomic.write_all(handle, (b"" if ends[handle] else self.form.new_head(), added), ends[handle])
                os.fsync(handle)
        except OSError:
            for handle, end in ends.items():
                with suppress(OSError):
                    atomic.cut(handle, end)
            raise

    def remove_damaged(self, stamp: tuple[int, ...], in_use: Callable[[Path], str | None]) -> str | None:
        """Remove both files under their locks."""
        with suppress(Damaged):
            self.check()
            return self.changed_since(stamp)
        if (reason := in_use(self.path)) is not None:
            return reason
        with self._changing():
            if database.file_stamp(self.path) != stamp:
                return CHANGED
            for path in self.paths:
                atomic.remove_file(path.name, self.folder)
        return None

    def _keep(self, blobs: list[Blob], kept: frozenset[Blob]) -> None:
        """Remove all entries but some from both files, which are open."""
        form = self.form
        if form.in_place:
            self._write_heads(form.new_head()[:-8] + bytes(8))
            # Mesa drops all entries after such heads.
            self.left = 0
            self._copy(blobs, kept, self.data, self.index)
            self._write_heads(form.new_head())
            return
        # New files are renamed over the old ones; between the steps programs find nothing rather than wrong bytes.
        with ExitStack() as stack:
            stage = stack.enter_context(atomic.own_folder(self.top, plain.STAGE))
            staged, mode = [], os.fstat(self.data).st_mode & 0o777
            for name in ("empty", "data", "index"):
                staged.append(atomic.create(name, stage, mode))
                stack.callback(os.close, staged[-1])
                atomic.write_all(staged[-1], (form.new_head(),), 0)
            self._copy(blobs, kept, *staged[1:])
            os.fsync(staged[0])
            for name, place in (("empty", form.index_name), ("data", form.data_name), ("index", form.index_name)):
                atomic.move_in(name, stage, place, self.folder)
            self.left = len(kept)
            os.fsync(self.folder)

    def _copy(self, blobs: list[Blob], kept: frozenset[Blob], data: int, index: int) -> None:
        """Write a data file without the entries that are not kept but with all other bytes, and the index."""
        source = target = head = self.form.head
        records = b""
        for blob in (*blobs, Blob("", self._sizes()[0], 0)):
            if blob in kept:
                (place,) = _END_OF_RECORD.unpack(blob.record[-_END_OF_RECORD.size :])
                records += blob.record[: -_END_OF_RECORD.size] + _END_OF_RECORD.pack(place - source + target)
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
    def _opened(self) -> Iterator[bool]:
        """Open both files for reading; yield whether they exist."""
        with self.translated("read"), ExitStack() as stack:
            opened = []
            with suppress(FileNotFoundError):
                for path in self.paths if self._enter(stack, make=False) else ():
                    opened.append(plain.open_plain(path.name, dir_fd=self.folder))
                    stack.callback(os.close, opened[-1])
            is_there = len(opened) == len(self.paths)
            if is_there:
                self.data, self.index = opened
            yield is_there

    def _enter(self, stack: ExitStack, *, make: bool) -> bool:
        """Open the root and the folder of the files without following links below it; return whether it exists."""
        top = stack.enter_context(handles.opened_root(self.root))
        if top is None:
            return False
        parts = self.path.relative_to(self.root).parts[:-1]
        folder = stack.enter_context(handles.open_below(top, parts, make=make))
        if folder is not None:
            self.top, self.folder = top, folder
        return folder is not None

    @contextmanager
    def _changing(self, *, make: bool = False) -> Iterator[bool]:
        """Open both files, and lock them against Mesa and other cachectls; yield whether they exist."""
        with self.translated("change"), ExitStack() as stack:
            if make:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = []
            # Mesa locks in this order.
            for path in self.paths if self._enter(stack, make=make) else ():
                if make:
                    with suppress(FileExistsError):
                        os.close(atomic.create(path.name, self.folder, 0o644))
                lock = locks.file_lock(self.layer, path, folder=self.folder, lock_timeout=self.lock_timeout)
                if (handle := stack.enter_context(lock)) is not None:
                    opened.append(handle)
            is_there = len(opened) == len(self.paths)
            if is_there:
                self.data, self.index = opened
            elif make:
                raise Unreachable(self.layer, "cannot be made", self.path)
            yield is_there


class Fossilize(PairFormat):
    """The single-file store of one driver and device (``MESA_DISK_CACHE_SINGLE_FILE``)."""

    data_name, index_name, in_place = "foz_cache.foz", "foz_cache_idx.foz", False
    head, frames, placed = len(_MAGIC), (_FRAME.size,), _PLACED

    def new_head(self) -> bytes:
        """Return magic number and version."""
        return _MAGIC

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Check the magic numbers; a file that was cut has none, or a zero in it."""
        if any(head[:-1] == _MAGIC[:-1] and head[-1] and head not in _MAGICS for head in (index, data)):
            return entries.FOREIGN
        is_whole = all(head in (b"", *_MAGICS) for head in (index, data)) and bool(data or not index)
        return None if is_whole else "a file lacks Mesa's header, so Mesa stores and finds nothing there"

    def read_record(self, record: tuple[int | bytes, ...]) -> Blob | None:
        """Return name and place; that in the record follows the name."""
        name, size, *_, place = record
        if not isinstance(name, bytes) or size != _PLACE_SIZE or not _NAME.fullmatch(name):
            return None
        return Blob(name.decode(), int(place) - len(name), 0)

    def read_frame(self, frame: bytes) -> Blob:
        """Return name, length and checksum."""
        name, length, _, checksum, _ = _FRAME.unpack(frame)
        return Blob(name.decode("latin-1"), 0, length, checksum)

    def write_frame(self, name: str, content: bytes) -> bytes:
        """Return name and header."""
        size = len(content)
        return _FRAME.pack(name.encode(), size, _PLAIN, entries.checksum(content), size)

    def write_record(self, blob: Blob) -> bytes:
        """Return name, header and place."""
        return _PLACED.pack(blob.name.encode(), _PLACE_SIZE, _PLAIN, 0, _PLACE_SIZE, blob.begin + len(blob.name))


class Database(PairFormat):
    """One part of Mesa's database (``MESA_DISK_CACHE_DATABASE``)."""

    data_name, index_name, in_place = "mesa_cache.db", "mesa_cache.idx", True
    head, placed = _DB_HEAD.size, _DB_PLACED
    frames = tuple(size + _DB_TAIL.size for size in entries.KEY_SIZES)

    def new_head(self) -> bytes:
        """Return a head with a new number as Mesa makes it, never zero."""
        number = int(time.time()) << 32 | int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF
        return _DB_HEAD.pack(_DB_MAGIC, _DB_VERSION, number)

    def complaint(self, data: bytes, index: bytes) -> str | None:
        """Compare the heads. Mesa empties both files if they do not match."""
        heads = [_DB_HEAD.unpack(head) for head in (data, index) if len(head) == self.head]
        if any(magic == _DB_MAGIC and version not in (0, _DB_VERSION) for magic, version, _ in heads):
            return entries.FOREIGN
        if data == index and (not data or (heads and heads[0][:2] == (_DB_MAGIC, _DB_VERSION) and heads[0][2])):
            return None
        return "the two files do not belong together: the next program drops every entry"

    def read_record(self, record: tuple[int | bytes, ...]) -> Blob | None:
        """Return the beginning of the name, length and place."""
        beginning, length, _, begin = map(int, record)
        if not (beginning and length and self.head <= begin < 1 << 63):
            return None
        return Blob(beginning.to_bytes(8, "little").hex(), begin, length)

    def read_frame(self, frame: bytes) -> Blob:
        """Return name, length and checksum."""
        checksum, length = _DB_TAIL.unpack(frame[-_DB_TAIL.size :])
        return Blob(frame[: -_DB_TAIL.size].hex(), 0, length, checksum)

    def write_frame(self, name: str, content: bytes) -> bytes:
        """Return key, checksum and length."""
        return bytes.fromhex(name) + _DB_TAIL.pack(entries.checksum(content), len(content))

    def write_record(self, blob: Blob) -> bytes:
        """Return the beginning of the key, length, last use and place."""
        beginning = int.from_bytes(bytes.fromhex(blob.name)[:8], "little")
        return _DB_PLACED.pack(beginning, blob.length, blob.used, blob.begin)
