"""The index of a shared store as one command sees it: what is listed, and the parts and key documents it reads."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.texts import printable
from cachectl.layers.disk.temporaries import temporary_folder
from cachectl.moving.signing import Untrusted, is_signature, signer
from cachectl.sharing.format import (
    INDEX,
    LARGEST_CONDEMNED,
    LARGEST_KEY,
    CondemnedName,
    Names,
    Part,
    PartName,
    StoreKey,
    are_twins,
    most_part,
    open_part,
    parse_condemned,
    parse_key,
    parse_part,
    sort_names,
)
from cachectl.sharing.memory import IndexCache
from cachectl.sharing.place import BadStore, Missing, Place

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment

#: Namespace of signatures; those of bundles, mails and commits are not accepted.
NAMESPACE: Final = "cachectl-store"


@dataclass(frozen=True, slots=True)
class ReadPart:
    """An index part whose file is the one that its name says, with the signed text and the signature."""

    name: PartName
    part: Part
    text: bytes
    signature: bytes


class Gone(BadStore):
    """An index part was removed after it had been listed."""


class Index:
    """The index of a store: :attr:`names` as they were listed, and what is read on demand, each thing once.

    Parts that were read before come from the cache of this user. :meth:`save` writes to that cache; until then nothing
    is written.
    """

    def __init__(self, place: Place, environment: Environment) -> None:
        self.place = place
        self.environment = environment
        self._parts: dict[PartName, ReadPart] = {}
        self._keys: dict[str, StoreKey] = {}
        self._written: dict[str, bytes] = {}
        self.list()

    def list(self) -> None:
        """List the names anew."""
        self.names: Names = sort_names(self.place.names())
        self._cache = None if self.names.store is None else IndexCache(self.environment, self.names.store)

    def demand(self) -> str:
        """Return the identity of the store. Raises :class:`Missing` if there is no store."""
        if self.names.store is None:
            message = f"{self.place.shown}: there is no store; cachectl push {self.place.shown} makes one"
            raise Missing(message)
        for other in self.names.stores[1:]:
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
            kept = None if self._cache is None else self._cache.read(file, LARGEST_KEY)
            if kept is not None and hashlib.sha256(kept).hexdigest()[:16] == name:
                self._keys[name] = parse_key(name, kept)
            else:
                if name not in self.names.keys:
                    raise BadStore(f"{self.place.shown}: the key document {file} is missing")
                document = self._read(file, LARGEST_KEY)
                with self.naming():
                    self._keys[name] = parse_key(name, document)
                if self._cache is not None:
                    self._cache.add(file, document)
        return self._keys[name]

    def read(self, name: PartName) -> ReadPart:
        """Return an index part. Raises :class:`BadStore`, and :class:`Gone` if it was removed meanwhile."""
        if name not in self._parts:
            self._parts[name] = self._read_part(name)
        return self._parts[name]

    def _read_part(self, name: PartName) -> ReadPart:
        file = str(name)
        data = None if self._cache is None else self._cache.read(file, most_part())
        if data is None or hashlib.sha256(data).hexdigest() != name.sha256:
            data = self._read(file, most_part())
            with self.naming():
                text, signature = open_part(name, data)
            if self._cache is not None:
                self._cache.add(file, data)
        else:
            text, signature = open_part(name, data)
        with self.naming():
            part = parse_part(name, text)
        if part.store not in self.names.stores:
            raise BadStore(f"{self.place.shown}: {file} was made for another store")
        return ReadPart(name, part, text, signature)

    def condemned(self, name: CondemnedName) -> frozenset[str]:
        """Return the packs and objects in a list of condemned names; none if it was removed meanwhile."""
        with self.naming():
            try:
                return parse_condemned(name, self.place.read(f"{INDEX}{name}", LARGEST_CONDEMNED))
            except FileNotFoundError:
                return frozenset()

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Say in an error which store is damaged."""
        try:
            yield
        except Gone:
            raise
        except BadStore as error:
            raise BadStore(f"{self.place.shown}: {str(error).removeprefix(f'{self.place.shown}: ')}") from error

    def _read(self, file: str, most: int) -> bytes:
        try:
            return self.place.read(INDEX + file, most)
        except Missing as error:
            raise Gone(str(error)) from error

    def keep(self, file: str, data: bytes) -> None:
        """Treat what this command wrote as read."""
        self._written[file] = data

    def save(self) -> None:
        """Keep what was read and written for the next command."""
        if self._cache is not None:
            for file, data in self._written.items():
                self._cache.add(file, data)
            self._cache.save(self.names.found.keys() | self._written.keys())


class Judge:
    """Decides which index parts are trusted: those signed by a signer of a list.

    Raises :class:`BadStore` for a signature that is not of the part it stands in.
    """

    def __init__(self, environment: Environment, allowed: str) -> None:
        if not Path(allowed).is_file():
            message = f"{printable(allowed)}: this list of allowed signers does not exist"
            raise Untrusted(message)
        self._environment = environment
        self._allowed = allowed
        self._known: dict[PartName, str | Untrusted] = {}

    def signer(self, read: ReadPart) -> str:
        """Return who signed a part. Raises :class:`Untrusted` for a stranger, or without a signature."""
        if read.name not in self._known:
            try:
                self._known[read.name] = self._signer(read)
            except Untrusted as error:
                self._known[read.name] = error
        known = self._known[read.name]
        if isinstance(known, Untrusted):
            raise known
        return known

    def _signer(self, read: ReadPart) -> str:
        if not read.signature:
            raise Untrusted("not signed")
        with temporary_folder(self._environment) as folder:
            signature = Path(folder, "signature")
            signature.write_bytes(read.signature)
            text = io.BytesIO(read.text)
            try:
                return signer(text, str(signature), self._allowed, NAMESPACE)
            except Untrusted:
                if not is_signature(text, str(signature), NAMESPACE):
                    raise BadStore(f"{read.name}: its signature is not of this content: it was changed") from None
                message = f"signed by nobody in {printable(self._allowed)}"
                raise Untrusted(message) from None
