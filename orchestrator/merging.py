"""Bundles made one: the entries of all, each once, the first that has a key before the others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from cachectl.bundle import Item, Manifest, Reader, sort_key, write_bundle
from cachectl.exporting import place_bundle, unseen
from cachectl.fingerprint import combined

if TYPE_CHECKING:
    from cachectl.layers.environment import Environment


@dataclass(frozen=True, slots=True)
class Merged:
    """A bundle that was written out of others.

    ``entries`` are those in it, ``added`` those of them that the first part did not have. ``differing`` counts entries
    that had the key of another one, and other bytes; ``foreign`` says, layer by layer, how many were made where
    something that decides is not the same as in the parts before, and so were left out.
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
    """What has been taken so far: items, fingerprints, and where in the spool the bytes of each lie."""

    spool: BinaryIO
    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    places: dict[tuple[str, str], int] = field(default_factory=dict)
    prints: dict[str, Mapping[str, str | None]] = field(default_factory=dict)
    exposed: set[str] = field(default_factory=set)
    foreign: dict[str, int] = field(default_factory=dict)
    differing: int = 0

    def take(self, file: BinaryIO) -> None:
        """Take what another bundle has beside."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        reader = Reader(file, size)
        fitting = {name for name, told in reader.manifest.fingerprints.items() if self._fits(name, told, reader)}
        for item, data in reader.contents():
            if item.layer in fitting:
                self._take(item, data)
            else:
                self.foreign[item.layer] = self.foreign.get(item.layer, 0) + 1
        self.exposed.update(fitting.intersection(reader.manifest.exposed))

    def _fits(self, layer: str, told: Mapping[str, str | None], reader: Reader) -> bool:
        there = self.prints.get(layer)
        if there is None:
            self.prints[layer] = told
            return True
        items = (*self.items.values(), *reader.manifest.items)
        both = combined(layer, there, told, (item for item in items if item.layer == layer))
        if both is not None:
            self.prints[layer] = both
        return both is not None

    def _take(self, item: Item, data: bytes) -> None:
        name = sort_key(item)
        if name in self.items:
            self.differing += self.items[name].sha256 != item.sha256
            return
        self.places[name] = self.spool.seek(0, os.SEEK_END)
        self.spool.write(data)
        self.items[name] = item

    def contents(self, items: Iterable[Item]) -> Iterator[bytes]:
        """Yield the bytes of each item."""
        for item in items:
            self.spool.seek(self.places[sort_key(item)])
            yield self.spool.read(item.bytes)


def merge_bundles(
    environment: Environment, parts: Iterable[BinaryIO], file: str, *, sign: str | None = None, base: bool = False
) -> Merged:
    """Write what open bundles hold together as one, as :func:`cachectl.exporting.export` would.

    With ``base``, the first one is what the others are added to. An entry that has the key of an earlier one is not
    taken. Raises :class:`BadBundle` for a part that is damaged, :class:`OSError` where nothing can be written.
    """
    with unseen(environment) as spool, unseen(environment) as packed:
        union = _Union(spool)
        before = 0
        for number, part in enumerate(parts):
            union.take(part)
            before = len(union.items) if base and not number else before
        items = tuple(sorted(union.items.values(), key=sort_key))
        prints = {name: told for name, told in union.prints.items() if any(item.layer == name for item in items)}
        manifest = Manifest(items, prints, tuple(name for name in prints if name in union.exposed))
        write_bundle(packed, manifest, union.contents(items))
        size, digest, signature = place_bundle(packed, file, sign)
    return Merged(
        file=file,
        bytes=size,
        sha256=digest,
        signature=signature,
        entries=len(items),
        added=len(items) - before,
        differing=union.differing,
        foreign=union.foreign,
    )
