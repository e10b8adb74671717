"""The layer ``miopen-tuning``: results of MIOpen's tuning for this user, which take hours to make again.

The find-db (which solver is fastest) and the perf-db (how to run it) are text records; some builds keep the
perf-db in sqlite, which is only read here. Only the find-db has a switch: nothing turns the user's perf-db
off before MIOpen 3.5 (``MIOPEN_DEBUG_DISABLE_USER_DB``). Sources: ``src/find_db.cpp``, ``src/db_record.cpp``,
``src/ramdb.cpp`` (the ``.time`` file), ``src/lock_file.cpp``.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from threading import Lock
from typing import ClassVar, Final

from cachectl.layers.base import facts
from cachectl.layers.base.declarations import EnvSwitch, at_load
from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Refused, Unreachable, not_a_key
from cachectl.layers.base.facts import Hazard, Problem, Root, Severity
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.store import Part, each_part
from cachectl.layers.base.switches import first_place, misread
from cachectl.layers.disk.atomic import replace_file
from cachectl.layers.disk.foresight import wait_until_free
from cachectl.layers.disk.handles import blocks_at, blocks_of, opened, opened_root
from cachectl.layers.disk.locks import record_lock
from cachectl.layers.disk.presence import is_there, means_absent, status_at
from cachectl.layers.miopen import places
from cachectl.layers.miopen.databases import MIOpenDatabases, MIOpenLayer
from cachectl.layers.miopen.places import LIBRARIES, SEPARATOR, DatabaseFile, Databases, judge, lock_files, owned_file
from cachectl.layers.stores.quarantine import folder_pattern
from cachectl.layers.stores.records import Fault, Record, RecordFile, record_complaint
from cachectl.layers.stores.rows import RowFile, Schema, disk_blocks, disk_usage
from cachectl.layers.stores.tree import NOTHING, OWN_TEMPORARY, REFUSALS, Tree

SWITCH: Final = "MIOPEN_DEBUG_DISABLE_FIND_DB"
FIND_DB: Final = "MIOpen's find-db"
_FORM: Final = "miopen-record/1"
NO_KERNELS: Final = "a record has a problem and its solvers, not the kernels they run"
_LISTED_ONLY: Final = "an sqlite perf-db is read, never changed; MIOpen's own tools edit it"
_TIME: Final = ".time"
# Other users lock the same files.
_OPEN_TO_ALL: Final = 0o777
# Record locks exclude processes, not threads.
_THREADS: Final = Lock()
_SIDE_FILE: Final = regex(r"(?P<database>.+)(?P<ending>\.temp|\.time)")

#: The columns of a problem, in the order of a text record's key.
PROBLEM: Final = (
    *("spatial_dim", "in_channels", "in_h", "in_w", "in_d", "fil_h", "fil_w", "fil_d", "out_channels", "batchsize"),
    *("pad_h", "pad_w", "pad_d", "conv_stride_h", "conv_stride_w", "conv_stride_d"),
    *("dilation_h", "dilation_w", "dilation_d", "bias", "group_count", "layout", "data_type", "direction"),
)
_TEXTS: Final = ("layout", "data_type", "direction")
_PERF_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS `perf_db` (`id` INTEGER PRIMARY KEY ASC,`solver` TEXT NOT NULL,"
    "`config` INTEGER NOT NULL,`params` TEXT NOT NULL)"
)
_CONFIG_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS `config` (`id` INTEGER PRIMARY KEY ASC,"
    + ",".join(f"`{column}` TEXT NOT NULL" for column in _TEXTS)
    + "".join(f",`{column}` INT NOT NULL" for column in PROBLEM if column not in _TEXTS)
    + ")"
)
#: The two tables of a perf-db in sqlite and their indexes, as MIOpen makes them.
PERF_DB_CREATE: Final = (
    _CONFIG_TABLE,
    f"CREATE UNIQUE INDEX IF NOT EXISTS `idx_config` ON config( {','.join((*_TEXTS, *PROBLEM[:-3]))} )",
    _PERF_TABLE,
    "CREATE UNIQUE INDEX IF NOT EXISTS `idx_perf_db` ON perf_db(solver, config)",
)
# A query can replace the table, since it is only read. It writes the problem as a text record does.
_PERF_DB: Final = Schema(
    table=(
        "(select perf_db.id as rowid, perf_db.config, perf_db.solver, perf_db.params, "
        + "||'x'||".join(f"config.{column}" for column in PROBLEM)
        + " as problem from perf_db join config on config.id = perf_db.config)"
    ),
    create=(),
    key=("config", "solver"),
    values=("problem", "params"),
    size="length(params)",
    others=PERF_DB_CREATE,
)
#: The values of ``MIOPEN_FIND_ENFORCE``, and their effects on every run.
_ACTIONS: Final = {"NONE": 1, "DB_UPDATE": 2, "SEARCH": 3, "SEARCH_DB_UPDATE": 4, "DB_CLEAN": 5}
_ENFORCED: Final = {
    2: (Severity.HARMLESS, "a search that a program requests is repeated although its result is known"),
    3: (Severity.HARMLESS, "everything that has not been tuned is tuned, which takes long"),
    4: (Severity.RECOMPILES, "everything is tuned again in every run"),
    5: (Severity.RECOMPILES, "every run erases the tuning results that it reads"),
}
#: Other variables of a tuning session, and their effects.
_LEFT_SET: Final = {
    "MIOPEN_DEBUG_FIND_ONLY_SOLVER": "no other solver is used, also while tuning",
    "MIOPEN_DEBUG_PERFDB_OVERRIDE": "tuning results are ignored",
}
#: The rows of the perf-db alone.
PERF_TABLE: Final = _PERF_DB._replace(table="perf_db", key=("solver", "config"), values=("params",))
_HARM: Final = {
    "malformed": Severity.RECOMPILES,
    "newline": Severity.RECOMPILES,
    # The finding of the line that hides it says what that costs.
    "hidden": Severity.HARMLESS,
    "item": Severity.HARMLESS,
    "duplicate": Severity.WASTES,
    "duplicate-id": Severity.WASTES,
}
#: Faults of records that MIOpen still reads.
_READ: Final = frozenset({"item", "duplicate-id"})


class TuningDatabases(MIOpenDatabases):
    """Records of text files, and rows of sqlite files."""

    forms = (_FORM,)
    #: Endings of its files of records, and of its sqlite files.
    texts: ClassVar[tuple[str, ...]] = ("ufdb.txt", "udb.txt", "cd.updb.txt")
    tables: ClassVar[tuple[str, ...]] = ("udb",)

    def refusals(self) -> Mapping[facts.Ability, str]:
        """Refuse kernels, and every change on platforms without directory handles."""
        return {**REFUSALS, facts.Ability.KERNELS: NO_KERNELS}

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of databases, and of the files that their rewrites leave."""
        side = _SIDE_FILE.fullmatch(parts[-1])
        return self.databases(root).owns(parts if side is None else (*parts[:-1], side["database"]))

    def databases(self, root: Root) -> Databases:
        """Return the database files of a root."""
        return Databases(root, self.texts + self.tables)

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield the records of text files, the rows of sqlite files, and remains of interrupted rewrites."""
        del contents
        databases = self.databases(root)
        latest = self.latest(databases)
        for file in databases.files():
            if isinstance(file, Problem):
                yield file
                continue
            because = places.stale_because(file.version, latest, "files")
            yield from self._scan_file(root, file, because)
        yield from self._scan_orphans(root)

    def _scan_file(self, root: Root, file: DatabaseFile, because: str | None) -> Iterator[facts.Found]:
        payload = 0
        try:
            modified = file.modified()
            for found in self._listing(root, file):
                if isinstance(found, Fault):
                    # The line has a record, which is listed. Only verify reports the fault.
                    if found.code in _READ:
                        continue
                    yield Problem(file.path, found.code, f"line {found.number}: {found.message}")
                    continue
                key, size, stamp = found
                payload += size
                yield changed(
                    self.entry_of(root, file, key, size, stamp=stamp, because=because), written_before=modified
                )
            yield self._rest_of(root, file, payload, because)
        except (LayerError, OSError) as error:
            yield self.unread(file.path, error)
            with suppress(OSError):
                yield self._rest_of(root, file, payload, because)

    def _rest_of(self, root: Root, file: DatabaseFile, payload: int, because: str | None) -> facts.Housekeeping:
        """Return the size of a file beside its entries, and of the file that marks its changes."""
        files, total = disk_usage(file.path)
        disk = disk_blocks(file.path)
        beside = _time_file(file.path)
        if owned_file(root, beside):
            files, total = files + 1, total + disk_usage(beside)[1]
            disk = None if disk is None else disk + (blocks_at(beside) or 0)
        # A last line without a newline is one byte shorter than counted.
        rest = max(0, total - payload)
        stale = True if because else None
        return facts.Housekeeping(file.relative, root.path, rest, files, file.modified(), stale, disk=disk)

    def _listing(self, root: Root, file: DatabaseFile) -> Iterator[tuple[str, int, tuple[int, ...]] | Fault]:
        """Yield the key within the file, the bytes and the stamp of each entry, and every fault."""
        if file.name.kind in self.tables:
            for row in RowFile(self.name, file.path, _PERF_DB, self.environment.lock_timeout).rows():
                yield SEPARATOR.join(row.key), row.bytes, (row.rowid,)
            return
        for found in self._records(root, file).scan():
            if isinstance(found, Fault):
                yield found
            else:
                yield found.key, len(found.line) + 1, (found.checksum,)

    def _scan_orphans(self, root: Root) -> Iterator[facts.Orphan | Problem]:
        for leaf in Tree(self.name, root.path, NOTHING).scan():
            if isinstance(leaf, Problem):
                yield leaf
            elif not OWN_TEMPORARY.fullmatch(leaf.key):
                yield leaf.orphan(root.path)
        try:
            names = sorted(os.listdir(root.path))
        except OSError as error:
            if not means_absent(error):
                yield self.unread(root.path, error)
            return
        for name in names:
            try:
                why = self._orphan_reason(root, name)
                status = None if why is None else status_at(root.path / name)
            except OSError as error:
                yield self.unread(root.path / name, error)
                continue
            if why is not None and status is not None:
                stamp = (status.st_size, status.st_mtime_ns)
                yield facts.Orphan(
                    name, root.path, status.st_size, 1, status.st_mtime, why, stamp=stamp, disk=blocks_of(status)
                )

    def _orphan_reason(self, root: Root, name: str) -> str | None:
        """Return why a file beside the databases is useless; ``None`` where it is not, or is not recognised."""
        match = _SIDE_FILE.fullmatch(name)
        database = None if match is None else self.databases(root).name(match["database"])
        is_ours = OWN_TEMPORARY.fullmatch(name) is not None
        if not (is_ours or database is not None) or not owned_file(root, root.path / name):
            return None
        if is_ours or match is None or database is None:
            return "left by an interrupted cachectl"
        if match["ending"] != _TIME:
            return "left by an interrupted rewrite of MIOpen"
        return None if is_there(database.path) else "marks the changes of a database that is gone"

    def _records(self, root: Root, file: DatabaseFile) -> RecordFile:
        return RecordFile(self.name, file.path, lambda: self.editing(root, file.path))

    @contextmanager
    def editing(self, root: Root, path: Path) -> Iterator[int]:
        """Hold MIOpen's locks while a file is changed, then notify running programs; yield the open folder of the file.

        They read the file again if ``.time`` contains a later time of the steady clock (ns) than their last read.
        """
        with self.locked(path, root) as folder:
            yield folder
            beside = _time_file(path)
            if status_at(path.name, dir_fd=folder) is not None:
                replace_file(beside, [str(time.monotonic_ns()).encode()], folder=folder)
            elif owned_file(root, beside):
                os.unlink(beside.name, dir_fd=folder)

    @contextmanager
    def locked(self, path: Path, root: Root | None = None) -> Iterator[int]:
        """Hold the locks of every MIOpen version on a database; yield the open folder of the database.

        Lock files are made as MIOpen makes them, and stay. Below a ``root`` no link is followed.
        """
        with _THREADS, ExitStack() as stack:
            start = path.parent if root is None else root.path
            folder = self._open_folder(start, path.parent.relative_to(start).parts, stack)
            # One order everywhere, so that two cachectls never wait for each other.
            for lock in sorted(lock_files(self.environment, path)):
                beside = lock.parent.parent == path.parent
                above = folder if beside else self._open_folder(lock.parent.parent, (), stack)
                locks = self._enter(lock.parent, above, stack, mode=_OPEN_TO_ALL)
                held = record_lock(self.name, lock, folder=locks, lock_timeout=self.environment.lock_timeout)
                handle = stack.enter_context(held)
                with suppress(PermissionError):
                    os.fchmod(handle, _OPEN_TO_ALL)
            yield folder

    def _open_folder(self, start: Path, parts: Sequence[str], stack: ExitStack) -> int:
        """Open a folder, perhaps through a link, and the folders below it; make missing ones."""
        try:
            start.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(opened_root(start))
        except OSError as error:
            raise self._no_lock_folder(start, error) from error
        if handle is None:
            raise Unreachable(self.name, "cannot make the lock folder: it was removed at once", start)
        for part in parts:
            start /= part
            handle = self._enter(start, handle, stack)
        return handle

    def _enter(self, folder: Path, above: int, stack: ExitStack, *, mode: int | None = None) -> int:
        """Open a folder in an open one, or make it with a ``mode``. No link is followed."""
        try:
            made = False
            with suppress(FileExistsError):
                os.mkdir(folder.name, dir_fd=above)
                made = True
            handle = stack.enter_context(opened(folder.name, above))
            if made and mode is not None:
                os.fchmod(handle, mode)
        except OSError as error:
            raise self._no_lock_folder(folder, error) from error
        return handle

    def _no_lock_folder(self, folder: Path, error: OSError) -> LayerError:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and folder.is_symlink():
            return Refused(self.name, "a link in the place of MIOpen's lock folder is not followed", folder)
        return Unreachable(self.name, f"cannot make the lock folder: {error.strerror}", folder)

    def read(self, root: Root, key: str) -> facts.Artifact | None:
        """Read the line of a record as it stands, or a row of an sqlite file as such a line."""
        return self.read_row(root, key)

    def read_rows(self, root: Root, file: str, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError] | None:
        """Read records of one file."""
        located = self.databases(root).find(file)
        if located is None:
            return None
        detail = {**located.detail, **located.versions, "database": located.name.kind}
        named = {key.partition(SEPARATOR)[2]: key for key in keys}
        return {
            named[name]: facts.Artifact(self.name, named[name], _FORM, line, detail)
            if isinstance(line, bytes)
            else line
            for name, line in self._lines(root, located, tuple(named)).items()
        }

    def _lines(self, root: Root, file: DatabaseFile, names: Sequence[str]) -> Mapping[str, bytes | LayerError]:
        """Return the lines of records of a file, by their keys in it."""
        if file.name.kind not in self.tables:
            read = self._records(root, file).read_many(names)
            return {name: one.line if isinstance(one, Record) else one for name, one in read.items()}
        pairs = [(config, solver) for config, _, solver in (name.partition(SEPARATOR) for name in names)]
        rows = RowFile(self.name, file.path, _PERF_DB, self.environment.lock_timeout).read_many(pairs)
        return {
            name: f"{values[0]}={solver}:{values[1]}".encode()
            for name, (_, solver), values in zip(names, pairs, rows, strict=True)
            if values is not None
        }

    def is_key(self, key: str) -> bool:
        """Check the name of the database and that a record follows."""
        file, separator, rest = key.partition(SEPARATOR)
        return bool(separator and rest) and self.databases(places.ANY_ROOT).name(file) is not None

    def write(self, root: Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        """Insert a line into a text file under MIOpen's locks. The line contains its key."""
        file = self._writable(root, key)
        if not _is_of(artifact, key):
            raise Damaged(self.name, "the line contains another key than the one it is put under", key)
        self._make_folder(root)
        self._records(root, file).put(artifact.data, replace=replace)

    def write_rows(self, root: Root, file: str, artifacts: Sequence[facts.Artifact]) -> Mapping[str, bool | LayerError]:
        """Insert lines into one text file, in one rewrite."""
        del file
        fit = [one for one in artifacts if _is_of(one, one.key) and record_complaint(one.data) is None]
        if not fit:
            return {}
        located = self._writable(root, fit[0].key)
        self._make_folder(root)
        new = self._records(root, located).put_new([one.data for one in fit])
        exists = EntryExists(self.name, located.path)
        return {one.key: exists if placed is None else placed for one, placed in zip(fit, new, strict=True)}

    def _writable(self, root: Root, key: str) -> DatabaseFile:
        """Return the text file of a key."""
        relative, separator, _ = key.partition(SEPARATOR)
        databases = self.databases(root)
        file = databases.name(relative)
        if file is None or not separator:
            raise not_a_key(self.name, key)
        if file.name.kind in self.tables:
            raise Refused(self.name, f"cannot put: {_LISTED_ONLY}", file.path)
        self.demand_place(databases, file)
        return file

    def _make_folder(self, root: Root) -> None:
        try:
            root.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unreachable(self.name, f"cannot make the folder: {error.strerror}", root.path) from error

    def in_use(self, targets: Iterable[facts.Removable]) -> Iterator[tuple[facts.Removable, str | None]]:
        """Skip rows of sqlite files."""
        endings = tuple(f".{kind}" for kind in self.tables)
        for target in targets:
            row = isinstance(target, facts.Entry) and target.key.partition(SEPARATOR)[0].endswith(endings)
            yield target, _LISTED_ONLY if row else None

    def remove(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Outcome:
        """Delete lines. Running programs keep the records that they have read."""
        by_file: dict[str, dict[str, facts.Target]] = {}
        parts: list[Part] = []
        for target in targets:
            relative, separator, record = target.key.partition(SEPARATOR)
            if separator:
                by_file.setdefault(relative, {})[record] = target
            elif folder_pattern(self.name).fullmatch(target.key):
                tree = Tree(self.name, root.path, NOTHING)
                parts.append((target.key, (target,), partial(tree.remove, (target,))))
            else:
                parts.append((target.key, (target,), partial(self._remove_orphan, root, target)))
        parts += [
            (relative, tuple(planned.values()), partial(self._remove_records, root, relative, planned))
            for relative, planned in by_file.items()
        ]
        return each_part(self.name, parts)

    def _remove_records(self, root: Root, relative: str, planned: Mapping[str, facts.Target]) -> facts.Outcome:
        file = self.databases(root).find(relative)
        if file is None:
            return facts.Outcome(
                self.name, skipped=tuple(facts.Note(target.key, "already gone") for target in planned.values())
            )
        before = disk_usage(file.path)[1]
        records = self._records(root, file)
        failed: tuple[facts.Note, ...] = ()
        try:
            gone = records.delete({key: target.stamp[0] for key, target in planned.items()})
        except LayerError as error:
            failed = (facts.Note(relative, error.message),)
            # The new file may be in place if a later step failed.
            gone = planned.keys() - records.read_many(planned).keys()
        left = [target for key, target in planned.items() if key not in gone]
        skipped = () if failed else tuple(facts.Note(target.key, "changed since it was planned") for target in left)
        return facts.Outcome(self.name, len(gone), max(0, before - disk_usage(file.path)[1]), skipped, failed)

    def foresee_rows(self, root: Root, file: str, targets: Sequence[facts.Target]) -> int | None:
        """Delete the lines from a copy of the file."""
        located = self.databases(root).find(file)
        if located is None or any(SEPARATOR not in target.key for target in targets):
            return None
        for lock in self.lock_files(root, [target.key for target in targets]):
            wait_until_free(self.name, lock, self.environment.lock_timeout)
        return self._records(root, located).foresee_delete({target.key.partition(SEPARATOR)[2] for target in targets})

    def lock_files(self, root: Root, keys: Iterable[str]) -> Iterable[Path]:
        """Return MIOpen's locks on the files of records."""
        files = {key.partition(SEPARATOR)[0] for key in keys if SEPARATOR in key}
        return [lock for file in sorted(files) for lock in lock_files(self.environment, root.path / file)]

    def _remove_orphan(self, root: Root, target: facts.Target) -> facts.Outcome:
        path = root.path / target.key
        match = _SIDE_FILE.fullmatch(target.key)
        # MIOpen rewrites under its lock, so while cachectl holds it no program uses the temporary file.
        lock = nullcontext() if match is None else self.locked(root.path / match["database"], root)
        try:
            with lock:
                if self._orphan_reason(root, target.key) is None:
                    return facts.Outcome(self.name, skipped=(facts.Note(target.key, "already gone"),))
                status = path.lstat()
                if (status.st_size, status.st_mtime_ns) != target.stamp:
                    return facts.Outcome(self.name, skipped=(facts.Note(target.key, "changed since it was planned"),))
                path.unlink()
        except (LayerError, OSError) as error:
            because = error.message if isinstance(error, LayerError) else f"cannot be removed: {error.strerror}"
            return facts.Outcome(self.name, failed=(facts.Note(target.key, because),))
        return facts.Outcome(self.name, 0, target.bytes)

    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Check every line by the rules of MIOpen's reader, and sqlite files with sqlite's own check."""
        for file in self.databases(root).files():
            if isinstance(file, Problem):
                # MIOpen tunes again in every run if it cannot open its database.
                yield places.to_finding(self, root, file, Severity.RECOMPILES)
                continue
            if file.name.kind in self.tables:
                yield from self.examined(partial(self._verify_table, root, file))
                continue
            try:
                for found in self._records(root, file).scan():
                    if isinstance(found, Fault):
                        yield self._finding(root, file, found)
            except LayerError as error:
                yield self._unusable(root, file, error)

    def _verify_table(self, root: Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        # The integrity check needs a table. Listing the rows proves that both tables have their columns.
        try:
            if complaint := RowFile(self.name, file.path, PERF_TABLE, self.environment.lock_timeout).check():
                raise Damaged(self.name, complaint, file.path)
            for _ in RowFile(self.name, file.path, _PERF_DB, self.environment.lock_timeout).rows_with("problem"):
                pass
        except LayerError as error:
            yield self._unusable(root, file, error)

    def file_of(self, file: DatabaseFile) -> RowFile:
        """Return a perf-db in sqlite."""
        return RowFile(self.name, file.path, PERF_TABLE, self.environment.lock_timeout)

    def entry_aside(self, root: Root, file: DatabaseFile, target: facts.Target, thing: facts.Quarantined) -> str | None:
        """Move a line into quarantine."""
        return self._records(root, file).quarantine(target, thing)

    def entry_back(self, root: Root, file: DatabaseFile, thing: facts.Quarantined, *, replace: bool) -> None:
        """Append a line to its file."""
        del replace
        self._records(root, file).restore(thing)

    def _finding(self, root: Root, file: DatabaseFile, fault: Fault) -> facts.Finding:
        fix = {
            "newline": f"while nothing uses MIOpen: echo >> {shlex.quote(str(file.path))}",
            "hidden": f"cachectl verify --quarantine {self.name}",
            "item": f"none needed; cachectl leaves line {fault.number} as it is",
        }.get(fault.code, f"while nothing uses MIOpen, delete line {fault.number} of {file.path}")
        message = f"line {fault.number}: {fault.message}"
        severity = _HARM[fault.code]
        thing = None
        if fault.line is not None:
            key = f"{file.relative}{SEPARATOR}line {fault.number}"
            thing = facts.Entry(self.name, key, root.path, len(fault.line) + 1, 0, stamp=(zlib.crc32(fault.line),))
        return facts.Finding(
            self.name, root.path, file.relative, severity, fault.code, message, self._fix(file, fix), thing
        )

    def _unusable(self, root: Root, file: DatabaseFile, error: LayerError) -> facts.Finding:
        # A file that cannot be opened may be whole.
        damaged = isinstance(error, Damaged)
        severity, code = (Severity.FAILS, "damaged") if damaged else (Severity.HARMLESS, "unreadable")
        fix = self._fix(file, f"end every program that has it open, then: cachectl verify --quarantine {self.name}")
        thing = None
        if damaged and file.name.kind in self.tables:
            rows = RowFile(self.name, file.path, _PERF_DB, self.environment.lock_timeout)
            thing = rows.orphan(root.path, file.relative, error.message)
        return facts.Finding(self.name, root.path, file.relative, severity, code, error.message, fix, thing)

    def _fix(self, file: DatabaseFile, own: str) -> str:
        """Return the fix of a user's file; a package's file has another."""
        del file
        return own


class MIOpenTuning(MIOpenLayer):
    """Results of MIOpen's tuning."""

    name = "miopen-tuning"
    title = "MIOpen user tuning results"
    # It turns the find-db off. The perf-db stays on.
    switch = EnvSwitch(SWITCH, off="1", read=at_load(*LIBRARIES))
    precious = True
    on_network: ClassVar[Hazard | None] = Hazard(
        Severity.RISKS,
        "the locks of MIOpen up to 3.3 lie in each node's temporary folder, so nodes write over each other's results",
    )
    among_ranks: ClassVar[Hazard | None] = Hazard(
        Severity.RISKS, "a rewrite removes the file before it renames the new one, so the others may not find it"
    )
    store = TuningDatabases()

    def roots(self) -> tuple[Root, ...]:
        """Resolve as MIOpen does when it first needs a tuning result."""
        return places.user_database_roots(self.environment)

    def state(self) -> facts.State:
        """Read the switch of the find-db; the perf-db stays on."""
        state = judge(self.environment, SWITCH, present=self.present())
        hints = []
        if places.read_flag(self.environment.get(SWITCH) or ""):
            hints.append("the find-db is off, the perf-db stays on")
        enforce = self.environment.get("MIOPEN_FIND_ENFORCE")
        if enforce in ("5", "DB_CLEAN"):
            hints.append(f"MIOPEN_FIND_ENFORCE={enforce} erases the user's results: unset it")
        return changed(state, why="; ".join((state.why, *hints)))

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and variables of a past tuning session."""
        yield from places.diagnosed_flag(self, SWITCH, FIND_DB)
        yield from self._enforced()
        for variable, outcome in _LEFT_SET.items():
            if self.environment.get(variable):
                yield self._left_set(variable, Severity.HARMLESS, outcome)

    def _enforced(self) -> Iterator[facts.Finding]:
        variable = "MIOPEN_FIND_ENFORCE"
        value = self.environment.get(variable)
        if not value:
            return
        number = re.match(r"\s*\+?(\d{1,18})", value, re.ASCII)
        action = _ACTIONS.get(value.upper()) if number is None else int(number[1])
        if action is None:
            yield misread(self, variable, Severity.FAILS, "is no action that MIOpen knows: it throws")
        elif action not in _ACTIONS.values():
            yield misread(self, variable, Severity.HARMLESS, "is no action that MIOpen knows: it is ignored")
        elif action in _ENFORCED:
            yield self._left_set(variable, *_ENFORCED[action])

    def _left_set(self, variable: str, severity: Severity, outcome: str) -> facts.Finding:
        message = f"{variable}={self.environment.get(variable)} is set: {outcome}"
        return facts.Finding(self.name, first_place(self), None, severity, "tuning", message, f"unset {variable}")

    def relocate(self, folder: Path) -> facts.Switch:
        """Return MIOpen's own variable; MIOpen makes the folder."""
        return facts.Switch(self.name, {"MIOPEN_USER_DB_PATH": str(folder / "miopen-db")}, read_at_load=LIBRARIES)


def _time_file(path: Path) -> Path:
    return path.with_name(path.name + _TIME)


def _is_of(artifact: facts.Artifact, key: str) -> bool:
    """Return whether a line contains the key that it is put under."""
    own = key.partition(SEPARATOR)[2]
    return artifact.data.partition(b"=")[0] == own.encode(errors="surrogateescape")
