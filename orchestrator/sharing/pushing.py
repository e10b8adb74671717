"""Push: add to a shared store what it lacks.

Packs and objects are written first and the index part that lists them last: that acknowledges the push. A push that is
killed leaves files that nothing lists, which ``store gc`` removes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.inspecting.entries import Trouble, listed
from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.facts import Ability, Entry, Note
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk.temporaries import temporary_folder
from cachectl.moving.bundle import Item, in_batches
from cachectl.moving.exporting import exposed_folders, read_entries
from cachectl.moving.portability import portability_key
from cachectl.moving.signing import Untrusted, public_key, sign
from cachectl.moving.transfer import TransferFailed
from cachectl.sharing.format import (
    FULL_PACK,
    FULL_PART,
    INDEX,
    LARGE,
    MOST_ENTRIES,
    Part,
    PartName,
    Stocked,
    StoreKey,
    digest_of,
    is_young,
    new_store_id,
    object_file,
    pack_file,
    part_file,
)
from cachectl.sharing.index import NAMESPACE, Gone, Index, Judge
from cachectl.sharing.places import place_of

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

#: Seconds after which a long push writes an index part for what it has uploaded.
_CHECKPOINT: Final = 600.0
#: Seconds between the upload of a pack and that of its index part, after which the push fails: half of the default
#: grace period of ``store gc``.
_TOO_SLOW: Final = 43200.0
#: New entries up to this number are read one by one, more of them by a listing of all.
_FEW: Final = 64


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
    """What a push added to a store.

    ``digest`` pins the content of the store as this push left it; ``written`` is the number of bytes that were
    uploaded, and ``parts`` are the names of the index parts among them.
    """

    url: str
    store: str | None
    digest: str
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
    url: str | Path,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    besides: Mapping[str, Collection[str]] = MappingProxyType({}),
    sign: str | None = None,
    allowed_signers: str | None = None,
    own: Environment | None = None,
) -> Push:
    """Add the selected entries of the named layers, or of every clearable layer, that the store at ``url`` lacks.

    ``besides`` are keys, by layer, that are left out. ``sign`` is an OpenSSH key. An entry counts as present if a part
    lists it that ``sign`` or a signer of ``allowed_signers`` has signed; without both, if any part does. ``own`` is the
    environment that keeps index parts for the next command, by default that of ``stack``. Raises :class:`BadStore` if
    the store is damaged, :class:`TransferFailed` or :class:`OSError` if it cannot be reached or written, and
    :class:`BadRequest` if the key cannot sign.
    """
    named = tuple(dict.fromkeys(layers))
    chosen = sorted(stack.chosen(named), key=lambda layer: layer.name)
    with ExitStack() as block:
        index = Index(place_of(url, own or stack.environment), own or stack.environment)
        pushing = _Pushing(stack, index, sign, _judges(stack, sign, allowed_signers, block), besides)
        done = tuple(pushing.push(layer, selection, named=bool(named)) for layer in chosen)
        pushing.settle()
        index.place.finish()
        index.save()
    return pushing.result(done)


def _judges(stack: LayerSet, sign: str | None, allowed: str | None, block: ExitStack) -> tuple[Judge, ...]:
    """Return the judges of which one must trust a part; none if every part counts."""
    judges = [] if allowed is None else [Judge(stack.environment, allowed)]
    if sign is not None:
        own = block.enter_context(temporary_folder(stack.environment)) / "own"
        own.write_text(f"me {public_key(sign)}\n", encoding="utf-8")
        judges.append(Judge(stack.environment, str(own)))
    return tuple(judges)


@dataclass
class _Batch:
    """Entries of one portability key that are uploaded, and those that wait for their pack to be full."""

    key: StoreKey
    exposed: bool
    started: float
    packs: dict[str, tuple[int, int]] = field(default_factory=dict)
    entries: list[Stocked] = field(default_factory=list)
    waiting: list[tuple[Entry, Item, bytes]] = field(default_factory=list)
    weight: int = 0
    lines: int = 0


@dataclass
class _Counts:
    """The results for the entries of one layer so far."""

    pushed: int = 0
    bytes: int = 0
    there: int = 0
    skipped: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)


class _Pushing:
    """One push: the index of the store, and what was written to it."""

    def __init__(
        self,
        stack: LayerSet,
        index: Index,
        key: str | None,
        judges: tuple[Judge, ...],
        besides: Mapping[str, Collection[str]],
    ) -> None:
        self._stack = stack
        self._besides = besides
        self._index = index
        self._place = index.place
        self._clock = stack.environment.clock
        self._sign = key
        self._judges = judges
        self._condemned: frozenset[str] | None = None
        self._parts: dict[PartName, Part] = {}
        self._superseded: list[PartName] = []
        self._written = 0

    def push(self, layer: Layer, selection: Selection, *, named: bool) -> PushedLayer:
        """Push one layer."""
        counts = _Counts()
        key = StoreKey(layer.name, portability_key(self._stack.portability(layer.name), self._stack.environment))
        exposed: tuple[Path, ...] = ()
        reason = layer.abilities()[Ability.GET]
        if reason is not None:
            if named:
                counts.failed.append(Note("*", f"cannot get: {reason}"))
        else:
            new = self._missing(layer, selection, key, counts)
            if new:
                exposed = exposed_folders(layer)
                self._upload(layer, new, _Batch(key, bool(exposed), self._clock()), counts)
        return PushedLayer(
            *(layer.name, counts.pushed, counts.bytes, counts.there, dict(key.facts)),
            sensitive=layer.reveals if counts.pushed else None,
            exposed=exposed,
            skipped=tuple(counts.skipped),
            failed=tuple(counts.failed),
        )

    def _missing(self, layer: Layer, selection: Selection, key: StoreKey, counts: _Counts) -> list[Entry]:
        """Return the selected entries that the store lacks, each key once, in the order of their keys."""

        def notice(trouble: Trouble) -> None:
            notes = counts.failed if trouble.failed else counts.skipped
            notes.append(Note("*" if trouble.path is None else str(trouble.path), trouble.message))

        found: dict[str, Entry] = {}
        left_out = self._besides.get(layer.name, ())
        for entry in listed((layer,), selection, notice, contents=selection.needs_contents):
            # Entries that only share a root belong to another program.
            if entry.key not in left_out and (entry.guest is None or selection.key is not None):
                found.setdefault(entry.key, entry)
        known = self._known(key) if found else frozenset()
        new = sorted(found.keys() - known)
        counts.there = len(found) - len(new)
        if new and not selection.needs_contents:
            found.update(_described(layer, new))
        return [found[one] for one in new]

    def _known(self, key: StoreKey) -> frozenset[str]:
        """Return the keys of the entries that count as present for a portability key."""
        while True:
            known: set[str] = set()
            try:
                for name in self._index.names.parts:
                    if name.key == key.name:
                        read = self._index.read(name)
                        keys = {one.item.key for one in read.part.entries}
                        if read.part.store == self._index.names.store and not keys <= known and self._counts(name):
                            known |= keys
            except Gone:
                before = self._index.names
                self._index.list()
                if before == self._index.names:
                    raise
                continue
            return frozenset(known)

    def _counts(self, name: PartName) -> bool:
        """Return whether the entries of a part count as present."""
        for judge in self._judges:
            try:
                judge.signer(self._index.read(name))
            except Untrusted:
                continue
            return True
        return not self._judges

    # ------------------------------------------------------------------ uploading

    def _upload(self, layer: Layer, new: Sequence[Entry], batch: _Batch, counts: _Counts) -> None:
        for entries in in_batches(new, lambda entry: entry.layer, lambda entry: entry.bytes):
            for entry, item, data in read_entries(layer, entries, counts.skipped, counts.failed, into="a store"):
                counts.pushed += 1
                counts.bytes += item.bytes
                if item.bytes >= LARGE and f"objects/{item.sha256}" not in self._doomed():
                    self._write(f"objects/{item.sha256}", object_file(data))
                    self._add(batch, _stocked(entry, item))
                else:
                    batch.waiting.append((entry, item, data))
                    batch.weight += item.bytes
                if batch.weight >= FULL_PACK or item.bytes >= LARGE:
                    self._pack(batch)
            full = len(batch.entries) + len(batch.waiting) >= MOST_ENTRIES - 256 or batch.lines >= FULL_PART
            if full or self._clock() - batch.started > _CHECKPOINT:
                self._finish(batch)
        self._finish(batch)

    def _doomed(self) -> frozenset[str]:
        """Return the names that ``gc`` may remove at any moment: an object of such a name must not be relied on."""
        if self._condemned is None:
            names = self._index.names.condemned
            self._condemned = frozenset(one for name in names for one in self._index.condemned(name))
        return self._condemned

    def _add(self, batch: _Batch, one: Stocked) -> None:
        batch.entries.append(one)
        batch.lines += len(one.to_line())

    def _pack(self, batch: _Batch) -> None:
        """Upload the waiting entries as one pack."""
        if not batch.waiting:
            return
        file = pack_file(data for _, _, data in batch.waiting)
        name = hashlib.sha256(file).hexdigest()
        self._write(f"packs/{name}", file)
        batch.packs[name] = (len(file), batch.weight)
        offset = 0
        for entry, item, _ in batch.waiting:
            self._add(batch, _stocked(entry, item, name, offset))
            offset += item.bytes
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
        store = self._store()
        if key.name not in self._index.names.keys and all(name.key != key.name for name in self._parts):
            self._write(f"{INDEX}key-{key.name}", key.to_bytes())
            self._index.keep(f"key-{key.name}", key.to_bytes())
        # A part that is written again is newer than the first one, which a reader may remember.
        made = max(int(self._clock()), 1 + max((name.made for name in self._superseded), default=-1))
        part = Part(store, made, key, exposed, packs, entries)
        text = part.to_bytes()
        signature = b"" if self._sign is None else sign(io.BytesIO(text), self._sign, NAMESPACE)
        file = part_file(text, signature)
        name = PartName(part.made, key.name, hashlib.sha256(file).hexdigest())
        self._write(f"{INDEX}{name}", file, part.holds)
        self._index.keep(str(name), file)
        self._parts[name] = part

    def _store(self) -> str:
        """Return the identity of the store, which a first push makes."""
        if self._index.names.store is None:
            self._write(f"{INDEX}store-{new_store_id(self._clock())}", b"\n")
            # Another first push may have been faster.
            self._index.list()
        return self._index.demand()

    def settle(self) -> None:
        """If two first pushes met, write the parts again for the identity that counts."""
        if not self._parts or not is_young(self._index.demand(), self._clock()):
            return
        self._index.list()
        for name, part in tuple(self._parts.items()):
            if part.store != self._index.demand():
                del self._parts[name]
                self._superseded.append(name)
                self._write_part(part.key, part.exposed, part.packs, part.entries)
                self._place.remove([f"{INDEX}{name}"])

    def _write(self, name: str, data: bytes, holds: Sequence[str] = ()) -> None:
        self._place.write(name, data, holds)
        self._written += len(data)

    def result(self, layers: tuple[PushedLayer, ...]) -> Push:
        """Return what was done."""
        names = self._index.names
        digest = digest_of({*names.parts, *self._parts})
        parts = tuple(sorted(map(str, self._parts)))
        return Push(self._place.shown, names.store, digest, self._written, parts, self._sign is not None, layers)


def _stocked(entry: Entry, item: Item, pack: str | None = None, offset: int = 0) -> Stocked:
    modified = None if entry.modified is None or entry.modified < 0 else int(entry.modified)
    return Stocked(item, pack, offset, entry.kernels, modified)


def _described(layer: Layer, keys: Collection[str]) -> dict[str, Entry]:
    """Return entries with what their bytes say: kernels, and for some layers the device and versions."""
    found: dict[str, Entry] = {}
    if len(keys) <= _FEW:
        for key in keys:
            for entry in listed((layer,), Selection(key=key), lambda _: None):
                found.setdefault(entry.key, entry)
        return found
    wanted = frozenset(keys)
    for entry in listed((layer,), ALL, lambda _: None):
        if entry.key in wanted:
            found.setdefault(entry.key, entry)
    return found
