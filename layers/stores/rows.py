"""Rows of a sqlite file: counted, read, inserted and deleted without replacing the file.

A running program may have the file open; unlinking, replacing or truncating it would break that program. So a
:class:`RowFile` deletes rows and then frees the space with ``VACUUM``, in short transactions with a timeout. A full
file system has no room for the journal of such a transaction: if all rows are to be deleted, the file is emptied in
place (:mod:`cachectl.layers.stores.database`) under the same lock.

**Reading** changes nothing on disk. A database is read under sqlite's shared lock. Sqlite would create files next to
one in WAL mode, so that is read as immutable if it has no log, and with its log if another process has it open. An
interrupted write, or a log that is still to be applied, makes the content unknown: the next program that opens the
database for writing finishes it, as :meth:`RowFile.recover` does.

**Writing.** Sqlite opens its journal next to the database by name, rolls back what it finds there, and may delete
files. So nothing is opened for writing where another user could place or replace one
(:mod:`cachectl.layers.disk.trust`).
"""

from __future__ import annotations

import os
import shlex
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from operator import eq
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from cachectl.layers.base.environment import LOCK_TIMEOUT
from cachectl.layers.base.errors import (
    Busy,
    Damaged,
    EntryExists,
    LayerError,
    NoRoom,
    Pending,
    Refused,
    UnknownFormat,
    Unreachable,
)
from cachectl.layers.disk import atomic, handles, locks, plain, trust
from cachectl.layers.stores import database
from cachectl.layers.stores.table import MAKE_ROOM, Row, TableFile
from cachectl.layers.stores.tree_read import CHANGED

_MAGIC = b"SQLite format 3\0"
#: The largest version for writing or reading in a header: that of databases with a log.
_NEWEST = 2
#: The bytes that sqlite locks: those of waiting and active writers, and of readers.
_FIRST_LOCKED, _LOCKED_BYTES = 0x40000000, 512
_CHUNK = 1 << 20
#: Rows requested in one query: the oldest sqlite takes 999 values.
_REQUESTED_AT_ONCE = 200
#: Rows with their values that are read before writers may continue.
_READ_AT_ONCE = 50
NOT_STORABLE = "the key holds characters that a database cannot store"
#: The page size of a new file, in bytes.
_PAGE_SIZE = 4096
#: The values of a row, without its key.
Values = tuple[object, ...]


def as_bytes(value: object) -> bytes:
    """Return the bytes of a value; a library may have stored text, which connections decode reversibly."""
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")


class Schema(NamedTuple):
    """One table: its ``create`` statements, key columns and value columns, and how a row is one key and one content.

    ``key`` and ``values`` are column names; ``size`` is the SQL expression of a row's bytes. ``split`` returns the
    columns of a key, and ``join`` the key. ``unpack`` raises :class:`ValueError` for values that are not whole.
    ``same`` returns whether present values mean the same as new ones.
    """

    table: str
    create: tuple[str, ...]
    key: tuple[str, ...]
    values: tuple[str, ...]
    size: str
    split: Callable[[str], tuple[str, ...]] = lambda key: (key,)
    join: Callable[[Iterable[str]], str] = "".join
    pack: Callable[[bytes], Values] = lambda content: (content,)
    unpack: Callable[[Values], bytes] = lambda values: as_bytes(values[0])
    same: Callable[[Values, Values], bool] = eq

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns, key first."""
        return self.key + self.values


class RowFile(TableFile):
    """One sqlite file of one schema. Locks are awaited ``lock_timeout`` seconds; ``shared`` trusts other writers."""

    def __init__(
        self, layer: str, path: Path, schema: Schema, lock_timeout: float = LOCK_TIMEOUT, *, shared: bool = False
    ) -> None:
        super().__init__(layer, path)
        self.schema = schema
        self.lock_timeout = lock_timeout
        self.shared = shared

    def sum(self) -> tuple[int, int]:
        """Return the number of rows and their bytes."""
        query = f"select count(*), coalesce(sum({self.schema.size}), 0) from {self.schema.table}"
        with self._reading() as connection:
            return (0, 0) if _is_new(connection) else connection.execute(query).fetchone()

    def rows(self) -> list[Row]:
        """Return every row's key and size, in the order of insertion."""
        with self._reading() as connection:
            return self._rows_of(connection)

    def rows_with(self, part: bytes = b"") -> Iterator[tuple[Row, Values]]:
        """Yield every row with its values; of blobs only those that contain ``part``."""
        width = len(self.schema.key)
        query = f"{self._selection(self.schema.columns)} where rowid > ? order by rowid limit {_READ_AT_ONCE}"
        with self._reading() as connection:
            last = -(1 << 63)
            while fetched := [] if _is_new(connection) else connection.execute(query, (last,)).fetchall():
                for rowid, size, *rest in fetched:
                    if not part or any(not isinstance(value, bytes) or part in value for value in rest[width:]):
                        yield self._row(rowid, size, *rest[:width]), tuple(rest[width:])
                last = fetched[-1][0]

    def read(self, keys: Sequence[str]) -> list[bytes | LayerError | None]:
        """Return the content of several rows, read a few at a time so that writers need not wait for all of them."""
        with self._translated():
            if plain.status_at(self.path) is None:
                return [None for _ in keys]
        split = [self.schema.split(key) for key in keys]
        with self._reading() as connection:
            fetched = {} if _is_new(connection) else self._rows_in(connection, split)
        contents: list[bytes | LayerError | None] = []
        for key in split:
            try:
                contents.append(self.schema.unpack(fetched[key]) if key in fetched else None)
            except (LayerError, ValueError) as error:  # noqa: PERF203 - one must not end the rest
                contents.append(error if isinstance(error, LayerError) else Damaged(self.layer, str(error), self.path))
        return contents

    def check(self) -> bool:
        """Return whether a file has the table. Raises :class:`Damaged` if it fails sqlite's own check."""
        with self._reading() as connection:
            stated, size = database.stated_size(self.path), self.path.stat().st_size
            # Sqlite fills the rest of the last page with zeros, and ignores what follows it.
            if size < stated:
                raise Damaged(self.layer, f"the file was cut to {size:,} of {stated:,} bytes", self.path)
            (verdict,) = connection.execute("pragma quick_check(1)").fetchone()
            has_table = not _is_new(connection)
        if verdict != "ok":
            raise self._damaged(str(verdict))
        return has_table

    def insert(self, rows: Sequence[tuple[str, bytes]], *, replace: bool = False) -> list[bool | LayerError]:
        """Insert rows in one transaction; make file and table if missing."""
        names = ", ".join(f'"{column}"' for column in self.schema.columns)
        places = ", ".join("?" for _ in self.schema.columns)
        otherwise = "replace" if replace else "ignore"
        insertion = f"insert or {otherwise} into {self.schema.table} ({names}) values ({places})"
        split = [(self.schema.split(key), self.schema.pack(content)) for key, content in rows]
        results: list[bool | LayerError] = []
        with self._writing(make=True) as connection:
            connection.execute("begin immediate")
            for statement in self.schema.create if _is_new(connection) else ():
                connection.execute(statement)
            present = self._rows_in(connection, [key for key, _ in split])
            for key, values in split:
                if not _spellable(key):
                    results.append(Damaged(self.layer, NOT_STORABLE, self.path))
                    continue
                is_free = key not in present or (replace and not self.schema.same(present[key], values))
                is_new = is_free and connection.execute(insertion, (*key, *values)).rowcount == 1
                # A row that was just inserted may be in the way if the table considers two keys equal.
                existing = values if is_new else present.get(key) or self._rows_in(connection, [key]).get(key, ())
                present[key] = existing
                if is_new or self.schema.same(existing, values):
                    results.append(is_new)
                else:
                    results.append(EntryExists(self.layer, self.path))
            connection.execute("commit")
        return results

    def delete(self, rows: Iterable[Row]) -> frozenset[Row]:
        """Delete exactly these rows in one transaction, except those that have changed; return the deleted ones."""
        planned = frozenset(rows)
        with self._writing() as connection:
            connection.execute("begin immediate")
            try:
                existing = frozenset(self._rows_of(connection))
                deleted = planned & existing
                if deleted and deleted == existing:
                    # Without a condition sqlite drops whole pages instead of single rows.
                    connection.execute(f"delete from {self.schema.table}")
                else:
                    places = ((row.rowid,) for row in deleted)
                    connection.executemany(f"delete from {self.schema.table} where rowid = ?", places)
                connection.execute("commit")
            except sqlite3.OperationalError as error:
                deleted = frozenset(self._empty(connection, error, planned.issuperset))
            return deleted

    def vacuum(self) -> str | None:
        """Free the disk space of deleted rows; return why that failed, or ``None``."""
        try:
            with self._writing() as connection:
                try:
                    if not self._rows_of(connection):
                        # A few pages are copied, for which the temporary folder may have no room.
                        connection.execute("pragma temp_store = memory")
                    # A file that was emptied in place has smaller pages.
                    connection.execute(f"pragma page_size = {_PAGE_SIZE}")
                    connection.execute("vacuum")
                except sqlite3.OperationalError as error:
                    self._empty(connection, error, lambda rows: not rows)
        except (Busy, NoRoom) as error:
            reason = "it is too busy" if isinstance(error, Busy) else "there is no room"
            return f"its rows were deleted, but {reason} to shrink the file now"
        return None

    def _empty(
        self, connection: sqlite3.Connection, error: sqlite3.Error, may_go: Callable[[list[Row]], bool]
    ) -> list[Row]:
        """Empty the file in place after an error for lack of room; return its rows.

        Raises the error if it has another reason, or the file cannot be emptied. ``may_go`` returns whether these rows
        may be deleted, and is called under sqlite's exclusive lock.
        """
        if connection.in_transaction:
            connection.execute("rollback")
        if not self._lacks_room(error):
            raise error
        connection.execute("begin exclusive")
        try:
            rows = self._rows_of(connection)
            (page_size,) = connection.execute("pragma page_size").fetchone()
            fetched = connection.execute("select rootpage, type, tbl_name from sqlite_master").fetchall()
            roots = {root: kind for root, kind, table in fetched if table == self.schema.table}
            with plain.opened_locked(self.path, flags=os.O_RDWR) as handle:
                image = database.empty_image(os.pread(handle, page_size, 0), roots)
                if image is None or len(roots) != len(fetched) or not may_go(rows):
                    raise error
                database.write_empty(handle, image, len(roots))
            return rows
        finally:
            connection.execute("rollback")

    def recover(self) -> None:
        """Make sqlite finish an interrupted write or apply a log, if there is one, and remove an empty journal."""
        if not database.has_journal(self.path) and not database.has_log(self.path):
            return
        with self._writing() as connection:
            if database.has_journal(self.path):
                connection.execute("begin exclusive")
                # Sqlite leaves a journal that has no content yet. The lock ensures that nobody else uses it.
                atomic.remove_file(database.companion(self.path, "-journal"))
                connection.execute("rollback")

    def remove_damaged(self, stamp: tuple[int, ...], in_use: Callable[[Path], str | None]) -> str | None:
        """Remove the file under sqlite's exclusive lock: a program that opens it now waits, and reads nothing."""
        with suppress(Damaged):
            # An interrupted write may hold the pages that are damaged now.
            self.recover()
        with suppress(Damaged):
            self.check()
            return self.changed_since(stamp)
        with self._translated("remove"):
            self._require_private()
            if (reason := in_use(self.path)) is not None:
                return reason
            with plain.opened_locked(self.path, flags=os.O_RDWR) as handle:
                # Nobody had it open: a program that has locked it has opened it since, and must not be waited for.
                if not handles.try_record_lock(handle, _LOCKED_BYTES, _FIRST_LOCKED):
                    raise self._locked_too_long(0)
                if database.file_stamp(self.path) != stamp:
                    return CHANGED
                # The database first: sqlite ignores a log without one, and would apply it to the next one.
                for suffix in ("", *database.COMPANIONS):
                    atomic.remove_file(database.companion(self.path, suffix))
        return None

    def _selection(self, columns: Sequence[str]) -> str:
        names = ", ".join(f'"{column}"' for column in columns)
        return f"select rowid, {self.schema.size}, {names} from {self.schema.table}"

    def _rows_of(self, connection: sqlite3.Connection) -> list[Row]:
        if _is_new(connection):
            return []
        query = f"{self._selection(self.schema.key)} order by rowid"
        return [self._row(*fetched) for fetched in connection.execute(query)]

    def _row(self, rowid: object, size: object, *key: object) -> Row:
        """Make a row from a query result. Raises :class:`sqlite3.DatabaseError` for values of a file that was cut."""
        if not isinstance(rowid, int) or not isinstance(size, int):
            raise sqlite3.DatabaseError("a row has no size")
        return Row(rowid, self.schema.join(map(str, key)), size)

    def _rows_in(self, connection: sqlite3.Connection, keys: Sequence[Sequence[str]]) -> dict[tuple[str, ...], Values]:
        """Return the values of the keys that have a row."""
        keys = list(filter(_spellable, keys))
        names = [f'"{column}"' for column in self.schema.columns]
        requested = [f'"requested {column}"' for column in self.schema.key]
        width = len(requested)
        # The requested keys are returned, because a column may compare differently from Python.
        same = " and ".join(f"{name} = {key}" for name, key in zip(names, requested, strict=False))
        query = f"select {', '.join(requested + names[width:])} from requested join {self.schema.table} where {same}"
        place = f"({', '.join('?' * width)})"
        fetched: dict[tuple[str, ...], Values] = {}
        for first in range(0, len(keys), _REQUESTED_AT_ONCE):
            some = keys[first : first + _REQUESTED_AT_ONCE]
            table = f"with requested({', '.join(requested)}) as (values {', '.join(place for _ in some)})"
            for row in connection.execute(f"{table} {query}", [part for key in some for part in key]):
                fetched.setdefault(row[:width], row[width:])
        return fetched

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._translated():
            header = plain.read_locked(self.path, limit=database.HEADER)
            if header and not header.startswith(_MAGIC):
                raise sqlite3.DatabaseError("file is not a database")
            has_log = database.has_log(self.path)
            if has_log and not database.is_open_elsewhere(self.path):
                raise self._pending()
            log = database.companion(self.path, "-wal")
            unlocked = not has_log and (database.is_wal(header) or database.size_of(log) is not None)
            before = database.file_stamp(self.path) if unlocked else ()
            try:
                with self._connected("mode=ro&immutable=1" if unlocked else "mode=ro") as connection:
                    yield connection
            except sqlite3.DatabaseError as error:
                if unlocked and (database.has_log(self.path) or database.file_stamp(self.path) != before):
                    raise Busy(self.layer, "was written to while it was read; try again later", self.path) from error
                raise

    @contextmanager
    def _writing(self, *, make: bool = False) -> Iterator[sqlite3.Connection]:
        with self._translated():
            self._require_private()
            if make:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # Sqlite takes an empty file for a new database.
                with suppress(FileExistsError):
                    os.close(atomic.create(str(self.path), mode=0o644))
            with self._connected("mode=rw") as connection:
                connection.execute("pragma secure_delete = off")
                yield connection
                # Where another program has the database open too, its log stays, and would make the content unknown.
                with suppress(sqlite3.OperationalError):
                    connection.execute("pragma wal_checkpoint(truncate)")

    @contextmanager
    def _connected(self, mode: str) -> Iterator[sqlite3.Connection]:
        # Sqlite must not open a link or a pipe.
        plain.plain_status(self.path)
        for suffix in database.COMPANIONS:
            # Another program may remove its journal at any moment.
            with suppress(FileNotFoundError):
                plain.plain_status(database.companion(self.path, suffix))
        file, wait = f"file:{quote(os.fsencode(self.path))}?{mode}", self.lock_timeout
        opened = sqlite3.connect(file, timeout=wait, uri=True, isolation_level=None, check_same_thread=False)
        with closing(opened) as connection:
            connection.text_factory = lambda data: data.decode(errors="surrogateescape")
            connection.execute("pragma trusted_schema = off")
            connection.execute("pragma cell_size_check = on")
            if (foreign := database.foreign_object(connection, self.schema.create)) is not None:
                # A later release may make its table differently.
                refusal = UnknownFormat if foreign == f"table {self.schema.table!r}" else Refused
                raise refusal(self.layer, f"holds a {foreign} that its library does not make; left alone", self.path)
            yield connection

    def _require_private(self) -> None:
        """Raise :class:`Unreachable` if another user can write to the database, existing or not, or a folder above."""
        folder = plain.nearest(self.path.parent)
        names = tuple(self.path.name + suffix for suffix in ("", *database.COMPANIONS))
        reason = None if self.shared else trust.shared_because(folder, names if folder == self.path.parent else ())
        if reason is not None:
            message = f"not opened for writing: {reason}; close it to them first, or use --shared if you trust them"
            raise Unreachable(self.layer, message, self.path)

    @contextmanager
    def _translated(self, verb: str = "open") -> Iterator[None]:
        try:
            with self.translated(verb):
                yield
        except sqlite3.DatabaseError as error:
            raise self._error_of(error) from error

    def _error_of(self, error: sqlite3.DatabaseError) -> LayerError:
        text = str(error)
        if not isinstance(error, sqlite3.OperationalError) or "no such column" in text or "malformed" in text:
            return self._damaged(f"not a usable database: {text}")
        if "locked" in text or "busy" in text:
            return self._locked_too_long(self.lock_timeout)
        if database.has_journal(self.path) and ("readonly" in text or "unable to open" in text):
            return self._pending()
        if self._lacks_room(error):
            return NoRoom(self.layer, f"sqlite cannot write: {text}{MAKE_ROOM}", self.path)
        advice = "; make the file and its folder writable" if "readonly" in text else ""
        return Unreachable(self.layer, f"sqlite cannot use it: {text}{advice}", self.path)

    def _lacks_room(self, error: sqlite3.Error) -> bool:
        text = str(error)
        # Sqlite reports a used-up quota as an I/O error, and missing inodes as a file it cannot open.
        if "disk I/O error" in text or "unable to open" in text:
            try:
                handles.probe_room(self.path.parent)
            except OSError as cause:
                return cause.errno in handles.NO_ROOM
        return "disk is full" in text

    def _locked_too_long(self, seconds: float) -> Busy:
        # A database in WAL mode is locked in its index.
        index, advice = database.companion(self.path, "-shm"), "; try again later, or use --wait"
        return locks.busy(self.layer, seconds, self.path, index, advice=advice)

    def _pending(self) -> Pending:
        pending = "a log is pending" if database.has_log(self.path) else "an interrupted write is pending"
        command = f"sqlite3 {shlex.quote(str(self.path))} .tables"
        message = f"{pending}; the next program that opens the database finishes it, as does: {command}"
        return Pending(self.layer, message, self.path)

    def _damaged(self, message: str) -> LayerError:
        """Return that the file is damaged, unless it cannot be read to its end or is of a later version of sqlite."""
        try:
            with plain.opened_locked(self.path) as handle:
                header = os.pread(handle, database.HEADER, 0)
                if header.startswith(_MAGIC) and max(header[18:20]) > _NEWEST:
                    return UnknownFormat(self.layer, "is of a later version of sqlite; left alone", self.path)
                position = 0
                while chunk := os.pread(handle, _CHUNK, position):
                    position += len(chunk)
        except OSError as error:
            return Unreachable(self.layer, f"cannot be read: {error.strerror or error}", self.path)
        return Damaged(self.layer, message, self.path)


def _is_new(connection: sqlite3.Connection) -> bool:
    """Return whether a file has no table yet; the library makes them when it opens the file."""
    return connection.execute("select 1 from sqlite_master limit 1").fetchone() is None


def _spellable(key: Sequence[str]) -> bool:
    """Return whether a key can be bound: undecodable bytes of a command line cannot."""
    try:
        return all(part.encode() is not None for part in key)
    except UnicodeEncodeError:
        return False
