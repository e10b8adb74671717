"""The stores of MIOpen's kernels: rows of one sqlite file per device (2.4.0 and newer), or one file per kernel.

The latter is that of old versions, and of builds without sqlite. Sources: ``src/binary_cache.cpp`` (places, lookup),
``src/kern_db.cpp`` (rows), ``src/sqlite_db.cpp``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from cachectl.layers.base import errors, facts
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.store import Codec, Damage, EntryError, Part, finding_of
from cachectl.layers.disk import plain
from cachectl.layers.formats.details import Details
from cachectl.layers.miopen import kernel_db, names, places
from cachectl.layers.miopen.databases import SEPARATOR, DatabaseFile, MIOpenDatabases, stale_because
from cachectl.layers.stores import database, files, tree
from cachectl.layers.stores.rows import Row, RowFile, Values

#: MIOpen ignores smaller files of a package: empty ones, and pointers of git-lfs.
_LEAST: Final = 512
ROW_FORM: Final = "miopen-kernel/1"


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
    when_blocked = facts.Severity.FAILS

    def rows(self, file: DatabaseFile) -> RowFile:
        """Return the rows of a file."""
        return self.opened(file.path, kernel_db.SCHEMA, KernelRows)

    def row_file(self, root: facts.Root, file: str) -> RowFile | None:
        """Return a database of kernels."""
        named = self.named(root.path, file)
        return None if named is None else self.rows(named)

    def row_files(self, root: facts.Root) -> Iterator[RowFile]:
        """Return the databases of kernels."""
        return map(self.rows, self.present(root))

    def key_of(self, text: str) -> tuple[str, ...]:
        """Return name and arguments."""
        return kernel_db.split_kernel_key(text)

    def list_file(self, file: DatabaseFile, template: facts.Entry) -> Iterator[facts.Found]:
        """Yield the rows."""
        for row in self.rows(file).rows():
            name, args = row.key
            yield replace(
                template,
                key=SEPARATOR.join((file.relative, kernel_db.kernel_key(name, args))),
                bytes=row.bytes,
                kernels=names.program_names(name),
                detail={**file.detail, "kernel_name": name, "kernel_args": args},
                # MIOpen gives a row a new id whenever it stores it.
                stamp=(row.rowid, row.bytes),
            )

    def is_made(self, file: DatabaseFile) -> bool:
        """Return whether MIOpen has made the table."""
        return bool(self.rows(file).columns())

    def load(self, file: DatabaseFile, keys: Sequence[str]) -> Mapping[str, facts.Artifact | errors.LayerError]:
        """Read kernels, unpacked and checked as MIOpen does."""
        if not self.is_made(file):
            return {}
        rows = self.rows(file).read_many(list(map(_name_and_args, keys)))
        loaded: dict[str, facts.Artifact | errors.LayerError] = {}
        for key, values in zip(keys, rows, strict=True):
            if values is None:
                continue
            name, args = _name_and_args(key)
            try:
                data = kernel_db.decode(values)
            except ValueError as error:
                loaded[key] = errors.Damaged(self.name, str(error), file.path)
                continue
            detail = {"kernel_name": name, "kernel_args": args, "md5": kernel_db.digest(data)}
            loaded[key] = facts.Artifact(self.name, key, ROW_FORM, data, {**file.detail, **file.versions, **detail})
        return loaded

    def complaint(self, artifact: facts.Artifact) -> str | None:
        """Return why MIOpen could not use a kernel, or would not have stored it; ``None`` where it could."""
        name, args = _name_and_args(artifact.key)
        if not name.endswith((".o", ".obj")):
            return f"the kernel name {name!r} does not end in .o"
        if not artifact.data:
            return "the kernel is empty"
        if artifact.detail.get("md5") not in (None, kernel_db.digest(artifact.data)):
            return "the kernel does not have the md5 that the artifact states"
        return kernel_db.key_complaint(name, args)

    def insert(
        self, root: facts.Root, file: DatabaseFile, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Sequence[bool | errors.LayerError]:
        """Pack and insert kernels as MIOpen does."""
        rows = self.rows(file)
        if self.locate(root, file.relative) is not None:
            rows.recover()
        packed = [(_name_and_args(artifact.key), kernel_db.encode(artifact.data)) for artifact in artifacts]
        return rows.insert(packed, replace=replace)

    def verify_file(self, root: facts.Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Unpack and check every row as MIOpen does when it loads it; no run repairs a row on which it throws."""
        rows = self.rows(file)
        try:
            rows.require_sound()
            if not self.is_made(file):
                return
            seen: set[tuple[str, ...]] = set()
            for row, values in rows.rows_with(*kernel_db.SCHEMA.values):
                key = SEPARATOR.join((file.relative, kernel_db.kernel_key(*row.key)))
                entry = facts.Entry(self.name, key, root.path, row.bytes, 0, stamp=(row.rowid, row.bytes))
                for flaw in _flaws(row, values, seen):
                    finding = self.row_finding(entry, *flaw)
                    thing = None if self.asked_first else finding.thing
                    yield replace(finding, fix=self.fix(file.path, finding.fix), thing=thing)
        except errors.LayerError as error:
            yield self.file_finding(root, rows, error)


class ObjectCodec(Codec):
    """The file of a kernel, as versions up to 2.2 and builds without sqlite store it."""

    form = "miopen-object/1"

    def describe(self, data: bytes) -> Details:
        """Return nothing: the file's name names the kernel."""
        del data
        return Details()

    def check(self, data: bytes) -> Damage | None:
        """Check the first bytes."""
        whole = data.startswith(kernel_db.CODE)
        return None if whole else Damage(facts.Severity.FAILS, "is no code object")


class ObjectFolders(files.Index):
    """MIOpen makes the folders again that it needs, so those that become empty are removed."""

    def changing(self, store: files.Files, root: facts.Root) -> AbstractContextManager[bool]:
        """Yield that no program needs a folder that is there now."""
        del store, root
        return nullcontext(enter_result=True)


class UserKernelDatabases(KernelDatabases):
    """The user's rows, and the files of single kernels of old versions."""

    kinds = ("ukdb",)
    folders = True
    forms = (ROW_FORM, ObjectCodec.form)
    #: Each in a folder named by the md5 of device and options.
    shape = tree.Shape((names.VERSION_FOLDER, regex("[0-9a-f]{32}"), regex(r".+\.o(?:bj)?")), folders=False)

    def _objects(self) -> files.Files:
        store = files.Files(self.shape, codec=ObjectCodec(), index=ObjectFolders())
        store.__dict__.update(name=self.name, environment=self.environment)
        return store

    def owns(self, root: facts.Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of databases, version folders and object files."""
        return super().owns(root, parts) or self.shape.owns(parts)

    def is_key(self, key: str) -> bool:
        """Check the name of the database and the parts after it, or compare with the pattern of object files."""
        return super().is_key(key) if SEPARATOR in key else self.shape.accepts(key)

    def scan_others(self, root: facts.Root, latest: str | None) -> Iterator[facts.Found]:
        """Yield object files; in a temporary folder such files may belong to other programs."""
        store = self._objects()
        for found in () if root.role == places.TEMPORARY else store.scan(root, contents=False):
            if not isinstance(found, facts.Entry):
                yield found
                continue
            try:
                is_code = (store.tree_of(root, found.key).read_file(found.key, limit=32) or b"").startswith(
                    kernel_db.CODE
                )
            except errors.LayerError as error:
                yield facts.Problem(root.path / found.key, "unreadable", error.message)
                continue
            if not is_code:
                message = "has the name of a kernel, but is no code; left alone"
                yield facts.Problem(root.path / found.key, "unrecognised", message)
                continue
            version, _, name = found.key.split("/")
            because = stale_because(version, latest)
            yield replace(
                found,
                kernels=names.program_names(name),
                versions={"miopen": version},
                stale=True if because else None,
                stale_because=because,
            )

    def read(self, root: facts.Root, keys: Sequence[str]) -> Mapping[str, facts.Artifact | EntryError]:
        """Read kernels as MIOpen does, and object files as they stand."""
        objects = [key for key in keys if SEPARATOR not in key]
        return {**super().read(root, keys), **self._objects().read(root, objects)}

    def write(
        self, root: facts.Root, artifacts: Sequence[facts.Artifact], *, replace: bool = False
    ) -> Mapping[str, bool | EntryError]:
        """Insert kernels, and place object files."""
        objects = [artifact for artifact in artifacts if SEPARATOR not in artifact.key]
        rows = [artifact for artifact in artifacts if SEPARATOR in artifact.key]
        fit = [artifact for artifact in objects if artifact.form == self.forms[1]]
        return {
            **{artifact.key: errors.not_a_key(self.name, artifact.key) for artifact in objects},
            **self._objects().write(root, fit, replace=replace),
            **super().write(root, rows, replace=replace),
        }

    def complaint(self, artifact: facts.Artifact) -> str | None:
        """Refuse the form of object files in a database."""
        return super().complaint(artifact) if artifact.form == ROW_FORM else "is the file of an old version"

    def remove_others(self, root: facts.Root, targets: Sequence[facts.Removable]) -> Iterator[Part]:
        """Remove object files, and what an interrupted cachectl left."""
        if targets:
            yield str(root.path), targets, partial(self._objects().remove, root, tuple(targets))

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check every row, and find what is in the way of object files."""
        named = {root.path}
        for finding in super().verify(root):
            named.add(root.path / (finding.key or ""))
            yield finding
        with suppress(errors.LayerError):
            for found in self.scan_others(root, None):
                if isinstance(found, facts.Problem) and found.path not in named:
                    yield finding_of(self, root, found)


class SystemKernelDatabases(KernelDatabases):
    """Rows of sqlite files beside the library, opened read-only."""

    asked_first = "miopen"

    def list_file(self, file: DatabaseFile, template: facts.Entry) -> Iterator[facts.Found]:
        """Yield the rows of a file that MIOpen does not ignore."""
        return super().list_file(file, template) if _counts(file) else iter(())

    def is_made(self, file: DatabaseFile) -> bool:
        """Return whether there is a table that MIOpen uses; it makes none there."""
        if not _counts(file):
            return False
        if not super().is_made(file):
            raise errors.Damaged(self.name, "has no table kern_db", file.path)
        return True

    def verify_file(self, root: facts.Root, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Check every row, and the header, which decides whether MIOpen and other users can open the file."""
        place = self.name, root.path, file.relative
        if not _counts(file):
            message = "is smaller than 512 bytes, a git-lfs pointer perhaps: MIOpen takes it for missing"
            yield facts.Finding(*place, facts.Severity.RECOMPILES, "too-small", message, self.fix(file.path, ""))
            return
        yield from super().verify_file(root, file)
        # An unreadable file has a finding.
        with suppress(OSError):
            if database.is_wal(plain.read_plain(file.path, limit=_LEAST)):
                message = "is in WAL mode: only users who can write beside it can open it"
                fix = f"as its owner: sqlite3 {shlex.quote(str(file.path))} 'pragma journal_mode=delete'"
                yield facts.Finding(*place, facts.Severity.FAILS, "wal", message, fix)


def _counts(file: DatabaseFile) -> bool:
    return file.path.stat().st_size >= _LEAST


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
