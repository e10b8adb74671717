"""Rows of a sqlite file: counted, read, inserted and deleted without replacing the file.

A running program may have the file open; unlinking, replacing or truncating it would break that program. So a
:class:`RowFile` deletes rows and then frees the space with ``VACUUM``, in short transactions with a timeout. A full
file system has no room for the journal of such a transaction: if all rows are to be deleted, the file is emptied in
place (:mod:`cachectl.layers.stores.emptying`) under the same lock.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.environment import LOCK_TIMEOUT
from cachectl.layers.base.errors import Busy, Damaged, EntryExists, LayerError, NoRoom, Unreachable
from cachectl.layers.base.facts import Orphan
from cachectl.layers.disk.atomic import remove_file
from cachectl.layers.disk.handles import NO_ROOM, lacks_room
from cachectl.layers.disk.plain import open_plain, release
from cachectl.layers.disk.presence import is_there
from cachectl.layers.stores.database import (
    COMPANIONS,
    companion,
    exclusively_locked,
    file_stamp,
    has_journal,
    has_log,
    locked_too_long,
    opened_for_reading,
    opened_for_writing,
    pending,
    require_made_by,
    require_private,
    require_readable,
)
from cachectl.layers.stores.emptying import empty_image, write_empty

#: Rows asked for in one query: the oldest sqlite takes 999 values.
_ASKED_AT_ONCE: Final = 200
#: Rows with their values that are read before writers may continue.
_READ_AT_ONCE: Final = 50
_FIRST: Final = -(1 << 63)
_MAKE_ROOM: Final = "; make room and try again"
#: The page size of a new file, in bytes.
_PAGE_SIZE: Final = 4096
CHANGED: Final = "changed since it was planned"

Values = tuple[object, ...]


class Schema(NamedTuple):
    """One table: its ``create`` statements, key columns and value columns.

    ``key`` and ``values`` are column names; ``size`` is the SQL expression of a row's bytes. ``table`` may be
    a query if rows are only read. ``others`` are further ``create`` statements of the library, of any version.
    """

    table: str
    create: tuple[str, ...]
    key: tuple[str, ...]
    values: tuple[str, ...]
    size: str
    others: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns, key first."""
        return self.key + self.values


class Row(NamedTuple):
    """The row id and size of one row; ``key`` has a value per key column."""

    rowid: int
    key: tuple[str, ...]
    bytes: int


class Weight(NamedTuple):
    """Row count and summed bytes of a table."""

    rows: int
    bytes: int


def _row(rowid: object, key: Sequence[object], size: object) -> Row:
    """Make a row from a query result. Raises :class:`sqlite3.DatabaseError` for values of a file that was cut."""
    if not isinstance(rowid, int) or not isinstance(size, int):
        raise sqlite3.DatabaseError("a row has no size")
    return Row(rowid, tuple(map(str, key)), size)


def _spellable(key: Sequence[str]) -> bool:
    """Return whether a key can be bound: undecodable bytes of a command line cannot."""
    try:
        return all(part.encode() is not None for part in key)
    except UnicodeEncodeError:
        return False


class RowFile:
    """One sqlite file holding rows of one schema.

    Every method raises :class:`Busy` if a lock outlasts ``lock_timeout`` seconds, :class:`Damaged` if the file
    is no database, :class:`Refused` if it holds what its library does not make, and :class:`Unreachable` if the
    operating system refuses or its content is unknown. ``shared`` says that other users who can write to it are
    trusted.
    """

    def __init__(
        self, layer: str, path: Path, schema: Schema, lock_timeout: float = LOCK_TIMEOUT, *, shared: bool = False
    ) -> None:
        self.layer = layer
        self.path = path
        self.schema = schema
        self.lock_timeout = lock_timeout
        self.shared = shared

    # ------------------------------------------------------------------ reading

    def sum(self) -> Weight:
        """Sum the rows."""
        query = f"select count(*), coalesce(sum({self.schema.size}), 0) from {self.schema.table}"
        with self._reading() as connection:
            return Weight(0, 0) if self._is_new(connection) else Weight(*connection.execute(query).fetchone())

    def rows(self) -> list[Row]:
        """Return every row's key and size, in the order of insertion."""
        with self._reading() as connection:
            return self._rows_of(connection)

    def settled_rows(self) -> list[Row]:
        """Return the rows that the next writing program finds: it finishes an interrupted write, or applies a log."""
        if not has_journal(self.path) and not has_log(self.path):
            return self.rows()
        with self._writing() as connection:
            return self._rows_of(connection)

    def rows_with(self, *columns: str, part: bytes = b"") -> Iterator[tuple[Row, Values]]:
        """Yield every row with some of its values; of blobs only those that contain ``part``."""
        names = ", ".join(f'"{column}"' for column in (*self.schema.key, *columns))
        query = (
            f"select rowid, {self.schema.size}, {names} from {self.schema.table} "
            f"where rowid > ? order by rowid limit {_READ_AT_ONCE}"
        )
        width = len(self.schema.key)
        with self._reading() as connection:
            last = _FIRST
            while found := [] if self._is_new(connection) else connection.execute(query, (last,)).fetchall():
                for rowid, size, *rest in found:
                    if not part or any(not isinstance(value, bytes) or part in value for value in rest[width:]):
                        yield _row(rowid, rest[:width], size), tuple(rest[width:])
                last = found[-1][0]

    def read(self, key: Sequence[str]) -> Values | None:
        """Return the value columns of a row, or ``None`` if there is no such row or file."""
        return self.read_many([key])[0]

    def read_many(self, keys: Sequence[Sequence[str]]) -> list[Values | None]:
        """Read several rows as :meth:`read` does, a few at a time, so that writing programs do not wait for all."""
        with self._translated():
            if not is_there(self.path):
                return [None for _ in keys]
        with self._reading() as connection:
            found = self._rows_in(connection, list(filter(_spellable, keys)))
            return [found.get(tuple(key)) for key in keys]

    def columns(self) -> frozenset[str]:
        """Return the names of the table's columns; none if there is no such table."""
        with self._reading() as connection:
            return frozenset(str(row[1]) for row in connection.execute(f"pragma table_info({self.schema.table})"))

    def require_sound(self) -> None:
        """Raise :class:`Damaged` for a file that sqlite's own check complains about."""
        with self._reading() as connection:
            (page_size,) = connection.execute("pragma page_size").fetchone()
            # Sqlite fills the rest of the last page with zeros.
            if (size := self.path.stat().st_size) % page_size:
                message = f"{size} bytes are no whole number of pages: the file was cut"
                raise Damaged(self.layer, message, self.path)
            verdict = str(connection.execute("pragma quick_check(1)").fetchone()[0])
        if verdict != "ok":
            require_readable(self.layer, self.path)
            raise Damaged(self.layer, verdict, self.path)

    # ------------------------------------------------------------------ writing

    def same(self, standing: Values, new: Values) -> bool:
        """Return whether present values mean the same as new ones."""
        return standing == new

    def insert(self, key: Sequence[str], values: Sequence[object], *, replace: bool) -> None:
        """Insert one row in one transaction, unless the same is present; make file and table if missing.

        Raises :class:`EntryExists` if a different row has the key and ``replace`` is not set.
        """
        if not _spellable(key):
            raise Damaged(self.layer, "the key holds characters that a database cannot store", self.path)
        if self.insert_new([(key, values)], replace=replace) == [None]:
            raise EntryExists(self.layer, self.path)

    def insert_new(
        self, rows: Sequence[tuple[Sequence[str], Sequence[object]]], *, replace: bool = False
    ) -> list[bool | None]:
        """Insert the rows with free keys in one transaction; with ``replace`` those too whose row is a different one.

        Returns for each: ``True`` if it was inserted, ``False`` if the same row was present, ``None`` if a different
        one is, which stays.
        """
        places = ", ".join("?" for _ in self.schema.columns)
        names = ", ".join(f'"{column}"' for column in self.schema.columns)
        otherwise = "replace" if replace else "ignore"
        insertion = f"insert or {otherwise} into {self.schema.table} ({names}) values ({places})"
        done: list[bool | None] = []
        with self._writing(create=True) as connection:
            connection.execute("begin immediate")
            for statement in self.schema.create if self._is_new(connection) else ():
                connection.execute(statement)
            present = self._rows_in(connection, [key for key, _ in rows])
            for key, values in ((tuple(key), tuple(values)) for key, values in rows):
                is_free = key not in present or (replace and not self.same(present[key], values))
                is_new = is_free and connection.execute(insertion, (*key, *values)).rowcount == 1
                # A row inserted just now may be in the way, if the table considers two keys equal.
                standing = values if is_new else present.get(key) or self._rows_in(connection, [key]).get(key, ())
                present[key] = standing
                done.append(True if is_new else False if self.same(standing, values) else None)
            connection.execute("commit")
        return done

    def delete(self, rows: Iterable[Row]) -> frozenset[Row]:
        """Delete exactly these rows in one transaction, each only if it is still the same; return those.

        Raises :class:`NoRoom` if there is no room for a journal, unless all rows are to be deleted.
        """
        planned = frozenset(rows)
        with self._writing() as connection:
            connection.execute("begin immediate")
            try:
                standing = frozenset(self._rows_of(connection))
                gone = planned & standing
                if gone and gone == standing:
                    # Without a condition sqlite drops whole pages instead of single rows.
                    connection.execute(f"delete from {self.schema.table}")
                else:
                    places = ((row.rowid,) for row in gone)
                    connection.executemany(f"delete from {self.schema.table} where rowid = ?", places)
                connection.execute("commit")
            except sqlite3.OperationalError as error:
                gone = frozenset(self._empty(connection, error, planned.issuperset))
            return gone

    def _empty(
        self, connection: sqlite3.Connection, error: sqlite3.Error, may_go: Callable[[list[Row]], bool]
    ) -> list[Row]:
        """Empty the file in place after an error; return its rows.

        Raises the error if it is not for lack of room, or the file cannot be emptied in place. ``may_go`` is called
        under sqlite's exclusive lock, and returns whether these rows may go.
        """
        if connection.in_transaction:
            connection.execute("rollback")
        if not self._lacks_room(error):
            raise error
        connection.execute("begin exclusive")
        try:
            rows = self._rows_of(connection)
            if not may_go(rows) or not self._write_empty(connection):
                raise error
            return rows
        finally:
            connection.execute("rollback")

    def _write_empty(self, connection: sqlite3.Connection) -> bool:
        """Overwrite the locked file with an empty database; ``False`` if its format does not allow that."""
        (page_size,) = connection.execute("pragma page_size").fetchone()
        found = connection.execute("select rootpage, type, tbl_name from sqlite_master").fetchall()
        roots = {root: kind for root, kind, table in found if table == self.schema.table}
        if not hasattr(os, "pwrite") or len(roots) != len(found):
            return False
        handle = open_plain(self.path, flags=os.O_RDWR)
        try:
            image = empty_image(os.pread(handle, page_size, 0), roots)
            if image is not None:
                write_empty(handle, image)
            return image is not None
        finally:
            release(handle)

    def _lacks_room(self, error: sqlite3.Error) -> bool:
        text = str(error)
        # Sqlite reports a used-up quota as an I/O error, and missing inodes as a file it cannot open.
        doubtful = "disk I/O error" in text or "unable to open" in text
        return "disk is full" in text or (doubtful and lacks_room(self.path.parent))

    # ------------------------------------------------------------------ interrupted writes, space, damage

    def recover(self) -> None:
        """Make sqlite finish an interrupted write or apply a log, and remove an empty journal.

        Raises as any writing; opens nothing if there is neither.
        """
        if not has_journal(self.path) and not has_log(self.path):
            return
        with self._writing() as connection:
            if has_journal(self.path):
                connection.execute("begin exclusive")
                # Sqlite leaves a journal that has no content yet. The lock ensures that nobody else uses it.
                remove_file(companion(self.path, "-journal"))
                connection.execute("rollback")

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
        except Busy:
            return "its rows are gone, but it is too busy to be made smaller now"
        except NoRoom:
            return "its rows are gone, but there is no room to make the file smaller now"
        return None

    def orphan(self, root: Path, key: str, why: str) -> Orphan | None:
        """Return the whole file as an orphan; ``None`` if it has gone, or is no plain file."""
        with suppress(OSError):
            stamp = file_stamp(self.path)
            return Orphan(key, root, stamp[1], 1, stamp[2] / 1e9, why, stamp=stamp)
        return None

    def remove_damaged(self, stamp: tuple[int, ...], in_use: Callable[[Path], str | None]) -> str | None:
        """Remove the whole file if its library cannot use it; return why it stays, or ``None``.

        ``in_use`` returns who may have it open. Sqlite's exclusive lock is held meanwhile: a program that opens the
        file now waits, and reads nothing.
        """
        with suppress(Damaged):
            # An interrupted write may hold the pages that are damaged now.
            self.recover()
        with suppress(Damaged):
            self.require_sound()
            return CHANGED
        with self._translated("remove"):
            self._require_private()
            if (reason := in_use(self.path)) is not None:
                return reason
        # Nobody had it open: a program that has locked it has opened it since, and must not be waited for.
        with self._translated("remove"), exclusively_locked(self.layer, self.path, 0):
            if file_stamp(self.path) != stamp:
                return CHANGED
            # The file goes first: sqlite ignores a log without a database, and would apply one to the next database.
            for suffix in ("", *COMPANIONS):
                remove_file(companion(self.path, suffix))
        return None

    # ------------------------------------------------------------------ connections

    def _rows_of(self, connection: sqlite3.Connection) -> list[Row]:
        if self._is_new(connection):
            return []
        keys = ", ".join(f'"{column}"' for column in self.schema.key)
        query = f"select rowid, {self.schema.size}, {keys} from {self.schema.table} order by rowid"
        return [_row(rowid, key, size) for rowid, size, *key in connection.execute(query)]

    def _rows_in(self, connection: sqlite3.Connection, keys: Sequence[Sequence[str]]) -> dict[tuple[str, ...], Values]:
        """Return the values of the keys that have a row."""
        names = [f'"{column}"' for column in self.schema.columns]
        asked = [f'"asked {column}"' for column in self.schema.key]
        width = len(asked)
        # The requested keys are returned, because a column may compare differently from Python.
        same = " and ".join(f"{name} = {key}" for name, key in zip(names, asked, strict=False))
        query = f"select {', '.join(asked + names[width:])} from asked join {self.schema.table} where {same}"
        place = f"({', '.join('?' * width)})"
        found: dict[tuple[str, ...], Values] = {}
        for first in range(0, len(keys), _ASKED_AT_ONCE):
            some = keys[first : first + _ASKED_AT_ONCE]
            given = f"with asked({', '.join(asked)}) as (values {', '.join(place for _ in some)})"
            for row in connection.execute(f"{given} {query}", [part for key in some for part in key]):
                found.setdefault(row[:width], row[width:])
        return found

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._translated(), opened_for_reading(self.layer, self.path, self.lock_timeout) as connection:
            self._require_made(connection)
            yield connection

    @contextmanager
    def _writing(self, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        with self._translated():
            self._require_private()
            opened = opened_for_writing(self.path, self.lock_timeout, self._require_made, create=create)
            with opened as connection:
                yield connection

    def _require_private(self) -> None:
        if not self.shared:
            require_private(self.layer, self.path)

    def _require_made(self, connection: sqlite3.Connection) -> None:
        require_made_by(connection, (*self.schema.create, *self.schema.others), self.layer, self.path)

    def _is_new(self, connection: sqlite3.Connection) -> bool:
        """Return whether the file has no table yet; the library makes them when it opens the file."""
        return connection.execute("select 1 from sqlite_master limit 1").fetchone() is None

    @contextmanager
    def _translated(self, verb: str = "open") -> Iterator[None]:
        try:
            yield
        except LayerError:
            raise
        except sqlite3.OperationalError as error:
            raise self._operational(error) from error
        except sqlite3.DatabaseError as error:
            require_readable(self.layer, self.path)
            raise Damaged(self.layer, f"not a usable database: {error}", self.path) from error
        except OSError as error:
            message = f"cannot {verb}: {error.strerror or error}"
            if error.errno in NO_ROOM:
                raise NoRoom(self.layer, message + _MAKE_ROOM, self.path) from error
            raise Unreachable(self.layer, message, self.path) from error

    def _operational(self, error: sqlite3.OperationalError) -> LayerError:
        text = str(error)
        if "locked" in text or "busy" in text:
            return locked_too_long(self.layer, self.path, self.lock_timeout)
        if has_journal(self.path) and ("readonly" in text or "unable to open" in text):
            return pending(self.layer, self.path)
        if self._lacks_room(error):
            return NoRoom(self.layer, f"sqlite cannot write: {text}{_MAKE_ROOM}", self.path)
        if "no such column" in text or "malformed" in text:
            require_readable(self.layer, self.path)
            return Damaged(self.layer, f"not a usable database: {text}", self.path)
        advice = "; make the file and its folder writable" if "readonly" in text else ""
        return Unreachable(self.layer, f"sqlite cannot use it: {text}{advice}", self.path)
