"""Collections, and what ``push``, ``pull``, ``run --store``, ``stage`` and ``--base`` are made of.

A collection is anything that holds artifacts by layer and key: the layers of an environment (:class:`Layers`), or a
store (:class:`~cachectl.exchange.store.Store`). An isolated root and a database file are layers of an environment too.
:func:`missing` plans what one lacks of another, and :func:`copy` copies that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from cachectl import listing
from cachectl.exchange.format import Item, StoreKey, complaint
from cachectl.exchange.store import Store
from cachectl.layers.base import errors, facts
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import Outlook
from cachectl.layers.base.selection import ALL, Selection
from cachectl.transfer import Moved, Transfer

#: Largest batch to read or place: entries, and bytes before its last entry.
_MOST_AT_ONCE: Final = 1024
_LARGEST_BATCH: Final = 16 << 20
#: New entries up to this number are described one by one, more of them by a listing of all.
_FEW: Final = 64

T = TypeVar("T")


class Group(NamedTuple):
    """Entries of one portability key that a target lacks, the result of their layer, and the outlooks of the keys."""

    key: StoreKey
    entries: list[Any]
    done: Moved
    outlooks: dict[str, Outlook]


def missing(
    source: Layers | Store,
    target: Layers | Store,
    keys: Iterable[StoreKey],
    selection: Selection,
    result: Transfer,
    *,
    besides: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[Group]:
    """Plan to copy the selected entries of some portability keys that a target lacks, in the order of their keys.

    If a source has several entries of one key, the first counts. ``besides`` are keys, by layer, that count as present.
    """
    plan = []
    for key in keys:
        done, known = result.layer(key.layer), target.known(key)
        present = known.union(besides.get(key.layer, ()))
        found: dict[str, Any] = {}
        for entry in source.entries(key, selection, done):
            found.setdefault(entry.key, entry)
        new = [found[name] for name in sorted(found.keys() - present)]
        done.there += len(found) - len(new)
        # Another portability key of the layer may have them too.
        known.update(found)
        plan.append(Group(key, new, done, {}))
    return plan


def copy(source: Layers | Store, target: Layers | Store, plan: Iterable[Group]) -> None:
    """Carry out a plan, and count the outlooks of the entries that are in the target then."""
    for key, entries, done, outlooks in plan:
        present = target.write(key, source.read(key, entries, done), done)
        done.outlooks.update(outlooks[name] for name in present if name in outlooks)


def list_plan(_: Layers | Store, target: Layers, plan: Iterable[Group]) -> None:
    """List in the results what :func:`copy` would place."""
    for key, entries, done, outlooks in plan:
        root = target.layers[key.layer].roots()[0].path
        listed = [entry.to_entry(root) if isinstance(entry, Item) else replace(entry, root=root) for entry in entries]
        done.entries = [*(done.entries or ()), *listed]
        done.placed += len(listed)
        done.bytes += sum(entry.bytes for entry in listed)
        done.outlooks.update(outlooks[entry.key] for entry in entries if entry.key in outlooks)


def batches(things: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Group things into batches of bounded number and size.

    Each batch is emptied before the next thing is requested, so that two large ones are not in memory together.
    """
    batch: list[T] = []
    size = 0
    for thing in things:
        batch.append(thing)
        size += size_of(thing)
        del thing
        if size >= _LARGEST_BATCH or len(batch) >= _MOST_AT_ONCE:
            yield batch
            batch.clear()
            size = 0
    if batch:
        yield batch


# ---------------------------------------------------------------------- layers


def keys_of(layer: Layer) -> frozenset[str]:
    """Return the keys of all entries of a layer; what cannot be listed is left out."""
    return frozenset(entry.key for entry in listing.listed((layer,), ALL, lambda _: None, contents=False))


class Layers:
    """Layers of an environment as a collection.

    Only entries whose keys begin with ``prefix`` belong to it and, with ``below``, only those in roots below a folder:
    some libraries fall back to folders of the machine. With ``describes`` an entry is read with what its bytes say.
    """

    def __init__(
        self, layers: Iterable[Layer], *, prefix: str = "", below: Path | None = None, describes: bool = False
    ) -> None:
        self.layers = {layer.name: layer for layer in layers}
        self._prefix = prefix
        self._below = below
        self._describes = describes
        self._known: dict[str, set[str]] = {}

    def entries(self, key: StoreKey, selection: Selection, done: Moved) -> Iterator[facts.Entry]:
        """Yield the selected entries of a layer, without those of other programs unless the selection names one."""

        def note(trouble: listing.Trouble) -> None:
            notes = done.failed if trouble.failed else done.skipped
            notes.append(facts.Note("*" if trouble.path is None else str(trouble.path), trouble.message))

        layer = self.layers[key.layer]
        for entry in listing.listed((layer,), selection, note, contents=selection.needs_contents):
            is_inside = self._below is None or entry.root.is_relative_to(self._below)
            is_own = entry.guest is None or selection.key is not None
            if is_inside and is_own and entry.key.startswith(self._prefix):
                yield entry

    def known(self, key: StoreKey) -> set[str]:
        """Return the keys of the entries of a layer, as they were when they were first asked for."""
        if key.layer not in self._known:
            self._known[key.layer] = set(keys_of(self.layers[key.layer]))
        return self._known[key.layer]

    def read(self, key: StoreKey, entries: Sequence[facts.Entry], done: Moved) -> Iterator[tuple[Item, bytes]]:
        """Yield entries as items of a store, each with its bytes; those that cannot be read are noted."""
        layer = self.layers[key.layer]
        if entries and self._describes:
            entries = _described(layer, entries, done)
        for batch in batches(entries, lambda entry: entry.bytes):
            yield from _read(layer, batch, done)

    def write(self, key: StoreKey, contents: Iterable[tuple[Item, bytes]], done: Moved) -> list[str]:
        """Place items with their bytes, count the results, and return the keys of the entries that are there now."""
        present: list[str] = []
        for batch in batches(contents, lambda content: len(content[1])):
            # Nothing here keeps the bytes while the next batch is read.
            present += _place(
                self.layers[key.layer],
                [facts.Artifact(item.layer, item.key, item.form, data, item.detail) for item, data in batch],
                done,
            )
        return present


def _described(layer: Layer, entries: Sequence[facts.Entry], done: Moved) -> list[facts.Entry]:
    """Return entries with what their bytes say: kernels, and for some layers the device and versions.

    Entries that cannot be read are left out and noted.
    """
    selections = [Selection(key=entry.key) for entry in entries] if len(entries) <= _FEW else [ALL]
    troubles: list[listing.Trouble] = []
    full = {entry.key: entry for entry in entries}
    paths = {entry.root / entry.key: entry.key for entry in entries}
    for selection in selections:
        for entry in listing.listed((layer,), selection, troubles.append):
            if entry.key in full and full[entry.key].root == entry.root:
                full[entry.key] = entry
    for trouble in troubles:
        if trouble.failed and trouble.path is not None:
            key = next((paths[path] for path in (trouble.path, *trouble.path.parents) if path in paths), None)
            note = facts.Note(str(trouble.path) if key is None else key, trouble.message)
            full.pop(note.key, None)
            if note not in done.failed:
                done.failed.append(note)
    return list(full.values())


def _read(layer: Layer, entries: Sequence[facts.Entry], done: Moved) -> Iterator[tuple[Item, bytes]]:
    keys = [entry.key for entry in entries]
    try:
        read = layer.get_many(keys)
    except errors.FAILURES as error:
        read = dict.fromkeys(keys, error)
    for entry in entries:
        artifact = read.get(entry.key)
        if artifact is None:
            done.skipped.append(facts.Note(entry.key, "vanished meanwhile"))
            continue
        if not isinstance(artifact, facts.Artifact):
            done.failed.append(facts.Note(entry.key, errors.reason_of(artifact)))
            continue
        item = Item(
            layer=layer.name,
            key=entry.key,
            form=artifact.form,
            bytes=len(artifact.data),
            sha256=hashlib.sha256(artifact.data).hexdigest(),
            detail=dict(artifact.detail),
            device=entry.device,
            versions=dict(entry.versions),
            kernels=entry.kernels,
            modified=None if entry.modified is None or entry.modified < 0 else int(entry.modified),
        )
        # One such entry would keep all others from being read.
        if (unfit := complaint(item)) is not None:
            done.failed.append(facts.Note(entry.key, f"does not fit into a store: {unfit}"))
        else:
            yield item, artifact.data


def _place(layer: Layer, artifacts: Sequence[facts.Artifact], done: Moved) -> list[str]:
    results: Sequence[bool | Exception]
    try:
        results = layer.put_new(artifacts)
    except errors.FAILURES as error:
        # The error is about the layer as a whole.
        results = [error for _ in artifacts]
    reached = _reached(layer, artifacts, results)
    present = []
    for artifact, result in zip(artifacts, results, strict=True):
        if isinstance(result, errors.EntryExists):
            done.kept.append(facts.Note(artifact.key, "a different or damaged entry is here, and stays"))
            continue
        is_new = artifact.key in reached or isinstance(result, errors.Unsettled) or result is True
        if isinstance(result, errors.FAILURES) and artifact.key not in reached:
            done.failed.append(facts.Note(artifact.key, errors.reason_of(result)))
            if not is_new:
                continue
        present.append(artifact.key)
        done.placed += is_new
        done.bytes += len(artifact.data) * is_new
        done.there += not is_new
    return present


def _reached(layer: Layer, artifacts: Sequence[facts.Artifact], results: Sequence[bool | Exception]) -> set[str]:
    """Return the keys of entries that are there although the layer reported a failure.

    An error may come after several entries of a batch were placed.
    """
    failed = {
        artifact.key: artifact.data
        for artifact, result in zip(artifacts, results, strict=True)
        if isinstance(result, errors.FAILURES) and not isinstance(result, (errors.EntryExists, errors.Unsettled))
    }
    held: Mapping[str, object] = {}
    with suppress(*errors.FAILURES):
        held = layer.get_many(list(failed)) if failed else {}
    return {key for key, entry in held.items() if isinstance(entry, facts.Artifact) and entry.data == failed[key]}
