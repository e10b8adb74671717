"""The content of MIOpen's databases, read as MIOpen reads it, in any folder.

Sources: ``src/binary_cache.cpp``, ``src/find_db.cpp``, ``src/include/miopen/db_record.hpp``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Damaged, Refused, Unreachable
from cachectl.layers.base.facts import Note, Scope
from cachectl.layers.base.texts import printable
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.kernel_db import kernel_key
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels
from cachectl.layers.miopen.system_tuning import MIOpenSystemTuning
from cachectl.layers.miopen.tuning import PERF_DB_CREATE, PERF_TABLE, PROBLEM, MIOpenTuning
from cachectl.layers.stores.merging import Joined, JoinedRows
from cachectl.layers.stores.records import Fault, RecordFile
from cachectl.layers.stores.rows import RowFile, Schema

#: Every ending, and the content of such files; the user's first.
HOLDS: Final = {
    **dict.fromkeys(("ukdb", "kdb"), "kernels"),
    **dict.fromkeys(("ufdb.txt", "fdb.txt"), "find-db"),
    **dict.fromkeys(("udb.txt", "db.txt"), "perf-db"),
    **dict.fromkeys(("cd.updb.txt", "cd.pdb.txt"), "perf-db of MIOpen 2"),
    **dict.fromkeys(("udb", "db"), "perf-db in sqlite"),
}
#: The two tables of a perf-db, as MIOpen makes them.
_PERF: Final = Joined(
    create=PERF_DB_CREATE,
    problems="config",
    problem=PROBLEM,
    table="perf_db",
    reference="config",
    key="solver",
    value="params",
)
_CONFIG: Final = Schema("config", (), ("id",), PROBLEM, "0", PERF_DB_CREATE)

Kernel = tuple[tuple[str, ...], tuple[object, ...]]


def make_folder(path: Path) -> None:
    """Make a folder, and those above it. Raises :class:`Unreachable`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unreachable("miopen", f"cannot make the folder: {error.strerror}", path) from error


def demand_no_package(environment: Environment, folder: Path) -> None:
    """Raise :class:`Refused` for a folder in which MIOpen's package keeps its databases."""
    for layer in (MIOpenSystemKernels(environment), MIOpenSystemTuning(environment)):
        for root in layer.roots():
            if os.path.realpath(folder) == os.path.realpath(root.path):
                named = environment.get("MIOPEN_SYSTEM_DB_PATH")
                own = "; name another folder" + (", or unset MIOPEN_SYSTEM_DB_PATH if it is your own" if named else "")
                raise Refused(layer.name, f"is owned by a package, whose files would be overwritten{own}", folder)


def as_miopen_writes(layer: MIOpenTuning, path: Path) -> Path:
    """Return a path as MIOpen writes it, below its root: MIOpen's locks are named by the text of the folder's path."""
    for root in layer.roots():
        if os.path.realpath(root.path) == os.path.realpath(path.parent):
            return root.path / path.name
    return path


class KernelFile:
    """A database of kernels, of either generation."""

    def __init__(self, layer: str, path: Path, lock_timeout: float) -> None:
        self.layer = layer
        self.path = path
        self._lock_timeout = lock_timeout
        columns = (
            RowFile(layer, path, kernel_db.SCHEMA, lock_timeout).columns() if os.path.lexists(path) else frozenset()
        )
        self.schema = kernel_db.schema_of(columns) if columns else None
        if columns and self.schema is None:
            raise Damaged(layer, f"the columns of kern_db are {', '.join(sorted(columns))}", path)

    def kernels(self) -> tuple[list[Kernel], list[Note]]:
        """Return every kernel that MIOpen could use, packed as it packs, and the faults of the others.

        All are read in one snapshot, which includes the rows that are only in the log.
        """
        kernels: dict[tuple[str, ...], tuple[object, ...]] = {}
        flawed: list[Note] = []
        if self.schema is not None:
            rows = RowFile(self.layer, self.path, self.schema, self._lock_timeout)
            for row, values in rows.rows_with(*self.schema.values):
                if (complaint := _complaint(row.key, values)) is not None:
                    flawed.append(Note(kernel_key(*row.key), f"{complaint}; cachectl verify miopen"))
                else:
                    kernels.setdefault(row.key, tuple(values))
        return list(kernels.items()), flawed


def _complaint(key: Sequence[str], values: Sequence[object]) -> str | None:
    """Return why MIOpen could not use a kernel; ``None`` where it could."""
    name, args = key
    try:
        data = kernel_db.decode(values)
        # Undecodable bytes cannot be stored again; that error is a ValueError too.
        f"{name}{args}".encode()
    except ValueError as error:
        return printable(str(error))
    return kernel_db.store_complaint(name, args, data)


def demand_readable(layer: MIOpenTuning, path: Path) -> None:
    """Raise the error of reading a text file. Taking MIOpen's locks first would leave its lock files for nothing."""
    next(RecordFile(layer.name, path, nullcontext).scan(), None)


def records_of(layer: MIOpenTuning, path: Path) -> tuple[list[bytes], list[Note]]:
    """Return the records that MIOpen reads, and the lines that it cannot read, under the lock of writers."""
    lines: list[bytes] = []
    flawed: list[Note] = []
    demand_readable(layer, path)
    with ExitStack() as stack:
        # If no lock file can be made, MIOpen cannot rewrite it either.
        with suppress(Unreachable):
            if layer.scope is Scope.USER:
                stack.enter_context(layer.store.locked(as_miopen_writes(layer, path)))
        for found in RecordFile(layer.name, path, nullcontext).scan():
            if not isinstance(found, Fault):
                lines.append(found.line)
            elif found.code == "malformed":
                flawed.append(Note(f"{path} line {found.number}", found.message))
    return lines, flawed


def joined_rows(layer: str, path: Path, lock_timeout: float) -> JoinedRows:
    """Return a perf-db in sqlite. Raises :class:`Damaged` where its tables are not MIOpen's."""
    if os.path.lexists(path):
        for schema in (PERF_TABLE, _CONFIG):
            rows = RowFile(layer, path, schema, lock_timeout)
            columns = rows.columns()
            if columns and not columns.issuperset(schema.columns):
                raise Damaged(layer, f"the columns of {schema.table} are {', '.join(sorted(columns))}", path)
    return JoinedRows(layer, path, PERF_TABLE, _PERF, lock_timeout)
