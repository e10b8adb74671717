"""The format of a store: its names, key documents, index parts and packs.

An index part lists what one push added for one portability key, and a pack holds the bytes of entries; a large entry
has a pack of its own. Both are a skippable frame of zstd, with the OpenSSH signature of a part or random bytes that
make the name of a pack new, and a frame with the content. Each is held against the SHA-256 in its name and unpacked to
at most the announced size; a part is parsed only after it is trusted.
"""

from __future__ import annotations

import hashlib
import json
import struct
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cachectl.exchange import place
from cachectl.layers import core

INDEX = "index/"
SCHEMA = "cachectl/store-index/1"
KEY_SCHEMA = "cachectl/store-key/1"
#: Bytes of entries after which a pack is full.
FULL_PACK = 4 << 20
#: Entries of at least this many bytes have a pack of their own, so that no other entry is read with them.
LARGE = 256 << 10
#: Entries of one index part, and bytes of its lines, after which a writer begins another one.
MOST_ENTRIES = 12_000
FULL_PART = 8 << 20
#: Bytes of the text of an index part, and of one line in it, that a reader takes.
_LARGEST_PART = 32 << 20
_LONGEST_LINE = 1 << 20
#: Characters of all texts of one entry, so that its line is not too long.
_MOST_TEXT = 1 << 16
#: Bytes of a key document.
LARGEST_KEY = 64 << 10
_LATEST = 253402300799
#: A frame that decompressors skip (RFC 8878, 3.1.2), with its length.
_SKIPPABLE = 0x184D2A50
_FRAME = struct.Struct("<II")
_LEVEL = 3

_NAME = core.regex(
    "index/(0|[1-9][0-9]{0,11})-([0-9a-f]{16})-([0-9a-f]{64})|index/key-([0-9a-f]{16})|packs/[0-9a-f]{64}"
)
_DIGEST = core.regex("[0-9a-f]{64}")
#: The registry's pattern of layer names.
_LAYER = core.regex("[A-Za-z0-9][A-Za-z0-9._-]*")
_CHANGED = "another content than its name says: it was changed"


class PartName(NamedTuple):
    """The name of an index part: when it was made, in epoch seconds, its portability key, and the file's SHA-256."""

    made: int
    key: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.made}-{self.key}-{self.sha256}"


def digest_of(parts: Iterable[PartName]) -> str:
    """Return the SHA-256 of the sorted names of index parts, joined by newlines: it pins the content of a store."""
    return hashlib.sha256("\n".join(sorted(map(str, parts))).encode()).hexdigest()


def sort_names(listed: Iterable[place.Stored]) -> tuple[tuple[PartName, ...], frozenset[str]]:
    """Return the index parts among what was listed under ``index/``, the oldest first, and the names of all its files.

    Raises :class:`BadStore` for more names than a store can have.
    """
    parts, files = set(), set()
    for number, stored in enumerate(listed):
        _require("the index", number < place.MOST_NAMES, f"more than {place.MOST_NAMES:,} names")
        match = _NAME.fullmatch(stored.name)
        if match is not None and stored.name.startswith(INDEX):
            files.add(stored.name.removeprefix(INDEX))
            if match[1] is not None:
                parts.add(PartName(int(match[1]), match[2], match[3]))
    return tuple(sorted(parts)), frozenset(files)


def is_name(name: str) -> bool:
    """Return whether a name is one that a store has."""
    return _NAME.fullmatch(name) is not None


class Pack(NamedTuple):
    """A pack: the SHA-256 of its file, and the bytes of its file and of its content."""

    sha256: str
    packed: int
    unpacked: int

    @property
    def name(self) -> str:
        """Return the name of the pack in the store."""
        return f"packs/{self.sha256}"


@dataclass(frozen=True, slots=True)
class Item(core.Entry):
    """An entry of a store: ``bytes`` and ``sha256`` are those of its artifact, which lies in a pack, at an offset.

    ``form`` and ``detail`` are those of the artifact. It has no root. ``modified`` is the time of its last change where
    it was pushed, in whole seconds.
    """

    form: str = ""
    sha256: str = ""
    pack: Pack | None = None
    offset: int = 0
    as_json: ClassVar[core.AsJson] = core.AsJson(
        hidden=("stamp", "guest", "disk", "idle_only", "sums", "fixed", "form", "sha256", "pack", "offset"),
        also=("state",),
        optional=("because",),
    )

    def to_line(self) -> dict[str, object]:
        """Return what its line in an index part says."""
        return {name: getattr(self, name) for name in _LINE} | {"pack": self.pack and self.pack.sha256}


#: What the line of an entry says besides the name of its pack.
_LINE = ("key", "form", "bytes", "sha256", "detail", "device", "versions", "kernels", "modified", "offset")
_NOWHERE = Path()


def item_of(entry: core.Entry, artifact: core.Artifact, *, with_time: bool = True) -> Item:
    """Return the item of an entry that was read, which has no place in a store yet."""
    is_known = with_time and entry.modified is not None and entry.modified >= 0
    return Item(
        *(entry.layer, entry.key, _NOWHERE, len(artifact.data), 0),
        modified=int(entry.modified or 0) if is_known else None,
        kernels=entry.kernels,
        device=entry.device,
        versions=dict(entry.versions),
        detail=dict(artifact.detail),
        form=artifact.form,
        sha256=hashlib.sha256(artifact.data).hexdigest(),
    )


def complaint(item: Item) -> str | None:
    """Return why no reader would accept this entry; ``None`` if readers accept it."""
    numbers = (item.bytes, item.offset, 0 if item.modified is None else item.modified)
    if any(type(number) is not int or number < 0 for number in numbers):
        return "an invalid size, offset or time"
    if item.bytes > core.LARGEST_ENTRY or (item.modified or 0) > _LATEST:
        return f"an entry of {item.bytes} bytes, or of a time to come"
    device = "" if item.device is None else item.device
    texts = [item.layer, item.key, item.form, item.sha256, device, *(item.kernels or ())]
    for table in (item.detail, item.versions):
        if not isinstance(table, dict) or len(table) > core.MOST_DETAILS:
            return "a value that should be a table of few details and is not"
        texts += [*table, *table.values()]
    if not all(isinstance(text, str) for text in texts) or sum(map(len, texts)) > _MOST_TEXT:
        return "a value that should be a text of bounded length and is not"
    if not _LAYER.fullmatch(item.layer) or not _DIGEST.fullmatch(item.sha256):
        return "an invalid layer name or checksum"
    wrong = core.key_complaint(item.key)
    if wrong is None and (item.key.startswith("/") or ".." in item.key.split("/")):
        wrong = "leads outside its root"
    return None if wrong is None else f"the key {item.key[:200]!r}, which {wrong}"


def canonical(value: object) -> bytes:
    """Return JSON in one form: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


class StoreKey(NamedTuple):
    """A layer and the facts of a place that decide whether its entries can be hit elsewhere."""

    layer: str
    facts: core.Facts

    def to_bytes(self) -> bytes:
        """Return the key document."""
        return canonical({"schema": KEY_SCHEMA, "layer": self.layer, "facts": dict(self.facts)})

    @property
    def name(self) -> str:
        """Return the first 16 hexadecimal digits of the document's SHA-256."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]


@contextmanager
def _parsing(name: str) -> Iterator[None]:
    """Turn the errors of reading what somebody else wrote into one line."""
    try:
        yield
    except place.BadStore:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise place.BadStore(f"{name} cannot be read: {type(error).__name__}") from error


def parse_key(name: str, document: bytes | Mapping[str, Any]) -> StoreKey:
    """Read a key document, or the first line of an index part, of the portability key of a name.

    Raises :class:`BadStore`.
    """
    shown = f"key-{name}"
    with _parsing(shown):
        value = json.loads(document) if isinstance(document, bytes) else document
        key = StoreKey(value["layer"], value["facts"])
        valid = isinstance(key.layer, str) and len(key.facts) <= core.MOST_DETAILS
        valid = valid and all(isinstance(text, str) or text is None for text in key.facts.values())
        _require(shown, valid, "no layer, or no facts")
        is_same = not isinstance(document, bytes) or key.to_bytes() == document
        _require(shown, is_same and key.name == name, _CHANGED)
        return key


class Part(NamedTuple):
    """The content of an index part; ``made`` is when, in epoch seconds.

    ``signer`` is who signed it, as the first list that allows it says; ``None`` without lists.
    """

    made: int
    key: StoreKey
    entries: tuple[Item, ...]
    is_signed: bool = False
    signer: str | None = None

    @property
    def packs(self) -> dict[str, Pack]:
        """Return the packs with its entries, by their names."""
        return {item.pack.name: item.pack for item in self.entries if item.pack is not None}

    def to_bytes(self) -> bytes:
        """Return the text that is signed."""
        head = {
            "schema": SCHEMA,
            "made": self.made,
            "layer": self.key.layer,
            "facts": dict(self.key.facts),
            "packs": {pack.sha256: (pack.packed, pack.unpacked) for pack in self.packs.values()},
        }
        return b"\n".join((canonical(head), *(canonical(item.to_line()) for item in self.entries), b""))


def parse_part(name: PartName, text: bytes) -> Part:
    """Read the text of a trusted index part. Raises :class:`BadStore`."""
    shown = str(name)
    _require(shown, text.count(b"\n") <= MOST_ENTRIES + 1, "too many entries")
    lines = text.split(b"\n")
    _require(shown, max(map(len, lines)) <= _LONGEST_LINE, "a line that is too long")
    most, entries = _most_packed(core.LARGEST_ENTRY), []
    with _parsing(shown):
        head = json.loads(lines[0])
        _require(shown, head["schema"] == SCHEMA, "an unknown schema; a newer cachectl may read it")
        _require(shown, head["made"] == name.made, "another time than its name says")
        packs = {sha256: Pack(sha256, *sizes) for sha256, sizes in head["packs"].items()}
        for pack in packs.values():
            fit = all(type(size) is int and 0 <= size <= most for size in (pack.packed, pack.unpacked))
            _require(shown, fit and _DIGEST.fullmatch(pack.sha256) is not None, "an invalid pack")
        key = parse_key(name.key, head)
        for line in map(json.loads, lines[1:-1]):
            pack, kernels = packs[line.pop("pack")], line["kernels"]
            _require(shown, line.keys() == set(_LINE), "an entry with other members")
            line["kernels"] = None if kernels is None else tuple(kernels)
            item = Item(layer=key.layer, root=_NOWHERE, files=0, pack=pack, **line)
            wrong = complaint(item)
            _require(shown, wrong is None, str(wrong))
            _require(shown, item.offset + item.bytes <= pack.unpacked, "an entry that is not inside its pack")
            entries.append(item)
    _require(shown, not lines[-1], "no end")
    _require(shown, len({item.key for item in entries}) == len(entries), "an entry twice")
    return Part(name.made, key, tuple(entries))


def file_of(content: bytes, label: bytes = b"") -> bytes:
    """Return the file of an index part with a signature as its label, or of a pack with random bytes."""
    frame: bytes = _zstd().compress(content, _LEVEL)
    return _FRAME.pack(_SKIPPABLE, len(label)) + label + frame


def open_part(name: PartName, file: bytes) -> tuple[bytes, bytes]:
    """Return the signed text in the file of an index part, and its signature, empty if there is none.

    Raises :class:`BadStore` if the file is not the one that the name says.
    """
    return _opened(str(name), name.sha256, file, _LARGEST_PART)


def open_pack(items: Iterable[Item], pack: Pack, file: bytes) -> list[tuple[Item, core.Artifact]]:
    """Return entries with their artifacts out of the file of a pack, in which all of them lie.

    Raises :class:`BadStore` if the file is another, or an entry has another SHA-256.
    """
    content, _ = _opened(pack.name, pack.sha256, file, pack.unpacked)
    entries = []
    for item in items:
        data = content[item.offset : item.offset + item.bytes]
        fit = len(data) == item.bytes and hashlib.sha256(data).hexdigest() == item.sha256
        _require(pack.name, fit, f"another content for {item.layer} {item.key} than the index says")
        entries.append((item, artifact_of(item, data)))
    return entries


def artifact_of(item: Item, data: bytes) -> core.Artifact:
    """Return the artifact of an item with these bytes."""
    return core.Artifact(item.layer, item.key, item.form, data, item.detail)


def _opened(shown: str, sha256: str, file: bytes, most: int) -> tuple[bytes, bytes]:
    """Return the content of a file, of at most a number of bytes, and its label. Raises :class:`BadStore`."""
    _require(shown, hashlib.sha256(file).hexdigest() == sha256, _CHANGED)
    _require(shown, len(file) >= _FRAME.size, "too few bytes")
    magic, length = _FRAME.unpack_from(file)
    at = _FRAME.size + length
    _require(shown, magic == _SKIPPABLE and length <= core.LARGEST_SIGNATURE and at <= len(file), "no beginning")
    zstd = _zstd()
    frames = zstd.decompressor()
    try:
        content: bytes = frames.decompress(memoryview(file)[at:], max_length=most + 1)
    except zstd.ZstdError as error:
        raise place.BadStore(f"{shown} is damaged: {error}") from error
    _require(shown, len(content) <= most, "more content than announced: a decompression bomb")
    _require(shown, frames.eof and not frames.unused_data, "less content than announced, or bytes after its end")
    return content, file[_FRAME.size : at]


def _most_packed(size: int) -> int:
    # Compressed, incompressible bytes grow by some bytes in each block of 128 KiB.
    return size + size // 256 + 4096


#: The largest file of an index part, in bytes.
MOST_PART = _most_packed(_LARGEST_PART) + core.LARGEST_SIGNATURE


def _require(name: str, condition: bool, what: str) -> None:
    if not condition:
        raise place.BadStore(f"{name} has {what}")


def _zstd() -> types.ModuleType:
    try:
        from cachectl.layers.formats import zstd
    except ImportError as error:
        raise core.CachectlError("a store needs zstd, and this Python was built without it") from error
    return zstd
