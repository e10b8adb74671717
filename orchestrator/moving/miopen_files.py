"""MIOpen's databases as files: made to be installed, and those of several users or ranks merged into one.

What a user's runs have compiled and tuned becomes what a package ships: ``BASE.kdb`` of kernels, find-db and perf-db of
tuning, the last two with what is installed already below the user's own. A merge adds what is missing, and replaces
nothing. Keys hold neither compiler nor version: files of two MIOpens are not mixed unless that is asked for. Sources:
``src/binary_cache.cpp``, ``cmake/embed.cmake`` (names, and that the path is a folder), ``src/find_db.cpp``,
``src/include/miopen/db_record.hpp`` (how records are merged).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from cachectl.inspecting.entries import Trouble, listed
from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.environment import Environment, user_name
from cachectl.layers.base.errors import (
    FAILURES,
    BadRequest,
    Damaged,
    LayerError,
    Refused,
    Unreachable,
    printable,
    reason_of,
)
from cachectl.layers.base.facts import Note, Root, Scope
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk.atomic import replace_file
from cachectl.layers.disk.trust import as_owner
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.names import VERSION_FOLDER, DatabaseName, parse_name, version_numbers
from cachectl.layers.miopen.places import SEPARATOR, DatabaseFile, kernel_key
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels
from cachectl.layers.miopen.system_tuning import MIOpenSystemTuning
from cachectl.layers.miopen.tuning import PERF_DB_CREATE, PERF_TABLE, PROBLEM, MIOpenTuning
from cachectl.layers.stores.merging import Joined, JoinedRows, MergingRecords, join_records, write_database
from cachectl.layers.stores.records import Fault, RecordFile, items_of
from cachectl.layers.stores.rows import RowFile, Schema

#: What can be exported so.
LAYERS: Final = (MIOpenKernels.name, MIOpenTuning.name)

#: Every ending, and what is in such files; the user's first.
_HOLDS: Final = {
    **dict.fromkeys(("ukdb", "kdb"), "kernels"),
    **dict.fromkeys(("ufdb.txt", "fdb.txt"), "find-db"),
    **dict.fromkeys(("udb.txt", "db.txt"), "perf-db"),
    **dict.fromkeys(("cd.updb.txt", "cd.pdb.txt"), "perf-db of MIOpen 2"),
    **dict.fromkeys(("udb", "db"), "perf-db in sqlite"),
}
#: How a user's file is called where it is installed.
_INSTALLED: Final = {
    "ukdb": "kdb",
    "ufdb.txt": "fdb.txt",
    "udb.txt": "db.txt",
    "cd.updb.txt": "cd.pdb.txt",
    "udb": "db",
}
_VERSION: Final = re.compile(r"\.\d+_\d+_\d+(?:_[^.]*)?(?=\.)|_\d+\.\d+\.\d+(?=\.udb$)")
_BACKEND: Final = re.compile(r"\.(?:HIPNOGPU|HIP|OpenCL)(?=\.)")

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


@dataclass(frozen=True, slots=True)
class InstallableFile:
    """A file that can be installed: where it is, out of which user's file, how many entries, bytes.

    ``from_system`` counts those that only the installed file had.
    """

    file: Path
    source: Path
    entries: int
    bytes: int
    from_system: int = 0


@dataclass(frozen=True, slots=True)
class FilesExport:
    """What was written into a folder, what was left out and why, what cannot be used, and what to know of it."""

    folder: Path
    files: tuple[InstallableFile, ...]
    skipped: tuple[Note, ...] = ()
    failures: tuple[Note, ...] = ()
    hints: tuple[Note, ...] = ()
    as_json: ClassVar = AsJson("cachectl/miopen-export/1", names={"failures": "failed"})

    @property
    def failed(self) -> bool:
        """Return whether anything that was asked for could not be written."""
        return bool(self.failures)


@dataclass(frozen=True, slots=True)
class MergedFile:
    """What one file brought: entries that were new, that were there already, and that differ from those there."""

    file: Path
    added: int = 0
    there: int = 0
    conflicts: tuple[Note, ...] = ()
    failures: tuple[Note, ...] = ()
    as_json: ClassVar = AsJson(names={"failures": "failed"})


@dataclass(frozen=True, slots=True)
class MergeTotal:
    """The sums over all files."""

    added: int
    there: int
    conflicts: int
    failed: int


@dataclass(frozen=True, slots=True)
class Merge:
    """What was merged into a file."""

    into: Path
    files: tuple[MergedFile, ...]
    as_json: ClassVar = AsJson("cachectl/miopen-merge/1", also=("total",))

    @property
    def total(self) -> MergeTotal:
        """Return the sums over all files."""
        return total(MergeTotal, self.files)

    @property
    def failed(self) -> bool:
        """Return whether anything differs, or could not be used."""
        return any(file.conflicts or file.failures for file in self.files)


# ---------------------------------------------------------------------- export


@dataclass
class _Export:
    """An export on its way."""

    environment: Environment
    folder: Path
    keys: frozenset[str]
    force: bool = False
    files: list[InstallableFile] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    failures: list[Note] = field(default_factory=list)
    hints: list[Note] = field(default_factory=list)

    def chosen(self, file: DatabaseFile, *key: str) -> bool:
        """Tell whether an entry was selected."""
        return SEPARATOR.join((file.relative, *key)) in self.keys


def export_files(
    environment: Environment,
    folder: str,
    selection: Selection = ALL,
    *,
    layers: Sequence[str] = (),
    force: bool = False,
) -> FilesExport:
    """Write the selected entries of the user's databases as files that can be installed, and say which.

    Kernels become ``BASE.kdb``, valid for ``MIOPEN_BINCACHE_PATH``; results of tuning become find-db and perf-db, over
    those that are installed. Of several files for one name the newest MIOpen's is taken. A file that is there already
    is replaced only with ``force``: nothing in it tells who wrote it. Raises :class:`BadRequest` for
    what is no folder or has no such files, :class:`Refused` for the folder of a package.
    """
    named = tuple(layers) or LAYERS[:1]
    if strange := [name for name in named if name not in LAYERS]:
        raise BadRequest(f"{strange[0]} has no files to be installed; say {' or '.join(LAYERS)}")
    path = _demand_folder(environment, folder)
    made = tuple(layer(environment) for layer in (MIOpenKernels, MIOpenTuning) if layer.name in named)
    troubles: list[Trouble] = []
    keys = frozenset(entry.key for entry in listed(made, selection, troubles.append))
    export = _Export(environment, path, keys, force)
    export.failures += [Note(_where(trouble), trouble.message) for trouble in troubles if trouble.failed]
    for layer in made:
        for target, (file, root) in sorted(_newest(layer, export).items()):
            _export_file(layer, root, file, path / target, export)
    objects = sum(SEPARATOR not in key for key in keys)
    if objects:
        why = "kernels in files of their own, as MIOpen up to 2.2 kept them, do not tell their arguments"
        export.skipped.append(Note(f"{objects} object files", why))
    return FilesExport(path, tuple(export.files), tuple(export.skipped), tuple(export.failures), tuple(export.hints))


def _where(trouble: Trouble) -> str:
    return "*" if trouble.path is None else str(trouble.path)


def _demand_folder(environment: Environment, name: str) -> Path:
    path = environment.absolute(name)
    if path.suffix == ".kdb" or parse_name(path.name) is not None or (os.path.lexists(path) and not path.is_dir()):
        why = "MIOPEN_BINCACHE_PATH takes a folder too, in which MIOpen looks for BASE.kdb itself"
        raise BadRequest(f"{printable(name)!r} is no folder: {why}")
    _demand_no_package(environment, path)
    _make_folder(path)
    return path


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unreachable("miopen", f"cannot make the folder: {error.strerror}", path) from error


def _demand_no_package(environment: Environment, folder: Path) -> None:
    for layer in (MIOpenSystemKernels(environment), MIOpenSystemTuning(environment)):
        for root in layer.roots():
            if os.path.realpath(folder) == os.path.realpath(root.path):
                named = environment.get("MIOPEN_SYSTEM_DB_PATH")
                own = "; name another folder" + (", or unset MIOPEN_SYSTEM_DB_PATH if it is your own" if named else "")
                raise Refused(layer.name, f"is owned by a package, which would lose what it shipped{own}", folder)


def installed_name(name: DatabaseName) -> str:
    """Return how a user's file is called where it is installed: a perf-db without its backend, none with a version."""
    plain = _VERSION.sub("", name.file).removesuffix(name.kind)
    if _HOLDS[name.kind].startswith("perf-db"):
        plain = _BACKEND.sub("", plain)
    return plain + _INSTALLED[name.kind]


def _newest(layer: MIOpenKernels | MIOpenTuning, export: _Export) -> dict[str, tuple[DatabaseFile, Root]]:
    """Choose a file for each name: of the newest MIOpen, else the first in the order of the roots."""
    found = [
        (file, root)
        for root in layer.roots()
        for file in layer.store.databases(root).files()
        if isinstance(file, DatabaseFile) and file.name.kind in _INSTALLED
    ]
    found.sort(key=lambda pair: version_numbers(pair[0].version or "0"), reverse=True)
    chosen: dict[str, tuple[DatabaseFile, Root]] = {}
    for file, root in found:
        standing, _ = chosen.setdefault(installed_name(file.name), (file, root))
        if standing is not file:
            why = f"{standing.path} is taken, and no two MIOpens are mixed; cachectl miopen merge can"
            export.skipped.append(Note(str(file.path), why))
    return chosen


def _export_file(
    layer: MIOpenKernels | MIOpenTuning, root: Root, file: DatabaseFile, target: Path, export: _Export
) -> None:
    before = len(export.failures)
    if os.path.lexists(target) and not export.force:
        export.failures.append(Note(str(target), "is there already; name another folder, or --force replaces it"))
        return
    try:
        if isinstance(layer, MIOpenKernels):
            entries, from_system = _export_kernels(file, target, export), 0
        elif file.name.kind in MIOpenTuning.store.tables:
            entries, from_system = _export_table(layer, file, target, export)
        else:
            entries, from_system = _export_records(layer, file, target, export)
    except FAILURES as error:
        export.failures.append(Note(str(file.path), reason_of(error)))
        return
    if entries:
        export.files.append(InstallableFile(target, file.path, entries, target.stat().st_size, from_system))
    elif len(export.failures) == before:
        export.skipped.append(Note(str(file.path), f"holds nothing that is selected in {root.path}"))


def _export_kernels(file: DatabaseFile, target: Path, export: _Export) -> int:
    source = _KernelFile(MIOpenKernels.name, file.path, export.environment.patience)
    kernels, flawed = source.kernels()
    kernels = sorted(
        (kernel for kernel in kernels if export.chosen(file, kernel_key(*kernel[0]))), key=lambda kernel: kernel[0]
    )
    export.failures += [note for note in flawed if export.chosen(file, note.key)]
    if not kernels:
        return 0

    def fill(stage: Path) -> None:
        rows = RowFile(source.layer, stage, source.schema or kernel_db.SCHEMA)
        rows.insert_new(kernels)
        if complaint := rows.check():
            raise Damaged(source.layer, f"does not read back: {complaint}", stage)

    write_database(source.layer, target, fill)
    _hint(export, target, file)
    return len(kernels)


def _hint(export: _Export, target: Path, file: DatabaseFile) -> None:
    """Say which installed kernels nobody would look for any more, were the new file beside them."""
    layer = MIOpenSystemKernels(export.environment)
    for root in layer.roots():
        for stem in dict.fromkeys((file.name.base.raw, file.name.base.device or file.name.base.raw)):
            if (there := layer.store.databases(root).find(f"{stem}.kdb")) is not None:
                why = f"installed there, it hides {there.path}; first: cachectl miopen merge {there.path} {target}"
                export.hints.append(Note(str(target), why))


def _export_records(layer: MIOpenTuning, file: DatabaseFile, target: Path, export: _Export) -> tuple[int, int]:
    lines, flawed = _records(layer, file.path)
    lines = [line for line in lines if export.chosen(file, _key(line))]
    export.failures += flawed
    if not lines:
        return 0, 0
    system = MIOpenSystemTuning(export.environment)
    below: list[bytes] = []
    for root in system.roots():
        if not below and (there := system.store.databases(root).find(target.name)) is not None:
            below = _records(system, there.path)[0]
    # The user's are first, and so stay.
    merged, records = join_records(lines, below)
    replace_file(target, [b"".join(line + b"\n" for line in sorted(records))])
    return sum(len(items_of(record)) for record in records), merged.added


def _export_table(layer: MIOpenTuning, file: DatabaseFile, target: Path, export: _Export) -> tuple[int, int]:
    patience = export.environment.patience
    rows = _joined(layer.name, file.path, patience).all()
    chosen = [row[1:] for row in rows if export.chosen(file, str(row[0]), str(row[-2]))]
    if not chosen:
        return 0, 0
    system = MIOpenSystemTuning(export.environment)
    below: list[tuple[object, ...]] = []
    for root in system.roots():
        if not below and (there := system.store.databases(root).find(target.name)) is not None:
            below = [row[1:] for row in _joined(system.name, there.path, patience).all()]
    added = 0

    def fill(stage: Path) -> None:
        nonlocal added
        made = _joined(layer.name, stage, patience)
        made.merge(chosen)
        added = made.merge(below).added

    write_database(layer.name, target, fill)
    return len(chosen) + added, added


# ---------------------------------------------------------------------- merge


class _Named(NamedTuple):
    """A file that a user has named, and what its name tells."""

    path: Path
    name: DatabaseName

    @property
    def holds(self) -> str:
        """Say what is in it."""
        return _HOLDS[self.name.kind]

    @property
    def version(self) -> str | None:
        """Return the MIOpen it belongs to, where its name or folder tells."""
        folder = self.path.parent.name
        return self.name.version or (folder if VERSION_FOLDER.fullmatch(folder) else None)

    @property
    def variant(self) -> tuple[bool, bool]:
        """Tell which of several find-dbs and perf-dbs of one device it is."""
        return ".fusion." in self.name.file, self.name.file.startswith("batchnorm_")


def merge(environment: Environment, files: Sequence[str], into: str, *, mix_versions: bool = False) -> Merge:
    """Add to a database what others hold and it does not; what differs stays as it is there, and is named.

    A file that is not there yet is made. Raises, before anything is written, :class:`BadRequest` for what is no
    database by its name, :class:`FileNotFoundError` for one that is missing, :class:`Refused` for files that hold
    something else or belong to another device, backend or, unless ``mix_versions``, MIOpen, and for a package's;
    :class:`LayerError` where ``into`` cannot be written.
    """
    target = _named(environment, into)
    sources = [_named(environment, name) for name in files]
    for source in sources:
        os.stat(source.path)
        _demand_alike(source, target, mix_versions=mix_versions)
    _demand_no_package(environment, target.path.parent)
    _demand_own(environment, target.path)
    with as_owner(target.path.parent):
        _make_folder(target.path.parent)
    take: Callable[[Environment, _Named, _Named], MergedFile]
    if target.holds == "kernels":
        take = _merge_kernels
    elif target.name.kind in ("udb", "db"):
        take = _merge_tables
    else:
        take = _merge_records
    return Merge(target.path, tuple(_taken(partial(take, environment, source, target), source) for source in sources))


def _taken(take: Callable[[], MergedFile], source: _Named) -> MergedFile:
    """Merge one file; where it cannot be used, the others are merged all the same."""
    try:
        return take()
    except FAILURES as error:
        if isinstance(error, LayerError) and Path(error.path or "") != source.path:
            raise
        return MergedFile(source.path, failures=(Note(str(source.path), reason_of(error)),))


def _named(environment: Environment, name: str) -> _Named:
    path = environment.absolute(name)
    parsed = parse_name(path.name)
    if parsed is None or parsed.kind not in _HOLDS:
        raise BadRequest(f"{printable(name)!r} is not called as MIOpen calls a database: gfx90a6e.ukdb, for example")
    return _Named(path, parsed)


def _demand_alike(source: _Named, target: _Named, *, mix_versions: bool) -> None:
    """Refuse what MIOpen would never look for in the other file."""
    path, other = source.path, target.path
    if os.path.exists(other) and os.path.samefile(path, other):
        raise BadRequest(f"{printable(path)} is the file that others are to be merged into; it comes last, and once")
    if source.holds != target.holds or source.variant != target.variant:
        raise Refused("miopen", f"does not hold what {other.name} does: {source.holds}, {target.holds}", path)
    ours, theirs = source.name.base, target.name.base
    if ours.raw != theirs.raw and not (ours.units is None and ours.device is not None and ours.device == theirs.device):
        raise Refused("miopen", f"is for the device {ours.raw}, and {other.name} for {theirs.raw}", path)
    if None not in (backends := (source.name.backend, target.name.backend)) and len(set(backends)) > 1:
        raise Refused("miopen", f"is of the backend {backends[0]}, and {other.name} of {backends[1]}", path)
    if not mix_versions and None not in (versions := (source.version, target.version)) and len(set(versions)) > 1:
        why = "keys do not tell the compiler; --mix-versions, if that is meant"
        raise Refused("miopen", f"is of MIOpen {versions[0]}, and {other} of {versions[1]}: {why}", path)


def _demand_own(environment: Environment, path: Path) -> None:
    """Refuse to go through a link, and to leave the superuser's files in another user's cache."""
    if path.is_symlink():
        raise Refused("miopen", "a link is not followed", path)
    if not environment.superuser or environment.over_others:
        return
    owner = next(place for place in (path, *path.parents) if os.path.lexists(place)).stat().st_uid
    if owner != 0:
        name = user_name(owner)
        message = f"belongs to {name}, and you are the superuser; do it as {name}, or say --over-others"
        raise Refused("miopen", message, path)


def _merge_kernels(environment: Environment, source: _Named, target: _Named) -> MergedFile:
    offered = _KernelFile("miopen", source.path, environment.patience)
    kernels, flawed = offered.kernels()
    standing = _KernelFile("miopen", target.path, environment.patience)
    schema = standing.schema or offered.schema or kernel_db.SCHEMA
    if offered.schema not in (None, schema):
        message = f"has the columns of another generation of MIOpen than {target.path}"
        raise Damaged("miopen", message, source.path)
    rows = RowFile("miopen", target.path, schema, environment.patience)
    with as_owner(target.path.parent):
        done = rows.insert_new(kernels) if kernels else []
    differing = [kernel for kernel, new in zip(kernels, done, strict=True) if new is None]
    conflicts = tuple(note for kernel in differing if (note := _conflict(rows, kernel, target.path)) is not None)
    there = len(kernels) - sum(new is True for new in done) - len(conflicts)
    return MergedFile(source.path, done.count(True), there, conflicts, tuple(flawed))


def _conflict(rows: RowFile, kernel: Kernel, into: Path) -> Note | None:
    """Say what stands in a kernel's place; ``None`` where it is the same one, packed otherwise."""
    key, values = kernel
    try:
        standing = rows.read(key)
        if standing is not None and kernel_db.decode(standing) == kernel_db.decode(values):
            return None
    except ValueError as error:
        return Note(kernel_key(*key), f"what is in {into} is damaged ({error}), and stays; cachectl verify miopen")
    return Note(kernel_key(*key), f"a different kernel is in {into}, and stays")


def _merge_tables(environment: Environment, source: _Named, target: _Named) -> MergedFile:
    rows = _joined("miopen-tuning", source.path, environment.patience).all()
    with as_owner(target.path.parent):
        done = _joined("miopen-tuning", target.path, environment.patience).merge([row[1:] for row in rows])
    return MergedFile(source.path, done.added, done.there, _differing(done.conflicts, target.path))


def _merge_records(environment: Environment, source: _Named, target: _Named) -> MergedFile:
    layer = MIOpenTuning(environment)
    lines, flawed = _records(layer, source.path)
    path = _as_miopen_spells(layer, target.path)
    root = Root(path.parent, Scope.USER, "named")
    # Running programs read only a user's file again.
    lock = (
        partial(layer.store.editing, root, path)
        if target.name.kind in layer.store.texts
        else partial(layer.store.locked, path)
    )
    with as_owner(path.parent):
        done = MergingRecords(layer.name, path, lock).merge(lines)
    return MergedFile(source.path, done.added, done.there, _differing(done.conflicts, target.path), tuple(flawed))


def _as_miopen_spells(layer: MIOpenTuning, path: Path) -> Path:
    """Spell a path below its root: MIOpen's locks are named by how it spells the folder."""
    for root in layer.roots():
        if os.path.realpath(root.path) == os.path.realpath(path.parent):
            return root.path / path.name
    return path


def _differing(keys: Iterable[tuple[str, ...]], into: Path) -> tuple[Note, ...]:
    return tuple(Note(SEPARATOR.join(key), f"a different value is in {into}, and stays") for key in keys)


# ---------------------------------------------------------------------- what is in a file


class _KernelFile:
    """A database of kernels, of either generation."""

    def __init__(self, layer: str, path: Path, patience: float) -> None:
        self.layer = layer
        self.path = path
        self._patience = patience
        columns = RowFile(layer, path, kernel_db.SCHEMA, patience).columns() if os.path.lexists(path) else frozenset()
        self.schema = kernel_db.schema_of(columns) if columns else None
        if columns and self.schema is None:
            raise Damaged(layer, f"the columns of kern_db are {', '.join(sorted(columns))}", path)

    def kernels(self) -> tuple[list[Kernel], list[Note]]:
        """Return every kernel that MIOpen could use, packed as it packs, and what is wrong with the others.

        All are of one moment, what is only in the log included.
        """
        kernels: dict[tuple[str, ...], tuple[object, ...]] = {}
        flawed: list[Note] = []
        if self.schema is not None:
            rows = RowFile(self.layer, self.path, self.schema, self._patience)
            for row, values in rows.rows_with(*self.schema.values):
                kernel = _checked(row.key, values, self.schema)
                if isinstance(kernel, str):
                    flawed.append(Note(kernel_key(*row.key), f"{kernel}; cachectl verify miopen"))
                else:
                    kernels.setdefault(row.key, kernel)
        return list(kernels.items()), flawed


def _checked(key: Sequence[str], values: Sequence[object], schema: Schema) -> tuple[object, ...] | str:
    """Unpack a kernel as MIOpen does, and return its columns as MIOpen fills them, or what is wrong with it."""
    name, args = key
    try:
        data, oddities = kernel_db.unpack(values)
        # Undecodable bytes cannot be stored again; that error is a ValueError too.
        f"{name}{args}".encode()
    except ValueError as error:
        return printable(str(error))
    if complaint := kernel_db.store_complaint(name, args, data):
        return complaint
    return kernel_db.encode(data, schema) if oddities else tuple(values)


def _records(layer: MIOpenTuning, path: Path) -> tuple[list[bytes], list[Note]]:
    """Return the records that MIOpen reads, and the lines that it cannot, while nobody rewrites the file."""
    lines: list[bytes] = []
    flawed: list[Note] = []
    with ExitStack() as stack:
        # Where no lock file can be made, MIOpen cannot rewrite it either.
        with suppress(Unreachable):
            if layer.scope is Scope.USER:
                stack.enter_context(layer.store.locked(_as_miopen_spells(layer, path)))
        for found in RecordFile(layer.name, path, nullcontext).scan():
            if not isinstance(found, Fault):
                lines.append(found.line)
            elif found.code == "malformed":
                flawed.append(Note(f"{path} line {found.number}", found.message))
    return lines, flawed


def _joined(layer: str, path: Path, patience: float) -> JoinedRows:
    """Return a perf-db in sqlite. Raises :class:`Damaged` where its tables are not MIOpen's."""
    if os.path.lexists(path):
        for schema in (PERF_TABLE, _CONFIG):
            rows = RowFile(layer, path, schema, patience)
            columns = rows.columns()
            if columns and not columns.issuperset(schema.columns):
                raise Damaged(layer, f"the columns of {schema.table} are {', '.join(sorted(columns))}", path)
    return JoinedRows(layer, path, PERF_TABLE, _PERF, patience)


def _key(line: bytes) -> str:
    return line.partition(b"=")[0].decode(errors="surrogateescape")
