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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

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
from cachectl.layers.base.facts import Ability, Bulk, Entry, Orphan, Problem
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
    move,
    open_folder,
    opened,
    opened_root,
    own_folder,
    status_of,
)
from cachectl.layers.disk.plain import STAGE, read_plain
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.quarantine import Quarantine, folder_pattern
from cachectl.layers.stores.walk import CHANGED, GONE, Cleared, Group, Task, Weight, clear, weigh

#: Whether this platform can act relative to directory handles, without which nothing is removed safely.
_HANDLES: Final = {os.open, os.stat, os.unlink, os.rename, os.mkdir, os.rmdir} <= os.supports_dir_fd
_WITHOUT: Final = "this platform cannot act relative to an open folder, so nothing could be changed safely"
#: Abilities that layers over trees lack here.
REFUSALS: Final[Mapping[Ability, str]] = (
    {} if _HANDLES else dict.fromkeys((Ability.PUT, Ability.CLEAR, Ability.QUARANTINE), _WITHOUT)
)

#: Whether a library works with a symbolic link in the place of a file of an entry: no or unknown; only if this user
#: cannot write to the file, because the library may; or always, because the library replaces files by a rename.
Links = Literal["never", "read-only", "always"]
#: A name in an open folder.
_Place = tuple[str, int]
#: Makes what is held while entries are renamed, given the open root.
Guard = Callable[[int], AbstractContextManager[object]]

#: Seconds for which a check that a root is unused counts.
_SECONDS_UNASKED: Final = 0.5
#: Numbers of a version stamp: files, bytes and newest change.
_STAMP_LENGTH: Final = 3
_TRASH: Final = ".cachectl-trash-"
#: cachectl's own staging and trash folders in a root. A killed command leaves them; clearing them is always safe.
OWN_TEMPORARY: Final = regex(r"\.cachectl-(?:stage|trash)-[0-9a-f]{32}")

#: Attempts to place an entry while other processes place and remove beside it.
_TRIES: Final = 5


class OrphanRule(NamedTuple):
    """A kind of orphan beside the entries of a tree, such as a temporary, by the pattern of its name.

    With ``members`` it is a folder whose files must all match; else it is a plain file, and ``empty`` accepts only
    those of 0 bytes. ``private`` accepts only files that no other user may read, as ``mkstemp`` makes them.
    ``idle_only`` and ``kept`` are those of :class:`~cachectl.layers.base.facts.Orphan`.
    """

    pattern: re.Pattern[str]
    why: str
    idle_only: bool = True
    empty: bool = False
    private: bool = False
    members: re.Pattern[str] | None = None
    kept: bool = False

    def accepts(self, name: str, status: os.stat_result) -> bool:
        """Return whether a name in the root may be an orphan of this kind, by its name and status alone."""
        kind = stat.S_ISREG if self.members is None else stat.S_ISDIR
        if not self.pattern.fullmatch(name) or not kind(status.st_mode):
            return False
        return not (self.empty and status.st_size) and not (self.private and status.st_mode & 0o077)


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


#: The shape of a tree without entries, in which only cachectl's own folders are listed.
NOTHING: Final = Shape((regex("(?!)"),), folders=True)


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
    links: bool = False
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
        reason = self.orphan_rule.why if self.orphan_rule is not None and why is None else why or ""
        idle_only = self.orphan_rule is None or self.orphan_rule.idle_only
        kept = self.orphan_rule is not None and self.orphan_rule.kept
        files = len(self.members)
        return Orphan(self.key, root, self.bytes, files, self.modified, reason, idle_only, self.stamp, kept, self.disk)

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


def bulk(group: Group, *, stale: bool | None = None) -> Iterator[Bulk]:
    """Sum the weighed entries of a folder, if there are any."""
    moments = [weight.newest / 1e9 for weight in group.weights]
    if moments:
        files = sum(weight.files for weight in group.weights)
        total = sum(weight.bytes for weight in group.weights)
        disk = sum(weight.disk for weight in group.weights)
        yield Bulk(len(moments), files, total, min(moments), max(moments), stale, disk)


def planned(root: Path, group: Group) -> list[facts.Target]:
    """Return the weighed entries of a folder as targets of a plan."""
    return [
        facts.Target(root, f"{group.folder}/{weight.name}", weight.bytes, 1, weight.stamp) for weight in group.weights
    ]


_ANYTHING: Final = regex(".*", re.DOTALL)
#: An entry that is a link to the same entry of a base, or has such a link in it (:mod:`cachectl.layers.stores.bases`).
LINKED: Final = OrphanRule(regex("(?!)"), "linked to a base, which keeps it", kept=True)
_OWN_TEMPORARIES: Final = OrphanRule(
    OWN_TEMPORARY, "left by an interrupted cachectl", idle_only=False, members=_ANYTHING
)
#: Why an empty folder above entries is left.
IN_USE: Final = "a running program may be about to make an entry in it"
_QUARANTINED: Final = "in quarantine as damaged; cachectl restore lists it"


class Tree:
    """The entries of one shape under one root.

    ``handle`` is the root's open folder; without it, each method opens the root by its path.
    """

    def __init__(self, layer: str, root: Path, shape: Shape, handle: int | None = None) -> None:
        self._handle = handle
        self.layer = layer
        self.root = root
        self.shape = shape
        quarantined = OrphanRule(folder_pattern(layer), _QUARANTINED, idle_only=False, members=_ANYTHING, kept=True)
        self._own: tuple[OrphanRule, ...] = (_OWN_TEMPORARIES, quarantined)

    # ------------------------------------------------------------------ listing

    def scan(self, *, head: int = 0) -> Iterator[Leaf | Problem]:
        """Yield every entry and orphan; folders that cannot be read are problems.

        Entries that are files come with their first ``head`` bytes.
        """
        with self._opened_root() as handle:
            if handle is not None:
                yield from self._scan_level(handle, (), 0, head)

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

    def weigh(self, *, hollow: Iterable[str] = (), whole: Iterable[str] = ()) -> Iterator[Group | Leaf | Problem]:
        """Yield as :meth:`scan`, but regular entries only as weights, folder by folder.

        For trees of two levels with folders as entries. ``hollow`` are files that alone make no entry, ``whole`` those
        that must exist and not be empty.
        """
        yield from self._scan_all(self._task()._replace(hollow=tuple(hollow), whole=tuple(whole)))

    def holding(self, child: re.Pattern[str]) -> Iterator[Leaf | Problem]:
        """Yield the leaves of :meth:`scan` with a file or folder that matches ``child``, orphans, and folder problems.

        For trees of two levels with folders as entries.
        """
        for found in self._scan_all(self._task()._replace(child=(child.pattern, child.flags))):
            if not isinstance(found, Group):
                yield found

    def _task(self) -> Task:
        name, member = self.shape.levels[1], self.shape.members or _ANYTHING
        return Task((name.pattern, name.flags), (member.pattern, member.flags), first=self.shape.first)

    def _scan_all(self, task: Task) -> Iterator[Group | Leaf | Problem]:
        folder = self.shape.levels[0]
        # Most folders have no match.
        lists_empty = self.shape.empty is not None and task.child is None
        with self._opened_root() as handle:
            if handle is None:
                return
            try:
                names = sorted(os.listdir(handle))
            except OSError as error:
                yield self._problem((), error)
                return
            odd = [one for one in names if self._may_be_orphan(0, one)]
            for one in odd:
                yield from self._scan_name(handle, (one,), 0)
            for group in weigh(handle, [one for one in names if folder.fullmatch(one) and one not in odd], task):
                may_be_empty = lists_empty and not group.weights and not group.others
                if group.others is None or may_be_empty:
                    yield from self._scan_name(handle, (group.folder,), 0)
                else:
                    yield group
                    yield from self._scan_others(handle, group.folder, group.others)

    def _scan_others(self, handle: int, folder: str, names: Sequence[str]) -> Iterator[Leaf | Problem]:
        with ExitStack() as stack:
            try:
                below = descend(stack, handle, (folder,)) if names else None
            except OSError as error:
                yield self._problem((folder,), error)
                return
            if below is not None:
                for name in sorted(names):
                    yield from self._scan_name(below, (folder, name), 1)

    def find(self, key: str) -> Leaf | None:
        """Return one entry or orphan by its key. Raises :class:`Unreachable` if it cannot be read."""
        parts = key.split("/")
        with self._reading(key), self._opened_root() as handle, ExitStack() as stack:
            parent = None if handle is None else descend(stack, handle, parts[:-1])
            if parent is None:
                return None
            status = status_of(parent, parts[-1])
            leaf = None if status is None else self._recognise(parent, tuple(parts), status)
            return None if leaf is None or self._foreign(leaf) is not None else leaf

    def _scan_level(self, handle: int, above: tuple[str, ...], level: int, head: int = 0) -> Iterator[Leaf | Problem]:
        try:
            names = sorted(os.listdir(handle))
        except OSError as error:
            yield self._problem(above, error)
            return
        for name in names:
            # Most names in a shared folder match nothing, and need no stat.
            if self.shape.levels[level].fullmatch(name) or self._may_be_orphan(level, name):
                yield from self._scan_name(handle, (*above, name), level, head)

    def _scan_name(self, handle: int, parts: tuple[str, ...], level: int, head: int = 0) -> Iterator[Leaf | Problem]:
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
        elif status is not None and self.shape.levels[level].fullmatch(parts[-1]):
            if stat.S_ISLNK(status.st_mode):
                yield Problem(self.root.joinpath(*parts), "link", "a link inside the root is not followed")
            elif level < len(self.shape.levels) - 1 and stat.S_ISDIR(status.st_mode):
                yield from self._scan_below(handle, parts, level, head)

    def _scan_below(self, handle: int, parts: tuple[str, ...], level: int, head: int) -> Iterator[Leaf | Problem]:
        try:
            below = open_folder(parts[-1], handle)
        except FileNotFoundError:
            return
        except OSError as error:
            yield self._problem(parts, error)
            return
        try:
            yield from self._scan_level(below, parts, level + 1, head)
        finally:
            os.close(below)

    def _may_be_orphan(self, level: int, name: str) -> bool:
        return any(rule.pattern.fullmatch(name) for rule in self._orphan_rules(level, name))

    def _orphan_rules(self, level: int, name: str) -> tuple[OrphanRule, ...]:
        """Return the rules to compare a name with; only names of cachectl's own begin with a dot and its name."""
        if level:
            return ()
        return (*self._own, *self.shape.orphans) if name.startswith(".cachectl-") else self.shape.orphans

    def _foreign(self, leaf: Leaf) -> str | None:
        """Return a foreign file in a leaf, if there is one."""
        pattern = self.shape.members if leaf.orphan_rule is None else leaf.orphan_rule.members
        if pattern is None:
            return None
        return next((member.path for member in leaf.members if not pattern.fullmatch(member.path)), None)

    def _recognise(self, handle: int, parts: tuple[str, ...], status: os.stat_result, head: int = 0) -> Leaf | None:
        name, level = parts[-1], len(parts) - 1
        key = "/".join(parts)
        for rule in self._orphan_rules(level, name):
            if rule.accepts(name, status):
                left_alone = rule in self._own and (not is_trusted(handle, status) or is_held(handle, name))
                return None if left_alone else _measure(handle, name, key, status, rule)
        kind = stat.S_ISDIR if self.shape.folders else stat.S_ISREG
        if not self.shape.levels[level].fullmatch(name):
            return None
        if level == len(self.shape.levels) - 1:
            if not self.shape.folders and _is_of_base(handle, name, key, status):
                return Leaf(key, (), status.st_mtime_ns, links=True, orphan_rule=LINKED)
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
        parts = tuple(key.split("/"))
        with self._reading(key), self._opened_root() as handle, ExitStack() as stack:
            parent = None if handle is None else descend(stack, handle, parts[:-1])
            if parent is None:
                return None
            return self._read_folder(parent, parts) if self.shape.folders else self._read_file(parent, parts)

    def standing(self, key: str) -> dict[str, bytes] | LayerError | None:
        """Return the result or the error of :meth:`read_members`, for the entry that is to be replaced."""
        try:
            return self.read_members(key)
        except LayerError as error:
            return error

    def _read_folder(self, parent: int, parts: tuple[str, ...]) -> dict[str, bytes] | None:
        status = status_of(parent, parts[-1])
        if status is None or not stat.S_ISDIR(status.st_mode):
            return None
        contents: dict[str, bytes] = {}
        try:
            _load(parent, parts[-1], "", contents)
        except FileNotFoundError:
            # If a file vanished meanwhile, the entry is being replaced: return a miss, not half an entry.
            return None
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise self._oversized(parts) from error
            if self._is_linked(parent, parts):
                return None
            which = "" if error.filename is None else f" {printable(error.filename)}"
            raise self._unreachable(f"cannot read{which}", "/".join(parts), error) from error
        pattern = self.shape.members
        whole = pattern is None or all(pattern.fullmatch(path) for path in contents)
        return contents if whole else None

    def _is_linked(self, parent: int, parts: tuple[str, ...]) -> bool:
        """Return whether a base keeps an entry."""
        status = status_of(parent, parts[-1])
        leaf = None if status is None else self._recognise(parent, parts, status)
        return leaf is not None and leaf.orphan_rule is LINKED

    def _read_file(self, parent: int, parts: tuple[str, ...]) -> dict[str, bytes] | None:
        status = status_of(parent, parts[-1])
        leaf = None if status is None else self._recognise(parent, parts, status)
        if leaf is None or leaf.orphan_rule is LINKED or self._foreign(leaf) is not None:
            return None
        if leaf.bytes > LARGEST_ENTRY:
            raise self._oversized(parts)
        content = self._read_member(parent, parts, "")
        return None if content is None else {"": content}

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Turn operating system errors of reading an entry into :class:`Unreachable`."""
        try:
            yield
        except LayerError:
            raise
        except OSError as error:
            raise self._unreachable("cannot read", key, error) from error

    def _oversized(self, parts: Sequence[str]) -> Damaged:
        message = f"has more than {LARGEST_ENTRY:,} bytes, the limit of an entry"
        return Damaged(self.layer, message, self.root.joinpath(*parts))

    def _read_member(self, parent: int, parts: Sequence[str], path: str, limit: int = -1) -> bytes | None:
        below = [parts[-1], *(path.split("/") if path else ())]
        with ExitStack() as stack:
            folder = descend(stack, parent, below[:-1])
            if folder is None:
                return None
            try:
                return read_plain(below[-1], dir_fd=folder, limit=limit)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.EFBIG:
                    raise self._oversized(parts) from error
                raise self._unreachable("cannot read", "/".join(parts), error) from error

    def read_file(self, key: str, path: str = "", limit: int = -1) -> bytes | None:
        """Read one file of an entry (the first ``limit`` bytes), never through a link."""
        parts = key.split("/")
        with self._reading(key), self._opened_root() as handle, ExitStack() as stack:
            parent = None if handle is None else descend(stack, handle, parts[:-1])
            return None if parent is None else self._read_member(parent, parts, path, limit)

    # ------------------------------------------------------------------ placing

    def write(
        self, key: str, data: bytes, *, replace: bool, file_mode: int = 0o600, guard: Guard = nullcontext
    ) -> None:
        """Place an entry atomically: stage it beside its place and rename it.

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
        try:
            self._write(key, members, guard, replace=replace, file_mode=file_mode)
        except OSError as error:
            if isinstance(error, LayerError):
                raise
            if self.standing(key) == members:
                raise self._unsettled(key, error) from error
            raise self._unreachable("cannot write", key, error) from error
        except ValueError as error:
            if isinstance(error, LayerError):
                raise
            raise Damaged(self.layer, str(error), key) from error

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
        return {key: one for key, one in settled if one is True or isinstance(one, (Busy, Unsettled))}

    def _write(self, key: str, members: Mapping[str, bytes], guard: Guard, *, replace: bool, file_mode: int) -> None:
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
        if error is not None:
            raise error

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
        self, handle: int, stage: int, name: str, key: str, sync: Callable[[int], None], *, replace: bool
    ) -> None:
        """Move a staged entry into its place below the open root, and sync the folder above it."""
        parts = key.split("/")
        with ExitStack() as stack:
            parent = descend(stack, handle, parts[:-1], make=True)
            if parent is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root.joinpath(*parts)))
            self._publish(stage, name, parent, parts, replace=replace)
            sync(parent)

    def _publish(
        self, stage: int, staged: str, parent: int, parts: Sequence[str], *, replace: bool, aside: int | None = None
    ) -> None:
        """Move an entry from another folder of the root, where its name is ``staged``, into its place.

        The present one is moved ``aside``, or into the stage.
        """
        linked = not replace and self._is_linked(parent, tuple(parts))
        # A folder from quarantine may take the place of an empty one.
        self._demand_room(parent, tuple(parts), free=not (replace or linked) and aside is None)
        if linked:
            # The base has the same entry.
            return
        try:
            if self.shape.folders:
                self._publish_folder(
                    (staged, stage), (parts[-1], parent), stage if aside is None else aside, replace=replace
                )
            elif replace:
                os.rename(staged, parts[-1], src_dir_fd=stage, dst_dir_fd=parent)
            else:
                place_new(staged, parts[-1], src=stage, dst=parent)
        except FileExistsError as error:
            raise EntryExists(self.layer, self.root.joinpath(*parts)) from error

    def _demand_room(self, parent: int, parts: tuple[str, ...], *, free: bool) -> None:
        """Refuse to place an entry over something that is no entry, or over anything if the place must be ``free``."""
        status = status_of(parent, parts[-1])
        leaf = None if status is None else self._recognise(parent, parts, status)
        if status is not None and (leaf is None or self._foreign(leaf) is not None):
            message = "something that is no entry has its name; left alone"
            raise LayerError(self.layer, message, self.root.joinpath(*parts))
        if status is not None and free:
            raise EntryExists(self.layer, self.root.joinpath(*parts))

    def _publish_folder(self, staged: _Place, target: _Place, aside: int, *, replace: bool) -> None:
        """Rename a folder into its place; a present folder is moved aside first, since rename cannot replace it."""
        name, parent = target
        for attempt in range(_TRIES if replace else 1):
            old = f".old{attempt}"
            if replace:
                with suppress(FileNotFoundError):
                    move(name, parent, aside, old, stages=aside, first=self.shape.first)
            if self._moved_in(staged, target, (old, aside)):
                return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)

    def _moved_in(self, staged: _Place, target: _Place, old: _Place) -> bool:
        try:
            move(staged[0], staged[1], target[1], target[0], stages=old[1])
        except OSError as error:
            # After any error the old entry is moved back unless another process has placed one.
            with suppress(OSError):
                os.rename(old[0], target[0], src_dir_fd=old[1], dst_dir_fd=target[1])
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        return True

    # ------------------------------------------------------------------ removing

    def remove(
        self, targets: Sequence[facts.Target], *, tidy: bool = False, guard: Guard = nullcontext
    ) -> facts.Outcome:
        """Remove planned leaves whose stamp has not changed.

        A folder is renamed into a trash folder of the same root before it is deleted, so that no reader
        sees half of it. If overlayfs cannot rename it, it is deleted in place, the shape's ``first`` files
        before the others. ``guard`` makes the context of the rename. ``tidy`` also removes empty folders:
        those above the removed leaves, and planned ones. A program that is about to make an entry in such a folder
        would fail, so ``tidy`` is only for roots that no program uses.
        """
        skipped: list[facts.Note] = []
        failed: list[facts.Note] = []
        removed = 0
        freed = Freed()
        try:
            with self._opened_root() as handle:
                if handle is None:
                    return facts.Outcome(self.layer, skipped=tuple(facts.Note(target.key, GONE) for target in targets))
                trash = _Bin(handle, freed, self.shape.first)
                try:
                    with guard(handle):
                        for target in targets:
                            removed += self._retire(handle, trash, target, skipped, failed, tidy=tidy)
                    if tidy:
                        _prune_empty(handle, [target.key for target in targets])
                finally:
                    trash.empty()
        except (LayerError, OSError) as error:
            # Earlier removals must still be counted.
            if isinstance(error, LayerError) and not (removed or skipped or failed):
                raise
            failed.append(facts.Note(str(self.root), f"cannot be cleared: {reason_of(error)}"))
        return facts.Outcome(self.layer, removed, freed.bytes, tuple(skipped), tuple(failed))

    def remove_unused(self, targets: Sequence[facts.Target], is_unused: Callable[[], bool]) -> facts.Outcome:
        """Remove many entries at once, and the folders above them, in a root that no program uses.

        For trees of two levels with folders as entries. ``is_unused`` is called repeatedly; once it returns ``False``,
        the rest is removed one by one.
        """
        folders: dict[str, list[Weight]] = {}
        entries: list[facts.Target] = []
        others: list[facts.Target] = []
        for target in targets:
            folder, _, name = target.key.partition("/")
            if target.entries == 1 and name and self.shape.accepts(target.key) and len(target.stamp) == _STAMP_LENGTH:
                folders.setdefault(folder, []).append(Weight(name, *target.stamp))
                entries.append(target)
            else:
                others.append(target)
        outcome = self._clear_folders(folders, is_unused) if folders else facts.Outcome(self.layer)
        # The remaining folders have not been started.
        others += [target for target in entries if target.key.partition("/")[0] in folders]
        if not others:
            return outcome
        try:
            return outcome.plus(self.remove(others, tidy=is_unused()))
        except LayerError as error:
            if outcome == facts.Outcome(self.layer):
                raise
            return outcome.plus(facts.Outcome(self.layer, failed=(facts.Note(str(self.root), error.message),)))

    def _clear_folders(self, left: dict[str, list[Weight]], is_unused: Callable[[], bool]) -> facts.Outcome:
        """Clear folder by folder, and remove finished ones from ``left``."""
        folders = dict(left)
        outcome = facts.Outcome(self.layer)
        freed = Freed()
        with self._opened_root() as handle:
            if handle is None:
                return outcome
            try:
                # Files that could not be deleted at once are deleted with the trash folder.
                with own_folder(handle, _TRASH, freed) as (trash, _):
                    for part in self._clear_into(trash, handle, left, is_unused):
                        outcome = outcome.plus(part)
            except OSError as error:
                # If the trash folder could not be made, nothing is done yet; later errors leave only trash.
                if len(left) == len(folders):
                    return outcome
                because = f"cannot be cleared: {error.strerror or error}"
                outcome = outcome.plus(facts.Outcome(self.layer, failed=(facts.Note(str(self.root), because),)))
            if is_unused():
                _prune_empty(handle, [f"{folder}/" for folder in folders])
        return outcome.plus(facts.Outcome(self.layer, bytes_freed=freed.bytes))

    def _clear_into(
        self, trash: int, handle: int, left: dict[str, list[Weight]], is_unused: Callable[[], bool]
    ) -> Iterator[facts.Outcome]:
        asked = time.monotonic()
        for cleared in clear(handle, trash, list(left.items()), self._task()):
            del left[cleared.folder]
            yield self._outcome(cleared)
            if time.monotonic() - asked > _SECONDS_UNASKED:
                if not is_unused():
                    return
                asked = time.monotonic()

    def _outcome(self, cleared: Cleared) -> facts.Outcome:
        skipped = [facts.Note(f"{cleared.folder}/{name}", reason) for name, reason in cleared.left]
        failed = [
            facts.Note(f"{cleared.folder}/{name}", f"cannot be removed: {reason}") for name, reason in cleared.failed
        ]
        return facts.Outcome(self.layer, cleared.entries, cleared.bytes, tuple(skipped), tuple(failed))

    def _retire(
        self,
        handle: int,
        trash: _Bin,
        target: facts.Target,
        skipped: list[facts.Note],
        failed: list[facts.Note],
        *,
        tidy: bool,
    ) -> int:
        """Remove one leaf from its place; return the number of its entries."""
        try:
            reason = self._remove_one(handle, trash, target, tidy=tidy)
        except FileNotFoundError:
            reason = GONE
        except OSError as error:
            failed.append(facts.Note(target.key, f"cannot be removed: {error.strerror}"))
            return 0
        if reason is None:
            return target.entries
        skipped.append(facts.Note(target.key, reason))
        return 0

    def _remove_one(self, handle: int, trash: _Bin | _Shelf, target: facts.Target, *, tidy: bool = False) -> str | None:
        parts = tuple(target.key.split("/"))
        with ExitStack() as stack:
            parent = descend(stack, handle, parts[:-1])
            status = None if parent is None else status_of(parent, parts[-1])
            leaf = None if parent is None or status is None else self._recognise(parent, parts, status)
            if status is None or parent is None:
                return GONE
            if leaf is None or self._foreign(leaf) is not None or leaf.stamp != target.stamp:
                return CHANGED
            if leaf.orphan_rule is None or leaf.orphan_rule is not self.shape.empty:
                trash.take(parent, parts[-1])
                return None
            if not tidy:
                return IN_USE
            return None if _removed_if_empty(parent, parts[-1]) else CHANGED

    # ------------------------------------------------------------------ quarantine

    def quarantine(self, target: facts.Target, thing: facts.Quarantined, *, guard: Guard = nullcontext) -> str | None:
        """Move a planned leaf into quarantine if its stamp has not changed; return why it was left, or ``None``."""
        try:
            with self._opened_root() as handle:
                if handle is None:
                    return GONE
                with guard(handle):
                    return self._remove_one(handle, _Shelf(self, handle, thing), target)
        except FileNotFoundError:
            return GONE
        except OSError as error:
            if isinstance(error, LayerError):
                raise
            raise self._unreachable("cannot be moved aside", target.key, error) from error

    def restore(self, thing: facts.Quarantined, *, replace: bool, guard: Guard = nullcontext) -> None:
        """Move a leaf from quarantine into its old place.

        Raises :class:`EntryExists` if the place is taken and ``replace`` is not set.
        """
        parts = thing.key.split("/")
        if not self.shape.accepts(thing.key):
            raise not_a_key(self.layer, thing.key)
        with Quarantine(self.layer, self.root).taken(thing) as folder, ExitStack() as stack:
            self._demand_leaf(folder, thing)
            root = stack.enter_context(self._opened_root())
            parent = None if root is None else descend(stack, root, parts[:-1], make=True)
            if root is None or parent is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
            is_placed = False
            try:
                with own_folder(root, STAGE) as (aside, _), guard(root):
                    self._publish(folder, parts[-1], parent, parts, replace=replace, aside=aside)
                    os.fsync(parent)
                    is_placed = True
            except OSError as error:
                if not is_placed:
                    raise
                raise self._unsettled(thing.key, error) from error

    def _demand_leaf(self, folder: int, thing: facts.Quarantined) -> None:
        """Raise an error unless a quarantine folder holds exactly an entry."""
        parts = tuple(thing.key.split("/"))
        status = status_of(folder, parts[-1])
        leaf = None if status is None else self._recognise(folder, parts, status)
        if leaf is None or leaf.links or self._foreign(leaf) is not None:
            raise Damaged(
                self.layer, "the quarantined thing of this name is no entry; it stays in quarantine", thing.name
            )

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


def _is_empty(handle: int, name: str) -> bool:
    with opened(name, handle) as folder, os.scandir(folder) as children:
        return next(children, None) is None


def _removed_if_empty(parent: int, name: str) -> bool:
    """Remove a folder if it is empty, without a rename; return whether it was removed."""
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _measure(
    handle: int, name: str, key: str, status: os.stat_result, rule: OrphanRule | None, *, head: int = 0
) -> Leaf:
    if not stat.S_ISDIR(status.st_mode):
        beginning = read_plain(name, dir_fd=handle, limit=head) if head else b""
        member = Member("", status.st_size, status.st_mtime, blocks_of(status))
        return Leaf(key, (member,), status.st_mtime_ns, orphan_rule=rule, head=beginning)
    found = _Gathered(f"{key}/", [], [])
    newest = _gather(handle, name, "", found)
    rule = LINKED if rule is None and any(found.links) else rule
    return Leaf(key, tuple(found.members), max(newest, status.st_mtime_ns), bool(found.links), rule)


def _is_of_base(handle: int, name: str, path: str, status: os.stat_result) -> bool:
    """Return whether a name is a link to the same path, relative to its root, in another root."""
    if not stat.S_ISLNK(status.st_mode):
        return False
    with suppress(OSError):
        return os.readlink(name, dir_fd=handle).endswith(f"/{path}")
    return False


class _Gathered(NamedTuple):
    """What is in the folder of an entry: files, and for each link or special file whether it leads into a base."""

    above: str
    members: list[Member]
    links: list[bool]


def _gather(handle: int, name: str, prefix: str, found: _Gathered) -> int:
    """List what is in a folder; return its newest change (ns)."""
    newest = 0
    if prefix.count("/") > DEEP:
        raise OSError(errno.ELOOP, "nested deeper than any entry", name)
    try:
        folder = open_folder(name, handle)
    except FileNotFoundError:
        return newest
    try:
        for child in sorted(os.listdir(folder)):
            status = status_of(folder, child)
            if status is None:
                continue
            newest = max(newest, status.st_mtime_ns)
            if stat.S_ISDIR(status.st_mode):
                newest = max(newest, _gather(folder, child, f"{prefix}{child}/", found))
            elif stat.S_ISREG(status.st_mode):
                member = Member(prefix + child, status.st_size, status.st_mtime, blocks_of(status))
                found.members.append(member)
            else:
                found.links.append(_is_of_base(folder, child, f"{found.above}{prefix}{child}", status))
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


class _Bin:
    """Removes leaves: moves folders into a trash folder, made when first needed, and deletes files at once.

    ``freed`` counts the freed bytes: a file with another hard link frees nothing. A folder that overlayfs cannot rename
    is deleted in place, its ``first`` files before the others.
    """

    def __init__(self, handle: int, freed: Freed, first: tuple[str, ...]) -> None:
        self._freed = freed
        self._handle = handle
        self._first = first
        self._stack = ExitStack()
        self._folder: int | None = None
        self._taken = 0

    def empty(self) -> None:
        """Delete the trash. Raises the first :class:`OSError` after deleting everything possible."""
        self._stack.close()

    def take(self, parent: int, name: str) -> None:
        """Take a leaf out of its folder."""
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode) and self._have_folder():
            try:
                os.rename(name, str(self._taken), src_dir_fd=parent, dst_dir_fd=self._folder)
            except OSError as error:
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
                # On a full disk there is no room for a folder; go on without one to free space.
                if error.errno not in NO_ROOM:
                    raise
        return self._folder is not None


class _Shelf:
    """Moves a damaged leaf into its quarantine folder."""

    def __init__(self, tree: Tree, handle: int, thing: facts.Quarantined) -> None:
        self._quarantine = Quarantine(tree.layer, tree.root)
        self._first = tree.shape.first
        self._handle = handle
        self._thing = thing

    def take(self, parent: int, name: str) -> None:
        """Take a leaf out of its folder."""
        with self._quarantine.shelf(self._handle, self._thing) as shelf:
            move(name, parent, shelf.handle, name, stages=self._handle, first=self._first)
            shelf.taken = True
            os.fsync(parent)


def _prune_empty(handle: int, keys: Sequence[str]) -> None:
    parents = {tuple(key.split("/")[:depth]) for key in keys for depth in range(1, key.count("/") + 1)}
    for parts in sorted(parents, key=len, reverse=True):
        with ExitStack() as stack, suppress(OSError):
            above = descend(stack, handle, parts[:-1])
            if above is not None:
                os.rmdir(parts[-1], dir_fd=above)
