"""The index of a store as one command sees it: what is listed, and the parts and key documents it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cachectl.exchange import format as stores
from cachectl.exchange import memory, trust
from cachectl.exchange.format import Item, Pack, Part, PartName, StoreKey
from cachectl.exchange.place import STREAM, BadStore, Missing, StorePlace, is_url
from cachectl.layers.base import errors

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.layers.base.environment import Environment

T = TypeVar("T")


class Gone(BadStore):
    """A part or a pack was removed after it had been listed."""


def place_of(address: str | Path, environment: Environment, *, writes: bool = False, force: bool = False) -> StorePlace:
    """Return the place of a path or a URL, to be read or written; ``force`` replaces a file that is not a bundle.

    Nothing is made yet, but the server may be connected to, and a bundle is opened. Raises :class:`BadRequest`,
    :class:`TransferFailed`, and :class:`BadStore` for a file that is not a bundle.
    """
    url = str(address)
    if not url:
        raise errors.BadRequest("no store is named; name a bundle FILE, a folder or a URL")
    if url.lower().startswith(("oci://", "oci+http://")):
        from cachectl.exchange.registry import RegistryPlace

        return RegistryPlace(url, environment)
    if is_url(url):
        from cachectl.exchange.remote import RemotePlace

        return RemotePlace(url)
    path = environment.expand(url)
    # A new name that ends in .zip means a bundle, too.
    if url == STREAM or (not path.is_dir() if path.exists() else path.suffix == ".zip"):
        from cachectl.exchange.bundle import BundlePlace

        return BundlePlace(None if url == STREAM else path, environment, writes=writes, force=force)
    from cachectl.exchange.folder import FolderPlace

    return FolderPlace(path)


class StoreIndex:
    """The index of a store: :attr:`names` as they were listed, and what is read on demand, each thing once.

    With ``judges``, one of them has to trust a part. Parts that were read before come from what this user's machine
    remembers. :meth:`save` writes to that; until then nothing is written.
    """

    def __init__(self, place: StorePlace, environment: Environment, judges: Sequence[trust.Judge] = ()) -> None:
        self.place = place
        self.environment = environment
        self.memory = None if place.is_bundle else memory.StoreMemory(environment, place.shown)
        self._judges = judges
        self._parts: dict[PartName, Part] = {}
        self._keys: dict[str, StoreKey] = {}
        #: Bytes of packs that were read.
        self.fetched = 0
        self.refresh()

    def refresh(self) -> bool:
        """List the names again; return whether they have changed."""
        before = getattr(self, "names", None)
        if self.memory is not None:
            self.memory.look()
        with self._naming():
            self.names = stores.sort_names(self.place.names("index"))
        return self.names != before

    @property
    def digest(self) -> str:
        """Return what pins the content: the SHA-256 of a bundle, else of the sorted names of the index parts."""
        return self.place.digest() or stores.digest_of(self.names.parts)

    def require_store(self) -> None:
        """Raise :class:`Missing` if there is no store."""
        if not self.names.files:
            raise Missing(f"{self.place.shown}: there is no store; cachectl push {self.place.shown} makes one")

    def key(self, name: str) -> StoreKey:
        """Return the key document of a name of 16 digits. Raises :class:`BadStore`."""
        if name not in self._keys:
            self._keys[name] = self._read(f"key-{name}", stores.LARGEST_KEY, partial(stores.parse_key, name))
        return self._keys[name]

    def part(self, name: PartName) -> Part:
        """Return an index part. It is parsed, and kept by this machine, only if it is trusted.

        Raises :class:`Untrusted` with the reason, :class:`BadStore`, and :class:`Gone` if it was removed meanwhile.
        """
        if name not in self._parts:
            self._parts[name] = self._read(str(name), stores.MOST_PART, partial(self._judged, name))
        return self._parts[name]

    def _judged(self, name: PartName, file: bytes) -> Part:
        text, signature = stores.open_part(name, file)
        signer, reason = None, None
        for judge in self._judges:
            try:
                signer = judge.signer(text, signature)
                break
            except trust.Untrusted as error:
                reason = reason or error
            except trust.Forged as error:
                raise BadStore(f"{name}: {error}") from error
        if reason is not None and signer is None:
            raise reason
        return replace(stores.parse_part(name, text), is_signed=bool(signature), signer=signer)

    def _read(self, file: str, most: int, parse: Callable[[bytes], T]) -> T:
        """Return what is in a file of the index: one that this machine keeps, or that of the store."""
        kept = None if self.memory is None else self.memory.read(file, most)
        if kept is not None:
            with suppress(BadStore):
                return parse(kept)
        with self._naming():
            data = self.place.read(stores.INDEX + file, most)
            parsed = parse(data)
        self.keep(file, data)
        return parsed

    def contents(self, items: Iterable[Item]) -> Iterator[tuple[Item, bytes]]:
        """Yield the verified bytes of entries, with one request for each pack.

        Raises :class:`BadStore` for anything that is not what the index says, and :class:`Gone` if it is missing.
        """
        groups: dict[Pack, list[Item]] = {}
        for item in items:
            if item.pack is not None:
                groups.setdefault(item.pack, []).append(item)
        for pack, group in groups.items():
            with self._naming():
                file = self.place.read(pack.name, pack.packed)
                self.fetched += len(file)
                entries = stores.open_pack(group, pack, file)
            del file
            yield from entries

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Say in an error which store is damaged."""
        try:
            yield
        except Missing as error:
            raise Gone(str(error)) from error
        except BadStore as error:
            if str(error).startswith(self.place.shown):
                raise
            raise BadStore(f"{self.place.shown}: {error}") from error

    def keep(self, file: str, data: bytes) -> None:
        """Keep a file of the index, which was read or written, for the next command."""
        if self.memory is not None:
            self.memory.add(file, data)

    def save(self) -> None:
        """Write what is kept for the next command."""
        if self.memory is not None:
            self.memory.save(self.names.files)
