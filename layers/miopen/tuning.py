"""The stores of MIOpen's tuning results, the find-db (which solver is fastest) and the perf-db (how to run it).

Both are text records; the perf-db of builds that keep it in sqlite is only counted. Sources: ``src/find_db.cpp``,
``src/db_record.cpp``, ``src/ramdb.cpp`` (the ``.time`` file), ``src/lock_file.cpp``.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

from cachectl.layers.base import errors, facts, lazy, store
from cachectl.layers.disk import atomic, handles, locks, plain
from cachectl.layers.host import processes
from cachectl.layers.miopen import databases, places
from cachectl.layers.stores import database, rows, tree
from cachectl.layers.stores.records import Fault, Record, RecordFile, record_complaint

_FORM: Final = "miopen-record/1"
_TIME: Final = ".time"
# Other users lock the same files.
_OPEN_TO_ALL: Final = 0o777
# Record locks exclude processes, not threads.
_THREADS: Final = Lock()
#: What MIOpen, or cachectl, writes before it renames it over a database.
_LEFTOVERS: Final = tree.Shape(
    (lazy.regex("(?!)"),),
    folders=True,
    orphans=(
        tree.OrphanRule(lazy.regex(r"(?:batchnorm_)?gfx.*\.txt\.temp"), "left by an interrupted rewrite of MIOpen"),
        tree.OrphanRule(tree.OWN_TEMPORARY, "left by an interrupted cachectl"),
    ),
)
#: The effect of each fault of a record. The finding of a line that hides another says what that costs.
_FAULTS: Final = {
    **dict.fromkeys(("malformed", "newline"), facts.Severity.RECOMPILES),
    **dict.fromkeys(("duplicate", "duplicate-id"), facts.Severity.WASTES),
    **dict.fromkeys(("hidden", "item"), facts.Severity.HARMLESS),
}


class TuningDatabases(databases.MIOpenDatabases):
    """Records of text files."""

    forms = (_FORM,)
    kinds = ("ufdb.txt", "udb.txt", "cd.updb.txt")
    parts = 1
    # If MIOpen cannot open its database, it tunes again in every run.
    when_blocked = facts.Severity.RECOMPILES

    def __init__(self, asked_first: str = "") -> None:
        super().__init__(asked_first)
        self.counted = ("db",) if asked_first else ("udb",)
        reason = "a record has a problem and its solvers, not the kernels they run"
        self.refusals = {**self.refusals, facts.Ability.KERNELS: reason}

    def kind_of(self, root: facts.Root, path: str) -> str:
        """Compare with the names of databases, and of the files that their rewrites leave."""
        is_key = databases.SEPARATOR in path
        return super().kind_of(root, path if is_key else path.removesuffix(_TIME).removesuffix(".temp"))

    def row_file(self, root: facts.Root, file: str) -> None:
        """Return nothing: there are no rows."""
        del root, file

    def records(self, file: places.DatabaseFile) -> RecordFile:
        """Return the records of a file, which are changed under MIOpen's locks."""
        return RecordFile(self.name, file.path, partial(self._editing, file))

    # ------------------------------------------------------------------ listing

    def list_file(self, file: places.DatabaseFile, template: facts.Entry) -> Iterator[facts.Found]:
        """Yield the records of a file, and its faults."""
        for found in self.records(file).scan():
            if isinstance(found, Record):
                key, stamp = databases.SEPARATOR.join((file.relative, found.key)), (found.checksum,)
                yield changed(template, key=key, bytes=len(found.line) + 1, stamp=stamp)
            # These have a record, which MIOpen reads and which is listed; only verify reports the fault.
            elif found.code not in ("item", "duplicate-id"):
                yield facts.Problem(file.path, found.code, f"line {found.number}: {found.message}")
        marks = file.path.with_name(file.path.name + _TIME)
        if (status := plain.status_at(marks)) is not None:
            key, size, disk = file.relative + _TIME, status.st_size, handles.blocks_of(status)
            yield changed(template, key=key, bytes=size, files=1, disk=disk, sums=0)

    def scan_others(self, root: facts.Root, latest: str | None) -> Iterator[facts.Found]:
        """Yield what interrupted rewrites have left, by MIOpen or cachectl; nothing rewrites a package's files."""
        del latest
        for leaf in () if self.asked_first else self._leftovers(root).scan():
            yield leaf if isinstance(leaf, facts.Problem) else leaf.orphan(self.name, root.path)

    def _leftovers(self, root: facts.Root) -> tree.Tree:
        return tree.Tree(self.name, root.path, _LEFTOVERS)

    # ------------------------------------------------------------------ get and put

    def load(self, file: places.DatabaseFile, keys: Sequence[str]) -> Mapping[str, facts.Artifact | errors.LayerError]:
        """Read the lines of records as they stand."""
        detail = {**file.detail, **file.versions, "database": file.kind}
        prefix = file.relative + databases.SEPARATOR
        loaded: dict[str, facts.Artifact | errors.LayerError] = {}
        for name, found in self.records(file).read_many([key.removeprefix(prefix) for key in keys]).items():
            key = prefix + name
            loaded[key] = (
                facts.Artifact(self.name, key, _FORM, found.line, detail) if isinstance(found, Record) else found
            )
        return loaded

    def complaint(self, artifact: facts.Artifact) -> str | None:
        """Return why a line is no record of its key."""
        own = artifact.key.partition(databases.SEPARATOR)[2].encode(errors="surrogateescape")
        if artifact.data.partition(b"=")[0] != own:
            return "the line contains another key than the one it is put under"
        return record_complaint(artifact.data)

    def insert(
        self, file: places.DatabaseFile, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Sequence[bool | errors.LayerError]:
        """Insert lines, which contain their keys, under MIOpen's locks in one rewrite."""
        return self.records(file).put([artifact.data for artifact in artifacts], replace=replace)

    # ------------------------------------------------------------------ locks

    @contextmanager
    def _editing(self, file: places.DatabaseFile) -> Iterator[None]:
        """Hold the locks of every MIOpen version while a file is changed, then notify running programs.

        Lock files are made as MIOpen makes them, and stay. Programs read the file again if ``.time`` contains a later
        time of the steady clock (ns) than their last read.
        """
        marks = file.path.with_name(file.path.name + _TIME)
        with _THREADS, ExitStack() as stack:
            # One order everywhere, so that two cachectls never wait for each other.
            for lock in sorted(places.lock_files(self.environment, file.path)):
                folder = self._lock_folder(lock.parent, stack)
                held = locks.record_lock(self.name, lock, folder=folder, lock_timeout=self.environment.lock_timeout)
                handle = stack.enter_context(held)
                with suppress(PermissionError):
                    os.fchmod(handle, _OPEN_TO_ALL)
            yield
            if plain.status_at(file.path) is not None:
                atomic.replace_file(marks, [str(time.monotonic_ns()).encode()])
            elif databases.is_own_file(file.root, marks):
                atomic.remove_file(marks)

    def _lock_folder(self, folder: Path, stack: ExitStack) -> int:
        """Open a folder of locks, or make it; no link is followed."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            is_new = not folder.exists()
            folder.mkdir(exist_ok=True)
            handle = stack.enter_context(handles.opened(str(folder)))
            if is_new:
                os.fchmod(handle, _OPEN_TO_ALL)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and folder.is_symlink():
                message = "a link in the place of MIOpen's lock folder is not followed"
                raise errors.Refused(self.name, message, folder) from error
            raise errors.Unreachable(self.name, f"cannot make the lock folder: {error.strerror}", folder) from error
        return handle

    # ------------------------------------------------------------------ remove and verify

    def in_use(self, targets: Iterable[facts.Entry]) -> Iterator[tuple[facts.Entry, str | None]]:
        """Skip leftovers while a program has MIOpen loaded."""
        users = processes.using(places.LIBRARIES, processes=self.environment.processes)
        reason = None if users == () else f"MIOpen is loaded in {processes.process_names(users)}"
        for target in targets:
            yield target, reason if target.is_orphan else None

    def remove_others(self, root: facts.Root, targets: Sequence[facts.Entry]) -> Iterator[store.Part]:
        """Delete lines, and useless files. Running programs keep the records that they have read."""
        leftovers = tuple(target for target in targets if databases.SEPARATOR not in target.key)
        by_file: dict[str, dict[str, facts.Entry]] = {}
        for target in targets:
            relative, separator, record = target.key.partition(databases.SEPARATOR)
            if separator:
                by_file.setdefault(relative, {})[record] = target
        for relative, planned in by_file.items():
            yield relative, partial(self._remove_records, root, relative, planned)
        if leftovers:
            yield str(root.path), partial(self._leftovers(root).remove, leftovers)

    def _remove_records(self, root: facts.Root, relative: str, planned: Mapping[str, facts.Entry]) -> facts.Outcome:
        file = self.locate(root, relative)
        if file is None:
            gone = tuple(facts.Note(target.key, tree.GONE) for target in planned.values())
            return facts.Outcome(self.name, skipped=gone)
        before, records = database.disk_usage(file.path).bytes, self.records(file)
        failed: tuple[facts.Note, ...] = ()
        try:
            removed = records.delete({key: target.stamp[0] for key, target in planned.items()})
        except errors.LayerError as error:
            failed = (facts.Note(relative, error.message),)
            # The new file may be in place if a later step failed.
            removed = set(planned.keys() - records.read_many(planned).keys())
        left = [target.key for key, target in planned.items() if key not in removed and not failed]
        skipped = tuple(facts.Note(key, rows.CHANGED) for key in left)
        freed = max(0, before - database.disk_usage(file.path).bytes)
        return facts.Outcome(self.name, len(removed), freed, skipped, failed)

    def verify_file(self, file: places.DatabaseFile) -> Iterator[facts.Finding]:
        """Check every line by the rules of MIOpen's reader. Nothing here is ever removed as damaged."""
        try:
            for fault in self.records(file).scan():
                if isinstance(fault, Fault):
                    fix = f"while nothing uses MIOpen, correct or delete line {fault.number} of {file.path}"
                    if fault.code == "newline":
                        fix = f"while nothing uses MIOpen: echo >> {shlex.quote(str(file.path))}"
                    message, fix = f"line {fault.number}: {fault.message}", self.fix(file.path, fix)
                    severity = _FAULTS[fault.code]
                    place = self.name, file.root.path, file.relative
                    yield facts.Finding(*place, severity, fault.code, message, fix)
        except errors.LayerError as error:
            yield store.finding_of(self, file.root, facts.Problem(file.path, "unreadable", error.message))
