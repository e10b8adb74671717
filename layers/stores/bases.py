"""Entries of a read-only base in a tree of the user's own: linked where the library permits it, else copied.

Hard links are never made: the library would write into the file of the base.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.errors import Unreachable, reason_of
from cachectl.layers.base.facts import Brought, Note
from cachectl.layers.disk.atomic import place_new
from cachectl.layers.disk.clones import clone_file
from cachectl.layers.disk.handles import descend, opened_root, own_folder
from cachectl.layers.disk.plain import STAGE
from cachectl.layers.stores.tree import Links, Shape

#: Entries that are copied before they are synced and placed.
_AT_ONCE: Final = 1000


class Rules(NamedTuple):
    """How a library treats the files of its entries.

    Files in ``leave`` are not brought, and only entries with one of the ``needed`` files. If the library adds files to
    an entry (``grows``), those that the base has added are brought too.
    """

    links: Links = "never"
    leave: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    grows: bool = False


def bring_tree(layer: str, base: Path, root: Path, shape: Shape, rules: Rules) -> Brought:
    """Bring the entries of a base into a root, and remove links whose entry the base no longer has.

    Raises :class:`Unreachable` if the root or the base cannot be read.
    """
    return _Bringing(layer, base, root, shape, rules).run()


class _Bringing:
    """The work of :func:`bring_tree`; paths below the root are relative to open folders."""

    def __init__(self, layer: str, base: Path, root: Path, shape: Shape, rules: Rules) -> None:
        self._layer, self._base, self._root, self._shape, self._rules = layer, os.fspath(base), root, shape, rules
        self._counts: Counter[str] = Counter()
        self._failed: list[Note] = []
        self._stack = ExitStack()
        self._handle: int | None = None
        self._stage: int | None = None
        #: The entries in the stage that wait for a sync: folder, name in the stage, name, and how it was made.
        self._waiting: list[tuple[tuple[str, ...], str, str, str]] = []
        self._staged = 0

    def run(self) -> Brought:
        """Go through the folders that hold entries, in the base and in the root."""
        with self._stack:
            try:
                self._handle = self._stack.enter_context(opened_root(self._root))
                levels = self._shape.levels[:-1]
                for place in sorted({*_folders(self._base, levels), *_folders(os.fspath(self._root), levels)}):
                    self._bring_folder(place)
                self._settle()
            except OSError as error:
                raise Unreachable(self._layer, f"cannot take from a base: {reason_of(error)}", self._root) from error
        counts = {name: self._counts[name] for name in ("linked", "cloned", "copied", "present", "dropped")}
        return Brought(**counts, failed=tuple(self._failed))

    # ------------------------------------------------------------------ one folder of entries

    def _bring_folder(self, place: tuple[str, ...]) -> None:
        source = os.path.join(self._base, *place)
        there = set(self._entries(source))
        with ExitStack() as stack:
            folder = None if self._handle is None else descend(stack, self._handle, place)
            names = set() if folder is None else set(filter(self._shape.levels[-1].fullmatch, os.listdir(folder)))
            if folder is not None:
                names = {name for name in names if not self._drop(folder, name, "/".join(("", *place, name)))}
            new = sorted(there - names)
            self._counts["present"] += len(there) - len(new)
            if self._rules.grows and self._rules.links == "always" and folder is not None:
                for name in there & names:
                    self._extend(folder, name, os.path.join(source, name))
        for name in new:
            self._bring_entry(place, name, os.path.join(source, name))

    def _entries(self, folder: str) -> Iterator[str]:
        """Yield the names of entries in a folder of the base; links are not followed."""
        pattern, folders = self._shape.levels[-1], self._shape.folders
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as children:
            for child in children:
                kind = child.is_dir if folders else child.is_file
                if pattern.fullmatch(child.name) and kind(follow_symlinks=False):
                    yield child.name

    # ------------------------------------------------------------------ one entry

    def _bring_entry(self, place: tuple[str, ...], name: str, source: str) -> None:
        try:
            files = list(_files(source, self._shape.members)) if self._shape.folders else [""]
            files = [path for path in files if path not in self._rules.leave]
            if not files or (self._rules.needed and self._rules.needed.isdisjoint(files)):
                return
            staged = str(self._staged)
            self._staged += 1
            how = self._fill(self._make_stage(), staged, source, files)
        except OSError as error:
            self._failed.append(Note("/".join((*place, name)), reason_of(error)))
            return
        self._waiting.append((place, staged, name, how))
        if len(self._waiting) >= _AT_ONCE:
            self._settle()

    def _make_stage(self) -> int:
        """Return the open stage; it is made, with the root, when it is first needed."""
        if self._handle is None:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handle = self._stack.enter_context(opened_root(self._root))
        if self._handle is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._root))
        if self._stage is None:
            self._stage, _ = self._stack.enter_context(own_folder(self._handle, STAGE))
        return self._stage

    def _fill(self, stage: int, staged: str, source: str, files: Sequence[str]) -> str:
        """Make an entry in the stage; return the dearest way in which a file of it was made."""
        means: set[str] = set()
        made: set[str] = set()
        for path in files:
            target = f"{staged}/{path}" if path else staged
            _make_above(stage, target, made)
            means.add(self._make_file(os.path.join(source, path) if path else source, target, stage))
        return next(one for one in ("copied", "cloned", "linked") if one in means)

    def _make_file(self, source: str, target: str, folder: int) -> str:
        if not os.access(source, os.R_OK):
            # PoCL makes files that only their owner can read.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), source)
        # Asked for each file; on a read-only file system even the superuser cannot write.
        if self._rules.links == "always" or (self._rules.links == "read-only" and not os.access(source, os.W_OK)):
            os.symlink(source, target, dir_fd=folder)
            return "linked"
        return "cloned" if clone_file(source, target, folder) else "copied"

    def _settle(self) -> None:
        """Sync what was copied, then rename the entries of the stage into their places."""
        if self._stage is None or self._handle is None:
            return
        if any(how != "linked" for *_, how in self._waiting):
            os.sync()
        at: tuple[str, ...] | None = None
        with ExitStack() as stack:
            folder: int | None = None
            for place, staged, name, how in self._waiting:
                if place != at:
                    stack.close()
                    folder, at = descend(stack, self._handle, place, make=True), place
                try:
                    self._publish(staged, folder, name)
                    self._counts[how] += 1
                except FileExistsError:
                    # Another program made it meanwhile.
                    self._counts["present"] += 1
                except OSError as error:
                    self._failed.append(Note("/".join((*place, name)), reason_of(error)))
        self._waiting.clear()

    def _publish(self, staged: str, folder: int | None, name: str) -> None:
        if not self._shape.folders:
            place_new(staged, name, src=self._stage, dst=folder)
            return
        try:
            os.rename(staged, name, src_dir_fd=self._stage, dst_dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
            raise

    # ------------------------------------------------------------------ entries that are there

    def _extend(self, folder: int, name: str, source: str) -> None:
        """Link the files that an entry of the base has and the own entry has not: such a library only reads them."""
        for path in _files(source, self._shape.members):
            if path in self._rules.leave:
                continue
            with suppress(FileExistsError):
                try:
                    os.symlink(f"{source}/{path}", f"{name}/{path}", dir_fd=folder)
                except FileNotFoundError:
                    *above, last = path.split("/")
                    with ExitStack() as stack:
                        below = descend(stack, folder, (name, *above), make=True)
                        os.symlink(f"{source}/{path}", last, dir_fd=below)

    def _drop(self, folder: int, name: str, key: str) -> bool:
        """Remove the links of an entry that no base has any more, and return whether nothing else is there."""
        if not self._shape.folders:
            gone = _is_gone(folder, name, key)
            if gone:
                os.unlink(name, dir_fd=folder)
            self._counts["dropped"] += gone
            return gone
        if not any(_is_gone(folder, f"{name}/{first}", f"{key}/{first}") for first in self._shape.first):
            return False
        self._counts["dropped"] += 1
        return _unlink_all(folder, name, key, self._rules.leave)


def _is_gone(folder: int, name: str, key: str) -> bool:
    """Return whether a name is a link into a base, from which the entry is gone."""
    with suppress(OSError):
        target = os.readlink(name, dir_fd=folder)
        return target.endswith(key) and not os.path.exists(target)
    return False


def _unlink_all(folder: int, name: str, key: str, rest: frozenset[str]) -> bool:
    """Remove the links in a folder that lead to nothing in a base.

    A folder with nothing else than files in ``rest`` goes too; returns whether that is so.
    """
    with ExitStack() as stack:
        below = descend(stack, folder, (name,))
        if below is None:
            return False
        for child in os.listdir(below):
            if _is_gone(below, child, f"{key}/{child}"):
                os.unlink(child, dir_fd=below)
            elif stat.S_ISDIR(os.stat(child, dir_fd=below, follow_symlinks=False).st_mode):
                _unlink_all(below, child, f"{key}/{child}", rest)
        left = os.listdir(below)
        if not rest.issuperset(left):
            return False
        for child in left:
            os.unlink(child, dir_fd=below)
        os.rmdir(name, dir_fd=folder)
        return True


def _make_above(stage: int, target: str, made: set[str]) -> None:
    above = target.rpartition("/")[0]
    if above and above not in made:
        _make_above(stage, above, made)
        os.mkdir(above, 0o700, dir_fd=stage)
        made.add(above)


def _folders(root: str, levels: Sequence[re.Pattern[str]], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the folders that hold entries below a root, as parts of a path; links are not followed."""
    if not levels:
        yield above
        return
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(os.path.join(root, *above)) as children:
        for child in children:
            if levels[0].fullmatch(child.name) and child.is_dir(follow_symlinks=False):
                yield from _folders(root, levels[1:], (*above, child.name))


def _files(folder: str, members: re.Pattern[str] | None, prefix: str = "") -> Iterator[str]:
    """Yield the paths of an entry's plain files that match."""
    with os.scandir(folder) as children:
        for child in children:
            path = prefix + child.name
            if child.is_dir(follow_symlinks=False):
                yield from _files(child.path, members, f"{path}/")
            elif child.is_file(follow_symlinks=False) and (members is None or members.fullmatch(path)):
                yield path
