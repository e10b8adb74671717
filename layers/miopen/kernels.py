"""The stores of MIOpen's kernels: rows of one sqlite file per device (2.4.0 and newer), or one file per kernel.

The latter is that of old versions, and of builds without sqlite. Sources: ``src/binary_cache.cpp`` (places, lookup),
``src/kern_db.cpp``, ``src/include/miopen/kern_db.hpp`` (rows), ``src/sqlite_db.cpp``, ``src/bz2.cpp`` (packing).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from cachectl.layers.base import errors, facts, lazy, store
from cachectl.layers.disk import plain
from cachectl.layers.miopen import databases, places
from cachectl.layers.miopen.places import DatabaseFile
from cachectl.layers.stores import database, tree
from cachectl.layers.stores.rows import Row, RowFile, Schema, Values

#: MIOpen ignores smaller files of a package: empty ones, and pointers of git-lfs.
_LEAST: Final = 512
_ROW, _OBJECT = "miopen-kernel/1", "miopen-object/1"
#: Kernels of old versions, each in a folder named by the md5 of device and options.
_OBJECTS: Final = tree.Shape(
    (places.VERSION_FOLDER, lazy.regex("[0-9a-f]{32}"), lazy.regex(r".+\.o(?:bj)?")), folders=False
)
SCHEMA: Final = Schema(
    table="kern_db",
    create=(
        (
            "CREATE TABLE IF NOT EXISTS `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
            "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,"
            "`uncompressed_size` INT NOT NULL)"
        ),
        "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args)",
    ),
    key=("kernel_name", "kernel_args"),
    values=("kernel_blob", "kernel_hash", "uncompressed_size"),
    size="length(kernel_blob)",
)
#: More than any kernel has, in bytes: larger blobs are bombs.
_LARGEST: Final = 1 << 30
#: The first bytes of code objects: an ELF file, or a bundle of several.
CODE: Final = (b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB")


class KernelRows(RowFile):
    """The rows of a database of kernels, which are the same if they unpack to the same kernel."""

    def same(self, standing: Values, new: Values) -> bool:
        """Compare the kernels."""
        try:
            return standing == new or decode(standing) == decode(new)
        except ValueError:
            return False


class KernelDatabases(databases.MIOpenDatabases):
    """Rows of sqlite files, one file for each kind of GPU."""

    forms: tuple[str, ...] = (_ROW,)
    kinds = ("ukdb",)
    parts = 2
    # If MIOpen cannot open its database, it throws at every lookup and store.
    when_blocked = facts.Severity.FAILS

    def rows(self, file: DatabaseFile) -> RowFile:
        """Return the rows of a file."""
        return self.opened(file.path, SCHEMA, KernelRows)

    def row_file(self, root: facts.Root, file: str) -> RowFile | None:
        """Return a database of kernels."""
        named = self.named(root, file)
        return None if named is None else self.rows(named)

    def row_files(self, root: facts.Root) -> Iterator[RowFile]:
        """Return the databases of kernels."""
        return map(self.rows, self.present(root))

    def key_of(self, text: str) -> tuple[str, ...]:
        """Return name and arguments."""
        return split_kernel_key(text)

    def _is_ignored(self, file: DatabaseFile) -> bool:
        return bool(self.asked_first) and file.path.stat().st_size < _LEAST

    def _has_table(self, file: DatabaseFile) -> bool:
        """Return whether there is a table that MIOpen uses; it makes none in a file of a package."""
        if self._is_ignored(file):
            return False
        is_made = bool(self.rows(file).columns())
        if self.asked_first and not is_made:
            raise errors.Damaged(self.name, "has no table kern_db", file.path)
        return is_made

    def list_file(self, file: DatabaseFile, template: facts.Entry) -> Iterator[facts.Found]:
        """Yield the rows of a file that MIOpen does not ignore."""
        for row in () if self._is_ignored(file) else self.rows(file).rows():
            name, args = row.key
            detail = {**template.detail, "kernel_name": name, "kernel_args": args}
            yield replace(self._entry(file, row, template), kernels=places.program_names(name), detail=detail)

    @staticmethod
    def _entry(file: DatabaseFile, row: Row, template: facts.Entry) -> facts.Entry:
        key = databases.SEPARATOR.join((file.relative, kernel_key(*row.key)))
        # MIOpen gives a row a new id whenever it stores it.
        return replace(template, key=key, bytes=row.bytes, stamp=(row.rowid, row.bytes))

    def load(self, file: DatabaseFile, keys: Sequence[str]) -> Mapping[str, facts.Artifact | errors.LayerError]:
        """Read kernels, unpacked and checked as MIOpen does."""
        if not self._has_table(file):
            return {}
        rows = self.rows(file).read_many(list(map(_name_and_args, keys)))
        loaded: dict[str, facts.Artifact | errors.LayerError] = {}
        for key, values in zip(keys, rows, strict=True):
            if values is None:
                continue
            name, args = _name_and_args(key)
            try:
                data = decode(values)
            except ValueError as error:
                loaded[key] = errors.Damaged(self.name, str(error), file.path)
                continue
            detail = {"kernel_name": name, "kernel_args": args, "md5": digest(data)}
            loaded[key] = facts.Artifact(self.name, key, _ROW, data, {**file.detail, **file.versions, **detail})
        return loaded

    def complaint(self, artifact: facts.Artifact) -> str | None:
        """Return why MIOpen could not use a kernel, or would not have stored it; ``None`` where it could."""
        name, args = _name_and_args(artifact.key)
        if artifact.form != _ROW:
            return "is the file of an old version"
        if not name.endswith((".o", ".obj")):
            return f"the kernel name {name!r} does not end in .o"
        if not artifact.data:
            return "the kernel is empty"
        if artifact.detail.get("md5") not in (None, digest(artifact.data)):
            return "the kernel does not have the md5 that the artifact states"
        return key_complaint(name, args)

    def insert(
        self, file: DatabaseFile, artifacts: Sequence[facts.Artifact], *, replace: bool
    ) -> Sequence[bool | errors.LayerError]:
        """Pack and insert kernels as MIOpen does."""
        rows = self.rows(file)
        if self.locate(file.root, file.relative) is not None:
            rows.recover()
        packed = [(_name_and_args(artifact.key), encode(artifact.data)) for artifact in artifacts]
        return rows.insert(packed, replace=replace)

    def verify_file(self, file: DatabaseFile) -> Iterator[facts.Finding]:
        """Unpack and check every row as MIOpen does when it loads it; no run repairs a row on which it throws."""
        place = self.name, file.root.path, file.relative
        if self._is_ignored(file):
            message = "is smaller than 512 bytes, a git-lfs pointer perhaps: MIOpen takes it for missing"
            yield facts.Finding(*place, facts.Severity.RECOMPILES, "too-small", message, self.fix(file.path, ""))
            return
        rows = self.rows(file)
        try:
            rows.require_sound()
            if self._has_table(file):
                yield from self._verify_rows(file, rows)
        except errors.LayerError as error:
            yield self.file_finding(file.root, rows, error)
        # The header decides whether MIOpen and other users can open a file of a package; an unreadable one has a
        # finding.
        with suppress(OSError):
            if self.asked_first and database.is_wal(plain.read_plain(file.path, limit=_LEAST)):
                message = "is in WAL mode: only users who can write beside it can open it"
                fix = f"as its owner: sqlite3 {shlex.quote(str(file.path))} 'pragma journal_mode=delete'"
                yield facts.Finding(*place, facts.Severity.FAILS, "wal", message, fix)

    def _verify_rows(self, file: DatabaseFile, rows: RowFile) -> Iterator[facts.Finding]:
        template = facts.Entry(self.name, file.relative, file.root.path, 0, 0)
        seen: set[tuple[str, ...]] = set()
        for row, values in rows.rows_with(*SCHEMA.values):
            flaws = []
            if row.key in seen:
                flaws.append(("duplicate", "a second row has this key: MIOpen cannot make its index, and throws"))
            seen.add(row.key)
            if complaint := key_complaint(*row.key):
                flaws.append(("quote", complaint))
            try:
                decode(values)
            except ValueError as error:
                flaws.append(("content", str(error)))
            for flaw in flaws:
                finding = self.row_finding(self._entry(file, row, template), *flaw)
                thing = None if self.asked_first else finding.thing
                yield replace(finding, fix=self.fix(file.path, finding.fix), thing=thing)


class UserKernelDatabases(KernelDatabases):
    """The user's rows, and the files of single kernels of old versions."""

    folders = True
    forms = (_ROW, _OBJECT)

    def _objects(self, root: facts.Root) -> tree.Tree:
        return tree.Tree(self.name, root.path, _OBJECTS)

    def kind_of(self, root: facts.Root, path: str) -> str:
        """Compare with the names of databases, version folders and object files."""
        kind = super().kind_of(root, path)
        return kind if databases.SEPARATOR in path or kind == store.OWN else _OBJECTS.kind_of(path)

    def scan_others(self, root: facts.Root, latest: str | None) -> Iterator[facts.Found]:
        """Yield object files; in a temporary folder such files may belong to other programs."""
        for leaf in () if root.role == places.TEMPORARY else self._objects(root).scan(head=32):
            if isinstance(leaf, facts.Problem):
                yield leaf
            elif leaf.orphan_rule is not None:
                yield leaf.orphan(self.name, root.path)
            elif not leaf.head.startswith(CODE):
                message = "has the name of a kernel, but is no code; left alone"
                yield facts.Problem(root.path / leaf.key, "unrecognised", message)
            else:
                version, _, name = leaf.key.split("/")
                entry = databases.with_version(leaf.entry(self.name, root.path), version, latest)
                yield replace(entry, kernels=places.program_names(name))

    def read(self, root: facts.Root, keys: Sequence[str]) -> Mapping[str, facts.Artifact | store.EntryError]:
        """Read kernels as MIOpen does, and object files as they stand."""
        objects = [key for key in keys if _OBJECTS.accepts(key)]
        return {**super().read(root, keys), **store.read_each(partial(self._read_object, root), objects)}

    def _read_object(self, root: facts.Root, key: str) -> facts.Artifact | None:
        data = self._objects(root).read(key)
        if data is None:
            return None
        self._require_code(data, root, key)
        return facts.Artifact(self.name, key, _OBJECT, data, {"kernels": "", "device": ""})

    def _require_code(self, data: bytes, root: facts.Root, key: str) -> None:
        if not data.startswith(CODE):
            raise errors.Damaged(self.name, "is no code object", root.path / key)

    def write(
        self, root: facts.Root, artifacts: Sequence[facts.Artifact], *, replace: bool = False
    ) -> Mapping[str, bool | store.EntryError]:
        """Insert kernels, and place object files."""

        def place(artifact: facts.Artifact) -> bool | errors.LayerError:
            if artifact.form != _OBJECT:
                return errors.not_a_key(self.name, artifact.key)
            self._require_code(artifact.data, root, artifact.key)
            objects, members = self._objects(root), {"": artifact.data}
            if objects.is_same(artifact.key, members, replace=replace):
                return False
            return objects.write({artifact.key: members}, replace=replace)[artifact.key]

        others = [artifact for artifact in artifacts if databases.SEPARATOR not in artifact.key]
        rows = [artifact for artifact in artifacts if databases.SEPARATOR in artifact.key]
        placed = {artifact.key: store.attempt(partial(place, artifact)) for artifact in others}
        return {**placed, **super().write(root, rows, replace=replace)}

    def remove_others(self, root: facts.Root, targets: Sequence[facts.Entry]) -> Iterator[store.Part]:
        """Remove object files, and what an interrupted cachectl left; MIOpen makes the folders again that it needs."""
        if targets:
            yield str(root.path), partial(self._objects(root).remove, targets, tidy=tree.always)

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check every row, and find what is in the way of object files."""
        named = {root.path}
        for finding in super().verify(root):
            named.add(root.path / (finding.key or ""))
            yield finding
        with suppress(errors.LayerError):
            for found in self.scan_others(root, None):
                if isinstance(found, facts.Problem) and found.path not in named:
                    yield store.finding_of(self, root, found)


def _name_and_args(key: str) -> tuple[str, str]:
    return split_kernel_key(key.partition(databases.SEPARATOR)[2])


def digest(data: bytes) -> str:
    """Return MIOpen's checksum of unpacked bytes: md5 in lower-case hex."""
    import hashlib

    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def encode(data: bytes) -> Values:
    """Return the values of a row as MIOpen packs a kernel; a size of 0 means that the blob is not packed."""
    import bz2

    packed = bz2.compress(data)
    return (packed, digest(data), len(data)) if len(packed) < len(data) else (data, digest(data), 0)


def kernel_key(name: str, args: str) -> str:
    """Return the part of a kernel's key that follows the file: ``NAME::ARGS``.

    A name may contain ``::`` (``ns::kernel.cl.o``), so its ``%`` and ``:`` are written ``%25`` and ``%3A``. Arguments
    are never changed.
    """
    return "::".join((name.replace("%", "%25").replace(":", "%3A"), args))


def split_kernel_key(text: str) -> tuple[str, str]:
    """Return name and arguments from the result of :func:`kernel_key`."""
    name, _, args = text.partition("::")
    return name.replace("%3A", ":").replace("%25", "%"), args


def decode(values: Values) -> bytes:
    """Return the kernel of a row, as ``KernDb::FindRecordUnsafe`` does.

    Raises :class:`ValueError` with the reason if MIOpen could not use the row.
    """
    blob, proof, stated = values
    data = _as_bytes(blob)
    size = int(stated) if isinstance(stated, (int, str)) else -1
    data = _unpacked(data, size) if size else data
    if digest(data).encode() != _as_bytes(proof):
        raise ValueError(f"the md5 of the kernel is {digest(data)}, its row says {proof!r}")
    if not data:
        raise ValueError("the kernel is empty, which MIOpen takes for a miss")
    return data


def _unpacked(blob: bytes, size: int) -> bytes:
    """Unpack the first bz2 stream of a blob, which is all that MIOpen reads, to at most ``size`` bytes or 1 GiB."""
    import bz2

    most = min(size, _LARGEST)
    if most <= 0:
        raise ValueError(f"a size of {size} bytes, which is no size")
    decompressor = bz2.BZ2Decompressor()
    try:
        data = decompressor.decompress(blob, most + 1)
    except OSError as error:
        raise ValueError(f"the blob is not a bz2 stream: {error}") from error
    if len(data) > most:
        raise ValueError(f"the kernel is larger than the {most} bytes that are allowed")
    if not decompressor.eof:
        raise ValueError("the bz2 stream is cut short")
    return data


def key_complaint(name: str, args: str) -> str | None:
    """Return why a key breaks MIOpen, which writes both parts between quotes in its statements."""
    if any(mark in part for part in (name, args) for mark in "'\0"):
        return "a quote in the kernel's name or arguments breaks MIOpen's statements"
    # Undecodable bytes of a command line.
    odd = any("\ud800" <= letter <= "\udfff" for letter in name + args)
    return "the key holds characters that a database cannot store" if odd else None


def _as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")
