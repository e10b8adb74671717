"""Entries in a folder tree, listed, read, placed and removed relative to open directory handles.

A :class:`Tree` has the *shapes* of what it sees, each with a pattern for each path component. Names that do not match
are not listed, and only listed things can be removed. Links inside a root are never followed; a root that is itself a
link is resolved once, when it is opened. An entry is staged in the root and renamed into its place, and renamed into a
trash folder of the root before it is deleted.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.errors import Damaged, EntryExists, LayerError, Unreachable, Unsettled, not_a_key, reason_of
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.limits import LARGEST_ENTRY
from cachectl.layers.base.text import printable, too_large
from cachectl.layers.core.entry import Entry, Note, Problem, orphan
from cachectl.layers.core.plan import Outcome
from cachectl.layers.core.store import EntryError
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import atomic, handles, plain

_WITHOUT = "this platform cannot act relative to an open folder, so nothing could be changed safely"
#: Abilities that layers over trees lack where nothing is removed safely.
REFUSALS: Mapping[Ability, str] = (
    {} if os.unlink in os.supports_dir_fd else dict.fromkeys((Ability.PUT, Ability.CLEAR), _WITHOUT)
)
#: cachectl's own staging and trash folders in a root. A killed command leaves them; clearing them is always safe.
OWN_TEMPORARY = regex(r"\.cachectl-(?:stage|trash)-[0-9a-f]{32}")
GONE = "already gone"
CHANGED = "changed since it was planned"
#: Why an empty folder above entries is left.
IN_USE = "a running program may be about to make an entry in it"
_TRASH = ".cachectl-trash-"
_FOREVER = float("inf")
#: Attempts to place an entry while other processes place and remove entries.
_TRIES = 6
#: Errors that say that a place is taken, by a file or a folder.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})

#: Makes what is held while entries are renamed, given the open root.
Guard = Callable[[int], AbstractContextManager[object]]
#: The files of an entry by their paths in it; the path is empty if the entry is a file.
Members = Mapping[str, bytes]
#: What became of entries, as :meth:`~cachectl.layers.core.store.Store.write` says.
Placed = dict[str, bool | EntryError]
#: Returns whether empty folders may be removed now.
Tidy = Callable[[], bool]
#: A folder in the trash: its name there, and the bytes that the deletion of each file in it frees.
_Moved = tuple[str, dict[str, int]]


class Shape(NamedTuple):
    """The form of one kind of thing in a tree: one pattern per path component, the last being the thing itself.

    If these are folders, every file in them must match ``members`` (``None``: anything); one with another file is left
    alone. Without the files in ``first`` the library takes a folder for a miss: they are removed first if the folder
    cannot be renamed.

    If an entry is a file with others next to it, their names match ``companions``, and the first group of that pattern
    matches the same text as the first group of the entry's own. Without the entry's own file the library finds none of
    them: it is placed last and removed first.

    Things with a ``because`` are orphans, such as leaked temporaries; ``idle_only`` is that of
    :class:`~cachectl.layers.core.entry.Entry`. ``sizes`` accepts only files of so many bytes, or folders with so
    many names, and ``private`` only what no other user may read, as ``mkstemp`` makes it. ``sums`` is set for files
    that belong to the cache as a whole.
    """

    levels: tuple[re.Pattern[str], ...]
    folders: bool = False
    members: re.Pattern[str] | None = None
    first: tuple[str, ...] = ()
    companions: re.Pattern[str] | None = None
    because: str | None = None
    idle_only: bool = True
    sizes: tuple[int, ...] = ()
    private: bool = False
    sums: bool = False
    #: The mode of the files of an entry.
    mode: int = 0o600

    @property
    def move(self) -> Callable[..., None]:
        """Return what moves a file of an entry to a free place, or a folder to one that has no content."""
        return os.rename if self.folders else atomic.place_new

    @property
    def is_packed(self) -> bool:
        """Return whether an entry may have several files, so that its bytes are a tar of them."""
        return self.folders or self.companions is not None

    @property
    def is_entry(self) -> bool:
        """Return whether things of this shape are entries."""
        return self.because is None and not self.sums

    def strange(self, name: str, paths: Iterable[str]) -> str | None:
        """Return the first path, by name, of those that are no file of the entry of this name."""
        if self.companions is not None:
            own = {name, *self.beside((name, *paths)).get(name, ())}
            return min((path for path in paths if path not in own), default=None)
        pattern = self.members
        wrong = () if pattern is None else [path for path in paths if not pattern.fullmatch(path)]
        return min(wrong, default=None)

    def special(self, members: Mapping[str, os.stat_result]) -> str | None:
        """Return the first link, pipe or so in the folder of an entry, whatever its name."""
        links = () if self.members is None else [path for path, one in members.items() if not stat.S_ISREG(one.st_mode)]
        return min(links, default=None)

    def beside(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the companions among the names of a folder by the name of their entry, ``""`` if it is not there."""
        found: dict[str, list[str]] = {}
        if self.companions is not None:
            own = {name: match[1] for name in sorted(names) if (match := self.levels[-1].fullmatch(name)) is not None}
            entries = {group: name for name, group in own.items()}
            for name in sorted(names):
                if name not in own and (match := self.companions.fullmatch(name)) is not None:
                    found.setdefault(entries.get(match[1], ""), []).append(name)
        return found

    def accepts(self, key: str) -> bool:
        """Return whether a key has this shape."""
        parts = key.split("/")
        return len(parts) == len(self.levels) and self.leads_to(parts)

    def leads_to(self, parts: Sequence[str]) -> bool:
        """Return whether the components of a path match the patterns, as far as there are both."""
        return all(pattern.fullmatch(part) for pattern, part in zip(self.levels, parts, strict=False))

    def owns(self, parts: Sequence[str]) -> bool:
        """Return whether a path, by its name, is a thing of this shape, a companion, above such a thing, or in one."""
        if self.leads_to(parts) and (self.folders or len(parts) <= len(self.levels)):
            return True
        if self.companions is None or len(parts) != len(self.levels):
            return False
        return self.leads_to(parts[:-1]) and self.companions.fullmatch(parts[-1]) is not None

    def takes(self, folder: int, name: str, status: os.stat_result) -> bool:
        """Return whether a thing in an open folder has this shape, whose name has."""
        is_kind = stat.S_ISDIR if self.folders else stat.S_ISREG
        if not is_kind(status.st_mode) or (self.private and status.st_mode & 0o077):
            return False
        if self.sizes and (_names_in(folder, name) if self.folders else status.st_size) not in self.sizes:
            return False
        return self.levels[-1] is not OWN_TEMPORARY or handles.is_left_own(folder, name, status)


_OWN = Shape((OWN_TEMPORARY,), folders=True, because="left by an interrupted cachectl", idle_only=False)
_STRAY = Shape((), because="a file of an entry that is not there")


class Leaf(NamedTuple):
    """A thing on the disk: an entry, an orphan or a file of the whole cache, as its shape says.

    ``members`` are its files by their paths in it; the path is empty if the thing is a file. ``head`` is the beginning
    of such an entry, if requested. The last number of the entry's stamp is the newest change (ns), that of folders
    included.
    """

    entry: Entry
    members: Mapping[str, os.stat_result]
    shape: Shape
    head: bytes = b""


class Tree:
    """The things of some shapes under one root; the first shape that takes a thing counts.

    ``handle`` is the root's open folder; without it, each method opens the root by its path.
    """

    def __init__(self, layer: str, root: Path, *shapes: Shape, handle: int | None = None) -> None:
        self._handle = handle
        self.layer = layer
        self.root = root
        self.shapes = (_OWN, *shapes)
        #: The bytes that the folders above things take on the disk.
        self._above_things = 0
        self._head, self._before = 0, _FOREVER

    def scan(self, *, head: int = 0, before: float = _FOREVER) -> Iterator[Leaf | Problem]:
        """Yield what is there (of entries the first ``head`` bytes too), and a problem for what cannot be read.

        The head of a folder is that of its shape's ``first`` file. ``before`` is the time of the last change (epoch
        seconds) from which on no head is read.

        The last are the folders above things, as a sum; the root itself stays, and is not counted.
        """
        self._above_things, self._head, self._before = 0, head, before
        with self._opened() as handle:
            if handle is not None:
                yield from self._scan(handle, (), self.shapes)
        if self._above_things:
            yield Leaf(Entry(self.layer, ".", self.root, self._above_things, 0, sums=0, fixed=True), {}, _STRAY)

    def leaves(self) -> Iterator[Leaf]:
        """Yield what is no orphan. Raises :class:`Unreachable` if something may have been overlooked."""
        for leaf in self.scan():
            if isinstance(leaf, Problem):
                if leaf.hides:
                    raise Unreachable(self.layer, leaf.message, leaf.path)
            elif not leaf.entry.is_orphan:
                yield leaf

    def find(self, key: str) -> Leaf | None:
        """Return one thing by its key. Raises :class:`Unreachable` if it cannot be read."""
        with self._above(key) as (folder, _):
            leaf = None if folder is None else self._recognise(folder, key.split("/"))
            return leaf if isinstance(leaf, Leaf) else None

    def _scan(self, folder: int, above: tuple[str, ...], shapes: Sequence[Shape]) -> Iterator[Leaf | Problem]:
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            yield self._unread(above, error)
            return
        beside = self._beside(folder, (*above, ""), names)
        for name in names:
            fitting = [shape for shape in shapes if shape.levels[len(above)].fullmatch(name)]
            # Most names in a shared folder match nothing, and need no stat.
            if not fitting and name not in beside.get("", ()):
                continue
            parts = (*above, name)
            try:
                found = self._recognise(folder, parts, fitting, beside)
                if isinstance(found, (Leaf, Problem)):
                    yield found
                elif found:
                    with handles.opened(name, folder) as below:
                        self._above_things += handles.size_of(os.fstat(below))
                        yield from self._scan(below, parts, found)
            except FileNotFoundError:
                pass
            except OSError as error:
                yield self._unread(parts, error)

    def _beside(self, folder: int, parts: Sequence[str], names: Sequence[str] = ()) -> dict[str, list[str]]:
        """Return the companions in an open folder, as :meth:`Shape.beside`, given its names or a path in it."""
        found: dict[str, list[str]] = {}
        for shape in self.shapes:
            if shape.companions is not None and len(shape.levels) == len(parts):
                found |= shape.beside(names or {parts[-1], *os.listdir(folder)})
        return found

    def _companions(
        self, folder: int, parts: Sequence[str], beside: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, os.stat_result]:
        """Return the files next to an entry in an open folder, given those of all entries there."""
        names = (self._beside(folder, parts) if beside is None else beside).get(parts[-1], ())
        found = ((file, plain.status_at(file, dir_fd=folder)) for file in names)
        return {file: status for file, status in found if status is not None and stat.S_ISREG(status.st_mode)}

    def _recognise(
        self,
        folder: int,
        parts: Sequence[str],
        fitting: Sequence[Shape] | None = None,
        beside: Mapping[str, Sequence[str]] | None = None,
    ) -> Leaf | Problem | list[Shape] | None:
        """Return the thing of a name, or why it is none; the shapes of what may lie in a folder above things."""
        name, depth = parts[-1], len(parts)
        status = plain.status_at(name, dir_fd=folder)
        if status is None:
            return None
        if fitting is None:
            fitting = [shape for shape in self.shapes if depth <= len(shape.levels) and shape.leads_to(parts)]
        if beside is None:
            beside = self._beside(folder, parts)
        is_stray = name in beside.get("", ()) and stat.S_ISREG(status.st_mode)
        here = (one for one in fitting if len(one.levels) == depth and one.takes(folder, name, status))
        shape = _STRAY if is_stray else next(here, None)
        if shape is None:
            if stat.S_ISLNK(status.st_mode) and any(one.because is None for one in fitting):
                return self._problem(parts, "link", "a link inside the root is not followed")
            return [one for one in fitting if len(one.levels) > depth] if stat.S_ISDIR(status.st_mode) else None
        members, newest, folders = _measured(folder, name, status)
        if shape.companions is not None:
            members |= self._companions(folder, parts, beside)
            newest = max(found.st_mtime_ns for found in members.values())
        elif (strange := shape.strange(name, members) or shape.special(members)) is not None:
            return self._problem(parts, "unrecognised", f"holds {strange!r}, which does not belong there; left alone")
        is_read = self._head and shape.is_entry and newest < self._before * 1e9
        beginning = self._beginning(folder, name, shape, members) if is_read else b""
        length, size = 0, folders
        for member in members.values():
            length += member.st_size
            size += handles.size_of(member)
        entry = Entry(
            self.layer,
            "/".join(parts),
            self.root,
            size,
            len(members),
            modified=newest / 1e9,
            # Not the blocks: a disk may assign them after the last change.
            stamp=(len(members), length, newest),
            sums=0 if shape.sums else None,
        )
        if shape.because is not None:
            entry = orphan(entry, shape.because, idle_only=shape.idle_only)
        return Leaf(entry, members, shape, beginning)

    def _beginning(self, folder: int, name: str, shape: Shape, members: Mapping[str, object]) -> bytes:
        file = shape.first[0] if shape.folders and shape.first else ""
        if file not in members:
            return b""
        return plain.read_plain(f"{name}/{file}" if file else name, dir_fd=folder, limit=self._head)

    def _unread(self, parts: Sequence[str], error: OSError) -> Problem:
        code = "unrecognised" if error.errno == errno.ELOOP else "unreadable"
        return self._problem(parts, code, f"cannot be read: {error.strerror}")

    def _problem(self, parts: Sequence[str], code: str, message: str) -> Problem:
        return Problem(self.root.joinpath(*parts), code, message)

    def read_members(self, key: str, wanted: Callable[[str], bool] | None = None) -> dict[str, bytes] | None:
        """Return the files of an entry by their paths in it, or only the ``wanted`` ones; ``None`` is a miss.

        Raises :class:`Unreachable`, with its path, if one cannot be read.
        """
        shape = entry_shape(self.shapes, key)
        if shape is None:
            return None
        contents: dict[str, bytes] = {}
        paths: list[str] = []
        with self._above(key) as (parent, name):
            status = None if parent is None else plain.status_at(name, dir_fd=parent)
            if parent is None or status is None or not shape.takes(parent, name, status):
                return None
            own = "" if shape.companions is None else name
            total = 0
            try:
                for file in (name, *self._companions(parent, key.split("/"))):
                    for folder, child, path in handles.walk(parent, file):
                        paths.append(path or (own and file))
                        if wanted is None or wanted(paths[-1]):
                            content = self._read(folder, child, key, path)
                            total += len(content)
                            contents[paths[-1]] = content
                        if total > LARGEST_ENTRY:
                            raise OSError(errno.EFBIG, too_large(total, LARGEST_ENTRY), name)
                # If a file vanished meanwhile, the entry is being replaced: return a miss, not half an entry.
                if own and os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime_ns != status.st_mtime_ns:
                    return None
            except FileNotFoundError:
                return None
        return contents if shape.strange(name, paths) is None else None

    def read_file(self, key: str, path: str = "", limit: int = -1) -> bytes | None:
        """Read one file of an entry (the first ``limit`` bytes), never through a link."""
        with self._above(f"{key}/{path}" if path else key) as (folder, name):
            try:
                return None if folder is None else self._read(folder, name, key, path, limit)
            except FileNotFoundError:
                return None

    def _read(self, folder: int, name: str, key: str, path: str, limit: int = -1) -> bytes:
        """Read a file in an open folder; ``path`` is that in the entry."""
        try:
            return plain.read_plain(name, dir_fd=folder, limit=limit)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unreadable(key, error, path) from error

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
    def _above(self, path: str) -> Iterator[tuple[int | None, str]]:
        """Open the folder above something, and yield it with the name in it.

        The folder is ``None`` if it is missing or behind a link. Errors of reading become :class:`Unreachable`.
        """
        *above, name = path.split("/")
        try:
            with self._opened() as root:
                if root is None:
                    yield None, name
                else:
                    with handles.below(root, above) as folder:
                        yield folder, name
        except LayerError:
            raise
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, key: str, error: OSError, path: str = "") -> LayerError:
        file = printable(path)
        if error.errno == errno.EFBIG:
            message = f"has more than {LARGEST_ENTRY:,} bytes, the limit of what is read"
            return Unreachable(self.layer, f"{file}: {message}" if path else message, self.root / key)
        return self._unreachable(f"cannot read {file}".rstrip(), f"{key}/{path}" if path else key, error)

    def _unreachable(self, verb: str, path: str, error: OSError) -> Unreachable:
        return Unreachable(self.layer, f"{verb}: {error.strerror or error}", self.root / path)

    def write(
        self,
        entries: Mapping[str, Members],
        *,
        guard: Guard = nullcontext,
        replace: bool = False,
        wanted: Callable[[str], bool] | None = None,
    ) -> Placed:
        """Place entries, given file by file, each whole or not at all, and sync them to the disk together.

        Returns what became of each. An entry that is there is the same if its ``wanted`` files are. ``guard`` makes the
        context of the renames.
        """
        standing = {key: self._standing(key, files, replace, wanted) for key, files in entries.items()}
        done: Placed = {key: placed for key, placed in standing.items() if placed is not None}
        free = {key: files for key, files in entries.items() if key not in done}
        try:
            if free:
                self._place(free, done, guard, replace=replace)
        except OSError as error:
            message = f"placed, but not synced, or not cleaned up: {error.strerror or error}"
            for key in free:
                if done.setdefault(key, self._failure(key, error)) is True:
                    done[key] = Unsettled(self.layer, message, self.root / key)
        for key, files in free.items():
            # Another process may just have placed the same.
            if isinstance(done[key], EntryExists) and self._standing(key, files, replace, wanted) is False:
                done[key] = False
        return done

    def _standing(
        self, key: str, files: Members, replace: bool, wanted: Callable[[str], bool] | None
    ) -> bool | EntryError | None:
        """Return ``False`` if an entry is there already, the error if it cannot be placed, ``None`` if it may be."""
        if entry_shape(self.shapes, key) is None:
            return not_a_key(self.layer, key)
        if not files:
            return Damaged(self.layer, "the artifact holds no file", key)
        try:
            standing = self.read_members(key, wanted)
        except LayerError as error:
            return None if replace else error
        if standing == files:
            return False
        return None if standing is None or replace else EntryExists(self.layer, self.root / key)

    def _place(self, entries: Mapping[str, Members], done: Placed, guard: Guard, *, replace: bool) -> None:
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
                    done[key] = self._move_in(root, stage, names[key], key, replace=replace) or True
            for parts in parents:
                with handles.below(root, parts) as parent:
                    if parent is not None:
                        os.fsync(parent)

    def _fill(self, stage: int, name: str, key: str, members: Members, failed: Placed) -> bool:
        """Write an entry into the stage; return whether that succeeded, else add its error to ``failed``."""
        shape = entry_shape(self.shapes, key)
        try:
            for path, content in members.items():
                *above, file = f"{name}/{path}".split("/") if path else (name,)
                # One at a time, because an entry may have more folders than a process may open.
                with handles.made_below(stage, above) as folder:
                    handle = atomic.create(file, folder, 0o600 if shape is None else shape.mode)
                    try:
                        atomic.write_all(handle, (content,))
                        os.fsync(handle)
                    finally:
                        os.close(handle)
        except (OSError, ValueError) as error:
            failed[key] = self._failure(key, error)
        return key not in failed

    def _failure(self, key: str, error: OSError | ValueError) -> LayerError:
        if isinstance(error, LayerError):
            return error
        if not isinstance(error, OSError):
            return Damaged(self.layer, str(error), key)
        if error.errno in _TAKEN:
            return EntryExists(self.layer, self.root / key)
        return self._unreachable("cannot write", key, error)

    def _move_in(self, root: int, stage: int, staged: str, key: str, *, replace: bool) -> LayerError | None:
        """Move a staged entry into its place below the open root; return the error."""
        parts = key.split("/")
        for tries_left in reversed(range(_TRIES)):
            try:
                with handles.made_below(root, parts[:-1]) as parent:
                    wrong = ""
                    if plain.status_at(parts[-1], dir_fd=parent) is None:
                        if self._companions(parent, parts):
                            wrong = "files of an entry that is not there are in its place; cachectl purge removes them"
                    elif not isinstance(self._recognise(parent, parts), Leaf):
                        # Another process may be replacing it.
                        if tries_left:
                            continue
                        wrong = "something that is no entry has its name; left alone"
                    elif not replace:
                        return EntryExists(self.layer, self.root / key)
                    if wrong:
                        return LayerError(self.layer, wrong, self.root / key)
                    self._exchange(stage, staged, parent, key, replace=replace)
                    break
            except OSError as error:
                # Another process may remove an empty folder on the path, or place an entry.
                may_pass = isinstance(error, FileNotFoundError) or (replace and error.errno in _TAKEN)
                if not (tries_left and may_pass):
                    return self._failure(key, error)
        return None

    def _exchange(self, stage: int, staged: str, parent: int, key: str, *, replace: bool) -> None:
        """Move an entry to its place, its own file last; after an error the old one is back unless one was placed."""
        parts = key.split("/")
        shape, name = entry_shape(self.shapes, key), parts[-1]
        if shape is None or (replace and not shape.is_packed):
            atomic.move_in(staged, stage, name, parent)
            return
        moved: list[tuple[int, str, int, str]] = []
        with ExitStack() as stack:
            source, files = stage, {staged: name}
            if shape.companions is not None:
                source = stack.enter_context(handles.opened(staged, stage))
                files = {file: file for file in sorted(os.listdir(source), key=lambda file: file == name)}
            try:
                for file in (name, *self._companions(parent, parts)) if replace else ():
                    with suppress(FileNotFoundError):
                        place = plain.own_name()
                        self._move_out(shape, parent, file, stage, place, freed=[])
                        moved.append((parent, file, stage, place))
                for file, place in files.items():
                    shape.move(file, place, src_dir_fd=source, dst_dir_fd=parent)
                    moved.append((source, file, parent, place))
            except OSError:
                for source, file, to, place in reversed(moved):
                    with suppress(OSError):
                        shape.move(place, file, src_dir_fd=to, dst_dir_fd=source)
                raise

    def _move_out(self, shape: Shape, source: int, name: str, to: int, place: str, *, freed: list[int]) -> bool:
        """Move an entry out of its place, or delete it there; return whether it was moved."""
        try:
            shape.move(name, place, src_dir_fd=source, dst_dir_fd=to)
        except OSError as error:
            # overlayfs cannot rename a folder of a lower layer.
            if error.errno != errno.EXDEV:
                raise
            atomic.delete(source, name, freed, first=shape.first)
            return False
        return True

    def remove(self, entries: Sequence[Entry], *, tidy: Tidy = lambda: False, guard: Guard = nullcontext) -> Outcome:
        """Remove planned things whose stamp has not changed.

        A folder is renamed into a trash folder of the same root before it is deleted, so that no reader sees half of
        it. If overlayfs cannot rename it, it is deleted in place, the shape's ``first`` files before the others.
        ``guard`` makes the context of the renames. If ``tidy`` returns true, empty folders are removed too: those above
        the removed things, and planned ones. A program that is about to make an entry in such a folder would fail, so
        it may return true only while no program uses the root.
        """
        skipped: list[Note] = []
        failed: list[Note] = []
        removed = 0
        freed: list[int] = []
        try:
            with self._opened() as root, ExitStack() as stack:
                if root is None:
                    return Outcome(self.layer, skipped=tuple(Note(entry.key, GONE) for entry in entries))
                trash = lru_cache(lambda: self._make_trash(stack, root, freed))
                moved: list[_Moved] = []
                with guard(root):
                    for entry, parent in _with_parents(root, entries):
                        try:
                            reason = self._remove_from(parent, entry, trash, moved, freed, tidy=tidy)
                        except FileNotFoundError:
                            reason = GONE
                        except OSError as error:
                            failed.append(Note(entry.key, f"cannot be removed: {error.strerror}"))
                            continue
                        if reason is not None:
                            skipped.append(Note(entry.key, reason))
                        removed += reason is None and not entry.is_orphan
                for name, files in moved:
                    # What is left goes with the trash folder.
                    with suppress(OSError):
                        atomic.delete_listed(trash() or root, name, files, freed)
                if tidy():
                    _remove_empty(root, [entry.key for entry in entries], freed)
        except (LayerError, OSError) as error:
            # Earlier removals must still be counted.
            if isinstance(error, LayerError) and not (removed or skipped or failed):
                raise
            failed.append(Note(str(self.root), f"cannot be cleared: {reason_of(error)}"))
        return Outcome(self.layer, removed, sum(freed), tuple(skipped), tuple(failed))

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
        parent: int | OSError | None,
        entry: Entry,
        trash: Callable[[], int | None],
        moved: list[_Moved],
        freed: list[int],
        *,
        tidy: Tidy,
    ) -> str | None:
        """Remove one thing in an open folder; return why it was left, or ``None``.

        Adds to ``moved`` what it moves into the trash, and to ``freed`` the bytes of what it deletes. Raises the error
        that kept the folder from being opened.
        """
        if parent is None:
            return GONE
        if isinstance(parent, OSError):
            raise parent
        parts = entry.key.split("/")
        name, leaf = parts[-1], self._recognise(parent, parts)
        if not isinstance(leaf, Leaf) or leaf.entry.stamp != entry.stamp:
            return GONE if plain.status_at(name, dir_fd=parent) is None else CHANGED
        shape = leaf.shape
        if shape.folders and shape.sizes:
            if not tidy():
                return IN_USE
            if not _removed_empty(parent, name, freed):
                return CHANGED
        elif shape.folders and (folder := trash()) is not None:
            place = plain.own_name("")
            if self._move_out(shape, parent, name, folder, place, freed=freed):
                # A file with another hard link frees nothing.
                frees = {path: handles.size_of(one) if one.st_nlink == 1 else 0 for path, one in leaf.members.items()}
                moved.append((place, frees))
        else:
            atomic.delete(parent, name, freed, first=shape.first)
            for file in filter(None, leaf.members if shape.companions is not None else ()):
                # What is left is an orphan now.
                with suppress(OSError):
                    atomic.delete(parent, file, freed)
        return None


def entry_shape(shapes: Iterable[Shape], key: str) -> Shape | None:
    """Return the shape of the entry with a key; ``None`` if no entry has such a key."""
    return next((shape for shape in shapes if shape.is_entry and shape.accepts(key)), None)


def _with_parents(root: int, entries: Iterable[Entry]) -> Iterator[tuple[Entry, int | OSError | None]]:
    """Yield entries with the open folder above each, ``None`` if that has gone, or the error of opening it."""
    for above, found in groupby(entries, lambda entry: entry.key.rpartition("/")[0]):
        group = iter([*found])
        try:
            with handles.below(root, above.split("/") if above else ()) as parent:
                for entry in group:
                    yield entry, parent
        except OSError as error:
            for entry in group:
                yield entry, error


def _names_in(folder: int, name: str) -> int:
    with handles.opened(name, folder) as opened:
        return len(os.listdir(opened))


def _measured(folder: int, name: str, status: os.stat_result) -> tuple[dict[str, os.stat_result], int, int]:
    """Return the files of a thing by their paths, its newest change (ns), and the bytes that its folders take."""
    if not stat.S_ISDIR(status.st_mode):
        return {"": status}, status.st_mtime_ns, 0
    members, newest, inside = dict[str, os.stat_result](), 0, 0
    with suppress(FileNotFoundError):
        newest, inside = handles.gather(folder, name, members)
    return members, max(newest, status.st_mtime_ns), inside + handles.size_of(status)


def _remove_empty(root: int, keys: Sequence[str], freed: list[int]) -> None:
    """Remove the empty folders above some keys, and add their bytes to ``freed``."""
    parents = {tuple(key.split("/")[:depth]) for key in keys for depth in range(1, key.count("/") + 1)}
    for *above, name in sorted(parents, key=len, reverse=True):
        with suppress(OSError), handles.below(root, above) as folder:
            if folder is not None:
                _removed_empty(folder, name, freed)


def _removed_empty(parent: int, name: str, freed: list[int]) -> bool:
    """Remove a folder, and add its bytes to ``freed``; return ``False`` if it is not empty."""
    size = handles.size_of(os.stat(name, dir_fd=parent, follow_symlinks=False))
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    freed.append(size)
    return True
