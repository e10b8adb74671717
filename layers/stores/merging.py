"""Databases of one kind brought together: what one has and the other lacks goes in, what both have stays as it is.

A file of rows, or of records, takes in another's in one transaction or one rewrite; a key that stands there with
another content is given back, never replaced.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.errors import Damaged, LayerError, Unreachable
from cachectl.layers.disk.handles import opened_root, own_folder
from cachectl.layers.disk.plain import STAGE
from cachectl.layers.stores.database import COMPANIONS
from cachectl.layers.stores.records import RecordFile, items_of, record_complaint, split_lines
from cachectl.layers.stores.rows import RowFile, Schema

#: What everybody may read and its owner write.
_MODE: Final = 0o644


class Merged(NamedTuple):
    """How many were new, how many were there already, and the keys under which something else stands."""

    added: int
    there: int
    conflicts: tuple[tuple[str, ...], ...]

    def plus(self, other: Merged) -> Merged:
        """Add up."""
        return Merged(self.added + other.added, self.there + other.there, (*self.conflicts, *other.conflicts))


class Joined(NamedTuple):
    """Two tables, one of which names rows of the other by their id.

    ``create`` makes both. ``problem`` names the columns that make a row of ``problems``; ``reference`` is where
    ``table`` names it, ``key`` and ``value`` are the other columns there.
    """

    create: tuple[str, ...]
    problems: str
    problem: tuple[str, ...]
    table: str
    reference: str
    key: str
    value: str

    @property
    def select(self) -> str:
        """Spell the query that gives every row: the id of its problem, its columns, key, value."""
        columns = ", ".join(f'"{self.problems}"."{column}"' for column in self.problem)
        joined = f'"{self.table}" join "{self.problems}" on "{self.problems}".id = "{self.table}"."{self.reference}"'
        own = f'"{self.table}"."{self.key}", "{self.table}"."{self.value}"'
        return f'select "{self.table}"."{self.reference}", {columns}, {own} from {joined} order by {columns}, {own}'


class JoinedRows(RowFile):
    """A sqlite file of two such tables, read and added to."""

    def __init__(self, layer: str, path: Path, schema: Schema, joined: Joined, lock_timeout: float) -> None:
        super().__init__(layer, path, schema, lock_timeout)
        self.joined = joined

    def all(self) -> list[tuple[object, ...]]:
        """Return every row as :attr:`Joined.select` gives it, in an order of its own."""
        with self._reading() as connection:
            return [] if self._is_new(connection) else [tuple(row) for row in connection.execute(self.joined.select)]

    def merge(self, rows: Iterable[Sequence[object]]) -> Merged:
        """Insert, in one transaction, every row, given without the id, whose problem has none of its key yet."""
        added = there = 0
        conflicts: list[tuple[str, ...]] = []
        with self._writing(create=True) as connection:
            connection.execute("begin immediate")
            for create in self.joined.create:
                connection.execute(create)
            for *problem, key, value in rows:
                number = self._number(connection, problem)
                query = f'select "{self.joined.value}" from "{self.joined.table}" where "{self.joined.reference}" = ?'
                standing = connection.execute(f'{query} and "{self.joined.key}" = ?', (number, key)).fetchone()
                if standing is None:
                    columns = f'"{self.joined.reference}", "{self.joined.key}", "{self.joined.value}"'
                    statement = f'insert into "{self.joined.table}" ({columns}) values (?, ?, ?)'
                    connection.execute(statement, (number, key, value))
                    added += 1
                elif standing[0] == value:
                    there += 1
                else:
                    conflicts.append(("x".join(map(str, problem)), str(key)))
            connection.execute("commit")
        return Merged(added, there, tuple(conflicts))

    def _number(self, connection: sqlite3.Connection, problem: Sequence[object]) -> int:
        """Return the id of a problem, which is inserted where there is none."""
        condition = " and ".join(f'"{column}" = ?' for column in self.joined.problem)
        query = f'select id from "{self.joined.problems}" where {condition}'
        found = connection.execute(query, tuple(problem)).fetchone()
        if found is not None:
            return int(found[0])
        columns = ", ".join(f'"{column}"' for column in self.joined.problem)
        places = ", ".join("?" for _ in problem)
        statement = f'insert into "{self.joined.problems}" ({columns}) values ({places})'
        return int(connection.execute(statement, tuple(problem)).lastrowid or 0)


class MergingRecords(RecordFile):
    """A text file that takes in records of another."""

    def merge(self, lines: Iterable[bytes]) -> Merged:
        """Add what is missing, key by key and id by id, in one rewrite under the lock."""
        with self._translated("write"), self.lock() as folder:
            merged, records = join_records(split_lines(self._content(folder)), lines)
            if merged.added:
                self._rewrite(records, folder)
        return merged


def join_records(standing: Iterable[bytes], lines: Iterable[bytes]) -> tuple[Merged, list[bytes]]:
    """Add what is missing to records, key by key and id by id, and return what became of it and all records.

    Lines that are no record stay where they stand.
    """
    records = list(standing)
    where: dict[bytes, int] = {}
    for number, line in enumerate(records):
        key, equals, _ = line.partition(b"=")
        if equals:
            where.setdefault(key, number)
    total = Merged(0, 0, ())
    for line in lines:
        key = line.partition(b"=")[0]
        if key not in where:
            where[key] = len(records)
            records.append(line)
            total = total.plus(Merged(len(items_of(line)), 0, ()))
            continue
        merged, records[where[key]] = _join_items(records[where[key]], line)
        total = total.plus(merged)
    return total, records


def _join_items(standing: bytes, line: bytes) -> tuple[Merged, bytes]:
    key = line.partition(b"=")[0].decode(errors="surrogateescape")
    if record_complaint(standing):
        # Nobody reads it; nothing can be added to it either.
        return Merged(0, 0, ((key,),)), standing
    there, offered = items_of(standing), items_of(line)
    new = {identifier: values for identifier, values in offered.items() if identifier not in there}
    other = [one for one, values in offered.items() if there.get(one, values) != values]
    conflicts = tuple((key, identifier.decode(errors="surrogateescape")) for identifier in other)
    joined = standing
    for identifier, values in new.items():
        joined += (b"" if joined.endswith(b";") else b";") + identifier + b":" + values
    return Merged(len(new), len(offered) - len(new) - len(other), conflicts), joined


def write_database(layer: str, path: Path, fill: Callable[[Path], object]) -> None:
    """Make a sqlite file whole beside its place and rename it in, in rollback mode, for everybody to read.

    ``fill`` writes it at the path it is given. Raises :class:`Damaged` where a log lies beside the place: sqlite would
    play it into the new file.
    """
    for companion in COMPANIONS:
        beside = path.with_name(path.name + companion)
        if os.path.lexists(beside):
            raise Damaged(layer, "a log of another database lies beside it; fold it in or remove both", beside)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with opened_root(path.parent) as parent:
            if parent is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            # In a folder of its own: sqlite writes only where no other user can, as in /tmp nobody is alone.
            with own_folder(parent, STAGE) as (folder, name):
                stage = path.parent / name / path.name
                fill(stage)
                with closing(sqlite3.connect(stage)) as connection:
                    connection.execute("pragma journal_mode=delete")
                os.chmod(stage, _MODE)
                _sync(stage)
                os.rename(path.name, path.name, src_dir_fd=folder, dst_dir_fd=parent)
                os.fsync(parent)
    except sqlite3.Error as error:
        raise Unreachable(layer, f"cannot write: {error}", path) from error
    except LayerError:
        raise
    except OSError as error:
        raise Unreachable(layer, f"cannot write: {error.strerror or error}", path) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
