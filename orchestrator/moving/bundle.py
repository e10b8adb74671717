"""The file in which warm caches travel: a tar under zstd, what is in it said first, and nothing else in it.

The same content gives the same bytes: no times, owners or names of the system, entries by layer and key, compressed in
two frames, so that the manifest can be written last and stand first. Members bear numbers, never names that came out
of a cache. A reader computes the header that each member must have and compares it, so that nothing in a bundle can
name a path, a link or a member of its own choice.
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

from cachectl.layers.base.errors import CachectlError, printable
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
from cachectl.layers.stores.archive import tar_header

if TYPE_CHECKING:
    import types

T = TypeVar("T")

SCHEMA: Final = "cachectl/bundle/1"
_MANIFEST: Final = "manifest.json"
#: How every file begins that zstd has written.
MAGIC: Final = b"\x28\xb5\x2f\xfd"
#: The level at which time and size are both small; another one gives other bytes.
_LEVEL: Final = 3
_THREADS: Final = 2
#: What is unpacked at once, in bytes.
_PIECE: Final = 1 << 18
#: What a decompressor gets at once, in bytes: it copies what follows the end of a frame, and frames may be tiny.
_FEED: Final = 1 << 12
#: What is read of a file at once, in bytes: a merge reads many bundles side by side.
_READ: Final = 1 << 17
#: What is given to the compressor at once, in bytes.
_CHUNK: Final = 1 << 20
#: What is read or placed at once: entries, and bytes.
_MOST_AT_ONCE: Final = 256
_LARGEST_BATCH: Final = 8 << 20
#: The last second of the year 9999, after which no calendar of Python's goes.
_LATEST: Final = 253402300799
_DIGEST: Final = re.compile("[0-9a-f]{64}")
#: As the registry takes names of layers.
_LAYER: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
_END: Final = 2 * tarfile.BLOCKSIZE
_HIDDEN: Final = "something is hidden between its members"


class BadBundle(CachectlError, ValueError):
    """A file that is no bundle, or not the whole one that was made: nothing in it is to be used."""

    def __init__(self, message: str) -> None:
        super().__init__(f"no bundle to be used: {printable(message)}")


class _Lie(BadBundle):
    """What is told of an entry, and cannot be true of any."""

    def __init__(self, what: str) -> None:
        super().__init__(f"its manifest has {what}")
        self.what = what


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a bundle: its artifact but for the bytes, with their number and SHA-256.

    ``device`` and ``versions`` are what the layer reads off the entry: for what it was compiled, by what.
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
    """What a bundle holds, in the order of its members.

    ``portability_keys`` say, layer by layer, what decides whether an entry can be hit elsewhere (``None``: not known
    where the bundle was made); ``exposed`` names the layers whose roots others could write to. ``made`` is when a
    bundle was signed, in epoch seconds: so an old one with a good signature is not taken for a new one. It is ``None``
    in an unsigned bundle, whose bytes depend on its content alone.
    """

    items: tuple[Item, ...]
    portability_keys: Mapping[str, Mapping[str, str | None]]
    exposed: tuple[str, ...] = ()
    made: int | None = None

    def to_bytes(self) -> bytes:
        """Write it as JSON, always in the same way: an entry a line."""
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """Yield the same bytes in small parts."""
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
    """Return what entries of a bundle are ordered by."""
    return item.layer, item.key


def complaint(item: Item) -> str | None:
    """Say why no reader would take a bundle with this entry; ``None``: it would."""
    try:
        _demand_fit(item)
    except _Lie as error:
        return error.what
    return None


def artifact_of(item: Item, data: bytes) -> Artifact:
    """Return the artifact that an item describes, given its bytes."""
    return Artifact(item.layer, item.key, item.form, data, item.detail)


def in_batches(things: Iterable[T], layer: Callable[[T], str], weight: Callable[[T], int]) -> Iterator[list[T]]:
    """Part things into runs of one layer, none of them more than a memory or a waiting program bears.

    Each run is emptied before the next thing is asked for, so that two large ones are never held at once.
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
    """Write what a bundle begins with, in a frame of its own; return how many bytes that takes in the tar.

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
    """The entries of a bundle in the making, compressed as they come: the manifest before them is known last.

    Raises :class:`CachectlError` if this Python has no zstd.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._writer = _compressed(file)
        self._number = 0
        self._length = 0
        # Small parts are joined to chunks that are worth a call.
        self._held: list[bytes] = []
        self._holding = 0

    def add(self, data: bytes) -> None:
        """Write the bytes of the next entry."""
        self._number += 1
        self._write(_framed(_member(self._number), data))

    def finish(self, head: int) -> None:
        """End the bundle, given how many bytes stand before the entries."""
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
    """Open a frame of zstd in a file, compressed beside this thread, which reads on.

    However many threads there are, from one on the bytes are the same.
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
    """A bundle that is read from its beginning, once: first :attr:`manifest`, then :meth:`contents`.

    ``size`` is that of the file in bytes, ``known`` the manifest where the same bytes are read again. Raises
    :class:`BadBundle` as soon as a byte is not what it must be: wrong magic, a member that was not announced (a link, a
    folder, any name but its number), a size or a sum that does not hold, a manifest that is too large or promises more
    than such a file can hold, an end that is missing or not the end.
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
            raise BadBundle(f"its manifest would have {size:,} bytes, and may have {LARGEST_MANIFEST:,}")
        if size > self._size * MANIFEST_EXPANSION + LARGEST_MANIFEST_PART:
            raise BadBundle(f"its manifest has {size:,} bytes in a file of {self._size:,}: a decompression bomb")
        text = self._stream.read(size)
        filling = -size % tarfile.BLOCKSIZE
        if self._stream.read(filling) != bytes(filling):
            raise BadBundle(_HIDDEN)
        self._head = tarfile.BLOCKSIZE + size + filling
        return parse_manifest(text) if known is None else known

    def contents(self) -> Iterator[tuple[Item, bytes]]:
        """Yield each entry with its bytes, whose sum has been checked; at the end, see that it is the end."""
        for number, item in enumerate(self.manifest.items, 1):
            # Not kept in a variable: it would live on while the next one is read.
            yield item, self._read_member(number, item)
        self._see_end()

    def check(self) -> None:
        """Read to the end as :meth:`contents` does, without holding any entry in memory."""
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
            raise BadBundle(f"not member {_member(number)} of {item.bytes:,} bytes, but {_described(header)}")

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
            raise BadBundle("there is more in it than its manifest announces")
        self._stream.finish()


def is_begun_by(head: bytes) -> bool:
    """Tell whether bytes are the beginning of a bundle, or of all of it: a manifest stands first."""
    try:
        block = _Stream(io.BytesIO(head)).read(tarfile.BLOCKSIZE)
        return block == tar_header(_MANIFEST, int(block[124:135], 8))
    except ValueError:
        return False


class _Stream:
    """Bytes out of frames of zstd: at most :data:`_PIECE` bytes more are unpacked than were asked for."""

    def __init__(self, file: BinaryIO) -> None:
        self._zstd = _zstd()
        self._file = file
        self._held = memoryview(b"")
        self._chunk = memoryview(file.read(_READ))
        #: How much of the chunk the decompressor has.
        self._at = 0
        if not self._begins():
            raise BadBundle("it is not compressed by zstd")
        self._frame = self._zstd.decompressor()

    def read(self, length: int) -> bytes:
        """Return exactly so many bytes."""
        if length <= len(self._held):
            data, self._held = bytes(self._held[:length]), self._held[length:]
            return data
        # It gives its content away without a copy, which a join of the pieces would be.
        whole = io.BytesIO()
        for piece in self.pieces(length):
            whole.write(piece)
        return whole.getvalue()

    def pieces(self, length: int) -> Iterator[memoryview]:
        """Yield so many bytes in all."""
        while length:
            while not self._held:
                if self._frame.eof:
                    if not self._begins():
                        raise BadBundle("it ends before it should")
                    self._frame = self._zstd.decompressor()
                self._held = memoryview(self._more())
            piece, self._held = self._held[:length], self._held[length:]
            length -= len(piece)
            yield piece

    def _begins(self) -> bool:
        """Tell whether a frame begins here."""
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
                    raise BadBundle("it ends before it should: it was cut")
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
        """See that nothing follows."""
        while not self._held and not self._frame.eof:
            # The checksum of the frame may be all that is left of it.
            self._held = memoryview(self._more())
        if self._held or self._at < len(self._chunk) or self._file.read(1):
            raise BadBundle("something follows its end")


def _described(block: bytes) -> str:
    """Say what a foreign header stands for."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return "what is no member at all" if any(block) else "its end"
    kind = "a link" if info.issym() or info.islnk() else "a folder" if info.isdir() else "a member"
    return f"{kind} {info.name!r} of {info.size:,} bytes"


def parse_manifest(text: bytes) -> Manifest:
    """Read a manifest. Raises :class:`BadBundle` for anything that :meth:`Manifest.to_bytes` would not have written.

    It is read line by line: JSON as a whole could become forty times as large in memory.
    """
    lines = _lines(text)
    try:
        schema = json.loads(next(lines, b"").rstrip(b",\n") + b"}")["schema"]
        if schema != SCHEMA:
            raise BadBundle(f"its schema is {str(schema)[:80]!r}, and this is for {SCHEMA}")
        head = _pair(next(lines, b""))
        made = _moment(head["made"]) if "made" in head else None
        layers = (head if made is None else _pair(next(lines, b"")))["layers"]
        manifest = Manifest(
            # What stands around the entries is compared below.
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
        raise BadBundle("its manifest is not spelled as cachectl spells one")
    keys = [sort_key(item) for item in manifest.items]
    if any(one >= other for one, other in pairwise(keys)):
        raise BadBundle("its entries are not in order, or one stands twice")
    if {item.layer for item in manifest.items} != set(manifest.portability_keys):
        raise BadBundle("its layers are not those of its entries")
    return manifest


def _lines(text: bytes) -> Iterator[bytes]:
    for line in io.BytesIO(text):
        if len(line) > LARGEST_MANIFEST_PART:
            raise BadBundle(f"its manifest has a line of {len(line):,} bytes, and may have {LARGEST_MANIFEST_PART:,}")
        yield line


def _pair(line: bytes) -> dict[str, Any]:
    """Read a line that is a member of an object."""
    pair: dict[str, Any] = json.loads(b"{" + line.rstrip(b",\n") + b"}")
    return pair


def _is_written(manifest: Manifest, text: bytes) -> bool:
    """Tell whether a text is what a manifest is written as."""
    at = 0
    for part in manifest.parts():
        if not text.startswith(part, at):
            return False
        at += len(part)
    return at == len(text)


def _item(entry: Any) -> Item:  # noqa: ANN401 - anything that JSON spells
    item = Item(*map(entry.__getitem__, _FIELDS))
    _demand_fit(item)
    return item


def _demand_fit(item: Item) -> None:
    """See that an item is what its annotations say, and names an entry."""
    if type(item.bytes) is not int or not 0 <= item.bytes <= LARGEST_ENTRY:
        _lies(f"an entry of {str(item.bytes)[:40]} bytes")
    for table in (item.detail, item.versions):
        if not isinstance(table, dict):
            _lies("what is no table where one belongs")
        if len(table) > MOST_DETAILS:
            _lies(f"{len(table):,} details of an entry, which may have {MOST_DETAILS}")
        _demand_texts(chain(table, table.values()))
    _demand_texts((item.layer, item.key, item.form, item.sha256, "" if item.device is None else item.device))
    if not _LAYER.fullmatch(item.layer) or not _DIGEST.fullmatch(item.sha256):
        _lies("a layer or a sum that is none")
    if (wrong := key_complaint(item.key)) is not None:
        _lies(f"the key {item.key[:200]!r}, which {wrong}")
    if item.key.startswith("/") or ".." in item.key.split("/"):
        _lies(f"the key {item.key[:200]!r}, which leads elsewhere")


def _lies(what: str) -> NoReturn:
    raise _Lie(what)


def _demand_texts(values: Iterable[object]) -> None:
    if not all(map(isinstance, values, repeat(str))):
        _lies("what is no text where text belongs")


def _portability_key(value: object) -> dict[str, str | None]:
    if not isinstance(value, dict):
        _lies("a portability_key that is none")
    _demand_texts(chain(value, (text for text in value.values() if text is not None)))
    return value


def _moment(value: object) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= _LATEST):
        _lies("a time of signing that is none")
    return value


def _zstd() -> types.ModuleType:
    try:
        from cachectl.layers.formats import zstd
    except ImportError as error:
        raise CachectlError("bundles need zstd, without which this Python was built") from error
    return zstd
