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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from threading import Lock
from typing import ClassVar, Final

from cachectl.layers.base import facts
from cachectl.layers.base.declarations import EnvSwitch, at_load
from cachectl.layers.base.errors import Damaged, LayerError, Refused, Unreachable
from cachectl.layers.base.facts import Entry, Found, Hazard, Orphan, Problem, Root, Severity
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.store import Part
from cachectl.layers.base.switches import first_place, misread
from cachectl.layers.disk.atomic import remove_file, replace_file
from cachectl.layers.disk.handles import blocks_of, opened
from cachectl.layers.disk.locks import record_lock
from cachectl.layers.disk.presence import status_at
from cachectl.layers.host.processes import process_names, using
from cachectl.layers.miopen.databases import (
    SEPARATOR,
    DatabaseFile,
    MIOpenDatabases,
    MIOpenLayer,
    is_own_file,
    versions_of,
)
from cachectl.layers.miopen.places import LIBRARIES, TUNING, SystemPlace, UserPlace, lock_files, read_flag
from cachectl.layers.stores.database import disk_usage
from cachectl.layers.stores.records import Fault, Record, RecordFile, record_complaint
from cachectl.layers.stores.rows import CHANGED, RowFile, Schema
from cachectl.layers.stores.tree import OWN_TEMPORARY, OrphanRule, Shape, Tree

_FORM: Final = "miopen-record/1"
_NO_KERNELS: Final = "a record has a problem and its solvers, not the kernels they run"
_LISTED_ONLY: Final = "an sqlite perf-db is read, never changed; MIOpen's own tools edit it"
_TIME: Final = ".time"
# Other users lock the same files.
_OPEN_TO_ALL: Final = 0o777
# Record locks exclude processes, not threads.
_THREADS: Final = Lock()
#: What MIOpen, or cachectl, writes before it renames it over a database.
_LEFTOVERS: Final = Shape(
    (regex("(?!)"),),
    folders=True,
    orphans=(
        OrphanRule(regex(r"(?:batchnorm_)?gfx.*\.txt\.temp"), "left by an interrupted rewrite of MIOpen"),
        OrphanRule(OWN_TEMPORARY, "left by an interrupted cachectl"),
    ),
)

#: The columns of a problem, in the order of a text record's key.
_PROBLEM: Final = (
    *("spatial_dim", "in_channels", "in_h", "in_w", "in_d", "fil_h", "fil_w", "fil_d", "out_channels", "batchsize"),
    *("pad_h", "pad_w", "pad_d", "conv_stride_h", "conv_stride_w", "conv_stride_d"),
    *("dilation_h", "dilation_w", "dilation_d", "bias", "group_count", "layout", "data_type", "direction"),
)
_TEXTS: Final = _PROBLEM[-3:]
_INTEGERS: Final = _PROBLEM[:-3]
# A query can replace the table, since it is only read. It writes the problem as a text record does.
_PERF_DB: Final = Schema(
    table=(
        "(select perf_db.id as rowid, perf_db.config, perf_db.solver, perf_db.params, "
        + "||'x'||".join(f"config.{column}" for column in _PROBLEM)
        + " as problem from perf_db join config on config.id = perf_db.config)"
    ),
    create=(),
    key=("config", "solver"),
    values=("problem", "params"),
    size="length(params)",
    # The two tables and their indexes, as MIOpen makes them.
    others=(
        "CREATE TABLE IF NOT EXISTS `config` (`id` INTEGER PRIMARY KEY ASC,"
        + ",".join(
            [f"`{column}` TEXT NOT NULL" for column in _TEXTS] + [f"`{name}` INT NOT NULL" for name in _INTEGERS]
        )
        + ")",
        f"CREATE UNIQUE INDEX IF NOT EXISTS `idx_config` ON config( {','.join((*_TEXTS, *_INTEGERS))} )",
        (
            "CREATE TABLE IF NOT EXISTS `perf_db` (`id` INTEGER PRIMARY KEY ASC,`solver` TEXT NOT NULL,"
            "`config` INTEGER NOT NULL,`params` TEXT NOT NULL)"
        ),
        "CREATE UNIQUE INDEX IF NOT EXISTS `idx_perf_db` ON perf_db(solver, config)",
    ),
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
_DELETED: Final = "while nothing uses MIOpen, delete line {number} of {path}"
#: The effect of each fault of a record, and its fix.
_FAULTS: Final = {
    "malformed": (Severity.RECOMPILES, _DELETED),
    "newline": (Severity.RECOMPILES, "while nothing uses MIOpen: echo >> {quoted}"),
    # The finding of the line that hides it says what that costs.
    "hidden": (Severity.HARMLESS, "delete the earlier line, while nothing uses MIOpen"),
    "item": (Severity.HARMLESS, "none needed; cachectl leaves line {number} as it is"),
    "duplicate": (Severity.WASTES, _DELETED),
    "duplicate-id": (Severity.WASTES, _DELETED),
}
#: Faults of records that MIOpen still reads.
_READ: Final = frozenset({"item", "duplicate-id"})


class TuningDatabases(MIOpenDatabases):
    """Records of text files, and rows of sqlite files."""

    forms = (_FORM,)
    #: Endings of its files of records, and of its sqlite files.
    texts: ClassVar[tuple[str, ...]] = ("ufdb.txt", "udb.txt", "cd.updb.txt")
    tables: ClassVar[tuple[str, ...]] = ("udb",)
    kinds = texts + tables
    parts = 1
    # If MIOpen cannot open its database, it tunes again in every run.
    when_blocked = Severity.RECOMPILES

    def refusals(self) -> Mapping[facts.Ability, str]:
        """Refuse kernels, too."""
        return {**super().refusals(), facts.Ability.KERNELS: _NO_KERNELS}

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of databases, and of the files that their rewrites leave."""
        name = parts[-1].removesuffix(_TIME).removesuffix(".temp")
        return super().owns(root, (*parts[:-1], name))

    def row_file(self, root: Root, file: str) -> None:
        """Return nothing: no row is removed."""
        del root, file

    def table_of(self, file: DatabaseFile) -> RowFile | None:
        """Return the rows of a perf-db in sqlite; ``None`` for records of a text file."""
        return self.opened(file.path, _PERF_DB) if file.name.kind in self.tables else None

    def readable(self, file: DatabaseFile) -> RecordFile:
        """Return the records of a text file, to be read."""
        return RecordFile(self.name, file.path, nullcontext)

    def records(self, root: Root, file: DatabaseFile) -> RecordFile:
        """Return the records of a text file, to be changed under MIOpen's locks."""
        return RecordFile(self.name, file.path, partial(self.editing, root, file.path))

    # ------------------------------------------------------------------ listing

    def list_file(self, file: DatabaseFile, template: Entry) -> Iterator[Found]:
        """Yield the records of a text file with its faults, or the rows of a sqlite file."""
        if (rows := self.table_of(file)) is not None:
            for row in rows.rows():
                key = SEPARATOR.join((file.relative, *row.key))
                yield changed(template, key=key, bytes=row.bytes, stamp=(row.rowid,))
            return
        for found in self.readable(file).scan():
            if isinstance(found, Record):
                key, stamp = SEPARATOR.join((file.relative, found.key)), (found.checksum,)
                yield changed(template, key=key, bytes=len(found.line) + 1, stamp=stamp)
            # The others have a record, which is listed; only verify reports the fault.
            elif found.code not in _READ:
                yield Problem(file.path, found.code, f"line {found.number}: {found.message}")
        marks = file.path.with_name(file.path.name + _TIME)
        if (status := status_at(marks)) is not None:
            key, size, disk = file.relative + _TIME, status.st_size, blocks_of(status)
            yield facts.Housekeeping(key, template.root, size, 1, status.st_mtime, template.stale, disk=disk)

    def scan_others(self, root: Root, latest: str | None) -> Iterator[Found]:
        """Yield what interrupted rewrites have left, by MIOpen or cachectl; nothing rewrites a package's files."""
        del latest
        for leaf in () if self.asked_first else self._leftovers(root).scan():
            yield leaf if isinstance(leaf, Problem) else leaf.orphan(root.path)

    def _leftovers(self, root: Root) -> Tree:
        return Tree(self.name, root.path, _LEFTOVERS)

    # ------------------------------------------------------------------ get and put

    def load(self, file: DatabaseFile, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError]:
        """Read the lines of records as they stand, or rows of an sqlite file as such lines."""
        detail = {**file.detail, **versions_of(file.version), "database": file.name.kind}
        lines = self._lines(file, [key.partition(SEPARATOR)[2] for key in keys])
        read = {key: line for key in keys if (line := lines.get(key.partition(SEPARATOR)[2])) is not None}
        return {
            key: facts.Artifact(self.name, key, _FORM, line, detail) if isinstance(line, bytes) else line
            for key, line in read.items()
        }

    def _lines(self, file: DatabaseFile, names: Sequence[str]) -> Mapping[str, bytes | LayerError]:
        """Return the lines of records of a file, by their keys in it."""
        if (rows := self.table_of(file)) is None:
            read = self.readable(file).read_many(names)
            return {name: found.line if isinstance(found, Record) else found for name, found in read.items()}
        pairs = [(config, solver) for config, _, solver in (name.partition(SEPARATOR) for name in names)]
        return {
            name: f"{values[0]}={solver}:{values[1]}".encode()
            for name, (_, solver), values in zip(names, pairs, rows.read_many(pairs), strict=True)
            if values is not None
        }

    def write(self, root: Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        """Insert a line into a text file under MIOpen's locks. The line contains its key."""
        records = self._changeable(root, self.writable(root, key))
        if not _is_of(artifact):
            raise Damaged(self.name, "the line contains another key than the one it is put under", key)
        records.put(artifact.data, replace=replace)

    def is_usable(self, artifact: facts.Artifact) -> bool:
        """Return whether a line is a record of its key."""
        return _is_of(artifact) and record_complaint(artifact.data) is None

    def insert_new(
        self, root: Root, file: DatabaseFile, artifacts: Sequence[facts.Artifact]
    ) -> Sequence[bool | LayerError | None]:
        """Insert lines in one rewrite."""
        return self._changeable(root, file).put_new([artifact.data for artifact in artifacts])

    def _changeable(self, root: Root, file: DatabaseFile) -> RecordFile:
        if self.table_of(file) is not None:
            raise Refused(self.name, f"cannot put: {_LISTED_ONLY}", file.path)
        return self.records(root, file)

    # ------------------------------------------------------------------ locks

    @contextmanager
    def editing(self, root: Root, path: Path) -> Iterator[None]:
        """Hold the locks of every MIOpen version while a file is changed, then notify running programs.

        Lock files are made as MIOpen makes them, and stay. Programs read the file again if ``.time`` contains a later
        time of the steady clock (ns) than their last read.
        """
        marks = path.with_name(path.name + _TIME)
        with _THREADS, ExitStack() as stack:
            # One order everywhere, so that two cachectls never wait for each other.
            for lock in sorted(lock_files(self.environment, path)):
                folder = self._lock_folder(lock.parent, stack)
                held = record_lock(self.name, lock, folder=folder, lock_timeout=self.environment.lock_timeout)
                handle = stack.enter_context(held)
                with suppress(PermissionError):
                    os.fchmod(handle, _OPEN_TO_ALL)
            yield
            if status_at(path) is not None:
                replace_file(marks, [str(time.monotonic_ns()).encode()])
            elif is_own_file(root, marks):
                remove_file(marks)

    def _lock_folder(self, folder: Path, stack: ExitStack) -> int:
        """Open a folder of locks, or make it; no link is followed."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            is_new = not folder.exists()
            folder.mkdir(exist_ok=True)
            handle = stack.enter_context(opened(str(folder)))
            if is_new:
                os.fchmod(handle, _OPEN_TO_ALL)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and folder.is_symlink():
                message = "a link in the place of MIOpen's lock folder is not followed"
                raise Refused(self.name, message, folder) from error
            raise Unreachable(self.name, f"cannot make the lock folder: {error.strerror}", folder) from error
        return handle

    # ------------------------------------------------------------------ remove and verify

    def in_use(self, targets: Iterable[facts.Removable]) -> Iterator[tuple[facts.Removable, str | None]]:
        """Skip rows of sqlite files, and leftovers while a program has MIOpen loaded."""
        users = using(LIBRARIES, processes=self.environment.processes)
        for target in targets:
            if isinstance(target, Orphan):
                yield target, None if users == () else f"MIOpen is loaded in {process_names(users)}"
            else:
                file = self.named(target.root, target.key.partition(SEPARATOR)[0])
                yield target, None if file is None or self.table_of(file) is None else _LISTED_ONLY

    def remove_others(self, root: Root, targets: Sequence[facts.Removable]) -> Iterator[Part]:
        """Delete lines, and useless files. Running programs keep the records that they have read."""
        by_file: dict[str, dict[str, facts.Removable]] = {}
        for target in targets:
            relative, separator, record = target.key.partition(SEPARATOR)
            # A leftover is a file of the root.
            by_file.setdefault(relative if separator else "", {})[record or relative] = target
        leftovers = tuple(by_file.pop("", {}).values())
        for relative, planned in by_file.items():
            yield relative, tuple(planned.values()), partial(self._remove_records, root, relative, planned)
        if leftovers:
            yield str(root.path), leftovers, partial(self._leftovers(root).remove, leftovers)

    def _remove_records(self, root: Root, relative: str, planned: Mapping[str, facts.Removable]) -> facts.Outcome:
        file = self.locate(root, relative)
        if file is None:
            gone = tuple(facts.Note(target.key, "already gone") for target in planned.values())
            return facts.Outcome(self.name, skipped=gone)
        before = disk_usage(file.path).bytes
        records = self.records(root, file)
        failed: tuple[facts.Note, ...] = ()
        try:
            removed = records.delete({key: target.stamp[0] for key, target in planned.items()})
        except LayerError as error:
            failed = (facts.Note(relative, error.message),)
            # The new file may be in place if a later step failed.
            removed = set(planned.keys() - records.read_many(planned).keys())
        left = [target.key for key, target in planned.items() if key not in removed and not failed]
        freed = max(0, before - disk_usage(file.path).bytes)
        return facts.Outcome(self.name, len(removed), freed, tuple(facts.Note(key, CHANGED) for key in left), failed)

    def verify_file(self, root: Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Check every line by the rules of MIOpen's reader, or a sqlite file with sqlite's own check.

        Nothing here is ever removed as damaged.
        """
        rows = self.table_of(file)
        try:
            if rows is not None:
                rows.require_sound()
                # Listing the rows proves that both tables have their columns.
                rows.rows()
                return
            for fault in self.readable(file).scan():
                if isinstance(fault, Fault):
                    yield self._finding(root, file, fault)
        except LayerError as error:
            finding = self.file_finding(root, rows or self.opened(file.path, _PERF_DB), error)
            moved = f"end every program that has it open, then move {shlex.quote(str(file.path))} elsewhere"
            is_damaged = isinstance(error, Damaged)
            yield changed(finding, thing=None, fix=self.fix(file.path, moved) if is_damaged else finding.fix)

    def _finding(self, root: Root, file: DatabaseFile, fault: Fault) -> facts.Finding:
        severity, fix = _FAULTS[fault.code]
        own = fix.format(number=fault.number, path=file.path, quoted=shlex.quote(str(file.path)))
        message, fix = f"line {fault.number}: {fault.message}", self.fix(file.path, own)
        return facts.Finding(self.name, root.path, file.relative, severity, fault.code, message, fix)


class MIOpenTuning(MIOpenLayer):
    """Results of MIOpen's tuning."""

    name = "miopen-tuning"
    title = "MIOpen user tuning results"
    places: ClassVar[UserPlace | SystemPlace] = TUNING
    switch = EnvSwitch("MIOPEN_DEBUG_DISABLE_FIND_DB", off="1", read=at_load(*LIBRARIES))
    # The perf-db stays on.
    switched_part = "MIOpen's find-db"
    about = MIOpenLayer.about._replace(
        precious=True,
        on_network=Hazard(
            Severity.RISKS,
            "the locks of MIOpen up to 3.3 lie in each node's temporary folder, so nodes write over each other's "
            "results",
        ),
        among_ranks=Hazard(
            Severity.RISKS, "a rewrite removes the file before it renames the new one, so the others may not find it"
        ),
    )
    store: TuningDatabases = TuningDatabases()

    def state(self) -> facts.State:
        """Read the switch of the find-db; the perf-db stays on."""
        state = super().state()
        hints = []
        if read_flag(self.environment.get(self.switch.variable) or ""):
            hints.append("the find-db is off, the perf-db stays on")
        enforce = self.environment.get("MIOPEN_FIND_ENFORCE")
        if enforce in ("5", "DB_CLEAN"):
            hints.append(f"MIOPEN_FIND_ENFORCE={enforce} erases the user's results: unset it")
        return changed(state, why="; ".join((state.why, *hints)))

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and variables of a past tuning session."""
        yield from super().diagnose()
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


def _is_of(artifact: facts.Artifact) -> bool:
    own = artifact.key.partition(SEPARATOR)[2]
    return artifact.data.partition(b"=")[0] == own.encode(errors="surrogateescape")
