"""The store of layers that keep entries as rows of files; many rows are read or placed at once."""

from __future__ import annotations

import os
import shlex
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from cachectl.layers.base import errors, facts, store
from cachectl.layers.host import processes
from cachectl.layers.stores.database import disk_usage
from cachectl.layers.stores.rows import CHANGED, Row, RowFile, Schema

T = TypeVar("T")


class Rows(store.Store):
    """A store with keys that begin with a file name and a separator.

    The key of a damaged file is its name. An error of a file is that of each of its rows.
    """

    #: True because sqlite writes a journal before it deletes rows.
    clearing_needs_room = True

    @abstractmethod
    def read_rows(
        self, root: facts.Root, file: str, keys: Sequence[str]
    ) -> Mapping[str, facts.Artifact | store.EntryError]:
        """Return rows of one file, or the error of each; missing rows are left out."""

    @abstractmethod
    def write_rows(
        self, root: facts.Root, file: str, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Mapping[str, bool | store.EntryError]:
        """Insert rows into one file in one transaction; return the result of each by its key."""

    @abstractmethod
    def row_file(self, root: facts.Root, file: str) -> RowFile | None:
        """Return a database, existing or not, by the name that keys begin with; ``None`` for any other name."""

    def opened(self, path: Path, schema: Schema, kind: type[RowFile] = RowFile) -> RowFile:
        """Return a database as this environment may use it."""
        environment = self.environment
        return kind(self.name, path, schema, environment.lock_timeout, shared=environment.trusts_writers)

    def row_files(self, root: facts.Root) -> Iterable[RowFile]:
        """Return the databases of a root that exist."""
        del root
        return ()

    def key_of(self, text: str) -> tuple[str, ...]:
        """Return the key columns of a row from the text that follows the file in its key."""
        return (text,)

    def remove_others(self, root: facts.Root, targets: Sequence[facts.Entry]) -> Iterable[store.Part]:
        """Return the parts of a removal that are not in a database."""
        del root, targets
        return ()

    # ------------------------------------------------------------------ problems and damage

    def unread(self, path: Path, error: store.EntryError) -> facts.Problem:
        """Return the problem of a file with unlisted rows, because of a lock, an error or damage."""
        kinds = {errors.Busy: "busy", errors.Damaged: "sqlite"}
        code = next((code for kind, code in kinds.items() if isinstance(error, kind)), "unreadable")
        return facts.Problem(path, code, self.explain(error))

    def explain(self, error: store.EntryError) -> str:
        """Return the message of an error about a file; for damage, with the command that removes it."""
        if not isinstance(error, errors.LayerError):
            return errors.reason_of(error)
        cure = f"; to remove it: cachectl purge --damaged {self.name}" if isinstance(error, errors.Damaged) else ""
        return error.message + cure

    def file_finding(self, root: facts.Root, rows: RowFile, error: errors.LayerError) -> facts.Finding:
        """Return the finding of a file that could not be read; its ``thing`` is the file only if it is damaged."""
        key = os.path.relpath(rows.path, root.path)
        if isinstance(error, errors.Damaged):
            thing = rows.orphan(root.path, key, error.message)
            fix = f"end every program that has it open, then: cachectl purge --damaged {self.name}"
            return facts.Finding(self.name, root.path, key, facts.Severity.FAILS, "sqlite", error.message, fix, thing)
        code, fix = "unreadable", "nothing: try again when no program is writing"
        if isinstance(error, errors.Refused):
            code, fix = "foreign", "nothing: cachectl does not use it"
        return facts.Finding(self.name, root.path, key, facts.Severity.HARMLESS, code, error.message, fix)

    def row_finding(self, thing: facts.Entry, code: str, message: str) -> facts.Finding:
        """Return the finding of a damaged row."""
        fix = f"cachectl purge {self.name} --key {shlex.quote(thing.key)}"
        return facts.Finding(self.name, thing.root, thing.key, facts.Severity.FAILS, code, message, fix, thing)

    @staticmethod
    def twice(verify: Callable[[], Iterable[facts.Finding]]) -> list[facts.Finding]:
        """Verify a database, and again if it seems damaged, because sqlite takes one read error for damage."""
        found = list(verify())
        return list(verify()) if any(finding.code in ("sqlite", "damaged") for finding in found) else found

    # ------------------------------------------------------------------ removal

    def remove(self, root: facts.Root, targets: tuple[facts.Entry, ...]) -> facts.Outcome:
        """Delete rows, then vacuum. A file goes only if it is damaged and nobody can have it open."""
        parts: list[store.Part] = []
        others: list[facts.Entry] = []
        for file, planned in self._by_file((target.key, target) for target in targets).items():
            rows = self.row_file(root, file)
            if rows is None:
                others += planned
            else:
                parts.append((file, partial(self._remove_from, rows, file, planned)))
        return store.each_part(facts.Outcome(self.name), [*parts, *self.remove_others(root, others)])

    def _remove_from(self, rows: RowFile, file: str, targets: Sequence[facts.Entry]) -> facts.Outcome:
        if not os.path.lexists(rows.path):
            return facts.Outcome(self.name, skipped=tuple(facts.Note(target.key, "already gone") for target in targets))
        before = disk_usage(rows.path).bytes
        whole = next((target for target in targets if target.key == file), None)
        planned = {self._planned(target): target.key for target in targets if target.key != file}
        skipped: list[tuple[str, str | None]] = []
        failed: list[tuple[str, str | None]] = []
        removed = 0
        try:
            if whole is not None:
                skipped.append(
                    (file, rows.remove_damaged(whole.stamp, partial(processes.open_elsewhere, self.environment)))
                )
                planned = {}
            gone = rows.delete(planned) if planned else frozenset()
            removed = len(gone)
            skipped += [(key, CHANGED) for row, key in planned.items() if row not in gone]
        except errors.LayerError as error:
            failed.append((file, self.explain(error)))
            # Sqlite may report an error of a step that follows the deletion; the next program may finish it.
            with suppress(errors.LayerError):
                rows.recover()
                removed = len(planned.keys() - frozenset(rows.rows()))
        try:
            if removed:
                skipped.append((file, rows.vacuum()))
        except errors.LayerError as error:
            failed.append((file, f"its rows are gone, but: {self.explain(error)}"))
        freed = 0
        try:
            # Another process may have removed rows; they count here only if this one has removed some.
            freed = max(0, before - disk_usage(rows.path).bytes) if removed or whole is not None else 0
        except OSError as error:
            failed.append((file, f"its rows are gone, but their bytes are not counted: {errors.reason_of(error)}"))
        return facts.Outcome(self.name, removed, freed, _notes(skipped), _notes(failed))

    def _planned(self, target: facts.Entry) -> Row:
        rowid, size = target.stamp
        return Row(rowid, self.key_of(target.key.partition(self.separator)[2]), size)

    def recover(self, root: facts.Root) -> None:
        """Finish interrupted writes in each database, even if one fails."""
        for rows in self.row_files(root):
            with suppress(errors.LayerError):
                rows.recover()

    # ------------------------------------------------------------------ get and put

    def read(self, root: facts.Root, keys: Sequence[str]) -> Mapping[str, facts.Artifact | store.EntryError]:
        """Read the rows of each file at once."""
        results: dict[str, facts.Artifact | store.EntryError] = {}
        for file, listed in self._by_file((key, key) for key in keys).items():
            read = store.attempt(partial(self.read_rows, root, file, listed))
            if isinstance(read, store.EntryError):
                read = dict.fromkeys(listed, read)
            results.update(read)
        return results

    def write(
        self, root: facts.Root, artifacts: Sequence[facts.Artifact], *, replace: bool = False
    ) -> Mapping[str, bool | store.EntryError]:
        """Insert the rows of each file in one transaction."""
        results: dict[str, bool | store.EntryError] = {}
        pairs = ((artifact.key, artifact) for artifact in artifacts)
        for file, listed in self._by_file(pairs).items():
            written = store.attempt(partial(self.write_rows, root, file, listed, replace=replace))
            if isinstance(written, store.EntryError):
                written = {artifact.key: written for artifact in listed}
            results.update(written)
        return results

    def _by_file(self, things: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
        """Group things by the file that their key begins with."""
        found: dict[str, list[T]] = {}
        for key, thing in things:
            found.setdefault(key.partition(self.separator)[0], []).append(thing)
        return found


def _notes(reasons: Iterable[tuple[str, str | None]]) -> tuple[facts.Note, ...]:
    return tuple(facts.Note(key, reason) for key, reason in reasons if reason is not None)
