"""Push: add to a store what it lacks.

Packs and objects are written first and the index part that lists them last: that acknowledges the push. A push that is
killed leaves files that nothing lists, which ``store gc`` removes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.exchange.copying import (
    Counts,
    copy,
    copy_database,
    exposed_folders,
    in_batches,
    layers_with_file,
    missing,
    place_of_file,
    read_entries,
)
from cachectl.exchange.format import (
    FULL_PACK,
    FULL_PART,
    INDEX,
    LARGE,
    MOST_ENTRIES,
    SALT,
    Part,
    PartName,
    Stocked,
    StoreKey,
    bundle_id,
    digest_of,
    is_young,
    new_store_id,
    object_file,
    pack_file,
    part_file,
)
from cachectl.exchange.index import Gone, Index, place_of
from cachectl.exchange.place import Changed, TransferFailed, is_url, local_path
from cachectl.exchange.portability import portability_key
from cachectl.exchange.trust import judges, sign
from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.facts import Ability, Entry, Note
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.atomic import new_file, replace_file
from cachectl.layers.disk.locking import is_same_file, take_flock
from cachectl.layers.disk.presence import status_at
from cachectl.layers.stores.database import COMPANIONS, companion
from cachectl.listing import listed

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

#: Seconds after which a long push writes an index part for what it has uploaded.
_CHECKPOINT: Final = 600.0
#: Seconds between the upload of a pack and that of its index part, after which the push fails: half of the default
#: grace period of ``store gc``.
_TOO_SLOW: Final = 43200.0
#: How often a push starts again because another command has written the bundle meanwhile.
_AGAIN: Final = 100
#: New entries up to this number are read one by one, more of them by a listing of all.
_FEW: Final = 64
#: Bytes of the line of an entry beside its key.
_LINE: Final = 600


@dataclass(frozen=True, slots=True)
class PushedLayer:
    """The push of one layer: what was added, and ``there``, the number of entries that the store had.

    ``sensitive`` says what its entries reveal, ``None`` if that is not known. ``exposed`` lists the folders in which
    another user could have put an entry.
    """

    layer: str
    pushed: int
    bytes: int
    there: int
    portability_key: Mapping[str, str | None]
    sensitive: str | None = None
    exposed: tuple[Path, ...] = ()
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(names={"portability_key": "fingerprint", "exposed": "writable_by_others"})


@dataclass(frozen=True, slots=True)
class PushTotal:
    """The sums over all layers."""

    pushed: int
    bytes: int
    there: int
    skipped: int
    failed: int


@dataclass(frozen=True, slots=True)
class Push:
    """What a push added to a store, or to a database file.

    ``digest`` pins the content of the store as this push left it; ``written`` is the number of bytes that were
    uploaded, and ``parts`` are the names of the index parts among them.
    """

    url: str
    store: str | None
    digest: str | None
    written: int
    parts: tuple[str, ...]
    signed: bool
    layers: tuple[PushedLayer, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/push/1", also=("total",))

    @property
    def total(self) -> PushTotal:
        """Return the sums over all layers."""
        return total(PushTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether a requested entry or layer could not be read."""
        return any(layer.failed for layer in self.layers)


def push(
    stack: LayerSet,
    target: str | Path,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    besides: Mapping[str, Collection[str]] = MappingProxyType({}),
    sign: str | None = None,
    allowed_signers: str | None = None,
    force: bool = False,
    own: Environment | None = None,
) -> Push:
    """Add the selected entries of the named layers, or of every clearable layer, that the store at a target lacks.

    ``besides`` are keys, by layer, that are left out. ``sign`` is an OpenSSH key. An entry counts as present if a part
    lists it that ``sign`` or a signer of ``allowed_signers`` has signed; without both, if any part does. ``force``
    replaces a file that is not a bundle. ``own`` is the environment that keeps index parts for the next command, by
    default that of ``stack``. Raises :class:`BadStore` if the store is damaged, :class:`TransferFailed` or
    :class:`OSError` if it cannot be reached or written, and :class:`BadRequest` if the key cannot sign.
    """
    named = tuple(dict.fromkeys(layers))
    chosen = sorted(stack.chosen(named), key=lambda layer: layer.name)
    here = own or stack.environment
    name = os.fspath(target)
    if not is_url(name) and (found := place_of_file(chosen, here.expand(local_path(name)))) is not None:
        return _until_unchanged(lambda: _push_to_file(stack, here.expand(local_path(name)), *found, selection))
    with judges(here, sign, allowed_signers) as trusted:

        def push_once() -> Push:
            writer = Writer(Index(place_of(target, here, writes=True, force=force), here, trusted), sign)
            done = push_layers(stack, writer, selection, chosen, besides, named=bool(named))
            writer.finish()
            return Push(
                *(writer.index.place.shown, writer.index.names.store, writer.digest, writer.written),
                *(tuple(sorted(map(str, writer.parts))), sign is not None, done),
            )

        return _until_unchanged(push_once)


def _until_unchanged(push_once: Callable[[], Push]) -> Push:
    """Start again whenever another command has written the file meanwhile."""
    for _ in range(_AGAIN - 1):
        with suppress(Changed):
            return push_once()
    return push_once()


def push_layers(
    stack: LayerSet,
    writer: Writer,
    selection: Selection,
    chosen: Iterable[Layer],
    besides: Mapping[str, Collection[str]] = MappingProxyType({}),
    *,
    named: bool = False,
) -> tuple[PushedLayer, ...]:
    """Write the selected entries of layers that a store lacks; a layer that cannot be read is a failure if named."""
    return tuple(_pushed(stack, layer, selection, writer, besides, named=named) for layer in chosen)


def _pushed(
    stack: LayerSet,
    layer: Layer,
    selection: Selection,
    writer: Writer,
    besides: Mapping[str, Collection[str]],
    *,
    named: bool,
) -> PushedLayer:
    counts = Counts()
    key = StoreKey(layer.name, portability_key(stack.portability(layer.name), stack.environment))
    exposed: tuple[Path, ...] = ()
    reason = layer.abilities()[Ability.GET]
    if reason is not None:
        if named:
            counts.failed.append(Note("*", f"cannot get: {reason}"))
    else:
        left_out = besides.get(layer.name, ())
        new = missing(layer, writer.known(key), selection, counts)
        new = {one: entry for one, entry in new.items() if one not in left_out}
        if new and not selection.needs_contents:
            new.update(_described(layer, new.keys()))
        if new:
            exposed = exposed_folders(layer)
            writer.add(key, _read(layer, new.values(), counts), exposed=bool(exposed))
    return PushedLayer(
        *(layer.name, counts.placed, counts.bytes, counts.there, dict(key.facts)),
        sensitive=layer.reveals if counts.placed else None,
        exposed=exposed,
        skipped=tuple(counts.skipped),
        failed=tuple(counts.failed),
    )


def _read(layer: Layer, entries: Iterable[Entry], counts: Counts) -> Iterator[tuple[Stocked, bytes]]:
    for batch in in_batches(entries, lambda entry: entry.bytes):
        for entry, item, data in read_entries(layer, batch, counts):
            counts.placed += 1
            counts.bytes += item.bytes
            modified = None if entry.modified is None or entry.modified < 0 else int(entry.modified)
            yield Stocked(item, kernels=entry.kernels, modified=modified), data


def _described(layer: Layer, keys: Collection[str]) -> dict[str, Entry]:
    """Return entries with what their bytes say: kernels, and for some layers the device and versions."""
    found: dict[str, Entry] = {}
    selections = [Selection(key=key) for key in keys] if len(keys) <= _FEW else [ALL]
    for selection in selections:
        for entry in listed((layer,), selection, lambda _: None):
            if entry.key in keys:
                found.setdefault(entry.key, entry)
    return found


def _push_to_file(stack: LayerSet, file: Path, layer: Layer, place: Path, selection: Selection) -> Push:
    """Add to a database file the entries of its layer that belong to it, through a copy of the file."""
    counts = Counts()
    target = file.resolve()
    with _locked(target) as standing, layers_with_file(stack.environment, layer, target, place) as (within, copied):
        copy(layer, within[layer.name], selection, counts, prefix=place.as_posix())
        if counts.placed:
            flat = copied.with_name(f"{copied.name}.flat")
            copy_database(copied, flat)
            if _state_of(target) != standing:
                raise Changed(str(file))
            try:
                (new_file if standing is None else replace_file)(target, [flat.read_bytes()])
            except FileExistsError as error:
                raise Changed(str(file)) from error
            except OSError as error:
                raise TransferFailed(f"cannot write {printable(file)}: {error.strerror or error}") from error
    facts = portability_key(stack.portability(layer.name), stack.environment)
    done = PushedLayer(
        *(layer.name, counts.placed, counts.bytes, counts.there, facts),
        sensitive=layer.reveals if counts.placed else None,
        skipped=(*counts.skipped, *counts.kept),
        failed=tuple(counts.failed),
    )
    return Push(str(file), None, None, file.stat().st_size if counts.placed else 0, (), False, (done,))  # noqa: FBT003


@contextmanager
def _locked(file: Path) -> Iterator[tuple[int, ...] | None]:
    """Yield the state of a database file while no other push changes it; ``None`` if there is no file.

    Raises :class:`TransferFailed` for a database with a log or a journal: it belongs to the file that is replaced.
    """
    try:
        opened = open(file, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        yield None
        return
    with opened:
        take_flock(opened.fileno(), wait=True)
        if not is_same_file(file, opened.fileno()):
            raise Changed(str(file))
        for suffix in COMPANIONS:
            if os.path.lexists(beside := companion(file, suffix)):
                why = f"a program uses it, or was killed while it did: {printable(beside.name)} is there"
                raise TransferFailed(f"cannot write {printable(file)}: {why}; end the program, or push to a new FILE")
        yield _state_of(file)


def _state_of(file: Path) -> tuple[int, ...] | None:
    status = status_at(file)
    return None if status is None else (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


# ---------------------------------------------------------------------- writing to a store


@dataclass
class _Batch:
    """Entries of one portability key that are uploaded, and those that wait for their pack to be full."""

    key: StoreKey
    exposed: bool
    started: float
    packs: dict[str, tuple[int, int]] = field(default_factory=dict)
    entries: list[Stocked] = field(default_factory=list)
    waiting: list[tuple[Stocked, bytes]] = field(default_factory=list)
    weight: int = 0
    lines: int = 0


class Writer:
    """Adds entries to a store. ``parts`` are the index parts that it wrote, ``written`` the bytes of all files."""

    def __init__(self, index: Index, key: str | None = None) -> None:
        self.index = index
        self.parts: dict[PartName, Part] = {}
        self.written = 0
        self._place = index.place
        self._clock = index.environment.clock
        self._sign = key
        self._condemned: frozenset[str] | None = None
        self._superseded: list[PartName] = []

    @property
    def digest(self) -> str:
        """Return what pins the content of the store as it is now."""
        return self._place.digest() or digest_of({*self.index.names.parts, *self.parts})

    def known(self, key: StoreKey) -> frozenset[str]:
        """Return the keys of the entries in trusted parts of a portability key."""
        while True:
            known: set[str] = set()
            try:
                for name in self.index.names.parts:
                    if name.key == key.name:
                        read = self.index.read(name)
                        if read.part.store == self.index.names.store:
                            known.update(one.item.key for one in read.part.entries)
            except Gone:
                before = self.index.names
                self.index.refresh()
                if before == self.index.names:
                    raise
                continue
            return frozenset(known)

    def add(self, key: StoreKey, entries: Iterable[tuple[Stocked, bytes]], *, exposed: bool) -> None:
        """Upload entries of one portability key, each with its bytes, and list them in the index."""
        batch = _Batch(key, exposed, self._clock())
        for one, data in entries:
            item = one.item
            if self._place.is_bundle:
                # Where it was found does not change the bytes.
                one = replace(one, modified=None)  # noqa: PLW2901
            if item.bytes >= LARGE and f"objects/{item.sha256}" not in self._doomed():
                self._write(f"objects/{item.sha256}", object_file(data))
                batch.entries.append(one)
            else:
                batch.waiting.append((one, data))
                batch.weight += item.bytes
            batch.lines += _LINE + len(item.key)
            if batch.weight >= FULL_PACK or item.bytes >= LARGE:
                self._pack(batch)
            full = len(batch.entries) + len(batch.waiting) >= MOST_ENTRIES or batch.lines >= FULL_PART
            if full or self._clock() - batch.started > _CHECKPOINT:
                self._finish(batch)
        self._finish(batch)

    def take(self, source: Index) -> int:
        """Add the entries of another store that this one lacks; return their number."""
        taken = 0
        for name in source.names.parts:
            part = source.read(name).part
            known = self.known(part.key)
            new = [(part, one) for one in part.entries if one.item.key not in known]
            bare = ((Stocked(one.item, None, 0, one.kernels, one.modified), data) for one, data in source.contents(new))
            self.add(part.key, bare, exposed=part.exposed)
            taken += len(new)
        return taken

    def _doomed(self) -> frozenset[str]:
        """Return the names that ``gc`` may remove at any moment: an object of such a name must not be relied on."""
        if self._condemned is None:
            names = self.index.names.condemned
            self._condemned = frozenset(one for name in names for one in self.index.condemned(name))
        return self._condemned

    def _pack(self, batch: _Batch) -> None:
        """Upload the waiting entries as one pack."""
        if not batch.waiting:
            return
        salt = b"" if self._place.is_bundle else os.urandom(SALT)
        file = pack_file([data for _, data in batch.waiting], salt)
        name = hashlib.sha256(file).hexdigest()
        self._write(f"packs/{name}", file)
        batch.packs[name] = (len(file), batch.weight)
        offset = 0
        for one, _ in batch.waiting:
            batch.entries.append(Stocked(one.item, name, offset, one.kernels, one.modified))
            offset += one.item.bytes
        batch.waiting.clear()
        batch.weight = 0

    def _finish(self, batch: _Batch) -> None:
        """Write the index part of what was uploaded, and begin another one."""
        self._pack(batch)
        if batch.entries:
            if self._clock() - batch.started > _TOO_SLOW:
                message = (
                    f"cannot push to {self._place.shown}: it took longer than half a day; push fewer layers at once"
                )
                raise TransferFailed(message)
            self._write_part(batch.key, batch.exposed, dict(batch.packs), tuple(batch.entries))
        batch.packs.clear()
        batch.entries.clear()
        batch.lines = 0
        batch.started = self._clock()

    def _write_part(
        self,
        key: StoreKey,
        exposed: bool,
        packs: Mapping[str, tuple[int, int]],
        entries: tuple[Stocked, ...],
    ) -> None:
        store = self._store(entries)
        if key.name not in self.index.names.keys and all(name.key != key.name for name in self.parts):
            self._write(f"{INDEX}key-{key.name}", key.to_bytes())
            self.index.keep(f"key-{key.name}", key.to_bytes())
        part = Part(store, self._moment(), key, exposed, packs, entries)
        text = part.to_bytes()
        file = part_file(text, b"" if self._sign is None else sign(text, self._sign))
        name = PartName(part.made, key.name, hashlib.sha256(file).hexdigest())
        self._write(f"{INDEX}{name}", file)
        self.index.keep(str(name), file)
        self.parts[name] = part

    def _moment(self) -> int:
        """Return the time of a new part; in a bundle, whose bytes do not depend on the clock, only its number."""
        if self._place.is_bundle:
            return 1 + max((name.made for name in (*self.index.names.parts, *self.parts)), default=-1)
        # A part that is written again is newer than the first one, which a reader may remember.
        return max(int(self._clock()), 1 + max((name.made for name in self._superseded), default=-1))

    def _store(self, first: Sequence[Stocked]) -> str:
        """Return the identity of the store, which a first push makes."""
        if self.index.names.store is None:
            new = bundle_id(first) if self._place.is_bundle else new_store_id(self._clock())
            self._write(f"{INDEX}store-{new}", b"\n")
            # Another first push may have been faster.
            self.index.refresh()
        return self.index.require_store()

    def finish(self) -> None:
        """Complete the store. If two first pushes met, write the parts again for the identity that counts."""
        if self.parts and is_young(self.index.require_store(), self._clock()):
            self.index.refresh()
            for name, part in tuple(self.parts.items()):
                if part.store != self.index.require_store():
                    del self.parts[name]
                    self._superseded.append(name)
                    self._write_part(part.key, part.exposed, part.packs, part.entries)
                    self._place.remove([f"{INDEX}{name}"])
        self._place.finish()
        self.index.save()

    def _write(self, name: str, data: bytes) -> None:
        self._place.write(name, data)
        self.written += len(data)
