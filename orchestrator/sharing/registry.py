"""A shared store in a repository of an OCI registry.

Each name is a tag of an artifact manifest: ``TAG.NAME`` for ``index/NAME``, ``TAG.condemned-NAME`` for
``condemned/NAME``. The manifest's first layer is the content of the name; the others are the packs and objects that the
part lists, so that the registry's own garbage collection keeps them. Packs and objects have no tags.

``TAG`` is an OCI image index of all manifests under ``index/``. It is written after them and may lack the newest: the
list of tags is what counts. A URL with a digest names such an index, and so exactly one state of the store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from cachectl.layers.base.errors import BadRequest
from cachectl.moving.transfer import TransferFailed
from cachectl.sharing.place import BadStore, Missing, Stored
from cachectl.sharing.repository import (
    EMPTY,
    INDEX,
    MANIFEST,
    REFERENCE,
    TITLE,
    Manifest,
    Reference,
    Repository,
    digest_of,
)

#: Of the image index, and of the manifests in it.
STORE_TYPE: Final = "application/vnd.cachectl.store.v1"
_PART_TYPE: Final = "application/vnd.cachectl.store.part.v1"
#: Of blobs, by the folder of their names. Index parts, packs and objects are frames of zstd; key documents are JSON.
_MEDIA_TYPES: Final = {
    "index": "application/vnd.cachectl.store.index.v1",
    "condemned": "application/vnd.cachectl.store.condemned.v1",
    "packs": "application/vnd.cachectl.store.pack.v1+zstd",
    "objects": "application/vnd.cachectl.store.object.v1+zstd",
}
_NAME: Final = re.compile(r"(?:index|condemned)/[A-Za-z0-9-]{1,110}|(?:packs|objects)/[0-9a-f]{64}")
#: The longest TAG: a tag has at most 128 characters, and that of an index part takes 95 of them.
LONGEST_TAG: Final = 32
_CONDEMNED: Final = "condemned-"
_NOTHING: Final = b"{}"
#: The descriptor of the empty JSON object. Source: https://github.com/opencontainers/image-spec/blob/v1.1.1/manifest.md
_EMPTY: Final[dict[str, Any]] = {"mediaType": EMPTY, "digest": digest_of(_NOTHING), "size": len(_NOTHING)}


def tag_of(tag: str, name: str) -> str:
    """Return the tag of a name of the store at ``tag``."""
    folder, _, rest = name.partition("/")
    return f"{tag}.{_CONDEMNED if folder == 'condemned' else ''}{rest}"


def name_of(tag: str, full: str) -> str | None:
    """Return the name that a tag of the repository stands for; ``None`` if it is of no store, or of another one."""
    store, dot, rest = full.rpartition(".")
    if not dot or store != tag:
        return None
    name = f"condemned/{rest[len(_CONDEMNED) :]}" if rest.startswith(_CONDEMNED) else f"index/{rest}"
    return name if _NAME.fullmatch(name) else None


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
        #: The manifest of each name that was read, and the descriptor of each pack and object in them.
        self._manifests: dict[str, Manifest] = {}
        self._held: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] | None = None

    # ------------------------------------------------------------------ reading

    def names(self) -> Sequence[Stored]:
        """List the names under ``index/``, from the list of tags or from the pinned index."""
        return [Stored(name, None, None) for name in self._listed() if name.startswith("index/")]

    def contents(self) -> Sequence[Stored]:
        """List all names that a manifest has, with a request for each manifest.

        The registry itself collects blobs without a manifest, and does not list them.
        """
        found: dict[str, int | None] = {}
        for name in self._listed():
            own, *held = self._layers(name)
            found[name] = 0 if own["mediaType"] == EMPTY else own["size"]
            found.update((layer["annotations"][TITLE], layer["size"]) for layer in held)
        return [Stored(name, size, None) for name, size in sorted(found.items())]

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name, compared with its digest in the manifest."""
        layer = self._descriptor(name)
        return b"" if layer["mediaType"] == EMPTY else self._repository.blob(layer["digest"], most)

    def _listed(self) -> list[str]:
        """List the names that have manifests, and remember where each manifest is."""
        if self._pinned is not None:
            entries = self._index(self._pinned)["manifests"]
            self._names = {each["annotations"][TITLE]: each["digest"] for each in entries}
        else:
            tags = self._repository.tags()
            self._names = {name: tag for tag in tags if (name := name_of(self._tag, tag)) is not None}
        return sorted(self._names)

    def _descriptor(self, name: str) -> Mapping[str, Any]:
        """Return the descriptor of the blob of a name. Raises :class:`Missing`."""
        if name.startswith(("index/", "condemned/")):
            return self._layers(name)[0]
        if name in self._held:
            return self._held[name]
        folder, _, digest = name.partition("/")
        if folder == "packs":
            # A pack is named by the digest of its file.
            return {"mediaType": _MEDIA_TYPES[folder], "digest": f"sha256:{digest}"}
        # An object is named by its content, so a manifest must say which blob it is; the newest is the likeliest.
        for part in sorted(self._names or self._listed(), reverse=True):
            if part not in self._manifests:
                self._layers(part)
            if name in self._held:
                return self._held[name]
        raise Missing(f"{self.shown}: {name} is missing")

    def _layers(self, name: str) -> list[Mapping[str, Any]]:
        """Return the layers of a name's manifest, and remember the packs and objects among them.

        Raises :class:`Missing`, and :class:`BadStore` if the tag leads to anything else.
        """
        if name not in self._manifests:
            self._manifests[name] = self._repository.manifest(self._reference(name))
        content = self._manifests[name].content
        try:
            layers: list[Mapping[str, Any]] = content["layers"]
            titles = [layer["annotations"][TITLE] for layer in layers]
            good = titles[0] == name and content["annotations"][REFERENCE] == tag_of(self._home(content), name)
            good = good and all(_is_descriptor(layer) for layer in layers)
        except (KeyError, TypeError, AttributeError, IndexError):
            good = False
        if not good or not all(_NAME.fullmatch(str(title)) for title in titles):
            raise BadStore(f"{self.shown}: the tag {tag_of(self._tag, name)} leads to something else than {name}")
        self._held.update({title: dict(layer) for title, layer in zip(titles[1:], layers[1:], strict=True)})
        return layers

    def _home(self, content: Mapping[str, Any]) -> str:
        """Return the tag of the store that a manifest must be of; a pinned URL has none, and each digest is checked."""
        return self._tag if self._pinned is None else str(content["annotations"][REFERENCE]).rpartition(".")[0]

    def _reference(self, name: str) -> str:
        if self._pinned is None:
            return tag_of(self._tag, name)
        if self._names is None:
            self._listed()
        try:
            return (self._names or {})[name]
        except KeyError as error:
            raise Missing(f"{self.shown}: {name} is missing") from error

    def _index(self, reference: str) -> dict[str, Any]:
        """Return the image index of a store. Raises :class:`Missing`, and :class:`BadStore` for anything else."""
        content = dict(self._repository.manifest(reference).content)
        try:
            good = content["artifactType"] == STORE_TYPE and all(map(_is_entry, content["manifests"]))
        except (KeyError, TypeError):
            good = False
        if not good:
            raise BadStore(f"{self.shown}: {reference} is no store of cachectl; choose another tag")
        return content

    # ------------------------------------------------------------------ writing

    def write(self, name: str, data: bytes, holds: Sequence[str] = ()) -> None:
        """Upload a blob, and for a part of the index its manifest, then the image index."""
        if self._pinned is not None:
            raise BadRequest(f"{self.shown} is pinned by its digest and cannot be written to; name a tag")
        own = self._upload(name, data)
        if not name.startswith(("index/", "condemned/")):
            self._held[name] = own
            return
        # This also refuses to make a store of a tag that is something else.
        index = self._own_index()
        content = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": _PART_TYPE,
            "config": _EMPTY,
            "layers": [own, *map(self._to_hold, holds)],
            "annotations": {REFERENCE: tag_of(self._tag, name)},
        }
        self._manifests[name] = written = self._repository.put_manifest(tag_of(self._tag, name), content)
        if name.startswith("index/"):
            entry = {"mediaType": MANIFEST, "digest": written.digest, "size": written.bytes}
            index = [*index, _entry(name, entry)]
            self._replace_index([*index, *self._lacking(index)])

    def remove(self, names: Sequence[str]) -> None:
        """Remove tags and their manifests. The registry collects packs and objects that no manifest names."""
        gone = {name for name in names if name.startswith(("index/", "condemned/"))}
        index = self._own_index() if gone else []
        left = [entry for entry in index if entry["annotations"][TITLE] not in gone]
        if len(left) < len(index):
            self._replace_index(left)
        for name in sorted(gone):
            self._manifests.pop(name, None)
            described = self._repository.described(tag_of(self._tag, name))
            if described is not None:
                self._repository.delete_manifest(described["digest"])

    def pin(self) -> str | None:
        """Return the URL of exactly the state that the image index describes; ``None`` without a store."""
        described = self._repository.described(self._tag) if self._pinned is None else {"digest": self._pinned}
        return None if described is None else self._repository.reference.pinned(described["digest"])

    def _upload(self, name: str, data: bytes) -> dict[str, Any]:
        """Upload the content of a name, return its descriptor."""
        if not data:
            self._repository.put_blob(_EMPTY["digest"], _NOTHING)
            return {**_EMPTY, "annotations": {TITLE: name}}
        digest = digest_of(data)
        self._repository.put_blob(digest, data)
        return _descriptor(name, digest, len(data))

    def _to_hold(self, name: str) -> dict[str, Any]:
        """Return the descriptor of a pack or an object for a manifest. Raises :class:`Missing`."""
        found = dict(self._descriptor(name))
        if "size" not in found:
            size = self._repository.blob_size(found["digest"])
            if size is None:
                raise Missing(f"{self.shown}: {name} is missing")
            found = _descriptor(name, found["digest"], size)
        return found

    def _own_index(self) -> list[dict[str, Any]]:
        """Return the entries of the image index; for the first part of a store none."""
        try:
            entries: list[dict[str, Any]] = self._index(self._tag)["manifests"]
        except Missing:
            # Every manifest has this blob as its configuration.
            self._repository.put_blob(_EMPTY["digest"], _NOTHING)
            return []
        return entries

    def _lacking(self, index: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the entries that an image index lacks, as when two writers replaced it at the same time."""
        there = {entry["annotations"][TITLE] for entry in index}
        for other, tag in (self._names or {}).items():
            if other.startswith("index/") and other not in there and (found := self._repository.described(tag)):
                yield _entry(other, found)

    def _write_index(self, entries: list[dict[str, Any]]) -> None:
        by_name = {entry["annotations"][TITLE]: entry for entry in entries}
        content = {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "artifactType": STORE_TYPE,
            "manifests": [by_name[name] for name in sorted(by_name)],
        }
        self._repository.put_manifest(self._tag, content)

    def _replace_index(self, entries: list[dict[str, Any]]) -> None:
        """Write the image index; anew from the tags if an entry of it was removed meanwhile."""
        try:
            self._write_index(entries)
        except TransferFailed:
            self._listed()
            self._write_index(list(self._lacking([])))


def _descriptor(name: str, digest: str, size: int) -> dict[str, Any]:
    folder = name.partition("/")[0]
    return {"mediaType": _MEDIA_TYPES[folder], "digest": digest, "size": size, "annotations": {TITLE: name}}


def _entry(name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {**manifest, "artifactType": _PART_TYPE, "annotations": {TITLE: name}}


def _is_entry(entry: Mapping[str, Any]) -> bool:
    return _is_descriptor(entry) and _NAME.fullmatch(str(entry["annotations"][TITLE])) is not None


def _is_descriptor(found: Mapping[str, Any]) -> bool:
    return (
        re.fullmatch("sha256:[0-9a-f]{64}", found["digest"]) is not None
        and type(found["size"]) is int
        and isinstance(found["mediaType"], str)
    )
