"""Entries of layers that are read to be moved, and placed elsewhere; copies from one set of layers to another.

``push``, ``pull``, ``run --store``, ``stage`` and ``--base`` are made of these: find what is :func:`missing`, read it
in batches, place it.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from cachectl.exchange.format import Item, artifact_of, complaint
from cachectl.exchange.trust import Untrusted
from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import user_name, user_state_folder
from cachectl.layers.base.errors import FAILURES, EntryExists, LayerError, Unsettled, printable, reason_of
from cachectl.layers.base.facts import Ability, Artifact, Entry, Note, Scope
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.disk.trust import deciding_owner, open_to_others, shared_because, shared_within
from cachectl.listing import Trouble, listed
from cachectl.switching.isolated import isolated_root, relocations
from cachectl.switching.run import environment_of

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer

T = TypeVar("T")

#: Largest batch to read or place: entries and bytes.
_MOST_AT_ONCE: Final = 1024
_LARGEST_BATCH: Final = 16 << 20
_SQLITE: Final = b"SQLite format 3\0"


@dataclass
class Counts:
    """What was done with the entries of one layer so far.

    ``there`` counts those that the target had, ``kept`` lists different ones that it keeps.
    """

    layer: str
    placed: int = 0
    bytes: int = 0
    there: int = 0
    kept: list[Note] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)

    def notice(self, trouble: Trouble) -> None:
        """Note what could not be listed."""
        notes = self.failed if trouble.failed else self.skipped
        notes.append(Note("*" if trouble.path is None else str(trouble.path), trouble.message))


def in_batches(things: Iterable[T], weight: Callable[[T], int]) -> Iterator[list[T]]:
    """Group things into batches of bounded number and size.

    Each batch is emptied before the next thing is requested, so that two large ones are never in memory together.
    """
    batch: list[T] = []
    total = 0
    for thing in things:
        if batch and (total + weight(thing) > _LARGEST_BATCH or len(batch) >= _MOST_AT_ONCE):
            yield batch
            batch.clear()
            total = 0
        batch.append(thing)
        total += weight(thing)
        del thing
    if batch:
        yield batch


def missing(
    source: Layer, target: Collection[str], selection: Selection, counts: Counts, *, below: Path | None = None
) -> dict[str, Entry]:
    """Return the selected entries of a layer whose keys the target lacks, in the order of their keys.

    If several roots have a key, the entry of the first one counts. Entries of other programs are left out, unless the
    selection names one. With ``below`` only roots below a folder count: some libraries fall back to folders of the
    machine.
    """
    found: dict[str, Entry] = {}
    for entry in listed((source,), selection, counts.notice, contents=selection.needs_contents):
        is_inside = below is None or entry.root.is_relative_to(below)
        if is_inside and (entry.guest is None or selection.key is not None):
            found.setdefault(entry.key, entry)
    new = {key: found[key] for key in sorted(found.keys() - set(target))}
    counts.there += len(found) - len(new)
    return new


def keys_of(layer: Layer) -> frozenset[str]:
    """Return the keys of all entries of a layer; what cannot be listed is left out."""
    return frozenset(entry.key for entry in listed((layer,), ALL, lambda _: None, contents=False))


def read_entries(layer: Layer, entries: Sequence[Entry], counts: Counts) -> Iterator[tuple[Item, bytes]]:
    """Yield the entries that can be read as items of a store, each with its bytes; the others are noted."""
    keys = [entry.key for entry in entries]
    try:
        read = layer.get_many(keys)
    except FAILURES as error:
        read = dict.fromkeys(keys, error)
    for entry in entries:
        artifact = read.get(entry.key)
        if artifact is None:
            counts.skipped.append(Note(entry.key, "vanished meanwhile"))
            continue
        if not isinstance(artifact, Artifact):
            counts.failed.append(Note(entry.key, reason_of(artifact)))
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
            counts.failed.append(Note(entry.key, f"does not fit into a store: {unfit}"))
        else:
            yield item, artifact.data


def place(layer: Layer, artifacts: Sequence[Artifact], counts: Counts) -> list[str]:
    """Place new artifacts in a layer, count the results, and return the keys of the entries that are there now."""
    try:
        done = layer.put_new(artifacts)
    except FAILURES as error:
        # The error is about the layer as a whole.
        done = [error for _ in artifacts]
    present, reached = [], _reached(layer, artifacts, done)
    for artifact, result in zip(artifacts, done, strict=True):
        is_new = artifact.key in reached or result is True
        if isinstance(result, EntryExists):
            counts.kept.append(Note(artifact.key, "a different or damaged entry is here, and stays"))
            continue
        if isinstance(result, Exception) and artifact.key not in reached:
            counts.failed.append(Note(artifact.key, reason_of(result)))
            if not isinstance(result, Unsettled):
                continue
            is_new = True
        present.append(artifact.key)
        if is_new:
            counts.placed += 1
            counts.bytes += len(artifact.data)
        else:
            counts.there += 1
    return present


def _reached(layer: Layer, artifacts: Sequence[Artifact], done: Sequence[bool | Exception]) -> frozenset[str]:
    """Return the keys of entries that are there although the layer reported a failure.

    An error may come after several entries of a batch were placed.
    """
    failed = {
        artifact.key: artifact.data
        for artifact, result in zip(artifacts, done, strict=True)
        if isinstance(result, Exception) and not isinstance(result, (EntryExists, Unsettled))
    }
    held: Mapping[str, object] = {}
    with suppress(*FAILURES):
        held = layer.get_many(list(failed)) if failed else {}
    return frozenset(key for key, entry in held.items() if isinstance(entry, Artifact) and entry.data == failed[key])


def copy(
    source: Layer,
    target: Layer,
    selection: Selection,
    counts: Counts,
    *,
    prefix: str = "",
    below: Path | None = None,
    dry_run: bool = False,
) -> list[Entry]:
    """Copy the selected entries that a layer lacks from the same layer elsewhere; return them.

    With ``prefix`` only entries whose keys begin with it are copied, with ``below`` only those below a folder.
    """
    new = missing(source, keys_of(target), selection, counts, below=below)
    new = {key: entry for key, entry in new.items() if key.startswith(prefix)}
    if dry_run:
        counts.placed += len(new)
        counts.bytes += sum(entry.bytes for entry in new.values())
        return [replace(entry, root=target.roots()[0].path) for entry in new.values()]
    for entries in in_batches(new.values(), lambda entry: entry.bytes):
        artifacts = [artifact_of(item, data) for item, data in read_entries(source, entries, counts)]
        if artifacts:
            place(target, artifacts, counts)
    return list(new.values())


def exposed_folders(layer: Layer) -> tuple[Path, ...]:
    """Return the folders through which another user could have put code into a layer."""
    found: list[Path] = []
    for root in layer.roots():
        if root.scope is Scope.USER:
            with suppress(OSError):
                found.extend(open_to_others(root.path))
    return tuple(dict.fromkeys(found))


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
        for switch in relocations(LayerSet(bare), folder).values():
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
    switches = [layer.disable() for layer in layers if layer.abilities()[Ability.DISABLE] is None]
    names = {name for switch in (*switches, *relocations(layers, Path("/")).values()) for name in switch.set}
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
        message = f"{printable(path)}: another user can write it ({reason}); pass --trust if you trust its content"
        raise Untrusted(message)


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
    with isolated_root(environment) as root:
        stack = LayerSet(environment_of(environment, root.resolve()))
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
        raise LayerError("sqlite", f"cannot be read: {error}", source) from error
    os.chmod(target, 0o600)
