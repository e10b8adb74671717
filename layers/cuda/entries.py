"""The store of the CUDA ComputeCache: one file for each entry, and an index that the driver keeps under a lock.

NVIDIA publishes no format. This one was derived from caches that driver 580.159.04 wrote, and checked on every entry of
them. All numbers are little endian. Version and two checksums are compared, so another format is never misread.

An entry is a header of 28 bytes (u32 version, u64 key length, u64 payload length, u64 FNV-1a of the payload),
the key, the payload. Its file name is the FNV-1a of the key, as 16 hex digits split ``a/b/14 digits``. The
index is u32 version, u32 count, u64 total, then per entry its id and its size without the header.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers import cuda
from cachectl.layers.base import errors, facts, lazy
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.base.store import Codec, Damage, counting, finding_of, unreadable
from cachectl.layers.disk import atomic, handles, locks, plain
from cachectl.layers.formats import details, opencl_source
from cachectl.layers.host import processes
from cachectl.layers.stores import files
from cachectl.layers.stores.tree import Leaf, Shape, Tree

INDEX: Final = "index"
_DIGIT: Final = lazy.regex("[0-9a-f]")
_SHAPE: Final = Shape((_DIGIT, _DIGIT, lazy.regex("[0-9a-f]{14}")), folders=False)
_INDEX: Final = Shape((lazy.regex(INDEX),), folders=False)
#: The largest index that is read, in bytes: four million entries.
_LARGEST_INDEX: Final = 1 << 26

VERSION: Final = 0x41
#: No format has had so many versions.
_PLAUSIBLE: Final = 0x10000
HEADER: Final = struct.Struct("<IQQQ")
_INDEX_HEADER: Final = struct.Struct("<IIQ")
_INDEX_RECORD: Final = struct.Struct("<QQ")
_OFFSET_BASIS: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = 0xFFFFFFFFFFFFFFFF

_DEVICE: Final = lazy.regex(rb"\bsm_\d+[a-z]?")
_PTX_ENTRY: Final = lazy.regex(rb"\.entry\s+([\w$]+)")
_DRIVER: Final = lazy.regex(rb"\x00(\d{3,4}\.\d+(?:\.\d+)?)\x00")
_BUILD: Final = lazy.regex(
    rb"((?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d{4}).{0,4}?(\d\d:\d\d:\d\d)", re.DOTALL
)


class ComputeCodec(Codec):
    """A header, the key, and what the driver compiled."""

    form = "cuda-entry/65"

    def describe(self, data: bytes) -> details.Details:
        """Return what the key says."""
        key = key_of(data)
        if key is None:
            return details.Details()
        return details.Details(None, kernels(key), device(key), driver(key))

    def check(self, data: bytes) -> Damage | None:
        """Check version and lengths. Only the whole check compares the name and the checksum."""
        wrong = form_complaint(data)
        return None if wrong is None else Damage(facts.Severity.HARMLESS, wrong)


class ComputeIndex(files.Index):
    """The list of entries and their sizes. Where it is missing or empty, the driver drops every entry."""

    shapes = (_INDEX,)

    def read(self, root: facts.Root) -> bytes | None:
        """Return the bytes of the index; ``None`` where there is no plain file. Raises :class:`OSError`."""
        try:
            return plain.read_locked(root.path / INDEX, limit=_LARGEST_INDEX)
        except OSError as error:
            if plain.means_no_file(error):
                return None
            raise

    @contextmanager
    def changing(self, store: files.Files, root: facts.Root) -> Iterator[bool]:
        """Hold the driver's lock around a change of entries, then make the index list exactly the entries there are.

        The index is also written if the change fails. Raises :class:`Unsettled` where only the writing fails. Listed
        entries keep their order, which is the order of eviction; others follow by age. The file is overwritten in
        place, then shortened: the driver accepts one that is too long meanwhile. An index of another version is left
        alone. Yields whether no process has a driver loaded.
        """
        path, environment, handle = root.path / INDEX, store.environment, None
        with ExitStack() as stack:
            folder = stack.enter_context(handles.opened_root(root.path))
            if folder is not None and handles.status_of(folder, INDEX) is not None:
                lock_timeout = environment.lock_timeout
                lock = locks.record_lock(store.name, path, folder=folder, lock_timeout=lock_timeout, create=False)
                handle = stack.enter_context(lock)
            stack.enter_context(counting(store.name, path, partial(self._recount, store, root, folder, handle)))
            yield processes.using(cuda.LIBRARIES, processes=environment.processes) == ()

    def _recount(self, store: files.Files, root: facts.Root, folder: int | None, handle: int | None) -> None:
        """Write the index: the locked one, or a new one if there are entries. The root is made with the first entry."""
        with ExitStack() as stack:
            if folder is None:
                folder = stack.enter_context(handles.opened_root(root.path))
            if folder is None or (handle is None and not _standing(store, root, folder)[0]):
                return
            if handle is None:
                path, lock_timeout = root.path / INDEX, store.environment.lock_timeout
                handle = stack.enter_context(
                    locks.record_lock(store.name, path, folder=folder, lock_timeout=lock_timeout)
                )
            old = os.pread(handle, min(os.fstat(handle).st_size, _LARGEST_INDEX), 0)
            if not old or is_index(old):
                listed = read_index(old) or ()
                new = write_index(_records(*_standing(store, root, folder), listed, root.path))
                if new != old:
                    atomic.overwrite(handle, old, new)

    def verify(self, store: files.Files, root: facts.Root) -> Iterator[facts.Finding]:
        """Compare the index with the entries, if all of them can be read."""
        leaves, unread = _standing(store, root)
        if unread:
            return
        sizes = {number: leaf.bytes - HEADER.size for number, leaf in leaves.items()}
        try:
            data = self.read(root)
        except OSError as error:
            yield finding_of(store, root, unreadable(root.path / INDEX, error))
            return
        index = read_index(data) if data else None
        if index is None and (sizes or data):
            state = "is not whole" if data else "is empty or missing"
            complaint = f"the index {state}: the driver drops every entry when it next stores one"
        elif index is not None and dict(index) != sizes:
            complaint = "the index does not list the entries that are there"
        else:
            return
        fix, thing = "nothing: the next put or purge in this layer writes it again", None
        if data and not is_index(data):
            fix = "nothing: cachectl does not use an index of another version"
            # It was cut, or begins with zeros.
            if data[:4] in (bytes(4), VERSION.to_bytes(4, "little")):
                fix, leaf = (f"cachectl purge --damaged {store.name}", store.tree_of(root, INDEX).find(INDEX))
                thing = None if leaf is None else leaf.orphan(store.name, root.path, complaint)
        yield facts.Finding(store.name, root.path, INDEX, facts.Severity.WASTES, "index", complaint, fix, thing)


class ComputeCache(files.Files):
    """One file for each entry, two levels deep, recognised by its name and its header."""

    file_mode = 0o644

    def __init__(self) -> None:
        self.compute_index = ComputeIndex()
        # The driver rewrites a damaged entry in place.
        super().__init__(_SHAPE, codec=ComputeCodec(), index=self.compute_index)

    def scan(self, root: facts.Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[facts.Found]:
        """Add an index that is not whole."""
        yield from super().scan(root, selection, contents=contents)
        try:
            index = self.compute_index.read(root)
        except OSError as error:
            yield unreadable(root.path / INDEX, error)
        else:
            if index and read_index(index) is None:
                yield facts.Problem(root.path / INDEX, "index", "is not whole")

    def _walk(self, root: facts.Root, *shapes: Shape) -> Iterator[tuple[Tree, Leaf | facts.Problem]]:
        """Leave alone what has the name of an entry, but not its format; add the headers of entries."""
        index = b""
        # A scan reports it.
        with suppress(OSError):
            index = self.compute_index.read(root) or b""
        listed = dict(read_index(index) or ())
        for tree, leaf in super()._walk(root, *shapes):
            if isinstance(leaf, facts.Problem) or leaf.orphan_rule is not None or tree.shape is not _SHAPE:
                yield tree, leaf
                continue
            path = root.path / leaf.key
            try:
                head = tree.read_file(leaf.key, limit=HEADER.size) or b""
            except errors.LayerError as error:
                yield tree, unreadable(path, error)
                continue
            header = read_header(head)
            is_known = header is not None and header.known
            # Without a header that is known, only the index shows that a file belongs to the cache.
            if is_known or identifier_of(leaf.key) in listed or has_version_of(index, head):
                yield tree, leaf._replace(head=head)
            else:
                message = "has the name of an entry but not its format; left alone"
                yield tree, facts.Problem(path, "unrecognised", message)

    def _described(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Found]:
        """Describe an entry by its key; one of another format version is opaque."""
        header, data = read_header(leaf.head), b""
        if header is not None and not header.known:
            yield replace(leaf.entry(self.name, root.path), detail={"format": "unknown"})
            return
        if header is None or header.file_size != leaf.bytes:
            message = f"is {leaf.bytes} bytes long, which its header does not say"
            yield facts.Problem(root.path / leaf.key, "damaged", message)
        else:
            data = tree.read_file(leaf.key, limit=HEADER.size + header.key_length) or b""
        key, entry = (key_of(data), leaf.entry(self.name, root.path, self.codec.describe(data)))
        yield entry if key is None else replace(entry, detail={"half": half(key)})

    def tree_of(self, root: facts.Root, key: str) -> Tree:
        """Return the tree of entries, or that of the index."""
        return Tree(self.name, root.path, _INDEX if key == INDEX else _SHAPE)

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check name and checksum."""
        if (complaint := entry_complaint(key, artifact.data)) is not None:
            raise errors.Damaged(self.name, complaint, key)
        return {"": artifact.data}

    def find_tagged(
        self, root: facts.Root, tag: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[facts.Entry, str]]:
        """Look for the tag in the keys."""
        del known
        tree = self.tree_of(root, "")
        yield from tree.tagged(tag, since, lambda leaf: key_of(tree.read_file(leaf.key) or b""))

    def _examined(self, root: facts.Root, tree: Tree, leaf: Leaf) -> Iterator[facts.Finding]:
        try:
            data = tree.read_file(leaf.key)
            complaint = None if data is None else entry_complaint(leaf.key, data)
        except errors.Unreachable as error:
            yield finding_of(self, root, unreadable(root.path / leaf.key, error))
            return
        except errors.LayerError as error:
            complaint = error.message
        header = read_header(leaf.head)
        if complaint is not None and header is not None and header.foreign:
            yield finding_of(self, root, facts.Problem(root.path / leaf.key, "foreign", f"{complaint}; left alone"))
        elif complaint is not None:
            message = f"{complaint}; the driver compiles it again and rewrites it"
            fix, thing = f"cachectl purge --damaged {self.name}", leaf.entry(self.name, root.path)
            yield facts.Finding(self.name, root.path, leaf.key, facts.Severity.HARMLESS, "damaged", message, fix, thing)


def _standing(store: files.Files, root: facts.Root, folder: int | None = None) -> tuple[dict[int, Leaf], list[Path]]:
    """Return the entries of a root by id that are whole by their headers, and the paths of those that cannot be read.

    ``folder`` is the root if it is open.
    """
    leaves: dict[int, Leaf] = {}
    unread: list[Path] = []
    for leaf in Tree(store.name, root.path, _SHAPE, folder).scan(head=HEADER.size):
        if isinstance(leaf, facts.Problem):
            unread += [leaf.path] if leaf.hides else []
        elif leaf.orphan_rule is None:
            header = read_header(leaf.head)
            if header is not None and header.known and header.file_size == leaf.bytes:
                leaves[identifier_of(leaf.key)] = leaf
    return leaves, unread


def _records(leaves: Mapping[int, Leaf], unread: Sequence[Path], old: SizeIndex, root: Path) -> list[tuple[int, int]]:
    """Return the records that the index should have. Entries that cannot be read keep their records."""
    kept = []
    for number, size in dict(old).items():
        path = root / key_from(number)
        if number in leaves:
            kept.append((number, leaves[number].bytes - HEADER.size))
        elif any(place in (path, *path.parents) for place in unread):
            kept.append((number, size))
    new = sorted(leaves.keys() - dict(old).keys(), key=lambda number: leaves[number].newest)
    return [*kept, *((number, leaves[number].bytes - HEADER.size) for number in new)]


# ---------------------------------------------------------------------- the format


class EntryHeader(NamedTuple):
    """The fixed part of an entry; lengths are bytes."""

    version: int
    key_length: int
    payload_length: int
    checksum: int

    @property
    def known(self) -> bool:
        """Whether this is the format described here."""
        return self.version == VERSION

    @property
    def foreign(self) -> bool:
        """Whether this is of another version of the format."""
        return not self.known and 0 < self.version < _PLAUSIBLE

    @property
    def file_size(self) -> int:
        """The length of the whole file in bytes."""
        return HEADER.size + self.key_length + self.payload_length


def fnv1a(data: bytes) -> int:
    """Return the standard 64-bit FNV-1a hash."""
    value = _OFFSET_BASIS
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def read_header(data: bytes) -> EntryHeader | None:
    """Read the first 28 bytes; ``None`` where there are fewer."""
    return EntryHeader(*HEADER.unpack_from(data)) if len(data) >= HEADER.size else None


def identifier_of(name: str) -> int:
    """Return the id of an entry by its relative path."""
    return int(name.replace("/", ""), 16)


def key_from(identifier: int) -> str:
    """Return the relative path of an entry by its id in the index."""
    name = f"{identifier:016x}"
    return f"{name[0]}/{name[1]}/{name[2:]}"


def form_complaint(data: bytes) -> str | None:
    """Return what is wrong with the version or the lengths of an entry, ``None`` where nothing is."""
    header = read_header(data)
    if header is None:
        return str(details.Cut(data))
    if not header.known:
        return f"has format version {header.version:#x}, not {VERSION:#x}"
    if len(data) != header.file_size:
        return f"is {len(data)} bytes long, its header says {header.file_size}"
    return None


def entry_complaint(name: str, data: bytes) -> str | None:
    """Return what is wrong with an entry: version, lengths, name or checksum; ``None`` where nothing is."""
    if (wrong := form_complaint(data)) is not None:
        return wrong
    header = EntryHeader(*HEADER.unpack_from(data))
    begin = HEADER.size + header.key_length
    if fnv1a(data[HEADER.size : begin]) != identifier_of(name):
        return "its name is not the hash of its key"
    return None if fnv1a(data[begin:]) == header.checksum else "its payload does not match its checksum"


def key_of(data: bytes) -> bytes | None:
    """Return the key of an entry of the known version; ``None`` where it is cut short, or of another version."""
    header = read_header(data)
    if header is None or not header.known or len(data) < HEADER.size + header.key_length:
        return None
    return data[HEADER.size : HEADER.size + header.key_length]


def device(key: bytes) -> str | None:
    """Return the compute architecture in a key (``sm_90``)."""
    match = _DEVICE.search(key)
    return None if match is None else match[0].decode()


def kernels(key: bytes) -> tuple[str, ...] | None:
    """Return the kernels in a key, from OpenCL source or PTX; ``None`` where it has none, as the driver's helpers."""
    ptx = {match[1].decode() for match in _PTX_ENTRY.finditer(key)}
    return details.names_or_none(ptx.union(opencl_source.kernel_names(key) or ()))


def driver(key: bytes) -> dict[str, str]:
    """Return the driver version in a key, or the date on which the compiler was built."""
    version = _DRIVER.search(key)
    if version is not None:
        return {"driver": version[1].decode()}
    build = _BUILD.search(key)
    return {} if build is None else {"compiler_built": f"{build[1].decode()} {build[2].decode()}"}


def half(key: bytes) -> str:
    """Return which of the two entries of an OpenCL program has a key: that of the back end is PTX."""
    return "back end" if b".target" in key and b".version" in key else "front end"


def parts(key: bytes) -> dict[str, str]:
    """Return the parts of a key that can be compared: a front end's has source and options, a back end's PTX."""
    found = {"device": device(key) or ""}
    found |= {name.replace("_", " "): value for name, value in driver(key).items()}
    if half(key) == "back end":
        return {**found, "PTX": key[max(0, key.find(b".version")) :].decode(errors="replace")}
    texts = [text.decode(errors="replace") for text in key.split(b"\0")]
    options = next((text for text in texts if "-cl-nv-arch" in text), "")
    words = "".join(letter for letter in options if letter.isprintable()).split()
    included = {place for place, word in enumerate(words) if word[:2] == "-I" or words[place - 1 : place] == ["-I"]}
    return {
        **found,
        "source": max(texts, key=len),
        "include path": " ".join(words[place] for place in sorted(included)),
        "options": " ".join(word for place, word in enumerate(words) if place not in included),
    }


#: The records of an index: ids with their sizes (bytes without the header), in the order in which they were stored.
SizeIndex = tuple[tuple[int, int], ...]


def read_index(data: bytes) -> SizeIndex | None:
    """Read an index; ``None`` where it is incomplete, or of another version. An empty file is an empty index."""
    if not data:
        return ()
    if not is_index(data) or not _has_all_records(data):
        return None
    records = tuple(_INDEX_RECORD.iter_unpack(data[_INDEX_HEADER.size :]))
    return records if sum(size for _, size in records) == _INDEX_HEADER.unpack_from(data)[2] else None


def is_index(data: bytes) -> bool:
    """Return whether data begins as an index of the known version, complete or not."""
    return len(data) >= _INDEX_HEADER.size and int.from_bytes(data[:4], "little") == VERSION


def _has_all_records(data: bytes) -> bool:
    _, count, _ = _INDEX_HEADER.unpack_from(data)
    return len(data) == _INDEX_HEADER.size + int(count) * _INDEX_RECORD.size


def has_version_of(index: bytes, entry: bytes) -> bool:
    """Return whether a complete index of another version has the version of an entry."""
    if len(index) < _INDEX_HEADER.size or entry[:4] != index[:4]:
        return False
    return _has_all_records(index) and VERSION != int.from_bytes(index[:4], "little") < _PLAUSIBLE


def write_index(records: Sequence[tuple[int, int]]) -> bytes:
    """Return the bytes of an index."""
    total = sum(size for _, size in records)
    return _INDEX_HEADER.pack(VERSION, len(records), total) + b"".join(
        _INDEX_RECORD.pack(*record) for record in records
    )
