"""Push: add to a store what it lacks.

Packs are written first and the index part that lists them last: that acknowledges the push. A push that is killed
leaves packs that nothing lists, which ``store gc`` removes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.exchange import copying, portability, trust
from cachectl.exchange import format as stores
from cachectl.exchange.index import Gone, StoreIndex, place_of
from cachectl.exchange.place import Changed, Deadline, TransferFailed, is_url, timely
from cachectl.layers.base import errors, facts
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk import atomic, locking
from cachectl.layers.stores import database
from cachectl.transfer import Moved, Transfer

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base import environment
    from cachectl.layers.base.layer import Layer

#: Seconds after which a long push writes an index part for what it has uploaded.
_CHECKPOINT: Final = 600.0
#: Seconds between the upload of a pack and that of its index part, after which the push fails: half of the time after
#: which ``store gc`` removes packs that nothing lists.
_TOO_SLOW: Final = 43200.0
#: How often a push starts again because another command has written the bundle meanwhile.
_AGAIN: Final = 100
#: Bytes that the name of its pack, and an offset, add to the line of an entry.
_PLACE: Final = 100


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
    own: environment.Environment | None = None,
    deadline: Deadline | None = None,
) -> Transfer:
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
    file = None if is_url(name) else here.expand(name)
    of_file = None if file is None else copying.place_of_file(chosen, file)
    with trust.judges(here, sign, allowed_signers) as judges:
        for rest in reversed(range(_AGAIN)):
            try:
                if file is not None and of_file is not None:
                    return _push_to_file(stack, file, *of_file, selection)
                place = timely(partial(place_of, target, here, writes=True, force=force), deadline)
                writer = Writer(StoreIndex(place, here, judges), sign)
                done = push_layers(stack, writer, selection, chosen, besides, named=bool(named))
                writer.finish()
                return Transfer(place.shown, writer.digest, writer.written, done)
            except Changed:  # noqa: PERF203
                # Another command has written the file meanwhile.
                if not rest:
                    raise
    raise AssertionError("unreachable")


def push_layers(
    stack: LayerSet,
    writer: Writer,
    selection: Selection,
    chosen: Iterable[Layer],
    besides: Mapping[str, Collection[str]] | None = None,
    *,
    named: bool = False,
) -> tuple[Moved, ...]:
    """Write the selected entries of layers that a store lacks; a layer that cannot be read is a failure if named."""
    moved = []
    for layer in chosen:
        done = Moved(layer.name)
        moved.append(done)
        if (reason := layer.abilities()[facts.Ability.GET]) is not None:
            if named:
                done.failed.append(facts.Note("*", f"cannot get: {reason}"))
            continue
        key = stores.StoreKey(layer.name, portability.portability_key(stack.portability(layer.name), stack.environment))
        known = {*writer.known(key), *(besides or {}).get(layer.name, ())}
        new = copying.missing(copying.entries_of(layer, selection, done), known, done)
        if new and not selection.needs_contents:
            new = copying.described(layer, new, done)
        writer.add(key, _read(layer, new, done))
        done.sensitive = layer.about.reveals if done.placed else None
    return tuple(moved)


def _read(layer: Layer, entries: Iterable[facts.Entry], done: Moved) -> Iterator[tuple[stores.Item, bytes]]:
    for batch in copying.in_batches(entries):
        for item, data in copying.read_entries(layer, batch, done):
            done.placed += 1
            done.bytes += item.bytes
            yield item, data


# ---------------------------------------------------------------------- to a database file


def _push_to_file(stack: LayerSet, file: Path, layer: Layer, place: Path, selection: Selection) -> Transfer:
    """Add to a database file the entries of its layer that belong to it, through a copy of the file."""
    done = Moved(layer.name)
    target = file.resolve()
    with _locked(target) as before, copying.layers_with_file(stack.environment, layer, target, place) as (at, copied):
        copying.copy_layer(layer, at[layer.name], done, selection, prefix=place.as_posix())
        if done.placed:
            flat = copied.with_name(f"{copied.name}.flat")
            copying.copy_database(copied, flat)
            if _state_of(target) != before:
                raise Changed(str(file))
            try:
                (atomic.new_file if before is None else atomic.replace_file)(target, [flat.read_bytes()])
            except FileExistsError as error:
                raise Changed(str(file)) from error
            except OSError as error:
                raise TransferFailed(f"cannot write {errors.printable(file)}: {error.strerror or error}") from error
    done.sensitive = layer.about.reveals if done.placed else None
    return Transfer(str(file), None, file.stat().st_size if done.placed else 0, (done,))


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
        locking.take_flock(opened.fileno(), wait=True)
        if not locking.is_same_file(file, opened.fileno()):
            raise Changed(str(file))
        for suffix in database.COMPANIONS:
            if os.path.lexists(beside := database.companion(file, suffix)):
                why = f"a program uses it, or was killed while it did: {errors.printable(beside.name)} is there"
                raise TransferFailed(
                    f"cannot write {errors.printable(file)}: {why}; end the program, or push to a new FILE"
                )
        yield _state_of(file)


def _state_of(file: Path) -> tuple[int, ...] | None:
    with suppress(FileNotFoundError):
        status = os.stat(file)
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return None


# ---------------------------------------------------------------------- to a store


@dataclass
class _Batch:
    """Entries of one portability key that are uploaded, and those that wait for their pack to be full."""

    started: float
    entries: list[stores.Item] = field(default_factory=list)
    waiting: list[tuple[stores.Item, bytes]] = field(default_factory=list)
    weight: int = 0
    lines: int = 0


class Writer:
    """Adds entries to a store; ``written`` is the number of bytes of all files."""

    def __init__(self, index: StoreIndex, key: str | None = None) -> None:
        self.index = index
        self.written = 0
        self._parts: list[stores.PartName] = []
        self._place = index.place
        self._clock = index.environment.clock
        self._sign = key

    @property
    def digest(self) -> str:
        """Return what pins the content of the store as it is now."""
        return self._place.digest() or stores.digest_of({*self.index.names.parts, *self._parts})

    def known(self, key: stores.StoreKey) -> set[str]:
        """Return the keys of the entries in trusted parts of a portability key."""
        while True:
            known: set[str] = set()
            try:
                for name in self.index.names.parts:
                    if name.key == key.name:
                        with suppress(trust.Untrusted):
                            known.update(item.key for item in self.index.part(name).entries)
            except Gone:
                if not self.index.refresh():
                    raise
            else:
                return known

    def add(self, key: stores.StoreKey, entries: Iterable[tuple[stores.Item, bytes]]) -> None:
        """Upload entries of one portability key, each with its bytes, and list them in the index."""
        batch = _Batch(self._clock())
        for entry, data in entries:
            # Where a bundle's entry was found does not change its bytes.
            item = replace(entry, modified=None) if self._place.is_bundle else entry
            if item.bytes >= stores.LARGE:
                self._pack(batch, [(item, data)])
            else:
                batch.waiting.append((item, data))
                batch.weight += item.bytes
            batch.lines += _PLACE + len(stores.canonical(item.to_line()))
            number = len(batch.entries) + len(batch.waiting)
            is_old = self._clock() - batch.started > _CHECKPOINT
            if number >= stores.MOST_ENTRIES or batch.lines >= stores.FULL_PART or is_old:
                self._finish(key, batch)
                batch = _Batch(self._clock())
            elif batch.weight >= stores.FULL_PACK:
                self._pack_waiting(batch)
        self._finish(key, batch)

    def take(self, source: StoreIndex) -> int:
        """Add the entries of another store that this one lacks; return their number."""
        done = Moved("*")
        for name in source.names.parts:
            part = source.part(name)
            new = copying.missing(part.entries, self.known(part.key), done)
            self.add(part.key, source.contents(new))
            done.placed += len(new)
        return done.placed

    def _pack(self, batch: _Batch, entries: list[tuple[stores.Item, bytes]]) -> None:
        """Upload entries as one pack."""
        content = b"".join(data for _, data in entries)
        file = stores.file_of(content, b"" if self._place.is_bundle else stores.salt())
        pack = stores.Pack(hashlib.sha256(file).hexdigest(), len(file), len(content))
        self._write(pack.name, file)
        offset = 0
        for item, _ in entries:
            batch.entries.append(replace(item, pack=pack, offset=offset))
            offset += item.bytes

    def _pack_waiting(self, batch: _Batch) -> None:
        if batch.waiting:
            self._pack(batch, batch.waiting)
            batch.waiting.clear()
            batch.weight = 0

    def _finish(self, key: stores.StoreKey, batch: _Batch) -> None:
        """Write the index part of what was uploaded."""
        self._pack_waiting(batch)
        if not batch.entries:
            return
        if self._clock() - batch.started > _TOO_SLOW:
            message = f"cannot push to {self._place.shown}: it took longer than half a day; push fewer layers at once"
            raise TransferFailed(message)
        if key.name not in self.index.names.keys and all(name.key != key.name for name in self._parts):
            self._keep(f"key-{key.name}", key.to_bytes())
        part = stores.Part(self._moment(), key, tuple(batch.entries))
        text = part.to_bytes()
        file = stores.file_of(text, b"" if self._sign is None else trust.sign(text, self._sign))
        name = stores.PartName(part.made, key.name, hashlib.sha256(file).hexdigest())
        self._keep(str(name), file)
        self._parts.append(name)

    def _moment(self) -> int:
        """Return the time of a new part; in a bundle, whose bytes do not depend on the clock, only its number."""
        if not self._place.is_bundle:
            return int(self._clock())
        return 1 + max((name.made for name in (*self.index.names.parts, *self._parts)), default=-1)

    def _keep(self, name: str, file: bytes) -> None:
        self._write(stores.INDEX + name, file)
        self.index.keep(name, file)

    def _write(self, name: str, data: bytes) -> None:
        self._place.write(name, data)
        self.written += len(data)

    def finish(self) -> None:
        """Complete the store."""
        self._place.finish()
        self.index.save()
