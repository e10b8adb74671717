"""Entries in a folder tree: listed, read, placed and removed relative to open directory handles.

A :class:`Tree` has the *shape* of its entries, a pattern for each path component. Names that do not match are not
listed, and only listed things can be removed. Links inside a root are never followed; a root that is itself a link is
resolved once, when it is opened.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.errors import (
    Busy,
    Damaged,
    EntryExists,
    LayerError,
    Unreachable,
    Unsettled,
    not_a_key,
    reason_of,
)
from cachectl.layers.base.facts import Ability, Entry, Orphan, Problem, Removable
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.limits import LARGEST_ENTRY, too_large
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.atomic import place_new, write_synced
from cachectl.layers.disk.handles import (
    DEEP,
    NO_ROOM,
    Freed,
    blocks_of,
    delete,
    descend,
    is_held,
    is_trusted,
    open_folder,
    opened,
    opened_root,
    own_folder,
    status_of,
)
from cachectl.layers.disk.plain import STAGE, read_plain
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.archive import pack, unpack

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
#: cachectl's own staging and trash folders in a root. A killed command leaves them; clearing them is always safe.
OWN_TEMPORARY: Final = regex(r"\.cachectl-(?:stage|trash)-[0-9a-f]{32}")
#: Attempts to place an entry while other processes place and remove entries.
_TRIES: Final = 5


class OrphanRule(NamedTuple):
    """A kind of orphan next to the entries of a tree, such as a temporary, by the pattern of its name.

    With ``members`` it is a folder whose files must all match; else it is a plain file, and ``empty`` accepts only
    those of 0 bytes. ``private`` accepts only files that no other user may read, as ``mkstemp`` makes them.
    ``idle_only`` is that of :class:`~cachectl.layers.base.facts.Orphan`.
    """

    pattern: re.Pattern[str]
    why: str
    idle_only: bool = True
    empty: bool = False
    private: bool = False
    members: re.Pattern[str] | None = None

    def accepts(self, name: str, status: os.stat_result) -> bool:
        """Return whether a name in the root may be an orphan of this kind, by its name and status alone."""
        kind = stat.S_ISREG if self.members is None else stat.S_ISDIR
        if not self.pattern.fullmatch(name) or not kind(status.st_mode):
            return False
        return not (self.empty and status.st_size) and not (self.private and status.st_mode & 0o077)


_OWN: Final = OrphanRule(
    OWN_TEMPORARY, "left by an interrupted cachectl", idle_only=False, members=regex(".*", re.DOTALL)
)


class Shape(NamedTuple):
    """The form of a tree: one pattern per path component, the last being the entry itself.

    If entries are folders, every file in them must match ``members`` (``None``: anything); an entry with another file
    is left alone. ``empty`` is the rule by which an empty folder above the entries is an orphan; its ``members`` match
    nothing. With ``None`` such a folder is not listed. Without the files in ``first`` the library takes a folder for a
    miss: they are removed first if the folder cannot be renamed.
    """

    levels: tuple[re.Pattern[str], ...]
    folders: bool
    members: re.Pattern[str] | None = None
    orphans: tuple[OrphanRule, ...] = ()
    empty: OrphanRule | None = None
    first: tuple[str, ...] = ()

    def accepts(self, key: str) -> bool:
        """Return whether a key has this shape."""
        parts = key.split("/")
        return len(parts) == len(self.levels) and all(
            pattern.fullmatch(part) for pattern, part in zip(self.levels, parts, strict=True)
        )

    def owns(self, parts: Sequence[str]) -> bool:
        """Return by name alone whether a path is an entry of this shape, above one, or in one."""
        named = all(pattern.fullmatch(part) for pattern, part in zip(self.levels, parts, strict=False))
        if named and (self.folders or len(parts) <= len(self.levels)):
            return True
        return any(rule.pattern.fullmatch(parts[0]) for rule in self.orphans)


class Member(NamedTuple):
    """One file of a leaf; ``path`` is relative to the leaf, and empty if the leaf is the file."""

    path: str
    bytes: int
    modified: float
    disk: int | None = None


#: In a leaf ``bytes`` is a number.
Head = bytes
#: The details of an entry whose content was not read.
_UNREAD: Final = Details()


class Leaf(NamedTuple):
    """An entry or orphan on the disk; ``newest`` is in nanoseconds and includes folders.

    ``orphan_rule`` is ``None`` for an entry. ``head`` is the beginning of a file, if requested.
    """

    key: str
    members: tuple[Member, ...]
    newest: int
    orphan_rule: OrphanRule | None = None
    head: Head = b""

    @property
    def bytes(self) -> int:
        """Sum the file sizes."""
        return sum(member.bytes for member in self.members)

    @property
    def disk(self) -> int | None:
        """Sum the disk blocks of the files, in bytes; ``None`` if they are unknown."""
        known = [member.disk for member in self.members if member.disk is not None]
        return sum(known) if len(known) == len(self.members) else None

    @property
    def modified(self) -> float:
        """Return the newest change anywhere in the leaf, in epoch seconds."""
        return self.newest / 1e9

    @property
    def stamp(self) -> tuple[int, ...]:
        """Return the version stamp: files, bytes and newest change."""
        return (len(self.members), self.bytes, self.newest)

    def orphan(self, root: Path, why: str | None = None) -> Orphan:
        """Return the leaf as an orphan of a root; ``why`` defaults to the reason of its rule."""
        rule = self.orphan_rule
        reason = why or ("" if rule is None else rule.why)
        idle_only = rule is None or rule.idle_only
        files = len(self.members)
        return Orphan(self.key, root, self.bytes, files, self.modified, reason, idle_only, self.stamp, self.disk)

    def entry(self, layer: str, root: Path, about: Details = _UNREAD) -> Entry:
        """Return the leaf as an entry; ``about`` is what its content says, if it was read."""
        return Entry(
            layer=layer,
            key=self.key,
            root=root,
            bytes=self.bytes,
            files=len(self.members),
            modified=self.modified,
            kernels=about.kernels,
            device=about.device,
            versions=about.versions,
            detail=about.words,
            stamp=self.stamp,
            disk=self.disk,
        )

    def member(self, path: str) -> Member | None:
        """Return the member at a path."""
        return next((member for member in self.members if member.path == path), None)


class Tree:
    """The entries of one shape under one root.

    ``handle`` is the root's open folder; without it, each method opens the root by its path. With a ``child`` only
    those entries are seen that are folders with a file or folder of such a name.
    """

    def __init__(
        self,
        layer: str,
        root: Path,
        shape: Shape,
        handle: int | None = None,
        *,
        child: re.Pattern[str] | None = None,
    ) -> None:
        self._handle = handle
        self.layer = layer
        self.root = root
        self.shape = shape
        self._child = child

    # ------------------------------------------------------------------ listing

    def scan(self, *, head: int = 0) -> Iterator[Leaf | Problem]:
        """Yield every entry and orphan; folders that cannot be read are problems.

        Entries that are files come with their first ``head`` bytes.
        """
        with self._opened_root() as handle:
            if handle is not None:
                yield from self._scan_folder(handle, (), head)

    def tagged(
        self, tag: re.Pattern[bytes], since: float, content: Callable[[Leaf], bytes | None]
    ) -> Iterator[tuple[Entry, str]]:
        """Yield the entries whose content has a tag, each with its tag.

        ``content`` returns the bytes to search. Entries that have not changed after ``since`` (epoch seconds) are not
        read.
        """
        for leaf in self.scan():
            if isinstance(leaf, Problem) or leaf.orphan_rule is not None or leaf.modified < since:
                continue
            if (found := tag.search(content(leaf) or b"")) is not None:
                yield leaf.entry(self.layer, self.root), found[0].decode()

    def find(self, key: str) -> Leaf | None:
        """Return one entry or orphan by its key. Raises :class:`Unreachable` if it cannot be read."""
        with self._reading(key), self._opened_above(key) as (parent, parts):
            status = None if parent is None else status_of(parent, parts[-1])
            if parent is None or status is None:
                return None
            leaf = self._recognise(parent, parts, status)
            return None if leaf is None or self._foreign(leaf) is not None else leaf

    def _scan_folder(self, handle: int, above: tuple[str, ...], head: int) -> Iterator[Leaf | Problem]:
        pattern = self.shape.levels[len(above)]
        try:
            names = sorted(os.listdir(handle))
        except OSError as error:
            yield self._problem(above, error)
            return
        for name in names:
            # Most names in a shared folder match nothing, and need no stat.
            if pattern.fullmatch(name) or any(rule.pattern.fullmatch(name) for rule in self._orphan_rules(above, name)):
                yield from self._scan_name(handle, (*above, name), head)

    def _scan_name(self, handle: int, parts: tuple[str, ...], head: int) -> Iterator[Leaf | Problem]:
        try:
            status = status_of(handle, parts[-1])
            leaf = None if status is None else self._recognise(handle, parts, status, head)
        except FileNotFoundError:
            return
        except OSError as error:
            yield self._problem(parts, error)
            return
        if leaf is not None:
            foreign = self._foreign(leaf)
            message = f"holds {foreign!r}, which does not belong there; left alone"
            yield leaf if foreign is None else Problem(self.root.joinpath(*parts), "unrecognised", message)
        elif status is not None and self.shape.levels[len(parts) - 1].fullmatch(parts[-1]):
            if stat.S_ISLNK(status.st_mode):
                yield Problem(self.root.joinpath(*parts), "link", "a link inside the root is not followed")
            elif len(parts) < len(self.shape.levels) and stat.S_ISDIR(status.st_mode):
                try:
                    below = open_folder(parts[-1], handle)
                except FileNotFoundError:
                    return
                except OSError as error:
                    yield self._problem(parts, error)
                    return
                try:
                    yield from self._scan_folder(below, parts, head)
                finally:
                    os.close(below)

    def _orphan_rules(self, above: Sequence[str], name: str) -> tuple[OrphanRule, ...]:
        """Return the rules to compare a name with; only names of cachectl's own begin with a dot and its name."""
        if above:
            return ()
        return (_OWN, *self.shape.orphans) if name.startswith(".cachectl-") else self.shape.orphans

    def _foreign(self, leaf: Leaf) -> str | None:
        """Return a foreign file in a leaf, if there is one."""
        pattern = self.shape.members if leaf.orphan_rule is None else leaf.orphan_rule.members
        if pattern is None:
            return None
        return next((member.path for member in leaf.members if not pattern.fullmatch(member.path)), None)

    def _recognise(self, handle: int, parts: Sequence[str], status: os.stat_result, head: int = 0) -> Leaf | None:
        name, key = parts[-1], "/".join(parts)
        for rule in self._orphan_rules(parts[:-1], name):
            if rule.accepts(name, status):
                left_alone = rule is _OWN and (not is_trusted(handle, status) or is_held(handle, name))
                return None if left_alone else _measure(handle, name, key, status, rule)
        if not self.shape.levels[len(parts) - 1].fullmatch(name):
            return None
        if len(parts) == len(self.shape.levels):
            kind = stat.S_ISDIR if self.shape.folders else stat.S_ISREG
            if self._child is not None and kind(status.st_mode) and not _has_child(handle, name, self._child):
                return None
            return _measure(handle, name, key, status, None, head=head) if kind(status.st_mode) else None
        empty = self.shape.empty
        if empty is not None and empty.accepts(name, status) and _is_empty(handle, name):
            return _measure(handle, name, key, status, empty)
        return None

    def _problem(self, parts: Sequence[str], error: OSError) -> Problem:
        code = "unrecognised" if error.errno == errno.ELOOP else "unreadable"
        return Problem(self.root.joinpath(*parts), code, f"cannot be read: {error.strerror}")

    # ------------------------------------------------------------------ reading

    def read(self, key: str) -> bytes | None:
        """Return the bytes of an entry: the file's own, or a tar of the folder. ``None`` is a miss."""
        members = self.read_members(key)
        if members is None:
            return None
        return pack(members) if self.shape.folders else members[""]

    def read_members(self, key: str) -> dict[str, bytes] | None:
        """Return every file of an entry by its path in the leaf.

        Raises :class:`Unreachable` if one cannot be read.
        """
        if not self.shape.accepts(key):
            return None
        with self._reading(key), self._opened_above(key) as (parent, parts):
            status = None if parent is None else status_of(parent, parts[-1])
            kind = stat.S_ISDIR if self.shape.folders else stat.S_ISREG
            if parent is None or status is None or not kind(status.st_mode):
                return None
            contents: dict[str, bytes] = {}
            try:
                if self.shape.folders:
                    _load(parent, parts[-1], "", contents)
                else:
                    contents[""] = read_plain(parts[-1], dir_fd=parent)
            except FileNotFoundError:
                # If a file vanished meanwhile, the entry is being replaced: return a miss, not half an entry.
                return None
            pattern = self.shape.members
            return contents if pattern is None or all(map(pattern.fullmatch, contents)) else None

    def read_file(self, key: str, path: str = "", limit: int = -1) -> bytes | None:
        """Read one file of an entry (the first ``limit`` bytes), never through a link."""
        place = f"{key}/{path}" if path else key
        with self._reading(key), self._opened_above(place) as (folder, parts):
            try:
                return None if folder is None else read_plain(parts[-1], dir_fd=folder, limit=limit)
            except FileNotFoundError:
                return None

    def standing(self, key: str) -> dict[str, bytes] | LayerError | None:
        """Return the result or the error of :meth:`read_members`, for the entry that is to be replaced."""
        try:
            return self.read_members(key)
        except LayerError as error:
            return error

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Turn operating system errors of reading an entry into :class:`Unreachable`."""
        try:
            yield
        except LayerError:
            raise
        except OSError as error:
            if error.errno == errno.EFBIG:
                message = f"has more than {LARGEST_ENTRY:,} bytes, the limit of an entry"
                raise Damaged(self.layer, message, self.root / key) from error
            file = "" if error.filename is None or not self.shape.folders else f" {printable(error.filename)}"
            raise self._unreachable(f"cannot read{file}", key, error) from error

    # ------------------------------------------------------------------ placing

    def write(
        self, key: str, data: bytes, *, replace: bool, file_mode: int = 0o600, guard: Guard = nullcontext
    ) -> None:
        """Place an entry atomically: stage it in the root and rename it.

        ``guard`` makes the context of the rename. Raises :class:`EntryExists` if a different entry is present
        and ``replace`` is not set.
        """
        try:
            members = unpack(data) if self.shape.folders else {"": data}
        except ValueError as error:
            raise Damaged(self.layer, str(error), key) from error
        self.write_members(key, members, replace=replace, file_mode=file_mode, guard=guard)

    def write_members(
        self,
        key: str,
        members: Mapping[str, bytes],
        *,
        replace: bool,
        file_mode: int = 0o600,
        guard: Guard = nullcontext,
    ) -> None:
        """Place an entry given file by file, as :meth:`write` does."""
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
                with own_folder(handle, STAGE) as (stage, _):
                    for key, name in names.items():
                        error = _failure(partial(_fill, stage, name, entries[key], file_mode, os.fsync))
                        if error is not None:
                            done[key] = error
                    # A guard may lock a file in one of these.
                    for above in dict.fromkeys(key.rpartition("/")[0] for key in names if key not in done):
                        with ExitStack() as stack, suppress(OSError):
                            descend(stack, handle, above.split("/") if above else (), make=True)
                    with guard(handle):
                        for key, name in names.items():
                            if key not in done:
                                move = partial(self._move_in, handle, stage, name, key, replace=replace)
                                done[key] = _failure(partial(move, os.fsync))
        except OSError as error:
            for key in entries:
                is_placed = key in done and done[key] is None
                done[key] = self._unsettled(key, error) if is_placed else done.get(key) or error
        return done

    def _move_in(
        self, handle: int, stage: int, staged: str, key: str, sync: Callable[[int], None], *, replace: bool
    ) -> None:
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
            sync(parent)

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

    # ------------------------------------------------------------------ helpers

    @contextmanager
    def _opened_root(self) -> Iterator[int | None]:
        if self._handle is not None:
            yield self._handle
            return
        with ExitStack() as stack:
            try:
                handle = stack.enter_context(opened_root(self.root))
            except OSError as error:
                raise self._unreachable("cannot open", "", error) from error
            yield handle

    @contextmanager
    def _opened_above(self, path: str) -> Iterator[tuple[int | None, list[str]]]:
        """Open the folder above a path, ``None`` if it is missing or behind a link; yield it with the path's parts."""
        parts = path.split("/")
        with self._opened_root() as handle, ExitStack() as stack:
            yield None if handle is None else descend(stack, handle, parts[:-1]), parts

    def _unsettled(self, key: str, error: OSError) -> Unsettled:
        return Unsettled(
            self.layer, f"placed, but its stage could not be removed: {error.strerror or error}", self.root / key
        )

    def _unreachable(self, verb: str, key: str, error: OSError) -> Unreachable:
        return Unreachable(self.layer, f"{verb}: {error.strerror or error}", self.root / key)


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


def _has_child(handle: int, name: str, child: re.Pattern[str]) -> bool:
    with opened(name, handle) as folder:
        return any(map(child.fullmatch, os.listdir(folder)))


def _is_empty(handle: int, name: str) -> bool:
    with opened(name, handle) as folder, os.scandir(folder) as children:
        return next(children, None) is None


def _measure(
    handle: int, name: str, key: str, status: os.stat_result, rule: OrphanRule | None, *, head: int = 0
) -> Leaf:
    if not stat.S_ISDIR(status.st_mode):
        beginning = read_plain(name, dir_fd=handle, limit=head) if head else b""
        member = Member("", status.st_size, status.st_mtime, blocks_of(status))
        return Leaf(key, (member,), status.st_mtime_ns, rule, beginning)
    members: list[Member] = []
    newest = _gather(handle, name, "", members)
    return Leaf(key, tuple(sorted(members)), max(newest, status.st_mtime_ns), rule)


def _gather(handle: int, name: str, prefix: str, members: list[Member]) -> int:
    """List the files in a folder; return its newest change (ns)."""
    newest = 0
    if prefix.count("/") > DEEP:
        raise OSError(errno.ELOOP, "nested deeper than any entry", name)
    try:
        folder = open_folder(name, handle)
    except FileNotFoundError:
        return newest
    try:
        for child in os.listdir(folder):
            try:
                status = os.stat(child, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            newest = max(newest, status.st_mtime_ns)
            if stat.S_ISREG(status.st_mode):
                members.append(Member(prefix + child, status.st_size, status.st_mtime, blocks_of(status)))
            elif stat.S_ISDIR(status.st_mode):
                newest = max(newest, _gather(folder, child, f"{prefix}{child}/", members))
    finally:
        os.close(folder)
    return newest


def _load(handle: int, name: str, prefix: str, contents: dict[str, bytes]) -> int:
    """Read a folder's files into ``contents``; return their bytes.

    Raises :class:`OSError`: :class:`FileNotFoundError` if one vanishes meanwhile, ``EFBIG`` if they are too large,
    others for anything but a plain file.
    """
    if prefix.count("/") > DEEP:
        raise OSError(errno.ELOOP, "nested deeper than any entry", name)
    total = 0
    with opened(name, handle) as folder, os.scandir(folder) as children:
        for child in children:
            if child.is_dir(follow_symlinks=False):
                total += _load(folder, child.name, f"{prefix}{child.name}/", contents)
            else:
                data = read_plain(child.name, dir_fd=folder)
                contents[prefix + child.name] = data
                total += len(data)
            if total > LARGEST_ENTRY:
                raise OSError(errno.EFBIG, too_large(total, LARGEST_ENTRY), name)
    return total


def _fill(stage: int, name: str, members: Mapping[str, bytes], file_mode: int, sync: Callable[[int], None]) -> None:
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
                write_synced(folder, (path or name).rpartition("/")[2], members[path], file_mode, sync=sync)


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
                self._folder, _ = self._stack.enter_context(own_folder(self._handle, _TRASH, self._freed))
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
