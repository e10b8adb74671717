"""Write entries of MIOpen's user databases as files that a package can install.

Kernels become ``BASE.kdb``; results of tuning become find-db and perf-db, merged with the installed ones. Sources:
``src/binary_cache.cpp``, ``cmake/embed.cmake`` (names, and that the path is a folder), ``src/find_db.cpp``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, Damaged, LayerError, reason_of
from cachectl.layers.base.facts import Note, Root
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.atomic import replace_file
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.database_files import (
    HOLDS,
    KernelFile,
    demand_no_package,
    joined_rows,
    make_folder,
    records_of,
)
from cachectl.layers.miopen.databases import SEPARATOR, DatabaseFile
from cachectl.layers.miopen.kernel_db import kernel_key
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.names import DatabaseName, parse_name, version_numbers
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels
from cachectl.layers.miopen.system_tuning import MIOpenSystemTuning
from cachectl.layers.miopen.tuning import MIOpenTuning
from cachectl.layers.stores.merging import join_records, write_database
from cachectl.layers.stores.records import items_of
from cachectl.layers.stores.rows import RowFile

#: The layers that have installable files.
LAYERS: Final = (MIOpenKernels.name, MIOpenTuning.name)
#: The installed ending for each ending of a user's file.
_INSTALLED: Final = {
    "ukdb": "kdb",
    "ufdb.txt": "fdb.txt",
    "udb.txt": "db.txt",
    "cd.updb.txt": "cd.pdb.txt",
    "udb": "db",
}
_VERSION: Final = regex(r"\.\d+_\d+_\d+(?:_[^.]*)?(?=\.)|_\d+\.\d+\.\d+(?=\.udb$)")
_BACKEND: Final = regex(r"\.(?:HIPNOGPU|HIP|OpenCL)(?=\.)")


@dataclass(frozen=True, slots=True)
class InstallableFile:
    """A file that can be installed: its path, the user's file it was made from, its entries and bytes.

    ``from_system`` counts the entries that only the installed file had.
    """

    file: Path
    source: Path
    entries: int
    bytes: int
    from_system: int = 0


@dataclass(frozen=True, slots=True)
class FilesExport:
    """The files written into a folder, the entries left out and why, failures, and hints for the user."""

    folder: Path
    files: tuple[InstallableFile, ...]
    skipped: tuple[Note, ...] = ()
    failures: tuple[Note, ...] = ()
    hints: tuple[Note, ...] = ()
    as_json: ClassVar[AsJson] = AsJson("cachectl/miopen-export/1", names={"failures": "failed"})

    @property
    def failed(self) -> bool:
        """Return whether a requested file could not be written."""
        return bool(self.failures)


@dataclass
class _Export:
    """The state of one export."""

    environment: Environment
    folder: Path
    keys: frozenset[str]
    force: bool = False
    files: list[InstallableFile] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    failures: list[Note] = field(default_factory=list)
    hints: list[Note] = field(default_factory=list)

    def chosen(self, file: DatabaseFile, *key: str) -> bool:
        """Return whether an entry was selected."""
        return SEPARATOR.join((file.relative, *key)) in self.keys


def write_files(
    environment: Environment,
    folder: str,
    select: Callable[[tuple[Layer, ...]], tuple[frozenset[str], list[Note]]],
    *,
    layers: Sequence[str] = (),
    force: bool = False,
) -> FilesExport:
    """Write selected entries of the user's databases as files that can be installed; return what was written.

    ``select`` returns the keys of the selected entries of these layers, and what could not be listed. Kernels become
    ``BASE.kdb``, which is valid for ``MIOPEN_BINCACHE_PATH``; results of tuning are merged into copies of the installed
    files. If several files have one name, that of the newest MIOpen is used. An existing file is replaced only with
    ``force``, because nothing in it shows who wrote it. Raises :class:`BadRequest` if the place is no folder or a layer
    has no such files, :class:`Refused` for the folder of a package.
    """
    named = tuple(layers) or LAYERS[:1]
    if strange := [name for name in named if name not in LAYERS]:
        raise BadRequest(f"{strange[0]} has no installable files; name {' or '.join(LAYERS)}")
    path = _demand_folder(environment, folder)
    made = tuple(layer(environment) for layer in (MIOpenKernels, MIOpenTuning) if layer.name in named)
    keys, failures = select(made)
    export = _Export(environment, path, keys, force, failures=failures)
    for layer in made:
        for target, (file, root) in sorted(_newest(layer, export).items()):
            _export_file(layer, root, file, path / target, export)
    objects = sum(SEPARATOR not in key for key in keys)
    if objects:
        why = "object files of MIOpen up to 2.2 do not contain the kernel's arguments"
        export.skipped.append(Note(f"{objects} object files", why))
    return FilesExport(path, tuple(export.files), tuple(export.skipped), tuple(export.failures), tuple(export.hints))


def _demand_folder(environment: Environment, name: str) -> Path:
    path = environment.absolute(name)
    if path.suffix == ".kdb" or parse_name(path.name) is not None or (os.path.lexists(path) and not path.is_dir()):
        why = "name a folder, as for MIOPEN_BINCACHE_PATH: MIOpen looks for BASE.kdb in it"
        raise BadRequest(f"{printable(name)!r} is not a folder; {why}")
    demand_no_package(environment, path)
    make_folder(path)
    return path


def installed_name(name: DatabaseName) -> str:
    """Return the installed name of a user's file: a perf-db without its backend, no file with a version."""
    plain = _VERSION.sub("", name.file).removesuffix(name.kind)
    if HOLDS[name.kind].startswith("perf-db"):
        plain = _BACKEND.sub("", plain)
    return plain + _INSTALLED[name.kind]


def _newest(layer: MIOpenKernels | MIOpenTuning, export: _Export) -> dict[str, tuple[DatabaseFile, Root]]:
    """Choose one file for each name: that of the newest MIOpen, else the first in the order of the roots."""
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
            why = f"{standing.path} was used instead; cachectl miopen merge can merge both"
            export.skipped.append(Note(str(file.path), why))
    return chosen


def _export_file(
    layer: MIOpenKernels | MIOpenTuning, root: Root, file: DatabaseFile, target: Path, export: _Export
) -> None:
    before = len(export.failures)
    if os.path.lexists(target) and not export.force:
        export.failures.append(Note(str(target), "exists already; name another folder, or replace it with --force"))
        return
    try:
        if isinstance(layer, MIOpenKernels):
            entries, from_system = _export_kernels(file, target, export), 0
        elif file.name.kind in MIOpenTuning.store.tables:
            entries, from_system = _export_table(layer, file, target, export)
        else:
            entries, from_system = _export_records(layer, file, target, export)
    except (LayerError, OSError) as error:
        export.failures.append(Note(str(file.path), reason_of(error)))
        return
    if entries:
        export.files.append(InstallableFile(target, file.path, entries, target.stat().st_size, from_system))
    elif len(export.failures) == before:
        export.skipped.append(Note(str(file.path), f"holds no selected entry of {root.path}"))


def _export_kernels(file: DatabaseFile, target: Path, export: _Export) -> int:
    source = KernelFile(MIOpenKernels.name, file.path, export.environment.lock_timeout)
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
    """Return a hint for installed kernels that the new file beside them would hide."""
    layer = MIOpenSystemKernels(export.environment)
    for root in layer.roots():
        for stem in dict.fromkeys((file.name.base.raw, file.name.base.device or file.name.base.raw)):
            if (there := layer.store.databases(root).find(f"{stem}.kdb")) is not None:
                why = f"installed there, it hides {there.path}; first: cachectl miopen merge {there.path} {target}"
                export.hints.append(Note(str(target), why))


def _export_records(layer: MIOpenTuning, file: DatabaseFile, target: Path, export: _Export) -> tuple[int, int]:
    lines, flawed = records_of(layer, file.path)
    lines = [line for line in lines if export.chosen(file, _key(line))]
    export.failures += flawed
    if not lines:
        return 0, 0
    system = MIOpenSystemTuning(export.environment)
    below: list[bytes] = []
    for root in system.roots():
        if not below and (there := system.store.databases(root).find(target.name)) is not None:
            below = records_of(system, there.path)[0]
    # The user's entries come first, so they win.
    merged, records = join_records(lines, below)
    replace_file(target, [b"".join(line + b"\n" for line in sorted(records))])
    return sum(len(items_of(record)) for record in records), merged.added


def _export_table(layer: MIOpenTuning, file: DatabaseFile, target: Path, export: _Export) -> tuple[int, int]:
    lock_timeout = export.environment.lock_timeout
    rows = joined_rows(layer.name, file.path, lock_timeout).all()
    chosen = [row[1:] for row in rows if export.chosen(file, str(row[0]), str(row[-2]))]
    if not chosen:
        return 0, 0
    system = MIOpenSystemTuning(export.environment)
    below: list[tuple[object, ...]] = []
    for root in system.roots():
        if not below and (there := system.store.databases(root).find(target.name)) is not None:
            below = [row[1:] for row in joined_rows(system.name, there.path, lock_timeout).all()]
    added = 0

    def fill(stage: Path) -> None:
        nonlocal added
        made = joined_rows(layer.name, stage, lock_timeout)
        made.merge(chosen)
        added = made.merge(below).added

    write_database(layer.name, target, fill)
    return len(chosen) + added, added


def _key(line: bytes) -> str:
    return line.partition(b"=")[0].decode(errors="surrogateescape")
