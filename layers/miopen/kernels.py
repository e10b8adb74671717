"""The layer ``miopen``: kernels that MIOpen has compiled for this user.

Rows of one sqlite file per device (2.3.0 and newer), or one file per kernel (older ones, and builds without
sqlite). Sources: ``src/binary_cache.cpp`` (places, lookup), ``src/kern_db.cpp`` (rows), ``src/sqlite_db.cpp``.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from cachectl.layers.base import facts
from cachectl.layers.base.declarations import EnvSwitch, at_load
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Damaged, LayerError, Refused, not_a_key
from cachectl.layers.base.facts import Entry, Found, Hazard, Problem, Root, Severity
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.store import Part
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.databases import (
    SEPARATOR,
    DatabaseFile,
    MIOpenDatabases,
    MIOpenLayer,
    MIOpenLookups,
    stale_because,
    versions_of,
)
from cachectl.layers.miopen.names import VERSION_FOLDER, program_names
from cachectl.layers.miopen.places import KERNELS, LIBRARIES, SYSTEM_KERNELS, TEMPORARY, libraries, temporary_folder
from cachectl.layers.stores.rows import Row, RowFile, Values
from cachectl.layers.stores.tree import Shape, Tree, always, scan_each

ROW_FORM: Final = "miopen-kernel/1"
_OBJECT_FORM: Final = "miopen-object/1"
_OBJECT: Final = (regex("[0-9a-f]{32}"), regex(r".+\.o(?:bj)?"))


class KernelRows(RowFile):
    """The rows of a database of kernels, which are the same if they unpack to the same kernel."""

    def same(self, standing: Values, new: Values) -> bool:
        """Compare the kernels."""
        try:
            return standing == new or kernel_db.decode(standing) == kernel_db.decode(new)
        except ValueError:
            return False


class KernelDatabases(MIOpenDatabases):
    """Rows of sqlite files, one file for each kind of GPU."""

    forms: tuple[str, ...] = (ROW_FORM,)
    kinds = ("kdb",)
    parts = 2
    # If MIOpen cannot open its database, it throws at every lookup and store.
    when_blocked = Severity.FAILS

    def rows(self, file: DatabaseFile) -> RowFile:
        """Return the rows of a file."""
        return self.opened(file.path, kernel_db.SCHEMA, KernelRows)

    def row_file(self, root: Root, file: str) -> RowFile | None:
        """Return a database of kernels."""
        named = self.named(root.path, file)
        return None if named is None else self.rows(named)

    def row_files(self, root: Root) -> Iterator[RowFile]:
        """Return the databases of kernels."""
        return map(self.rows, self.present(root))

    def key_of(self, text: str) -> tuple[str, ...]:
        """Return name and arguments."""
        return kernel_db.split_kernel_key(text)

    def list_file(self, file: DatabaseFile, template: Entry) -> Iterator[Found]:
        """Yield the rows."""
        for row in self.rows(file).rows():
            name, args = row.key
            yield replace(
                template,
                key=SEPARATOR.join((file.relative, kernel_db.kernel_key(name, args))),
                bytes=row.bytes,
                kernels=program_names(name),
                detail={**file.detail, "kernel_name": name, "kernel_args": args},
                # MIOpen gives a row a new id whenever it stores it.
                stamp=(row.rowid, row.bytes),
            )

    def is_made(self, file: DatabaseFile) -> bool:
        """Return whether MIOpen has made the table. Raises :class:`Refused` for a table that newer MIOpens throw on."""
        columns = self.rows(file).columns()
        if columns and not columns.issuperset(kernel_db.SCHEMA.columns):
            raise Refused(self.name, "has the columns of MIOpen 2.3.0, which newer ones cannot use", file.path)
        return bool(columns)

    def load(self, file: DatabaseFile, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError]:
        """Read kernels, unpacked and checked as MIOpen does."""
        if not self.is_made(file):
            return {}
        rows = self.rows(file).read_many(list(map(_name_and_args, keys)))
        values_of = {key: values for key, values in zip(keys, rows, strict=True) if values is not None}
        return {key: self._unpacked(file, key, values) for key, values in values_of.items()}

    def _unpacked(self, file: DatabaseFile, key: str, values: Values) -> facts.Artifact | Damaged:
        try:
            data = kernel_db.decode(values)
        except ValueError as error:
            return Damaged(self.name, str(error), file.path)
        name, args = _name_and_args(key)
        detail = {"kernel_name": name, "kernel_args": args, "md5": kernel_db.digest(data)}
        return facts.Artifact(self.name, key, ROW_FORM, data, {**file.detail, **versions_of(file.version), **detail})

    def write(self, root: Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        """Pack and insert a kernel as MIOpen does."""
        rows = self._changeable(root, self.writable(root, key))
        if (complaint := _complaint(artifact)) is not None:
            raise Damaged(self.name, complaint, key)
        rows.insert(*_packed(artifact), replace=replace)

    def is_usable(self, artifact: facts.Artifact) -> bool:
        """Return whether MIOpen could load a kernel."""
        return artifact.form == ROW_FORM and _complaint(artifact) is None

    def insert_new(
        self, root: Root, file: DatabaseFile, artifacts: Sequence[facts.Artifact]
    ) -> Sequence[bool | LayerError | None]:
        """Pack and insert kernels."""
        return self._changeable(root, file).insert_new(list(map(_packed, artifacts)))

    def _changeable(self, root: Root, file: DatabaseFile) -> RowFile:
        rows = self.rows(file)
        if self.locate(root, file.relative) is not None:
            rows.recover()
            self.is_made(file)
        return rows

    def verify_file(self, root: Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Unpack and check every row as MIOpen does when it loads it; no run repairs a row on which it throws."""
        rows = self.rows(file)
        try:
            rows.require_sound()
            if not self.is_made(file):
                return
            seen: set[tuple[str, ...]] = set()
            for row, values in rows.rows_with(*kernel_db.SCHEMA.values):
                key = SEPARATOR.join((file.relative, kernel_db.kernel_key(*row.key)))
                entry = Entry(self.name, key, root.path, row.bytes, 0, stamp=(row.rowid, row.bytes))
                for flaw in _flaws(row, values, seen):
                    finding = self.row_finding(entry, *flaw)
                    thing = None if self.asked_first else finding.thing
                    yield replace(finding, fix=self.fix(file.path, finding.fix), thing=thing)
        except LayerError as error:
            yield self.file_finding(root, rows, error)


class UserKernelDatabases(KernelDatabases):
    """The user's rows, and the files of single kernels of old versions."""

    forms = (ROW_FORM, _OBJECT_FORM)
    kinds = ("ukdb",)
    folders = True
    #: Object files. MIOpen up to 3.3 makes no version folder in a custom folder.
    shapes = (Shape((VERSION_FOLDER, *_OBJECT), folders=False), Shape(_OBJECT, folders=False))

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of databases and version folders, and of object files except in temporary folders."""
        return super().owns(root, parts) or any(tree.shape.owns(parts) for tree in self._trees(root))

    def is_key(self, key: str) -> bool:
        """Check the name of the database and the parts after it, or compare with the pattern of object files."""
        return super().is_key(key) if SEPARATOR in key else any(shape.accepts(key) for shape in self.shapes)

    def _trees(self, root: Root, key: str | None = None) -> list[Tree]:
        """Return the trees of object files, or those that accept a key."""
        # In a temporary folder such files may belong to other programs.
        shapes = () if root.role == TEMPORARY else self.shapes
        return [Tree(self.name, root.path, shape) for shape in shapes if key is None or shape.accepts(key)]

    def scan_others(self, root: Root, latest: str | None) -> Iterator[Found]:
        """Yield object files."""
        try:
            for tree, leaf in scan_each(self._trees(root)):
                if isinstance(leaf, Problem):
                    yield leaf
                elif leaf.orphan_rule is not None:
                    yield leaf.orphan(root.path)
                elif not (tree.read_file(leaf.key, limit=32) or b"").startswith(kernel_db.CODE):
                    message = "has the name of a kernel, but is no code; left alone"
                    yield Problem(root.path / leaf.key, "unrecognised", message)
                else:
                    *above, _, name = leaf.key.split("/")
                    because = stale_because(above[0], latest) if above else None
                    yield replace(
                        leaf.entry(self.name, root.path),
                        kernels=program_names(name),
                        versions={"miopen": above[0]} if above else {},
                        stale=True if because else None,
                        stale_because=because,
                    )
        except LayerError as error:
            yield Problem(root.path, "unreadable", error.message)

    def read(self, root: Root, key: str) -> facts.Artifact | None:
        """Read a kernel as MIOpen does, or an object file as it stands."""
        if SEPARATOR in key:
            return super().read(root, key)
        read = (tree.read(key) for tree in self._trees(root, key))
        data = next((data for data in read if data is not None), None)
        return None if data is None else facts.Artifact(self.name, key, _OBJECT_FORM, data)

    def write(self, root: Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        """Insert a kernel, or place an object file."""
        if artifact.form != _OBJECT_FORM:
            super().write(root, key, artifact, replace=replace)
            return
        trees = self._trees(root, key)
        if not trees:
            raise not_a_key(self.name, key)
        if not artifact.data.startswith(kernel_db.CODE):
            raise Damaged(self.name, "the object file is no code object", key)
        trees[0].write(key, artifact.data, replace=replace)

    def remove_others(self, root: Root, targets: Sequence[facts.Removable]) -> Iterator[Part]:
        """Remove object files, and what an interrupted cachectl left."""
        trees = self._trees(root)
        for tree in trees:
            accepting = ((target, [one for one in trees if one.shape.accepts(target.key)]) for target in targets)
            planned = [target for target, fit in accepting if tree in (fit or trees[:1])]
            if planned:
                yield str(root.path), planned, partial(tree.remove, planned, tidy=always)

    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Check every row, and find what is in the way of object files."""
        named = {root.path}
        for finding in super().verify(root):
            named.add(root.path / (finding.key or ""))
            yield finding
        for _, found in scan_each(self._trees(root)):
            if isinstance(found, Problem) and found.path not in named:
                yield self.to_finding(root, found)


def _has_packaged_kernels(environment: Environment) -> bool:
    return any(True for root in SYSTEM_KERNELS.roots(environment) for _ in root.path.glob("*.kdb"))


class KernelLookups(MIOpenLookups):
    """The database is opened for each lookup and each store, ``src/binary_cache.cpp`` (``LoadBinary``, ``SaveBinary``).

    So the openings count the lookups, except where packaged kernels answer what the user's database cannot.
    """

    def by_openings(self, openings: int, stores: int, environment: Environment) -> tuple[int, int] | None:
        """Take each store for a miss, and the openings beyond these lookups and stores for hits."""
        if openings < 2 * stores or _has_packaged_kernels(environment):
            return None
        return openings - 2 * stores, stores


class MIOpenKernels(MIOpenLayer):
    """Kernels compiled by MIOpen."""

    name = "miopen"
    title = "MIOpen user kernels"
    places = KERNELS
    # It hides user and system kernels alike.
    switch = EnvSwitch("MIOPEN_DISABLE_CACHE", off="1", read=at_load(*LIBRARIES))
    about = MIOpenLayer.about._replace(
        on_network=Hazard(
            Severity.RISKS,
            "sqlite's WAL mode fails there, and databases were damaged; MIOpen since ROCm 5.7 uses the temporary "
            "folder instead, unless MIOPEN_CUSTOM_CACHE_DIR names this one",
        ),
        among_ranks=Hazard(
            Severity.HARMLESS, "sqlite lets one of them write at a time, and the others wait, up to half a minute"
        ),
        when_closed=Hazard(Severity.FAILS, "MIOpen throws, even where it only looks up"),
        lookups=KernelLookups(),
    )
    store = UserKernelDatabases()

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the switch, and a place where anybody can write."""
        yield from super().diagnose()
        environment, variable = self.environment, KERNELS.variable
        if environment.get(variable) or environment.platform == "win32" or not libraries(environment):
            return
        # MIOpen takes kernels from a temporary folder because it cannot use the home folder.
        first = self.roots()[0]
        kind = network_file_system(first.path, mounts=environment.mounts)
        folder = temporary_folder(environment)
        if (first.role == TEMPORARY or kind is not None) and _is_open_to_all(folder):
            why = "HOME names no folder" if kind is None else f"the home is on {kind}"
            message = f"as {why}, MIOpen up to 3.3 takes kernels from {folder} itself, where anybody may have put them"
            fix = f'export {variable}="$(mktemp -d)"'
            yield facts.Finding(self.name, folder, None, Severity.UNSAFE, "fallback", message, fix)


def _is_open_to_all(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def _flaws(row: Row, values: Values, seen: set[tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield code and message of each fault of a row; add its key to ``seen``."""
    if row.key in seen:
        yield "duplicate", "a second row has this key: MIOpen cannot make its index, and throws"
    seen.add(row.key)
    if complaint := kernel_db.key_complaint(*row.key):
        yield "quote", complaint
    try:
        kernel_db.decode(values)
    except ValueError as error:
        yield "content", str(error)


def _name_and_args(key: str) -> tuple[str, str]:
    return kernel_db.split_kernel_key(key.partition(SEPARATOR)[2])


def _packed(artifact: facts.Artifact) -> tuple[tuple[str, str], Values]:
    return _name_and_args(artifact.key), kernel_db.encode(artifact.data)


def _complaint(artifact: facts.Artifact) -> str | None:
    """Return why MIOpen could not use a kernel, or would not have stored it; ``None`` where it could."""
    name, args = _name_and_args(artifact.key)
    if not name.endswith((".o", ".obj")):
        return f"the kernel name {name!r} does not end in .o"
    if complaint := kernel_db.key_complaint(name, args):
        return complaint
    if not artifact.data:
        return "the kernel is empty"
    if artifact.detail.get("md5") not in (None, kernel_db.digest(artifact.data)):
        return "the kernel does not have the md5 that the artifact states"
    return None
