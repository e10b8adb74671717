"""The stores of MIOpen's kernels: rows of one sqlite file per device (2.4.0 and newer), or one file per kernel.

The latter are from old versions and builds without sqlite. Sources: ``src/binary_cache.cpp`` (places, lookup),
``src/kern_db.cpp``, ``src/include/miopen/kern_db.hpp`` (rows), ``src/sqlite_db.cpp``, ``src/bz2.cpp`` (packing).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from cachectl.layers import miopen
from cachectl.layers.base.errors import Damaged, LayerError, Refused, Unreachable
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.entry import Artifact, Entry, Found, Problem
from cachectl.layers.core.finding import FAILS, HARMLESS, HEALS, Finding
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import Selection
from cachectl.layers.core.store import FOREIGN, Codec, Damage, damage_finding
from cachectl.layers.disk import plain
from cachectl.layers.formats.details import Details
from cachectl.layers.miopen import codes, databases
from cachectl.layers.stores import database, files, rows
from cachectl.layers.stores import tree_read as tree

#: MIOpen ignores smaller files of a package, such as pointers of git-lfs (in bytes).
LEAST = 512
#: The first version whose rows have hashes and sizes.
_WITH_HASHES = (2, 4)
#: Kernels of old versions, each in a folder named by the md5 of device and options.
_OBJECTS = tree.Shape((databases.VERSION_FOLDER, regex("[0-9a-f]{32}"), regex(r".+\.o(?:bj)?")))
#: Names that no release has made in a version's folder, and any name in a folder of what may be another version.
_NO_DATABASE = rf"(?!{databases.KERNEL_FILE}\Z).*gfx.*\.u?kdb"
_OTHER_VERSION = regex(rf"(?!{databases.VERSION_FOLDER.pattern}\Z)v?\d+[._]\d.*")
_LIKE = (
    tree.resembling(_NO_DATABASE),
    tree.resembling(databases.VERSION_FOLDER, _NO_DATABASE),
    tree.resembling(_OTHER_VERSION, r".*gfx.*\.u?kdb"),
    *(
        tree.resembling(version, "[0-9a-f]{16,}", r".+\.o(?:bj)?")
        for version in (databases.VERSION_FOLDER, _OTHER_VERSION)
    ),
)
#: The largest kernel that is unpacked, in bytes: more than any has.
_LARGEST = 1 << 30
_INTEGER = regex(rb"\s*[+-]?\d{1,30}")


def digest(data: bytes) -> str:
    """Return MIOpen's checksum of unpacked bytes: md5 in lower-case hex."""
    import hashlib

    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def encode(data: bytes) -> rows.Values:
    """Return the values of a row as MIOpen packs a kernel; a size of 0 means that the blob is not packed."""
    import bz2

    packed = bz2.compress(data)
    return (packed, digest(data), len(data)) if len(packed) < len(data) else (data, digest(data), 0)


def split_kernel_key(text: str) -> tuple[str, str]:
    """Return name and arguments from the part of a key that follows the file."""
    name, _, args = text.partition(databases.SEPARATOR)
    return name.replace("%3A", ":").replace("%25", "%"), args


def join_kernel_key(parts: Iterable[str]) -> str:
    """Return the part of a key (``FILE::NAME::ARGS``) that follows the file.

    A name may contain ``::`` (``ns::kernel.cl.o``), so its ``%`` and ``:`` are escaped as ``%25`` and ``%3A``.
    """
    name, args = parts
    return f"{name.replace('%', '%25').replace(':', '%3A')}{databases.SEPARATOR}{args}"


def decode(values: rows.Values) -> bytes:
    """Return the kernel of a row. Raises :class:`ValueError` if ``KernDb::FindRecordUnsafe`` rejects it."""
    import bz2

    blob, proof, stated = values
    data = rows.as_bytes(blob)
    if number := _as_integer(stated):
        # The function that unpacks takes an unsigned size of 32 bits, and reads only the first stream of the blob.
        size, decompressor = number & 0xFFFFFFFF, bz2.BZ2Decompressor()
        try:
            data = decompressor.decompress(data, min(size, _LARGEST) + 1)
        except OSError as error:
            raise ValueError(f"the blob is not a bz2 stream: {error}") from error
        if len(data) > size:
            raise ValueError(f"the kernel is larger than the {size} bytes that its row states")
        if len(data) > _LARGEST:
            raise Unreachable("miopen", f"a kernel of more than {_LARGEST:,} bytes, the limit of what is read")
        if not decompressor.eof:
            raise ValueError("the bz2 stream is cut short")
    if digest(data).encode() != rows.as_bytes(proof):
        raise ValueError(f"the md5 of the kernel is {digest(data)}, its row says {proof!r}")
    return data


def _as_integer(value: object) -> int:
    """Return a value of a row as ``sqlite3_column_int64`` does (``sqlite.org/c3ref/column_blob.html``)."""
    if isinstance(value, (int, float)):
        return int(max(-(1 << 63), min(value, (1 << 63) - 1)))
    match = _INTEGER.match(b"" if value is None else rows.as_bytes(value))
    return 0 if match is None else _as_integer(int(match[0]))


def _is_same(existing: rows.Values, new: rows.Values) -> bool:
    try:
        return existing == new or decode(existing) == decode(new)
    except ValueError:
        return False


SCHEMA = rows.Schema(
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
    split=split_kernel_key,
    join=join_kernel_key,
    pack=encode,
    unpack=decode,
    same=_is_same,
)
#: The first bytes of code objects: an ELF file, or a bundle of several.
CODE = (b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB")


class KernelCodec(Codec):
    """The kernel of a row, which need not be code: only MIOpen stores rows."""

    form = "miopen-kernel/1"

    def check(self, data: bytes) -> Damage | None:
        """Return that MIOpen cannot use an empty kernel."""
        return None if data else Damage(HEALS, "the kernel is empty, which is a miss to MIOpen")


class ObjectCodec(Codec):
    """A file of one kernel, which may belong to another program if it is not code."""

    form = "miopen-object/1"

    def check(self, data: bytes) -> Damage | None:
        """Return that a file is not code."""
        return None if data.startswith(CODE) else Damage(HARMLESS, "is not a code object")

    def foreign(self, data: bytes) -> str | None:
        """Return that a file is not code."""
        return None if data.startswith(CODE) else "has the name of a kernel, but is not code; left alone"


class KernelTables(databases.MIOpenTables):
    """Rows of sqlite files, one file for each kind of GPU."""

    schema = SCHEMA
    codec = KernelCodec()
    kinds = ("ukdb",)
    parts = 2

    def __init__(self, asked_first: str = "") -> None:
        super().__init__(asked_first)
        self.versioned = not asked_first
        self.needs_table = bool(asked_first)

    def _is_ignored(self, root: Root, file: str) -> bool:
        return bool(self.asked_first) and (root.path / file).stat().st_size < LEAST

    def is_usable(self, root: Root, relative: str) -> bool:
        """Return whether MIOpen would open a file."""
        return super().is_usable(root, relative) and not self._is_ignored(root, relative)

    def list_rows(self, root: Root, file: str, template: Entry, *, part: bytes, contents: bool) -> Iterator[Found]:
        """Yield the rows of a file, unless MIOpen ignores it. Keys say everything, so no content is read."""
        for row in () if self._is_ignored(root, file) else self.database(root, file).rows():
            name, args = split_kernel_key(row.key)
            detail = {**template.details.detail, "kernel_name": name, "kernel_args": args}
            details = template.details._replace(kernels=databases.program_names(name), detail=detail)
            yield self.entry_of(template, row)._replace(details=details)

    def require_fit(self, artifact: Artifact) -> None:
        """Require a name as MIOpen makes it, and a kernel that has the stated md5."""
        name, args = split_kernel_key(artifact.key.partition(databases.SEPARATOR)[2])
        if not name.endswith((".o", ".obj")):
            raise Damaged(self.name, f"the kernel name {name!r} does not end in .o", artifact.key)
        if (complaint := key_complaint(name, args)) is not None:
            raise Damaged(self.name, complaint, artifact.key)
        if artifact.detail.get("md5") not in (None, digest(artifact.data)):
            raise Damaged(self.name, "the kernel does not have the md5 that the artifact states", artifact.key)

    def check_rows(self, root: Root, file: str) -> Iterator[Finding]:
        """Unpack and check every row as MIOpen does when it loads it; no run repairs a row on which it throws."""
        place, path = (self.name, root.path), root.path / file
        if self._is_ignored(root, file):
            message = "has less than 512 bytes, perhaps as a git-lfs pointer: MIOpen treats it as missing"
            yield codes.TOO_SMALL.finding(*place, message, "download the file again", key=file)
            return
        # An unreadable file has a finding of its own.
        with suppress(OSError):
            if self.asked_first and database.is_wal(plain.read_plain(path, limit=LEAST)):
                message = "is in WAL mode: only users who can write next to it can open it"
                fix = f"as its owner: sqlite3 {shlex.quote(str(path))} 'pragma journal_mode=delete'"
                yield codes.WAL.finding(*place, message, fix, key=file)
        yield from super().check_rows(root, file)
        visited = set[str]()
        # MIOpen makes no index in a file of a package: there the first row is used.
        for row in () if self.asked_first else self.database(root, file).rows():
            if row.key in visited:
                damage = Damage(FAILS, "a second row has this key: MIOpen cannot make its index, and throws")
                yield damage_finding(self.entry_of(Entry(self.name, file, root.path, 0, 0), row), damage)
            visited.add(row.key)

    def file_finding(self, root: Root, file: str, error: LayerError) -> Finding:
        """Return the finding of a table that could not be read, or lacks columns that its MIOpen reads."""
        path = root.path / file
        if isinstance(error, Refused) and databases.version_numbers(self.known(file).version or "3") >= _WITH_HASHES:
            present = database.columns_of(path, SCHEMA.table)
            lacking = sorted({*SCHEMA.columns} - present)
            # MIOpen adds a missing table to a file of the user.
            if lacking and (present or self.asked_first):
                severity = codes.COLUMNS.severities[bool(self.asked_first)]
                when = "each new kernel" if self.asked_first else "every lookup"
                message = f"its table {SCHEMA.table} lacks {', '.join(lacking)}: MIOpen throws at {when}"
                fix = f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.aside')}"
                return codes.COLUMNS.finding(self.name, root.path, message, fix, key=file, severity=severity)
        return super().file_finding(root, file, error)

    def detail(self, key: str, data: bytes) -> Mapping[str, str]:
        """Return the facts in the name of a database and in the key."""
        file, _, row = key.partition(databases.SEPARATOR)
        named, (name, args) = self.known(file), split_kernel_key(row)
        known = {"kernel_name": name, "kernel_args": args, "md5": digest(data)}
        return {**named.detail, **named.versions, **known}


class ObjectFiles(files.Files):
    """The user's files of single kernels from old versions."""

    shapes = (_OBJECTS, *_LIKE)
    codec = ObjectCodec()
    forms = (codec.form,)
    tidies = True

    def kind_of(self, root: Root, path: str) -> str:
        """Compare with the names of object files; a key with a separator is that of a row."""
        return FOREIGN if databases.SEPARATOR in path else super().kind_of(root, path)

    def leaves(self, root: Root) -> Iterator[tree.Leaf | Problem]:
        """Yield object files; in a temporary folder such files may belong to other programs."""
        for leaf in () if root.role == miopen.TEMPORARY else self.tree_of(root).scan(head=32):
            if isinstance(leaf, tree.Leaf) and leaf.is_entry:
                yield leaf.as_unknown(self.codec.foreign(leaf.head))
            else:
                yield leaf

    def described(self, tree: tree.Tree, leaf: tree.Leaf, selection: Selection, *, contents: bool) -> Iterator[Found]:
        """Yield the entry of an object file."""
        version, _, name = leaf.entry.key.split("/")
        yield leaf.entry._replace(details=Details(databases.program_names(name), versions={"miopen": version}))


def key_complaint(name: str, args: str) -> str | None:
    """Return why a key breaks MIOpen, which quotes both parts in its statements without escaping."""
    if any(mark in part for part in (name, args) for mark in "'\0"):
        return "a quote in the kernel's name or arguments breaks MIOpen's statements"
    # Undecodable bytes of a command line.
    is_undecodable = any("\ud800" <= letter <= "\udfff" for letter in name + args)
    return rows.NOT_STORABLE if is_undecodable else None


def kernel_store(asked_first: str = "") -> databases.MIOpenDatabases:
    """Return the store of the user's kernels, or of those of a package."""
    rest = files.Files(tree.resembling(_NO_DATABASE)) if asked_first else ObjectFiles()
    return databases.MIOpenDatabases(KernelTables(asked_first), rest)
