"""The format of a store: its names, key documents, index parts and packs.

An index part lists what one push added for one portability key, and a pack holds the bytes of entries; a large entry
has a separate pack. Both consist of a skippable zstd frame, with the OpenSSH signature of a part or random bytes that
make a pack's name unique, and a frame with the content. Each is checked against the SHA-256 in its name and unpacked to
at most the announced size; a part is parsed only after it is trusted.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cachectl.exchange import place
from cachectl.layers.base.documents import encode_json
from cachectl.layers.base.errors import PARSE_ERRORS, CachectlError
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.limits import LARGEST_ENTRY, LARGEST_SIGNATURE, MOST_DETAILS
from cachectl.layers.base.text import key_complaint
from cachectl.layers.core.entry import Artifact, Entry
from cachectl.layers.core.parts import Facts
from cachectl.layers.formats.details import Details

INDEX = "index/"
PACKS = "packs/"
SCHEMA = "cachectl/store-index/1"
KEY_SCHEMA = "cachectl/store-key/1"
#: Bytes of entries after which a pack is full.
FULL_PACK = 4 << 20
#: Entries of at least this many bytes have a separate pack, so that they are not read with other entries.
LARGE = 256 << 10
#: The most entries of one index part, and bytes of its lines after which a writer begins another one.
MOST_ENTRIES = 12_000
FULL_PART = 8 << 20
#: The most bytes of the text of an index part, and of one line in it, that a reader accepts.
_LARGEST_PART = 32 << 20
_LONGEST_LINE = 1 << 20
#: The most characters of all texts of one entry, which limits its line.
_MOST_TEXT = 1 << 16
#: The most bytes of a key document.
LARGEST_KEY = 64 << 10
_LATEST = 253402300799
#: A frame that decompressors skip (RFC 8878, 3.1.2), with its length.
_SKIPPABLE = 0x184D2A50
_FRAME = struct.Struct("<II")
_LEVEL = 3
#: How many bytes are unpacked at once.
_CHUNK = 1 << 20

_NAME = regex("index/(0|[1-9][0-9]{0,11})-[0-9a-f]{16}-[0-9a-f]{64}|index/key-[0-9a-f]{16}|packs/[0-9a-f]{64}")
_DIGEST = regex("[0-9a-f]{64}")
#: The registry's pattern of layer names.
_LAYER = regex("[A-Za-z0-9][A-Za-z0-9._-]*")
_BOMB = "more content than announced: a decompression bomb"
_CHANGED = "content that does not match its name: it was changed"


# ---------------------------------------------------------------------- names


def is_name(name: str) -> bool:
    """Return whether a name is valid in a store."""
    return _NAME.fullmatch(name) is not None


def made_of(part: str) -> int:
    """Return when an index part was made, in epoch seconds, from its name ``MADE-KEY-SHA256``."""
    return int(part.partition("-")[0])


def key_of(part: str) -> str:
    """Return the name of the portability key of an index part."""
    return part.split("-")[1]


def sort_names(listed: Collection[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the index parts in a listing of ``index/``, the oldest first, and the names of all index files.

    Raises :class:`BadStore` for more names than a store can have.
    """
    _require("the index", len(listed) <= place.MOST_NAMES, f"more than {place.MOST_NAMES:,} names")
    files = frozenset(name.removeprefix(INDEX) for name in listed if name.startswith(INDEX) and is_name(name))
    parts = (name for name in files if not name.startswith("key-"))
    return tuple(sorted(parts, key=lambda part: (made_of(part), part))), files


def digest_of(parts: Iterable[str]) -> str:
    """Return the SHA-256 of the sorted names of index parts, joined by newlines, which pins the content of a store."""
    return _sha256("\n".join(sorted(parts)).encode())


# ---------------------------------------------------------------------- entries


#: Members of the line of an entry: of the entry, of its details, and of its location without the name of the pack.
_ENTRY = ("key", "bytes", "modified")
_DETAILS = ("kernels", "device", "versions", "detail")
_PLACE = ("form", "sha256", "offset")
_NOWHERE = Path()


class Pack(NamedTuple):
    """A pack: its name, empty before it is written, and the sizes in bytes of its file and its content."""

    name: str = ""
    packed: int = 0
    unpacked: int = 0


class StoredEntry(NamedTuple):
    """An entry of a store, which has no root: its ``bytes`` are those of its artifact.

    ``form`` and ``sha256`` are those of the artifact, which is at ``offset`` in the content of a pack.
    """

    entry: Entry
    form: str
    sha256: str
    pack: Pack = Pack()
    offset: int = 0

    @property
    def key(self) -> str:
        """Return the key of the entry."""
        return self.entry.key

    def artifact(self, data: bytes) -> Artifact:
        """Return the artifact with these bytes."""
        return Artifact(self.entry.layer, self.key, self.form, data, self.entry.details.detail)


def line_of(stored: StoredEntry) -> dict[str, object]:
    """Return the content of an entry's line in an index part."""
    parts = ((stored.entry, _ENTRY), (stored.entry.details, _DETAILS), (stored, _PLACE))
    line = {name: getattr(part, name) for part, names in parts for name in names}
    return line | {"pack": stored.pack.name.removeprefix(PACKS)}


def stored_entry(entry: Entry, artifact: Artifact, *, with_time: bool = True) -> StoredEntry:
    """Return an entry as an entry of a store, without a location there.

    ``modified`` is the time of its last change in the source, in whole seconds.
    """
    modified = int(entry.modified) if with_time and entry.modified is not None and entry.modified >= 0 else None
    details = entry.details._replace(versions=dict(entry.details.versions), detail=dict(artifact.detail))
    moved = Entry(entry.layer, entry.key, _NOWHERE, len(artifact.data), 0, modified=modified, details=details)
    return StoredEntry(moved, artifact.form, _sha256(artifact.data))


def complaint(stored: StoredEntry) -> str | None:
    """Return what keeps readers from accepting this entry; ``None`` if they accept it."""
    entry, details, most = stored.entry, stored.entry.details, _most_packed(LARGEST_ENTRY)
    numbers: dict[str, tuple[object, int]] = {
        "bytes": (entry.bytes, LARGEST_ENTRY),
        "modified": (0 if entry.modified is None else entry.modified, _LATEST),
        "offset": (stored.offset, most),
        "packed": (stored.pack.packed, most),
        "unpacked": (stored.pack.unpacked, most),
    }
    for name, (number, limit) in numbers.items():
        if not (type(number) is int and 0 <= number <= limit):
            return f"an invalid value of {name}"
    device = () if details.device is None else (details.device,)
    texts = [entry.key, stored.form, stored.sha256, *device, *(details.kernels or ())]
    for table in (details.detail, details.versions):
        if not isinstance(table, dict) or len(table) > MOST_DETAILS:
            return "a value that is not a table of few details"
        texts += [*table, *table.values()]
    if not all(isinstance(text, str) for text in texts) or sum(map(len, texts)) > _MOST_TEXT:
        return "a value that is not a text of limited length"
    if not _DIGEST.fullmatch(stored.sha256):
        return "an invalid checksum"
    wrong = key_complaint(entry.key)
    if wrong is None and (entry.key.startswith("/") or ".." in entry.key.split("/")):
        wrong = "leads outside its root"
    return None if wrong is None else f"the key {entry.key[:200]!r}, which {wrong}"


# ---------------------------------------------------------------------- documents


def canonical(value: object) -> bytes:
    """Return JSON in one form: sorted keys, no spaces, ASCII."""
    return encode_json(value, sort_keys=True, separators=(",", ":"))


def parsed(document: bytes) -> Any:  # noqa: ANN401 - what the document says
    """Parse a document of a store, with integers only. Raises :class:`ValueError` for other numbers, such as NaN."""
    return json.loads(document, parse_float=int, parse_constant=int)


class StoreKey(NamedTuple):
    """A layer and the facts that decide whether its entries can be hit elsewhere; there are none for a layer here."""

    layer: str
    facts: Facts = types.MappingProxyType({})

    def to_bytes(self) -> bytes:
        """Return the key document."""
        return canonical({"schema": KEY_SCHEMA, "layer": self.layer, "facts": dict(self.facts)})

    @property
    def name(self) -> str:
        """Return the first 16 hexadecimal digits of the document's SHA-256."""
        return _sha256(self.to_bytes())[:16]


@contextmanager
def _parsing(name: str) -> Iterator[None]:
    """Turn the errors of parsing foreign content into one line."""
    try:
        yield
    except place.BadStore:
        raise
    except PARSE_ERRORS as error:
        raise place.BadStore(f"{name} cannot be read: {type(error).__name__}") from error


def parse_key(name: str, document: bytes) -> StoreKey:
    """Parse the key document of the portability key with a name. Raises :class:`BadStore`."""
    shown = f"key-{name}"
    _require(shown, _sha256(document)[:16] == name, _CHANGED)
    with _parsing(shown):
        value = parsed(document)
        key = StoreKey(value["layer"], value["facts"])
        valid = _LAYER.fullmatch(key.layer) is not None and len(key.facts) <= MOST_DETAILS
        valid = valid and all(isinstance(text, str) or text is None for text in key.facts.values())
        _require(shown, valid, "no layer, or no facts")
        return key


class Part(NamedTuple):
    """The content of an index part; ``signer`` is its signer in the list of allowed ones, ``None`` without a list."""

    key: StoreKey
    entries: Sequence[StoredEntry]
    is_signed: bool = False
    signer: str | None = None

    @property
    def packs(self) -> frozenset[str]:
        """Return the names of the packs with its entries."""
        return frozenset(stored.pack.name for stored in self.entries)


def part_of(made: int, key: StoreKey, entries: Sequence[StoredEntry]) -> bytes:
    """Return the text of an index part, to be signed."""
    files = (stored.pack for stored in entries)
    packs = {pack.name.removeprefix(PACKS): (pack.packed, pack.unpacked) for pack in files}
    head = {"schema": SCHEMA, "made": made, "layer": key.layer, "facts": dict(key.facts), "packs": packs}
    return b"\n".join((canonical(head), *(canonical(line_of(stored)) for stored in entries), b""))


def parse_part(name: str, text: bytes) -> Part:
    """Parse the text of the trusted index part with a name. Raises :class:`BadStore`."""
    _require(name, text.count(b"\n") <= MOST_ENTRIES + 1, "too many entries")
    lines = text.split(b"\n")
    _require(name, max(map(len, lines)) <= _LONGEST_LINE, "a line that is too long")
    _require(name, not lines.pop(), "no end")
    entries: dict[str, StoredEntry] = {}
    with _parsing(name):
        head = parsed(lines[0] if lines else b"")
        _require(name, head["schema"] == SCHEMA, "an unknown schema; a newer cachectl may read it")
        _require(name, head["made"] == made_of(name), "a time that does not match its name")
        key = parse_key(key_of(name), StoreKey(head["layer"], head["facts"]).to_bytes())
        for line in map(parsed, lines[1:]):
            sha256, kernels = line.pop("pack"), line["kernels"]
            _require(name, line.keys() == {*_ENTRY, *_DETAILS, *_PLACE}, "an entry with other members")
            line["kernels"] = None if kernels is None else tuple(kernels)
            form, digest, offset = (line.pop(member) for member in _PLACE)
            packed, unpacked = head["packs"][sha256]
            details = Details(**{member: line.pop(member) for member in _DETAILS})
            entry = Entry(layer=key.layer, root=_NOWHERE, files=0, details=details, **line)
            stored = StoredEntry(entry, form, digest, Pack(PACKS + sha256, packed, unpacked), offset)
            wrong = complaint(stored)
            _require(name, wrong is None, str(wrong))
            inside = is_name(stored.pack.name) and offset + entry.bytes <= unpacked
            _require(name, inside, "an entry that is not inside its pack")
            _require(name, entry.key not in entries, "an entry twice")
            entries[entry.key] = stored
    return Part(key, tuple(entries.values()))


# ---------------------------------------------------------------------- files


def file_of(content: bytes, label: bytes = b"") -> bytes:
    """Return the file of an index part, with a signature as its label, or of a pack, with random bytes."""
    frame: bytes = _zstd().compress(content, _LEVEL)
    return _FRAME.pack(_SKIPPABLE, len(label)) + label + frame


def open_part(name: str, file: bytes) -> tuple[bytes, bytes]:
    """Return the signed text of an index part's file, and its signature, which may be empty.

    Raises :class:`BadStore` if the file does not match the name.
    """
    label, content = _opened(name, file)
    text = _read_at(name, content, 0, _LARGEST_PART)
    _require(name, not _read_at(name, content, _LARGEST_PART, 1), _BOMB)
    return text, label


def open_pack(entries: Sequence[StoredEntry], file: bytes) -> Iterator[tuple[StoredEntry, Artifact]]:
    """Yield entries with their artifacts from the file of their pack, unpacking one at a time.

    Raises :class:`BadStore` if the file does not match its name, if entries overlap, and for a wrong SHA-256.
    """
    pack = entries[0].pack.name
    _, content = _opened(pack, file)
    # Several index parts may list the same entry.
    places: dict[tuple[int, int], list[StoredEntry]] = {}
    for stored in entries:
        places.setdefault((stored.offset, stored.entry.bytes), []).append(stored)
    for (begin, size), (offset, _) in pairwise(sorted(places)):
        _require(pack, begin + size <= offset, "entries that overlap")
    for (offset, size), listed in sorted(places.items()):
        data = _read_at(pack, content, offset, size)
        for stored in listed:
            fit = len(data) == size and _sha256(data) == stored.sha256
            _require(pack, fit, f"content for {stored.entry.layer} {stored.key} that does not match the index")
            yield stored, stored.artifact(data)
        # Before the next entry is unpacked.
        del data
    _require(pack, not _read_at(pack, content, entries[0].pack.unpacked, 1), _BOMB)


def _opened(name: str, file: bytes) -> tuple[bytes, BinaryIO]:
    """Return the label of a file, and its content, which is unpacked when read. Raises :class:`BadStore`."""
    _require(name, _sha256(file) == name[-64:], _CHANGED)
    _require(name, len(file) >= _FRAME.size, "too few bytes")
    magic, length = _FRAME.unpack_from(file)
    at = _FRAME.size + length
    _require(name, magic == _SKIPPABLE and length <= LARGEST_SIGNATURE and at <= len(file), "no beginning")
    packed = io.BytesIO(file)
    packed.seek(at)
    return file[_FRAME.size : at], _zstd().ZstdFile(packed)


def _read_at(name: str, content: BinaryIO, offset: int, size: int) -> bytes:
    """Return the bytes at an offset, fewer than ``size`` at the end. Raises :class:`BadStore`."""
    # Joining pieces at the end would need twice the memory.
    data = io.BytesIO()
    try:
        content.seek(offset)
        while piece := content.read(min(size - data.tell(), _CHUNK)):
            data.write(piece)
    except (_zstd().ZstdError, EOFError) as error:
        raise place.BadStore(f"{name} is damaged: {error}") from error
    return data.getvalue()


def _most_packed(size: int) -> int:
    # Incompressible bytes grow by a few bytes per block of 128 KiB.
    return size + size // 256 + 4096


#: The largest file of an index part, in bytes.
MOST_PART = _most_packed(_LARGEST_PART) + LARGEST_SIGNATURE


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _require(name: str, condition: bool, what: str) -> None:
    if not condition:
        raise place.BadStore(f"{name} has {what}")


def _zstd() -> types.ModuleType:
    try:
        from cachectl.layers.formats import zstd
    except ImportError as error:
        raise CachectlError("a store needs zstd, and this Python was built without it") from error
    return zstd
