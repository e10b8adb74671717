"""A shared store in a repository of an OCI registry.

Each name ``index/NAME`` is a tag ``TAG.NAME`` of an artifact manifest. The manifest has the content of the name, and
the packs and objects that the name lists, so that the registry's own garbage collection keeps them. Small content
stands in an annotation of the manifest: an upload of a blob takes two requests. Other content is a layer. Packs and
objects have no tags.

``TAG`` is an OCI image index of all these manifests. It is written after them and may lack the newest: the list of tags
is what counts. A URL with a digest names such an index, and so exactly one state of the store.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from cachectl.layers.base.errors import BadRequest
from cachectl.moving.transfer import TransferFailed
from cachectl.sharing.oci.repository import (
    EMPTY,
    INDEX,
    MANIFEST,
    REFERENCE,
    TITLE,
    BlobUnknown,
    Manifest,
    Reference,
    Repository,
    digest_of,
)
from cachectl.sharing.place import BadStore, Missing, Stored

#: Of the image index, and of the manifests in it.
STORE_TYPE: Final = "application/vnd.cachectl.store.v1"
PART_TYPE: Final = "application/vnd.cachectl.store.part.v1"
#: Of blobs, by the folder of their names.
_MEDIA_TYPES: Final = {
    "index": "application/vnd.cachectl.store.index.v1",
    "packs": "application/vnd.cachectl.store.pack.v1+zstd",
    "objects": "application/vnd.cachectl.store.object.v1+zstd",
}
#: The annotation with small content: JSON, by name, in base64.
CONTENT: Final = "vnd.cachectl.content"
#: Bytes up to which content is small, and those of all content of one manifest.
_SMALL: Final = 64 << 10
_MOST_INSIDE: Final = 512 << 10
_NAME: Final = re.compile(r"index/[A-Za-z0-9-]{1,110}|(?:packs|objects)/[0-9a-f]{64}")
_DIGEST: Final = re.compile("sha256:[0-9a-f]{64}")
#: The longest TAG: a tag has at most 128 characters, and that of an index part takes 95 of them.
LONGEST_TAG: Final = 32
_NOTHING: Final = b"{}"
#: Seconds between attempts to do what other writers prevent: what they add or remove is there a little later.
_PAUSES: Final = (0.1, 0.5, 2.0)
#: The descriptor of the empty JSON object. Source: https://github.com/opencontainers/image-spec/blob/v1.1.1/manifest.md
_EMPTY: Final[dict[str, Any]] = {"mediaType": EMPTY, "digest": digest_of(_NOTHING), "size": len(_NOTHING)}


def tag_of(tag: str, name: str) -> str:
    """Return the tag of a name under ``index/`` of the store at ``tag``."""
    return f"{tag}.{name.removeprefix('index/')}"


def name_of(tag: str, full: str) -> str | None:
    """Return the name that a tag of the repository stands for; ``None`` if it is of no store, or of another one."""
    store, dot, rest = full.rpartition(".")
    name = f"index/{rest}"
    return name if dot and store == tag and _NAME.fullmatch(name) else None


@dataclass(frozen=True, slots=True)
class _Held:
    """The content of a name in a manifest: its bytes, or the digest of a blob of this size in bytes."""

    size: int
    data: bytes | None
    digest: str = ""


class RegistryPlace:
    """A repository that holds a store; see :class:`~cachectl.sharing.place.Place`."""

    def __init__(self, url: str) -> None:
        reference = Reference.parse(url)
        if len(reference.tag) > LONGEST_TAG:
            message = f"the tag of a store has at most {LONGEST_TAG} characters, and {reference.tag!r} has more"
            raise BadRequest(message)
        self.shown = str(reference)
        self._tag = reference.tag
        self._pinned = reference.digest
        self._repository = Repository(reference)
        #: The names that have manifests, each with its tag or, if pinned, its digest.
        self._names: dict[str, str] | None = None
        #: The names whose manifests were read, and the content of every name in them.
        self._read: set[str] = set()
        self._held: dict[str, _Held] = {}
        #: The names whose tags lead to no manifest.
        self._dangling: set[str] = set()
        #: The descriptors of the manifests that were written and are not yet in the image index.
        self._fresh: dict[str, dict[str, Any]] = {}
        self._is_store: bool | None = None

    # ------------------------------------------------------------------ reading

    def names(self) -> Sequence[Stored]:
        """List the names under ``index/``, from the list of tags or from the pinned index."""
        return [Stored(name, None, None) for name in sorted(self._listed())]

    def contents(self) -> Sequence[Stored]:
        """List all names that a manifest has, with a request for each manifest.

        The registry itself collects blobs without a manifest, and does not list them.
        """
        found: set[str] = set()
        for name in self._listed():
            # A manifest may be removed after the list of tags was read.
            with suppress(Missing):
                found |= self._load(name)
        return [Stored(name, self._held[name].size, None) for name in sorted(found)]

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name."""
        if name.startswith("packs/") and name not in self._held:
            # A pack is named by the digest of its file. A small one is no blob.
            with suppress(Missing):
                return self._repository.blob(f"sha256:{name.partition('/')[2]}", most)
        held = self._find(name)
        if held.data is None:
            return self._repository.blob(held.digest, most)
        if held.size > most:
            raise BadStore(f"{self.shown}: {name} has more than {most:,} bytes")
        return held.data

    def pin(self) -> str | None:
        """Return the URL of exactly the state that the image index describes; ``None`` without a store."""
        described = self._repository.described(self._tag) if self._pinned is None else {"digest": self._pinned}
        return None if described is None else self._repository.reference.pinned(described["digest"])

    def _listed(self) -> dict[str, str]:
        if self._pinned is None:
            tags = self._repository.tags()
            named = ((name_of(self._tag, tag), tag) for tag in tags)
            self._names = {name: tag for name, tag in named if name is not None and name not in self._dangling}
        elif self._names is None:
            entries = self._index(self._pinned)
            self._names = {each["annotations"][TITLE]: each["digest"] for each in entries}
        return self._names

    def _find(self, name: str) -> _Held:
        """Return the content of a name. Raises :class:`Missing`."""
        if name in self._held:
            return self._held[name]
        if name.startswith("index/"):
            self._load(name)
            return self._held[name]
        # Some manifest says where it is, most likely that of the newest part.
        names = self._listed() if self._names is None else self._names
        for part in sorted(names, key=lambda one: (one.startswith("index/condemned-"), one), reverse=True):
            if part in self._read or part.startswith(("index/key-", "index/store-")):
                continue
            with suppress(Missing):
                self._load(part)
            if name in self._held:
                return self._held[name]
        raise Missing(f"{self.shown}: {name} is missing")

    def _load(self, name: str) -> set[str]:
        """Read the manifest of a name; return the names of all content in it.

        Raises :class:`Missing`, and :class:`BadStore` if the tag leads to anything else.
        """
        content = self._manifest(name)
        try:
            found = {held: _Held(len(data), data) for held, data in _inside(content)}
            layers = [layer for layer in content["layers"] if layer["mediaType"] != EMPTY]
            found.update((layer["annotations"][TITLE], _Held(_size(layer), None, layer["digest"])) for layer in layers)
            good = name in found and (self._pinned is not None or _reference_of(content) == tag_of(self._tag, name))
            good = good and all(_NAME.fullmatch(held) for held in found)
            good = good and all(_DIGEST.fullmatch(one.digest) for one in found.values() if one.data is None)
        except (KeyError, TypeError, AttributeError, ValueError):
            good = False
        if not good:
            raise BadStore(f"{self.shown}: the tag {tag_of(self._tag, name)} leads to something else than {name}")
        self._read.add(name)
        self._held.update(found)
        return set(found)

    def _manifest(self, name: str) -> Mapping[str, Any]:
        """Return the manifest of a name. Raises :class:`Missing`.

        Docker's registry lists a tag a little before the manifest is there, and a little after it was deleted; for good
        if the program that deletes it is killed. Such a tag counts as removed.
        """
        for pause in (*_PAUSES, 0.0):
            with suppress(Missing):
                return self._repository.manifest(self._reference(name)).content
            if name not in self._listed():
                break
            time.sleep(pause)
        self._dangling.add(name)
        raise Missing(f"{self.shown}: {name} is missing")

    def _reference(self, name: str) -> str:
        if self._pinned is None:
            return tag_of(self._tag, name)
        try:
            return self._listed()[name]
        except KeyError as error:
            raise Missing(f"{self.shown}: {name} is missing") from error

    def _index(self, reference: str) -> list[dict[str, Any]]:
        """Return the entries of the image index. Raises :class:`Missing`, and :class:`BadStore` for anything else."""
        content = self._repository.manifest(reference).content
        try:
            entries: list[dict[str, Any]] = content["manifests"]
            good = content["artifactType"] == STORE_TYPE and all(map(_is_entry, entries))
        except (KeyError, TypeError):
            good = False
        if not good:
            raise BadStore(f"{self.shown}: {reference} is no store of cachectl; choose another tag")
        return entries

    # ------------------------------------------------------------------ writing

    def write(self, name: str, data: bytes, holds: Sequence[str] = ()) -> None:
        """Keep a small pack or object until a name lists it, upload a large one; write the manifest of a name."""
        if self._pinned is not None:
            raise BadRequest(f"{self.shown} is pinned by its digest and cannot be written to; name a tag")
        if not name.startswith("index/"):
            self._held[name] = _Held(len(data), data) if len(data) <= _SMALL else self._upload(data)
            return
        self._demand_store()
        content = self._manifest_of(name, {name: _Held(len(data), data), **{one: self._to_hold(one) for one in holds}})
        written = self._put(tag_of(self._tag, name), content)
        self._fresh[name] = _entry(name, {"mediaType": MANIFEST, "digest": written.digest, "size": written.bytes})
        self._held[name] = _Held(len(data), data)

    def _put(self, tag: str, content: Mapping[str, Any]) -> Manifest:
        """Write a manifest, again after a pause if another writer uploads the same blob at this moment.

        Docker's registry then has that blob without its content for an instant.
        """
        for pause in _PAUSES:
            with suppress(BlobUnknown):
                return self._repository.put_manifest(tag, content)
            time.sleep(pause)
        return self._repository.put_manifest(tag, content)

    def finish(self) -> None:
        """Add what was written to the image index."""
        if not self._fresh:
            return
        self._replace_index(frozenset())
        self._fresh.clear()

    def remove(self, names: Sequence[str]) -> None:
        """Remove tags and their manifests. The registry collects packs and objects that no manifest has."""
        gone = frozenset(name for name in names if name.startswith("index/"))
        if gone:
            self._replace_index(gone)
        for name in sorted(gone):
            self._fresh.pop(name, None)
            described = self._repository.described(tag_of(self._tag, name))
            if described is not None:
                self._repository.delete_manifest(described["digest"])

    def _upload(self, data: bytes) -> _Held:
        digest = digest_of(data)
        self._repository.put_blob(digest, data)
        return _Held(len(data), None, digest)

    def _to_hold(self, name: str) -> _Held:
        """Return the content of a pack or an object for another manifest. Raises :class:`Missing`."""
        digest = f"sha256:{name.partition('/')[2]}"
        if name.startswith("packs/") and name not in self._held and (size := self._repository.blob_size(digest)):
            return _Held(size, None, digest)
        return self._find(name)

    def _manifest_of(self, name: str, contents: Mapping[str, _Held]) -> dict[str, Any]:
        """Return the manifest of a name: small content inside, the rest as layers."""
        inside: dict[str, str] = {}
        layers: list[dict[str, Any]] = []
        left = _MOST_INSIDE
        for one, held in contents.items():
            if held.data is not None and held.size <= min(left, _SMALL):
                inside[one] = base64.b64encode(held.data).decode()
                left -= held.size
                continue
            blob = held if held.data is None else self._upload(held.data)
            media_type = _MEDIA_TYPES[one.partition("/")[0]]
            layers.append(
                {"mediaType": media_type, "digest": blob.digest, "size": blob.size, "annotations": {TITLE: one}}
            )
        return {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": PART_TYPE,
            "config": _EMPTY,
            "layers": layers or [_EMPTY],
            "annotations": {REFERENCE: tag_of(self._tag, name), CONTENT: json.dumps(inside, sort_keys=True)},
        }

    def _demand_store(self) -> None:
        """Raise :class:`BadStore` if the tag leads to something else; prepare an empty repository for manifests."""
        if self._is_store is None:
            self._own_index()
            self._is_store = True

    def _own_index(self) -> list[dict[str, Any]]:
        """Return the entries of the image index; none before the first push."""
        try:
            return self._index(self._tag)
        except Missing:
            # Every manifest has this blob as its configuration.
            self._repository.put_blob(_EMPTY["digest"], _NOTHING)
            return []

    def _replace_index(self, without: frozenset[str]) -> None:
        """Write the image index of all names in the list of tags, except some."""
        before = self._own_index()
        for pause in _PAUSES:
            with suppress(TransferFailed):
                self._write_index(before, without)
                return
            # Another writer has removed an entry meanwhile.
            before = []
            time.sleep(pause)
        self._write_index(before, without)

    def _write_index(self, before: Iterable[dict[str, Any]], without: frozenset[str]) -> None:
        known = {**{entry["annotations"][TITLE]: entry for entry in before}, **self._fresh}
        entries = []
        for name, tag in sorted(self._listed().items()):
            # Two writers that replace it at the same time lose an entry of one.
            if name in without:
                continue
            if name in known:
                entries.append(known[name])
            elif (described := self._repository.described(tag)) is not None:
                entries.append(_entry(name, described))
        content = {"schemaVersion": 2, "mediaType": INDEX, "artifactType": STORE_TYPE, "manifests": entries}
        self._repository.put_manifest(self._tag, content)


def _inside(content: Mapping[str, Any]) -> Iterable[tuple[str, bytes]]:
    """Yield the names and the bytes of the content inside a manifest."""
    for name, text in json.loads(content["annotations"][CONTENT]).items():
        yield name, base64.b64decode(text, validate=True)


def _reference_of(content: Mapping[str, Any]) -> object:
    return content["annotations"][REFERENCE]


def _entry(name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {**manifest, "artifactType": PART_TYPE, "annotations": {TITLE: name}}


def _is_entry(entry: Mapping[str, Any]) -> bool:
    name, digest = entry["annotations"][TITLE], entry["digest"]
    return _NAME.fullmatch(name) is not None and _DIGEST.fullmatch(digest) is not None and _size(entry) >= 0


def _size(found: Mapping[str, Any]) -> int:
    """Return the size in a descriptor. Raises :class:`TypeError`."""
    size = found["size"]
    if type(size) is not int:
        raise TypeError(size)
    return size
