"""Push: add to a store what it lacks.

Packs and objects are written first and the index part that lists them last: that acknowledges the push. A push that is
killed leaves files that nothing lists, which ``store gc`` removes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
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
    Item,
    Part,
    PartName,
    StoreKey,
    bundle_id,
    digest_of,
    is_young,
    new_store_id,
    object_file,
    pack_file,
    part_file,
)
from cachectl.exchange.index import Gone, StoreIndex, place_of
from cachectl.exchange.place import Changed, Deadline, TransferFailed, is_url, local_path, timely
from cachectl.exchange.portability import portability_key
from cachectl.exchange.trust import judges, sign
from cachectl.layers.base.errors import printable
from cachectl.layers.base.facts import Ability, AsJson, Entry, Note, total
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk.atomic import new_file, replace_file
from cachectl.layers.disk.locking import is_same_file, take_flock
from cachectl.layers.stores.database import COMPANIONS, companion
from cachectl.listing import Trouble, listed

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


@dataclass
class PushedLayer(Counts):
    """The push of one layer: what was added, and ``there``, the number of entries that the store had.

    ``sensitive`` says what its entries reveal, ``None`` if that is not known. ``exposed`` lists the folders in which
    another user could have put an entry.
    """

    portability_key: Mapping[str, str | None] = field(default_factory=dict)
    sensitive: str | None = None
    exposed: tuple[Path, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(
        hidden=("kept",),
        names={"placed": "pushed", "portability_key": "fingerprint", "exposed": "writable_by_others"},
    )

    @property
    def pushed(self) -> int:
        """Return the number of entries that were added."""
        return self.placed


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
    besides: Mapping[str, Collection[str]] | None = None,
    sign: str | None = None,
    allowed_signers: str | None = None,
    force: bool = False,
    own: Environment | None = None,
    deadline: Deadline | None = None,
) -> Push:
    """Add the selected entries of the named layers, or of every clearable layer, that the store at a target lacks.

    ``besides`` are keys, by layer, that are left out. ``sign`` is an OpenSSH key. An entry counts as present if a part
    lists it that ``sign`` or a signer of ``allowed_signers`` has signed; without both, if any part does. ``force``
    replaces a file that is not a bundle. ``own`` is the environment that keeps index parts for the next command, by
    default that of ``stack``. Raises :class:`BadStore` if the store is damaged, :class:`TransferFailed` or
    :class:`OSError` if it cannot be reached or written, also by ``deadline``, and :class:`BadRequest` if the key cannot
    sign.
    """
    named = tuple(dict.fromkeys(layers))
    chosen = sorted(stack.chosen(named), key=lambda layer: layer.name)
    here = own or stack.environment
    name = os.fspath(target)
    of_file = None if is_url(name) else place_of_file(chosen, here.expand(local_path(name)))
    with judges(here, sign, allowed_signers) as trusted:

        def push_once() -> Push:
            if of_file is not None:
                return _push_to_file(stack, here.expand(local_path(name)), *of_file, selection)
            place = timely(partial(place_of, target, here, writes=True, force=force), deadline)
            writer = Writer(StoreIndex(place, here, trusted), sign)
            done = push_layers(stack, writer, selection, chosen, besides, named=bool(named))
            writer.finish()
            return Push(
                *(place.shown, writer.index.names.store, writer.digest, writer.written),
                *(tuple(sorted(map(str, writer.parts))), sign is not None, done),
            )

        for _ in range(_AGAIN - 1):
            # Another command has written the file meanwhile.
            with suppress(Changed):
                return push_once()
        return push_once()


def push_layers(
    stack: LayerSet,
    writer: Writer,
    selection: Selection,
    chosen: Iterable[Layer],
    besides: Mapping[str, Collection[str]] | None = None,
    *,
    named: bool = False,
) -> tuple[PushedLayer, ...]:
    """Write the selected entries of layers that a store lacks; a layer that cannot be read is a failure if named."""
    done = []
    for layer in chosen:
        key = StoreKey(layer.name, portability_key(stack.portability(layer.name), stack.environment))
        pushed = PushedLayer(layer.name, portability_key=dict(key.facts))
        done.append(pushed)
        reason = layer.abilities()[Ability.GET]
        if reason is None:
            _push_layer(layer, key, selection, writer, pushed, left_out=(besides or {}).get(layer.name, ()))
        elif named:
            pushed.failed.append(Note("*", f"cannot get: {reason}"))
    return tuple(done)


def _push_layer(
    layer: Layer,
    key: StoreKey,
    selection: Selection,
    writer: Writer,
    done: PushedLayer,
    *,
    left_out: Collection[str],
) -> None:
    entries = missing(layer, writer.known(key), selection, done)
    new = {name: entry for name, entry in entries.items() if name not in left_out}
    if not new:
        return
    if not selection.needs_contents:
        _describe(layer, new, done)
    done.exposed = exposed_folders(layer)
    writer.add(key, _read(layer, new.values(), done), exposed=bool(done.exposed))
    done.sensitive = layer.about.reveals if done.placed else None


def _describe(layer: Layer, entries: dict[str, Entry], counts: Counts) -> None:
    """Add what the bytes of entries say: kernels, and for some layers the device and versions.

    Entries that cannot be read are taken out and noted.
    """
    selections = [Selection(key=key) for key in entries] if len(entries) <= _FEW else [ALL]
    troubles: list[Trouble] = []
    described: dict[str, Entry] = {}
    for entry in chain.from_iterable(listed((layer,), some, troubles.append) for some in selections):
        if entry.key in entries:
            described.setdefault(entry.key, entry)
    paths = {entry.root / key: key for key, entry in entries.items()}
    entries.update(described)
    for trouble in troubles:
        if trouble.failed and trouble.path is not None:
            key = next((paths[path] for path in (trouble.path, *trouble.path.parents) if path in paths), None)
            note = Note(str(trouble.path) if key is None else key, trouble.message)
            entries.pop(note.key, None)
            if note not in counts.failed:
                counts.failed.append(note)


def _read(layer: Layer, entries: Iterable[Entry], counts: Counts) -> Iterator[tuple[Item, bytes]]:
    for batch in in_batches(entries, lambda entry: entry.bytes):
        for item, data in read_entries(layer, batch, counts):
            counts.placed += 1
            counts.bytes += item.bytes
            yield item, data


def _push_to_file(stack: LayerSet, file: Path, layer: Layer, place: Path, selection: Selection) -> Push:
    """Add to a database file the entries of its layer that belong to it, through a copy of the file."""
    facts = portability_key(stack.portability(layer.name), stack.environment)
    done = PushedLayer(layer.name, portability_key=facts)
    target = file.resolve()
    with _locked(target) as before, layers_with_file(stack.environment, layer, target, place) as (within, copied):
        copy(layer, within[layer.name], selection, done, prefix=place.as_posix())
        if done.placed:
            flat = copied.with_name(f"{copied.name}.flat")
            copy_database(copied, flat)
            if _state_of(target) != before:
                raise Changed(str(file))
            try:
                (new_file if before is None else replace_file)(target, [flat.read_bytes()])
            except FileExistsError as error:
                raise Changed(str(file)) from error
            except OSError as error:
                raise TransferFailed(f"cannot write {printable(file)}: {error.strerror or error}") from error
    done.skipped += done.kept
    done.sensitive = layer.about.reveals if done.placed else None
    return Push(str(file), None, None, file.stat().st_size if done.placed else 0, (), False, (done,))  # noqa: FBT003


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
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


# ---------------------------------------------------------------------- writing to a store


@dataclass
class _Batch:
    """Entries of one portability key that are uploaded, and those that wait for their pack to be full."""

    key: StoreKey
    exposed: bool
    started: float
    packs: dict[str, tuple[int, int]] = field(default_factory=dict)
    entries: list[Item] = field(default_factory=list)
    waiting: list[tuple[Item, bytes]] = field(default_factory=list)
    weight: int = 0
    lines: int = 0


class Writer:
    """Adds entries to a store. ``parts`` are the index parts that it wrote, ``written`` the bytes of all files."""

    def __init__(self, index: StoreIndex, key: str | None = None) -> None:
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
            try:
                parts = [self.index.read(name).part for name in self.index.names.parts if name.key == key.name]
            except Gone:  # noqa: PERF203
                before = self.index.names
                self.index.refresh()
                if before == self.index.names:
                    raise
            else:
                store = self.index.names.store
                return frozenset(item.key for part in parts if part.store == store for item in part.entries)

    def add(self, key: StoreKey, entries: Iterable[tuple[Item, bytes]], *, exposed: bool) -> None:
        """Upload entries of one portability key, each with its bytes, and list them in the index."""
        batch = _Batch(key, exposed, self._clock())
        for entry, data in entries:
            # Where a bundle's entry was found does not change its bytes.
            item = replace(entry, modified=None) if self._place.is_bundle else entry
            if item.bytes >= LARGE and item.place not in self._doomed():
                self._write(item.place, object_file(data))
                batch.entries.append(item)
            else:
                batch.waiting.append((item, data))
                batch.weight += item.bytes
            batch.lines += _LINE + len(item.key)
            if batch.weight >= FULL_PACK or item.bytes >= LARGE:
                self._pack(batch)
            full = len(batch.entries) + len(batch.waiting) >= MOST_ENTRIES or batch.lines >= FULL_PART
            if full or self._clock() - batch.started > _CHECKPOINT:
                self._finish(batch)
                batch = _Batch(key, exposed, self._clock())
        self._finish(batch)

    def take(self, source: StoreIndex) -> int:
        """Add the entries of another store that this one lacks; return their number."""
        taken = 0
        for name in source.names.parts:
            part = source.read(name).part
            known = self.known(part.key)
            new = [(part, item) for item in part.entries if item.key not in known]
            entries = ((replace(item, pack=None, offset=0), data) for item, data in source.contents(new))
            self.add(part.key, entries, exposed=part.exposed)
            taken += len(new)
        return taken

    def _doomed(self) -> frozenset[str]:
        """Return the names that ``gc`` may remove at any moment: an object of such a name must not be relied on."""
        if self._condemned is None:
            self._condemned = frozenset[str]().union(*map(self.index.condemned, self.index.names.condemned))
        return self._condemned

    def _pack(self, batch: _Batch) -> None:
        """Upload the waiting entries as one pack."""
        if not batch.waiting:
            return
        file = pack_file([data for _, data in batch.waiting], salted=not self._place.is_bundle)
        name = hashlib.sha256(file).hexdigest()
        self._write(f"packs/{name}", file)
        batch.packs[name] = (len(file), batch.weight)
        offset = 0
        for item, _ in batch.waiting:
            batch.entries.append(replace(item, pack=name, offset=offset))
            offset += item.bytes
        batch.waiting.clear()
        batch.weight = 0

    def _finish(self, batch: _Batch) -> None:
        """Write the index part of what was uploaded."""
        self._pack(batch)
        if not batch.entries:
            return
        if self._clock() - batch.started > _TOO_SLOW:
            message = f"cannot push to {self._place.shown}: it took longer than half a day; push fewer layers at once"
            raise TransferFailed(message)
        if self.index.names.store is None:
            new = bundle_id(batch.entries) if self._place.is_bundle else new_store_id(self._clock())
            self._write(f"{INDEX}store-{new}", b"\n")
            # Another first push may have been faster.
            self.index.refresh()
        self._write_part(Part("", 0, batch.key, batch.exposed, batch.packs, tuple(batch.entries)))

    def _write_part(self, part: Part) -> None:
        """Write an index part, as made now."""
        key = part.key
        if key.name not in self.index.names.keys and all(name.key != key.name for name in self.parts):
            self._write(f"{INDEX}key-{key.name}", key.to_bytes())
            self.index.keep(f"key-{key.name}", key.to_bytes())
        part = replace(part, store=self.index.require_store(), made=self._moment())
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

    def finish(self) -> None:
        """Complete the store. If two first pushes met, write the parts again for the identity that counts."""
        if self.parts and is_young(self.index.require_store(), self._clock()):
            self.index.refresh()
            for name, part in tuple(self.parts.items()):
                if part.store != self.index.require_store():
                    del self.parts[name]
                    self._superseded.append(name)
                    self._write_part(part)
                    self._place.remove([f"{INDEX}{name}"])
        self._place.finish()
        self.index.save()

    def _write(self, name: str, data: bytes) -> None:
        self._place.write(name, data)
        self.written += len(data)
