"""Records of a text file, one ``KEY=ID:VALUES{;ID:VALUES}`` per line. Changes rewrite the whole file.

The reading rules are those of MIOpen (``src/db_record.cpp``, ``src/ramdb.cpp``): the first of equal keys, or of equal
ids in a record, counts; an item without ``:`` is skipped and the others count; a line without a key, or without a valid
item, is never hit. A rewrite is staged beside the file and renamed over it, under a lock that the caller supplies. It
keeps every other line byte for byte.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers import core
from cachectl.layers.disk import atomic, plain


class Record(NamedTuple):
    """One usable line: its number, and its bytes without the newline."""

    number: int
    key: str
    line: bytes

    @property
    def items(self) -> dict[str, str]:
        """Map each id to its values."""
        return {_text(identifier): _text(values) for identifier, values in items_of(self.line).items()}

    @property
    def checksum(self) -> int:
        """Return a checksum of the line."""
        return zlib.crc32(self.line)


class Fault(NamedTuple):
    """A line that the reader uses not at all or in part, or that would damage the next one written."""

    number: int
    code: str
    message: str


class RecordFile:
    """One text file of records.

    ``lock`` makes the context in which a rewrite happens. Methods raise :class:`Unreachable` when the operating system
    refuses, and whatever the lock raises.
    """

    def __init__(self, layer: str, path: Path, lock: Callable[[], AbstractContextManager[None]]) -> None:
        self.layer = layer
        self.path = path
        self.lock = lock

    def scan(self) -> Iterator[Record | Fault]:
        """Yield every record that counts and every fault, in the order of the file."""
        seen: dict[str, bool] = {}
        last = b"\n"
        with self._translated("read"), suppress(FileNotFoundError), open(plain.open_plain(self.path), "rb") as file:
            # A sparse file would be one endless line.
            if (size := os.fstat(file.fileno()).st_size) > core.LARGEST_RECORDS:
                raise OSError(errno.EFBIG, core.too_large(size, core.LARGEST_RECORDS))
            for number, last in enumerate(file, 1):
                yield from _judge(number, last.removesuffix(b"\n"), seen)
            if not last.endswith(b"\n"):
                yield Fault(number, "newline", "the file does not end its last line: the next record would join it")

    def read_many(self, keys: Iterable[str]) -> dict[str, Record | core.Damaged]:
        """Return the records of those keys that have one.

        Each is the first line with its key, or the error why that is unusable: later ones are never read.
        """
        first: dict[str, tuple[int, bytes]] = {}
        for number, line in enumerate(split_lines(self._content()), 1):
            first.setdefault(_key(line), (number, line))
        found: dict[str, Record | core.Damaged] = {}
        for key in first.keys() & set(keys):
            number, line = first[key]
            complaint = record_complaint(line)
            wrong = None if complaint is None else core.Damaged(self.layer, f"line {number}: {complaint}", self.path)
            found[key] = wrong or Record(number, key, line)
        return found

    def put(self, lines: Sequence[bytes], *, replace: bool = False) -> Sequence[bool | core.LayerError]:
        """Insert the records whose keys are free, in one rewrite; with ``replace`` also in the places of others.

        Returns for each: ``True`` if it was inserted, ``False`` if the same record is present, else the error:
        :class:`EntryExists` if a different one is present and ``replace`` is not set. Raises :class:`LayerError` if the
        file cannot be read.
        """
        # Only what is to change takes the lock.
        results = self._inserted(lines, split_lines(self._content()), replace=replace)
        if True not in results:
            return results
        try:
            with self._translated("write"), self.lock():
                standing = split_lines(self._content())
                results = self._inserted(lines, standing, replace=replace)
                if True in results:
                    self._rewrite(standing)
        except core.LayerError as error:
            # The record may be in the file already: a retry would find it and take it for an older one.
            return [error if result is True else result for result in results]
        return results

    def _inserted(
        self, lines: Sequence[bytes], standing: list[bytes], *, replace: bool
    ) -> list[bool | core.LayerError]:
        """Insert lines into those of a file; return the result of each."""
        # Filled from the end, so that the first of equal keys wins.
        places = {_key(line): place for place, line in reversed(list(enumerate(standing)))}
        results: list[bool | core.LayerError] = []
        for line in lines:
            if complaint := record_complaint(line):
                results.append(core.Damaged(self.layer, complaint, self.path))
                continue
            place = places.setdefault(_key(line), len(standing))
            if standing[place : place + 1] == [line]:
                results.append(False)
            elif place < len(standing) and not replace:
                results.append(core.EntryExists(self.layer, self.path))
            else:
                standing[place : place + 1] = [line]
                results.append(True)
        return results

    def delete(self, checksums: Mapping[str, int]) -> set[str]:
        """Delete records by key, each only if its line has the checksum; return the keys that went.

        Later lines with such a key are deleted too, because they would be hit from then on. An empty file is unlinked.
        """
        with self._translated("write"), self.lock():
            lines = split_lines(self._content())
            # Filled from the end, so that the first of equal keys wins.
            first = {_key(line): line for line in reversed(lines)}
            gone = {key for key, checksum in checksums.items() if key in first and zlib.crc32(first[key]) == checksum}
            if gone:
                self._rewrite([line for line in lines if _key(line) not in gone])
        return gone

    # ------------------------------------------------------------------ the file

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        if any(lines):
            atomic.replace_file(self.path, [b"".join(line + b"\n" for line in lines)])
        else:
            atomic.remove_file(self.path)

    def _content(self) -> bytes:
        with self._translated("read"), suppress(FileNotFoundError):
            return plain.read_plain(self.path, most=core.LARGEST_RECORDS)
        return b""

    @contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        try:
            yield
        except core.LayerError:
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise core.Refused(self.layer, "a link is not followed", self.path) from error
            raise core.Unreachable(self.layer, f"cannot {verb}: {error.strerror or error}", self.path) from error


def record_complaint(line: bytes) -> str | None:
    """Return why a line is no record; ``None`` if it is one."""
    key, equals, contents = line.partition(b"=")
    if not equals or not key:
        return "no key and '=' at its beginning"
    if b"\n" in line:
        return "more than one line"
    if not contents:
        return "nothing follows the '='"
    return None if b":" in contents else "no value has an id and ':'"


def items_of(line: bytes) -> dict[bytes, bytes]:
    """Map each id of a record to its values, as the reader does: the first of equal ids, no item without ``:``."""
    items: dict[bytes, bytes] = {}
    for item in line.partition(b"=")[2].split(b";"):
        identifier, colon, values = item.partition(b":")
        if colon:
            items.setdefault(identifier, values)
    return items


def _judge(number: int, line: bytes, seen: dict[str, bool]) -> Iterator[Record | Fault]:
    """Yield a line's record and its faults; ``seen`` maps each key so far to whether its first line is a record."""
    key, complaint = _key(line), record_complaint(line)
    if not line:
        return
    if key in seen:
        if seen[key]:
            yield Fault(number, "duplicate", f"an earlier line has the key {key}: this one is never read")
        else:
            # The reader uses it once the first one has gone.
            yield Fault(number, "hidden", f"an earlier line has the key {key} but no value, and hides this one")
        return
    if key:
        seen[key] = complaint is None
    if complaint is not None:
        yield Fault(number, "malformed", complaint)
        return
    yield Record(number, key, line)
    # The reader ignores a ';' at the end.
    items = line.partition(b"=")[2].removesuffix(b";").split(b";")
    with_id = sum(b":" in item for item in items)
    if with_id < len(items):
        yield Fault(number, "item", "a value has no id and ':': it is skipped, the others are read")
    if len(items_of(line)) < with_id:
        yield Fault(number, "duplicate-id", "an id stands twice in the record: only the first is read")


def _key(line: bytes) -> str:
    key, equals, _ = line.partition(b"=")
    return _text(key) if equals else ""


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def split_lines(content: bytes) -> list[bytes]:
    """Split a file into its lines without their ends, empty ones included."""
    return content.removesuffix(b"\n").split(b"\n") if content else []
