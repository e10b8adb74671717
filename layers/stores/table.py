"""Tables: the rows of one file, of which a store knows only the keys and sizes.

Three kinds of file are tables: databases of sqlite (:mod:`~cachectl.layers.stores.rows`), text files of records
(:mod:`~cachectl.layers.stores.records`), and the pairs of files of Mesa (:mod:`cachectl.layers.mesa.pairs`).
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.errors import LayerError, NoRoom, Refused, Unreachable
from cachectl.layers.disk import handles
from cachectl.layers.stores import database
from cachectl.layers.stores.tree_read import CHANGED

MAKE_ROOM = "; make room and try again"


class Row(NamedTuple):
    """One row: a number that identifies it or its content, its key, and its size."""

    rowid: int
    key: str
    bytes: int


class TableFile(ABC):
    """The rows of one file. Each kind of file has the six methods before :meth:`gone`; some override others.

    Every method raises :class:`LayerError`: :class:`Busy` if a lock outlasts the timeout, :class:`Damaged` if the
    library could not use the file, :class:`Refused` if it holds what the library does not make, and
    :class:`Unreachable` if the operating system refuses or the content is unknown.
    """

    def __init__(self, layer: str, path: Path) -> None:
        self.layer = layer
        self.path = path

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return every row's key and size, in the order of insertion."""

    @abstractmethod
    def read(self, keys: Sequence[str]) -> list[bytes | LayerError | None]:
        """Return the content of several rows, or the error of one; ``None`` for each without a row or file."""

    @abstractmethod
    def insert(self, rows: Sequence[tuple[str, bytes]], *, replace: bool = False) -> list[bool | LayerError]:
        """Insert keys with their content, with ``replace`` also over present ones; make the file if missing.

        Returns ``True`` for each that was inserted, ``False`` if the same row was present, else the error, such as
        :class:`EntryExists`.
        """

    @abstractmethod
    def delete(self, rows: Iterable[Row]) -> frozenset[Row]:
        """Delete exactly these rows, except those that have changed; return the deleted ones."""

    def check(self) -> bool:
        """Return whether there is a table. Raises :class:`Damaged` if the library could not use it."""
        return bool(self.rows())

    def size(self) -> int:
        """Return the bytes that the file and those next to it take on disk. Raises :class:`OSError`."""
        return sum(database.sizes_of(self.path))

    def gone(self, rows: Iterable[Row]) -> int:
        """Return how many of these rows are missing, after an attempt to delete them has failed."""
        return sum(content is None for content in self.read([row.key for row in rows]))

    def vacuum(self) -> str | None:
        """Free the disk space of deleted rows; return why that failed, or ``None``."""
        return None

    def recover(self) -> None:  # noqa: B027 - most writes are complete, or have not happened
        """Finish an interrupted write, or roll it back, as the next program would."""

    def remove_damaged(self, stamp: tuple[int, ...], in_use: Callable[[Path], str | None]) -> str | None:
        """Remove the file if its library cannot use it; return why it was kept, or ``None``.

        ``stamp`` is that of :func:`database.file_stamp`; ``in_use`` returns who may have the file open.
        """
        del stamp, in_use
        return CHANGED

    def changed_since(self, stamp: tuple[int, ...]) -> str:
        """Return that a damaged file has changed. Raises :class:`Unreachable` if not: then its disk failed."""
        if database.file_stamp(self.path) == stamp:
            message = "its disk failed during the check, but works now; run the command again"
            raise Unreachable(self.layer, message, self.path)
        return CHANGED

    @contextmanager
    def translated(self, verb: str) -> Iterator[None]:
        """Translate errors of the operating system to :class:`LayerError`; ``verb`` says what was attempted."""
        try:
            yield
        except LayerError:
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Refused(self.layer, "a link is not followed", self.path) from error
            message = f"cannot {verb}: {error.strerror or error}"
            # Reading a file that is too large also fails with one of these.
            if error.errno in handles.NO_ROOM and verb != "read":
                raise NoRoom(self.layer, message + MAKE_ROOM, self.path) from error
            raise Unreachable(self.layer, message, self.path) from error
