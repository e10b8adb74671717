"""The stores of MIOpen's tuning results, the find-db (which solver is fastest) and the perf-db (how to run it).

Both are text records; the perf-db of builds that keep it in sqlite is only counted. Sources: ``src/find_db.cpp``,
``src/db_record.cpp``, ``src/ramdb.cpp`` (the ``.time`` file), ``src/lock_file.cpp``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Lock

from cachectl.layers import miopen
from cachectl.layers.base.environment import node
from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.codes import COMMON
from cachectl.layers.core.entry import Entry, Found, Problem, Usage
from cachectl.layers.core.finding import FAILS, RECOMPILES, Finding
from cachectl.layers.core.root import Root
from cachectl.layers.core.store import Codec, Damage, finding_of
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import atomic, handles, locks, place, plain
from cachectl.layers.miopen import codes, databases
from cachectl.layers.stores import files, records
from cachectl.layers.stores import tree_read as tree
from cachectl.layers.stores.table import Row

_TIME = ".time"
#: The folder of the lock files.
_LOCKS = "miopen-lockfiles"
_OWN_TEMPORARY = 'mkdir -p "$HOME/.cachectl/tmp" && export TMPDIR="$HOME/.cachectl/tmp"'
# Other users lock the same files, too.
_OPEN_TO_ALL = 0o777
# Record locks exclude processes, not threads.
_THREADS = Lock()
#: The code of each fault of a record. The finding of a line that hides another states the cost.
_FAULTS = {code.name: code for code in codes.OF_LINES}
#: The file that MIOpen renames over a database; in 3.5 its name has the machine and the process.
_REWRITE = regex(rf"(?P<file>{databases.TEXT_FILE.pattern})(?:\.(?P<host>[^/]+)\.\d{{1,10}})?\.temp")
#: Names of text files that no release has made.
_LIKE = tree.resembling(rf"(?!{databases.TEXT_FILE.pattern}\Z)(?:.*gfx.*\.(?:cd\.)?\w*db\w*|.*\.uf?db)\.txt")


class TuningTables(databases.MIOpenTables):
    """Records of text files."""

    codec = Codec("miopen-record/1")
    kinds = ("ufdb.txt", "udb.txt", "cd.updb.txt")
    parts = 1
    companions = (".temp",)
    # If MIOpen cannot open its database, it tunes again in every run.
    when_damaged = RECOMPILES

    def __init__(self, asked_first: str = "") -> None:
        super().__init__(asked_first)
        self.counted = ("db",) if asked_first else ("udb",)
        reason = "a record names a problem and its solvers, not the kernels they run"
        self.refusals = {**self.refusals, Ability.KERNELS: reason}

    def kind_of(self, root: Root, path: str) -> str:
        """Compare with the names of databases, and of files that their rewrites leave behind."""
        match, is_key = _REWRITE.fullmatch(path), databases.SEPARATOR in path
        return super().kind_of(root, match["file"] if match else path if is_key else path.removesuffix(_TIME))

    def opened(self, root: Root, file: str) -> records.RecordFile:
        """Return the records of a file, which are changed under MIOpen's locks."""
        return records.RecordFile(self.name, root.path / file, partial(self._editing, root, file))

    def lock_files(self, root: Root, file: str) -> tuple[Path, ...]:
        """Return the lock files of a text database, for every version and every path of its folder.

        Up to 3.3 they are in the temporary folder, named by the md5 of the folder's path as it was given; later they
        are next to the database.
        """
        import hashlib

        path = root.path / file
        paths = {str(path.parent), os.path.realpath(path.parent)}
        named = self.environment.get(miopen.TUNING.variable)
        if named and miopen.expand(self.environment, named) == path.parent:
            paths.add(named.rstrip("/"))
        temporary = self.environment.named_temporary / _LOCKS
        digests = (hashlib.md5(os.fsencode(text), usedforsecurity=False).hexdigest() for text in paths)
        beside = path.parent / _LOCKS / f"{path.name}.lock"
        return (beside, *sorted(temporary / f"{digest}_{path.name}.lock" for digest in digests))

    def _scanned(self, root: Root, file: str) -> Iterator[Row | records.Fault]:
        """Yield the records and faults of a file; none if it is only counted."""
        return self.opened(root, file).scan() if self.known(file).kind in self.kinds else iter(())

    def list_rows(self, root: Root, file: str, template: Entry, *, part: bytes, contents: bool) -> Iterator[Found]:
        """Yield the records of a file, and its faults."""
        path = root.path / file
        for row in self._scanned(root, file):
            if isinstance(row, Row):
                yield self.entry_of(template, row)
                continue
            number, code, message = row
            # These faults are in a record that MIOpen reads, and that is listed; only verify reports them.
            if code not in ("item", "duplicate-id"):
                yield Problem(path, code, f"line {number}: {message}")
        if (status := plain.status_at(path.with_name(path.name + _TIME))) is not None:
            yield Usage(files=1, bytes=handles.size_of(status))

    def check_rows(self, root: Root, file: str) -> Iterator[Finding]:
        """Check every line by the rules of MIOpen's reader. Nothing here is ever removed as damaged."""
        path = root.path / file
        for row in self._scanned(root, file):
            if not isinstance(row, Row):
                number, code, message = row
                fix = f"while nothing uses MIOpen, correct or delete line {number} of {path}"
                if code == "newline":
                    fix = f"echo >> {shlex.quote(str(path))}"
                # A later line that MIOpen stores for a key without contents stays hidden.
                severity = RECOMPILES if message == records.NO_CONTENTS else None
                message = f"line {number}: {message}"
                yield _FAULTS[code].finding(self.name, root.path, message, fix, key=file, severity=severity)

    def file_finding(self, root: Root, file: str, error: LayerError) -> Finding:
        """Return the finding of a file that could not be read."""
        return finding_of(self, root, Problem(root.path / file, "unreadable", error.message))

    def damages(self, key: str, data: bytes) -> Iterator[Damage]:
        """Yield that a line is not a record, or has another key."""
        name = key.partition(databases.SEPARATOR)[2].encode(errors="surrogateescape")
        complaint = records.record_complaint(data)
        if complaint is None and data.partition(b"=")[0] != name:
            complaint = "the line has another key than the entry"
        if complaint is not None:
            yield Damage(RECOMPILES, complaint)

    def detail(self, key: str, data: bytes) -> Mapping[str, str]:
        """Return the facts in the name of the file."""
        named = self.known(key.partition(databases.SEPARATOR)[0])
        return {**named.detail, **named.versions, "database": named.kind}

    @contextlib.contextmanager
    def _editing(self, root: Root, file: str) -> Iterator[None]:
        """Hold the locks of every MIOpen version while a file is changed, then notify running programs.

        Lock files are made as by MIOpen, and kept. Programs read the file again if the time in ``.time`` (steady clock,
        ns) is later than their last read.
        """
        path = root.path / file
        marks = path.with_name(path.name + _TIME)
        with _THREADS, contextlib.ExitStack() as stack:
            # In one order everywhere, so that two cachectls never wait for each other.
            for lock in sorted(self.lock_files(root, file)):
                is_new = not lock.parent.exists()
                lock.parent.mkdir(parents=True, exist_ok=True)
                # No link is followed.
                folder = stack.enter_context(handles.opened(str(lock.parent)))
                if is_new:
                    os.fchmod(folder, _OPEN_TO_ALL)
                held = locks.record_lock(self.name, lock, folder=folder, lock_timeout=self.environment.lock_timeout)
                handle = stack.enter_context(held)
                with contextlib.suppress(PermissionError):
                    os.fchmod(handle, _OPEN_TO_ALL)
            yield
            if plain.status_at(path) is not None:
                atomic.replace_file(marks, [str(time.monotonic_ns()).encode()])
            elif self.is_usable(root, file + _TIME):
                atomic.remove_file(marks)


def diagnose_quoted(tables: databases.MIOpenTables, root: Root) -> Iterator[Finding]:
    """Yield results in a folder named by the variable's value in quotation marks (MIOpen's issue 2881)."""
    quoted = tables.environment.absolute(f'"{tables.environment.get(miopen.TUNING.variable)}"')
    if tables.present(root._replace(path=quoted)):
        source, target = shlex.quote(str(quoted)), shlex.quote(str(root.path))
        message = "an MIOpen of April 2024 put results into this folder, which no other release reads"
        yield codes.QUOTED.finding(tables.name, quoted, message, f"mkdir -p {target} && mv -n {source}/* {target}")


def diagnose_locks(tables: databases.MIOpenTables, root: Root) -> Iterator[Finding]:
    """Yield what keeps MIOpen from locking its tuning files in the temporary folder.

    It opens lock files that exist, and makes new ones. Raises :class:`OSError` if the folder cannot be examined.
    """
    environment, temporary = tables.environment, tables.environment.named_temporary
    folder, files = temporary / _LOCKS, (file.relative for file in tables.present(root))
    named = (lock for file in files for lock in tables.lock_files(root, file) if lock.parent == folder)
    locks = [lock for lock in named if os.path.exists(lock)]
    obstacles = [place.Obstacle("no-folder", place.Use.MAKE, temporary, "cannot be made: its folder is missing")]
    if temporary.is_dir():
        is_open = locks and all(map(place.is_writable, locks))
        obstacles = [] if is_open else [*place.find_obstacles(folder, (), environment.home_folder, locks)]
    for obstacle in obstacles:
        if obstacle.use is not None:
            message = f"MIOpen locks its results in {folder}, which {obstacle.message}: it throws at each lookup"
            finding = COMMON[obstacle.code].finding(
                tables.name, obstacle.place, message, _OWN_TEMPORARY, severity=FAILS
            )
            # Only MIOpen itself could prove it.
            yield finding._replace(fix_tested=False)


class Leftovers(files.Files):
    """What interrupted rewrites leave behind next to tuning files."""

    shapes = (
        tree.Shape((_REWRITE,), because="left by an interrupted rewrite of MIOpen"),
        tree.Shape((tree.OWN_TEMPORARY,), because="left by an interrupted cachectl"),
        _LIKE,
    )
    writers = miopen.LIBRARIES
    # A rewrite takes less than a second.
    rest_time = 3600.0

    def in_use(self, targets: Iterable[Entry]) -> Iterator[tuple[Entry, str | None]]:
        """Skip also what a program on another machine may still be writing."""
        for target, reason in super().in_use(targets):
            match, age = _REWRITE.fullmatch(target.key), self.environment.clock() - (target.modified or 0)
            host = match["host"] if match is not None and age <= self.rest_time else None
            yield target, reason if host in (None, node()) else f"a program on {host} may be writing it"


def tuning_store(asked_first: str = "") -> databases.MIOpenDatabases:
    """Return the store of the user's results, or of those of a package."""
    rest = files.Files(_LIKE) if asked_first else Leftovers()
    return databases.MIOpenDatabases(TuningTables(asked_first), rest)
