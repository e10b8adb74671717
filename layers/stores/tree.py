"""Entries in a folder tree: listed, read, placed and removed relative to open directory handles.

A :class:`Tree` is told the *shape* of its entries, a pattern for each path component, and sees nothing else:
what does not match is not listed, and what is not listed cannot be removed. Links inside a root are never
followed; a root that is itself a link is resolved once, when it is opened.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachectl.layers.errors import Damaged, EntryExists, LayerError, Unreachable
from cachectl.layers.facts import Note, Outcome, Problem, Target
from cachectl.layers.stores.archive import pack, unpack

#: Whether this platform can act relative to directory handles, without which nothing is removed safely.
HANDLES: Final = {os.open, os.stat, os.unlink, os.rename, os.mkdir, os.rmdir} <= os.supports_dir_fd
NO_HANDLES: Final = "this platform cannot act relative to an open folder, so nothing could be removed safely"

_NO_HARD_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}
_STAGE: Final = ".cachectl-stage-"
_TRASH: Final = ".cachectl-trash-"
#: What a killed cachectl may leave in a root: its own staging and trash, safe to clear at any time.
LEFTOVER: Final = re.compile(r"\.cachectl-(?:stage|trash)-[0-9a-f]{32}")

_FOLDER_FLAGS: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_FILE_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class StrayRule:
    """What a tree may hold beside entries: temporaries and left-overs, by the pattern of their name.

    ``level`` is the depth below the root (0: directly in it); ``empty`` accepts files of 0 bytes only;
    ``private`` accepts only what no other user may read, as ``mkstemp`` makes it.
    """

    level: int
    pattern: re.Pattern[str]
    why: str
    idle_only: bool = True
    empty: bool = False
    private: bool = False

    def accepts(self, level: int, name: str, status: os.stat_result) -> bool:
        """Tell whether a name at a level is one of these."""
        if level != self.level or not self.pattern.fullmatch(name) or stat.S_ISLNK(status.st_mode):
            return False
        return not (self.empty and status.st_size) and not (self.private and status.st_mode & 0o077)


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of a tree: one pattern per path component, the last being the entry itself."""

    levels: tuple[re.Pattern[str], ...]
    folders: bool
    strays: tuple[StrayRule, ...] = ()

    def accepts(self, key: str) -> bool:
        """Tell whether a key spells an entry of this shape."""
        parts = key.split("/")
        return len(parts) == len(self.levels) and all(
            pattern.fullmatch(part) for pattern, part in zip(self.levels, parts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a leaf; ``path`` is relative to the leaf, and empty where the leaf is the file."""

    path: str
    bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Leaf:
    """An entry, or a stray, as it lies on the disk; ``newest`` counts folders too, in nanoseconds."""

    key: str
    members: tuple[Member, ...]
    newest: int
    links: bool = False
    stray: StrayRule | None = None

    @property
    def bytes(self) -> int:
        """Sum the file sizes."""
        return sum(member.bytes for member in self.members)

    @property
    def modified(self) -> float:
        """Return the newest change anywhere in the leaf, in epoch seconds."""
        return self.newest / 1e9

    @property
    def mark(self) -> tuple[int, ...]:
        """Fingerprint files, bytes and newest change."""
        return (len(self.members), self.bytes, self.newest)

    def member(self, path: str) -> Member | None:
        """Return the member at a path."""
        return next((member for member in self.members if member.path == path), None)


class Tree:
    """The entries of one shape under one root."""

    def __init__(self, layer: str, root: Path, shape: Shape) -> None:
        self.layer = layer
        self.root = root
        self.shape = shape

    # ------------------------------------------------------------------ listing

    def scan(self) -> Iterator[Leaf | Problem]:
        """Yield every leaf and stray; folders that cannot be read are problems."""
        with self._opened_root() as handle:
            if handle is not None:
                yield from self._scan_level(handle, (), 0)

    def find(self, key: str) -> Leaf | None:
        """Look at one entry or stray by its key."""
        parts = key.split("/")
        with self._opened_root() as handle, ExitStack() as stack:
            parent = None if handle is None else _descend(stack, handle, parts[:-1])
            if parent is None:
                return None
            status = _status(parent, parts[-1])
            return None if status is None else self._recognise(parent, tuple(parts), status)

    def _scan_level(self, handle: int, above: tuple[str, ...], level: int) -> Iterator[Leaf | Problem]:
        try:
            names = sorted(os.listdir(handle))
        except OSError as error:
            yield self._problem(above, error)
            return
        last = level == len(self.shape.levels) - 1
        for name in names:
            # Most names in a shared folder match nothing: no stat is spent on them.
            if not self.shape.levels[level].fullmatch(name) and not self._may_stray(level, name):
                continue
            status = _status(handle, name)
            if status is None:
                continue
            parts = (*above, name)
            try:
                leaf = self._recognise(handle, parts, status)
            except OSError as error:
                yield self._problem(parts, error)
                continue
            if leaf is not None:
                yield leaf
            elif self.shape.levels[level].fullmatch(name):
                if stat.S_ISLNK(status.st_mode):
                    yield Problem(self.root.joinpath(*parts), "link", "a link inside the root is not followed")
                elif not last and stat.S_ISDIR(status.st_mode):
                    yield from self._scan_below(handle, parts, level)

    def _scan_below(self, handle: int, parts: tuple[str, ...], level: int) -> Iterator[Leaf | Problem]:
        try:
            below = os.open(parts[-1], _FOLDER_FLAGS, dir_fd=handle)
        except FileNotFoundError:
            return
        except OSError as error:
            yield self._problem(parts, error)
            return
        try:
            yield from self._scan_level(below, parts, level + 1)
        finally:
            os.close(below)

    def _may_stray(self, level: int, name: str) -> bool:
        return bool(LEFTOVER.fullmatch(name)) or any(
            rule.level == level and rule.pattern.fullmatch(name) for rule in self.shape.strays
        )

    def _recognise(self, handle: int, parts: tuple[str, ...], status: os.stat_result) -> Leaf | None:
        name, level = parts[-1], len(parts) - 1
        key = "/".join(parts)
        if LEFTOVER.fullmatch(name) and level == 0 and stat.S_ISDIR(status.st_mode):
            rule = StrayRule(0, LEFTOVER, "left by an interrupted cachectl", idle_only=False)
            return _measure(handle, name, key, status, rule)
        for rule in self.shape.strays:
            if rule.accepts(level, name, status):
                return _measure(handle, name, key, status, rule)
        kind = stat.S_ISDIR if self.shape.folders else stat.S_ISREG
        if level == len(self.shape.levels) - 1 and self.shape.levels[level].fullmatch(name) and kind(status.st_mode):
            return _measure(handle, name, key, status, None)
        return None

    def _problem(self, parts: Sequence[str], error: OSError) -> Problem:
        return Problem(self.root.joinpath(*parts), "unreadable", f"cannot be read: {error.strerror}")

    # ------------------------------------------------------------------ reading

    def read(self, key: str) -> bytes | None:
        """Return the bytes of an entry: the file's own, or a tar of the folder. ``None`` is a miss."""
        members = self.read_members(key)
        if members is None:
            return None
        return pack(members) if self.shape.folders else members[""]

    def read_members(self, key: str) -> dict[str, bytes] | None:
        """Return every file of an entry by its path in the leaf."""
        if not self.shape.accepts(key):
            return None
        leaf = self.find(key)
        if leaf is None:
            return None
        contents = {member.path: self.read_file(key, member.path) for member in leaf.members}
        # A file that vanished meanwhile means the entry is being replaced: a miss, not half an entry.
        present = {path: content for path, content in contents.items() if content is not None}
        return present if len(present) == len(contents) else None

    def read_file(self, key: str, path: str = "", limit: int = -1) -> bytes | None:
        """Read one file of an entry (the first ``limit`` bytes), never through a link."""
        parts = [*key.split("/"), *(path.split("/") if path else ())]
        with self._opened_root() as handle, ExitStack() as stack:
            parent = None if handle is None else _descend(stack, handle, parts[:-1])
            if parent is None:
                return None
            try:
                with open(os.open(parts[-1], _FILE_FLAGS, dir_fd=parent), "rb") as file:
                    return file.read(limit)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise self._unreachable("cannot read", key, error) from error

    # ------------------------------------------------------------------ placing

    def write(self, key: str, data: bytes, *, replace: bool, file_mode: int = 0o600) -> None:
        """Stage an entry beside its place and rename it in: before or after, never half.

        Raises :class:`EntryExists` where a different entry stands and ``replace`` is not set.
        """
        if not self.shape.accepts(key):
            raise LayerError(self.layer, f"{key!r} is not a key of this layer; cachectl ls {self.layer} lists keys")
        try:
            self.write_members(key, unpack(data) if self.shape.folders else {"": data}, replace, file_mode)
        except OSError as error:
            if isinstance(error, LayerError):
                raise
            raise self._unreachable("cannot write", key, error) from error
        except ValueError as error:
            if isinstance(error, LayerError):
                raise
            raise Damaged(self.layer, str(error), key) from error

    def write_members(self, key: str, members: dict[str, bytes], replace: bool, file_mode: int) -> None:
        """Place an entry given file by file."""
        standing = self.read_members(key)
        if standing == members:
            return
        if standing is not None and not replace:
            raise EntryExists(self.layer, self.root / key)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts = key.split("/")
        with self._opened_root() as handle, ExitStack() as stack:
            if handle is None:
                raise FileNotFoundError(2, os.strerror(2), str(self.root))
            parent = _descend(stack, handle, parts[:-1], make=True)
            if parent is None:
                raise FileNotFoundError(2, os.strerror(2), str(self.root / key))
            stage = _STAGE + uuid.uuid4().hex
            os.mkdir(stage, 0o700, dir_fd=handle)
            try:
                folder = stack.enter_context(_opened(stage, handle))
                _fill(folder, parts[-1], members, file_mode)
                self._publish(folder, parent, parts[-1], replace=replace)
                os.fsync(parent)
            finally:
                _delete(handle, stage)

    def _publish(self, stage: int, parent: int, name: str, *, replace: bool) -> None:
        if self.shape.folders and replace and _status(parent, name) is not None:
            # A folder cannot be renamed over a full one: the old one steps into the stage first.
            os.rename(name, ".old", src_dir_fd=parent, dst_dir_fd=stage)
        try:
            if self.shape.folders or replace:
                os.rename(name, name, src_dir_fd=stage, dst_dir_fd=parent)
            else:
                os.link(name, name, src_dir_fd=stage, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            if _status(parent, name) is not None:
                raise EntryExists(self.layer, self.root / name) from error
            if error.errno not in _NO_HARD_LINKS:
                raise
            os.rename(name, name, src_dir_fd=stage, dst_dir_fd=parent)

    # ------------------------------------------------------------------ removing

    def remove(self, targets: Sequence[Target], *, tidy: bool = False) -> Outcome:
        """Remove planned leaves, each compared with its mark first.

        A folder is renamed into a trash folder of the same root before it is deleted, so that no reader
        meets half of it. ``tidy`` also removes the folders above that are empty then.
        """
        removed = freed = 0
        skipped: list[Note] = []
        failed: list[Note] = []
        try:
            with self._opened_root() as handle:
                if handle is None:
                    return Outcome(self.layer, skipped=tuple(Note(target.key, "already gone") for target in targets))
                with _trash(handle) as trash:
                    for number, target in enumerate(targets):
                        try:
                            reason = self._remove_one(handle, trash, str(number), target)
                        except OSError as error:
                            failed.append(Note(target.key, f"cannot be removed: {error.strerror}"))
                            continue
                        if reason is not None:
                            skipped.append(Note(target.key, reason))
                        else:
                            removed += target.entries
                            freed += target.bytes
                if tidy:
                    _prune_empty(handle, [target.key for target in targets])
        except OSError as error:
            failed.append(Note(str(self.root), f"cannot be cleared: {error.strerror or error}"))
        return Outcome(self.layer, removed, freed, tuple(skipped), tuple(failed))

    def _remove_one(self, handle: int, trash: int, number: str, target: Target) -> str | None:
        parts = tuple(target.key.split("/"))
        with ExitStack() as stack:
            parent = _descend(stack, handle, parts[:-1])
            status = None if parent is None else _status(parent, parts[-1])
            leaf = None if parent is None or status is None else self._recognise(parent, parts, status)
            if parent is None or status is None or leaf is None:
                return "already gone"
            if leaf.mark != target.mark:
                return "changed since it was planned"
            if stat.S_ISDIR(status.st_mode):
                os.rename(parts[-1], number, src_dir_fd=parent, dst_dir_fd=trash)
                _delete(trash, number)
            else:
                os.unlink(parts[-1], dir_fd=parent)
        return None

    # ------------------------------------------------------------------ helpers

    @contextmanager
    def _opened_root(self) -> Iterator[int | None]:
        try:
            handle = os.open(self.root, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        except OSError as error:
            raise self._unreachable("cannot open", "", error) from error
        try:
            yield handle
        finally:
            os.close(handle)

    def _unreachable(self, verb: str, key: str, error: OSError) -> Unreachable:
        return Unreachable(self.layer, f"{verb}: {error.strerror or error}", self.root / key)


def _status(handle: int, name: str) -> os.stat_result | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.stat(name, dir_fd=handle, follow_symlinks=False)
    return None


def _measure(handle: int, name: str, key: str, status: os.stat_result, rule: StrayRule | None) -> Leaf:
    if not stat.S_ISDIR(status.st_mode):
        return Leaf(key, (Member("", status.st_size, status.st_mtime),), status.st_mtime_ns, stray=rule)
    members: list[Member] = []
    newest, links = _gather(handle, name, "", members)
    return Leaf(key, tuple(members), max(newest, status.st_mtime_ns), links, rule)


def _gather(handle: int, name: str, prefix: str, members: list[Member]) -> tuple[int, bool]:
    """List a folder's files into ``members``; return its newest change (ns) and whether links were met."""
    newest, links = 0, False
    try:
        folder = os.open(name, _FOLDER_FLAGS, dir_fd=handle)
    except FileNotFoundError:
        return newest, links
    try:
        for child in sorted(os.listdir(folder)):
            status = _status(folder, child)
            if status is None:
                continue
            newest = max(newest, status.st_mtime_ns)
            if stat.S_ISDIR(status.st_mode):
                below, linked = _gather(folder, child, f"{prefix}{child}/", members)
                newest, links = max(newest, below), links or linked
            elif stat.S_ISREG(status.st_mode):
                members.append(Member(prefix + child, status.st_size, status.st_mtime))
            else:
                links = True
    finally:
        os.close(folder)
    return newest, links


@contextmanager
def _opened(name: str, handle: int) -> Iterator[int]:
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=handle)
    try:
        yield folder
    finally:
        os.close(folder)


def _descend(stack: ExitStack, handle: int, parts: Sequence[str], *, make: bool = False) -> int | None:
    """Open a folder below a handle component by component, never through a link; ``None`` if it is not there."""
    for part in parts:
        if make:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=handle)
        try:
            handle = stack.enter_context(_opened(part, handle))
        except OSError:
            if make:
                raise
            return None
    return handle


def _fill(stage: int, name: str, members: dict[str, bytes], file_mode: int) -> None:
    with ExitStack() as stack:
        for path, content in members.items():
            parts = [name, *(path.split("/") if path else ())]
            folder = _descend(stack, stage, parts[:-1], make=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(parts[-1], flags, file_mode, dir_fd=folder), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())


@contextmanager
def _trash(handle: int) -> Iterator[int]:
    name = _TRASH + uuid.uuid4().hex
    os.mkdir(name, 0o700, dir_fd=handle)
    try:
        with _opened(name, handle) as folder:
            yield folder
    finally:
        _delete(handle, name)


def _delete(handle: int, name: str) -> None:
    """Delete a file or a whole folder relative to a handle; links in it are unlinked, never followed."""
    status = _status(handle, name)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=handle)
        return
    with _opened(name, handle) as folder:
        for child in os.listdir(folder):
            _delete(folder, child)
    os.rmdir(name, dir_fd=handle)


def _prune_empty(handle: int, keys: Sequence[str]) -> None:
    parents = {tuple(key.split("/")[:depth]) for key in keys for depth in range(1, key.count("/") + 1)}
    for parts in sorted(parents, key=len, reverse=True):
        with ExitStack() as stack, suppress(OSError):
            above = _descend(stack, handle, parts[:-1])
            if above is not None:
                os.rmdir(parts[-1], dir_fd=above)
