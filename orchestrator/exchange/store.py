"""A store as one command sees it: what is listed, read on demand, and added.

Packs are written first. The index part that lists them is written last and completes a push. A killed push leaves
unlisted packs, which ``store gc`` removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from cachectl.exchange import place, trust, wire
from cachectl.layers.base.documents import encode_json
from cachectl.layers.base.environment import Environment, user_state_folder
from cachectl.layers.base.errors import PARSE_ERRORS, BadRequest
from cachectl.layers.core.entry import Artifact, Entry, Note
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.disk import atomic, handles, plain
from cachectl.layers.disk.trust import shared_because
from cachectl.transfer import Moved

#: Seconds after which a long push writes an index part for what it has uploaded so far.
_CHECKPOINT = 600.0
#: Seconds between the uploads of a pack and its index part, after which a push fails: half of the time after which
#: ``store gc`` removes unlisted packs.
_TOO_SLOW = 43200.0
#: Bytes that the pack's name and the offset add to the line of an entry.
_PLACE = 100
#: Entries after which an index part or a pack is full: half of what a reader accepts.
_FULL_PART = wire.MOST_ENTRIES // 2
#: The record of what was seen, its largest size in bytes, and the most removed parts in it.
_SEEN = "seen.json"
_LARGEST = 1 << 20
_MOST_GONE = 2000
#: How many random bytes a pack has.
_SALT = 16
#: How often reading starts again because ``gc`` removed an index part or a pack meanwhile.
_AGAIN = 100

T = TypeVar("T")
#: Entries with their artifacts.
Contents = Iterator[tuple[Entry, Artifact]]


def place_of(
    address: str | Path,
    environment: Environment,
    *,
    writes: bool = False,
    force: bool = False,
    deadline: float | None = None,
    in_child: bool = False,
) -> place.StorePlace:
    """Return the place of a path or a URL; ``force`` replaces a file that is not a bundle.

    Nothing is made yet, but a server may be contacted, and a bundle is opened. Unless ``in_child``, a child process
    accesses networks, and everything with a ``deadline`` (of :func:`time.monotonic`). Raises :class:`BadRequest`,
    :class:`TransferFailed`, and :class:`BadStore` for a file that is not a bundle.
    """
    url = str(address)
    if not url:
        raise BadRequest("no store is named; name a bundle FILE, a folder or a URL")
    if not in_child and (place.is_url(url) or deadline is not None):
        from cachectl.exchange.network import NetworkPlace

        url = url if place.is_url(url) else str(environment.expand(url))
        return NetworkPlace(url, environment, writes=writes, force=force, deadline=deadline)
    if url.lower().startswith(("oci://", "oci+http://")):
        from cachectl.exchange.bundle import RegistryPlace

        return RegistryPlace(url, environment)
    if place.is_url(url):
        return place.RemotePlace(url)
    path = environment.expand(url)
    # A new name that ends in .zip is a bundle too.
    if url == place.STREAM or (not path.is_dir() if path.exists() else path.suffix == ".zip"):
        from cachectl.exchange.bundle import BundlePlace

        return BundlePlace(None if url == place.STREAM else path, environment, writes=writes, force=force)
    return place.FolderPlace(path)


class StoreMemory:
    """What this machine remembers of the store at an address: files of its index, and its newest trusted parts.

    Everything is kept in the user's state folder, if no other user can write there; failures to read or write are
    ignored. Index parts and key documents are checked against the digests in their names when read again. The newest
    trusted parts, and parts that were removed since, reveal an older state of a store. Without an address nothing is
    remembered.
    """

    def __init__(self, environment: Environment, address: str | None) -> None:
        # Machines that share a home may have different stores at one path.
        full = address if address is None or place.is_url(address) else f"{platform.node()}:{address}"
        name = hashlib.sha256((full or "").encode(errors="replace")).hexdigest()[:32]
        self._folder = None if full is None else user_state_folder(environment) / "stores" / name
        #: What :meth:`save` will write, by name.
        self.new: dict[str, bytes] = {}
        self._before: list[str] = []

    def look(self) -> None:
        """Note what is kept before the store is listed: parts that the list then lacks were removed from the store.

        Parts that another process adds later may be newer than the list.
        """
        with contextlib.suppress(OSError), self._opened() as folder, os.scandir(folder) as files:
            names = (file.name for file in files if file.is_file(follow_symlinks=False))
            self._before = sorted(name for name in names if wire.is_name(wire.INDEX + name))

    def read(self, name: str, most: int) -> bytes:
        """Return the kept bytes, which are not checked; empty if there are none."""
        if name in self.new:
            return self.new[name]
        with contextlib.suppress(OSError), self._opened() as folder:
            return plain.read_plain(name, dir_fd=folder, most=most)
        return b""

    def seen(self) -> tuple[Sequence[str], list[str]]:
        """Return the newest trusted parts, made within one second, and those that were read and then removed."""
        try:
            *_, newest, removed = wire.parsed(self.read(_SEEN, _LARGEST))
            return wire.sort_names([wire.INDEX + name for name in newest])[0], list(map(str, removed))
        except PARSE_ERRORS:
            return (), []

    def save(self, listed: Collection[str], trusted: Collection[str] = (), *, afresh: bool = False) -> None:
        """Write what is new, and remove index parts and keys that are no longer listed.

        The newest ``trusted`` parts are remembered, unless newer ones are; ``afresh`` forgets older memory.
        """
        with contextlib.suppress(OSError), self._opened(make=bool(self.new or trusted)) as folder:
            # Another process may have seen newer parts meanwhile.
            parts, removed = ((), []) if afresh else self.seen()
            for name in self._before:
                if name not in listed and name not in self.new:
                    atomic.remove_file(name, folder)
                    removed.append(name)
            candidates = {*parts, *trusted}
            latest = max(map(wire.made_of, candidates), default=0)
            newest = sorted(name for name in candidates if wire.made_of(name) == latest)
            memory = encode_json((latest, newest, list(dict.fromkeys(removed))[-_MOST_GONE:]))
            if memory != self.read(_SEEN, _LARGEST):
                self.new[_SEEN] = memory
            for name, data in self.new.items():
                atomic.replace_file(name, [data], folder=folder)
        self.new.clear()

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        """Open the folder. Raises :class:`OSError` if another user could write there, and for a link."""
        if self._folder is None:
            raise FileNotFoundError
        if (reason := shared_because(plain.nearest(self._folder))) is not None:
            raise PermissionError(errno.EPERM, reason, str(self._folder))
        if make:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with handles.opened(str(self._folder)) as folder:
            yield folder


class StoreCollection:
    """A store as a collection: ``parts`` and ``files`` of its index as listed, the oldest part first.

    With a list of ``allowed`` signers, a part must be signed by one of them. Index files that were read before come
    from ``memory``. What is added is signed with ``key``, and complete after :meth:`finish`. After ``deadline`` no
    downloaded entry is read.
    """

    def __init__(
        self,
        place: place.StorePlace,
        environment: Environment,
        allowed: str | None = None,
        *,
        key: str | None = None,
        deadline: float | None = None,
    ) -> None:
        self.place = place
        self.environment = environment
        self.memory = StoreMemory(environment, None if place.is_bundle else place.shown)
        #: Bytes read in packs, and bytes written in all files.
        self.fetched = self.written = 0
        #: Index parts that were removed earlier, and are not used if they reappear.
        self.gone: Sequence[str] = ()
        self._allowed = allowed
        self._key = key
        self._deadline = deadline
        #: The index parts and key documents that were read, by name.
        self._parsed: dict[str, Any] = {}
        self._spool: BinaryIO | None = None
        self.parts: tuple[str, ...] = ()
        self.files: frozenset[str] = frozenset()
        self.refresh()

    def refresh(self) -> bool:
        """List the names again; return whether they have changed."""
        before = self.files
        self.memory.look()
        with self._naming(self.place.shown):
            self.parts, self.files = wire.sort_names(self.place.names("index"))
        #: The parts whose entries may be used, with their signers, and the others, with the reasons.
        self.trusted: dict[str, str | None] = {}
        self.left_out: dict[str, str] = {}
        return self.files != before

    def settled(self, work: Callable[[], T], *, attempts: int = _AGAIN) -> T:
        """Return the result of ``work``, which is repeated if ``gc`` removed something meanwhile."""
        for _ in range(attempts):
            try:
                return work()
            except place.Gone:  # noqa: PERF203
                if not self.refresh():
                    raise
        raise place.TransferFailed(f"cannot read {self.place.shown}: its index keeps changing; try again")

    @property
    def digest(self) -> str:
        """Return what pins the content: the SHA-256 of a bundle, or of the sorted names of the index parts."""
        return self.place.digest() or wire.digest_of(self.parts)

    def require_store(self) -> None:
        """Raise :class:`Missing` if there is no store."""
        if not self.files:
            raise place.Missing(f"{self.place.shown}: there is no store; cachectl push {self.place.shown} makes one")

    def portability_keys(self) -> list[wire.StoreKey]:
        """Return the portability keys of all parts, by layer. Raises :class:`BadStore`."""
        names = dict.fromkeys(map(wire.key_of, self.parts))
        return sorted(map(self.key, names), key=lambda key: key.layer)

    def key(self, name: str) -> wire.StoreKey:
        """Return the portability key with a name of 16 digits. Raises :class:`BadStore`."""
        return self._read(f"key-{name}", wire.LARGEST_KEY, partial(wire.parse_key, name))

    def part(self, name: str) -> wire.Part:
        """Return an index part, which is parsed and remembered only if it is trusted.

        Raises :class:`Untrusted` with the reason, :class:`BadStore`, and :class:`Gone` if it was removed meanwhile.
        """
        return self._read(name, wire.MOST_PART, partial(self._judged, name))

    def _judged(self, name: str, file: bytes) -> wire.Part:
        text, signature = wire.open_part(name, file)
        signer = None
        if self._allowed is not None:
            with self._naming(name):
                signer = trust.signer(self.environment, self._allowed, text, signature)
        return wire.parse_part(name, text)._replace(is_signed=bool(signature), signer=signer)

    def usable(self, name: str) -> wire.Part | None:
        """Return an index part; ``None``, with the reason in ``left_out``, if its entries may not be used."""
        if name in self.gone:
            self.left_out[name] = "it was removed from the store earlier, and has reappeared"
        if name in self.left_out:
            return None
        try:
            part = self.part(name)
        except trust.Untrusted as error:
            self.left_out[name] = str(error)
            return None
        self.trusted[name] = part.signer
        return part

    def _read(self, file: str, most: int, parse: Callable[[bytes], T]) -> T:
        """Return the content of a file of the index, as this machine remembers it, or as it is in the store."""
        with contextlib.suppress(place.BadStore):
            if file not in self._parsed:
                self._parsed[file] = parse(self.memory.read(file, most))
        if file not in self._parsed:
            with self._naming(self.place.shown):
                data = self.place.read(wire.INDEX + file, most)
                self._parsed[file] = parse(data)
            self.memory.new[file] = data
        content: T = self._parsed[file]
        return content

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Add the name of what is damaged to an error."""
        try:
            yield
        except place.BadStore as error:
            if str(error).startswith(name):
                raise
            raise place.BadStore(f"{name}: {error}") from error

    def entries(self, key: wire.StoreKey, selection: Selection, _: Moved | None = None) -> Iterator[wire.StoredEntry]:
        """Yield the selected entries in the usable parts of a portability key, the newest part first."""
        for name in reversed(self.parts):
            if wire.key_of(name) == key.name and (part := self.usable(name)) is not None:
                yield from (stored for stored in part.entries if selection.matches(stored.entry))

    def known(self, key: wire.StoreKey) -> set[str]:
        """Return the keys of the entries of a portability key."""
        return self.settled(lambda: {item.key for item in self.entries(key, ALL)})

    def contents(self, items: Iterable[wire.StoredEntry]) -> Iterator[tuple[wire.StoredEntry, Artifact]]:
        """Yield entries with their verified artifacts, with one request per pack, in the order of their offsets.

        Raises :class:`BadStore` if anything differs from the index, and :class:`Gone` if a pack is missing.
        """
        groups: dict[wire.Pack, list[wire.StoredEntry]] = {}
        for item in items:
            groups.setdefault(item.pack, []).append(item)
        for pack, group in groups.items():
            with self._naming(self.place.shown):
                file = self.place.read(pack.name, pack.packed)
                self.fetched += len(file)
                unpacked = wire.open_pack(group, file)
                del file
                yield from unpacked

    def download(self, items: Iterable[wire.StoredEntry], file: BinaryIO, folder: Path) -> list[wire.StoredEntry]:
        """Download and verify entries into an open file of a folder; return them with their offsets there.

        From then on, :meth:`read` reads that file.
        """
        from cachectl.exchange import bundle

        self._spool = file
        downloaded = []
        for item, artifact in self.contents(items):
            downloaded.append(item._replace(offset=file.tell()))
            bundle.spool(file, artifact.data, folder, self.place.shown)
        return downloaded

    def read(self, _: wire.StoreKey, items: Iterable[wire.StoredEntry], outcome: Moved) -> Contents:
        """Yield items with their artifacts, until the deadline."""
        if self._spool is None:
            yield from ((item.entry, artifact) for item, artifact in self.contents(items))
            return
        for item in items:
            try:
                place.require_time(self._deadline)
            except place.TransferFailed as error:
                outcome.failed.append(Note(item.key, str(error)))
                continue
            self._spool.seek(item.offset)
            yield item.entry, item.artifact(self._spool.read(item.entry.bytes))

    def write(self, key: wire.StoreKey, contents: Contents, outcome: Moved) -> None:
        """Upload entries of one portability key with their artifacts, and list them in the index."""
        items: list[wire.StoredEntry] = []
        lines, began = 0, self.environment.clock()
        for pack, length in self._packs(contents, outcome):
            items += self._write_pack(pack)
            outcome.placed += len(pack)
            outcome.bytes += sum(item.entry.bytes for item, _ in pack)
            lines += length
            is_old = self.environment.clock() - began > _CHECKPOINT
            if len(items) >= _FULL_PART or lines >= wire.FULL_PART or is_old:
                self._write_part(key, items, began)
                items, lines, began = [], 0, self.environment.clock()
        if items:
            self._write_part(key, items, began)

    def _packs(self, contents: Contents, outcome: Moved) -> Iterator[tuple[list[tuple[wire.StoredEntry, bytes]], int]]:
        """Group entries into packs, each with the length of its lines in an index part."""
        pack: list[tuple[wire.StoredEntry, bytes]] = []
        size = lines = 0
        for entry, artifact in contents:
            # The bytes of a bundle must not depend on when its entries were stored.
            item = wire.stored_entry(entry, artifact, with_time=not self.place.is_bundle)
            # Readers would reject all other entries with it.
            if (unfit := wire.complaint(item)) is not None:
                outcome.failed.append(Note(item.key, f"cannot be stored: it has {unfit}"))
                continue
            length = _PLACE + len(wire.canonical(wire.line_of(item)))
            if item.entry.bytes >= wire.LARGE:
                yield [(item, artifact.data)], length
                continue
            pack.append((item, artifact.data))
            size, lines = size + item.entry.bytes, lines + length
            if size + lines >= wire.FULL_PACK or len(pack) >= _FULL_PART:
                yield pack, lines
                pack, size, lines = [], 0, 0
        if pack:
            yield pack, lines

    def _write_pack(self, entries: list[tuple[wire.StoredEntry, bytes]]) -> Iterator[wire.StoredEntry]:
        content = b"".join(data for _, data in entries)
        # A name that no other push produces, so that gc cannot remove a pack on which another push relies.
        file = wire.file_of(content, b"" if self.place.is_bundle else os.urandom(_SALT))
        name = wire.PACKS + hashlib.sha256(file).hexdigest()
        self._put(name, file)
        pack, offset = wire.Pack(name, len(file), len(content)), 0
        for item, _ in entries:
            yield item._replace(pack=pack, offset=offset)
            offset += item.entry.bytes

    def _write_part(self, key: wire.StoreKey, items: list[wire.StoredEntry], began: float) -> None:
        now = self.environment.clock()
        if now - began > _TOO_SLOW:
            message = f"cannot push to {self.place.shown}: it took more than half a day; push fewer layers at once"
            raise place.TransferFailed(message)
        if f"key-{key.name}" not in self.files:
            self._put(f"{wire.INDEX}key-{key.name}", key.to_bytes())
        # The bytes of a bundle must not depend on the clock, so its parts are numbered.
        made = 1 + max(map(wire.made_of, self.parts), default=-1) if self.place.is_bundle else int(now)
        text = wire.part_of(made, key, items)
        file = wire.file_of(text, b"" if self._key is None else trust.sign(text, self._key))
        name = f"{made}-{key.name}-{hashlib.sha256(file).hexdigest()}"
        self._put(wire.INDEX + name, file)
        self.parts += (name,)

    def _put(self, name: str, data: bytes) -> None:
        self.place.write(name, data)
        self.written += len(data)
        if name.startswith(wire.INDEX):
            self.memory.new[name.removeprefix(wire.INDEX)] = data
            self.files |= {name.removeprefix(wire.INDEX)}

    def finish(self) -> None:
        """Complete what was added."""
        self.place.finish()
        self.memory.save(self.files)
