"""Entries in a folder tree, listed and read relative to open directory handles.

A :class:`TreeReader` has the *shape* of its entries, a pattern for each path component. Names that do not match are not
listed, and only listed things can be removed. Links inside a root are never followed; a root that is itself a link is
resolved once, when it is opened.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.errors import LARGEST_ENTRY, Damaged, LayerError, Unreachable, printable, too_large
from cachectl.layers.base.facts import Entry, Orphan, Problem
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.handles import (
    blocks_of,
    descend,
    is_left_own,
    opened,
    opened_root,
    status_of,
    walk,
)
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.archive import pack

#: cachectl's own staging and trash folders in a root. A killed command leaves them; clearing them is always safe.
OWN_TEMPORARY: Final = regex(r"\.cachectl-(?:stage|trash)-[0-9a-f]{32}")


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


class TreeReader:
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
        with self._opened_above(key) as (parent, name):
            status = None if parent is None else status_of(parent, name)
            if parent is None or status is None:
                return None
            leaf = self._recognise(parent, key.split("/"), status)
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
        is_named = self.shape.levels[len(parts) - 1].fullmatch(parts[-1])
        try:
            status = status_of(handle, parts[-1])
            leaf = None if status is None else self._recognise(handle, parts, status, head)
            if leaf is None and status is not None and is_named and stat.S_ISDIR(status.st_mode):
                if len(parts) < len(self.shape.levels):
                    with opened(parts[-1], handle) as below:
                        yield from self._scan_folder(below, parts, head)
                return
        except FileNotFoundError:
            return
        except OSError as error:
            yield self._problem(parts, error)
            return
        if leaf is not None:
            if (foreign := self._foreign(leaf)) is None:
                yield leaf
                return
            message = f"holds {foreign!r}, which does not belong there; left alone"
            yield Problem(self.root.joinpath(*parts), "unrecognised", message)
        elif status is not None and is_named and stat.S_ISLNK(status.st_mode):
            yield Problem(self.root.joinpath(*parts), "link", "a link inside the root is not followed")

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
                is_left = rule is not _OWN or is_left_own(handle, name, status)
                return _measure(handle, name, key, status, rule) if is_left else None
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
        with self._opened_above(key) as (parent, name):
            status = None if parent is None else status_of(parent, name)
            kind = stat.S_ISDIR if self.shape.folders else stat.S_ISREG
            if parent is None or status is None or not kind(status.st_mode):
                return None
            try:
                contents = _load(parent, name)
            except FileNotFoundError:
                # If a file vanished meanwhile, the entry is being replaced: return a miss, not half an entry.
                return None
            pattern = self.shape.members
            return contents if pattern is None or all(map(pattern.fullmatch, contents)) else None

    def read_file(self, key: str, path: str = "", limit: int = -1) -> bytes | None:
        """Read one file of an entry (the first ``limit`` bytes), never through a link."""
        with self._opened_above(key, path) as (folder, name):
            try:
                return None if folder is None else read_plain(name, dir_fd=folder, limit=limit)
            except FileNotFoundError:
                return None

    def standing(self, key: str) -> dict[str, bytes] | LayerError | None:
        """Return the result or the error of :meth:`read_members`, for the entry that is to be replaced."""
        try:
            return self.read_members(key)
        except LayerError as error:
            return error

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
    def _opened_above(self, key: str, path: str = "") -> Iterator[tuple[int | None, str]]:
        """Open the folder above an entry, or above a file in it, and yield it with the name in it.

        The folder is ``None`` if it is missing or behind a link. Errors of reading become :class:`Unreachable`.
        """
        *above, name = (f"{key}/{path}" if path else key).split("/")
        try:
            with self._opened_root() as handle, ExitStack() as stack:
                yield None if handle is None else descend(stack, handle, above), name
        except LayerError:
            raise
        except OSError as error:
            if error.errno == errno.EFBIG:
                message = f"has more than {LARGEST_ENTRY:,} bytes, the limit of an entry"
                raise Damaged(self.layer, message, self.root / key) from error
            file = "" if error.filename is None or not self.shape.folders else f" {printable(error.filename)}"
            raise self._unreachable(f"cannot read{file}", key, error) from error

    def _unreachable(self, verb: str, key: str, error: OSError) -> Unreachable:
        return Unreachable(self.layer, f"{verb}: {error.strerror or error}", self.root / key)


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
    errors: list[OSError] = []
    steps = list(walk(handle, name, errors))
    if errors:
        raise errors[0]
    members = [
        Member(path, found.st_size, found.st_mtime, blocks_of(found))
        for _, _, path, found in steps
        if stat.S_ISREG(found.st_mode)
    ]
    newest = max((step.status.st_mtime_ns for step in steps), default=status.st_mtime_ns)
    return Leaf(key, tuple(sorted(members)), newest, rule)


def _load(handle: int, name: str) -> dict[str, bytes]:
    """Read the files of an entry by their paths.

    Raises :class:`OSError`: :class:`FileNotFoundError` if one vanishes meanwhile, ``EFBIG`` if they are too large,
    others for anything but a plain file.
    """
    contents: dict[str, bytes] = {}
    total = 0
    for folder, child, path, status in walk(handle, name):
        if not stat.S_ISDIR(status.st_mode):
            contents[path] = read_plain(child, dir_fd=folder)
            total += len(contents[path])
        if total > LARGEST_ENTRY:
            raise OSError(errno.EFBIG, too_large(total, LARGEST_ENTRY), name)
    return contents
