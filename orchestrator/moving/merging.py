"""Merge bundles into one: every entry once, from the first bundle that has its key."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, BinaryIO, Final

from cachectl.layer_set import LayerSet
from cachectl.moving.bundle import Item, Manifest, Reader, sort_key, write_bundle
from cachectl.moving.exporting import place_bundle, time_of_signing, unseen
from cachectl.moving.portability import combined, described

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment

#: Bundles to read at the same time: each takes an open file and up to 3 MB of memory.
_SIDE_BY_SIDE: Final = 64


@dataclass(frozen=True, slots=True)
class Merged:
    """A bundle that was written from others.

    ``entries`` counts its entries, ``added`` those that the first part did not have. ``differing`` counts entries left
    out because an earlier one had the same key and other bytes. ``foreign`` counts, by layer, entries left out because
    they were made where a deciding fact differs from that of the parts before.
    """

    file: str
    bytes: int
    sha256: str
    signature: str | None
    entries: int
    added: int
    differing: int = 0
    foreign: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Union:
    """The merge of the manifests read so far: for each key, the item of the first part that has it."""

    layers: LayerSet
    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    portability_keys: dict[str, Mapping[str, str | None]] = field(default_factory=dict)
    exposed: set[str] = field(default_factory=set)

    def take(self, manifest: Manifest, left: _Left) -> None:
        """Add the new items of another manifest, and count those left out."""
        fitting = {name for name, key in manifest.portability_keys.items() if self._fits(name, key)}
        for item in manifest.items:
            if item.layer in fitting:
                left.differing += self.items.setdefault(sort_key(item), item).sha256 != item.sha256
            else:
                left.foreign[item.layer] += 1
        self.exposed.update(fitting.intersection(manifest.exposed))

    def _fits(self, layer: str, key: Mapping[str, str | None]) -> bool:
        both = combined(self.layers.portability(layer), self.portability_keys.get(layer, key), key)
        if both is not None:
            self.portability_keys[layer] = both
        return both is not None

    def manifest(self, made: int | None) -> Manifest:
        """Return the manifest of the merged items."""
        items = tuple(sorted(self.items.values(), key=sort_key))
        layers = {name: tuple(each) for name, each in groupby(items, key=lambda item: item.layer)}
        keys = {
            name: described(self.layers.portability(name), self.portability_keys[name], each)
            for name, each in layers.items()
        }
        return Manifest(items, keys, tuple(name for name in keys if name in self.exposed), made)

    def contents(self, readers: Iterable[Reader]) -> Iterator[bytes]:
        """Yield the bytes of each item. All parts are read to their ends."""
        for item, data in heapq.merge(*(reader.contents() for reader in readers), key=lambda pair: sort_key(pair[0])):
            if self.items.get(sort_key(item)) is item:
                yield data


@dataclass
class _Left:
    """The number of entries left out, by reason."""

    differing: int = 0
    foreign: Counter[str] = field(default_factory=Counter)


def merge_bundles(
    environment: Environment, parts: Iterable[BinaryIO], file: str, *, sign: str | None = None, base: bool = False
) -> Merged:
    """Merge open bundles into one, written as :func:`cachectl.moving.exporting.export` does; close them.

    With ``base`` the first one is the bundle that the others are added to. An entry with the key of an earlier one is
    left out. Only a few parts are open at the same time, so memory holds one entry and one decompressor for each of
    those. Raises :class:`BadBundle` for a damaged part, :class:`OSError` if the file cannot be written.
    """
    stack = LayerSet(environment)
    rest = iter(parts)
    left = _Left()
    made = None if sign is None else time_of_signing(environment)
    whole, first, entries = _joined(stack, islice(rest, _SIDE_BY_SIDE), left, made)
    before = first if base else 0
    for part in rest:
        few = chain((whole, part), islice(rest, _SIDE_BY_SIDE - 1))
        whole, _, entries = _joined(stack, few, left, made)
    with whole:
        size, digest, signature = place_bundle(whole, file, sign)
    return Merged(
        file=file,
        bytes=size,
        sha256=digest,
        signature=signature,
        entries=entries,
        added=entries - before,
        differing=left.differing,
        foreign=left.foreign,
    )


def _joined(stack: LayerSet, parts: Iterable[BinaryIO], left: _Left, made: int | None) -> tuple[BinaryIO, int, int]:
    """Merge a few parts into an unnamed file.

    Return the file, the number of entries of the first part, and the number of all entries.
    """
    with ExitStack() as closing:
        # All parts are closed, also if one of them is damaged.
        opened = [closing.enter_context(part) for part in parts]
        readers = [_reader(part) for part in opened]
        union = _Union(stack)
        for reader in readers:
            union.take(reader.manifest, left)
        whole = unseen(stack.environment)
        try:
            write_bundle(whole, union.manifest(made), union.contents(readers))
        except BaseException:
            whole.close()
            raise
        return whole, len(readers[0].manifest.items) if readers else 0, len(union.items)


def _reader(part: BinaryIO) -> Reader:
    size = part.seek(0, os.SEEK_END)
    part.seek(0)
    return Reader(part, size)
