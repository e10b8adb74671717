"""The bundle format: a tar under zstd with a manifest first and nothing beside the listed entries.

The same content gives the same bytes: no times, owners or system names; entries ordered by layer and key. The manifest
is compressed in a frame of its own, so it can be written last and still stand first.

Members are named by numbers, never by names from a cache. A reader computes the header that each member must have and
compares it, so nothing in a bundle can choose a path or add a link or a member.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn, TypeVar, cast

from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.facts import Artifact
from cachectl.layers.base.limits import (
    EXPANSION_ALLOWANCE,
    LARGEST_ENTRY,
    LARGEST_MANIFEST,
    LARGEST_MANIFEST_PART,
    MANIFEST_EXPANSION,
    MOST_DETAILS,
    MOST_EXPANSION,
    key_complaint,
)
from cachectl.layers.base.texts import printable
from cachectl.layers.stores.archive import tar_header

if TYPE_CHECKING:
    import types

T = TypeVar("T")

SCHEMA: Final = "cachectl/bundle/1"
_MANIFEST: Final = "manifest.json"
#: The first bytes of every zstd frame.
MAGIC: Final = b"\x28\xb5\x2f\xfd"
#: A compromise of time and size. Another level changes the bytes of every bundle.
_LEVEL: Final = 3
_THREADS: Final = 2
#: Largest number of bytes to unpack at once.
_PIECE: Final = 1 << 18
#: Input bytes for one call of the decompressor. It copies the rest after a frame's end, and frames may be tiny.
_FEED: Final = 1 << 12
#: Bytes to read from a file at once. Small, because a merge reads many bundles at the same time.
_READ: Final = 1 << 17
#: Input bytes for one call of the compressor.
_CHUNK: Final = 1 << 20
#: Largest batch to read or place: entries and bytes.
_MOST_AT_ONCE: Final = 1024
_LARGEST_BATCH: Final = 16 << 20
#: The last second of the year 9999, the last year of Python's calendar.
_LATEST: Final = 253402300799
_DIGEST: Final = re.compile("[0-9a-f]{64}")
#: The registry's pattern of layer names.
_LAYER: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
_END: Final = 2 * tarfile.BLOCKSIZE
_HIDDEN: Final = "it has bytes between its members"


class BadBundle(CachectlError, ValueError):
    """A file that is no bundle, or is cut or changed. Nothing in it may be used."""

    def __init__(self, message: str) -> None:
        super().__init__(f"cannot use the bundle: {printable(message)}")


class _Lie(BadBundle):
    """An impossible statement of a manifest about an entry."""

    def __init__(self, what: str) -> None:
        super().__init__(f"its manifest has {what}")
        self.what = what


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a bundle: its artifact without the bytes, with their number and SHA-256.

    ``device`` and ``versions`` are what the layer reads from the entry: the device and libraries it was compiled for.
    """

    layer: str
    key: str
    form: str
    bytes: int
    sha256: str
    detail: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a bundle, in the order of its members.

    ``portability_keys`` are the facts of each layer that decide whether an entry can be hit elsewhere (``None``:
    unknown where the bundle was made). ``exposed`` names the layers whose roots others could write to. ``made`` is when
    a bundle was signed, in epoch seconds, so that an old bundle with a good signature is not accepted as a new one. It
    is ``None`` in an unsigned bundle, whose bytes depend on its content alone.
    """

    items: tuple[Item, ...]
    portability_keys: Mapping[str, Mapping[str, str | None]]
    exposed: tuple[str, ...] = ()
    made: int | None = None

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON with one line for each entry. Equal manifests give equal bytes."""
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes of :meth:`to_bytes` in small parts."""
        layers = {
            name: {"fingerprint": dict(key), "writable_by_others": name in self.exposed}
            for name, key in self.portability_keys.items()
        }
        encode = json.JSONEncoder(sort_keys=True).encode
        made = "" if self.made is None else f'"made": {self.made},\n'
        yield f'{{"schema": {encode(SCHEMA)},\n{made}"layers": {encode(layers)},\n"entries": [\n'.encode()
        for number, item in enumerate(self.items):
            yield (",\n" if number else "").encode() + encode(_as_json(item)).encode()
        yield b"\n]}\n"


_FIELDS: Final = tuple(one.name for one in fields(Item))


def _as_json(item: Item) -> dict[str, object]:
    return {name: getattr(item, name) for name in _FIELDS}


def sort_key(item: Item) -> tuple[str, str]:
    """Return the sort key of entries in a bundle."""
    return item.layer, item.key


def complaint(item: Item) -> str | None:
    """Return why no reader would accept a bundle with this entry; ``None`` if readers accept it."""
    try:
        _demand_fit(item)
    except _Lie as error:
        return error.what
    return None


def artifact_of(item: Item, data: bytes) -> Artifact:
    """Return the artifact that an item describes, given its bytes."""
    return Artifact(item.layer, item.key, item.form, data, item.detail)


def in_batches(things: Iterable[T], layer: Callable[[T], str], weight: Callable[[T], int]) -> Iterator[list[T]]:
    """Group consecutive things of one layer into batches of bounded number and size.

    Each batch is emptied before the next thing is requested, so that two large ones are never in memory together.
    """
    batch: list[T] = []
    total = 0
    for thing in things:
        if batch and (layer(thing) != layer(batch[0]) or total + weight(thing) > _LARGEST_BATCH):
            yield batch
            batch.clear()
            total = 0
        batch.append(thing)
        total += weight(thing)
        del thing
        if len(batch) >= _MOST_AT_ONCE or total > _LARGEST_BATCH:
            yield batch
            batch.clear()
            total = 0
    if batch:
        yield batch


# ---------------------------------------------------------------------- writing


def write_bundle(file: BinaryIO, manifest: Manifest, contents: Iterable[bytes]) -> None:
    """Write a bundle, given the bytes of each entry in the manifest's order.

    Raises :class:`CachectlError` if this Python has no zstd, :class:`BadBundle` if the manifest is larger than any
    reader takes.
    """
    head = write_manifest(file, manifest)
    members = Members(file)
    for _, data in zip(manifest.items, contents, strict=True):
        members.add(data)
    members.finish(head)


def write_manifest(file: BinaryIO, manifest: Manifest) -> int:
    """Write the beginning of a bundle in a frame of its own; return how many bytes that takes in the tar.

    Raises as :func:`write_bundle`.
    """
    text = manifest.to_bytes()
    if len(text) > LARGEST_MANIFEST:
        raise BadBundle(f"{len(manifest.items):,} entries are too many for one; export layer by layer")
    head = b"".join(_framed(_MANIFEST, text))
    with _compressed(file) as writer:
        writer.write(head)
    return len(head)


class Members:
    """Compresses the entries of a bundle as they come; the manifest, which stands before them, is known last.

    Raises :class:`CachectlError` if this Python has no zstd.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._writer = _compressed(file)
        self._number = 0
        self._length = 0
        # Join small parts, because each call costs time.
        self._held: list[bytes] = []
        self._holding = 0

    def add(self, data: bytes) -> None:
        """Write the bytes of the next entry."""
        self._number += 1
        self._write(_framed(_member(self._number), data))

    def finish(self, head: int) -> None:
        """End the bundle, given the number of bytes before the entries."""
        self._write([bytes(_padding(head + self._length))])
        self._flush()
        self._writer.close()

    def _write(self, parts: Iterable[bytes]) -> None:
        for part in parts:
            self._length += len(part)
            if len(part) >= _CHUNK:
                # Joining it to others would copy it.
                self._flush()
                self._writer.write(part)
                continue
            self._held.append(part)
            self._holding += len(part)
        if self._holding >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._writer.write(b"".join(self._held))
        self._held, self._holding = [], 0


def _compressed(file: BinaryIO) -> BinaryIO:
    """Open a zstd frame in a file, compressed in other threads.

    The output does not depend on the number of threads if there is at least one.
    """
    zstd = _zstd()
    kinds = zstd.CompressionParameter
    options = {kinds.compression_level: _LEVEL, kinds.nb_workers: _THREADS, kinds.checksum_flag: 1}
    return cast("BinaryIO", zstd.ZstdFile(file, "wb", options=options))


def _framed(name: str, data: bytes) -> tuple[bytes, bytes, bytes]:
    return tar_header(name, len(data)), data, bytes(-len(data) % tarfile.BLOCKSIZE)


def _member(number: int) -> str:
    return f"{number:07}"


def _padding(body: int) -> int:
    return _END + -(body + _END) % tarfile.RECORDSIZE


# ---------------------------------------------------------------------- reading


class Reader:
    """Reads a bundle once from its beginning: first :attr:`manifest`, then :meth:`contents`.

    ``size`` is that of the file in bytes; ``known`` is the manifest if the same bytes are read again. Raises
    :class:`BadBundle` at the first wrong byte: wrong magic, an unannounced member (a link, a folder, any name but its
    number), a wrong size or checksum, a manifest that is too large or announces more than such a file can hold, a
    missing end, or data after the end.
    """

    def __init__(self, file: BinaryIO, size: int, *, known: Manifest | None = None) -> None:
        self._stream = _Stream(file)
        self._size = size
        self._known = known is not None
        self.manifest = self._read_manifest(known)
        announced = sum(item.bytes for item in self.manifest.items)
        if announced > size * MOST_EXPANSION + EXPANSION_ALLOWANCE:
            raise BadBundle(f"it announces {announced:,} bytes in a file of {size:,}: a decompression bomb")

    def _read_manifest(self, known: Manifest | None) -> Manifest:
        block = self._stream.read(tarfile.BLOCKSIZE)
        try:
            size = int(block[124:135], 8)
        except ValueError:
            raise BadBundle("it does not begin with a manifest") from None
        if size < 0 or block != tar_header(_MANIFEST, size):
            raise BadBundle(f"it does not begin with a manifest, but with {_described(block)}")
        if size > LARGEST_MANIFEST:
            raise BadBundle(f"its manifest has {size:,} bytes; the limit is {LARGEST_MANIFEST:,}")
        if size > self._size * MANIFEST_EXPANSION + LARGEST_MANIFEST_PART:
            raise BadBundle(f"its manifest has {size:,} bytes in a file of {self._size:,}: a decompression bomb")
        text = self._stream.read(size)
        filling = -size % tarfile.BLOCKSIZE
        if self._stream.read(filling) != bytes(filling):
            raise BadBundle(_HIDDEN)
        self._head = tarfile.BLOCKSIZE + size + filling
        return parse_manifest(text) if known is None else known

    def contents(self) -> Iterator[tuple[Item, bytes]]:
        """Yield each entry with its verified bytes, then check that the bundle ends."""
        for number, item in enumerate(self.manifest.items, 1):
            # Not kept in a variable: it would stay in memory while the next one is read.
            yield item, self._read_member(number, item)
        self._see_end()

    def check(self) -> None:
        """Read to the end and check as :meth:`contents` does, without keeping any entry in memory."""
        for number, item in enumerate(self.manifest.items, 1):
            self._read_header(number, item)
            digest = hashlib.sha256()
            for piece in self._stream.pieces(item.bytes):
                digest.update(piece)
            self._read_filling(item, digest.hexdigest())
        self._see_end()

    def _read_member(self, number: int, item: Item) -> bytes:
        self._read_header(number, item)
        data = self._stream.read(item.bytes)
        self._read_filling(item, item.sha256 if self._known else hashlib.sha256(data).hexdigest())
        return data

    def _read_header(self, number: int, item: Item) -> None:
        header = self._stream.read(tarfile.BLOCKSIZE)
        if not self._known and header != tar_header(_member(number), item.bytes):
            raise BadBundle(f"expected member {_member(number)} of {item.bytes:,} bytes, found {_described(header)}")

    def _read_filling(self, item: Item, digest: str) -> None:
        filling = self._stream.read(-item.bytes % tarfile.BLOCKSIZE)
        if any(filling):
            raise BadBundle(_HIDDEN)
        if digest != item.sha256:
            raise BadBundle(f"wrong checksum for {item.layer} {item.key}")

    def _see_end(self) -> None:
        sizes = (item.bytes + -item.bytes % tarfile.BLOCKSIZE for item in self.manifest.items)
        padding = _padding(self._head + tarfile.BLOCKSIZE * len(self.manifest.items) + sum(sizes))
        if self._stream.read(padding) != bytes(padding):
            raise BadBundle("it holds more than its manifest lists")
        self._stream.finish()


def is_begun_by(head: bytes) -> bool:
    """Return whether bytes are the beginning of a bundle, or a whole one: the manifest is the first member."""
    try:
        block = _Stream(io.BytesIO(head)).read(tarfile.BLOCKSIZE)
        return block == tar_header(_MANIFEST, int(block[124:135], 8))
    except ValueError:
        return False


class _Stream:
    """Decompresses zstd frames; at most :data:`_PIECE` bytes more than requested are unpacked."""

    def __init__(self, file: BinaryIO) -> None:
        self._zstd = _zstd()
        self._file = file
        self._held = memoryview(b"")
        self._chunk = memoryview(file.read(_READ))
        #: Offset in the chunk up to which the decompressor has read.
        self._at = 0
        if not self._begins():
            raise BadBundle("it is not compressed by zstd")
        self._frame = self._zstd.decompressor()

    def read(self, length: int) -> bytes:
        """Return exactly ``length`` bytes."""
        if length <= len(self._held):
            data, self._held = bytes(self._held[:length]), self._held[length:]
            return data
        # Its content is taken without a copy; joining the pieces would copy them.
        whole = io.BytesIO()
        for piece in self.pieces(length):
            whole.write(piece)
        return whole.getvalue()

    def pieces(self, length: int) -> Iterator[memoryview]:
        """Yield ``length`` bytes in all."""
        while length:
            while not self._held:
                if self._frame.eof:
                    if not self._begins():
                        raise BadBundle("it is cut short")
                    self._frame = self._zstd.decompressor()
                self._held = memoryview(self._more())
            piece, self._held = self._held[:length], self._held[length:]
            length -= len(piece)
            yield piece

    def _begins(self) -> bool:
        """Return whether a frame begins here."""
        if len(self._chunk) - self._at < len(MAGIC):
            self._chunk = memoryview(bytes(self._chunk[self._at :]) + self._file.read(_READ))
            self._at = 0
        return bytes(self._chunk[self._at : self._at + len(MAGIC)]) == MAGIC

    def _more(self) -> bytes:
        """Unpack a piece of the frame, which may be empty."""
        packed = self._chunk[:0]
        if self._frame.needs_input:
            if self._at == len(self._chunk):
                self._chunk, self._at = memoryview(self._file.read(_READ)), 0
                if not self._chunk:
                    raise BadBundle("it is cut short")
            packed = self._chunk[self._at : self._at + _FEED]
            self._at += len(packed)
        try:
            data: bytes = self._frame.decompress(packed, max_length=_PIECE)
        except self._zstd.ZstdError as error:
            raise BadBundle(f"it is damaged: {error}") from error
        if self._frame.eof:
            self._at -= len(self._frame.unused_data)
        return data

    def finish(self) -> None:
        """Raise :class:`BadBundle` if anything follows."""
        while not self._held and not self._frame.eof:
            # The rest of the frame may be only its checksum.
            self._held = memoryview(self._more())
        if self._held or self._at < len(self._chunk) or self._file.read(1):
            raise BadBundle("it has bytes after its end")


def _described(block: bytes) -> str:
    """Describe a header that is not the expected one."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return "no tar header" if any(block) else "its end"
    kind = "a link" if info.issym() or info.islnk() else "a folder" if info.isdir() else "a member"
    return f"{kind} {info.name!r} of {info.size:,} bytes"


def parse_manifest(text: bytes) -> Manifest:
    """Read a manifest. Raises :class:`BadBundle` for anything that :meth:`Manifest.to_bytes` would not have written.

    It is parsed line by line, because all of it as JSON could take forty times its size in memory.
    """
    lines = _lines(text)
    try:
        schema = json.loads(next(lines, b"").rstrip(b",\n") + b"}")["schema"]
        if schema != SCHEMA:
            raise BadBundle(f"its schema is {str(schema)[:80]!r}; this cachectl reads {SCHEMA}")
        head = _pair(next(lines, b""))
        made = _moment(head["made"]) if "made" in head else None
        layers = (head if made is None else _pair(next(lines, b"")))["layers"]
        manifest = Manifest(
            # The lines around the entries are compared below.
            items=tuple(_item(json.loads(line.rstrip(b",\n"))) for line in lines if line.startswith(b"{")),
            portability_keys={name: _portability_key(layer["fingerprint"]) for name, layer in layers.items()},
            exposed=tuple(name for name, layer in layers.items() if layer["writable_by_others"]),
            made=made,
        )
        same = _is_written(manifest, text)
    except BadBundle:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadBundle(f"its manifest cannot be read: {type(error).__name__}") from error
    if not same:
        raise BadBundle("its manifest is not in the form that cachectl writes")
    keys = [sort_key(item) for item in manifest.items]
    if any(one >= other for one, other in pairwise(keys)):
        raise BadBundle("its entries are not sorted, or one is repeated")
    if {item.layer for item in manifest.items} != set(manifest.portability_keys):
        raise BadBundle("its list of layers does not match its entries")
    return manifest


def _lines(text: bytes) -> Iterator[bytes]:
    for line in io.BytesIO(text):
        if len(line) > LARGEST_MANIFEST_PART:
            raise BadBundle(f"its manifest has a line of {len(line):,} bytes; the limit is {LARGEST_MANIFEST_PART:,}")
        yield line


def _pair(line: bytes) -> dict[str, Any]:
    """Parse a line that is one member of a JSON object."""
    pair: dict[str, Any] = json.loads(b"{" + line.rstrip(b",\n") + b"}")
    return pair


def _is_written(manifest: Manifest, text: bytes) -> bool:
    """Return whether a text is exactly what the manifest is written as."""
    at = 0
    for part in manifest.parts():
        if not text.startswith(part, at):
            return False
        at += len(part)
    return at == len(text)


def _item(entry: Any) -> Item:  # noqa: ANN401 - any JSON value
    item = Item(*map(entry.__getitem__, _FIELDS))
    _demand_fit(item)
    return item


def _demand_fit(item: Item) -> None:
    """Raise :class:`_Lie` unless an item has the annotated types and names an entry."""
    if type(item.bytes) is not int or not 0 <= item.bytes <= LARGEST_ENTRY:
        _lies(f"an entry of {str(item.bytes)[:40]} bytes")
    for table in (item.detail, item.versions):
        if not isinstance(table, dict):
            _lies("a value that should be a table and is not")
        if len(table) > MOST_DETAILS:
            _lies(f"{len(table):,} details of one entry; at most {MOST_DETAILS} are allowed")
        _demand_texts(chain(table, table.values()))
    _demand_texts((item.layer, item.key, item.form, item.sha256, "" if item.device is None else item.device))
    if not _LAYER.fullmatch(item.layer) or not _DIGEST.fullmatch(item.sha256):
        _lies("an invalid layer name or checksum")
    if (wrong := key_complaint(item.key)) is not None:
        _lies(f"the key {item.key[:200]!r}, which {wrong}")
    if item.key.startswith("/") or ".." in item.key.split("/"):
        _lies(f"the key {item.key[:200]!r}, which leads outside its root")


def _lies(what: str) -> NoReturn:
    raise _Lie(what)


def _demand_texts(values: Iterable[object]) -> None:
    if not all(map(isinstance, values, repeat(str))):
        _lies("a value that should be text and is not")


def _portability_key(value: object) -> dict[str, str | None]:
    if not isinstance(value, dict):
        _lies("an invalid fingerprint")
    _demand_texts(chain(value, (text for text in value.values() if text is not None)))
    return value


def _moment(value: object) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= _LATEST):
        _lies("an invalid time of signing")
    return value


def _zstd() -> types.ModuleType:
    try:
        from cachectl.layers.formats import zstd
    except ImportError as error:
        raise CachectlError("bundles need zstd, and this Python was built without it") from error
    return zstd
