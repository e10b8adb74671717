"""The layer ``miopen``: kernels that MIOpen has compiled for this user.

Rows of one sqlite file per device (2.3.0 and newer), or one file per kernel (older ones, and builds without
sqlite). Sources: ``src/binary_cache.cpp`` (places, lookup), ``src/kern_db.cpp`` (rows), ``src/sqlite_db.cpp``.
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar, Final

from cachectl.layers.base import facts
from cachectl.layers.base.declarations import EnvSwitch, at_load
from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Unsettled, not_a_key, reason_of
from cachectl.layers.base.facts import Entry, Found, Hazard, Problem, Root, Severity
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.store import Part, each_part
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.miopen import kernel_db, places
from cachectl.layers.miopen.databases import MIOpenDatabases, MIOpenLayer, MIOpenLookups
from cachectl.layers.miopen.names import VERSION_FOLDER, program_names, version_numbers
from cachectl.layers.miopen.places import LIBRARIES, SEPARATOR, TEMPORARY, DatabaseFile, Databases, judge, stale_because
from cachectl.layers.stores.rows import Row, RowFile, Schema, disk_blocks, disk_usage
from cachectl.layers.stores.tree import OWN_TEMPORARY, REFUSALS, Leaf, Shape, Tree, always, scan_each

SWITCH: Final = "MIOPEN_DISABLE_CACHE"
_ROW_FORM: Final = "miopen-kernel/1"
_OBJECT_FORM: Final = "miopen-object/1"
_SEPARATORS: Final = 2
#: The first release that packs kernels and checks them.
_PACKED: Final = (2, 4, 0)

_OBJECT: Final = (regex("[0-9a-f]{32}"), regex(r".+\.o(?:bj)?"))
# MIOpen up to 3.3 makes no version folder in a custom folder.
_SHAPES = (Shape((VERSION_FOLDER, *_OBJECT), folders=False), Shape(_OBJECT, folders=False))


class KernelDatabases(MIOpenDatabases):
    """Rows of sqlite files, one file for each kind of GPU, and the files of single kernels of old versions."""

    forms: tuple[str, ...] = (_ROW_FORM, _OBJECT_FORM)
    #: Endings of this layer's databases.
    kinds: ClassVar[tuple[str, ...]] = ("ukdb",)
    #: Forms of its trees of object files.
    shapes: ClassVar[tuple[Shape, ...]] = _SHAPES

    def refusals(self) -> Mapping[facts.Ability, str]:
        """Refuse every change on platforms without directory handles."""
        return REFUSALS

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of databases and version folders, and of object files except in temporary folders."""
        if self.databases(root).owns(parts):
            return True
        return root.role != TEMPORARY and any(shape.owns(parts) for shape in self.shapes)

    def databases(self, root: Root) -> Databases:
        """Return the database files of a root."""
        return Databases(root, self.kinds, folders=True)

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield rows and object files. Names contain the kernels, so nothing is unpacked."""
        del contents
        databases = self.databases(root)
        latest = self.latest(databases)
        for file in databases.files():
            if isinstance(file, Problem):
                yield file
            else:
                yield from self._scan_file(root, file, stale_because(file.folder or None, latest))
        yield from self._scan_objects(root, latest)

    def _scan_file(self, root: Root, file: DatabaseFile, because: str | None) -> Iterator[Found]:
        schema, findings = self._inspect(root, file)
        for finding in findings:
            # No row of a damaged file is listed.
            yield Problem(file.path, "sqlite" if finding.code == "damaged" else finding.code, finding.message)
        payload = 0
        try:
            modified = file.modified()
            for row in () if schema is None else self._rows(file, schema).rows():
                payload += row.bytes
                yield self._row_entry(root, file, row, modified, because)
                if complaint := kernel_db.key_complaint(*row.key):
                    yield Problem(file.path, "quote", f"{row.key[0]}: {complaint}")
        except (LayerError, OSError) as error:
            yield self.unread(file.path, error)
        try:
            files, total = disk_usage(file.path)
            rest = max(0, total - payload)
            stale, disk = True if because else None, disk_blocks(file.path)
            yield facts.Housekeeping(file.relative, root.path, rest, files, file.modified(), stale, disk=disk)
        except OSError as error:
            yield self.unread(file.path, error)

    def _row_entry(
        self, root: Root, file: DatabaseFile, row: Row, modified: float | None, because: str | None
    ) -> Entry:
        name, args = row.key
        # MIOpen gives a row a new id whenever it stores it.
        stamp = (row.rowid, row.bytes)
        entry = self.entry_of(root, file, places.kernel_key(name, args), row.bytes, stamp=stamp, because=because)
        detail = {**file.detail, "kernel_name": name, "kernel_args": args}
        return replaced(entry, written_before=modified, kernels=program_names(name), detail=detail)

    def _scan_objects(self, root: Root, latest: str | None) -> Iterator[Found]:
        # In a temporary folder these may belong to other programs.
        shapes = () if root.role == TEMPORARY else self.shapes
        try:
            for tree, leaf in scan_each(Tree(self.name, root.path, shape) for shape in shapes):
                if isinstance(leaf, Problem):
                    yield leaf
                elif leaf.orphan_rule is None:
                    yield self._object(root, tree, leaf, latest)
                else:
                    yield leaf.orphan(root.path)
        except LayerError as error:
            yield Problem(root.path, "unreadable", error.message)

    def _object(self, root: Root, tree: Tree, leaf: Leaf, latest: str | None) -> Found:
        try:
            head = tree.read_file(leaf.key, limit=32)
        except LayerError as error:
            return Problem(root.path / leaf.key, "unreadable", error.message)
        if kernel_db.is_code(head or b""):
            return self._object_entry(root, leaf, latest)
        return Problem(root.path / leaf.key, "unrecognised", "has the name of a kernel, but is no code; left alone")

    def _object_entry(self, root: Root, leaf: Leaf, latest: str | None) -> Entry:
        *above, _, name = leaf.key.split("/")
        because = stale_because(above[0], latest) if above else None
        return Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            disk=leaf.disk,
            files=1,
            modified=leaf.modified,
            kernels=program_names(name),
            versions={"miopen": above[0]} if above else {},
            stale=True if because else None,
            stale_because=because,
            stamp=leaf.stamp,
        )

    def _rows(self, file: DatabaseFile, schema: Schema = kernel_db.SCHEMA) -> RowFile:
        return RowFile(self.name, file.path, schema, self.environment.lock_timeout)

    def _schema(self, file: DatabaseFile) -> Schema | None:
        """Return the table of a file, ``None`` where MIOpen has not made it yet.

        Raises :class:`Damaged` for columns that no MIOpen can use.
        """
        columns = self._rows(file).columns()
        if not columns:
            return None
        schema = kernel_db.schema_of(columns)
        if schema is None:
            raise Damaged(self.name, f"the columns of kern_db are {', '.join(sorted(columns))}", file.path)
        return schema

    def _inspect(self, root: Root, file: DatabaseFile) -> tuple[Schema | None, tuple[facts.Finding, ...]]:
        """Return the table, and findings from header and columns."""
        try:
            schema = self._schema(file)
        except LayerError as error:
            return None, (self._file_finding(root, file, "damaged", error.message, error),)
        if schema is kernel_db.SCHEMA_2_3 and not _plain(file):
            message = "has the columns of MIOpen 2.3.0, which newer ones cannot use"
            return schema, (self._file_finding(root, file, "columns", message),)
        return schema, ()

    def read(self, root: Root, key: str) -> facts.Artifact | None:
        """Read a kernel, unpacked and checked as MIOpen does, or an object file as it stands."""
        return self.read_row(root, key) if SEPARATOR in key else self._read_object(root, key)

    def read_rows(self, root: Root, file: str, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError] | None:
        """Read kernels of one database."""
        located = self.databases(root).find(file)
        schema = None if located is None else self._schema(located)
        if located is None or schema is None:
            return None
        rows = self._rows(located, schema).read_many([_name_and_args(key) for key in keys])
        return {
            key: self._unpacked(located, key, values)
            for key, values in zip(keys, rows, strict=True)
            if values is not None
        }

    def _unpacked(self, file: DatabaseFile, key: str, values: Sequence[object]) -> facts.Artifact | Damaged:
        try:
            data = kernel_db.decode(values)
        except ValueError as error:
            return Damaged(self.name, str(error), file.path)
        name, args = _name_and_args(key)
        detail = {"kernel_name": name, "kernel_args": args, "md5": kernel_db.digest(data)}
        return facts.Artifact(self.name, key, _ROW_FORM, data, {**file.detail, **file.versions, **detail})

    def _read_object(self, root: Root, key: str) -> facts.Artifact | None:
        shape = self._shape(key)
        if shape is None or root.role == TEMPORARY:
            return None
        data = Tree(self.name, root.path, shape).read(key)
        return None if data is None else facts.Artifact(self.name, key, _OBJECT_FORM, data)

    def is_key(self, key: str) -> bool:
        """Check the name of the database and the parts after it, or compare with the pattern of object files."""
        file, separator, rest = key.partition(SEPARATOR)
        if not separator:
            return self._shape(key) is not None
        return SEPARATOR in rest and self.databases(places.ANY_ROOT).name(file) is not None

    def write(self, root: Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        """Pack and insert a kernel as MIOpen does, and read it back; or place an object file."""
        if artifact.form == _OBJECT_FORM:
            self._write_object(root, key, artifact.data, replace=replace)
            return
        file, schema = self._writable(root, key)
        self._demand_storable(artifact)
        try:
            standing = self.read(root, key)
        except Damaged:
            standing = None
        if standing is not None and standing.data == artifact.data:
            return
        if standing is not None and not replace:
            raise EntryExists(self.name, file.path)
        self._rows(file, schema).insert(_name_and_args(key), kernel_db.encode(artifact.data, schema), replace=replace)
        try:
            stored = self.read(root, key)
        except (LayerError, OSError) as error:
            raise self._not_read_back(file, error) from error
        if stored is None or stored.data != artifact.data:
            raise self._misread(key)

    def write_rows(self, root: Root, file: str, artifacts: Sequence[facts.Artifact]) -> Mapping[str, bool | LayerError]:
        """Pack and insert kernels into one database, and read them back; leave existing ones alone."""
        fit = {artifact.key: artifact for artifact in artifacts if self._is_row(artifact)}
        if not fit:
            return {}
        database, schema = self._writable(root, next(iter(fit)))
        standing = self.read_rows(root, file, tuple(fit)) or {}
        exists = EntryExists(self.name, database.path)
        done: dict[str, bool | LayerError] = {
            key: False if _is_that(found, fit[key]) else exists for key, found in standing.items()
        }
        new = {key: artifact for key, artifact in fit.items() if key not in standing}
        if not new:
            return done
        rows = [(_name_and_args(key), kernel_db.encode(artifact.data, schema)) for key, artifact in new.items()]
        placed = zip(new, self._rows(database, schema).insert_new(rows), strict=True)
        # A key that another program has inserted meanwhile is written alone, later.
        mine = [key for key, one in placed if one]
        try:
            stored = self.read_rows(root, file, mine) or {}
        except (LayerError, OSError) as error:
            return done | dict.fromkeys(mine, self._not_read_back(database, error))
        return done | {key: _is_that(stored.get(key), fit[key]) or self._misread(key) for key in mine}

    def _is_row(self, artifact: facts.Artifact) -> bool:
        if artifact.form != _ROW_FORM or artifact.key.count(SEPARATOR) < _SEPARATORS:
            return False
        try:
            self._demand_storable(artifact)
        except LayerError:
            return False
        return True

    def _demand_storable(self, artifact: facts.Artifact) -> None:
        """Raise :class:`Damaged` for a kernel that MIOpen could not use."""
        complaint = kernel_db.store_complaint(*_name_and_args(artifact.key), artifact.data)
        promised = artifact.detail.get("md5")
        if complaint is None and promised not in (None, kernel_db.digest(artifact.data)):
            complaint = "the kernel does not have the md5 that the artifact states"
        if complaint is not None:
            raise Damaged(self.name, complaint, artifact.key)

    def _not_read_back(self, file: DatabaseFile, error: LayerError | OSError) -> Unsettled:
        return Unsettled(self.name, f"placed, but not read back: {reason_of(error)}", file.path)

    def _misread(self, key: str) -> Damaged:
        return Damaged(self.name, "the kernel was stored, but does not read back equal", key)

    def _writable(self, root: Root, key: str) -> tuple[DatabaseFile, Schema]:
        """Return the file of a key, and the table that the MIOpen of its folder uses."""
        databases = self.databases(root)
        file = databases.name(key.partition(SEPARATOR)[0])
        if file is None or key.count(SEPARATOR) < _SEPARATORS:
            raise not_a_key(self.name, key)
        own = kernel_db.SCHEMA_2_3 if _plain(file) else kernel_db.SCHEMA
        self.demand_place(databases, file)
        if databases.find(file.relative) is not None and self._schema(file) not in (None, own):
            raise Damaged(self.name, "the file has the columns of another MIOpen than its folder", file.path)
        return file, own

    def _write_object(self, root: Root, key: str, data: bytes, *, replace: bool) -> None:
        shape = self._shape(key)
        if shape is None or root.role == TEMPORARY:
            raise LayerError(self.name, f"{key!r} is no key of an object file; cachectl ls {self.name} lists keys")
        if not kernel_db.is_code(data):
            raise Damaged(self.name, "the object file is no code object", key)
        Tree(self.name, root.path, shape).write(key, data, replace=replace)

    def _shape(self, key: str) -> Shape | None:
        return next((shape for shape in self.shapes if shape.accepts(key)), None)

    def remove(self, root: Root, targets: tuple[facts.Removable, ...]) -> facts.Outcome:
        """Delete rows, then vacuum. Never unlink a file that a program may have open, or whose log is pending."""
        by_file: dict[str, list[facts.Removable]] = {}
        objects: list[facts.Removable] = []
        for target in targets:
            file, separator, _ = target.key.partition(SEPARATOR)
            is_object = (not separator and self._shape(target.key) is not None) or OWN_TEMPORARY.fullmatch(target.key)
            (objects if is_object else by_file.setdefault(file, [])).append(target)
        parts: list[Part] = [
            (file, planned, partial(self._remove_from, root, file, planned)) for file, planned in by_file.items()
        ]
        for shape in self.shapes:
            planned = [target for target in objects if (self._shape(target.key) or self.shapes[0]) is shape]
            if planned:
                tree = Tree(self.name, root.path, shape)
                parts.append((str(root.path), planned, partial(tree.remove, planned, tidy=always)))
        return each_part(self.name, parts)

    def row_files(self, root: Root) -> Iterator[RowFile]:
        """Return the databases of kernels."""
        for file in self.databases(root).files():
            if not isinstance(file, Problem):
                yield self._rows(file)

    def row_file(self, root: Root, file: str) -> RowFile | None:
        """Return a database of kernels."""
        named = self.databases(root).name(file)
        return None if named is None else self._rows(named)

    def _remove_from(self, root: Root, relative: str, targets: Sequence[facts.Removable]) -> facts.Outcome:
        file = self.databases(root).find(relative)
        if file is None:
            return facts.Outcome(self.name, skipped=tuple(facts.Note(target.key, "already gone") for target in targets))
        rows = self._rows(file)
        if isinstance(targets[0], facts.Orphan):
            return self.remove_damaged(rows, targets[0])
        planned = {_planned_row(target): target for target in targets}
        return self.remove_rows(rows, relative, planned, lambda: rows.delete(list(planned)))

    def file_of(self, file: DatabaseFile) -> RowFile:
        """Return a database with the table of new MIOpens."""
        return self._rows(file)

    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Unpack and check every row as MIOpen does when it loads it; no run repairs a row on which it throws."""
        files = list(self.databases(root).files())
        for problem in self._unseen(root, files):
            # Where MIOpen cannot open its database it throws at every lookup and store.
            yield places.to_finding(self, root, problem, Severity.FAILS)
        for file in files:
            if not isinstance(file, Problem):
                yield from self.examined(partial(self._verify_file, root, file))

    def _verify_file(self, root: Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        schema, findings = self._inspect(root, file)
        yield from findings
        if schema is not None:
            yield from self._verify_rows(root, file, schema)

    def _unseen(self, root: Root, files: Iterable[DatabaseFile | Problem]) -> Iterator[Problem]:
        """Yield the problems of databases and object files, each path once."""
        shapes = () if root.role == TEMPORARY else self.shapes
        objects = scan_each(Tree(self.name, root.path, shape) for shape in shapes)
        found = chain(files, (leaf for _, leaf in objects))
        yield from {thing.path: thing for thing in found if isinstance(thing, Problem)}.values()

    def _verify_rows(self, root: Root, file: DatabaseFile, schema: Schema) -> Iterator[facts.Finding]:
        rows = self._rows(file, schema)
        seen: set[tuple[str, ...]] = set()
        try:
            if complaint := rows.check():
                yield self._file_finding(root, file, "sqlite", complaint)
                return
            for row, values in rows.rows_with(*schema.values):
                key = SEPARATOR.join((file.relative, places.kernel_key(*row.key)))
                thing = Entry(self.name, key, root.path, row.bytes, 0, stamp=(row.rowid, row.bytes))
                for severity, code, message in _flaws(row, values, seen):
                    removable = None if severity is Severity.HARMLESS else thing
                    fix = self._row_fix(file, key)
                    yield facts.Finding(self.name, root.path, key, severity, code, message, fix, removable)
        except LayerError as error:
            yield self._file_finding(root, file, "damaged", error.message, error)

    def _file_finding(
        self, root: Root, file: DatabaseFile, code: str, message: str, error: LayerError | None = None
    ) -> facts.Finding:
        # A file that cannot be opened may be whole.
        known = error is None or isinstance(error, Damaged)
        severity, code = (Severity.FAILS, code) if known else (Severity.HARMLESS, "unreadable")
        thing = self._rows(file).orphan(root.path, file.relative, message) if known else None
        return facts.Finding(self.name, root.path, file.relative, severity, code, message, self._file_fix(file), thing)

    def _row_fix(self, file: DatabaseFile, key: str) -> str:
        del file
        return f"cachectl purge {self.name} --key {shlex.quote(key)}"

    def _file_fix(self, file: DatabaseFile) -> str:
        del file
        return f"end every program that has it open, then: cachectl purge --damaged {self.name}"


class KernelLookups(MIOpenLookups):
    """The database is opened for each lookup and each store, ``src/binary_cache.cpp`` (``LoadBinary``, ``SaveBinary``).

    So the openings count the lookups, except where packaged kernels answer what the user's database cannot.
    """

    def __init__(self, packaged: Iterable[Root]) -> None:
        super().__init__()
        self._packaged = packaged

    def by_openings(self, openings: int, stores: int) -> tuple[int, int] | None:
        """Take each store for a miss, and the openings beyond these lookups and stores for hits."""
        if openings < 2 * stores or any(True for root in self._packaged for _ in root.path.glob("*.kdb")):
            return None
        return openings - 2 * stores, stores


class MIOpenKernels(MIOpenLayer):
    """Kernels compiled by MIOpen."""

    name = "miopen"
    title = "MIOpen user kernels"
    # It hides user and system kernels alike.
    switch = EnvSwitch(SWITCH, off="1", read=at_load(*LIBRARIES))
    on_network: ClassVar[Hazard | None] = Hazard(
        Severity.RISKS,
        "sqlite's WAL mode fails there, and databases were damaged; MIOpen since ROCm 5.7 uses the temporary folder "
        "instead, unless MIOPEN_CUSTOM_CACHE_DIR names this one",
    )
    among_ranks: ClassVar[Hazard | None] = Hazard(
        Severity.HARMLESS, "sqlite lets one of them write at a time, and the others wait, up to half a minute"
    )
    when_closed: ClassVar[Hazard | None] = Hazard(Severity.FAILS, "MIOpen throws, even where it only looks up")
    store = KernelDatabases()

    @property
    def lookups(self) -> MIOpenLookups:
        """How the lookups and stores of a run are observed."""
        return KernelLookups(places.system_roots(self.environment, tilde=True))

    def roots(self) -> tuple[Root, ...]:
        """Resolve as MIOpen does when it first loads a kernel."""
        return places.user_cache_roots(self.environment)

    def state(self) -> facts.State:
        """Read the switch of all kernel databases."""
        return judge(self.environment, SWITCH, present=self.present())

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and a place where anybody can write."""
        yield from places.diagnosed_flag(self, SWITCH)
        yield from self._fallback()

    def _fallback(self) -> Iterator[facts.Finding]:
        """Yield that MIOpen takes kernels from a temporary folder because it cannot use the home folder."""
        environment = self.environment
        named = environment.get("MIOPEN_CUSTOM_CACHE_DIR") or environment.platform == "win32"
        if named or not places.libraries(environment):
            return
        first = self.roots()[0]
        kind = network_file_system(first.path, mounts=environment.mounts)
        folder = places.temporary_folder(environment)
        if (first.role != TEMPORARY and kind is None) or not _is_open_to_all(folder):
            return
        why = "HOME names no folder" if kind is None else f"the home is on {kind}"
        message = f"as {why}, MIOpen up to 3.3 takes kernels from {folder} itself, where anybody may have put them"
        fix = 'export MIOPEN_CUSTOM_CACHE_DIR="$(mktemp -d)"'
        yield facts.Finding(self.name, folder, None, Severity.UNSAFE, "fallback", message, fix)

    def relocate(self, folder: Path) -> facts.Switch:
        """Return MIOpen's own variable; MIOpen makes the folder."""
        return facts.Switch(self.name, {"MIOPEN_CUSTOM_CACHE_DIR": str(folder / "miopen")}, read_at_load=LIBRARIES)


def _is_open_to_all(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def _flaws(row: Row, values: Sequence[object], seen: set[tuple[str, ...]]) -> Iterator[tuple[Severity, str, str]]:
    """Yield severity, code and message of each fault of a row; add its key to ``seen``."""
    if row.key in seen:
        yield Severity.FAILS, "duplicate", "a second row has this key: MIOpen cannot make its index, and throws"
    seen.add(row.key)
    if complaint := kernel_db.key_complaint(*row.key):
        yield Severity.FAILS, "quote", complaint
    try:
        oddities = kernel_db.unpack(values).oddities
    except ValueError as error:
        yield Severity.FAILS, "content", str(error)
        return
    for code, message in oddities:
        yield Severity.HARMLESS, code, message


def _planned_row(target: facts.Removable) -> Row:
    return Row(target.stamp[0], _name_and_args(target.key), target.stamp[1])


def _plain(file: DatabaseFile) -> bool:
    """Return whether the MIOpen of a file's folder stores kernels unpacked; files without a folder are newer."""
    return bool(file.folder) and version_numbers(file.folder) < _PACKED


def _name_and_args(key: str) -> tuple[str, str]:
    return places.split_kernel_key(key.partition(SEPARATOR)[2])


def _is_that(stored: facts.Artifact | LayerError | None, wanted: facts.Artifact) -> bool:
    return isinstance(stored, facts.Artifact) and stored.data == wanted.data
