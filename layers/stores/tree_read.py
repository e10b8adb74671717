"""Entries in a folder tree, listed and read relative to open directory handles.

A :class:`Tree` has *shapes*, each with a pattern for each path component. Names that match none are not listed, and
only listed things can be removed. Links inside a root are never followed; a root that is itself a link is resolved
once, when it is opened. :mod:`~cachectl.layers.stores.tree_write` places entries, and
:mod:`~cachectl.layers.stores.tree_remove` removes things.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.errors import LayerError, Unreachable
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.limits import LARGEST_ENTRY
from cachectl.layers.base.text import printable, too_large
from cachectl.layers.core.entry import Entry, Problem, orphan, unknown
from cachectl.layers.core.store import EntryError
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import atomic, handles, plain

_WITHOUT = "this platform cannot act relative to an open folder, so nothing can be changed safely"
#: Abilities that layers over trees lack on such a platform.
REFUSALS: Mapping[Ability, str] = (
    {} if os.unlink in os.supports_dir_fd else dict.fromkeys((Ability.PUT, Ability.CLEAR), _WITHOUT)
)
#: cachectl's own staging and trash folders in a root. A killed command leaves them; clearing them is always safe.
OWN_TEMPORARY = regex(r"\.cachectl-(?:stage|trash)-[0-9a-f]{32}")
GONE = "already gone"
CHANGED = "changed since it was planned"
_FOREVER = float("inf")
#: Errors that mean that a path is taken by a file or a folder.
TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})

#: Makes the context in which entries are renamed, given the open root.
Guard = Callable[[int], AbstractContextManager[object]]
#: The files of an entry by their paths in it; the path is empty if the entry is a file.
Members = Mapping[str, bytes]
#: The results of entries, as :meth:`~cachectl.layers.core.store.Store.write` says.
Placed = dict[str, bool | EntryError]
#: Returns whether empty folders may be removed now.
Tidy = Callable[[], bool]


class Shape(NamedTuple):
    """The form of one kind of thing in a tree: one pattern per path component, the last being the thing itself.

    Every file in a folder must match ``members`` (``None``: anything); a folder with another file is left alone.
    Without the files in ``first`` a folder is a miss to the library: they are removed first if it cannot be renamed.

    Things with a ``because`` are orphans, such as leaked temporaries; ``idle_only`` says that a live process may still
    be writing one. ``sizes`` lists the bytes that a file, or the number of names that a folder, may have. ``private``
    accepts only what no other user may read, as ``mkstemp`` makes it. ``sums`` marks files of the cache as a whole.

    ``resembles`` marks what no known version makes, but a later one might: names of another length or version. It
    applies only to what has no other shape, and not to names that systems make.
    """

    levels: tuple[re.Pattern[str], ...]
    folders: bool = False
    members: re.Pattern[str] | None = None
    first: tuple[str, ...] = ()
    because: str | None = None
    idle_only: bool = True
    sizes: tuple[int, ...] = ()
    private: bool = False
    sums: bool = False
    resembles: bool = False
    #: The mode of the files of an entry.
    mode: int = 0o600

    @property
    def move(self) -> Callable[..., None]:
        """Return the function that moves a file to a free path, or a folder to one that is free or empty."""
        return os.rename if self.folders else atomic.place_new

    @property
    def is_entry(self) -> bool:
        """Return whether things of this shape are entries."""
        return self.because is None and not self.sums and not self.resembles

    def strange(self, paths: Iterable[str]) -> str | None:
        """Return the first path in an entry's folder, by name, that does not match."""
        pattern = self.members
        wrong = () if pattern is None else [path for path in paths if not pattern.fullmatch(path)]
        return min(wrong, default=None)

    def misfit(self, members: Mapping[str, os.stat_result]) -> str | None:
        """Return the first path in an entry's folder, by name, that does not match; else the first special file."""
        if (pattern := self.members) is None:
            return None
        matches = pattern.fullmatch
        wrong = [path for path, status in members.items() if not (matches(path) and stat.S_ISREG(status.st_mode))]
        return min(wrong, key=lambda path: (matches(path) is not None, path), default=None)

    def accepts(self, key: str) -> bool:
        """Return whether a key has this shape."""
        parts = key.split("/")
        return len(parts) == len(self.levels) and self.leads_to(parts)

    def leads_to(self, parts: Sequence[str]) -> bool:
        """Return whether the components of a path match the patterns, up to the shorter of the two."""
        return all(pattern.fullmatch(part) for pattern, part in zip(self.levels, parts, strict=False))

    def owns(self, parts: Sequence[str]) -> bool:
        """Return whether a path, by its name, is a thing of this shape, above it or in it."""
        return self.leads_to(parts) and (self.folders or len(parts) <= len(self.levels))

    def takes(self, folder: int, name: str, status: os.stat_result) -> bool:
        """Return whether a thing in an open folder, whose name matches, has this shape."""
        if self.resembles:
            return (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)) and not SYSTEM_NAME.fullmatch(name)
        is_kind = stat.S_ISDIR if self.folders else stat.S_ISREG
        if not is_kind(status.st_mode) or (self.private and status.st_mode & 0o077):
            return False
        size = status.st_size
        if self.sizes and self.folders:
            with handles.opened(name, folder) as opened:
                size = len(os.listdir(opened))
        if self.sizes and size not in self.sizes:
            return False
        return self.levels[-1] is not OWN_TEMPORARY or handles.is_left_own(folder, name, status)


OWN = Shape((OWN_TEMPORARY,), folders=True, because="left by an interrupted cachectl", idle_only=False)
_ABOVE = Shape((), sums=True)
#: Names that systems and users give to files in any folder.
SYSTEM_NAME = regex(r"\.nfs.*|\.DS_Store|CACHEDIR\.TAG|lost\+found|README.*", re.DOTALL)
STRANGE_NAME = "has a name of another length, form or version than this cachectl knows; left alone"


def resembling(*levels: str | re.Pattern[str]) -> Shape:
    """Return the shape of what resembles an entry, given the pattern of each path component."""
    return Shape(tuple(regex(level) if isinstance(level, str) else level for level in levels), resembles=True)


class Leaf(NamedTuple):
    """A thing on disk: an entry, an orphan or a file of the cache as a whole, by its shape.

    ``members`` are its files by their paths in it, empty if the thing is a file; ``folders`` are its folders, named as
    by :func:`~cachectl.layers.disk.handles.gather`. ``head`` is the beginning of the entry, if requested. The last
    number of the entry's stamp is the newest change (ns), including those of folders.
    """

    entry: Entry
    members: Mapping[str, os.stat_result]
    shape: Shape
    head: bytes = b""
    folders: Mapping[str, os.stat_result] = {}

    @property
    def is_entry(self) -> bool:
        """Return whether it is an entry of a known format."""
        return self.shape.is_entry and not self.entry.is_unknown

    @property
    def frees(self) -> dict[str, int]:
        """Return the bytes that the deletion of each file and folder frees; none for a file with another hard link."""
        sizes = {path: handles.size_of(shape) * (shape.st_nlink == 1) for path, shape in self.members.items()}
        return sizes | {path: handles.size_of(shape) for path, shape in self.folders.items()}

    def as_unknown(self, because: str | None) -> Leaf:
        """Return it as one of an unknown format; unchanged if there is no reason for that."""
        return self if because is None else self._replace(entry=unknown(self.entry, because))


class Tree:
    """The things of some shapes under one root, whose open folder may be ``handle``; the first fitting shape counts."""

    def __init__(self, layer: str, root: Path, *shapes: Shape, handle: int | None = None) -> None:
        self._handle = handle
        self.layer = layer
        self.root = root
        self.shapes = (OWN, *shapes)
        #: The bytes that the folders above things take on disk.
        self._above_things = 0
        self._head, self._before = 0, _FOREVER

    def scan(self, *, head: int = 0, before: float = _FOREVER) -> Iterator[Leaf | Problem]:
        """Yield things with the first ``head`` bytes of entries, and a problem for what cannot be read.

        The head of a folder is that of its shape's ``first`` file; none is read of an entry that was changed since
        ``before`` (epoch seconds). The folders above things come last, as a sum without the root, which always stays.
        """
        self._above_things, self._head, self._before = 0, head, before
        with self.opened() as handle:
            if handle is not None:
                yield from self._scan(handle, (), self.shapes)
        if self._above_things:
            yield Leaf(Entry(self.layer, ".", self.root, self._above_things, 0), {}, _ABOVE)

    def leaves(self) -> Iterator[Leaf]:
        """Yield all but orphans. Raises :class:`Unreachable` if an entry may have been missed."""
        for leaf in self.scan():
            if isinstance(leaf, Problem):
                if leaf.hides:
                    raise Unreachable(self.layer, leaf.message, leaf.path)
            elif not leaf.entry.is_orphan:
                yield leaf

    def find(self, key: str) -> Leaf | None:
        """Return one thing by its key. Raises :class:`Unreachable` if it cannot be read."""
        with self._above(key) as (folder, _):
            leaf = None if folder is None else self.recognise(folder, key.split("/"))
            return leaf if isinstance(leaf, Leaf) and not leaf.entry.is_unknown else None

    def _scan(self, folder: int, above: tuple[str, ...], shapes: Sequence[Shape]) -> Iterator[Leaf | Problem]:
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            yield from self._unread(above, error, shapes)
            return
        for name in names:
            fitting = [shape for shape in shapes if shape.levels[len(above)].fullmatch(name)]
            # Most names in a shared folder match nothing, and need no stat.
            if not fitting:
                continue
            parts = (*above, name)
            try:
                matched = self.recognise(folder, parts, fitting)
                if isinstance(matched, (Leaf, Problem)):
                    yield matched
                elif matched:
                    with handles.opened(name, folder) as below:
                        is_own = not all(shape.resembles for shape in matched)
                        for leaf in self._scan(below, parts, matched):
                            is_own = True
                            yield leaf
                        self._above_things += handles.size_of(os.fstat(below)) * is_own
            except FileNotFoundError:
                pass
            except OSError as error:
                yield from self._unread(parts, error, fitting)

    def recognise(
        self, folder: int, parts: Sequence[str], fitting: Sequence[Shape] | None = None
    ) -> Leaf | Problem | list[Shape] | None:
        """Return the thing at a path, or its problem; for a folder above things, the shapes of what may be in it."""
        name, depth = parts[-1], len(parts)
        status = plain.status_at(name, dir_fd=folder)
        if status is None:
            return None
        if fitting is None:
            fitting = [shape for shape in self.shapes if depth <= len(shape.levels) and shape.leads_to(parts)]
        here = (one for one in fitting if len(one.levels) == depth and one.takes(folder, name, status))
        shape = next(here, None)
        longer = [shape for shape in fitting if len(shape.levels) > depth] if stat.S_ISDIR(status.st_mode) else []
        if shape is None or (shape.resembles and not all(shape.resembles for shape in longer)):
            is_of_layer = any(shape.because is None and not shape.resembles for shape in fitting)
            if stat.S_ISLNK(status.st_mode) and is_of_layer:
                return self._problem(parts, "link", "a link inside the root is not followed")
            return longer
        members: handles.Statuses = {}
        folders: handles.Statuses = {}
        if stat.S_ISDIR(status.st_mode):
            handles.gather(folder, name, members, folders)
        else:
            members[""] = status
        strange = STRANGE_NAME if shape.resembles else None
        if (misfit := shape.misfit(members)) is not None:
            strange = f"holds {misfit!r}, which does not belong there; left alone"
            if not shape.is_entry or SYSTEM_NAME.fullmatch(misfit.rpartition("/")[2]):
                return self._problem(parts, "unrecognised", strange)
        statuses = [*members.values(), *folders.values()]
        newest = max(status.st_mtime_ns for status in statuses)
        is_read = self._head and shape.is_entry and strange is None and newest < self._before * 1e9
        entry = Entry(
            self.layer,
            "/".join(parts),
            self.root,
            sum(map(handles.size_of, statuses)),
            len(members),
            modified=newest / 1e9,
            # Not the blocks, which a file system may assign after the last change.
            stamp=(len(members), sum(member.st_size for member in members.values()), newest),
        )
        if shape.because is not None:
            entry = orphan(entry, shape.because)
        file = shape.first[0] if shape.folders and shape.first else ""
        path = f"{name}/{file}" if file else name
        head = plain.read_plain(path, dir_fd=folder, limit=self._head) if is_read and file in members else b""
        return Leaf(entry, members, shape, head, folders).as_unknown(strange)

    def _unread(self, parts: Sequence[str], error: OSError, shapes: Sequence[Shape]) -> Iterator[Problem]:
        """Yield the problem of what cannot be read, unless it could only hold what resembles entries."""
        if not shapes or any(not shape.resembles or len(shape.levels) == len(parts) for shape in shapes):
            code = "unrecognised" if error.errno == errno.ELOOP else "unreadable"
            yield self._problem(parts, code, f"cannot be read: {error.strerror}")

    def _problem(self, parts: Sequence[str], code: str, message: str) -> Problem:
        return Problem(self.root.joinpath(*parts), code, message)

    def read_members(self, key: str, wanted: Callable[[str], bool] | None = None) -> dict[str, bytes] | None:
        """Return an entry's files, or the ``wanted`` ones, by path; ``None`` is a miss. Raises :class:`Unreachable`."""
        shape = entry_shape(self.shapes, key)
        if shape is None:
            return None
        contents: dict[str, bytes] = {}
        paths: list[str] = []
        with self._above(key) as (parent, name):
            status = None if parent is None else plain.status_at(name, dir_fd=parent)
            if parent is None or status is None or not shape.takes(parent, name, status):
                return None
            total = 0
            try:
                for folder, child, path in handles.walk(parent, name):
                    paths.append(path)
                    if wanted is None or wanted(path):
                        contents[path] = self._read(folder, child, key, path)
                        total += len(contents[path])
                    if total > LARGEST_ENTRY:
                        raise OSError(errno.EFBIG, too_large(total, LARGEST_ENTRY), name)
            except FileNotFoundError:
                # The entry is being replaced: return a miss, not half an entry.
                return None
        return contents if shape.strange(paths) is None else None

    def read_file(self, key: str, path: str = "", limit: int = -1) -> bytes | None:
        """Read one file of an entry (the first ``limit`` bytes), never through a link."""
        with self._above(f"{key}/{path}" if path else key) as (folder, name), suppress(FileNotFoundError):
            return None if folder is None else self._read(folder, name, key, path, limit)
        return None

    def _read(self, folder: int, name: str, key: str, path: str, limit: int = -1) -> bytes:
        """Read a file in an open folder; ``path`` is that in the entry."""
        try:
            return plain.read_plain(name, dir_fd=folder, limit=limit)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self.unreadable(key, error, path) from error

    @contextmanager
    def opened(self) -> Iterator[int | None]:
        """Open the root; yield ``None`` if it is missing. Raises :class:`Unreachable`."""
        with ExitStack() as stack:
            handle = self._handle
            try:
                handle = stack.enter_context(handles.opened_root(self.root)) if handle is None else handle
            except OSError as error:
                raise self.unreachable("cannot open", "", error) from error
            yield handle

    @contextmanager
    def _above(self, path: str) -> Iterator[tuple[int | None, str]]:
        """Open the folder above a path; yield it, or ``None`` if it is missing or behind a link, and the last name.

        Errors of reading become :class:`Unreachable`.
        """
        *above, name = path.split("/")
        try:
            with self.opened() as root, ExitStack() as stack:
                yield None if root is None else stack.enter_context(handles.open_below(root, above)), name
        except LayerError:
            raise
        except OSError as error:
            raise self.unreadable(path, error) from error

    def unreadable(self, key: str, error: OSError, path: str = "") -> LayerError:
        """Return the error of reading a file of an entry."""
        file = printable(path)
        if error.errno == errno.EFBIG:
            message = f"has more than {LARGEST_ENTRY:,} bytes, the limit of what is read"
            return Unreachable(self.layer, f"{file}: {message}" if path else message, self.root / key)
        return self.unreachable(f"cannot read {file}".rstrip(), f"{key}/{path}" if path else key, error)

    def unreachable(self, verb: str, path: str, error: OSError) -> Unreachable:
        """Return the error of an action on a path below the root."""
        return Unreachable(self.layer, f"{verb}: {error.strerror or error}", self.root / path)


def entry_shape(shapes: Iterable[Shape], key: str) -> Shape | None:
    """Return the shape of the entry with a key; ``None`` if no entry can have that key."""
    return next((shape for shape in shapes if shape.is_entry and shape.accepts(key)), None)
