"""The index of a store as one command sees it: what is listed, and the parts and key documents it reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachectl.exchange.format import (
    INDEX,
    LARGEST_KEY,
    MOST_PART,
    CondemnedName,
    Item,
    Part,
    PartName,
    StoreKey,
    are_twins,
    most_bytes,
    open_entries,
    open_part,
    parse_condemned,
    parse_key,
    parse_part,
    sort_names,
)
from cachectl.exchange.memory import IndexCache
from cachectl.exchange.place import STREAM, BadStore, Missing, StorePlace, is_url, local_path
from cachectl.exchange.trust import Forged, Judge, Untrusted
from cachectl.layers.base.errors import BadRequest

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.layers.base.environment import Environment


@dataclass(frozen=True, slots=True)
class ReadPart:
    """An index part whose file is the one that its name says.

    ``signer`` is who signed it, as the first judge that trusts it says. ``untrusted`` is why no judge does; ``None``
    without judges.
    """

    part: Part
    signed: bool
    signer: str | None = None
    untrusted: str | None = None


class Gone(BadStore):
    """An index part was removed after it had been listed."""


def is_bundle_name(name: str, path: Path) -> bool:
    """Return whether a name of this machine means a bundle: a file, or a new name that ends in ``.zip``."""
    return name == STREAM or (path.exists() and not path.is_dir()) or (not path.exists() and path.suffix == ".zip")


def place_of(address: str | Path, environment: Environment, *, writes: bool = False, force: bool = False) -> StorePlace:
    """Return the place of a path or a URL, to be read or written; ``force`` replaces a file that is not a bundle.

    Nothing is made yet, but the server may be connected to, and a bundle is opened. Raises :class:`BadRequest`,
    :class:`TransferFailed`, and :class:`BadStore` for a file that is not a bundle.
    """
    url = str(address)
    if not url:
        raise BadRequest("no store is named; name a bundle FILE, a folder or a URL")
    if url.lower().startswith(("oci://", "oci+http://")):
        from cachectl.exchange.registry import RegistryPlace

        return RegistryPlace(url, environment)
    if is_url(url):
        from cachectl.exchange.remote import RemotePlace

        return RemotePlace(url)
    name = local_path(url)
    path = environment.expand(name)
    if is_bundle_name(name, path):
        from cachectl.exchange.bundle import BundlePlace

        return BundlePlace(None if name == STREAM else path, environment, writes=writes, force=force)
    from cachectl.exchange.folder import FolderPlace

    return FolderPlace(path)


class StoreIndex:
    """The index of a store: :attr:`names` as they were listed, and what is read on demand, each thing once.

    With ``judges``, one of them has to trust a part. Parts that were read before come from the cache of this user.
    :meth:`save` writes to that cache; until then nothing is written.
    """

    def __init__(self, place: StorePlace, environment: Environment, judges: Sequence[Judge] = ()) -> None:
        self.place = place
        self.environment = environment
        self._judges = judges
        self._parts: dict[PartName, ReadPart] = {}
        self._keys: dict[str, StoreKey] = {}
        self._written: dict[str, bytes] = {}
        #: Bytes of packs and objects that were read.
        self.fetched = 0
        self.refresh()

    def refresh(self) -> None:
        """List the names again."""
        self.names = sort_names(self.place.names())
        cached = self.names.store is not None and not self.place.is_bundle
        self._cache = IndexCache(self.environment, str(self.names.store)) if cached else None

    @property
    def digest(self) -> str:
        """Return what pins the content: the SHA-256 of a bundle, else of the sorted names of the index parts."""
        return self.place.digest() or self.names.digest

    def require_store(self) -> str:
        """Return the identity of the store. Raises :class:`Missing` if there is no store."""
        if self.names.store is None:
            message = f"{self.place.shown}: there is no store; cachectl push {self.place.shown} makes one"
            raise Missing(message)
        for other in self.names.stores[1:]:
            if self.place.is_bundle:
                raise BadStore(f"{self.place.shown} has two identities: another store was put into it")
            if not are_twins(self.names.store, other):
                raise BadStore(
                    f"{self.place.shown} has two identities of different age: another store was put into it; "
                    f"remove the wrong one of index/store-{self.names.store} and index/store-{other}"
                )
        return self.names.store

    def key(self, name: str) -> StoreKey:
        """Return the key document of a name of 16 digits. Raises :class:`BadStore`."""
        if name not in self._keys:
            file = f"key-{name}"
            document = None if self._cache is None else self._cache.read(file, LARGEST_KEY)
            is_new = document is None or hashlib.sha256(document).hexdigest()[:16] != name
            if document is None or is_new:
                if name not in self.names.keys:
                    raise BadStore(f"{self.place.shown}: the key document {file} is missing")
                document = self._fetch(INDEX + file, LARGEST_KEY)
            with self.naming():
                self._keys[name] = parse_key(name, document)
            if is_new and self._cache is not None:
                self._cache.add(file, document)
        return self._keys[name]

    def read(self, name: PartName) -> ReadPart:
        """Return an index part. Raises :class:`BadStore`, and :class:`Gone` if it was removed meanwhile.

        A part that no judge trusts is not parsed: it has no entries then.
        """
        if name not in self._parts:
            self._parts[name] = self._read_part(name)
        return self._parts[name]

    def _read_part(self, name: PartName) -> ReadPart:
        file = str(name)
        data = None if self._cache is None else self._cache.read(file, MOST_PART)
        is_new = data is None or hashlib.sha256(data).hexdigest() != name.sha256
        if data is None or is_new:
            data = self._fetch(INDEX + file, MOST_PART)
        with self.naming():
            text, signature = open_part(name, data)
            signer, untrusted = self._judged(name, text, signature)
            if untrusted is not None:
                nothing = Part("", name.made, StoreKey("", {}), False, {}, ())  # noqa: FBT003
                return ReadPart(nothing, bool(signature), untrusted=untrusted)
            part = parse_part(name, text)
        if part.store not in self.names.stores:
            raise BadStore(f"{self.place.shown}: {file} was made for another store")
        if is_new and self._cache is not None:
            self._cache.add(file, data)
        return ReadPart(part, bool(signature), signer)

    def _judged(self, name: PartName, text: bytes, signature: bytes) -> tuple[str | None, str | None]:
        """Return who signed a text, and why no judge trusts it."""
        reason: str | None = None
        for judge in self._judges:
            try:
                return judge.signer(text, signature), None
            except Untrusted as error:  # noqa: PERF203
                reason = reason or str(error)
            except Forged as error:
                raise BadStore(f"{name}: {error}") from error
        return None, reason

    def condemned(self, name: CondemnedName) -> frozenset[str]:
        """Return the packs and objects in a list of condemned names; none if it was removed meanwhile."""
        with self.naming():
            try:
                return parse_condemned(name, self.place.read(f"{INDEX}{name}", MOST_PART))
            except FileNotFoundError:
                return frozenset()

    def contents(self, wanted: Iterable[tuple[Part, Item]]) -> Iterator[tuple[Item, bytes]]:
        """Yield the verified bytes of entries, with one request for each pack and object.

        Raises :class:`BadStore` for anything that is not what the index says, and :class:`Gone` if it is missing.
        """
        groups: dict[str, list[tuple[Part, Item]]] = {}
        for part, item in wanted:
            groups.setdefault(item.place, []).append((part, item))
        for group in groups.values():
            part, first = group[0]
            with self.naming():
                # What is missing may have been condemned a grace period ago, and its part with it.
                file = self._fetch(first.place, most_bytes(part, first))
                self.fetched += len(file)
                entries = open_entries(part, [item for _, item in group], file)
            yield from entries

    def _fetch(self, name: str, most: int) -> bytes:
        try:
            return self.place.read(name, most)
        except Missing as error:
            raise Gone(str(error)) from error

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Say in an error which store is damaged."""
        try:
            yield
        except Gone:
            raise
        except BadStore as error:
            if str(error).startswith(self.place.shown):
                raise
            raise BadStore(f"{self.place.shown}: {error}") from error

    def keep(self, file: str, data: bytes) -> None:
        """Treat what this command wrote as read."""
        self._written[file] = data

    def save(self) -> tuple[str, ...]:
        """Keep what was read and written for the next command; return the names of kept parts that have vanished."""
        if self._cache is None:
            return ()
        for file, data in self._written.items():
            self._cache.add(file, data)
        return self._cache.save(self.names.found.keys() | self._written.keys())
