"""Records of a text file, one ``KEY=ID:VALUES{;ID:VALUES}`` per line. Changes rewrite the whole file.

The reading rules are those of MIOpen (``src/db_record.cpp``, ``src/ramdb.cpp``): the first of equal keys, or of equal
ids in a record, counts; an item without ``:`` is skipped and the others count; a line without a key, or without a valid
item, is never hit. A rewrite is staged next to the file and renamed over it, under a lock that the caller supplies. It
keeps every other line byte for byte, even a last one without a newline.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from cachectl.layers.base.errors import Damaged, EntryExists, LayerError
from cachectl.layers.base.limits import LARGEST_RECORDS
from cachectl.layers.disk import atomic, plain
from cachectl.layers.stores.table import Row, TableFile

#: Number, code and message of a line that the reader ignores at least in part, or that would corrupt the next one.
Fault = tuple[int, str, str]
NO_CONTENTS = "nothing follows the '='"


class RecordFile(TableFile):
    """One text file of records.

    The id of a row is the checksum of its line, its size that of the line. ``lock`` makes the context of a rewrite;
    methods also raise what it raises.
    """

    def __init__(self, layer: str, path: Path, lock: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(layer, path)
        self.lock = lock

    def scan(self) -> Iterator[Row | Fault]:
        """Yield every record that counts and every fault, in the order of the file."""
        # Whether the first line of each key is a record.
        usable: dict[str, bool] = {}
        content, number = self._content(), 0
        for number, line in enumerate(split_lines(content), 1):
            key, complaint = _key(line), record_complaint(line)
            if not line:
                continue
            if key in usable:
                if usable[key]:
                    yield number, "duplicate", f"an earlier line has the key {key}: this one is never read"
                else:
                    # The reader uses it once the first one is deleted.
                    yield number, "hidden", f"an earlier line has the key {key} but no value, and hides this one"
                continue
            if key:
                usable[key] = complaint is None
            if complaint is not None:
                yield number, "malformed", complaint
                continue
            yield _row(line)
            # The reader ignores a ';' at the end.
            items = line.partition(b"=")[2].removesuffix(b";").split(b";")
            names = [item.partition(b":")[0] for item in items if b":" in item]
            if len(names) < len(items):
                yield number, "item", "a value has no id and ':': it is skipped, the others are read"
            if len(set(names)) < len(names):
                yield number, "duplicate-id", "an id appears twice in the record: only the first is read"
        if number and not content.endswith(b"\n"):
            yield number, "newline", "the file does not end its last line: the next record would join it"

    def rows(self) -> list[Row]:
        """Return every record that counts."""
        return [row for row in self.scan() if isinstance(row, Row)]

    def read(self, keys: Sequence[str]) -> list[bytes | LayerError | None]:
        """Return the first line of each key, even if it is unusable: MIOpen never reads later ones."""
        # Filled from the end, so that the first of equal keys wins.
        first = {_key(line): line for line in reversed(split_lines(self._content()))}
        return [first.get(key) for key in keys]

    def insert(self, rows: Sequence[tuple[str, bytes]], *, replace: bool = False) -> list[bool | LayerError]:
        """Insert the lines, which contain their keys, in one rewrite."""
        lines = [line for _, line in rows]
        # The lock is taken only to change something.
        results = self._inserted(lines, split_lines(self._content()), replace=replace)
        if True not in results:
            return results
        try:
            with self.translated("write"), self.lock():
                content = self._content()
                existing = split_lines(content)
                results = self._inserted(lines, existing, replace=replace)
                if True in results:
                    self._rewrite(content, existing)
        except LayerError as error:
            # The record may be in the file already: a retry would mistake it for an older one.
            return [error if result is True else result for result in results]
        return results

    def _inserted(self, lines: Sequence[bytes], existing: list[bytes], *, replace: bool) -> list[bool | LayerError]:
        """Insert lines into those of a file; return the result of each."""
        places = {_key(line): place for place, line in reversed(list(enumerate(existing)))}
        results: list[bool | LayerError] = []
        for line in lines:
            if complaint := record_complaint(line):
                results.append(Damaged(self.layer, complaint, self.path))
                continue
            place = places.setdefault(_key(line), len(existing))
            if existing[place : place + 1] == [line]:
                results.append(False)
            elif place < len(existing) and not replace:
                results.append(EntryExists(self.layer, self.path))
            else:
                existing[place : place + 1] = [line]
                results.append(True)
        return results

    def delete(self, planned: Iterable[Row]) -> frozenset[Row]:
        """Delete records whose lines have not changed, and later lines with their keys; return the former."""
        with self.translated("write"), self.lock():
            content = self._content()
            lines = split_lines(content)
            first = {_key(line): _row(line) for line in reversed(lines)}
            deleted = frozenset(planned) & frozenset(first.values())
            if deleted:
                keys = {row.key for row in deleted}
                self._rewrite(content, [line for line in lines if _key(line) not in keys])
        return deleted

    def _rewrite(self, old: bytes, lines: Sequence[bytes]) -> None:
        if any(lines):
            keeps_last = lines[-1:] == split_lines(old)[-1:]
            end = b"" if keeps_last and not old.endswith(b"\n") else b"\n"
            atomic.replace_file(self.path, [b"\n".join(lines) + end])
        else:
            atomic.remove_file(self.path)

    def _content(self) -> bytes:
        with self.translated("read"), suppress(FileNotFoundError):
            return plain.read_plain(self.path, most=LARGEST_RECORDS)
        return b""


def record_complaint(line: bytes) -> str | None:
    """Return why a line is not a record, or ``None``."""
    key, equals, contents = line.partition(b"=")
    if not equals or not key:
        return "does not begin with a key and '='"
    if b"\n" in line:
        return "more than one line"
    if not contents:
        return NO_CONTENTS
    return None if b":" in contents else "no value has an id and ':'"


def _row(line: bytes) -> Row:
    return Row(zlib.crc32(line), _key(line), len(line) + 1)


def _key(line: bytes) -> str:
    key, equals, _ = line.partition(b"=")
    return key.decode(errors="surrogateescape") if equals else ""


def split_lines(content: bytes) -> list[bytes]:
    """Split a file into its lines without their ends, empty ones included."""
    return content.removesuffix(b"\n").split(b"\n") if content else []
