"""Places entries of a tree: stages them in one folder of the root, moves each to its path, and syncs all together."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress

from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Unsettled, not_a_key
from cachectl.layers.core.store import EntryError
from cachectl.layers.disk import atomic, handles, plain
from cachectl.layers.stores.tree_read import TAKEN, Guard, Leaf, Members, Placed, Shape, Tree, entry_shape

#: Attempts to place an entry while other processes place and remove entries.
_TRIES = 6


def write_entries(
    tree: Tree,
    entries: Mapping[str, Members],
    *,
    guard: Guard = nullcontext,
    replace: bool = False,
    wanted: Callable[[str], bool] | None = None,
) -> Placed:
    """Place entries, given file by file, each completely or not at all, and sync them to disk together.

    Returns the result of each. An existing entry is the same if its ``wanted`` files are. ``guard`` makes the context
    of the renames.
    """
    existing = {key: _standing(tree, key, files, replace, wanted) for key, files in entries.items()}
    outcome: Placed = {key: placed for key, placed in existing.items() if placed is not None}
    free = {key: files for key, files in entries.items() if key not in outcome}
    try:
        if free:
            _place(tree, free, outcome, guard, replace=replace)
    except OSError as error:
        message = f"placed, but not synced, or not cleaned up: {error.strerror or error}"
        for key in free:
            if outcome.setdefault(key, _failure(tree, key, error)) is True:
                outcome[key] = Unsettled(tree.layer, message, tree.root / key)
    for key, files in free.items():
        # Another process may just have placed the same entry.
        if isinstance(outcome[key], EntryExists) and _standing(tree, key, files, replace, wanted) is False:
            outcome[key] = False
    return outcome


def _standing(
    tree: Tree, key: str, files: Members, replace: bool, wanted: Callable[[str], bool] | None
) -> bool | EntryError | None:
    """Return ``False`` if an entry exists already, the error if it cannot be placed, ``None`` if it can be."""
    if entry_shape(tree.shapes, key) is None:
        return not_a_key(tree.layer, key)
    if not files:
        return Damaged(tree.layer, "the artifact holds no file", key)
    try:
        existing = tree.read_members(key, wanted)
    except LayerError as error:
        return None if replace else error
    if existing == files:
        return False
    return None if existing is None or replace else EntryExists(tree.layer, tree.root / key)


def _place(tree: Tree, entries: Mapping[str, Members], outcome: Placed, guard: Guard, *, replace: bool) -> None:
    """Stage entries in one folder, move each to its path, and sync them; add the result of each to ``outcome``."""
    tree.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tree.opened() as root, ExitStack() as stack:
        if root is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(tree.root))
        stage = stack.enter_context(atomic.own_folder(root, plain.STAGE))
        names = {key: str(number) for number, key in enumerate(entries)}
        staged = [key for key in entries if _fill(tree, stage, names[key], key, entries[key], failed=outcome)]
        parents = sorted({tuple(key.split("/")[:-1]) for key in staged})
        # A guard may lock a file in one of these.
        for parts in parents:
            with suppress(OSError), handles.make_below(root, parts):
                pass
        with guard(root):
            for key in staged:
                outcome[key] = _move_in(tree, root, stage, names[key], key, replace=replace) or True
        for parts in parents:
            with handles.open_below(root, parts) as parent:
                if parent is not None:
                    os.fsync(parent)


def _fill(tree: Tree, stage: int, name: str, key: str, members: Members, *, failed: Placed) -> bool:
    """Write an entry into the stage; return whether that succeeded, and if not, add the error to ``failed``."""
    shape = entry_shape(tree.shapes, key)
    try:
        for path, content in members.items():
            *above, file = f"{name}/{path}".split("/") if path else (name,)
            # One at a time, because an entry may have more folders than a process may open.
            with (
                handles.make_below(stage, above) as folder,
                open(atomic.create(file, folder, 0o600 if shape is None else shape.mode), "wb") as opened,
            ):
                atomic.write_all(opened.fileno(), (content,))
                os.fsync(opened.fileno())
    except (OSError, ValueError) as error:
        failed[key] = _failure(tree, key, error)
    return key not in failed


def _failure(tree: Tree, key: str, error: OSError | ValueError) -> LayerError:
    if isinstance(error, LayerError):
        return error
    if not isinstance(error, OSError):
        return Damaged(tree.layer, str(error), key)
    if error.errno in TAKEN:
        return EntryExists(tree.layer, tree.root / key)
    return tree.unreachable("cannot write", key, error)


def _move_in(tree: Tree, root: int, stage: int, staged: str, key: str, *, replace: bool) -> LayerError | None:
    """Move a staged entry to its path below the open root; return the error."""
    parts = key.split("/")
    for tries_left in reversed(range(_TRIES)):
        try:
            with handles.make_below(root, parts[:-1]) as parent:
                if plain.status_at(parts[-1], dir_fd=parent) is None:
                    pass
                elif not isinstance(leaf := tree.recognise(parent, parts), Leaf) or leaf.entry.is_unknown:
                    # Another process may be replacing it.
                    if tries_left:
                        continue
                    reason = leaf.entry.because if isinstance(leaf, Leaf) else "is not an entry; left alone"
                    return LayerError(tree.layer, f"what has its name {reason}", tree.root / key)
                elif not replace:
                    return EntryExists(tree.layer, tree.root / key)
                _exchange(tree, stage, staged, parent, key, replace=replace)
                break
        except OSError as error:
            # Another process may remove an empty folder on the path, or place an entry.
            may_pass = isinstance(error, FileNotFoundError) or (replace and error.errno in TAKEN)
            if not (tries_left and may_pass):
                return _failure(tree, key, error)
    return None


def _exchange(tree: Tree, stage: int, staged: str, parent: int, key: str, *, replace: bool) -> None:
    """Move an entry to its path; after an error the old one is back, unless another was placed."""
    shape, name, place = entry_shape(tree.shapes, key), key.rpartition("/")[2], plain.own_name()
    if shape is None or (replace and not shape.folders):
        atomic.move_in(staged, stage, name, parent)
        return
    with suppress(FileNotFoundError):
        if replace:
            move_out(shape, parent, name, stage, place, freed=[])
    try:
        shape.move(staged, name, src_dir_fd=stage, dst_dir_fd=parent)
    except OSError:
        with suppress(OSError):
            shape.move(place, name, src_dir_fd=stage, dst_dir_fd=parent)
        raise


def move_out(shape: Shape, source: int, name: str, to: int, place: str, *, freed: list[int]) -> bool:
    """Move an entry away, or delete it in place; return whether it was moved."""
    try:
        shape.move(name, place, src_dir_fd=source, dst_dir_fd=to)
    except OSError as error:
        # overlayfs cannot rename a folder of a lower layer.
        if error.errno != errno.EXDEV:
            raise
        atomic.delete(source, name, freed, first=shape.first)
        return False
    return True
