"""Removes things of a tree: each is checked again, moved into a trash folder, then deleted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import lru_cache
from itertools import groupby

from cachectl.layers.base.errors import LayerError, reason_of
from cachectl.layers.core.entry import Entry, Note
from cachectl.layers.core.plan import Outcome
from cachectl.layers.disk import atomic, handles, plain
from cachectl.layers.stores.tree_read import CHANGED, GONE, OWN, TAKEN, Guard, Leaf, Tidy, Tree
from cachectl.layers.stores.tree_write import move_out

#: Why an empty folder above entries is kept.
IN_USE = "a running program may be about to make an entry in it"
_TRASH = ".cachectl-trash-"
#: A folder in the trash: its name there, and the bytes that the deletion of each file and folder in it frees.
_Moved = tuple[str, dict[str, int]]


def remove_things(
    tree: Tree,
    entries: Sequence[Entry],
    *,
    tidy: Tidy = lambda: False,
    guard: Guard = nullcontext,
    step: Callable[..., None] = lambda *_: None,
) -> Outcome:
    """Remove planned things whose stamp has not changed.

    A folder is renamed into a trash folder of the same root before it is deleted, so that no reader sees half of it. If
    overlayfs cannot rename it, it is deleted in place, the shape's ``first`` files before the others. ``step`` is
    called for each thing; ``guard`` makes the context of the renames. If ``tidy`` returns true, empty folders are
    removed, both planned ones and those above removed things. It may do so only while no program uses the root: one
    that is about to make an entry in such a folder would fail.
    """
    skipped: list[Note] = []
    failed: list[Note] = []
    removed = 0
    freed: list[int] = []
    try:
        with tree.opened() as root, ExitStack() as stack:
            if root is None:
                return Outcome(tree.layer, skipped=tuple(Note(entry.key, GONE) for entry in entries))
            trash = lru_cache(lambda: _make_trash(stack, root, freed))
            moved: list[_Moved] = []
            with guard(root):
                for entry, parent in _with_parents(root, entries):
                    # Moving is the first half of a removal.
                    step(1 / 2)
                    try:
                        reason = _remove_from(tree, parent, entry, trash, moved=moved, freed=freed, tidy=tidy)
                    except FileNotFoundError:
                        reason = GONE
                    except OSError as error:
                        failed.append(Note(entry.key, f"cannot be removed: {error.strerror}"))
                        continue
                    if reason is not None:
                        skipped.append(Note(entry.key, reason))
                    removed += reason is None and not entry.is_orphan
            step((len(entries) - len(moved)) / 2)
            for name, files in moved:
                step(1 / 2)
                # The rest is removed with the trash folder.
                with suppress(OSError):
                    atomic.delete_listed(trash() or root, name, files, freed)
            if tidy():
                _remove_empty(root, [entry.key for entry in entries], freed)
    except (LayerError, OSError) as error:
        # Earlier removals must still be counted.
        if isinstance(error, LayerError) and not (removed or skipped or failed):
            raise
        failed.append(Note(str(tree.root), f"cannot be cleared: {reason_of(error)}"))
    return Outcome(tree.layer, removed, sum(freed), tuple(skipped), tuple(failed))


def _make_trash(stack: ExitStack, root: int, freed: list[int]) -> int | None:
    """Make the trash folder; return ``None`` if a full disk has no room for it."""
    try:
        return stack.enter_context(atomic.own_folder(root, _TRASH, freed))
    except OSError as error:
        if error.errno not in handles.NO_ROOM:
            raise
    return None


def _remove_from(
    tree: Tree,
    parent: int | OSError | None,
    entry: Entry,
    trash: Callable[[], int | None],
    *,
    moved: list[_Moved],
    freed: list[int],
    tidy: Tidy,
) -> str | None:
    """Remove one thing in an open folder; return why it was kept, or ``None``. Raises ``parent`` if it is an error.

    Adds to ``moved`` what it moves into the trash, and to ``freed`` the bytes of what it deletes.
    """
    if parent is None:
        return GONE
    if isinstance(parent, OSError):
        raise parent
    parts = entry.key.split("/")
    name, leaf = parts[-1], tree.recognise(parent, parts)
    if not isinstance(leaf, Leaf) or leaf.entry.is_unknown or leaf.entry.stamp != entry.stamp:
        return GONE if plain.status_at(name, dir_fd=parent) is None else CHANGED
    shape = leaf.shape
    if shape.folders and shape.sizes:
        if not tidy():
            return IN_USE
        if not _removed_empty(parent, name, freed):
            return CHANGED
    # Leftovers of an interrupted removal are in a trash folder already; no program reads them.
    elif shape.folders and shape is not OWN and (folder := trash()) is not None:
        place = str(len(moved))
        if move_out(shape, parent, name, folder, place, freed=freed):
            moved.append((place, leaf.frees))
    else:
        atomic.delete(parent, name, freed, first=shape.first)
    return None


def _with_parents(root: int, entries: Iterable[Entry]) -> Iterator[tuple[Entry, int | OSError | None]]:
    """Yield entries with the open folder above each, ``None`` if that is missing, or the error of opening it."""
    for above, members in groupby(entries, lambda entry: entry.key.rpartition("/")[0]):
        group = iter([*members])
        try:
            with handles.open_below(root, above.split("/") if above else ()) as parent:
                for entry in group:
                    yield entry, parent
        except OSError as error:
            for entry in group:
                yield entry, error


def _remove_empty(root: int, keys: Sequence[str], freed: list[int]) -> None:
    """Remove the empty folders above some keys, and add their bytes to ``freed``."""
    parents = {tuple(key.split("/")[:depth]) for key in keys for depth in range(1, key.count("/") + 1)}
    for *above, name in sorted(parents, key=len, reverse=True):
        with suppress(OSError), handles.open_below(root, above) as folder:
            if folder is not None:
                _removed_empty(folder, name, freed)


def _removed_empty(parent: int, name: str, freed: list[int]) -> bool:
    """Remove a folder, and add its bytes to ``freed``; return ``False`` if it is not empty."""
    size = handles.size_of(os.stat(name, dir_fd=parent, follow_symlinks=False))
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        return False
    freed.append(size)
    return True
