"""The format of a store: its names, key documents, index parts, packs and objects.

An index part lists what one push added for one portability key. It is a skippable frame of zstd with an OpenSSH
signature, empty if unsigned, then a frame with the signed text: one line of canonical JSON about the part, and one for
each entry. Small entries lie in packs, large ones in objects of their own. Whatever is read is held against the SHA-256
in its name, unpacked to at most the announced size, and has to be exactly as it would be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cachectl.exchange.place import BadStore, Stored
from cachectl.layers.base.errors import LARGEST_ENTRY, LARGEST_SIGNATURE, MOST_DETAILS, CachectlError, key_complaint
from cachectl.layers.base.facts import Artifact, Entry
from cachectl.layers.base.lazy import regex

if TYPE_CHECKING:
    import types
    from pathlib import Path

    from cachectl.layers.base.parts import Facts

INDEX: Final = "index/"
SCHEMA: Final = "cachectl/store-index/1"
KEY_SCHEMA: Final = "cachectl/store-key/1"
CONDEMNED_SCHEMA: Final = "cachectl/store-condemned/1"
#: Entries of at least this many bytes are objects of their own.
LARGE: Final = 256 << 10
#: Bytes of entries after which a pack is full.
FULL_PACK: Final = 4 << 20
#: Entries of one index part, and bytes of its lines, after which a writer begins another one.
MOST_ENTRIES: Final = 12_000
FULL_PART: Final = 8 << 20
#: Bytes of the text of an index part, and of one line in it, that a reader takes.
_LARGEST_PART: Final = 32 << 20
_LONGEST_LINE: Final = 1 << 20
#: Characters of all texts of one entry, so that its line is not too long.
_MOST_TEXT: Final = 1 << 16
#: How many times as large as its file the text of an index part may be, beyond one line. Each entry adds a SHA-256 of
#: 32 bytes, which cannot be compressed, and a line of a few hundred bytes.
_MOST_EXPANSION: Final = 100
#: More names than this under ``index/`` are no store.
MOST_NAMES: Final = 1_000_000
#: Bytes of a key document.
LARGEST_KEY: Final = 64 << 10
_LATEST: Final = 253402300799
#: Seconds in which first pushes may meet.
_YOUNG: Final = 600
#: A frame that decompressors skip (RFC 8878, 3.1.2), with its length.
_SKIPPABLE: Final = 0x184D2A50
_FRAME: Final = struct.Struct("<II")
#: Bytes of the salt that makes the name of a pack new.
_SALT: Final = 16
_LEVEL: Final = 3


_PART_NAME: Final = regex(r"(0|[1-9][0-9]{0,11})-([0-9a-f]{16})-([0-9a-f]{64})")
_KEY_NAME: Final = regex(r"key-([0-9a-f]{16})")
_STORE_NAME: Final = regex(r"store-([0-9a-f]{32})")
_CONDEMNED_NAME: Final = regex(r"condemned-(0|[1-9][0-9]{0,11})-([0-9a-f]{64})")
_CONTENT_NAME: Final = regex(r"(?:packs|objects)/([0-9a-f]{64})")
_DIGEST: Final = regex("[0-9a-f]{64}")
#: The registry's pattern of layer names.
_LAYER: Final = regex("[A-Za-z0-9][A-Za-z0-9._-]*")
_STORE_ID: Final = regex("[0-9a-f]{32}")
_CHANGED: Final = "another content than its name says: it was changed"


# ---------------------------------------------------------------------- entries


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a store: its artifact without the bytes, with their number and SHA-256, and where they are.

    ``device`` and ``versions`` are what the layer reads from the entry: the device and libraries it was compiled for.
    It lies in a pack, at an offset in bytes; ``pack`` is ``None`` for an object. ``modified`` is the time of its last
    change where it was pushed, in epoch seconds.
    """

    layer: str
    key: str
    form: str
    bytes: int
    sha256: str
    detail: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    pack: str | None = None
    offset: int = 0
    kernels: tuple[str, ...] | None = None
    modified: int | None = None

    @property
    def place(self) -> str:
        """Return the name of the pack or the object in the store."""
        return f"objects/{self.sha256}" if self.pack is None else f"packs/{self.pack}"

    def to_entry(self, root: Path) -> Entry:
        """Describe it as an entry below a root."""
        return Entry(
            *(self.layer, self.key, root, self.bytes, 0),
            modified=self.modified,
            kernels=self.kernels,
            device=self.device,
            versions=self.versions,
        )


_LINE: Final = frozenset(
    ("key", "form", "bytes", "sha256", "detail", "device", "versions", "pack", "offset", "kernels", "modified")
)


def artifact_of(item: Item, data: bytes) -> Artifact:
    """Return the artifact that an item describes, given its bytes."""
    return Artifact(item.layer, item.key, item.form, data, item.detail)


def complaint(item: Item) -> str | None:
    """Return why no reader would accept this entry; ``None`` if readers accept it."""
    if type(item.bytes) is not int or not 0 <= item.bytes <= LARGEST_ENTRY:
        return f"an entry of {str(item.bytes)[:40]} bytes"
    for table in (item.detail, item.versions):
        if not isinstance(table, dict) or len(table) > MOST_DETAILS:
            return "a value that should be a table of few details and is not"
    device = () if item.device is None else (item.device,)
    tables = (*item.detail, *item.detail.values(), *item.versions, *item.versions.values())
    texts = (item.layer, item.key, item.form, item.sha256, *device, *tables)
    if not all(isinstance(text, str) for text in texts) or sum(map(len, texts)) > _MOST_TEXT:
        return "a value that should be a text of bounded length and is not"
    if not _LAYER.fullmatch(item.layer) or not _DIGEST.fullmatch(item.sha256):
        return "an invalid layer name or checksum"
    wrong = key_complaint(item.key)
    if wrong is None and (item.key.startswith("/") or ".." in item.key.split("/")):
        wrong = "leads outside its root"
    return None if wrong is None else f"the key {item.key[:200]!r}, which {wrong}"


# ---------------------------------------------------------------------- names


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """The name of an index part: when it was made, in epoch seconds, its portability key, and the file's SHA-256."""

    made: int
    key: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.made}-{self.key}-{self.sha256}"


@dataclass(frozen=True, slots=True, order=True)
class CondemnedName:
    """The name of a list of packs and objects that no index part listed at a moment in epoch seconds."""

    moment: int
    sha256: str

    def __str__(self) -> str:
        return f"condemned-{self.moment}-{self.sha256}"


@dataclass(frozen=True, slots=True)
class Names:
    """The index of a store as it was listed; names that are not of a store's form are left out.

    ``stores`` are the identities that pushes have given it, the oldest first, which counts. ``found`` has size and time
    of each name.
    """

    parts: tuple[PartName, ...]
    keys: frozenset[str]
    stores: tuple[str, ...]
    condemned: tuple[CondemnedName, ...]
    found: Mapping[str, Stored]

    @property
    def store(self) -> str | None:
        """Return the identity of the store; ``None`` if there is no store."""
        return self.stores[0] if self.stores else None

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the sorted names of the index parts, which pins the content of the store."""
        return digest_of(self.parts)


def digest_of(parts: Iterable[PartName]) -> str:
    """Return the SHA-256 of the sorted names of index parts, joined by newlines: it pins the content of a store."""
    return hashlib.sha256("\n".join(sorted(map(str, parts))).encode()).hexdigest()


def sort_names(listed: Iterable[Stored]) -> Names:
    """Sort what was listed under ``index/``. Raises :class:`BadStore` for more names than a store can have."""
    parts, keys, stores, condemned, known = set(), set(), [], set(), {}
    for number, stored in enumerate(listed):
        if number >= MOST_NAMES:
            raise BadStore(f"the index has more than {MOST_NAMES:,} names")
        name = stored.name.removeprefix(INDEX)
        if (match := _PART_NAME.fullmatch(name)) is not None:
            parts.add(PartName(int(match[1]), match[2], match[3]))
        elif (match := _KEY_NAME.fullmatch(name)) is not None:
            keys.add(match[1])
        elif (match := _STORE_NAME.fullmatch(name)) is not None:
            stores.append(match[1])
        elif (match := _CONDEMNED_NAME.fullmatch(name)) is not None:
            condemned.add(CondemnedName(int(match[1]), match[2]))
        else:
            continue
        known[name] = stored
    return Names(tuple(sorted(parts)), frozenset(keys), tuple(sorted(stores)), tuple(sorted(condemned)), known)


def is_index_name(name: str) -> bool:
    """Return whether a name has the form of an index part or a key document."""
    return any(form.fullmatch(name) for form in (_PART_NAME, _KEY_NAME))


def is_name(name: str) -> bool:
    """Return whether a name is one that a store has."""
    forms = (_PART_NAME, _KEY_NAME, _STORE_NAME, _CONDEMNED_NAME)
    short = name.removeprefix(INDEX)
    return is_content(name) or (short != name and any(form.fullmatch(short) for form in forms))


def is_content(name: str) -> bool:
    """Return whether a name is that of a pack or an object."""
    return _CONTENT_NAME.fullmatch(name) is not None


def new_store_id(now: float) -> str:
    """Return an identity for a new store. Sorted, the one that was made first comes first."""
    return f"{int(now * 1_000_000):016x}{os.urandom(8).hex()}"[-32:]


def bundle_id(first: Iterable[Item]) -> str:
    """Return the identity of a bundle, which depends on its first entries alone."""
    text = "".join(f"{item.layer} {item.key} {item.sha256}\n" for item in first)
    return f"{'0' * 16}{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_young(store: str, now: float) -> bool:
    """Return whether a store was made so recently that another first push may still give it an older identity."""
    return abs(now - _made(store)) < _YOUNG


def are_twins(store: str, other: str) -> bool:
    """Return whether two identities were made so close together that first pushes may have met."""
    return is_young(store, _made(other))


def _made(store: str) -> float:
    return int(store[:16], 16) / 1_000_000


# ---------------------------------------------------------------------- JSON


def canonical(value: object) -> bytes:
    """Return JSON in the only form that is accepted: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _parsed(name: str, line: bytes, keys: frozenset[str], schema: str | None = None) -> dict[str, Any]:
    """Return an object with these keys that :func:`canonical` has written. Raises :class:`BadStore` for others."""
    try:
        value = json.loads(line)
        same = isinstance(value, dict) and canonical(value) == line
    except (ValueError, RecursionError) as error:
        raise BadStore(f"{name} cannot be read: {type(error).__name__}") from error
    if not same:
        raise BadStore(f"{name} is not in the form that cachectl writes")
    members: dict[str, Any] = value
    _require(name, members.keys() == keys, "other members than it should have")
    _require(name, members.get("schema") == schema, "an unknown schema; a newer cachectl may read it")
    return members


def _require(name: str, condition: bool, what: str) -> None:
    if not condition:
        raise BadStore(f"{name} has {what}")


# ---------------------------------------------------------------------- key documents


@dataclass(frozen=True, slots=True)
class StoreKey:
    """A layer and the facts of a place that decide whether its entries can be hit elsewhere."""

    layer: str
    facts: Facts

    def to_bytes(self) -> bytes:
        """Return the key document."""
        return canonical({"schema": KEY_SCHEMA, "layer": self.layer, "facts": dict(self.facts)})

    @property
    def name(self) -> str:
        """Return the first 16 hexadecimal digits of the document's SHA-256."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]


def parse_key(name: str, document: bytes) -> StoreKey:
    """Read the key document of a name of 16 digits. Raises :class:`BadStore`."""
    shown = f"key-{name}"
    _require(shown, hashlib.sha256(document).hexdigest()[:16] == name, "another content than its name says")
    return _key_in(shown, _parsed(shown, document, frozenset({"schema", "layer", "facts"}), KEY_SCHEMA))


def _key_in(shown: str, value: Mapping[str, Any]) -> StoreKey:
    layer, facts = value["layer"], value["facts"]
    known = isinstance(facts, dict) and len(facts) <= MOST_DETAILS
    plain = known and all(isinstance(text, str) or text is None for text in facts.values())
    _require(shown, isinstance(layer, str) and plain, "no layer, or no facts")
    return StoreKey(layer, facts)


# ---------------------------------------------------------------------- index parts

_HEAD: Final = frozenset({"schema", "store", "made", "layer", "facts", "exposed", "packs"})


@dataclass(frozen=True, slots=True)
class Part:
    """The content of an index part.

    ``store`` is the identity of the store that it was made for, ``made`` when, in epoch seconds. ``exposed``: others
    could write to the layer's folder there. ``packs`` has the bytes of each pack's file, and of its content.
    """

    store: str
    made: int
    key: StoreKey
    exposed: bool
    packs: Mapping[str, tuple[int, int]]
    entries: tuple[Item, ...]

    @property
    def holds(self) -> tuple[str, ...]:
        """Return the names of all packs and objects that it lists."""
        return tuple(dict.fromkeys(item.place for item in self.entries))

    def to_bytes(self) -> bytes:
        """Return the text that is signed."""
        head = canonical(
            {
                "schema": SCHEMA,
                "store": self.store,
                "made": self.made,
                "layer": self.key.layer,
                "facts": dict(self.key.facts),
                "exposed": self.exposed,
                "packs": dict(self.packs),
            }
        )
        lines = (canonical({name: getattr(item, name) for name in _LINE}) for item in self.entries)
        return b"\n".join((head, *lines, b""))


def parse_part(name: PartName, text: bytes) -> Part:
    """Read the text of an index part. Raises :class:`BadStore`."""
    shown = str(name)
    lines = _lines(shown, text)
    value = _parsed(shown, next(lines, b""), _HEAD, SCHEMA)
    store, packs, made = value["store"], value["packs"], value["made"]
    _require(shown, isinstance(store, str) and _STORE_ID.fullmatch(store) is not None, "no valid identity of a store")
    _require(shown, type(made) is int and made == name.made, "another time than its name says")
    key = _key_in(shown, value)
    _require(shown, key.name == name.key, "another portability key than its name says")
    _require(shown, type(value["exposed"]) is bool, "an invalid flag")
    _require(shown, isinstance(packs, dict) and all(map(_is_pack, packs.items())), "an invalid pack")
    entries = tuple(_item(shown, key.layer, packs, line) for line in lines)
    _require(shown, len({item.key for item in entries}) == len(entries), "an entry twice")
    sizes = {pack: (packed, unpacked) for pack, (packed, unpacked) in packs.items()}
    return Part(store, made, key, value["exposed"], sizes, entries)


def _lines(shown: str, text: bytes) -> Iterator[bytes]:
    _require(shown, text.endswith(b"\n"), "no end")
    at = 0
    while at < len(text):
        end = text.index(b"\n", at)
        _require(shown, end - at <= _LONGEST_LINE, "a line that is too long")
        yield text[at:end]
        at = end + 1


def _is_pack(pack: tuple[str, object]) -> bool:
    name, sizes = pack
    return (
        _DIGEST.fullmatch(name) is not None
        and isinstance(sizes, list)
        and len(sizes) == 2  # noqa: PLR2004 - packed and unpacked
        and all(type(size) is int and 0 <= size <= _most_packed(LARGEST_ENTRY) for size in sizes)
    )


def _item(shown: str, layer: str, packs: Mapping[str, Sequence[int]], line: bytes) -> Item:
    value = _parsed(shown, line, _LINE)
    kernels, pack, offset, modified = (value[name] for name in ("kernels", "pack", "offset", "modified"))
    if kernels is not None:
        _require(shown, isinstance(kernels, list) and all(isinstance(name, str) for name in kernels), "invalid kernels")
        value["kernels"] = tuple(kernels)
    item = Item(layer, **value)
    if (wrong := complaint(item)) is not None:
        raise BadStore(f"{shown} has {wrong}")
    _require(shown, modified is None or (type(modified) is int and 0 <= modified <= _LATEST), "an invalid time")
    _require(shown, pack is None or (isinstance(pack, str) and pack in packs), "an entry in no pack")
    room = item.bytes if pack is None else packs[pack][1]
    _require(shown, type(offset) is int and 0 <= offset <= room - item.bytes, "an entry that is not inside its pack")
    return item


def part_file(text: bytes, signature: bytes) -> bytes:
    """Return the file of an index part."""
    return _FRAME.pack(_SKIPPABLE, len(signature)) + signature + object_file(text)


def open_part(name: PartName, file: bytes) -> tuple[bytes, bytes]:
    """Return the signed text in the file of an index part, and its signature, empty if there is none.

    Raises :class:`BadStore` if the file is not the one that the name says.
    """
    shown = str(name)
    _require(shown, hashlib.sha256(file).hexdigest() == name.sha256, _CHANGED)
    signature, frame = _skipped(shown, file)
    _require(shown, len(signature) <= LARGEST_SIGNATURE, "a signature that is too large")
    most = min(_LARGEST_PART, len(frame) * _MOST_EXPANSION + _LONGEST_LINE)
    return _unpack(shown, frame, most, exactly=False), signature


# ---------------------------------------------------------------------- packs and objects


def pack_file(contents: Iterable[bytes], *, salted: bool) -> bytes:
    """Return the file of a pack with these entries, one after the other.

    A new salt makes its name new, so that no pack is removed as garbage while it is pushed again.
    """
    return part_file(b"".join(contents), os.urandom(_SALT) if salted else b"")


def object_file(data: bytes) -> bytes:
    """Return the file of an object."""
    packed: bytes = _zstd().compress(data, _LEVEL)
    return packed


def most_bytes(part: Part, item: Item) -> int:
    """Return the size of the file in which an entry lies: of a pack exactly, of an object at most."""
    return _most_packed(item.bytes) if item.pack is None else part.packs[item.pack][0]


def open_entries(part: Part, items: Sequence[Item], file: bytes) -> list[tuple[Item, bytes]]:
    """Return entries with their bytes out of the file of the pack or object in which all of them lie.

    Raises :class:`BadStore` if one has another SHA-256.
    """
    first = items[0]
    if first.pack is None:
        content = _unpack(first.place, file, first.bytes)
    else:
        _require(first.place, hashlib.sha256(file).hexdigest() == first.pack, _CHANGED)
        content = _unpack(first.place, _skipped(first.place, file)[1], part.packs[first.pack][1])
    return [(item, _cut(item, content)) for item in items]


def _cut(item: Item, content: bytes) -> bytes:
    data = content[item.offset : item.offset + item.bytes]
    what = _CHANGED if item.pack is None else f"another content for {item.layer} {item.key} than the index says"
    _require(item.place, len(data) == item.bytes and hashlib.sha256(data).hexdigest() == item.sha256, what)
    return data


def _most_packed(size: int) -> int:
    # Compressed, incompressible bytes grow by some bytes in each block of 128 KiB.
    return size + size // 256 + 4096


#: The largest file of an index part, and of a list of condemned names, in bytes.
MOST_PART: Final = _most_packed(_LARGEST_PART) + LARGEST_SIGNATURE


def _skipped(shown: str, file: bytes) -> tuple[bytes, bytes]:
    """Return the content of the skippable frame that begins a file, and the rest of the file."""
    _require(shown, len(file) >= _FRAME.size, "too few bytes")
    magic, length = _FRAME.unpack_from(file)
    _require(shown, magic == _SKIPPABLE and length <= len(file) - _FRAME.size, "no valid beginning")
    end = _FRAME.size + length
    return file[_FRAME.size : end], file[end:]


def _unpack(shown: str, frame: bytes, most: int, *, exactly: bool = True) -> bytes:
    """Decompress one frame to at most, or exactly, a number of bytes. Raises :class:`BadStore`."""
    zstd = _zstd()
    frames = zstd.decompressor()
    try:
        data: bytes = frames.decompress(frame, max_length=most + 1)
    except zstd.ZstdError as error:
        raise BadStore(f"{shown} is damaged: {error}") from error
    _require(shown, len(data) <= most, "more content than announced: a decompression bomb")
    whole = frames.eof and not frames.unused_data and (len(data) == most or not exactly)
    _require(shown, whole, "less content than announced, or bytes after its end")
    return data


# ---------------------------------------------------------------------- condemned names


def condemned_file(names: Iterable[str]) -> bytes:
    """Return the document that condemns names: they are removed after a grace period if nothing lists them then."""
    return canonical({"schema": CONDEMNED_SCHEMA, "names": sorted(names)})


def parse_condemned(name: CondemnedName, document: bytes) -> frozenset[str]:
    """Return the names in a list of condemned names. Raises :class:`BadStore`."""
    shown = str(name)
    _require(shown, hashlib.sha256(document).hexdigest() == name.sha256, "another content than its name says")
    names = _parsed(shown, document, frozenset({"schema", "names"}), CONDEMNED_SCHEMA)["names"]
    fit = isinstance(names, list) and all(isinstance(held, str) and is_content(held) for held in names)
    _require(shown, fit, "an invalid name")
    return frozenset(names)


def _zstd() -> types.ModuleType:
    try:
        from cachectl.layers.formats import zstd
    except ImportError as error:
        raise CachectlError("a store needs zstd, and this Python was built without it") from error
    return zstd
