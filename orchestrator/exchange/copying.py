"""Copying between collections: what ``push``, ``pull``, ``run --store``, ``stage`` and ``--base`` share.

A collection is anything that holds artifacts by layer and key: the layers of an environment
(:class:`LayerCollection`), or a store (:class:`~cachectl.exchange.store.StoreCollection`). An isolated root and a
database file are layers of an environment too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union

from cachectl import listing, transfer
from cachectl.exchange import wire
from cachectl.exchange.store import Contents, StoreCollection
from cachectl.exchange.trust import Untrusted
from cachectl.layer_set import LayerSet, in_each_root
from cachectl.layers.base.environment import Environment, user_name, user_state_folder
from cachectl.layers.base.errors import FAILURES, BadRequest, EntryExists, LayerError, Unsettled, reason_of
from cachectl.layers.base.text import printable
from cachectl.layers.core.entry import Artifact, Entry, Note, keys_by_reason
from cachectl.layers.core.layer import Layer, get_many, put_many, roots_of
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import trust
from cachectl.switching import child

#: The largest batch to read or place: entries, and bytes before its last entry.
_MOST_AT_ONCE = 1024
_LARGEST_BATCH = 16 << 20
#: How many reasons of failures are named for a layer.
_REASONS = 3
_SQLITE = b"SQLite format 3\0"

T = TypeVar("T")
AnyCollection = Union["LayerCollection", StoreCollection]
#: The entries that a target lacks, by portability key.
CopyPlan = list[tuple[wire.StoreKey, list[Any]]]
#: Keys of entries, by layer.
Keys = Mapping[str, Collection[str]]


def missing(
    source: AnyCollection,
    target: AnyCollection,
    keys: Iterable[wire.StoreKey],
    result: transfer.Transfer,
    selection: Selection = ALL,
    *,
    besides: Keys | None = None,
) -> CopyPlan:
    """Plan to copy the selected entries of some portability keys that a target lacks, in the order of their keys.

    If a source has several entries with one key, the first one counts. ``besides`` are keys that count as present.
    """
    plan: CopyPlan = []
    for key in keys:
        outcome, keys_known = result.layer(key.layer), target.known(key)
        present = keys_known.union((besides or {}).get(key.layer, ()))
        scanned: dict[str, Any] = {}
        for entry in source.entries(key, selection, outcome):
            scanned.setdefault(entry.key, entry)
        new = [scanned[name] for name in sorted(scanned.keys() - present)]
        outcome.there += len(scanned) - len(new)
        # Other portability keys of the layer may have the same entries.
        keys_known.update(scanned)
        plan.append((key, new))
    return plan


def copy(source: AnyCollection, target: AnyCollection, plan: CopyPlan, result: transfer.Transfer) -> None:
    """Carry out a plan, or in a dry run list what it would place."""
    sides = (side.layers.values() for side in (source, target) if isinstance(side, LayerCollection))
    layers = list(itertools.chain.from_iterable(sides))
    step: Callable[..., None] = layers[0].environment.step if layers else lambda *_: None
    total, numbers = sum(len(entries) for _, entries in plan), itertools.count(1)

    def counted(contents: Contents) -> Contents:
        for content in contents:
            step(next(numbers), "copying", total)
            yield content

    for key, entries in plan:
        outcome = result.layer(key.layer)
        if result.dry_run and isinstance(target, LayerCollection):
            root = target.layers[key.layer].roots()[0].path
            outcome.entries = [*(outcome.entries or ()), *(entry._replace(root=root) for entry in entries)]
            outcome.placed += len(entries)
            outcome.bytes += sum(entry.bytes for entry in entries)
        else:
            target.write(key, counted(source.read(key, entries, outcome)), outcome)


def batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items into batches of limited size; one is cleared before the next, which keeps memory small."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        del item
        if size >= _LARGEST_BATCH or len(batch) >= _MOST_AT_ONCE:
            yield batch
            batch.clear()
            size = 0
    if batch:
        yield batch


# ---------------------------------------------------------------------- layers


def keys_of(layer: Layer) -> frozenset[str]:
    """Return the keys of all entries of a layer, except those that cannot be listed."""
    entries = listing.listed((layer,), ALL, lambda _: None, contents=False, roots=roots_of)
    return frozenset(entry.key for entry in entries)


class LayerCollection:
    """Layers of an environment as a collection.

    It has only entries whose keys begin with ``prefix`` and, with ``below``, only those in roots below that folder,
    because some libraries fall back to folders of the machine. With ``describes``, entries are read with their details.
    """

    def __init__(
        self, layers: Iterable[Layer], *, prefix: str = "", below: Path | None = None, describes: bool = False
    ) -> None:
        self.layers = {layer.name: layer for layer in layers}
        self._prefix = prefix
        self._below = below
        self._describes = describes
        self._known: dict[str, set[str]] = {}

    def entries(self, key: wire.StoreKey, selection: Selection, outcome: transfer.Moved) -> Iterator[Entry]:
        """Yield the selected entries of a layer; those of other programs only if the selection names their key."""

        def note(trouble: listing.Trouble) -> None:
            notes = outcome.failed if trouble.failed else outcome.skipped
            notes.append(Note("*" if trouble.path is None else str(trouble.path), trouble.message))

        layers, contents = (self.layers[key.layer],), selection.needs_contents
        for entry in listing.listed(layers, selection, note, contents=contents, roots=roots_of):
            is_inside = self._below is None or entry.root.is_relative_to(self._below)
            is_own = not entry.is_foreign or selection.key is not None
            if is_inside and is_own and entry.key.startswith(self._prefix):
                yield entry

    def known(self, key: wire.StoreKey) -> set[str]:
        """Return the keys of the entries of a layer at the time of the first call."""
        if key.layer not in self._known:
            self._known[key.layer] = set(keys_of(self.layers[key.layer]))
        return self._known[key.layer]

    def read(self, key: wire.StoreKey, entries: Sequence[Entry], outcome: transfer.Moved) -> Contents:
        """Yield entries with their artifacts; those that cannot be read are noted."""
        layer = self.layers[key.layer]
        if entries and self._describes:
            entries = _described(layer, entries, outcome)
        for batch in batches(entries, lambda entry: entry.bytes):
            read = _artifacts_of(layer, [entry.key for entry in batch])
            for entry in batch:
                artifact = read.get(entry.key)
                if isinstance(artifact, Artifact):
                    yield entry, artifact
                elif artifact is None:
                    outcome.skipped.append(Note(entry.key, "vanished meanwhile"))
                else:
                    outcome.failed.append(Note(entry.key, reason_of(artifact)))

    def write(self, key: wire.StoreKey, contents: Contents, outcome: transfer.Moved) -> None:
        """Place artifacts, and count the results."""
        for batch in batches(contents, lambda content: len(content[1].data)):
            # In a function, so that no variable keeps the bytes while the next batch is read.
            _place(self.layers[key.layer], [artifact for _, artifact in batch], outcome)


def _described(layer: Layer, entries: Sequence[Entry], outcome: transfer.Moved) -> list[Entry]:
    """Return entries with their details, except those that could not be listed because of a failure, which is noted."""
    layer.environment.step(0, "reading", len(entries))
    troubles: list[listing.Trouble] = []
    described: dict[tuple[Path, str], Entry] = {}
    wanted = {(entry.root, entry.key): entry for entry in entries}
    for entry in listing.listed((layer,), ALL, troubles.append, roots=roots_of):
        if (place := (entry.root, entry.key)) in wanted:
            described[place] = entry
    failed = dict.fromkeys(Note(str(trouble.path), trouble.message) for trouble in troubles if trouble.failed)
    outcome.failed += [note for note in failed if note not in outcome.failed]
    return [described[place] for place in wanted if place in described] if failed else [*(wanted | described).values()]


def _artifacts_of(layer: Layer, keys: Sequence[str]) -> Mapping[str, Artifact | Exception]:
    """Return the result of :func:`get_many`; an error about the whole layer counts for each key."""
    try:
        return get_many(layer, keys)
    except FAILURES as error:
        return dict.fromkeys(keys, error)


def _place(layer: Layer, artifacts: Sequence[Artifact], outcome: transfer.Moved) -> None:
    results: Sequence[bool | Exception]
    try:
        results = put_many(layer, artifacts)
    except FAILURES as error:
        # The error is about the whole layer.
        results = [error for _ in artifacts]
    pairs = list(zip(artifacts, results, strict=True))
    # Some entries of a batch may have been placed before the error. An unsettled entry was placed.
    certain = (bool, EntryExists, Unsettled)
    doubtful = [artifact.key for artifact, result in pairs if not isinstance(result, certain)]
    damaged_here = _artifacts_of(layer, doubtful) if doubtful else {}
    for artifact, result in pairs:
        if isinstance(result, EntryExists):
            outcome.kept.append(Note(artifact.key, "a different or damaged entry is here, and stays"))
            continue
        is_here = isinstance(result, certain) or getattr(damaged_here.get(artifact.key), "data", None) == artifact.data
        if not isinstance(result, bool) and (isinstance(result, Unsettled) or not is_here):
            outcome.failed.append(Note(artifact.key, reason_of(result)))
        if result is False:
            outcome.there += 1
        elif is_here:
            outcome.placed += 1
            outcome.bytes += len(artifact.data)


# ---------------------------------------------------------------------- roots and files as layers


def root_of(environment: Environment, folder: Path) -> LayerSet | None:
    """Return the layers of an isolated root, of a folder for ``XDG_CACHE_HOME``, or of a home; ``None`` for others."""
    layers = tuple(LayerSet(environment))
    switches = [layer.disable() for layer in layers if child.can_switch(layer)]
    switches += child.relocations(layers, folder).values()
    # The user's variables that move layers or switch them off do not apply to this folder.
    variables: dict[str, str | None] = dict.fromkeys(name for switch in switches for name in switch.set)
    # cachectl keeps using the user's state folder: a source is only read.
    variables["XDG_STATE_HOME"] = str(user_state_folder(environment).parent)
    bare = environment.with_variables(variables)
    if (folder / "xdg").is_dir():
        return LayerSet(child.environment_of(bare, folder))

    def at(cache: str | None, home: str) -> LayerSet:
        changes = {"XDG_CACHE_HOME": cache, "HOME": home}
        return LayerSet(bare.with_variables(changes)._replace(home=Path(home)))

    # The names that layers use in a cache folder and in a home folder; a cache folder does not contain .cache.
    names = {"cache": set[str](), "home": {".cache"}}
    for parts in (path.parts for path in folders_of(at("/cache", "/home").clearable())):
        if len(parts) > 2:  # noqa: PLR2004 - the root of the file system, and the two
            names.setdefault(parts[1], set()).add(parts[2])
    for top, cache in (("cache", str(folder)), ("home", None)):
        if any((folder / name).is_dir() for name in names[top]):
            return at(cache, str(folder))
    return None


def folders_of(layers: Iterable[Layer]) -> list[Path]:
    """Return the folders of the roots of layers; a layer that cannot list its roots has none."""
    roots = in_each_root(layers, lambda _, root: [root.path], roots_of)
    return [path for *_, path in roots if isinstance(path, Path)]


def require_own(path: Path, folders: Iterable[Path]) -> None:
    """Raise :class:`Untrusted` if another user could have written to a database file or a root.

    ``folders`` are those of the root's layers; everything in them counts.
    """
    if (owner := trust.deciding_owner(path)) is not None:
        reason: str | None = f"it belongs to {user_name(owner)}"
    else:
        reason = trust.shared_because(path) if path.is_dir() else trust.shared_because(path.parent, (path.name,))
    for folder in folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            reason = reason or trust.shared_within(folder)
    if reason is not None:
        shown = printable(path)
        raise Untrusted(f"{shown}: another user can write to it ({reason}); pass --trust if you trust its content")


def place_of_file(layers: Iterable[Layer], file: Path) -> tuple[Layer, Path] | None:
    """Return the layer of a database file, and its path in the layer's first root; ``None`` for other files."""
    for layer in layers:
        if (place_of := layer.about.place_of_file) and (place := place_of(layer, file)) is not None:
            return layer, place
    return None


@contextlib.contextmanager
def layer_with_file(
    environment: Environment, layer: Layer, file: Path, place: Path
) -> Iterator[tuple[LayerCollection, Path]]:
    """Yield the layer in a temporary root that has a copy of a database file, and the path of the copy."""
    with child.isolated_root(environment) as root:
        moved = LayerSet(child.environment_of(environment, root.resolve()))[layer.name]
        copied = moved.roots()[0].path / place
        copied.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            copy_database(file, copied)
        yield LayerCollection([moved]), copied


def copy_database(source: Path, target: Path) -> None:
    """Copy a database file; for sqlite, including the content of its log. Raises :class:`OSError`."""
    with open(source, "rb") as file:
        is_sqlite = file.read(len(_SQLITE)) == _SQLITE
    if not is_sqlite:
        target.write_bytes(source.read_bytes())
        return
    try:
        connection = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
        with contextlib.closing(connection), contextlib.closing(sqlite3.connect(target)) as here:
            connection.backup(here)
            here.execute("pragma journal_mode=delete")
    except sqlite3.Error as error:
        raise LayerError("sqlite", f"cannot be read: {error}", source) from error


# ---------------------------------------------------------------------- bases

# A base has the layout of ``run --isolated=DIR``. Entries that the user's own root lacks are copied from it, and the
# base never changes.


def base_at(environment: Environment, folder: str | Path, own: Path | None) -> Path:
    """Return the absolute path of a base.

    Raises :class:`BadRequest` if there is no such folder, or if it and the root ``own`` contain one another.
    """
    base = Path(os.path.normpath(environment.expand(os.fspath(folder))))
    if not folder or not base.is_dir():
        raise BadRequest(f"--base {os.fspath(folder)!r} is not a directory")
    if own is not None:
        _require_apart(base, environment.absolute(own))
    return base


def _require_apart(base: Path, root: Path) -> None:
    base_place, here = base.resolve(), root.resolve()
    if base_place.is_relative_to(here) or here.is_relative_to(base_place):
        raise BadRequest(f"the base {base} and the own root {root} must not contain one another")


def start_from(
    environment: Environment, base: Path, root: Path, notice: Callable[[str], None], layers: Iterable[str] = ()
) -> None:
    """Copy the entries that the user's own root lacks from a base, for the named layers or all.

    ``notice`` gets a line for each layer with entries in the base, for each kind of failure, and for a base without
    entries. Raises :class:`BadRequest` if one folder is in the other, and :class:`OSError` if the root cannot be made.
    """
    _require_apart(base, root)
    here = root.resolve()
    here.mkdir(mode=0o700, parents=True, exist_ok=True)
    source, own = LayerSet(child.environment_of(environment, base)), LayerSet(child.environment_of(environment, here))
    result, base_layers, part = transfer.Transfer(str(base)), LayerCollection(source), LayerCollection(own)
    needs = {Ability.RELOCATE, Ability.PUT}
    able = (layer for layer in own.named(layers) if not any(map(layer.abilities().get, needs)))
    copy(base_layers, part, missing(base_layers, part, [wire.StoreKey(layer.name) for layer in able], result), result)
    for outcome in result.layers:
        counts = {"copied": outcome.placed, "already present": outcome.there}
        if words := ", ".join(f"{number:,} {word}" for word, number in counts.items() if number):
            notice(f"base: {outcome.layer}: {words}")
        say_failed(f"base: {outcome.layer}", "not copied", outcome.failed, notice)
    if not any(outcome.placed or outcome.there or outcome.failed for outcome in result.layers):
        notice(f"base: {base} has no entry of any layer; cachectl run --isolated={base} -- COMMAND makes some")


def base_keys(environment: Environment, base: Path, layers: Iterable[str] = ()) -> Mapping[str, frozenset[str]]:
    """Return the keys of the entries of a base, by layer."""
    source = LayerSet(child.environment_of(environment, base))
    return {layer.name: keys_of(layer) for layer in source.named(layers)}


def say_failed(layer: str, what: str, failed: Sequence[Note], notice: Callable[[str], None]) -> None:
    """Give one line for each of the most frequent reasons."""
    for reason, keys in sorted(keys_by_reason(failed).items(), key=lambda item: -len(item[1]))[:_REASONS]:
        notice(f"{layer}: {len(keys):,} {what} ({keys[0]}{', …' if len(keys) > 1 else ''}): {reason}")
