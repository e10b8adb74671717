"""The store of layers that keep entries as rows of files, many of which are read or written at once."""

from __future__ import annotations

import os
import shlex
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from cachectl.layers.base import processes
from cachectl.layers.base.errors import Busy, Damaged, LayerError, Pending, Refused, UnknownFormat, reason_of
from cachectl.layers.core import codes
from cachectl.layers.core.entry import Artifact, Entry, Found, Note, Problem, orphan, unknown
from cachectl.layers.core.finding import FAILS, HARMLESS, RISKS, Finding, Severity
from cachectl.layers.core.plan import Outcome
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.core.store import (
    ENTRY,
    FOREIGN,
    OWN,
    Bound,
    Codec,
    Damage,
    EntryError,
    Store,
    attempt,
    damage_findings,
    finding_of,
    noted,
    unreadable,
    usage_of,
)
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import plain
from cachectl.layers.stores import database, files, rows
from cachectl.layers.stores import tree_read as tree
from cachectl.layers.stores.table import Row, TableFile

_T = TypeVar("_T")


class TableFormat(Bound, ABC):
    """The tables of a library: their files below a root, and what their rows hold.

    A table is a database of one ``schema``, unless ``opened`` returns another kind of file. The key of a row begins
    with the path of its table below the root and the ``separator``.
    """

    schema: ClassVar[rows.Schema]
    separator: ClassVar[str] = "/"
    codec: Codec
    #: Endings of the files that the library writes next to a table.
    companions: ClassVar[tuple[str, ...]] = database.COMPANIONS
    #: The effect of a table that cannot be read, or is not a file.
    when_damaged: ClassVar[Severity] = FAILS
    #: Whether a database without the table is damaged.
    needs_table = False
    #: Whether rows are checked when they are read, not only before they are written.
    checks_reads = True
    #: The abilities that the library's tables lack, each with the reason.
    refusals: Mapping[Ability, str] = {}

    @abstractmethod
    def is_table(self, file: str) -> bool:
        """Return whether a path below a root is that of a table."""

    @abstractmethod
    def list_rows(self, root: Root, file: str, template: Entry, *, part: bytes, contents: bool) -> Iterator[Found]:
        """Yield the entries and the problems of a table; ``template`` is what its entries have in common.

        With ``contents`` only entries that contain ``part`` are yielded, as do those of every selected kernel.
        """

    @abstractmethod
    def kind_of(self, root: Root, path: str) -> str:
        """Compare a path below a root, or a key, with the names of tables and their rows, as :meth:`Store.kind_of`."""

    def damages(self, key: str, data: bytes) -> Iterator[Damage]:
        """Yield what is wrong with an entry."""
        if (damage := self.codec.check(data)) is not None:
            yield damage

    def detail(self, key: str, data: bytes) -> Mapping[str, str]:
        """Return the facts that an artifact states of itself."""
        return self.codec.describe(data).stated

    def tables(self, root: Root) -> Iterator[str | Problem]:
        """Yield the path of each table below a root, and a problem for each link and whatever cannot be read."""
        try:
            folders = ("", *self.folders(root))
        except OSError as error:
            yield unreadable(root.path, error)
            return
        for folder in folders:
            place = root.path / folder
            try:
                paths = (os.path.join(folder, name) for name in sorted(os.listdir(place)))
                for file in filter(self.is_table, paths):
                    place = root.path / file
                    status = plain.status_at(place)
                    if status is None or not self.counts(root, status):
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield file
                    elif stat.S_ISLNK(status.st_mode) and os.path.isdir(os.path.dirname(os.path.realpath(place))):
                        yield Problem(place, "link", "a link that has a database's name is not followed")
                    else:
                        yield Problem(place, "no-file", "has the name of a database, but is not a file")
            except OSError as error:
                if not plain.means_absent(error):
                    yield unreadable(place, error)

    def folders(self, root: Root) -> Iterable[str]:
        """Return the folders below the root that also hold tables. Raises :class:`OSError`."""
        return ()

    def counts(self, root: Root, status: os.stat_result) -> bool:
        """Return whether a file of a root may be the user's."""
        return True

    def is_usable(self, root: Root, file: str) -> bool:
        """Return whether a table exists. Raises :class:`OSError` if that cannot be determined."""
        return plain.status_at(root.path / file) is not None

    def require_free(self, root: Root, file: str) -> None:
        """Raise :class:`LayerError` if something else is in the place of a table."""

    def opened(self, root: Root, file: str) -> TableFile:
        """Return a table."""
        return self.database(root, file)

    def database(self, root: Root, file: str) -> rows.RowFile:
        """Return a table that is a sqlite database."""
        waits, trusts = self.environment.lock_timeout, self.environment.trusts_writers
        return rows.RowFile(self.name, root.path / file, self.schema, waits, shared=trusts)

    def lock_files(self, root: Root, file: str) -> tuple[Path, ...]:
        """Return the files that the library locks while it changes a table: a database, or its index in WAL mode."""
        return root.path / file, database.companion(root.path / file, "-shm")

    def with_name(self, entry: Entry) -> Entry:
        """Add what the name of a table says of its entries; the key of ``entry`` is the path of the table."""
        return entry

    def entry_of(self, template: Entry, row: Row) -> Entry:
        """Return the entry of a row, given what the entries of its table have in common."""
        key = f"{template.key}{self.separator}{row.key}"
        return template._replace(key=key, bytes=row.bytes, stamp=(row.rowid, row.bytes))

    def require_fit(self, artifact: Artifact) -> None:
        """Raise :class:`Damaged` if an undamaged entry must not be put under its key."""

    def check_rows(self, root: Root, file: str) -> Iterator[Finding]:
        """Check a database with sqlite's own check, and every row. Raises :class:`LayerError` if it cannot be read."""
        opened = self.database(root, file)
        if not opened.check() and self.needs_table:
            raise Damaged(self.name, f"has no table {self.schema.table}", opened.path)
        template = Entry(self.name, file, root.path, 0, 0)
        for row, values in opened.rows_with():
            self.environment.step()
            entry = self.entry_of(template, row)
            try:
                data = self.schema.unpack(values)
            except ValueError as error:
                yield from damage_findings(self, root, entry, [Damage(FAILS, str(error))], None)
                continue
            except LayerError as error:
                yield finding_of(self, root, unreadable(opened.path, error))
                continue
            damages = list(self.damages(entry.key, data))
            yield from damage_findings(self, root, entry, damages, self.codec.foreign(data) if damages else None)
            if not damages and (reason := self.unexplained(entry.key, data)) is not None:
                fix = f"cachectl purge --key {shlex.quote(entry.key)} {self.name}"
                yield codes.UNKNOWN.finding(self.name, root.path, reason, fix, key=entry.key, severity=RISKS)

    def unexplained(self, key: str, data: bytes) -> str | None:
        """Return why it is unknown whether a program can use an undamaged row; ``None`` if there is no such reason."""
        return None

    def file_finding(self, root: Root, file: str, error: LayerError) -> Finding:
        """Return the finding of a table that could not be read; its ``thing`` is the file only if it is damaged."""
        if isinstance(error.__cause__, PermissionError):
            # Its library cannot read it either, whether a program is writing or not.
            return finding_of(self, root, unreadable(closed_part(root.path / file), error))
        severity, code, fix = HARMLESS, codes.UNREADABLE, "nothing: try again when no program is writing"
        item = None
        if isinstance(error, Pending):
            code, fix = codes.PENDING, "nothing: the next program that opens it finishes the write"
        elif isinstance(error, Refused):
            code = codes.UNKNOWN if isinstance(error, UnknownFormat) else codes.FOREIGN
            fix = "nothing: cachectl does not use it"
        elif isinstance(error, Damaged):
            severity, code = self.when_damaged, codes.DAMAGED
            fix = f"cachectl purge --damaged {self.name}"
            with suppress(OSError):
                stamp = database.file_stamp(root.path / file)
                entry = Entry(self.name, file, root.path, stamp[1], 1, modified=stamp[2] / 1e9, stamp=stamp)
                item = orphan(entry, error.message)
        return code.finding(self.name, root.path, error.message, fix, key=file, severity=severity, item=item)


class Rows(Store):
    """Rows of tables, and other files next to them: entries of older releases, or leftovers.

    The key of a damaged table is its path. An error of a table applies to each of its rows.
    """

    #: True because sqlite writes a journal before it deletes rows.
    clearing_needs_room = True

    def __init__(self, tables: TableFormat, rest: files.Files) -> None:
        self.tables = tables
        self.rest = rest
        self.separator = tables.separator
        self.forms = tuple(dict.fromkeys((tables.codec.form, *rest.forms)))
        self.refusals = {**rest.refusals, **tables.refusals}

    def kind_of(self, root: Root, path: str) -> str | None:
        """Compare with the names of tables and their rows, and with those of other files that are entries."""
        kinds = self.tables.kind_of(root, path), self.rest.kind_of(root, path) if self.rest.forms else FOREIGN
        return next(kind for kind in (ENTRY, OWN, FOREIGN) if kind in kinds)

    def written(self, root: Root) -> Iterator[Path]:
        """Yield the files of tables, those that sqlite keeps next to them, and the folders in which it makes them."""
        with suppress(OSError):
            yield from (root.path / folder for folder in self.tables.folders(root))
        for file in self.tables.tables(root):
            if not isinstance(file, Problem):
                yield root.path / file
                yield from (database.companion(root.path / file, suffix) for suffix in self.tables.companions)

    def in_use(self, targets: Iterable[Entry]) -> Iterator[tuple[Entry, str | None]]:
        """Skip other files that a program may still be writing; whether a table is open is checked at its removal."""
        for target, reason in self.rest.in_use(targets):
            yield target, None if self.tables.is_table(target.key) else reason

    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        """Yield the rows of each database and the sum of its files, then what is next to the databases."""
        # Text that cannot be encoded is in no row; the selection reports that.
        part = selection.kernel_part.encode() if selection.kernel_part.isprintable() else b""
        problems = set()
        for item in self.listed(root, partial(self.tables.list_rows, part=part, contents=contents)):
            if isinstance(item, Problem):
                problems.add(item.path)
            yield item
        for item in () if root.path in problems else self.rest.scan(root, selection, contents=contents):
            if not isinstance(item, Problem) or item.path not in problems:
                yield item

    def listed(self, root: Root, lister: Callable[[Root, str, Entry], Iterator[Found]]) -> Iterator[Found]:
        """Yield what a lister yields of each database, given its path and a template of its entries, and the rest."""
        for file in self.tables.tables(root):
            if isinstance(file, Problem):
                yield file
                continue
            path, payload, strange = root.path / file, 0, None
            modified = (plain.status_at(path), plain.status_at(database.companion(path, "-wal")))
            written = max((status.st_mtime for status in modified if status is not None), default=None)
            template = Entry(self.name, file, root.path, 0, 0, written_before=written)
            try:
                template = self.tables.with_name(template)
                for item in lister(root, file, template):
                    self.environment.step()
                    payload += item.bytes or 0 if not isinstance(item, Problem) and item.files == 0 else 0
                    yield item
            except UnknownFormat as error:
                strange = error.message
            except (LayerError, OSError) as error:
                kinds: dict[type, str] = {Busy: "busy", Damaged: "sqlite", Pending: "pending", Refused: "foreign"}
                yield Problem(closed_part(path), kinds.get(type(error), "unreadable"), self.explain(error))
            try:
                sizes = database.sizes_of(path)
                held = template._replace(bytes=max(0, sum(sizes) - payload), files=len(sizes))
                yield usage_of(held, 0) if strange is None else unknown(held, strange)
            except OSError as error:
                yield Problem(path, "unreadable", self.explain(error))

    def explain(self, error: EntryError) -> str:
        """Return the message of an error about a file; for damage, with the command that removes it."""
        cure = f"; to remove it: cachectl purge --damaged {self.name}" if isinstance(error, Damaged) else ""
        return reason_of(error) + cure

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check every database, and find what is in the place of one; then check what is next to the databases."""
        problems = set()
        for file in list(self.tables.tables(root)):
            if isinstance(file, Problem):
                problems.add(file.path)
                finding = finding_of(self, root, file)
                if file.code == "no-file":
                    quoted = shlex.quote(str(file.path))
                    finding = finding._replace(severity=self.tables.when_damaged, fix=f"mv {quoted} {quoted}.moved")
                yield finding
                continue
            findings = list(self._verify_file(root, file))
            # Sqlite reports a single read error as damage.
            if any(finding.code == "damaged" for finding in findings):
                findings = list(self._verify_file(root, file))
            yield from findings
        for finding in () if root.path in problems else self.rest.verify(root):
            if root.path / (finding.key or "") not in problems:
                yield finding

    def _verify_file(self, root: Root, file: str) -> Iterator[Finding]:
        try:
            yield from self.tables.check_rows(root, file)
        except LayerError as error:
            yield self.tables.file_finding(root, file, error)

    def remove(self, root: Root, targets: tuple[Entry, ...]) -> Outcome:
        """Delete rows, then vacuum. A file is removed only if it is damaged and nobody can have it open."""
        planned = {target.key: target for target in targets}
        groups, rest = self._split(planned)
        outcome, failed = Outcome(self.name), list[Note]()
        for file, keys in groups.items():
            with noted(failed, file):
                outcome = outcome.plus(self._remove_rows(root, file, [planned[key] for key in keys]))
        outcome = outcome._replace(failed=(*outcome.failed, *failed))
        return outcome.plus(self.rest.remove(root, tuple(planned[key] for key in rest)))

    def _remove_rows(self, root: Root, file: str, targets: Sequence[Entry]) -> Outcome:
        """Delete the planned rows of one database, or the whole file."""
        if not self.tables.is_usable(root, file):
            return Outcome(self.name, skipped=tuple(Note(target.key, tree.GONE) for target in targets))
        opened = self.tables.opened(root, file)
        before = opened.size()
        stamp = next((target.stamp for target in targets if target.key == file), None)
        entries = targets if stamp is None else ()
        planned = {Row(entry.stamp[0], self._row_key(entry.key), entry.stamp[1]): entry.key for entry in entries}
        skipped: dict[str, str | None] = {}
        failed: list[Note] = []
        removed = freed = 0
        try:
            if stamp is not None:
                skipped[file] = opened.remove_damaged(stamp, partial(processes.open_elsewhere, self.environment))
            deleted = opened.delete(planned) if planned else frozenset()
            self.environment.step(len(targets))
            removed = len(deleted)
            skipped.update((key, tree.CHANGED) for row, key in planned.items() if row not in deleted)
        except LayerError as error:
            failed.append(Note(file, self.explain(error)))
            # Sqlite may report an error of a step that follows the deletion; the next program may finish it.
            with suppress(LayerError):
                opened.recover()
            with suppress(LayerError):
                removed = opened.gone(planned)
        try:
            if removed:
                skipped[file] = opened.vacuum()
        except LayerError as error:
            failed.append(Note(file, f"its rows were deleted, but: {self.explain(error)}"))
        try:
            # Rows that another process removed count only if this one removed some, too.
            freed = max(0, before - opened.size()) if removed or stamp is not None else 0
        except OSError as error:
            failed.append(Note(file, f"its rows were deleted, but the freed space is unknown: {reason_of(error)}"))
        notes = tuple(Note(key, reason) for key, reason in skipped.items() if reason is not None)
        return Outcome(self.name, removed, freed, notes, tuple(failed))

    def recover(self, root: Root) -> None:
        """Finish interrupted writes in each database, even if one fails."""
        for file in self.tables.tables(root):
            if isinstance(file, str):
                with suppress(LayerError):
                    self.tables.opened(root, file).recover()

    def read(self, root: Root, keys: Sequence[str]) -> Mapping[str, Artifact | EntryError]:
        """Read the rows of each file together, and what is next to the databases one by one."""
        groups, rest = self._split(key for key in keys if self.kind_of(root, key) == ENTRY)
        return {**_each_file(groups, partial(self._read_rows, root)), **self.rest.read(root, rest)}

    def _read_rows(self, root: Root, file: str, keys: Sequence[str]) -> Mapping[str, Artifact | EntryError]:
        """Return the rows of one database, or the error of each; missing rows are left out."""
        opened = self.tables.opened(root, file)
        with opened.translated("open"):
            if not self.tables.is_usable(root, file):
                return {}
        results: dict[str, Artifact | EntryError] = {}
        for key, data in zip(keys, opened.read([self._row_key(key) for key in keys]), strict=True):
            if isinstance(data, LayerError):
                results[key] = data
            elif data is not None and self.tables.checks_reads and (damages := [*self.tables.damages(key, data)]):
                results[key] = Damaged(self.name, damages[0].message, opened.path)
            elif data is not None:
                results[key] = Artifact(self.name, key, self.tables.codec.form, data, self.tables.detail(key, data))
        return results

    def write(self, root: Root, artifacts: Sequence[Artifact], *, replace: bool = False) -> tree.Placed:
        """Insert the rows of each file in one transaction, and place what belongs next to the databases."""
        placeable: dict[str, Artifact] = {}
        results: tree.Placed = {}
        for artifact in artifacts:
            is_row = self.tables.is_table(artifact.key.partition(self.separator)[0])
            if artifact.form == (self.tables if is_row else self.rest).codec.form:
                placeable[artifact.key] = artifact
            else:
                message = f"an entry of the form {artifact.form} cannot have this key"
                results[artifact.key] = Damaged(self.name, message, artifact.key)
        groups, rest = self._split(placeable)

        def write_rows(file: str, keys: Sequence[str]) -> tree.Placed:
            self.tables.require_free(root, file)
            failed: tree.Placed = {}
            for key in keys:
                try:
                    for damage in self.tables.damages(key, placeable[key].data):
                        raise Damaged(self.name, damage.message, key)
                    self.tables.require_fit(placeable[key])
                except (LayerError, OSError) as error:  # noqa: PERF203 - one must not end the rest
                    failed[key] = error
            pairs = {key: (self._row_key(key), placeable[key].data) for key in keys if key not in failed}
            inserted = self.tables.opened(root, file).insert([*pairs.values()], replace=replace) if pairs else ()
            return {**failed, **dict(zip(pairs, inserted, strict=True))}

        results |= _each_file(groups, write_rows)
        return {**results, **self.rest.write(root, [placeable[key] for key in rest], replace=replace)}

    def _row_key(self, key: str) -> str:
        return key.partition(self.separator)[2]

    def _split(self, keys: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Return the keys of rows by their file, and those of other files."""
        groups: dict[str, list[str]] = {}
        for key in keys:
            groups.setdefault(key.partition(self.separator)[0], []).append(key)
        rest = [file for file in groups if not self.tables.is_table(file)]
        return groups, [key for file in rest for key in groups.pop(file)]


def closed_part(path: Path) -> Path:
    """Return the file next to a database that this user cannot read; the database if there is none."""
    parts = (database.companion(path, suffix) for suffix in database.COMPANIONS)
    return next((part for part in parts if part.exists() and not os.access(part, os.R_OK)), path)


def _each_file(
    groups: Mapping[str, list[str]], act: Callable[[str, list[str]], Mapping[str, _T | EntryError]]
) -> dict[str, _T | EntryError]:
    """Call ``act`` with each file and its keys; return the results. An error of a file applies to each of its keys."""
    results: dict[str, _T | EntryError] = {}
    for file, keys in groups.items():
        outcome = attempt(partial(act, file, keys))
        results.update(dict.fromkeys(keys, outcome) if isinstance(outcome, EntryError) else outcome)
    return results
