"""The store of the CUDA ComputeCache: one file for each entry, and an index that the driver writes under a lock.

NVIDIA publishes no format. This one was derived from caches that driver 580.159.04 wrote, and checked on all their
entries. Numbers are little endian. Version and two checksums are compared, so another format is never misread.

An entry is a header of 28 bytes (u32 version, u64 key length, u64 payload length, u64 FNV-1a of the payload),
the key, the payload. Its file name is the FNV-1a of the key, as 16 hex digits split ``a/b/14 digits``. The
index is u32 version, u32 count, u64 total, then per entry its id and its size without the header.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from cachectl.layers import cuda
from cachectl.layers.base import processes
from cachectl.layers.base.errors import Damaged
from cachectl.layers.base.lazy import regex
from cachectl.layers.core import codes
from cachectl.layers.core.entry import Entry, Found, Problem, orphan
from cachectl.layers.core.finding import HARMLESS, HEALS, WASTES, Finding
from cachectl.layers.core.plan import Outcome
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import Selection
from cachectl.layers.core.store import Codec, Damage, counting, finding_of, unreadable
from cachectl.layers.disk import atomic, handles, locks, plain
from cachectl.layers.formats import details, opencl_source
from cachectl.layers.host import hardware, record
from cachectl.layers.stores import files
from cachectl.layers.stores.tree_read import Leaf, Shape, Tidy, Tree, resembling

INDEX = "index"
_DIGIT = regex("[0-9a-f]")
_SHAPE = Shape((_DIGIT, _DIGIT, regex("[0-9a-f]{14}")), mode=0o644)
_INDEX = Shape((regex(INDEX),), sums=True)
#: Longer or shorter hashes, and other levels.
_LIKE = tuple(resembling(*(("[0-9a-f]{1,4}",) * depth), f"[0-9a-f]{{{16 - 4 * depth},}}") for depth in range(4))
_REWRITES = "; the driver compiles it again and rewrites it"
#: The largest index that is read, in bytes: four million entries.
_LARGEST_INDEX = 1 << 26

VERSION = 0x41
#: More versions than any format has had.
_PLAUSIBLE = 0x10000
HEADER = struct.Struct("<IQQQ")
_INDEX_HEADER = struct.Struct("<IIQ")
_INDEX_RECORD = struct.Struct("<QQ")
_OFFSET_BASIS = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = 0xFFFFFFFFFFFFFFFF
#: The name of its driver in the record of what was seen.
_PRODUCT = "NVIDIA"

#: The compute architecture.
_DEVICE = regex(rb"\bsm_\d+[a-z]?")
_PTX_ENTRY = regex(rb"\.entry\s+([\w$]+)")
_DRIVER = regex(rb"\x00(\d{3,4}\.\d+(?:\.\d+)?)\x00")
_BUILD = regex(
    rb"((?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d{4}).{0,4}?(\d\d:\d\d:\d\d)", re.DOTALL
)


class EntryFileCodec(Codec):
    """An entry, which its key describes; checking it takes the name of its file."""

    form = "cuda-entry/65"

    def describe(self, data: bytes) -> details.Details:
        """Return the facts in the key."""
        key = key_of(data)
        return details.Details() if key is None else details_of(key)

    def foreign(self, data: bytes) -> str | None:
        """Return that an entry is of another version."""
        return f"{form_complaint(data)}; left alone" if is_other_version(data, HEADER) else None


class ComputeCache(files.Files):
    """One file for each entry, two levels deep, and an index, without which the driver drops every entry."""

    shapes = (_SHAPE, _INDEX, *_LIKE)
    codec = EntryFileCodec()
    forms = (codec.form,)
    unread = Damage(HARMLESS, _REWRITES)

    def leaves(self, root: Root) -> Iterator[Leaf | Problem]:
        """Add the heads of entries, and a damaged index; either with another format than its name's is unknown."""
        if version := hardware.nvidia_driver(self.environment):
            # The kernel's driver, which the user's libraries have to match.
            sightings = record.record_of(self.environment)
            sightings.note(_PRODUCT, self.environment.processes / hardware.NVIDIA_VERSION, version)
            sightings.save()
        index = b""
        try:
            index = _read_index(root)
        except OSError as error:
            yield unreadable(root.path / INDEX, error)
        if not (is_whole(index) or is_other_version(index, _INDEX_HEADER)):
            yield Problem(root.path / INDEX, "index", "is incomplete")
        listed = dict(split_index(index)[0])
        for leaf in self.tree_of(root).scan(head=HEADER.size):
            if isinstance(leaf, Problem) or leaf.entry.is_unknown or stated_size(leaf.head) is not None:
                yield leaf
            elif leaf.shape is _INDEX:
                yield leaf.as_unknown(
                    "is of another version; left alone" if is_other_version(index, _INDEX_HEADER) else None
                )
            else:
                # Without a header that is known, only the index shows that a file belongs to the cache.
                is_listed = not leaf.is_entry or identifier_of(leaf.entry.key) in listed
                strange = None if is_listed else "has the name of an entry but not its format; left alone"
                yield leaf.as_unknown(self.codec.foreign(leaf.head) or strange)

    def described(self, tree: Tree, leaf: Leaf, selection: Selection, *, contents: bool) -> Iterator[Found]:
        """Describe an entry by its key; one whose header was overwritten is opaque."""
        entry, size = leaf.entry, stated_size(leaf.head)
        sightings = record.record_of(self.environment)
        is_older = (entry.modified or 0.0) < sightings.last_gone(_PRODUCT)
        if not (contents or is_older) or (size is None and len(leaf.head) == HEADER.size):
            unknown = details.Details(detail={"format": "unknown"})
            yield entry._replace(details=unknown) if contents else entry
            return
        key = None
        if size != entry.length:
            message = f"is {entry.length} bytes long, unlike its header says"
            yield Problem(tree.root / entry.key, "damaged", message)
        else:
            key = key_of(tree.read_file(entry.key, limit=HEADER.size + HEADER.unpack(leaf.head)[1]) or b"")
        if key is not None:
            about = details_of(key)
            entry = entry._replace(details=about._replace(detail={"half": half(key)}))
            version = about.versions.get("driver")
            if is_older and version is not None:
                # A hit leaves no trace. This machine has one driver; only others with this home could use another.
                is_local = processes.network_file_system(self.environment, tree.root) is None
                used = entry.modified if is_local else None
                stale, because = sightings.judge(
                    _PRODUCT, used, f"compiled by driver {version}", version.__eq__, version.__eq__
                )
                entry = entry._replace(stale=stale, because=because)
        yield entry

    def require_whole(self, key: str, files: Mapping[str, bytes], path: Path | str) -> None:
        """Check version and lengths; the checksum, which takes longer than reading, is checked before a put."""
        if (wrong := form_complaint(files[""])) is not None:
            raise Damaged(self.name, wrong, path)

    def damages(self, key: str, files: Mapping[str, bytes]) -> Iterator[Damage]:
        """Check name and checksum too."""
        if (wrong := entry_complaint(key, files[""])) is not None:
            yield Damage(HARMLESS, wrong + _REWRITES)

    def tagged_text(self, tree: Tree, entry: Entry) -> bytes | None:
        """Return the key of an entry."""
        return key_of(tree.read_file(entry.key) or b"") if not entry.is_orphan else None

    @contextmanager
    def changing(self, root: Root) -> Iterator[Tidy]:
        """Hold the driver's lock during a change of entries, then make the index list exactly those that exist.

        The index is also written if the change fails. Raises :class:`Unsettled` if only the writing fails. Listed
        entries keep their order, in which the driver evicts; others follow by age. The file is overwritten in place,
        then shortened: the driver accepts one that is too long. Bytes after the counted records stay there. An index of
        another version is left alone. Yields whether no process has a driver loaded.
        """
        with ExitStack() as stack:
            folder, handle = stack.enter_context(handles.opened_root(root.path)), None
            if folder is not None and plain.status_at(INDEX, dir_fd=folder) is not None:
                handle = stack.enter_context(self._locked(root, folder))
            stack.enter_context(counting(self.name, root.path / INDEX, partial(self._recount, root, handle)))
            yield lambda: processes.using(cuda.LIBRARIES, processes=self.environment.processes) == ()

    def _locked(self, root: Root, folder: int) -> AbstractContextManager[int]:
        timeout = self.environment.lock_timeout
        return locks.record_lock(self.name, root.path / INDEX, folder=folder, lock_timeout=timeout)

    def _recount(self, root: Root, handle: int | None) -> None:
        """Write the locked index, or a new one if there are entries. The root exists from the first entry on."""
        with ExitStack() as stack:
            folder = stack.enter_context(handles.opened_root(root.path))
            if folder is not None and handle is None and self._records(root, {}, folder):
                handle = stack.enter_context(self._locked(root, folder))
            if handle is None:
                return
            old = os.pread(handle, min(os.fstat(handle).st_size, _LARGEST_INDEX), 0)
            if not old or is_index(old):
                records, rest = split_index(old)
                new = write_index(self._records(root, dict(records), folder)) + rest
                if new != old:
                    atomic.overwrite(handle, old, new)

    def _records(self, root: Root, old: Mapping[int, int], folder: int | None = None) -> SizeIndex:
        """Return the index of the root, which may be open; unreadable and incomplete files keep their records."""
        sizes: dict[int, int] = {}
        new: list[tuple[int, int]] = []
        for leaf in Tree(self.name, root.path, _SHAPE, handle=folder).scan(head=HEADER.size):
            if isinstance(leaf, Problem):
                places = ((root.path / key_from(number), number) for number in old if leaf.hides)
                sizes.update((number, old[number]) for path, number in places if path.is_relative_to(leaf.path))
                continue
            if not leaf.shape.is_entry:
                continue
            number, size = identifier_of(leaf.entry.key), leaf.entry.length
            if size == stated_size(leaf.head):
                sizes[number] = size - HEADER.size
                new.append((leaf.entry.stamp[-1], number))
            elif number in old:
                sizes[number] = old[number]
        order = [*(number for number in old if number in sizes), *(number for _, number in sorted(new))]
        return tuple((number, sizes[number]) for number in dict.fromkeys(order))

    def check_index(self, root: Root) -> Iterator[Finding]:
        """Compare the index with the entries."""
        try:
            data = _read_index(root)
            index = split_index(data)[0] if data and is_whole(data) else None
        except OSError as error:
            yield finding_of(self, root, unreadable(root.path / INDEX, error))
            return
        if is_other_version(data, _INDEX_HEADER):
            return
        records = self._records(root, dict(index or ()))
        if index is None and (records or data):
            state = "is incomplete" if data else "is empty or missing"
            complaint = f"the index {state}: the driver drops every entry when it next stores one"
        elif index is not None and (dict(records) != dict(index) or not data.startswith(write_index(index))):
            complaint = "the index does not list the entries that are there"
        else:
            return
        fix, item = "nothing: cachectl does not use an index of another version", None
        # It was cut, or begins with zeros. Without entries next to it, its owner is unknown.
        if not data or is_index(data) or (records and data[:4] in (bytes(4), VERSION.to_bytes(4, "little"))):
            fix, leaf = f"cachectl purge --damaged {self.name}", self.tree_of(root).find(INDEX)
            item = orphan(Entry(self.name, INDEX, root.path, 0, 0) if leaf is None else leaf.entry, complaint)
        severity = HEALS if index is None else WASTES
        yield codes.INDEX.finding(self.name, root.path, complaint, fix, key=INDEX, item=item, severity=severity)

    def remove(self, root: Root, targets: tuple[Entry, ...]) -> Outcome:
        """Remove entries, and an index without a header. As after every change, the index is written again."""
        is_kept = is_index(data := _read_index(root)) or not data
        outcome = super().remove(root, tuple(target for target in targets if not (is_kept and target.key == INDEX)))
        # The removed index had the lock under which a new one is written.
        return outcome if is_kept else outcome.plus(super().remove(root, ()))


def _read_index(root: Root) -> bytes:
    """Return the bytes of the index, none if there is no regular file. Raises :class:`OSError`."""
    try:
        return plain.read_locked(root.path / INDEX, limit=_LARGEST_INDEX)
    except OSError as error:
        if plain.means_no_file(error):
            return b""
        raise


def fnv1a(data: bytes) -> int:
    """Return the standard 64-bit FNV-1a hash."""
    value = _OFFSET_BASIS
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def stated_size(data: bytes) -> int | None:
    """Return the length of an entry by its first 28 bytes; ``None`` for fewer, or for another version."""
    if len(data) < HEADER.size:
        return None
    version, key_length, payload_length, _ = HEADER.unpack_from(data)
    return HEADER.size + int(key_length) + int(payload_length) if version == VERSION else None


def identifier_of(name: str) -> int:
    """Return the id of an entry by its relative path."""
    return int(name.replace("/", ""), 16)


def key_from(identifier: int) -> str:
    """Return the relative path of an entry by its id in the index."""
    name = f"{identifier:016x}"
    return f"{name[0]}/{name[1]}/{name[2:]}"


def form_complaint(data: bytes) -> str | None:
    """Return what is wrong with the version or the lengths of an entry, or ``None``."""
    if len(data) < HEADER.size:
        return str(details.Cut(data))
    if (size := stated_size(data)) is None:
        return f"has format version {HEADER.unpack_from(data)[0]:#x}, not {VERSION:#x}"
    return None if len(data) == size else f"is {len(data)} bytes long, its header says {size}"


def entry_complaint(name: str, data: bytes) -> str | None:
    """Return what is wrong with the version, lengths, name or checksum of an entry, or ``None``."""
    if (wrong := form_complaint(data)) is not None:
        return wrong
    _, key_length, _, checksum = HEADER.unpack_from(data)
    begin = HEADER.size + key_length
    if fnv1a(data[HEADER.size : begin]) != identifier_of(name):
        return "its name is not the hash of its key"
    return None if fnv1a(data[begin:]) == checksum else "its payload does not match its checksum"


def key_of(data: bytes) -> bytes | None:
    """Return the key of an entry; ``None`` if it was cut, or is of another version."""
    if stated_size(data) is None:
        return None
    end = HEADER.size + HEADER.unpack_from(data)[1]
    return data[HEADER.size : end] if len(data) >= end else None


def details_of(key: bytes) -> details.Details:
    """Return what a key says of its entry; the driver's helpers have neither OpenCL source nor PTX with a kernel.

    Instead of the driver's version, the key of a back end has the build date of the compiler.
    """
    ptx = {match[1].decode() for match in _PTX_ENTRY.finditer(key)}
    kernels = details.names_or_none(ptx.union(opencl_source.kernel_names(key) or ()))
    device, driver, build = _DEVICE.search(key), _DRIVER.search(key), _BUILD.search(key)
    versions = {}
    if driver is not None:
        versions = {"driver": driver[1].decode()}
    elif build is not None:
        versions = {"compiler_built": f"{build[1].decode()} {build[2].decode()}"}
    return details.Details(kernels, None if device is None else device[0].decode(), versions)


def half(key: bytes) -> str:
    """Return to which of the two entries of an OpenCL program a key belongs: that of the back end is PTX."""
    return "back end" if b".target" in key and b".version" in key else "front end"


#: The records of an index: ids with their sizes (bytes without the header), in the order in which they were stored.
SizeIndex = tuple[tuple[int, int], ...]


def split_index(data: bytes) -> tuple[SizeIndex, bytes]:
    """Return the records that an index counts and has, and the bytes after them.

    Driver 580 reads an index with a wrong total, with records that name no file, or with more bytes than it counts, and
    cuts these off when it next stores; with fewer bytes it drops every entry (seen on an H100).
    """
    if not is_index(data):
        return (), b""
    end = _counted_size(data)
    whole = (min(end, len(data)) - _INDEX_HEADER.size) // _INDEX_RECORD.size
    records = data[_INDEX_HEADER.size : _INDEX_HEADER.size + whole * _INDEX_RECORD.size]
    return tuple(_INDEX_RECORD.iter_unpack(records)), data[end:]


def is_whole(data: bytes) -> bool:
    """Return whether an index is empty, or is of the known version and has all the records that it counts."""
    return not data or (is_index(data) and _counted_size(data) <= len(data))


def _counted_size(index: bytes) -> int:
    return _INDEX_HEADER.size + int(_INDEX_HEADER.unpack_from(index)[1]) * _INDEX_RECORD.size


def is_index(data: bytes) -> bool:
    """Return whether data begins like an index of the known version, complete or not."""
    return len(data) >= _INDEX_HEADER.size and int.from_bytes(data[:4], "little") == VERSION


def is_other_version(data: bytes, header: struct.Struct) -> bool:
    """Return whether an entry or an index begins with a version that is not known."""
    return len(data) >= header.size and VERSION != int.from_bytes(data[:4], "little") in range(1, _PLAUSIBLE)


def write_index(records: Sequence[tuple[int, int]]) -> bytes:
    """Return the bytes of an index."""
    # The field may be too small for sizes in a damaged index; the driver accepts any total.
    total = sum(size for _, size in records) & (1 << 64) - 1
    packed = (_INDEX_RECORD.pack(*record) for record in records)
    return b"".join((_INDEX_HEADER.pack(VERSION, len(records), total), *packed))
