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
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.facts import Artifact, Entry
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.limits import LARGEST_ENTRY, LARGEST_SIGNATURE, MOST_DETAILS, key_complaint

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
#: Bytes of a key document, and of a list of condemned names.
LARGEST_KEY: Final = 64 << 10
LARGEST_CONDEMNED: Final = 64 << 20
_LATEST: Final = 253402300799
#: Seconds in which first pushes may meet.
_YOUNG: Final = 600
#: A frame that decompressors skip (RFC 8878, 3.1.2), with its length.
_SKIPPABLE: Final = 0x184D2A50
_FRAME: Final = struct.Struct("<II")
#: Bytes of the salt that makes the name of a pack new.
SALT: Final = 16
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


# ---------------------------------------------------------------------- entries


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a store: its artifact without the bytes, with their number and SHA-256.

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
    """Return the SHA-256 of the sorted names of index parts, joined by newlines."""
    return hashlib.sha256("\n".join(sorted(map(str, parts))).encode()).hexdigest()


def sort_names(listed: Iterable[Stored]) -> Names:
    """Sort what was listed under ``index/``. Raises :class:`BadStore` for more names than a store can have."""
    parts, keys, stores, condemned, found = [], set(), [], [], {}
    for number, one in enumerate(listed):
        if number >= MOST_NAMES:
            raise BadStore(f"the index has more than {MOST_NAMES:,} names")
        name = one.name.removeprefix(INDEX)
        if (match := _PART_NAME.fullmatch(name)) is not None:
            parts.append(PartName(int(match[1]), match[2], match[3]))
        elif (match := _KEY_NAME.fullmatch(name)) is not None:
            keys.add(match[1])
        elif (match := _STORE_NAME.fullmatch(name)) is not None:
            stores.append(match[1])
        elif (match := _CONDEMNED_NAME.fullmatch(name)) is not None:
            condemned.append(CondemnedName(int(match[1]), match[2]))
        else:
            continue
        found[name] = one
    return Names(
        tuple(sorted(set(parts))), frozenset(keys), tuple(sorted(stores)), tuple(sorted(set(condemned))), found
    )


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


def bundle_id(first: Iterable[Stocked]) -> str:
    """Return the identity of a bundle, which depends on its first entries alone."""
    digest = hashlib.sha256()
    for one in first:
        digest.update(f"{one.item.layer} {one.item.key} {one.item.sha256}\n".encode())
    return f"{'0' * 16}{digest.hexdigest()[:16]}"


def is_young(store: str, now: float) -> bool:
    """Return whether a store was made so recently that another first push may still give it an older identity."""
    return abs(now - _made(store)) < _YOUNG


def are_twins(one: str, other: str) -> bool:
    """Return whether two identities were made so close together that first pushes may have met."""
    return abs(_made(one) - _made(other)) < _YOUNG


def _made(store: str) -> float:
    return int(store[:16], 16) / 1_000_000


# ---------------------------------------------------------------------- JSON


def canonical(value: object) -> bytes:
    """Return JSON in the only form that is accepted: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _parsed(name: str, line: bytes) -> dict[str, Any]:
    """Return an object that was written by :func:`canonical`. Raises :class:`BadStore` for anything else."""
    try:
        value = json.loads(line)
        same = isinstance(value, dict) and canonical(value) == line
    except (ValueError, RecursionError) as error:
        raise BadStore(f"{name} cannot be read: {type(error).__name__}") from error
    if not same:
        raise BadStore(f"{name} is not in the form that cachectl writes")
    found: dict[str, Any] = value
    return found


def _demand(name: str, condition: bool, what: str) -> None:
    if not condition:
        raise BadStore(f"{name} has {what}")


def _demand_keys(name: str, value: Mapping[str, Any], keys: frozenset[str]) -> None:
    _demand(name, value.keys() == keys, "other members than it should have")


def is_facts(value: object) -> bool:
    """Return whether a value is the facts of a portability key: texts by name, ``None`` for unknown."""
    return (
        isinstance(value, dict)
        and len(value) <= MOST_DETAILS
        and all(isinstance(text, str) or text is None for text in value.values())
    )


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
    _demand(shown, hashlib.sha256(document).hexdigest()[:16] == name, "another content than its name says")
    value = _parsed(shown, document)
    _demand_keys(shown, value, frozenset({"schema", "layer", "facts"}))
    _demand(shown, value["schema"] == KEY_SCHEMA, "an unknown schema; a newer cachectl may read it")
    _demand(shown, isinstance(value["layer"], str) and is_facts(value["facts"]), "no layer, or no facts")
    return StoreKey(value["layer"], value["facts"])


# ---------------------------------------------------------------------- index parts


@dataclass(frozen=True, slots=True)
class Stocked:
    """An entry of a store: the pack it lies in, with the offset in bytes; ``pack`` is ``None`` for an object.

    ``modified`` is the time of its last change where it was pushed, in epoch seconds.
    """

    item: Item
    pack: str | None = None
    offset: int = 0
    kernels: tuple[str, ...] | None = None
    modified: int | None = None

    @property
    def place(self) -> str:
        """Return the name of the pack or the object in the store."""
        return f"objects/{self.item.sha256}" if self.pack is None else f"packs/{self.pack}"

    def to_entry(self, root: Path) -> Entry:
        """Describe it as an entry below a root."""
        item = self.item
        return Entry(
            *(item.layer, item.key, root, item.bytes, 0),
            modified=self.modified,
            kernels=self.kernels,
            device=item.device,
            versions=item.versions,
        )

    def to_line(self) -> bytes:
        """Return its line in an index part."""
        item = self.item
        return canonical(
            {
                "key": item.key,
                "form": item.form,
                "bytes": item.bytes,
                "sha256": item.sha256,
                "detail": dict(item.detail),
                "device": item.device,
                "versions": dict(item.versions),
                "pack": self.pack,
                "offset": self.offset,
                "kernels": None if self.kernels is None else list(self.kernels),
                "modified": self.modified,
            }
        )


_LINE: Final = frozenset(
    ("key", "form", "bytes", "sha256", "detail", "device", "versions", "pack", "offset", "kernels", "modified")
)
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
    entries: tuple[Stocked, ...]

    @property
    def holds(self) -> tuple[str, ...]:
        """Return the names of all packs and objects that it lists."""
        return tuple(dict.fromkeys(one.place for one in self.entries))

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
                "packs": {name: list(sizes) for name, sizes in self.packs.items()},
            }
        )
        return b"\n".join((head, *(one.to_line() for one in self.entries), b""))


def parse_part(name: PartName, text: bytes) -> Part:
    """Read the text of an index part. Raises :class:`BadStore`."""
    shown = str(name)
    lines = _lines(shown, text)
    value = _parsed(shown, next(lines, b""))
    _demand_keys(shown, value, _HEAD)
    _demand(shown, value["schema"] == SCHEMA, "an unknown schema; a newer cachectl may read it")
    store, layer, packs = value["store"], value["layer"], value["packs"]
    _demand(shown, isinstance(store, str) and _STORE_ID.fullmatch(store) is not None, "no valid identity of a store")
    _demand(shown, type(value["made"]) is int and value["made"] == name.made, "another time than its name says")
    _demand(shown, isinstance(layer, str) and is_facts(value["facts"]), "no layer, or no facts")
    key = StoreKey(layer, value["facts"])
    _demand(shown, key.name == name.key, "another portability key than its name says")
    _demand(shown, type(value["exposed"]) is bool, "an invalid flag")
    _demand(shown, isinstance(packs, dict) and all(map(_is_pack, packs.items())), "an invalid pack")
    entries = tuple(_entry(shown, layer, packs, line) for line in lines)
    _demand(shown, len({one.item.key for one in entries}) == len(entries), "an entry twice")
    return Part(
        store, name.made, key, value["exposed"], {one: (size[0], size[1]) for one, size in packs.items()}, entries
    )


def _lines(shown: str, text: bytes) -> Iterator[bytes]:
    _demand(shown, text.endswith(b"\n"), "no end")
    at = 0
    while at < len(text):
        end = text.index(b"\n", at)
        _demand(shown, end - at <= _LONGEST_LINE, "a line that is too long")
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


def _entry(shown: str, layer: str, packs: Mapping[str, Sequence[int]], line: bytes) -> Stocked:
    value = _parsed(shown, line)
    _demand_keys(shown, value, _LINE)
    item = Item(layer, *(value[name] for name in ("key", "form", "bytes", "sha256", "detail", "device", "versions")))
    if (wrong := complaint(item)) is not None:
        raise BadStore(f"{shown} has {wrong}")
    pack, offset, kernels, modified = (value[name] for name in ("pack", "offset", "kernels", "modified"))
    _demand(shown, type(offset) is int and offset >= 0, "an invalid offset")
    _demand(shown, modified is None or (type(modified) is int and 0 <= modified <= _LATEST), "an invalid time")
    if pack is not None:
        _demand(shown, isinstance(pack, str) and pack in packs, "an entry in no pack")
        _demand(shown, offset + item.bytes <= packs[pack][1], "an entry that is not inside its pack")
    else:
        _demand(shown, offset == 0, "an invalid offset")
    if kernels is not None:
        _demand(shown, isinstance(kernels, list) and all(isinstance(one, str) for one in kernels), "invalid kernels")
        kernels = tuple(kernels)
    return Stocked(item, pack, offset, kernels, modified)


def part_file(text: bytes, signature: bytes) -> bytes:
    """Return the file of an index part."""
    return _FRAME.pack(_SKIPPABLE, len(signature)) + signature + _compressed(text)


def open_part(name: PartName, file: bytes) -> tuple[bytes, bytes]:
    """Return the signed text in the file of an index part, and its signature, empty if there is none.

    Raises :class:`BadStore` if the file is not the one that the name says.
    """
    shown = str(name)
    _demand(
        shown, hashlib.sha256(file).hexdigest() == name.sha256, "another content than its name says: it was changed"
    )
    signature, frame = _skipped(shown, file)
    _demand(shown, len(signature) <= LARGEST_SIGNATURE, "a signature that is too large")
    most = min(_LARGEST_PART, len(frame) * _MOST_EXPANSION + _LONGEST_LINE)
    return _unpack(shown, frame, most, exactly=False), signature


def most_part() -> int:
    """Return the largest file of an index part in bytes."""
    return _most_packed(_LARGEST_PART) + LARGEST_SIGNATURE


# ---------------------------------------------------------------------- packs and objects


def pack_file(contents: Iterable[bytes], salt: bytes) -> bytes:
    """Return the file of a pack with these entries, one after the other.

    A new salt makes its name new, so that no pack is removed as garbage while it is pushed again.
    """
    return _FRAME.pack(_SKIPPABLE, len(salt)) + salt + _compressed(b"".join(contents))


def open_pack(name: str, file: bytes, size: int) -> bytes:
    """Return the ``size`` bytes in the file of a pack. Raises :class:`BadStore`."""
    shown = f"packs/{name}"
    _demand(shown, hashlib.sha256(file).hexdigest() == name, "another content than its name says: it was changed")
    return _unpack(shown, _skipped(shown, file)[1], size)


def object_file(data: bytes) -> bytes:
    """Return the file of an object."""
    return _compressed(data)


def open_object(name: str, file: bytes, size: int) -> bytes:
    """Return the ``size`` bytes in the file of an object, whose name is their SHA-256. Raises :class:`BadStore`."""
    shown = f"objects/{name}"
    data = _unpack(shown, file, size)
    _demand(shown, hashlib.sha256(data).hexdigest() == name, "another content than its name says: it was changed")
    return data


def cut(one: Stocked, content: bytes) -> bytes:
    """Return an entry out of the content of its pack. Raises :class:`BadStore` for another SHA-256."""
    data = content[one.offset : one.offset + one.item.bytes]
    if hashlib.sha256(data).hexdigest() != one.item.sha256:
        raise BadStore(f"{one.place} has another content for {one.item.layer} {one.item.key} than the index says")
    return data


def most_object(size: int) -> int:
    """Return how many bytes the file of an object of a size can have at most."""
    return _most_packed(min(size, LARGEST_ENTRY))


def _most_packed(size: int) -> int:
    # Compressed, incompressible bytes grow by some bytes in each block of 128 KiB.
    return size + size // 256 + 4096


def _compressed(data: bytes) -> bytes:
    packed: bytes = _zstd().compress(data, _LEVEL)
    return packed


def _skipped(shown: str, file: bytes) -> tuple[bytes, bytes]:
    """Return the content of the skippable frame that begins a file, and the rest of the file."""
    _demand(shown, len(file) >= _FRAME.size, "too few bytes")
    magic, length = _FRAME.unpack_from(file)
    _demand(shown, magic == _SKIPPABLE and length <= len(file) - _FRAME.size, "no valid beginning")
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
    _demand(shown, len(data) <= most, "more content than announced: a decompression bomb")
    whole = frames.eof and not frames.unused_data and (len(data) == most or not exactly)
    _demand(shown, whole, "less content than announced, or bytes after its end")
    return data


# ---------------------------------------------------------------------- condemned names


def condemned_file(names: Iterable[str]) -> bytes:
    """Return the document that condemns names: they are removed after a grace period if nothing lists them then."""
    return canonical({"schema": CONDEMNED_SCHEMA, "names": sorted(names)})


def parse_condemned(name: CondemnedName, document: bytes) -> frozenset[str]:
    """Return the names in a list of condemned names. Raises :class:`BadStore`."""
    shown = str(name)
    _demand(shown, hashlib.sha256(document).hexdigest() == name.sha256, "another content than its name says")
    value = _parsed(shown, document)
    _demand_keys(shown, value, frozenset({"schema", "names"}))
    names = value["names"]
    fit = isinstance(names, list) and all(isinstance(one, str) and is_content(one) for one in names)
    _demand(shown, value["schema"] == CONDEMNED_SCHEMA and fit, "an invalid name")
    return frozenset(names)


def _zstd() -> types.ModuleType:
    try:
        from cachectl.layers.formats import zstd
    except ImportError as error:
        raise CachectlError("a store needs zstd, and this Python was built without it") from error
    return zstd
