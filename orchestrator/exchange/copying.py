"""Entries that are copied: what a target lacks of a source, reading and placing, and roots and files as sources.

``push``, ``pull``, ``run --store``, ``stage`` and ``--base`` are made of these: find what is :func:`missing`, and
:func:`copy` it.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from cachectl import listing
from cachectl.exchange import trust
from cachectl.exchange.format import Item, artifact_of, complaint
from cachectl.layer_set import LayerSet
from cachectl.layers.base import errors
from cachectl.layers.base.environment import user_name, user_state_folder
from cachectl.layers.base.facts import Ability, Artifact, Entry, Note
from cachectl.layers.base.layer import Layer, get_many, put_many
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk.trust import deciding_owner, shared_because, shared_within
from cachectl.switching import isolated, run
from cachectl.transfer import Moved

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment

#: Largest batch to read or place: entries and bytes.
_MOST_AT_ONCE: Final = 1024
_LARGEST_BATCH: Final = 16 << 20
#: New entries up to this number are described one by one, more of them by a listing of all.
_FEW: Final = 64
_SQLITE: Final = b"SQLite format 3\0"


class Sized(Protocol):
    """What has a key and a size: an entry of a layer, or of a store."""

    @property
    def key(self) -> str:
        """The key."""

    @property
    def bytes(self) -> int:
        """The size."""


T = TypeVar("T", bound=Sized)


# ---------------------------------------------------------------------- missing and copy


def missing(source: Iterable[T], known: Collection[str], done: Moved) -> list[T]:
    """Return what a target lacks of a source, in the order of the keys: the first of each key counts."""
    found: dict[str, T] = {}
    for entry in source:
        found.setdefault(entry.key, entry)
    new = [found[key] for key in sorted(found) if key not in known]
    done.there += len(found) - len(new)
    return new


def copy(
    entries: Iterable[T],
    read: Callable[[list[T]], Iterable[tuple[Item, bytes]]],
    target: Layer,
    done: Moved,
) -> list[str]:
    """Read entries in batches and place them in a layer; return the keys of the entries that are there now."""
    present: list[str] = []
    for batch in in_batches(entries):
        artifacts = [artifact_of(item, data) for item, data in read(batch)]
        if artifacts:
            present += _place(target, artifacts, done)
    return present


def copy_layer(source: Layer, target: Layer, done: Moved, selection: Selection = ALL, **only: Any) -> None:  # noqa: ANN401
    """Copy the selected entries that a layer lacks from the same layer elsewhere; ``only`` is for :func:`entries_of`.

    If ``done`` lists entries, they are listed and not copied.
    """
    new = missing(entries_of(source, selection, done, **only), keys_of(target), done)
    if done.entries is not None:
        done.plan(replace(entry, root=target.roots()[0].path) for entry in new)
        return
    copy(new, lambda batch: read_entries(source, batch, done), target, done)


def in_batches(things: Iterable[T]) -> Iterator[list[T]]:
    """Group things into batches of bounded number and size.

    Each batch is emptied before the next thing is requested, so that two large ones are never in memory together.
    """
    batch: list[T] = []
    size = 0
    for thing in things:
        if batch and (size + thing.bytes > _LARGEST_BATCH or len(batch) >= _MOST_AT_ONCE):
            yield batch
            batch.clear()
            size = 0
        batch.append(thing)
        size += thing.bytes
        del thing
    if batch:
        yield batch


def entries_of(
    layer: Layer, selection: Selection, done: Moved, *, prefix: str = "", below: Path | None = None
) -> Iterator[Entry]:
    """Yield the selected entries of a layer whose keys begin with a prefix.

    Entries of other programs are left out, unless the selection names one. With ``below`` only roots below a folder
    count: some libraries fall back to folders of the machine.
    """
    for entry in listing.listed((layer,), selection, partial(_note, done), contents=selection.needs_contents):
        is_inside = below is None or entry.root.is_relative_to(below)
        if is_inside and (entry.guest is None or selection.key is not None) and entry.key.startswith(prefix):
            yield entry


def _note(done: Moved, trouble: listing.Trouble) -> None:
    """Note what could not be listed."""
    notes = done.failed if trouble.failed else done.skipped
    notes.append(Note("*" if trouble.path is None else str(trouble.path), trouble.message))


def keys_of(layer: Layer) -> frozenset[str]:
    """Return the keys of all entries of a layer; what cannot be listed is left out."""
    return frozenset(entry.key for entry in listing.listed((layer,), ALL, lambda _: None, contents=False))


def described(layer: Layer, entries: Sequence[Entry], done: Moved) -> list[Entry]:
    """Return entries with what their bytes say: kernels, and for some layers the device and versions.

    Entries that cannot be read are left out and noted.
    """
    selections = [Selection(key=entry.key) for entry in entries] if len(entries) <= _FEW else [ALL]
    troubles: list[listing.Trouble] = []
    full = {entry.key: entry for entry in entries}
    paths = {entry.root / entry.key: entry.key for entry in entries}
    for entry in chain.from_iterable(listing.listed((layer,), selection, troubles.append) for selection in selections):
        if full.get(entry.key) is not None and full[entry.key].root == entry.root:
            full[entry.key] = entry
    for trouble in troubles:
        if trouble.failed and trouble.path is not None:
            key = next((paths[path] for path in (trouble.path, *trouble.path.parents) if path in paths), None)
            note = Note(str(trouble.path) if key is None else key, trouble.message)
            full.pop(note.key, None)
            if note not in done.failed:
                done.failed.append(note)
    return list(full.values())


def read_entries(layer: Layer, entries: Sequence[Entry], done: Moved) -> Iterator[tuple[Item, bytes]]:
    """Yield the entries that can be read as items of a store, each with its bytes; the others are noted."""
    keys = [entry.key for entry in entries]
    try:
        read = get_many(layer, keys)
    except errors.FAILURES as error:
        read = dict.fromkeys(keys, error)
    for entry in entries:
        artifact = read.get(entry.key)
        if artifact is None:
            done.skipped.append(Note(entry.key, "vanished meanwhile"))
            continue
        if not isinstance(artifact, Artifact):
            done.failed.append(Note(entry.key, errors.reason_of(artifact)))
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
            done.failed.append(Note(entry.key, f"does not fit into a store: {unfit}"))
        else:
            yield item, artifact.data


def _place(layer: Layer, artifacts: Sequence[Artifact], done: Moved) -> list[str]:
    """Place new artifacts in a layer, count the results, and return the keys of the entries that are there now."""
    try:
        results = put_many(layer, artifacts)
    except errors.FAILURES as error:
        # The error is about the layer as a whole.
        results = [error for _ in artifacts]
    reached = _reached(layer, artifacts, results)
    present = []
    for artifact, result in zip(artifacts, results, strict=True):
        if isinstance(result, errors.EntryExists):
            done.kept.append(Note(artifact.key, "a different or damaged entry is here, and stays"))
            continue
        is_new = artifact.key in reached or isinstance(result, errors.Unsettled) or result is True
        if isinstance(result, errors.FAILURES) and artifact.key not in reached:
            done.failed.append(Note(artifact.key, errors.reason_of(result)))
            if not is_new:
                continue
        present.append(artifact.key)
        done.placed += is_new
        done.bytes += len(artifact.data) * is_new
        done.there += not is_new
    return present


def _reached(layer: Layer, artifacts: Sequence[Artifact], results: Sequence[bool | Exception]) -> set[str]:
    """Return the keys of entries that are there although the layer reported a failure.

    An error may come after several entries of a batch were placed.
    """
    pairs = zip(artifacts, results, strict=True)
    failed = {
        artifact.key: artifact.data
        for artifact, result in pairs
        if isinstance(result, errors.FAILURES) and not isinstance(result, (errors.EntryExists, errors.Unsettled))
    }
    held: Mapping[str, object] = {}
    with suppress(*errors.FAILURES):
        held = get_many(layer, list(failed)) if failed else {}
    return {key for key, entry in held.items() if isinstance(entry, Artifact) and entry.data == failed[key]}


# ---------------------------------------------------------------------- roots and files as sources


def root_of(environment: Environment, folder: Path) -> LayerSet | None:
    """Return the layers of an isolated root, of a folder for ``XDG_CACHE_HOME``, or of a home; ``None`` for others."""
    # What cachectl remembers stays with the user: a source is only read.
    state = {"XDG_STATE_HOME": str(user_state_folder(environment).parent)}
    bare = _bare(environment).with_variables(state)
    below_home = replace(bare.with_variables({"XDG_CACHE_HOME": str(folder), "HOME": str(folder)}), home=folder)
    in_cache, in_home = _folders(bare)
    if (folder / "xdg").is_dir():
        changes: dict[str, str] = {}
        for switch in isolated.relocations(LayerSet(bare), folder).values():
            changes.update(switch.set)
        return LayerSet(bare.with_variables(changes))
    if any((folder / name).is_dir() for name in in_cache):
        # Layers below the home find nothing, because such a folder contains no home.
        return LayerSet(below_home)
    if any((folder / name).is_dir() for name in in_home):
        return LayerSet(replace(bare.with_variables({"HOME": str(folder)}), home=folder))
    return None


def _folders(bare: Environment) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the folders that layers keep in a user cache folder, and in a home folder."""
    cache, home = Path("/cache"), Path("/home")
    environment = replace(bare.with_variables({"XDG_CACHE_HOME": str(cache), "HOME": str(home)}), home=home)
    places = [root.path for layer in LayerSet(environment).clearable() for root in layer.roots()]
    found = ([path.relative_to(top).parts[0] for path in places if top in path.parents] for top in (cache, home))
    in_cache, in_home = (tuple(dict.fromkeys(names)) for names in found)
    # Without the variable, a cache folder lies in the home.
    return in_cache, tuple(dict.fromkeys((".cache", *in_home)))


def _bare(environment: Environment) -> Environment:
    """Drop every variable that moves a layer, or switches one off: they are meant for other folders."""
    layers = tuple(LayerSet(environment))
    switches = [layer.switched(on=False) for layer in layers if layer.abilities()[Ability.DISABLE] is None]
    names = {name for switch in (*switches, *isolated.relocations(layers, Path("/")).values()) for name in switch.set}
    return environment.with_variables(dict.fromkeys(names))


def require_own(path: Path, folders: Iterable[Path] = ()) -> None:
    """Raise :class:`Untrusted` if another user could have written to a database file, or to a root.

    ``folders`` are those of the root's layers; whatever lies in them counts.
    """
    owner = deciding_owner(path)
    folder, names = (path, ()) if path.is_dir() else (path.parent, (path.name,))
    reason = f"it belongs to {user_name(owner.st_uid)}" if owner is not None else shared_because(folder, names)
    for one in folders if reason is None else ():
        with suppress(FileNotFoundError, NotADirectoryError):
            reason = reason or shared_within(one)
    if reason is not None:
        message = (
            f"{errors.printable(path)}: another user can write it ({reason}); pass --trust if you trust its content"
        )
        raise trust.Untrusted(message)


def place_of_file(layers: Iterable[Layer], file: Path) -> tuple[Layer, Path] | None:
    """Return the layer of a database file, and where the file belongs in its first root; ``None`` for other files."""
    for layer in layers:
        if (place := layer.place_of_file(file)) is not None:
            return layer, place
    return None


@contextmanager
def layers_with_file(
    environment: Environment, layer: Layer, file: Path, place: Path
) -> Iterator[tuple[LayerSet, Path]]:
    """Yield the layers of a temporary root with a copy of a database file in its place, and that copy's path."""
    with isolated.isolated_root(environment) as root:
        stack = LayerSet(run.environment_of(environment, root.resolve()))
        copied = stack[layer.name].roots()[0].path / place
        copied.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            copy_database(file, copied)
        yield stack, copied


def copy_database(source: Path, target: Path) -> None:
    """Copy a database file, in sqlite with what is only in its log. Raises :class:`OSError`."""
    with open(source, "rb") as file:
        is_sqlite = file.read(len(_SQLITE)) == _SQLITE
        file.seek(0)
        if not is_sqlite:
            target.write_bytes(file.read())
            return
    try:
        there = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
        with closing(there), closing(sqlite3.connect(target)) as here:
            there.backup(here)
            here.execute("pragma journal_mode=delete")
    except sqlite3.Error as error:
        raise errors.LayerError("sqlite", f"cannot be read: {error}", source) from error
    os.chmod(target, 0o600)
