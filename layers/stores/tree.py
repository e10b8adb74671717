"""Entries in a folder tree, listed, read, placed and removed relative to open directory handles.

A :class:`Tree` has the *shape* of its entries, a pattern for each path component. Names that do not match are not
listed, and only listed things can be removed. Links inside a root are never followed; a root that is itself a link is
resolved once, when it is opened. An entry is staged in the root and renamed into its place, and renamed into a trash
folder of the root before it is deleted.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base import errors, facts
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.store import ENTRY, FOREIGN, OWN
from cachectl.layers.disk import atomic, handles, plain
from cachectl.layers.formats.details import Details
from cachectl.layers.stores import archive

_WITHOUT: Final = "this platform cannot act relative to an open folder, so nothing could be changed safely"
#: Abilities that layers over trees lack where nothing is removed safely.
REFUSALS: Final[Mapping[facts.Ability, str]] = (
    {} if os.unlink in os.supports_dir_fd else dict.fromkeys((facts.Ability.PUT, facts.Ability.CLEAR), _WITHOUT)
)
#: cachectl's own staging and trash folders in a root. A killed command leaves them; clearing them is always safe.
OWN_TEMPORARY: Final = regex(r"\.cachectl-(?:stage|trash)-[0-9a-f]{32}")
GONE: Final = "already gone"
CHANGED: Final = "changed since it was planned"
#: Why an empty folder above entries is left.
IN_USE: Final = "a running program may be about to make an entry in it"
_TRASH: Final = ".cachectl-trash-"
#: Attempts to place an entry while other processes place and remove entries.
_TRIES: Final = 5
#: The details of an entry whose content was not read.
_UNREAD: Final = Details()

#: Makes what is held while entries are renamed, given the open root.
Guard = Callable[[int], AbstractContextManager[object]]


class OrphanRule(NamedTuple):
    """A kind of orphan next to the entries of a tree, such as a temporary, by the pattern of its name.

    With ``members`` it is a folder whose files must all match; else it is a plain file, and ``empty`` accepts only
    those of 0 bytes. ``private`` accepts only files that no other user may read, as ``mkstemp`` makes them.
    ``idle_only`` is that of :class:`~cachectl.layers.base.facts.Entry`.
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
_STRAY: Final = OrphanRule(OWN_TEMPORARY, "a file of an entry that is not there")


class Shape(NamedTuple):
    """The form of a tree: one pattern per path component, the last being the entry itself.

    If entries are folders, every file in them must match ``members`` (``None``: anything); an entry with another file
    is left alone. ``empty`` is the rule by which an empty folder above the entries is an orphan; its ``members`` match
    nothing. With ``None`` such a folder is not listed. Without the files in ``first`` the library takes a folder for a
    miss: they are removed first if the folder cannot be renamed.

    If an entry is a file with others beside it, their names match ``companions``, and the first group of that pattern
    matches the same text as the first group of the entry's own. Without the entry's own file the library finds none of
    them: it is placed last and removed first.
    """

    levels: tuple[re.Pattern[str], ...]
    folders: bool
    members: re.Pattern[str] | None = None
    orphans: tuple[OrphanRule, ...] = ()
    empty: OrphanRule | None = None
    first: tuple[str, ...] = ()
    companions: re.Pattern[str] | None = None

    @property
    def is_packed(self) -> bool:
        """Return whether an entry may have several files, so that its bytes are a tar of them."""
        return self.folders or self.companions is not None

    def strange(self, name: str, paths: Iterable[str]) -> str | None:
        """Return the first of some paths that is no file of the entry of this name."""
        if self.companions is None:
            return _stranger(self.members, paths)
        own = {name, *self.beside((name, *paths)).get(self.group_of(name), ())}
        return next((path for path in paths if path not in own), None)

    def group_of(self, name: str) -> str | None:
        """Return what the names of an entry's files have in common; ``None`` for a name that is no entry's own."""
        match = self.levels[-1].fullmatch(name)
        return None if match is None or self.companions is None else match[1]

    def beside(self, names: Iterable[str]) -> dict[str | None, list[str]]:
        """Return the companions among the names of a folder, by what they have in common with their entry.

        Those whose entry is not among the names stand under ``None``.
        """
        found: dict[str | None, list[str]] = {}
        if (pattern := self.companions) is not None:
            groups = {name: self.group_of(name) for name in sorted(names)}
            present = frozenset(groups.values())
            for name, group in groups.items():
                if group is None and (match := pattern.fullmatch(name)) is not None:
                    found.setdefault(match[1] if match[1] in present else None, []).append(name)
        return found

    def accepts(self, key: str) -> bool:
        """Return whether a key has this shape."""
        parts = key.split("/")
        return len(parts) == len(self.levels) and self._names(parts)

    def owns(self, parts: Sequence[str]) -> bool:
        """Return by name alone whether a path is an entry of this shape, a companion, above an entry, or in one."""
        if self._names(parts) and (self.folders or len(parts) <= len(self.levels)):
            return True
        if self.companions is not None and len(parts) == len(self.levels) and self._names(parts[:-1]):
            return self.companions.fullmatch(parts[-1]) is not None
        return any(rule.pattern.fullmatch(parts[0]) for rule in self.orphans)

    def kind_of(self, path: str) -> str:
        """Return what a path is by name alone, as :meth:`Store.kind_of`."""
        return ENTRY if self.accepts(path) else OWN if self.owns(path.split("/")) else FOREIGN

    def _names(self, parts: Sequence[str]) -> bool:
        return all(pattern.fullmatch(part) for pattern, part in zip(self.levels, parts, strict=False))


class Member(NamedTuple):
    """One file of a leaf; ``path`` is relative to the leaf, and empty if the leaf is the file."""

    path: str
    bytes: int
    modified: float
    disk: int | None = None


#: In a leaf ``bytes`` is a number.
Head = bytes


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
    def is_file(self) -> bool:
        """Return whether the leaf is a file, not a folder."""
        return [member.path for member in self.members] == [""]

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

    def orphan(self, layer: str, root: Path, why: str | None = None) -> facts.Entry:
        """Return the leaf as an orphan of a root; ``why`` defaults to the reason of its rule."""
        rule = self.orphan_rule
        reason = why or ("" if rule is None else rule.why)
        return facts.orphan(self.entry(layer, root), reason, idle_only=rule is None or rule.idle_only)

    def entry(self, layer: str, root: Path, about: Details = _UNREAD) -> facts.Entry:
        """Return the leaf as an entry; ``about`` is what its content says, if it was read."""
        return facts.Entry(
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
    those entries are seen that are folders with a file or folder of such a name. New files get ``file_mode``.
    """

    file_mode = 0o600

    def __init__(
        self, layer: str, root: Path, shape: Shape, handle: int | None = None, *, child: re.Pattern[str] | None = None
    ) -> None:
        self._handle = handle
        self.layer = layer
        self.root = root
        self.shape = shape
        self._child = child
        self._rules = (_OWN, *shape.orphans)
        self._is_kind = stat.S_ISDIR if shape.folders else stat.S_ISREG

    # ------------------------------------------------------------------ listing

    def scan(self, *, head: int = 0) -> Iterator[Leaf | facts.Problem]:
        """Yield entries (files with their first ``head`` bytes), orphans, and a problem for what cannot be read."""
        with self._opened() as handle:
            if handle is not None:
                yield from self._scan(handle, (), head)

    def tagged(
        self, tag: re.Pattern[bytes], since: float, content: Callable[[Leaf], bytes | None]
    ) -> Iterator[tuple[facts.Entry, str]]:
        """Yield the entries changed after ``since`` (epoch seconds) whose ``content`` has a tag, each with its tag."""
        for leaf in self.scan():
            if isinstance(leaf, facts.Problem) or leaf.orphan_rule is not None or leaf.modified < since:
                continue
            if (match := tag.search(content(leaf) or b"")) is not None:
                yield leaf.entry(self.layer, self.root), match[0].decode()

    def find(self, key: str) -> Leaf | None:
        """Return one entry or orphan by its key. Raises :class:`Unreachable` if it cannot be read."""
        with self._above(key) as (folder, _):
            leaf = None if folder is None else self._recognise(folder, key.split("/"))
            return leaf if isinstance(leaf, Leaf) else None

    def _scan(self, folder: int, above: tuple[str, ...], head: int) -> Iterator[Leaf | facts.Problem]:
        level, rules = self.shape.levels[len(above)], () if above else self._rules
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            yield self._unread(above, error)
            return
        patterns = [level, *(rule.pattern for rule in rules)]
        beside = self._beside(folder, above, names)
        strays = frozenset(beside.get(None, ()))
        for name in names:
            # Most names in a shared folder match nothing, and need no stat.
            if name not in strays and not any(pattern.fullmatch(name) for pattern in patterns):
                continue
            parts = (*above, name)
            try:
                leaf = self._recognise(folder, parts, head, beside)
                if isinstance(leaf, (Leaf, facts.Problem)):
                    yield leaf
                elif leaf is not None:
                    with handles.opened(name, folder) as below:
                        yield from self._scan(below, parts, head)
            except FileNotFoundError:
                pass
            except OSError as error:
                yield self._unread(parts, error)

    def _beside(
        self, folder: int, above: Sequence[str], names: Sequence[str] | None = None
    ) -> dict[str | None, list[str]]:
        """Return the companions in an open folder, as :meth:`Shape.beside`; ``names`` are its names, if known."""
        if self.shape.companions is None or len(above) + 1 < len(self.shape.levels):
            return {}
        return self.shape.beside(os.listdir(folder) if names is None else names)

    def _files_of(self, folder: int, name: str) -> list[str]:
        """Return the names of the files of an entry in an open folder, its own first."""
        if self.shape.companions is None:
            return [name]
        beside = self.shape.beside({name, *os.listdir(folder)})
        found = ((file, handles.status_of(folder, file)) for file in beside.get(self.shape.group_of(name), ()))
        return [name, *(file for file, status in found if status is not None and stat.S_ISREG(status.st_mode))]

    def _recognise(
        self,
        folder: int,
        parts: Sequence[str],
        head: int = 0,
        beside: Mapping[str | None, Sequence[str]] | None = None,
    ) -> Leaf | facts.Problem | os.stat_result | None:
        """Return the entry or orphan of a name, or why it is none; the status of a folder above entries."""
        name = parts[-1]
        status = handles.status_of(folder, name)
        if status is None:
            return None
        if beside is None:
            beside = self._beside(folder, parts[:-1])
        is_stray = name in beside.get(None, ()) and stat.S_ISREG(status.st_mode)
        kind = _STRAY if is_stray else self._kind(folder, parts, status)
        if kind is None:
            is_named = self.shape.levels[len(parts) - 1].fullmatch(name)
            if is_named and stat.S_ISLNK(status.st_mode):
                return self._problem(parts, "link", "a link inside the root is not followed")
            is_above = len(parts) < len(self.shape.levels) and stat.S_ISDIR(status.st_mode)
            return status if is_named and is_above else None
        members, newest = _measured(folder, name, status)
        for file in beside.get(self.shape.group_of(name), ()) if kind is self.shape else ():
            found = handles.status_of(folder, file)
            if found is not None and stat.S_ISREG(found.st_mode):
                members += (Member(file, found.st_size, found.st_mtime, handles.blocks_of(found)),)
                newest = max(newest, found.st_mtime_ns)
        if (strange := _stranger(kind.members, (member.path for member in members))) is not None:
            message = f"holds {strange!r}, which does not belong there; left alone"
            return self._problem(parts, "unrecognised", message)
        beginning = plain.read_plain(name, dir_fd=folder, limit=head) if head and stat.S_ISREG(status.st_mode) else b""
        return Leaf("/".join(parts), members, newest, kind if isinstance(kind, OrphanRule) else None, beginning)

    def _kind(self, folder: int, parts: Sequence[str], status: os.stat_result) -> OrphanRule | Shape | None:
        """Return the rule by which a name is an orphan, or the shape if it may be an entry."""
        name = parts[-1]
        for rule in self._rules if len(parts) == 1 else ():
            if rule.accepts(name, status):
                return rule if rule is not _OWN or handles.is_left_own(folder, name, status) else None
        if not self.shape.levels[len(parts) - 1].fullmatch(name):
            return None
        if len(parts) < len(self.shape.levels):
            empty = self.shape.empty
            return empty if empty and empty.accepts(name, status) and not _children(folder, name) else None
        if not self._is_kind(status.st_mode):
            return None
        child = self._child
        return self.shape if child is None or any(map(child.fullmatch, _children(folder, name))) else None

    def _unread(self, parts: Sequence[str], error: OSError) -> facts.Problem:
        code = "unrecognised" if error.errno == errno.ELOOP else "unreadable"
        return self._problem(parts, code, f"cannot be read: {error.strerror}")

    def _problem(self, parts: Sequence[str], code: str, message: str) -> facts.Problem:
        return facts.Problem(self.root.joinpath(*parts), code, message)

    # ------------------------------------------------------------------ reading

    def read(self, key: str) -> bytes | None:
        """Return the bytes of an entry: the file's own, or a tar of the folder. ``None`` is a miss."""
        members = self.read_members(key)
        if members is None:
            return None
        return archive.pack(members) if self.shape.is_packed else members[""]

    def read_members(self, key: str) -> dict[str, bytes] | None:
        """Return every file of an entry by its path in it. Raises :class:`Unreachable` if one cannot be read."""
        if not self.shape.accepts(key):
            return None
        contents: dict[str, bytes] = {}
        with self._above(key) as (parent, name):
            status = None if parent is None else handles.status_of(parent, name)
            if parent is None or status is None or not self._is_kind(status.st_mode):
                return None
            try:
                own = name if self.shape.companions is not None else ""
                beside = ((parent, file, file, status) for file in self._files_of(parent, name)[1:])
                for folder, child, path, found in chain(handles.walk(parent, name), beside):
                    if not stat.S_ISDIR(found.st_mode):
                        contents[path or own] = plain.read_plain(child, dir_fd=folder)
                        if (total := sum(map(len, contents.values()))) > errors.LARGEST_ENTRY:
                            raise OSError(errno.EFBIG, errors.too_large(total, errors.LARGEST_ENTRY), name)
                # If a file vanished meanwhile, the entry is being replaced: return a miss, not half an entry.
                if own and os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime_ns != status.st_mtime_ns:
                    return None
            except FileNotFoundError:
                return None
        return contents if self.shape.strange(name, contents) is None else None

    def read_file(self, key: str, path: str = "", limit: int = -1) -> bytes | None:
        """Read one file of an entry (the first ``limit`` bytes), never through a link."""
        with self._above(key, path) as (folder, name):
            try:
                return None if folder is None else plain.read_plain(name, dir_fd=folder, limit=limit)
            except FileNotFoundError:
                return None

    def standing(self, key: str) -> dict[str, bytes] | errors.LayerError | None:
        """Return the result or the error of :meth:`read_members`, for the entry that is to be replaced."""
        try:
            return self.read_members(key)
        except errors.LayerError as error:
            return error

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        with ExitStack() as stack:
            handle = self._handle
            try:
                handle = stack.enter_context(handles.opened_root(self.root)) if handle is None else handle
            except OSError as error:
                raise self._unreachable("cannot open", "", error) from error
            yield handle

    @contextmanager
    def _above(self, key: str, path: str = "") -> Iterator[tuple[int | None, str]]:
        """Open the folder above an entry, or above a file in it, and yield it with the name in it.

        The folder is ``None`` if it is missing or behind a link. Errors of reading become :class:`Unreachable`.
        """
        *above, name = (f"{key}/{path}" if path else key).split("/")
        try:
            with self._opened() as root:
                if root is None:
                    yield None, name
                else:
                    with handles.below(root, above) as folder:
                        yield folder, name
        except errors.LayerError:
            raise
        except OSError as error:
            if error.errno == errno.EFBIG:
                message = f"has more than {errors.LARGEST_ENTRY:,} bytes, the limit of an entry"
                raise errors.Damaged(self.layer, message, self.root / key) from error
            file = "" if error.filename is None or not self.shape.folders else f" {errors.printable(error.filename)}"
            raise self._unreachable(f"cannot read{file}", key, error) from error

    def _unreachable(self, verb: str, key: str, error: OSError) -> errors.Unreachable:
        return errors.Unreachable(self.layer, f"{verb}: {error.strerror or error}", self.root / key)

    # ------------------------------------------------------------------ placing

    def is_same(self, key: str, members: Mapping[str, bytes], *, replace: bool) -> bool:
        """Return whether an entry is there that has these files.

        Raises :class:`EntryExists`, or the reading error, if another one is there and ``replace`` is not set.
        """
        standing = self.standing(key)
        if standing == members:
            return True
        if standing is not None and not replace:
            if isinstance(standing, errors.LayerError):
                raise standing
            raise errors.EntryExists(self.layer, self.root / key)
        return False

    def write(
        self, entries: Mapping[str, Mapping[str, bytes]], *, guard: Guard = nullcontext, replace: bool = False
    ) -> dict[str, bool | errors.LayerError]:
        """Place entries, given file by file, each whole or not at all, and sync them to the disk together.

        Returns ``True`` for each that was placed, and the errors of the others: such as :class:`EntryExists` if
        something has its name and ``replace`` is not set. ``guard`` makes the context of the renames.
        """
        done: dict[str, bool | errors.LayerError] = {}
        for key, members in entries.items():
            if not self.shape.accepts(key):
                done[key] = errors.not_a_key(self.layer, key)
            elif not members:
                done[key] = errors.Damaged(self.layer, "the artifact holds no file", key)
        fit = {key: members for key, members in entries.items() if key not in done}
        try:
            if fit:
                self._place(fit, done, guard, replace=replace)
        except OSError as error:
            message = f"placed, but not synced, or not cleaned up: {error.strerror or error}"
            for key in fit:
                if done.setdefault(key, self._failure(key, error)) is True:
                    done[key] = errors.Unsettled(self.layer, message, self.root / key)
        return done

    def _place(
        self,
        entries: Mapping[str, Mapping[str, bytes]],
        done: dict[str, bool | errors.LayerError],
        guard: Guard,
        *,
        replace: bool,
    ) -> None:
        """Stage entries in one folder, move each into its place, and sync them; add the result of each to ``done``."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened() as root, ExitStack() as stack:
            if root is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
            stage = stack.enter_context(atomic.own_folder(root, plain.STAGE))
            names = {key: str(number) for number, key in enumerate(entries)}
            staged = [key for key in entries if self._fill(stage, names[key], key, entries[key], done)]
            parents = sorted({tuple(key.split("/")[:-1]) for key in staged})
            # A guard may lock a file in one of these.
            for parts in parents:
                with suppress(OSError), handles.made_below(root, parts):
                    pass
            with guard(root):
                for key in staged:
                    error = self._move_in(root, stage, names[key], key, replace=replace)
                    done[key] = True if error is None else error
            for parts in parents:
                with handles.below(root, parts) as parent:
                    if parent is not None:
                        os.fsync(parent)

    def _fill(
        self, stage: int, name: str, key: str, members: Mapping[str, bytes], failed: dict[str, bool | errors.LayerError]
    ) -> bool:
        """Write an entry into the stage; return whether that succeeded, else add its error to ``failed``."""
        try:
            for path, content in members.items():
                *above, file = f"{name}/{path}".split("/") if path else (name,)
                # One at a time, because an entry may have more folders than a process may open.
                with handles.made_below(stage, above) as folder:
                    handle = atomic.create(file, folder, self.file_mode)
                    try:
                        atomic.write_all(handle, (content,))
                        os.fsync(handle)
                    finally:
                        os.close(handle)
        except (OSError, ValueError) as error:
            failed[key] = self._failure(key, error)
        return key not in failed

    def _failure(self, key: str, error: OSError | ValueError) -> errors.LayerError:
        if isinstance(error, errors.LayerError):
            return error
        if isinstance(error, FileExistsError):
            return errors.EntryExists(self.layer, self.root / key)
        if isinstance(error, OSError):
            return self._unreachable("cannot write", key, error)
        return errors.Damaged(self.layer, str(error), key)

    def _move_in(
        self, root: int, stage: int, staged: str, key: str, *, replace: bool, tries: int = _TRIES
    ) -> errors.LayerError | None:
        """Move a staged entry into its place below the open root; return the error."""
        *above, name = key.split("/")
        try:
            with handles.made_below(root, above) as parent:
                if handles.status_of(parent, name) is not None:
                    if not isinstance(self._recognise(parent, (*above, name)), Leaf):
                        message = "something that is no entry has its name; left alone"
                        return errors.LayerError(self.layer, message, self.root / key)
                    if not replace:
                        return errors.EntryExists(self.layer, self.root / key)
                elif len(self._files_of(parent, name)) > 1:
                    message = "files of an entry that is not there are in its place; cachectl purge removes them"
                    return errors.LayerError(self.layer, message, self.root / key)
                self._rename_in(stage, staged, parent, name, replace=replace)
        except OSError as error:
            # Another process may remove an empty folder on the path.
            if isinstance(error, FileNotFoundError) and tries:
                return self._move_in(root, stage, staged, key, replace=replace, tries=tries - 1)
            return self._failure(key, error)
        return None

    def _rename_in(self, stage: int, staged: str, parent: int, name: str, *, replace: bool) -> None:
        if self.shape.companions is not None:
            self._exchange(stage, staged, parent, name, replace=replace)
            return
        if not self.shape.folders:
            if replace:
                os.rename(staged, name, src_dir_fd=stage, dst_dir_fd=parent)
            else:
                atomic.place_new(staged, name, src_dir_fd=stage, dst_dir_fd=parent)
            return
        for attempt in range(_TRIES if replace else 1):
            old = f".old{attempt}"
            # A rename cannot replace a folder with content.
            with suppress(FileNotFoundError):
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

    def _exchange(self, stage: int, staged: str, parent: int, name: str, *, replace: bool) -> None:
        """Move the files of an entry to their places, its own file last; after an error the old ones are back."""
        moved: list[tuple[int, str, int, str]] = []
        with handles.opened(staged, stage) as own:
            old = self._files_of(parent, name) if replace else ()
            moves = [(parent, file, stage, f".old{number}") for number, file in enumerate(old)]
            moves += [(own, file, parent, file) for file in sorted(os.listdir(own), key=lambda file: file == name)]
            try:
                for source, file, to, place in moves:
                    with suppress(FileNotFoundError) if source == parent else nullcontext():
                        atomic.place_new(file, place, src_dir_fd=source, dst_dir_fd=to)
                        moved.append((source, file, to, place))
            except OSError:
                for source, file, to, place in reversed(moved):
                    with suppress(OSError):
                        atomic.place_new(place, file, src_dir_fd=to, dst_dir_fd=source)
                raise

    def _move_out(self, parent: int, name: str, folder: int, to: str, freed: list[int] | None = None) -> None:
        try:
            os.rename(name, to, src_dir_fd=parent, dst_dir_fd=folder)
        except OSError as error:
            # overlayfs cannot rename a folder of a lower layer.
            if error.errno != errno.EXDEV:
                raise
            atomic.delete(parent, name, freed, first=self.shape.first)

    # ------------------------------------------------------------------ removing

    def remove(
        self, entries: Sequence[facts.Entry], *, tidy: Callable[[], bool] | None = None, guard: Guard = nullcontext
    ) -> facts.Outcome:
        """Remove planned leaves whose stamp has not changed.

        A folder is renamed into a trash folder of the same root before it is deleted, so that no reader sees half of
        it. If overlayfs cannot rename it, it is deleted in place, the shape's ``first`` files before the others.
        ``guard`` makes the context of the renames. If ``tidy`` returns true, empty folders are removed too: those above
        the removed leaves, and planned ones. A program that is about to make an entry in such a folder would fail, so
        it may return true only while no program uses the root.
        """
        skipped: list[facts.Note] = []
        failed: list[facts.Note] = []
        removed = 0
        freed: list[int] = []
        try:
            with self._opened() as root, ExitStack() as stack:
                if root is None:
                    return facts.Outcome(self.layer, skipped=tuple(facts.Note(entry.key, GONE) for entry in entries))
                trash = lru_cache(partial(self._make_trash, stack, root, freed))
                with guard(root):
                    for entry in entries:
                        try:
                            with handles.below(root, entry.key.split("/")[:-1]) as parent:
                                reason = (
                                    GONE if parent is None else self._remove_from(parent, entry, trash, freed, tidy)
                                )
                        except FileNotFoundError:
                            reason = GONE
                        except OSError as error:
                            failed.append(facts.Note(entry.key, f"cannot be removed: {error.strerror}"))
                            continue
                        if reason is not None:
                            skipped.append(facts.Note(entry.key, reason))
                        removed += reason is None and not entry.is_orphan
                if tidy is not None and tidy():
                    _remove_empty(root, [entry.key for entry in entries])
        except (errors.LayerError, OSError) as error:
            # Earlier removals must still be counted.
            if isinstance(error, errors.LayerError) and not (removed or skipped or failed):
                raise
            failed.append(facts.Note(str(self.root), f"cannot be cleared: {errors.reason_of(error)}"))
        return facts.Outcome(self.layer, removed, sum(freed), tuple(skipped), tuple(failed))

    def _make_trash(self, stack: ExitStack, root: int, freed: list[int]) -> int | None:
        """Make a folder for folders that are to be deleted; ``None`` on a full disk, where there is no room for it."""
        try:
            return stack.enter_context(atomic.own_folder(root, _TRASH, freed))
        except OSError as error:
            if error.errno not in handles.NO_ROOM:
                raise
        return None

    def _remove_from(
        self,
        parent: int,
        entry: facts.Entry,
        trash: Callable[[], int | None],
        freed: list[int],
        tidy: Callable[[], bool] | None,
    ) -> str | None:
        """Remove one leaf from an open folder; return why it was left, or ``None``."""
        parts = entry.key.split("/")
        name = parts[-1]
        leaf = self._recognise(parent, parts)
        if leaf is None:
            return GONE if handles.status_of(parent, name) is None else CHANGED
        if not isinstance(leaf, Leaf) or leaf.stamp != entry.stamp:
            return CHANGED
        if leaf.orphan_rule is not None and leaf.orphan_rule is self.shape.empty:
            if tidy is None or not tidy():
                return IN_USE
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return CHANGED
        elif leaf.orphan_rule is None and self.shape.companions is not None:
            self._delete(parent, name, freed)
        elif not leaf.is_file and (folder := trash()) is not None:
            self._move_out(parent, name, folder, plain.own_name(""), freed)
        else:
            atomic.delete(parent, name, freed, first=self.shape.first)
        return None

    def _delete(self, parent: int, name: str, freed: list[int] | None = None) -> None:
        """Delete an entry and its companions, its own file first."""
        own, *others = self._files_of(parent, name)
        atomic.delete(parent, own, freed)
        for file in others:
            # What is left is an orphan now.
            with suppress(OSError):
                atomic.delete(parent, file, freed)


def scan_each(trees: Iterable[Tree]) -> Iterator[tuple[Tree, Leaf | facts.Problem]]:
    """Yield the content of several trees of one root, each item with its tree; orphans and problems once."""
    seen: set[Path] = set()
    for tree in trees:
        for found in tree.scan():
            if isinstance(found, facts.Problem) or found.orphan_rule is not None:
                path = found.path if isinstance(found, facts.Problem) else tree.root / found.key
                if path in seen:
                    continue
                seen.add(path)
            yield tree, found


def always() -> bool:
    """Return ``True``: for a root whose library makes the folders again that it needs."""
    return True


def _stranger(pattern: re.Pattern[str] | None, paths: Iterable[str]) -> str | None:
    """Return the first path that does not match; ``None`` without a pattern."""
    return None if pattern is None else next((path for path in paths if not pattern.fullmatch(path)), None)


def _children(folder: int, name: str) -> list[str]:
    with handles.opened(name, folder) as opened:
        return os.listdir(opened)


def _measured(folder: int, name: str, status: os.stat_result) -> tuple[tuple[Member, ...], int]:
    """Return the files of a leaf, and the newest change in nanoseconds."""
    if not stat.S_ISDIR(status.st_mode):
        return (Member("", status.st_size, status.st_mtime, handles.blocks_of(status)),), status.st_mtime_ns
    failed: list[OSError] = []
    members, newest = [], 0
    for _, _, path, found in handles.walk(folder, name, failed):
        newest = max(newest, found.st_mtime_ns)
        if stat.S_ISREG(found.st_mode):
            members.append(Member(path, found.st_size, found.st_mtime, handles.blocks_of(found)))
    if failed:
        raise failed[0]
    return tuple(sorted(members)), newest or status.st_mtime_ns


def _remove_empty(root: int, keys: Sequence[str]) -> None:
    """Remove the empty folders above some keys."""
    parents = {tuple(key.split("/")[:depth]) for key in keys for depth in range(1, key.count("/") + 1)}
    for *above, name in sorted(parents, key=len, reverse=True):
        with suppress(OSError), handles.below(root, above) as folder:
            if folder is not None:
                os.rmdir(name, dir_fd=folder)
