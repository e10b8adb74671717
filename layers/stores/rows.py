"""Rows of a sqlite file: counted, read, inserted and deleted without replacing the file.

A running program may have the file open; unlinking, replacing or truncating it would break that program. So a
:class:`RowFile` deletes rows and then frees the space with ``VACUUM``, in short transactions with a timeout. A full
file system has no room for the journal of such a transaction: if all rows are to be deleted, the file is emptied in
place (:mod:`cachectl.layers.stores.emptying`) under the same lock, otherwise a few rows are deleted at a time.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Busy, Damaged, EntryExists, LayerError, NoRoom, Unreachable
from cachectl.layers.base.facts import Orphan
from cachectl.layers.disk.atomic import place_new, write_synced
from cachectl.layers.disk.foresight import file_closed_because, wait_until_free
from cachectl.layers.disk.handles import (
    NO_ROOM,
    blocks_of,
    lacks_room,
    opened_root,
    own_folder,
    status_of,
)
from cachectl.layers.disk.locks import LOCK_TIMEOUT
from cachectl.layers.disk.plain import STAGE, open_plain, plain_identity, read_locked, read_plain, release
from cachectl.layers.disk.presence import is_there
from cachectl.layers.stores.database import (
    COMPANIONS,
    WAL_MODE,
    Connection,
    demand_made_by,
    demand_writable,
    has_journal,
    locked_too_long,
    on_disk,
    opened_for_reading,
    opened_for_writing,
)
from cachectl.layers.stores.emptying import EMPTY_PAGE_SIZES, empty_image, punch_free_pages, write_empty
from cachectl.layers.stores.quarantine import Quarantine, demand, folder_of

T = TypeVar("T")

#: Advice by parts of sqlite's messages.
_ADVICE: Final = {
    "readonly": "; make the file and its folder writable",
}
#: Rows asked for in one query: the oldest sqlite takes 999 values.
_ASKED_AT_ONCE: Final = 200
#: Rows from which a second connection is faster.
_LARGE: Final = 100_000
#: Bytes that sqlite locks (start, length): those of a writer in the index of a log, and any of a plain database.
_WAL_WRITE_LOCK: Final = (120, 1)
_WHOLE_FILE: Final = (0, 0)
#: Bytes read at once.
_CHUNK: Final = 1 << 20
#: Sqlite's message on a full file system, and the advice.
_FULL: Final = "disk is full"
_MAKE_ROOM: Final = "; make room and try again"
#: The page size of a new file, in bytes.
_PAGE_SIZE: Final = 4096
#: Factor by which the next transaction is smaller after one without room.
_SMALLER: Final = 4
_CHANGED: Final = "changed since it was planned"
#: File name of a row in quarantine.
_ROW: Final = "row.json"


def without_companion(name: str) -> str:
    """Return the name of the database to which a sqlite companion file belongs; any other name unchanged."""
    return next((name.removesuffix(ending) for ending in COMPANIONS if name.endswith(ending)), name)


def companions_of(path: Path) -> tuple[Path, ...]:
    """Return the paths of sqlite's companion files of a database, existing or not."""
    return tuple(path.with_name(path.name + companion) for companion in COMPANIONS)


class Schema(NamedTuple):
    """One table: its ``create`` statement, key columns and value columns.

    ``key`` and ``values`` are column names; ``size`` is the SQL expression of a row's bytes. ``table`` may be
    a query if rows are only read. ``others`` are further ``create`` statements of the library, of any version: a
    file with objects that neither these nor ``create`` make is damaged.
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

    @property
    def where_key(self) -> str:
        """Return the condition that selects one row."""
        return " and ".join(f'"{column}" = ?' for column in self.key)


class Row(NamedTuple):
    """The row id and size of one row; ``key`` has a value per key column."""

    rowid: int
    key: tuple[str, ...]
    bytes: int


class Deleted(NamedTuple):
    """The number of deleted rows, the rows if they were named, and the error that kept the rest."""

    removed: int
    rows: frozenset[Row] = frozenset()
    stopped: LayerError | None = None


class Weight(NamedTuple):
    """Row count, summed bytes and highest row id of a table."""

    rows: int
    bytes: int
    last: int


def disk_usage(path: Path) -> tuple[int, int]:
    """Return the number of files of a database (journals included) and their bytes."""
    files = total = 0
    for companion in ("", *COMPANIONS):
        try:
            size = path.with_name(path.name + companion).stat().st_size
        except FileNotFoundError:
            continue
        files += 1
        total += size
    return files, total


def disk_blocks(path: Path) -> int | None:
    """Return the bytes of disk blocks of a database (journals included); ``None`` if the system does not say."""
    total = 0
    for companion in ("", *COMPANIONS):
        with suppress(FileNotFoundError):
            blocks = blocks_of(path.with_name(path.name + companion).stat())
            if blocks is None:
                return None
            total += blocks
    return total


def allocated(path: Path) -> int:
    """Return the bytes that a file takes on the disk, fewer than its length if it has holes."""
    with suppress(FileNotFoundError):
        return on_disk(path.stat())
    return 0


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return the version stamp of a plain file (inode, bytes, last change). Raises :class:`OSError` for others."""
    plain_identity(path)
    status = path.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def write_row(columns: Sequence[str], values: Sequence[object]) -> bytes:
    """Return a row as JSON, bytes in base64."""
    import base64
    import json

    encoded = ({"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value for value in values)
    return json.dumps(dict(zip(columns, encoded, strict=True))).encode()


def read_row(data: bytes) -> dict[str, object] | None:
    """Read the output of :func:`write_row`; ``None`` if it is invalid."""
    import json

    try:
        return {str(column): _value(encoded) for column, encoded in json.loads(data).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _value(encoded: object) -> object:
    if isinstance(encoded, dict):
        import base64

        return base64.b64decode(encoded["base64"], validate=True)
    if isinstance(encoded, list):
        raise TypeError("no column holds a list")
    return encoded


def _row(rowid: object, key: Sequence[object], size: object) -> Row:
    """Make a row from a query result; a foreign table may hold any value, even null."""
    return Row(
        rowid if isinstance(rowid, int) else 0,
        tuple(str(part) for part in key),
        size if isinstance(size, int) else 0,
    )


def _spellable(key: Sequence[str]) -> bool:
    """Return whether a key can be bound: undecodable bytes of a command line cannot."""
    try:
        return all(part.encode() is not None for part in key)
    except UnicodeEncodeError:
        return False


class RowFile:
    """One sqlite file holding rows of one schema.

    Every method raises :class:`Busy` if a lock outlasts ``lock_timeout`` seconds, :class:`Damaged` if the file
    is not such a database, and :class:`Unreachable` if the operating system refuses.
    """

    def __init__(self, layer: str, path: Path, schema: Schema, lock_timeout: float = LOCK_TIMEOUT) -> None:
        self.layer = layer
        self.path = path
        self.schema = schema
        self.lock_timeout = lock_timeout

    # ------------------------------------------------------------------ reading

    def sum(self) -> Weight:
        """Sum the rows for a report; a large table by two connections in parallel, so not in one snapshot."""
        with self._reading() as connection:
            if self._is_new(connection):
                return Weight(0, 0, 0)
            # In one query for both, sqlite would scan every row.
            (first,) = connection.execute(f"select min(rowid) from {self.schema.table}").fetchone()
            (last,) = connection.execute(f"select max(rowid) from {self.schema.table}").fetchone()
            if last is None:
                return Weight(0, 0, 0)
            self._weight(0, first, last)
            if last - first < _LARGE:
                return self._sum(connection, first, last, last)
            return self._sum_by_two(connection, first, last)

    def _sum_by_two(self, connection: Connection, first: int, last: int) -> Weight:
        """Sum half of a table in a thread: sqlite releases the GIL while it works."""
        from concurrent.futures import ThreadPoolExecutor

        middle = (first + last) // 2

        def sum_the_rest() -> Weight:
            with self._reading() as other:
                return self._sum(other, middle + 1, last, last)

        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(sum_the_rest)
            half = self._sum(connection, first, middle, last)
            return Weight(half.rows + rest.result().rows, half.bytes + rest.result().bytes, last)

    def _sum(self, connection: Connection, first: int, until: int, last: int) -> Weight:
        query = f"select count(*), coalesce(sum({self.schema.size}), 0) from {self.schema.table}"
        return self._weight(
            *connection.execute(f"{query} where rowid between ? and ?", (first, until)).fetchone(), last
        )

    def _weight(self, *numbers: object) -> Weight:
        """Check sums of sqlite: a foreign table may hold any value, and may have a column ``rowid``."""
        known = [number for number in numbers if isinstance(number, int)]
        if len(known) != len(numbers):
            message = "holds sizes or row ids that are not numbers, which its library never writes"
            raise Damaged(self.layer, message, self.path)
        return Weight(*known)

    def rows(self) -> Iterator[Row]:
        """Yield every row's key and size, in the order of insertion."""
        keys = ", ".join(f'"{column}"' for column in self.schema.key)
        query = f"select rowid, {self.schema.size}, {keys} from {self.schema.table} order by rowid"
        with self._reading() as connection:
            for rowid, size, *key in () if self._is_new(connection) else connection.execute(query):
                yield _row(rowid, key, size)

    def rows_with(self, *columns: str, part: bytes = b"") -> Iterator[tuple[Row, tuple[object, ...]]]:
        """Yield every row with some of its values; of blobs only those that contain ``part``."""
        names = ", ".join(f'"{column}"' for column in (*self.schema.key, *columns))
        query = f"select rowid, {self.schema.size}, {names} from {self.schema.table} order by rowid"
        width = len(self.schema.key)
        with self._reading() as connection:
            for rowid, size, *rest in () if self._is_new(connection) else connection.execute(query):
                if not part or any(not isinstance(value, bytes) or part in value for value in rest[width:]):
                    yield _row(rowid, rest[:width], size), tuple(rest[width:])

    def read(self, key: Sequence[str]) -> tuple[object, ...] | None:
        """Return the value columns of a row, or ``None`` if there is no such row or file."""
        if not self._exists() or not _spellable(key):
            return None
        with self._reading() as connection:
            return self._values_in(connection, key)

    def read_many(self, keys: Sequence[Sequence[str]]) -> list[tuple[object, ...] | None]:
        """Read several rows as :meth:`read` does, a few at a time, so that writing programs do not wait for all."""
        if not self._exists():
            return [None for _ in keys]
        with self._reading() as connection:
            found = self._rows_in(connection, list(filter(_spellable, keys)))
            return [found.get(tuple(key)) for key in keys]

    def _exists(self) -> bool:
        with self._translated():
            return is_there(self.path)

    def columns(self) -> frozenset[str]:
        """Return the names of the table's columns; none if there is no such table."""
        with self._reading() as connection:
            return frozenset(str(row[1]) for row in connection.execute(f"pragma table_info({self.schema.table})"))

    def check(self) -> str | None:
        """Run sqlite's integrity check; return its complaint, or ``None`` if the file is sound.

        A complaint is checked again, because sqlite takes one read error for damage.
        """
        with suppress(Damaged):
            if self._check() is None:
                return None
        return self._check()

    def _check(self) -> str | None:
        with self._reading() as connection:
            verdict = str(connection.execute("pragma quick_check(1)").fetchone()[0])
            if verdict != "ok":
                self._demand_readable()
                return verdict
            if self._is_new(connection):
                return None
            present = {str(row[1]) for row in connection.execute(f"pragma table_info({self.schema.table})")}
        missing = sorted(set(self.schema.columns) - present)
        return f"table {self.schema.table} lacks the columns {', '.join(missing)}" if missing else None

    # ------------------------------------------------------------------ writing

    def insert(self, key: Sequence[str], values: Sequence[object], *, replace: bool) -> None:
        """Insert one row in one transaction; make file and table if missing.

        Raises :class:`EntryExists` if a different row has the key and ``replace`` is not set.
        """
        if not _spellable(key):
            raise Damaged(self.layer, "the key holds characters that a database cannot store", self.path)
        is_committed = False
        try:
            with self._inserting("replace" if replace else "abort") as (connection, statement):
                standing = self._values_in(connection, key)
                if standing is not None and standing != tuple(values) and not replace:
                    connection.execute("rollback")
                    raise EntryExists(self.layer, self.path)
                if standing != tuple(values):
                    connection.execute(statement, (*key, *values))
                connection.execute("commit")
                is_committed = True
        except LayerError:
            # An error when the file is closed does not undo the insert.
            if not is_committed:
                raise

    def insert_new(self, rows: Sequence[tuple[Sequence[str], Sequence[object]]]) -> list[bool | None]:
        """Insert the rows with free keys in one transaction.

        Returns for each: ``True`` if it was inserted, ``False`` if the same row was present, ``None`` if a different
        one is, which stays.
        """
        done: list[bool | None] = []
        is_committed = False
        try:
            with self._inserting("ignore") as (connection, statement):
                present = self._rows_in(connection, [key for key, _ in rows])
                for key, values in ((tuple(key), tuple(values)) for key, values in rows):
                    if key not in present and connection.execute(statement, (*key, *values)).rowcount == 1:
                        present[key] = values
                        done.append(True)
                        continue
                    # A row inserted just now may be in the way too, if the table considers two keys equal.
                    standing = present[key] if key in present else self._values_in(connection, key)
                    done.append(False if standing == values else None)
                connection.execute("commit")
                is_committed = True
        except LayerError:
            # An error when the file is closed does not undo the insert.
            if not is_committed:
                raise
        return done

    @contextmanager
    def _inserting(self, otherwise: str) -> Iterator[tuple[Connection, str]]:
        """Begin to write, in a file and a table that are made if missing; yield the statement that inserts a row.

        ``otherwise`` is sqlite's conflict action if another row is in the way.
        """
        places = ", ".join("?" for _ in self.schema.columns)
        names = ", ".join(f'"{column}"' for column in self.schema.columns)
        with self._writing(create=True) as connection:
            connection.execute("begin immediate")
            for statement in self.schema.create:
                connection.execute(statement)
            yield connection, f"insert or {otherwise} into {self.schema.table} ({names}) values ({places})"

    def delete(self, rows: Sequence[Row]) -> Deleted:
        """Delete exactly these rows, each only if it still has its size and row id; return the deleted ones.

        All are deleted in one transaction, or in several small ones if there is no room for its journal and other rows
        stay. Raises :class:`NoRoom` if no row could be deleted.
        """
        if not rows:
            return Deleted(0)
        with self._writing() as connection:
            try:
                gone = self._delete(connection, rows)
            except sqlite3.OperationalError as error:
                emptied = self._empty(connection, error, lambda locked: self._all_rows(locked, rows))
                if emptied is None:
                    return self._delete_in_parts(connection, rows, error)
                gone = emptied
            return Deleted(len(gone), frozenset(gone))

    def _delete_in_parts(self, connection: Connection, rows: Sequence[Row], error: sqlite3.OperationalError) -> Deleted:
        """Delete rows in transactions small enough for the free space, and free their pages after each."""
        if not self._lacks_room(error):
            raise error
        gone: list[Row] = []
        done, size = 0, len(rows)
        while done < len(rows):
            self._punch(connection)
            try:
                gone += self._delete(connection, rows[done : done + size])
            except sqlite3.OperationalError as failed:
                if connection.in_transaction:
                    connection.execute("rollback")
                if size > 1 and self._lacks_room(failed):
                    size = -(-size // _SMALLER)
                    continue
                if not gone:
                    raise
                return Deleted(len(gone), frozenset(gone), self._operational(failed, writing=True))
            done += size
        return Deleted(len(gone), frozenset(gone))

    def _punch(self, connection: Connection) -> bool:
        """Free the disk blocks of free pages; return whether the file system supports that."""
        connection.execute("begin exclusive")
        try:
            page_size, mode = (
                connection.execute(f"pragma {name}").fetchone()[0] for name in ("page_size", "journal_mode")
            )
            if mode == "wal":
                return False
            with self._opened(connection) as handle:
                punch_free_pages(handle, page_size)
        except OSError:
            return False
        finally:
            connection.execute("rollback")
        return True

    @contextmanager
    def _opened(self, connection: Connection) -> Iterator[int]:
        """Open for reading and writing the same file that sqlite has open."""
        handle = open_plain(self.path.name, dir_fd=connection.folder, flags=os.O_RDWR)
        try:
            yield handle
        finally:
            release(handle)

    def _delete(self, connection: Connection, rows: Sequence[Row]) -> list[Row]:
        statement = (
            f"delete from {self.schema.table} where rowid = ? and {self.schema.size} = ? and {self.schema.where_key}"
        )
        connection.execute("begin immediate")
        gone = [row for row in rows if connection.execute(statement, (row.rowid, row.bytes, *row.key)).rowcount]
        connection.execute("commit")
        return gone

    def _all_rows(self, connection: Connection, rows: Sequence[Row]) -> list[Row] | None:
        """Return all rows of the table if each is among those given, ``None`` otherwise."""
        keys = ", ".join(f'"{column}"' for column in self.schema.key)
        query = f"select rowid, {self.schema.size}, {keys} from {self.schema.table}"
        standing = [_row(rowid, key, size) for rowid, size, *key in connection.execute(query)]
        return standing if set(rows).issuperset(standing) else None

    def delete_up_to(self, weight: Weight) -> Deleted | None:
        """Delete every row up to the last one of an earlier :meth:`sum`; return the number deleted.

        ``None``, and nothing is deleted, if the number and size of those rows have changed: row ids are reused, so
        younger rows may be among them. Without room for a journal it works as :meth:`delete`.
        """
        with self._writing() as connection:
            try:
                removed = self._delete_up_to(connection, weight)
            except sqlite3.OperationalError as error:
                removed = self._empty(connection, error, lambda locked: self._rows_if_all(locked, weight))
                if removed is None:
                    # Younger rows exist, so no row id is reused while these are deleted.
                    return self._delete_in_parts(connection, self._rows_up_to(connection, weight.last), error)
            return None if removed is None else Deleted(removed)

    def _rows_up_to(self, connection: Connection, last: int) -> list[Row]:
        keys = ", ".join(f'"{column}"' for column in self.schema.key)
        query = f"select rowid, {self.schema.size}, {keys} from {self.schema.table} where rowid <= ?"
        return [_row(rowid, key, size) for rowid, size, *key in connection.execute(query, (last,))]

    def _delete_up_to(self, connection: Connection, weight: Weight) -> int | None:
        older = f"from {self.schema.table} where rowid <= ?"
        connection.execute("begin immediate")
        query = f"select count(*), coalesce(sum({self.schema.size}), 0) {older}"
        if connection.execute(query, (weight.last,)).fetchone() != (weight.rows, weight.bytes):
            connection.execute("rollback")
            return None
        younger = f"select 1 from {self.schema.table} where rowid > ? limit 1"
        if connection.execute(younger, (weight.last,)).fetchone() is None:
            # Without a condition sqlite drops whole pages instead of single rows.
            removed = connection.execute(f"delete from {self.schema.table}").rowcount
        else:
            removed = connection.execute(f"delete {older}", (weight.last,)).rowcount
        connection.execute("commit")
        return removed

    def foresee_delete(self, rows: Sequence[Row] | None) -> int:
        """Return the bytes by which the file and its journals would shrink without these rows (``None``: all rows).

        Changes nothing: the rows are deleted from a copy. Raises as :meth:`foresee_insert`.
        """
        self.foresee_insert()
        before = disk_usage(self.path)[1]
        # Without a name sqlite keeps the copy in memory, or in a temporary file if it is large.
        with self._reading() as connection, closing(sqlite3.connect("", isolation_level=None)) as copy:
            # This statement has a budget; the copy has none, and would run for ever on a damaged file.
            connection.execute(f"select max({self.schema.size}) from {self.schema.table}")
            connection.backup(copy)
            if rows is None:
                copy.execute(f"delete from {self.schema.table}")
            else:
                copy.execute("begin")
                places = ((row.rowid,) for row in rows)
                copy.executemany(f"delete from {self.schema.table} where rowid = ?", places)
                copy.execute("commit")
            copy.execute("vacuum")
            pages, size = (int(copy.execute(f"pragma {name}").fetchone()[0]) for name in ("page_count", "page_size"))
        return max(0, before - pages * size)

    def foresee_insert(self) -> None:
        """Raise the error of any writing, as far as file modes and locks show it. Changes nothing."""
        with self._translated():
            demand_writable(self.layer, self.path)
        if (because := file_closed_because(self.path)) is not None:
            message = f"cannot be written: {because}; make the file and its folder writable"
            raise Unreachable(self.layer, message, self.path)
        if not os.path.lexists(self.path):
            return
        log = read_locked(self.path, limit=20)[18:20] == WAL_MODE
        shared = self.path.with_name(self.path.name + "-shm")
        # In that mode programs hold a lock on the file as long as they have it open.
        wait_until_free(
            self.layer, shared if log else self.path, self.lock_timeout, span=_WAL_WRITE_LOCK if log else _WHOLE_FILE
        )

    def _rows_if_all(self, connection: Connection, weight: Weight) -> int | None:
        """Return the number of rows if a weight covers all of them, ``None`` otherwise."""
        query = f"select count(*), coalesce(sum({self.schema.size}), 0), coalesce(max(rowid), 0)"
        standing = connection.execute(f"{query} from {self.schema.table}").fetchone()
        return weight.rows if tuple(standing) == weight else None

    def _empty(
        self,
        connection: Connection,
        error: sqlite3.OperationalError,
        decide: Callable[[Connection], T | None],
    ) -> T | None:
        """Empty the file without a journal, if an error says that there is no room for one.

        ``decide`` is called under sqlite's exclusive lock; if it returns ``None``, the file is left alone. Return its
        result, or ``None`` if nothing was done.
        """
        if not self._lacks_room(error):
            return None
        if connection.in_transaction:
            connection.execute("rollback")
        connection.execute("begin exclusive")
        try:
            decided = decide(connection)
            return decided if decided is not None and self._write_empty(connection) else None
        finally:
            connection.execute("rollback")

    def _write_empty(self, connection: Connection) -> bool:
        """Overwrite the locked file with an empty database; ``False`` if its format does not allow that."""
        (page_size,) = connection.execute("pragma page_size").fetchone()
        found = connection.execute("select rootpage, type, tbl_name from sqlite_master").fetchall()
        if not hasattr(os, "pwrite") or any(table != self.schema.table for *_, table in found):
            return False
        with self._opened(connection) as handle:
            roots = {root: kind for root, kind, _ in found}
            image = empty_image(os.pread(handle, page_size, 0), roots) if len(roots) == len(found) else None
            if image is None:
                return False
            write_empty(handle, image)
            return True

    def _lacks_room(self, error: sqlite3.OperationalError) -> bool:
        text = str(error)
        # Sqlite reports a used-up quota as an I/O error, and missing inodes as a file it cannot open.
        doubtful = "disk I/O error" in text or "unable to open" in text
        return _FULL in text or (doubtful and lacks_room(self.path.parent))

    # ------------------------------------------------------------------ quarantine

    def orphan(self, root: Path, key: str, why: str) -> Orphan | None:
        """Return the whole file as an orphan; ``None`` if it has gone, or is no plain file."""
        with suppress(OSError):
            stamp = file_stamp(self.path)
            return Orphan(key, root, stamp[1], 1, stamp[2] / 1e9, why, stamp=stamp)
        return None

    def set_row_aside(self, row: Row, thing: facts.Quarantined) -> str | None:
        """Copy a row into quarantine, then delete it; return why it was left, or ``None``."""
        with self._translated("move aside"), opened_root(thing.root) as root:
            values = self._whole(row)
            if root is None or values is None:
                return _CHANGED
            with Quarantine(self.layer, thing.root).shelf(root, thing) as shelf:
                write_synced(shelf.handle, _ROW, write_row(self.schema.columns, values))
                try:
                    shelf.taken = bool(self.delete([row]).removed)
                except LayerError:
                    # Keep the copy until it is certain that the row stays.
                    shelf.taken = self._whole(row) is None
                    raise
                finally:
                    if not shelf.taken:
                        with suppress(FileNotFoundError):
                            os.unlink(_ROW, dir_fd=shelf.handle)
        return None if shelf.taken else _CHANGED

    def bring_row_back(self, thing: facts.Quarantined, *, replace: bool) -> None:
        """Insert a row from quarantine. Raises :class:`EntryExists` as :meth:`insert`."""
        with Quarantine(self.layer, thing.root).taken(thing) as folder:
            demand(self.layer, folder, _ROW)
            values = read_row(read_plain(_ROW, dir_fd=folder))
            if values is None or set(values) != set(self.schema.columns):
                raise Damaged(self.layer, "the row in quarantine is not one of this table", self.path)
            key = [str(values[column]) for column in self.schema.key]
            self.insert(key, [values[column] for column in self.schema.values], replace=replace)

    def set_file_aside(
        self, target: facts.Target, thing: facts.Quarantined, in_use: Callable[[Path], str | None]
    ) -> str | None:
        """Move the whole file into quarantine with its journals; return why it was left, or ``None``.

        Only a file that its library cannot use is moved, and only while nobody has it open: ``in_use`` returns who has.
        It is moved before its journals, by one rename (sqlite drops a journal without a database). Then it is checked
        again, under a name that no program knows: if it is sound by now, or open, it is moved back.
        """
        with self._translated("move aside"), opened_root(thing.root) as root, opened_root(self.path.parent) as parent:
            if root is None or parent is None or file_stamp(self.path) != target.stamp:
                return _CHANGED
            if (because := in_use(self.path)) is not None:
                return because
            with Quarantine(self.layer, thing.root).shelf(root, thing) as shelf:
                os.rename(self.path.name, self.path.name, src_dir_fd=parent, dst_dir_fd=shelf.handle)
                moved = RowFile(self.layer, folder_of(thing) / self.path.name, self.schema, self.lock_timeout)
                because = in_use(moved.path)
                if because is None and (file_stamp(moved.path) != target.stamp or moved.is_sound()):
                    because = _CHANGED
                if because is not None:
                    place_new(self.path.name, self.path.name, src=shelf.handle, dst=parent)
                    return because
                shelf.taken = True
                for name in self._journals(parent):
                    os.rename(name, name, src_dir_fd=parent, dst_dir_fd=shelf.handle)
                os.fsync(parent)
        return None

    def is_sound(self) -> bool:
        """Return whether the file is a database that its library can use."""
        try:
            return self.check() is None
        except LayerError:
            return False

    def bring_file_back(self, thing: facts.Quarantined, *, replace: bool) -> None:
        """Move the whole file back into its place, with its journals.

        Raises :class:`EntryExists` if another file is there and ``replace`` is not set; the caller ensures that nobody
        has that one open. After any error the previous file is in its place again.
        """
        with self._translated("put it back"), Quarantine(self.layer, thing.root).taken(thing) as folder:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with opened_root(self.path.parent) as parent:
                demand(self.layer, folder, self.path.name)
                if parent is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                if status_of(parent, self.path.name) is not None and not replace:
                    raise EntryExists(self.layer, self.path)
                with own_folder(parent, STAGE) as (aside, _):
                    self._exchange(folder, parent, aside)

    def _exchange(self, folder: int, parent: int, aside: int) -> None:
        """Move the present file aside and the quarantined one in; undo that on failure."""
        standing = [self.path.name] if status_of(parent, self.path.name) is not None else []
        standing += self._journals(parent)
        if standing[:1] == [self.path.name]:
            plain_identity(self.path)
        gone: list[str] = []
        placed: list[str] = []
        try:
            # A database is moved out before its journals and in after them, so it never meets those of another.
            for name in standing:
                os.rename(name, name, src_dir_fd=parent, dst_dir_fd=aside)
                gone.append(name)
            for name in [*self._journals(folder), self.path.name]:
                place_new(name, name, src=folder, dst=parent)
                placed.append(name)
            os.fsync(parent)
        except BaseException as error:
            for name in reversed(placed):
                os.rename(name, name, src_dir_fd=parent, dst_dir_fd=folder)
            for name in reversed(gone):
                os.rename(name, name, src_dir_fd=aside, dst_dir_fd=parent)
            if isinstance(error, FileExistsError):
                raise EntryExists(self.layer, self.path) from error
            raise

    def _journals(self, folder: int) -> list[str]:
        """Return the names of the database's plain companion files in a folder."""
        names = [self.path.name + companion for companion in COMPANIONS]
        found = ((name, status_of(folder, name)) for name in names)
        return [name for name, status in found if status is not None and stat.S_ISREG(status.st_mode)]

    def _whole(self, row: Row) -> tuple[object, ...] | None:
        columns = ", ".join(f'"{column}"' for column in self.schema.columns)
        query = f"select {columns} from {self.schema.table} where rowid = ? and {self.schema.where_key}"
        with self._reading() as connection:
            found = connection.execute(query, (row.rowid, *row.key)).fetchone()
            return None if found is None else tuple(found)

    # ------------------------------------------------------------------ interrupted writes

    def recover(self) -> None:
        """Make sqlite roll back an interrupted write, and remove an empty journal.

        Needs no room. Raises as any writing; opens nothing if there is no journal.
        """
        if not has_journal(self.path):
            return
        with self._writing() as connection:
            connection.execute("begin exclusive")
            # Sqlite leaves a journal that has no content yet. The lock ensures that nobody else uses it.
            if connection.execute("pragma journal_mode").fetchone() == ("delete",):
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.path.name}-journal", dir_fd=connection.folder)
            connection.execute("rollback")

    # ------------------------------------------------------------------ space

    def vacuum(self) -> str | None:
        """Free the disk space of deleted rows; return why that failed, or ``None``."""
        try:
            with self._writing() as connection:
                try:
                    self._vacuum(connection)
                except sqlite3.OperationalError as error:
                    if not self._lacks_room(error):
                        raise
                    if not self._was_emptied(connection) and self._empty(connection, error, self._is_empty) is None:
                        return self._vacuum_within_room(connection)
        except Busy:
            return "its rows are gone, but it is too busy to be made smaller now"
        return None

    def _vacuum_within_room(self, connection: Connection) -> str | None:
        """Vacuum in the space freed by the free pages; return why that failed, or ``None``."""
        if not self._punch(connection):
            return "its rows are gone, but there is no room to make the file smaller now"
        try:
            self._vacuum(connection)
        except sqlite3.OperationalError as error:
            if not self._lacks_room(error):
                raise
            return "its rows are gone and their disk blocks are free, but there is no room to shorten the file now"
        return None

    def _vacuum(self, connection: Connection) -> None:
        if self._was_emptied(connection):
            # Restore sqlite's page size for new files; this copies only a few empty pages.
            connection.execute("pragma temp_store = memory")
            connection.execute(f"pragma page_size = {_PAGE_SIZE}")
        connection.execute("vacuum")
        connection.execute("pragma wal_checkpoint(truncate)")

    def _was_emptied(self, connection: Connection) -> bool:
        """Return whether the file has the small pages of a file emptied in place."""
        return int(connection.execute("pragma page_size").fetchone()[0]) in EMPTY_PAGE_SIZES

    def _is_empty(self, connection: Connection) -> bool | None:
        """Return ``True`` for a table without rows, ``None`` otherwise."""
        return None if connection.execute(f"select 1 from {self.schema.table} limit 1").fetchone() else True

    # ------------------------------------------------------------------ connections

    def _rows_in(
        self, connection: Connection, keys: Sequence[Sequence[str]]
    ) -> dict[tuple[str, ...], tuple[object, ...]]:
        """Return the values of the keys that have a row."""
        names = [f'"{column}"' for column in self.schema.columns]
        asked = [f'"asked {column}"' for column in self.schema.key]
        width = len(asked)
        # Use the requested keys, not the found ones: a foreign column may compare differently from Python.
        query = (
            f"select {', '.join(asked + names[width:])} from asked join {self.schema.table} "
            f"where {' and '.join(f'{name} = {one}' for name, one in zip(names, asked, strict=False))}"
        )
        place = f"({', '.join('?' * width)})"
        found: dict[tuple[str, ...], tuple[object, ...]] = {}
        for first in range(0, len(keys), _ASKED_AT_ONCE):
            some = keys[first : first + _ASKED_AT_ONCE]
            given = f"with asked({', '.join(asked)}) as (values {', '.join(place for _ in some)})"
            for row in connection.execute(f"{given} {query}", tuple(chain.from_iterable(some))):
                found.setdefault(row[:width], row[width:])
        return found

    def _values_in(self, connection: Connection, key: Sequence[str]) -> tuple[object, ...] | None:
        values = ", ".join(f'"{column}"' for column in self.schema.values)
        query = f"select {values} from {self.schema.table} where {self.schema.where_key}"
        row = connection.execute(query, tuple(key)).fetchone()
        return None if row is None else tuple(row)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._translated(), opened_for_reading(self.layer, self.path, self.lock_timeout) as connection:
            self._demand_made(connection)
            yield connection

    @contextmanager
    def _writing(self, *, create: bool = False) -> Iterator[Connection]:
        opened = opened_for_writing(self.layer, self.path, self.lock_timeout, self._demand_made, create=create)
        with self._translated(writing=True), opened as connection:
            yield connection

    def _demand_made(self, connection: Connection) -> None:
        """Raise :class:`Damaged` for a file with objects that its library does not make."""
        demand_made_by(connection, (*self.schema.create, *self.schema.others), self.layer, self.path)

    def _is_new(self, connection: Connection) -> bool:
        """Return whether the file has no table yet; the library makes them when it opens the file."""
        return connection.execute("select 1 from sqlite_master limit 1").fetchone() is None

    @contextmanager
    def _translated(self, verb: str = "open", *, writing: bool = False) -> Iterator[None]:
        try:
            yield
        except LayerError:
            raise
        except sqlite3.OperationalError as error:
            raise self._operational(error, writing=writing) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            message = f"cannot {verb}: {error.strerror or error}"
            if error.errno in NO_ROOM:
                raise NoRoom(self.layer, message + _MAKE_ROOM, self.path) from error
            raise Unreachable(self.layer, message, self.path) from error

    def _damaged(self, text: str) -> LayerError:
        """Return the error for a file that sqlite takes for damaged, which a failing disk can cause too."""
        try:
            self._demand_readable()
        except Unreachable as error:
            return error
        return Damaged(self.layer, f"not a usable database: {text}", self.path)

    def _demand_readable(self) -> None:
        """Raise :class:`Unreachable` if the file cannot be read to its end."""
        try:
            with open(open_plain(self.path), "rb") as file:
                while file.read(_CHUNK):
                    pass
        except OSError as error:
            raise Unreachable(self.layer, f"cannot be read: {error.strerror or error}", self.path) from error

    def _operational(self, error: sqlite3.OperationalError, *, writing: bool) -> LayerError:
        text = str(error)
        if "locked" in text or "busy" in text:
            return locked_too_long(self.layer, self.path, self.lock_timeout)
        if text == "interrupted":
            message = "not a usable database: a statement did more work than a file of its size can need"
            return Damaged(self.layer, message, self.path)
        if has_journal(self.path) and ("readonly" in text or "unable to open" in text):
            message = "an interrupted write is pending, which the next program that opens it rolls back"
            return Unreachable(self.layer, message, self.path)
        # Only a writer may probe for room: reading must write nothing.
        if writing and self._lacks_room(error):
            return NoRoom(self.layer, f"sqlite cannot write: {text}{_MAKE_ROOM}", self.path)
        if "no such table" in text or "no such column" in text or "malformed" in text:
            return self._damaged(text)
        advice = next((advice for part, advice in _ADVICE.items() if part in text), "")
        return Unreachable(self.layer, f"sqlite cannot use it: {text}{advice}", self.path)
