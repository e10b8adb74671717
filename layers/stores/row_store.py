"""The store of layers that keep entries as rows of files; many rows are read or placed at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, TypeVar

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Busy, Damaged, LayerError, NoRoom, reason_of
from cachectl.layers.base.facts import Problem, Root
from cachectl.layers.base.store import Store
from cachectl.layers.stores.rows import Deleted, Row, RowFile, allocated, companions_of, disk_usage

T = TypeVar("T")


class Rows(Store):
    """A store with keys that begin with a file name and a separator.

    Rows that cannot be read or written with others are read or written alone, to find the error of each.
    """

    separator: ClassVar[str]
    #: True because sqlite writes a journal before it deletes rows.
    clearing_needs_room = True

    def failed_rows(self, file: str, targets: Sequence[facts.Target], error: LayerError) -> facts.Note:
        """Return the reason why rows of a file could not be removed, and those to retry when there is room."""
        return facts.Note(file, self.with_fix(error), tuple(targets) if isinstance(error, NoRoom) else ())

    def unread(self, path: Path, error: LayerError | OSError) -> Problem:
        """Return the problem of a file with unlisted rows, because of a lock, an error or damage."""
        kinds = {Busy: "busy", Damaged: "sqlite"}
        code = next((code for kind, code in kinds.items() if isinstance(error, kind)), "unreadable")
        return Problem(path, code, self.with_fix(error) if isinstance(error, LayerError) else reason_of(error))

    @staticmethod
    def examined(examine: Callable[[], Iterable[facts.Finding]]) -> list[facts.Finding]:
        """Examine a database, and again if it seems damaged, because sqlite takes one read error for damage."""
        found = list(examine())
        return list(examine()) if any(one.code in ("sqlite", "damaged") for one in found) else found

    @abstractmethod
    def read_rows(self, root: Root, file: str, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError] | None:
        """Return rows of one file, or the error of each; missing rows are left out.

        ``None`` for a file that is no database.
        """

    @abstractmethod
    def write_rows(self, root: Root, file: str, artifacts: Sequence[facts.Artifact]) -> Mapping[str, bool | LayerError]:
        """Insert new rows into one file in one transaction; return for each key the result of :meth:`put_new`."""

    def foresee_rows(self, root: Root, file: str, targets: Sequence[facts.Target]) -> int | None:
        """Return the bytes that removing targets from one file would free.

        ``None`` for a file that is no database. Raises :class:`LayerError` if none of them could be removed.
        """
        del root, file, targets
        return None

    def row_files(self, root: Root) -> Iterable[RowFile]:
        """Return the databases of a root that exist and can be used."""
        del root
        return ()

    def recover(self, root: Root) -> None:
        """Roll back interrupted writes in each database, even if one fails."""
        for rows in self.row_files(root):
            with suppress(LayerError):
                rows.recover()

    def remove_rows(
        self, rows: RowFile, file: str, planned: Mapping[facts.Target, Row | None], delete: Callable[[], Deleted | None]
    ) -> facts.Outcome:
        """Remove targets from one database by ``delete``, and free the space; count removed rows even if that fails.

        ``planned`` gives the row of each target, ``None`` for one that means all rows. ``delete`` returns ``None``
        if nothing is as planned.
        """
        before = disk_usage(rows.path)[1], allocated(rows.path)
        try:
            done = delete() or Deleted(0)
        except LayerError as error:
            done = _deleted_in_spite_of(error, rows, planned)
        rest = [
            target for target, row in planned.items() if (not done.removed if row is None else row not in done.rows)
        ]
        failed: list[facts.Note] = []
        skipped: list[facts.Note] = []
        if done.stopped is not None:
            failed.append(self.failed_rows(file, rest, done.stopped))
        else:
            skipped += [facts.Note(target.key, "changed since it was planned") for target in rest]
        # Another process removed the rows that vanished meanwhile.
        if not done.removed:
            return facts.Outcome(self.name, skipped=tuple(skipped), failed=tuple(failed))
        try:
            if (because := rows.vacuum()) is not None:
                skipped.append(facts.Note(file, because))
        except LayerError as error:
            failed.append(facts.Note(file, f"its rows are gone, but: {self.with_fix(error)}"))
        freed = 0
        try:
            after = disk_usage(rows.path)[1], allocated(rows.path)
            freed = max(0, *(was - now for was, now in zip(before, after, strict=True)))
        except OSError as error:
            failed.append(facts.Note(file, f"its size cannot be read, so its bytes are not counted: {error.strerror}"))
        return facts.Outcome(self.name, done.removed, freed, tuple(skipped), tuple(failed))

    def row_file(self, root: Root, file: str) -> RowFile | None:
        """Return a database, existing or not, by the name that keys begin with; ``None`` for any other name."""
        del root, file
        return None

    def held_in(self, root: Root, keys: Sequence[str]) -> Mapping[str, tuple[Path, ...]]:
        """Return the database of each row, and the files that sqlite keeps beside it."""
        found: dict[str, tuple[Path, ...]] = {}
        for file, listed in self._by_file((key, key) for key in keys).items():
            path = root.path / file
            shared = (path, *companions_of(path))
            is_folder = path.is_dir()
            found |= {key: (root.path / key,) if is_folder else shared for key in listed}
        return found

    def foresee_write(self, root: Root, keys: Sequence[str]) -> Mapping[str, LayerError]:
        """Check each database once."""
        refused: dict[str, LayerError] = {}
        alone: list[str] = []
        for file, listed in self._by_file((key, key) for key in keys).items():
            rows = self.row_file(root, file)
            if rows is None:
                alone += listed
                continue
            try:
                rows.foresee_insert()
            except LayerError as error:
                refused.update(dict.fromkeys(listed, error))
        return {**super().foresee_write(root, alone), **refused}

    def foresee_removal(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Foresight:
        """Check each file once: it is written as a whole or not at all."""
        seen = facts.Foresight()
        for file, planned in self._by_file((target.key, target) for target in targets).items():
            try:
                freed = self.foresee_rows(root, file, planned)
            except LayerError as error:
                seen = seen.plus(facts.Foresight(failed=(facts.Note(file, error.message),)))
                continue
            if freed is None:
                seen = seen.plus(super().foresee_removal(root, tuple(planned)))
            else:
                seen = seen.plus(facts.Foresight(tuple(planned), freed))
        return seen

    def read_row(self, root: Root, key: str) -> facts.Artifact | None:
        """Read one row as :meth:`read_rows` does; raises its error."""
        found = (self.read_rows(root, key.partition(self.separator)[0], [key]) or {}).get(key)
        if isinstance(found, LayerError):
            raise found
        return found

    def read_many(self, root: Root, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError | OSError]:
        """Read the rows of each file at once."""
        found: dict[str, facts.Artifact | LayerError | OSError] = {}
        # A file name alone is no key of a row.
        alone = [key for key in keys if self.separator not in key]
        for file, listed in self._by_file((key, key) for key in keys if self.separator in key).items():
            try:
                read = self.read_rows(root, file, listed)
            except Busy as error:
                # One by one, each row would wait as long.
                read = dict.fromkeys(listed, error)
            except (LayerError, OSError):
                read = None
            if read is None:
                alone += listed
            else:
                found.update(read)
        return {**found, **super().read_many(root, alone)}

    def write_new(self, root: Root, artifacts: Sequence[facts.Artifact]) -> list[bool | LayerError | OSError]:
        """Insert the rows of each file in one transaction, and repeated keys after that."""
        first: dict[str, int] = {}
        for number, artifact in enumerate(artifacts):
            first.setdefault(artifact.key, number)
        done: dict[int, bool | LayerError | OSError] = {}
        for file, listed in self._by_file((key, artifacts[number]) for key, number in first.items()).items():
            try:
                written = self.write_rows(root, file, listed)
            except Busy as error:
                written = {artifact.key: error for artifact in listed}
            except (LayerError, OSError, UnicodeError):
                written = {}
            done.update((first[key], one) for key, one in written.items())
        alone = [number for number in range(len(artifacts)) if number not in done]
        done.update(zip(alone, super().write_new(root, [artifacts[number] for number in alone]), strict=True))
        return [done[number] for number in range(len(artifacts))]

    def _by_file(self, things: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
        """Group things by the file that their key begins with."""
        found: dict[str, list[T]] = {}
        for key, thing in things:
            found.setdefault(key.partition(self.separator)[0], []).append(thing)
        return found


def _deleted_in_spite_of(error: LayerError, rows: RowFile, planned: Mapping[facts.Target, Row | None]) -> Deleted:
    """Count the planned rows that are gone after a failure.

    If the file cannot be read, that is none: the next program that opens it rolls back an interrupted write.
    """
    try:
        whole = next((target for target, row in planned.items() if row is None), None)
        if whole is not None:
            return Deleted(max(0, whole.entries - rows.sum().rows), stopped=error)
        named = [row for row in planned.values() if row is not None]
        left = rows.read_many([row.key for row in named])
    except LayerError:
        return Deleted(0, stopped=error)
    gone = frozenset(row for row, values in zip(named, left, strict=True) if values is None)
    return Deleted(len(gone), gone, error)
