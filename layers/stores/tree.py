"""Entries in a folder tree, placed and removed relative to open directory handles.

An entry is staged in the root and renamed into its place. It is renamed into a trash folder of the root before it is
deleted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Busy, Damaged, EntryExists, LayerError, Unsettled, not_a_key, reason_of
from cachectl.layers.base.facts import Ability, Entry, Problem, Removable
from cachectl.layers.disk.atomic import Freed, delete, own_folder, place_new, write_synced
from cachectl.layers.disk.handles import NO_ROOM, descend, status_of
from cachectl.layers.disk.plain import STAGE
from cachectl.layers.stores.archive import unpack
from cachectl.layers.stores.listing import OWN_TEMPORARY, Leaf, Listing, Member, OrphanRule, Shape

__all__ = [
    "OWN_TEMPORARY",
    "REFUSALS",
    "Guard",
    "Leaf",
    "Member",
    "OrphanRule",
    "Shape",
    "Tree",
    "always",
    "scan_each",
]

#: Whether this platform can act relative to directory handles, without which nothing is removed safely.
_HANDLES: Final = {os.open, os.stat, os.unlink, os.rename, os.mkdir, os.rmdir} <= os.supports_dir_fd
_WITHOUT: Final = "this platform cannot act relative to an open folder, so nothing could be changed safely"
#: Abilities that layers over trees lack here.
REFUSALS: Final[Mapping[Ability, str]] = {} if _HANDLES else dict.fromkeys((Ability.PUT, Ability.CLEAR), _WITHOUT)

#: Makes what is held while entries are renamed, given the open root.
Guard = Callable[[int], AbstractContextManager[object]]

GONE: Final = "already gone"
CHANGED: Final = "changed since it was planned"
#: Why an empty folder above entries is left.
IN_USE: Final = "a running program may be about to make an entry in it"
_TRASH: Final = ".cachectl-trash-"
#: Attempts to place an entry while other processes place and remove entries.
_TRIES: Final = 5


class Tree(Listing):
    """The entries of one shape under one root, which can be changed."""

    # ------------------------------------------------------------------ placing

    def write(self, key: str, data: bytes, *, replace: bool) -> None:
        """Place an entry given as :meth:`read` returns it; see :meth:`write_members`."""
        try:
            members = unpack(data) if self.shape.folders else {"": data}
        except ValueError as error:
            raise Damaged(self.layer, str(error), key) from error
        self.write_members(key, members, replace=replace)

    def write_members(
        self,
        key: str,
        members: Mapping[str, bytes],
        *,
        replace: bool,
        file_mode: int = 0o600,
        guard: Guard = nullcontext,
    ) -> None:
        """Place an entry given file by file, atomically: stage it in the root and rename it.

        ``guard`` makes the context of the rename. Raises :class:`EntryExists` if a different entry is present
        and ``replace`` is not set.
        """
        if not self.shape.accepts(key):
            raise not_a_key(self.layer, key)
        if not members:
            raise Damaged(self.layer, "the artifact holds no file", key)
        standing = self.standing(key)
        if standing == members:
            return
        if standing is not None and not replace:
            raise standing if isinstance(standing, LayerError) else EntryExists(self.layer, self.root / key)
        error: Exception | None = None
        for _ in range(_TRIES):
            error = self._place({key: members}, guard, replace=replace, file_mode=file_mode)[key]
            # Another process may remove an empty folder on the path.
            if not isinstance(error, FileNotFoundError):
                break
        if isinstance(error, OSError) and not isinstance(error, LayerError):
            is_placed = self.standing(key) == members
            raise (
                self._unsettled(key, error) if is_placed else self._unreachable("cannot write", key, error)
            ) from error
        if error is not None:
            raise error if isinstance(error, LayerError) else Damaged(self.layer, str(error), key)

    def write_new(
        self, entries: Mapping[str, Mapping[str, bytes]], *, file_mode: int = 0o600, guard: Guard = nullcontext
    ) -> dict[str, bool | LayerError]:
        """Place entries whose keys are free, given file by file, and sync them to the disk together.

        Each is placed whole or not at all. Returns ``True`` for each that was placed, and errors that all have in
        common; for the others :meth:`write_members` raises the reason.
        """
        fit = {key: members for key, members in entries.items() if members and self.shape.accepts(key)}
        try:
            done = self._place(fit, guard, replace=False, file_mode=file_mode)
        except (LayerError, OSError):
            return {}
        settled = ((key, True if error is None else error) for key, error in done.items())
        return {key: result for key, result in settled if result is True or isinstance(result, (Busy, Unsettled))}

    def _place(
        self, entries: Mapping[str, Mapping[str, bytes]], guard: Guard, *, replace: bool, file_mode: int
    ) -> dict[str, Exception | None]:
        """Stage entries in one folder, sync them, and move each into its place; return the error of each."""
        done: dict[str, Exception | None] = {}
        names = {key: str(number) for number, key in enumerate(entries)}
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened_root() as handle:
                if handle is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
                with own_folder(handle, STAGE) as stage:
                    for key, name in names.items():
                        error = _failure(partial(_fill, stage, name, entries[key], file_mode))
                        if error is not None:
                            done[key] = error
                    # A guard may lock a file in one of these.
                    for above in dict.fromkeys(key.rpartition("/")[0] for key in names if key not in done):
                        with ExitStack() as stack, suppress(OSError):
                            descend(stack, handle, above.split("/") if above else (), make=True)
                    with guard(handle):
                        for key, name in names.items():
                            if key not in done:
                                done[key] = _failure(partial(self._move_in, handle, stage, name, key, replace=replace))
        except OSError as error:
            for key in entries:
                is_placed = key in done and done[key] is None
                done[key] = self._unsettled(key, error) if is_placed else done.get(key) or error
        return done

    def _move_in(self, handle: int, stage: int, staged: str, key: str, *, replace: bool) -> None:
        """Move a staged entry into its place below the open root, and sync the folder above it."""
        *above, name = key.split("/")
        with ExitStack() as stack:
            parent = descend(stack, handle, above, make=True)
            if parent is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root / key))
            status = status_of(parent, name)
            leaf = None if status is None else self._recognise(parent, (*above, name), status)
            if status is not None and (leaf is None or self._foreign(leaf) is not None):
                message = "something that is no entry has its name; left alone"
                raise LayerError(self.layer, message, self.root / key)
            if status is not None and not replace:
                raise EntryExists(self.layer, self.root / key)
            try:
                if self.shape.folders:
                    self._publish_folder(stage, staged, parent, name, replace=replace)
                elif replace:
                    os.rename(staged, name, src_dir_fd=stage, dst_dir_fd=parent)
                else:
                    place_new(staged, name, src=stage, dst=parent)
            except FileExistsError as error:
                raise EntryExists(self.layer, self.root / key) from error
            os.fsync(parent)

    def _publish_folder(self, stage: int, staged: str, parent: int, name: str, *, replace: bool) -> None:
        """Rename a folder into its place; a present folder is moved to the stage first: rename cannot replace it."""
        for attempt in range(_TRIES if replace else 1):
            old = f".old{attempt}"
            if replace:
                self._move_out(parent, name, stage, old)
            try:
                os.rename(staged, name, src_dir_fd=stage, dst_dir_fd=parent)
            except OSError as error:
                # After any error the old entry is moved back unless another process has placed one.
                with suppress(OSError):
                    os.rename(old, name, src_dir_fd=stage, dst_dir_fd=parent)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)

    def _move_out(self, parent: int, name: str, stage: int, old: str) -> None:
        try:
            os.rename(name, old, src_dir_fd=parent, dst_dir_fd=stage)
        except FileNotFoundError:
            pass
        except OSError as error:
            # overlayfs cannot rename a folder of a lower layer.
            if error.errno != errno.EXDEV:
                raise
            delete(parent, name, first=self.shape.first)

    # ------------------------------------------------------------------ removing

    def remove(
        self,
        entries: Sequence[Removable],
        *,
        tidy: Callable[[], bool] | None = None,
        guard: Guard = nullcontext,
    ) -> facts.Outcome:
        """Remove planned leaves whose stamp has not changed.

        A folder is renamed into a trash folder of the same root before it is deleted, so that no reader
        sees half of it. If overlayfs cannot rename it, it is deleted in place, the shape's ``first`` files
        before the others. ``guard`` makes the context of the renames. If ``tidy`` returns true, empty folders are
        removed too: those above the removed leaves, and planned ones. A program that is about to make an entry in
        such a folder would fail, so it may return true only while no program uses the root.
        """
        skipped: list[facts.Note] = []
        failed: list[facts.Note] = []
        removed = 0
        freed = Freed()
        try:
            with self._opened_root() as handle, ExitStack() as stack:
                if handle is None:
                    return facts.Outcome(self.layer, skipped=tuple(facts.Note(entry.key, GONE) for entry in entries))
                trash = _Trash(stack, handle, freed, self.shape.first)
                with guard(handle):
                    for entry in entries:
                        try:
                            reason = self._remove_one(handle, trash, entry, tidy)
                        except FileNotFoundError:
                            reason = GONE
                        except OSError as error:
                            failed.append(facts.Note(entry.key, f"cannot be removed: {error.strerror}"))
                            continue
                        if reason is not None:
                            skipped.append(facts.Note(entry.key, reason))
                        elif isinstance(entry, Entry):
                            removed += 1
                if tidy is not None and tidy():
                    _prune_empty(handle, [entry.key for entry in entries])
        except (LayerError, OSError) as error:
            # Earlier removals must still be counted.
            if isinstance(error, LayerError) and not (removed or skipped or failed):
                raise
            failed.append(facts.Note(str(self.root), f"cannot be cleared: {reason_of(error)}"))
        return facts.Outcome(self.layer, removed, freed.bytes, tuple(skipped), tuple(failed))

    def _remove_one(self, handle: int, trash: _Trash, entry: Removable, tidy: Callable[[], bool] | None) -> str | None:
        """Remove one leaf from its place; return why it was left, or ``None``."""
        parts = entry.key.split("/")
        with ExitStack() as stack:
            parent = descend(stack, handle, parts[:-1])
            status = None if parent is None else status_of(parent, parts[-1])
            if status is None or parent is None:
                return GONE
            leaf = self._recognise(parent, parts, status)
            if leaf is None or self._foreign(leaf) is not None or leaf.stamp != entry.stamp:
                return CHANGED
            if leaf.orphan_rule is None or leaf.orphan_rule is not self.shape.empty:
                trash.take(parent, parts[-1], status)
                return None
            if tidy is None or not tidy():
                return IN_USE
            try:
                os.rmdir(parts[-1], dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return CHANGED
            return None

    def _unsettled(self, key: str, error: OSError) -> Unsettled:
        return Unsettled(
            self.layer, f"placed, but its stage could not be removed: {error.strerror or error}", self.root / key
        )


def scan_each(trees: Iterable[Tree]) -> Iterator[tuple[Tree, Leaf | Problem]]:
    """Yield the content of several trees of one root, each item with its tree; orphans and problems once."""
    seen: set[Path] = set()
    for tree in trees:
        for found in tree.scan():
            if isinstance(found, Problem) or found.orphan_rule is not None:
                path = found.path if isinstance(found, Problem) else tree.root / found.key
                if path in seen:
                    continue
                seen.add(path)
            yield tree, found


def always() -> bool:
    """Return ``True``: for a root whose library makes the folders again that it needs."""
    return True


def _fill(stage: int, name: str, members: Mapping[str, bytes], file_mode: int) -> None:
    folders: dict[str, list[str]] = {}
    for path in members:
        folders.setdefault(f"{name}/{path}".rpartition("/")[0] if path else "", []).append(path)
    # One at a time, because an entry may have more folders than a process may open.
    for above, paths in folders.items():
        with ExitStack() as stack:
            folder = descend(stack, stage, above.split("/") if above else (), make=True)
            if folder is None:
                return
            for path in paths:
                write_synced(folder, (path or name).rpartition("/")[2], members[path], file_mode)


def _failure(act: Callable[[], None]) -> Exception | None:
    """Return the error of an act on one entry, if it fails."""
    try:
        act()
    except (LayerError, OSError, ValueError) as error:
        return error
    return None


class _Trash:
    """Removes leaves: moves folders into a trash folder, made when first needed, and deletes files at once.

    The trash folder is deleted when ``stack`` is closed. ``freed`` counts the freed bytes: a file with another hard
    link frees nothing.
    """

    def __init__(self, stack: ExitStack, handle: int, freed: Freed, first: tuple[str, ...]) -> None:
        self._stack, self._handle, self._freed, self._first = stack, handle, freed, first
        self._folder: int | None = None
        self._taken = 0

    def take(self, parent: int, name: str, status: os.stat_result) -> None:
        """Take a leaf out of its folder."""
        if stat.S_ISDIR(status.st_mode) and self._have_folder():
            try:
                os.rename(name, str(self._taken), src_dir_fd=parent, dst_dir_fd=self._folder)
            except OSError as error:
                # overlayfs cannot rename a folder of a lower layer.
                if error.errno != errno.EXDEV:
                    raise
            else:
                self._taken += 1
                return
        delete(parent, name, self._freed, first=self._first)

    def _have_folder(self) -> bool:
        if self._folder is None:
            try:
                self._folder = self._stack.enter_context(own_folder(self._handle, _TRASH, self._freed))
            except OSError as error:
                # On a full disk there is no room for a folder: delete in place.
                if error.errno not in NO_ROOM:
                    raise
        return self._folder is not None


def _prune_empty(handle: int, keys: Sequence[str]) -> None:
    parents = {tuple(key.split("/")[:depth]) for key in keys for depth in range(1, key.count("/") + 1)}
    for parts in sorted(parents, key=len, reverse=True):
        with ExitStack() as stack, suppress(OSError):
            above = descend(stack, handle, parts[:-1])
            if above is not None:
                os.rmdir(parts[-1], dir_fd=above)
