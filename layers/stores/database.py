"""Sqlite files opened safely: no other user can decide what sqlite reads, writes or deletes.

**Reading.** The file is opened relative to its folder and locked as sqlite locks it. Sqlite then reads it as immutable:
it neither creates, deletes nor opens a file beside it. If a log or an interrupted write is pending, both files are
copied to a private folder, and sqlite finishes its work on the copy.

**Writing.** Sqlite opens its journal beside the file by name. If another user could place or replace one there
(:mod:`cachectl.layers.disk.trust`), the file is not opened for writing.

**Content.** Only a file with the tables and indexes that its library makes is used: a view, a trigger, a generated
column or a virtual table could run code. Pages of a damaged file may refer to one another in circles, so the work of
every statement is limited in proportion to the size of the file.

Sources: sqlite.org/lockingv3.html (bytes that are locked), ``src/os_unix.c`` and ``src/pager.c`` of sqlite 3.40
(``hasHotJournal``, ``pager_playback``), sqlite.org/security.html.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from cachectl.layers.base.errors import Busy, CachectlError, Damaged, LayerError, Refused, Unreachable
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.handles import opened_root, status_of
from cachectl.layers.disk.locking import wait_until
from cachectl.layers.disk.locks import ask_for_record, has_record_structure
from cachectl.layers.disk.plain import SANE, borrow, open_again, open_plain, release
from cachectl.layers.disk.presence import nearest
from cachectl.layers.disk.trust import shared_because

#: Suffixes of the files that sqlite keeps beside a database.
COMPANIONS: Final = ("-journal", "-wal", "-shm")
MAGIC: Final = b"SQLite format 3\0"
WAL_MODE: Final = b"\x02\x02"
#: Ends a journal that names a super-journal; no library here writes one.
_SUPER_JOURNAL: Final = bytes.fromhex("d9d505f920a163d7")
#: Bytes that sqlite locks: start and length.
_PENDING: Final = (0x40000000, 1)
_RESERVED: Final = (0x40000001, 1)
_SHARED: Final = (0x40000002, 510)
#: Minimum timeout for opening a file, in seconds.
_OPENING: Final = 1.0
_CHUNK: Final = 1 << 20
#: Steps of sqlite's machine between two looks at the budget; steps that any statement may take; and more for each byte
#: on the disk. A row has 20 bytes at least and takes some 20 steps; compression makes a file 10 times smaller, or more.
_STEPS: Final = 20_000
_STEPS_FREE: Final = 5_000_000
_STEPS_PER_BYTE: Final = 60
#: Largest value, longest statement (that of a table included), columns of a table, depth of an expression.
_LIMITS: Final = {
    "SQLITE_LIMIT_LENGTH": 1 << 29,
    "SQLITE_LIMIT_SQL_LENGTH": 1 << 20,
    "SQLITE_LIMIT_COLUMN": 100,
    "SQLITE_LIMIT_EXPR_DEPTH": 100,
    "SQLITE_LIMIT_TRIGGER_DEPTH": 1,
}
#: Limit on the tables and indexes in one file.
_OBJECTS: Final = 20
#: Characters of a foreign name shown in messages.
_LONGEST: Final = 80
_TOKEN: Final = regex(r"\s*(?:`([^`]*)`|\"([^\"]*)\"|\[([^\]]*)\]|(\w+)|(.))", re.DOTALL)
_IF_NOT_EXISTS: Final = ("if", "not", "exists")


class Connection(sqlite3.Connection):
    """A connection that limits the work of each statement in proportion to the size of the file."""

    #: Of the file's folder, while it is open for writing.
    folder: int | None = None
    _budget: int = 0

    def harden(self, size: int) -> None:
        """Restrict the features and the work of sqlite for a file of ``size`` bytes on the disk."""
        self._budget = (_STEPS_FREE + _STEPS_PER_BYTE * size) // _STEPS
        self.text_factory = lambda data: data.decode(errors="surrogateescape")
        if hasattr(self, "setlimit"):
            for name, most in _LIMITS.items():
                self.setlimit(getattr(sqlite3, name), most)
        if hasattr(self, "setconfig"):
            self.setconfig(vars(sqlite3)["SQLITE_DBCONFIG_DEFENSIVE"])
        self.execute("pragma trusted_schema = off")
        self.execute("pragma cell_size_check = on")

    def execute(self, *arguments: Any) -> sqlite3.Cursor:  # noqa: ANN401 - as the method of sqlite3
        """Execute a statement with a budget of its own."""
        self._grant()
        return super().execute(*arguments)

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:  # noqa: ANN401 - as the method of sqlite3
        """Execute a statement several times."""
        self._grant()
        return super().executemany(*arguments)

    def _grant(self) -> None:
        # Only C functions: an exception of a signal handler would be lost in a Python function.
        self.set_progress_handler(chain(repeat(0, self._budget), repeat(1)).__next__, _STEPS)


def on_disk(status: os.stat_result) -> int:
    """Return the bytes that a file takes on the disk, fewer than its length if it is sparse."""
    return min(status.st_size, 512 * getattr(status, "st_blocks", status.st_size))


# ---------------------------------------------------------------------- content


def demand_made_by(connection: sqlite3.Connection, statements: Iterable[str], layer: str, path: Path) -> bool:
    """Demand that a file contains only the objects of these ``create`` statements; return whether it has any.

    Raises :class:`Damaged` if a table of the library has another definition (names in any case), if another object acts
    on such a table, or if there are only other tables. Raises :class:`Refused` for other objects beside the library's
    tables.
    """
    allowed = _made_by(tuple(statements))
    names = {str(name).lower() for _, name, _, _ in allowed}
    query = "select type, name, tbl_name, sql from sqlite_master limit ?"
    found = connection.execute(query, (_OBJECTS,)).fetchall()
    if len(found) == _OBJECTS:
        # Sqlite accepts one index many times in a schema, and objects after the limit have not been read.
        raise Damaged(layer, f"holds {_OBJECTS} or more tables and indexes; its library does not make as many", path)
    foreign = [one for one in found if (*one[:3], _tokens(one[3])) not in allowed]
    for kind, name, table, _ in foreign:
        if {str(name).lower(), str(table).lower()} & names or len(foreign) == len(found):
            raise Damaged(layer, f"holds a {kind} {str(name)[:_LONGEST]!r} that its library does not make", path)
    for kind, name, _, _ in foreign:
        message = f"holds a {kind} {str(name)[:_LONGEST]!r} that its library does not make; left alone"
        raise Refused(layer, message, path)
    return bool(found)


@lru_cache
def _made_by(statements: tuple[str, ...]) -> frozenset[tuple[object, ...]]:
    """Return the rows of a new database's schema after each statement; both versions if two make one table."""
    made: set[tuple[object, ...]] = set()
    tables = [statement for statement in statements if "table" in _tokens(statement)[:2]]
    for statement in statements:
        with closing(sqlite3.connect(":memory:")) as connection:
            for first in (*([] if statement in tables else tables), statement):
                connection.execute(first)
            for kind, name, table, sql in connection.execute("select type, name, tbl_name, sql from sqlite_master"):
                made.add((kind, name, table, _tokens(sql)))
    return frozenset(made)


def _tokens(sql: object) -> tuple[str, ...]:
    """Return the tokens of a statement in lower case, without quotes; none for an index without a statement."""
    if not isinstance(sql, str):
        return ()
    words = [next(filter(None, found.groups()), "").lower() for found in _TOKEN.finditer(sql.strip())]
    for place in range(len(words) - 2):
        if tuple(words[place : place + 3]) == _IF_NOT_EXISTS:
            del words[place : place + 3]
            break
    return tuple(words)


# ---------------------------------------------------------------------- reading


@contextmanager
def opened_for_reading(layer: str, path: Path, lock_timeout: float) -> Iterator[Connection]:
    """Open a database in its state without interrupted writes; change nothing on the disk.

    Raises :class:`Busy` after ``lock_timeout`` seconds, :class:`OSError`, :class:`sqlite3.Error`, :class:`Unreachable`
    if a write was interrupted and the file is too large to be copied, and :class:`Damaged` for a foreign journal.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(_opened_folder(path))
        handle = borrow(path.name, dir_fd=folder)
        stack.callback(release, handle)
        locked = stack.enter_context(_shared_lock(layer, path, handle, lock_timeout))
        header = os.pread(handle, 100, 0)
        if header and not header.startswith(MAGIC):
            raise sqlite3.DatabaseError("file is not a database")
        companion = _pending(folder, handle, path.name, journals=locked and bool(header))
        if companion is not None:
            beside = open_plain(path.name + companion, dir_fd=folder)
            stack.callback(os.close, beside)
            copy = stack.enter_context(_Pending(layer, path, companion, lock_timeout).copied(handle, beside))
            location = f"{_uri(copy)}?mode=rw"
        elif locked or header[18:20] == WAL_MODE or status_of(folder, f"{path.name}-wal") is not None:
            location = f"{_uri(path)}?mode=ro&immutable=1"
        else:
            location = f"{_uri(path)}?mode=ro"
        if companion is None and shared_because(path.parent, (path.name,)) is not None:
            connection = stack.enter_context(_connected_in_time(layer, path, location, lock_timeout))
        else:
            connection = stack.enter_context(_connected(location, lock_timeout))
        if companion is None and not _is_open(handle):
            raise Unreachable(layer, "was replaced while it was opened", path)
        connection.harden(on_disk(os.fstat(handle)))
        yield connection


@contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    with opened_root(path.parent) as folder:
        if folder is None:
            raise FileNotFoundError(2, os.strerror(2), str(path.parent))
        yield folder


def _uri(path: Path) -> str:
    return f"file:{quote(os.fsencode(path))}"


@contextmanager
def _connected(location: str, lock_timeout: float) -> Iterator[Connection]:
    with closing(_connect(location, lock_timeout)) as connection:
        yield connection


def _connect(location: str, lock_timeout: float) -> Connection:
    """Connect to a database. Threads may share the connection, but only one at a time uses it."""
    return sqlite3.connect(
        location, timeout=lock_timeout, uri=True, isolation_level=None, factory=Connection, check_same_thread=False
    )


@contextmanager
def _connected_in_time(layer: str, path: Path, location: str, lock_timeout: float) -> Iterator[Connection]:
    """Connect to a file that another user can replace by a pipe, whose opening would block for ever.

    Sqlite repeats an interrupted call, so it runs in a separate thread. Raises :class:`Unreachable` after
    ``lock_timeout`` seconds; the thread remains then, but does not prevent process exit.
    """
    from queue import Empty, Queue
    from threading import Thread

    opened: Queue[Connection | Exception] = Queue()

    def connect() -> None:
        try:
            opened.put(_connect(location, lock_timeout))
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            opened.put(error)

    Thread(target=connect, daemon=True).start()
    try:
        answer = opened.get(timeout=max(lock_timeout, _OPENING))
    except Empty as error:
        raise Unreachable(layer, "cannot be opened: something else has taken its place", path) from error
    if isinstance(answer, Exception):
        raise answer
    with closing(answer) as connection:
        yield connection


def _is_open(handle: int) -> bool:
    """Return whether this process has a file open a second time, so that sqlite has opened the same file by name."""
    numbers = open_again(handle)
    return numbers is None or len(numbers) > 1


def _pending(folder: int, handle: int, name: str, *, journals: bool) -> str | None:
    """Return the suffix of the file beside a database that is needed to read it; ``None`` if there is none.

    Without our lock the journal may be that of a running program, so ``journals`` must not be set.
    """
    log = status_of(folder, f"{name}-wal")
    if log is not None and stat.S_ISREG(log.st_mode) and log.st_size:
        return "-wal"
    return "-journal" if journals and _is_hot(folder, handle, name) else None


def has_journal(path: Path) -> bool:
    """Return whether a journal lies beside a database, even one that a program is writing now."""
    with suppress(OSError):
        return stat.S_ISREG(Path(f"{path}-journal").lstat().st_mode)
    return False


def _is_hot(folder: int, handle: int, name: str) -> bool:
    """Return whether a journal of an interrupted write exists. The caller's lock prevents new writes."""
    status = status_of(folder, f"{name}-journal")
    if status is None or not stat.S_ISREG(status.st_mode) or not status.st_size or _is_write_locked(handle, _RESERVED):
        return False
    journal = open_plain(f"{name}-journal", dir_fd=folder)
    try:
        return os.pread(journal, 1, 0) not in (b"", b"\0")
    finally:
        os.close(journal)


class _Pending(NamedTuple):
    """A database with a log or a journal that sqlite must apply first."""

    layer: str
    path: Path
    companion: str
    lock_timeout: float

    @contextmanager
    def copied(self, handle: int, beside: int) -> Iterator[Path]:
        """Copy the open database and the open file beside it to a private folder; yield the copy's path."""
        if on_disk(os.fstat(handle)) + on_disk(os.fstat(beside)) > SANE:
            raise Unreachable(self.layer, self._waiting, self.path)
        from cachectl.layers.disk.temporaries import temporary_folder

        with ExitStack() as stack:
            try:
                scratch = stack.enter_context(temporary_folder())
                copy = self._copy(handle, beside, scratch / "copy.sqlite")
            except LayerError:
                raise
            except (OSError, CachectlError) as error:
                because = error.strerror if isinstance(error, OSError) else str(error)
                raise Unreachable(self.layer, f"{self._waiting} (no copy: {because})", self.path) from error
            yield copy

    def _copy(self, handle: int, beside: int, copy: Path) -> Path:
        copied = copy.with_name(copy.name + self.companion)

        def is_whole() -> bool:
            before = _versions(handle, beside)
            _copy_file(handle, copy)
            _copy_file(beside, copied)
            return _versions(handle, beside) == before

        if not wait_until(is_whole, self.lock_timeout):
            message = f"written to all the time for more than {self.lock_timeout:g} s"
            raise Busy(self.layer, f"{message}; try again when the program has ended, or use --wait", self.path)
        self._demand_own(copied)
        return copy

    def _demand_own(self, copied: Path) -> None:
        """Check the copy of a journal: another user can change the original after a check, but not the copy."""
        if self.companion == "-journal":
            with copied.open("rb") as journal:
                _demand_own_journal(self.layer, self.path, journal.fileno())

    @property
    def _waiting(self) -> str:
        if self.companion == "-wal":
            return "a large log is pending, which its own library must fold in first"
        return f"an interrupted write is pending; cachectl purge {self.layer} rolls it back first, as any program does"


def _versions(*handles: int) -> list[tuple[int, int]]:
    return [(status.st_size, status.st_mtime_ns) for status in map(os.fstat, handles)]


def _copy_file(source: int, target: Path) -> None:
    with target.open("wb") as file:
        while data := os.pread(source, _CHUNK, file.tell()):
            file.write(data)


# ---------------------------------------------------------------------- locks


@contextmanager
def _shared_lock(layer: str, path: Path, handle: int, lock_timeout: float) -> Iterator[bool]:
    """Hold the lock of a reader; yield whether this system has locks that belong to a descriptor.

    A lock of the process would be lost when any descriptor of the file is closed.
    """
    if not _has_own_locks():
        yield False
        return
    if not wait_until(lambda: _try_to_share(handle), lock_timeout):
        raise locked_too_long(layer, path, lock_timeout)
    try:
        yield True
    finally:
        _lock(handle, "F_UNLCK", _SHARED)


def locked_too_long(layer: str, path: Path, lock_timeout: float) -> Busy:
    """Return the error for a lock that another program held beyond the timeout."""
    message = f"locked by another process for more than {lock_timeout:g} s; try again later, or use --wait"
    return Busy(layer, message, path)


def _try_to_share(handle: int) -> bool:
    """Take the lock of a reader as sqlite does: not while a writer waits for the readers to end."""
    try:
        _lock(handle, "F_RDLCK", _PENDING)
    except (BlockingIOError, PermissionError):
        return False
    try:
        _lock(handle, "F_RDLCK", _SHARED)
    except (BlockingIOError, PermissionError):
        return False
    finally:
        _lock(handle, "F_UNLCK", _PENDING)
    return True


def _has_own_locks() -> bool:
    if not has_record_structure():
        return False
    import fcntl

    return hasattr(fcntl, "F_OFD_SETLK")


def _lock(handle: int, kind: str, span: tuple[int, int]) -> None:
    import fcntl

    ask_for_record(handle, fcntl.F_OFD_SETLK, getattr(fcntl, kind), span)


def _is_write_locked(handle: int, span: tuple[int, int]) -> bool:
    """Return whether any process, this one included, holds a lock for writing."""
    if not _has_own_locks():
        return False
    import fcntl

    return ask_for_record(handle, fcntl.F_OFD_GETLK, fcntl.F_RDLCK, span) != fcntl.F_UNLCK


# ---------------------------------------------------------------------- writing


@contextmanager
def opened_for_writing(
    layer: str, path: Path, lock_timeout: float, demand: Callable[[Connection], object], *, create: bool = False
) -> Iterator[Connection]:
    """Open a database for writing; sqlite rolls back interrupted writes first.

    ``demand`` is called with the connection of an existing database, and raises an error if it is unusable. With
    ``create`` a missing file is made, and its folder. Raises as :func:`opened_for_reading`, and :class:`Unreachable`
    if another user can write to the folder or to the file.
    """
    with ExitStack() as stack:
        if create and not path.parent.exists():
            above = nearest(path.parent.parent)
            _demand_alone(layer, above / path.name)
            path.parent.mkdir(parents=True, exist_ok=True)
        folder = stack.enter_context(_opened_folder(path))
        real = Path(os.path.realpath(path.parent), path.name)
        _demand_alone(layer, path)
        fresh = create and _make(folder, path.name)
        handle = borrow(path.name, dir_fd=folder)
        stack.callback(release, handle)
        _demand_own_companions(layer, path, folder)
        connection = stack.enter_context(_connected(f"{_uri(real)}?mode=rw", lock_timeout))
        connection.harden(on_disk(os.fstat(handle)))
        connection.folder = folder
        if not fresh:
            demand(connection)
        # By now sqlite has opened it and its log by name.
        if not _is_open(handle) or not _leads_to(real, folder, handle):
            raise Unreachable(layer, "was replaced while it was opened", path)
        yield connection


def demand_writable(layer: str, path: Path) -> None:
    """Raise the errors of :func:`opened_for_writing` for other users and foreign journals. Changes nothing."""
    with opened_root(path.parent) as folder:
        if folder is not None:
            _demand_alone(layer, path)
            _demand_own_companions(layer, path, folder)


def _demand_alone(layer: str, path: Path) -> None:
    names = tuple(path.name + ending for ending in ("", *COMPANIONS))
    if (because := shared_because(path.parent, names)) is not None:
        message = f"not opened for writing: {because}, and could make sqlite delete other files; close it to them first"
        raise Unreachable(layer, message, path)


def _demand_own_companions(layer: str, path: Path, folder: int) -> None:
    """Refuse files beside a database that would make sqlite block or delete another file."""
    for ending in COMPANIONS:
        if status_of(folder, path.name + ending) is None:
            continue
        handle = open_plain(path.name + ending, dir_fd=folder)
        try:
            if ending == "-journal":
                _demand_own_journal(layer, path, handle)
        finally:
            os.close(handle)


def _demand_own_journal(layer: str, path: Path, journal: int) -> None:
    """Refuse a journal that names another file: its rollback by sqlite would delete that file."""
    size = os.fstat(journal).st_size
    if os.pread(journal, len(_SUPER_JOURNAL), max(0, size - len(_SUPER_JOURNAL))) == _SUPER_JOURNAL:
        raise Damaged(layer, "its journal names another file, which sqlite would delete", path)


def _make(folder: int, name: str) -> bool:
    """Make an empty file, which sqlite takes for a new database; return ``False`` if the file exists."""
    try:
        os.close(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644, dir_fd=folder))
    except FileExistsError:
        return False
    return True


def _leads_to(path: Path, folder: int, handle: int) -> bool:
    """Return whether a path still leads to an open folder and file."""
    with suppress(OSError):
        same = os.path.samestat(path.parent.stat(), os.fstat(folder))
        return same and os.path.samestat(path.lstat(), os.fstat(handle))
    return False
