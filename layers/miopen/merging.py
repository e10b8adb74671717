"""Merge MIOpen's databases of several users or ranks into one.

A merge adds missing entries and replaces nothing. Keys hold neither compiler nor version, so files of two MIOpens are
mixed only on request. Source: ``src/include/miopen/db_record.hpp`` (how records are merged).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, Damaged, LayerError, Refused, reason_of
from cachectl.layers.base.facts import Note, Root, Scope
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.presence import nearest
from cachectl.layers.disk.trust import belonging_to
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.database_files import (
    HOLDS,
    Kernel,
    KernelFile,
    as_miopen_writes,
    demand_no_package,
    demand_readable,
    joined_rows,
    make_folder,
    records_of,
)
from cachectl.layers.miopen.databases import SEPARATOR
from cachectl.layers.miopen.kernel_db import kernel_key
from cachectl.layers.miopen.names import VERSION_FOLDER, DatabaseName, parse_name
from cachectl.layers.miopen.tuning import MIOpenTuning
from cachectl.layers.stores.merging import MergingRecords
from cachectl.layers.stores.rows import RowFile


@dataclass(frozen=True, slots=True)
class MergedFile:
    """The merge of one file: numbers of new entries, of equal ones, and the entries that differ."""

    file: Path
    added: int = 0
    there: int = 0
    conflicts: tuple[Note, ...] = ()
    failures: tuple[Note, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(names={"failures": "failed"})


@dataclass(frozen=True, slots=True)
class MergeTotal:
    """The sums over all files."""

    added: int
    there: int
    conflicts: int
    failed: int


@dataclass(frozen=True, slots=True)
class Merge:
    """The merge into one file."""

    into: Path
    files: tuple[MergedFile, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/miopen-merge/1", also=("total",))

    @property
    def total(self) -> MergeTotal:
        """Return the sums over all files."""
        return total(MergeTotal, self.files)

    @property
    def failed(self) -> bool:
        """Return whether an entry differs, or a file could not be used."""
        return any(file.conflicts or file.failures for file in self.files)


class _Named(NamedTuple):
    """A file that the user has named, with the facts in its name."""

    path: Path
    name: DatabaseName

    @property
    def holds(self) -> str:
        """Return the kind of its content."""
        return HOLDS[self.name.kind]

    @property
    def version(self) -> str | None:
        """Return the version of MIOpen in its name or folder; ``None`` if neither has one."""
        folder = self.path.parent.name
        return self.name.version or (folder if VERSION_FOLDER.fullmatch(folder) else None)

    @property
    def variant(self) -> tuple[bool, bool]:
        """Return which of several find-dbs and perf-dbs of one device it is."""
        return ".fusion." in self.name.file, self.name.file.startswith("batchnorm_")


def merge(environment: Environment, files: Sequence[str], into: str, *, mix_versions: bool = False) -> Merge:
    """Add entries of other databases that are missing in ``into``; a different entry stays and is named.

    A missing ``into`` is made. Before anything is written, raises :class:`BadRequest` for a name that no database has,
    :class:`FileNotFoundError` for a missing file, :class:`Refused` for files of another kind, device, backend or,
    unless ``mix_versions``, another MIOpen, and for a package's files; :class:`LayerError` if ``into`` cannot be
    written.
    """
    target = _named(environment, into)
    sources = [_named(environment, name) for name in files]
    for source in sources:
        os.stat(source.path)
        _demand_alike(source, target, mix_versions=mix_versions)
    demand_no_package(environment, target.path.parent)
    _demand_own(environment, target.path)
    make_folder(target.path.parent)
    take: Callable[[Environment, _Named, _Named], MergedFile]
    if target.holds == "kernels":
        take = _merge_kernels
    elif target.name.kind in ("udb", "db"):
        take = _merge_tables
    else:
        take = _merge_records
    return Merge(target.path, tuple(_taken(partial(take, environment, source, target), source) for source in sources))


def _taken(take: Callable[[], MergedFile], source: _Named) -> MergedFile:
    """Merge one file; if it cannot be used, its failure is returned and the others are merged."""
    try:
        return take()
    except (LayerError, OSError) as error:
        if isinstance(error, LayerError) and Path(error.path or "") != source.path:
            raise
        return MergedFile(source.path, failures=(Note(str(source.path), reason_of(error)),))


def _named(environment: Environment, name: str) -> _Named:
    path = environment.absolute(name)
    parsed = parse_name(path.name)
    if parsed is None or parsed.kind not in HOLDS:
        raise BadRequest(f"{printable(name)!r} is not a name of a MIOpen database, such as gfx90a6e.ukdb")
    return _Named(path, parsed)


def _demand_alike(source: _Named, target: _Named, *, mix_versions: bool) -> None:
    """Refuse to merge entries that MIOpen would never look for in the other file."""
    path, other = source.path, target.path
    if os.path.exists(other) and os.path.samefile(path, other):
        raise BadRequest(f"{printable(path)} is named twice; name INTO last, and only once")
    if source.holds != target.holds or source.variant != target.variant:
        raise Refused("miopen", f"holds {source.holds}, but {other.name} holds {target.holds}", path)
    ours, theirs = source.name.base, target.name.base
    if ours.raw != theirs.raw and not (ours.units is None and ours.device is not None and ours.device == theirs.device):
        raise Refused("miopen", f"is for the device {ours.raw}, but {other.name} is for {theirs.raw}", path)
    if None not in (backends := (source.name.backend, target.name.backend)) and len(set(backends)) > 1:
        raise Refused("miopen", f"is of the backend {backends[0]}, but {other.name} is of {backends[1]}", path)
    if not mix_versions and None not in (versions := (source.version, target.version)) and len(set(versions)) > 1:
        why = "keys do not contain the compiler; merge anyway with --mix-versions"
        raise Refused("miopen", f"is of MIOpen {versions[0]}, but {other} is of {versions[1]}; {why}", path)


def _demand_own(environment: Environment, path: Path) -> None:
    """Refuse to follow a link, and to leave the superuser's files in another user's cache."""
    if path.is_symlink():
        raise Refused("miopen", "a link is not followed", path)
    if not environment.superuser:
        return
    owner = nearest(path, follow=False).stat().st_uid
    if owner != 0:
        raise Refused("miopen", belonging_to(owner), path)


def _merge_kernels(environment: Environment, source: _Named, target: _Named) -> MergedFile:
    offered = KernelFile("miopen", source.path, environment.lock_timeout)
    kernels, flawed = offered.kernels()
    RowFile("miopen", target.path, kernel_db.SCHEMA, environment.lock_timeout).recover()
    standing = KernelFile("miopen", target.path, environment.lock_timeout)
    schema = standing.schema or offered.schema or kernel_db.SCHEMA
    if offered.schema not in (None, schema):
        message = f"has the columns of another generation of MIOpen than {target.path}"
        raise Damaged("miopen", message, source.path)
    rows = RowFile("miopen", target.path, schema, environment.lock_timeout)
    done = rows.insert_new(kernels) if kernels else []
    differing = [kernel for kernel, new in zip(kernels, done, strict=True) if new is None]
    conflicts = tuple(note for kernel in differing if (note := _conflict(rows, kernel, target.path)) is not None)
    there = len(kernels) - sum(new is True for new in done) - len(conflicts)
    return MergedFile(source.path, done.count(True), there, conflicts, tuple(flawed))


def _conflict(rows: RowFile, kernel: Kernel, into: Path) -> Note | None:
    """Describe what is in a kernel's place; ``None`` if it is the same kernel, perhaps packed differently."""
    key, values = kernel
    try:
        standing = rows.read(key)
        if standing is not None and kernel_db.decode(standing) == kernel_db.decode(values):
            return None
    except ValueError as error:
        return Note(kernel_key(*key), f"the kernel in {into} is damaged ({error}) and stays; cachectl verify miopen")
    return Note(kernel_key(*key), f"{into} has a different kernel, which stays")


def _merge_tables(environment: Environment, source: _Named, target: _Named) -> MergedFile:
    rows = joined_rows("miopen-tuning", source.path, environment.lock_timeout).all()
    done = joined_rows("miopen-tuning", target.path, environment.lock_timeout).merge([row[1:] for row in rows])
    return MergedFile(source.path, done.added, done.there, _differing(done.conflicts, target.path))


def _merge_records(environment: Environment, source: _Named, target: _Named) -> MergedFile:
    layer = MIOpenTuning(environment)
    path = as_miopen_writes(layer, target.path)
    demand_readable(layer, path)
    lines, flawed = records_of(layer, source.path)
    if not lines:
        return MergedFile(source.path, failures=tuple(flawed))
    root = Root(path.parent, Scope.USER, "named")
    # Running programs read only a user's file again.
    is_read_again = target.name.kind in layer.store.texts
    lock = partial(layer.store.editing, root, path) if is_read_again else partial(layer.store.locked, path)
    done = MergingRecords(layer.name, path, lock).merge(lines)
    return MergedFile(source.path, done.added, done.there, _differing(done.conflicts, target.path), tuple(flawed))


def _differing(keys: Iterable[tuple[str, ...]], into: Path) -> tuple[Note, ...]:
    return tuple(Note(SEPARATOR.join(key), f"{into} has a different value, which stays") for key in keys)
