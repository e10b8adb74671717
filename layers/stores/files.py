"""The store of layers whose entries are files, or folders of files, below the root."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

from cachectl.layers.base import processes
from cachectl.layers.base.errors import Damaged, LayerError, UnknownFormat, Unreachable, not_a_key, reason_of
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.entry import Artifact, Entry, Found, Note, Problem, Usage, orphan
from cachectl.layers.core.finding import FAILS, RECOMPILES, Finding, Hazard
from cachectl.layers.core.plan import Outcome
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.core.store import (
    ENTRY,
    FOREIGN,
    OWN,
    Codec,
    Damage,
    Doubt,
    EntryError,
    Store,
    damage_findings,
    finding_of,
    noted,
    read_each,
    unknown_finding,
    unreadable,
)
from cachectl.layers.disk import handles, locks
from cachectl.layers.stores import archive
from cachectl.layers.stores import tree_read as trees
from cachectl.layers.stores.tree_remove import remove_things
from cachectl.layers.stores.tree_write import write_entries


class Files(Store):
    """Entries that are files, or folders of files, whose names match a pattern.

    ``patterns`` are regular expressions of file names in the root, or shapes: of entries, of orphans, and of files that
    belong to the cache as a whole. The codec gets an entry of several files as a tar of them. ``writers`` are name
    prefixes of libraries that may be writing an entry.

    A subclass overrides what its library does differently, and may declare ``shapes``, ``codec`` and ``forms``.
    """

    shapes: tuple[trees.Shape, ...] = ()
    forms: tuple[str, ...] = ()
    codec = Codec()
    writers: tuple[str, ...] = ()
    refusals = trees.REFUSALS
    #: Files that do not make a folder an entry; ``None`` if every folder is one, even an empty one.
    no_entry: ClassVar[frozenset[str] | None] = None
    #: Whether empty folders above removed entries are removed, because the library makes those that it needs.
    tidies: ClassVar[bool] = False
    #: Seconds without change after which no program is still writing a temporary.
    rest_time: ClassVar[float] = math.inf
    #: The effect of an entry that is too large to be read, added to the reason.
    unread: ClassVar[Damage] = Damage(RECOMPILES, "")
    #: The shape of files that are locks as long as they exist, how long the library waits (s), and what follows then.
    lock_shape: ClassVar[trees.Shape | None] = None
    lock_waits: ClassVar[float] = math.inf
    lock_effect: ClassVar[Hazard] = Hazard(FAILS, "every build waits a minute for it, and fails")

    def __init__(self, *patterns: str | trees.Shape, codec: Codec | None = None, writers: tuple[str, ...] = ()) -> None:
        if patterns:
            self.shapes = tuple(trees.Shape((regex(one),)) if isinstance(one, str) else one for one in patterns)
        if codec is not None:
            self.codec, self.forms = codec, (codec.form,)
        self.writers = writers or self.writers

    def shapes_of(self, root: Root) -> tuple[trees.Shape, ...]:
        """Return the shapes in a root; a subclass may choose by the root."""
        return self.shapes

    def is_carried(self, path: str) -> bool:
        """Return whether a file of an entry is of use elsewhere."""
        return True

    def is_checked(self, path: str) -> bool:
        """Return whether the content of a file of an entry is checked."""
        return True

    def described(self, tree: trees.Tree, leaf: trees.Leaf, selection: Selection, *, contents: bool) -> Iterator[Found]:
        """Yield an entry with the facts in its content, and its problems; nothing if the selection excludes it."""
        if not contents:
            yield leaf.entry
            return
        path = tree.root / leaf.entry.key
        try:
            files = tree.read_members(leaf.entry.key)
        except LayerError as error:
            yield Problem(path, "unreadable", error.message)
            yield leaf.entry
            return
        if files is not None:
            data = archive.entry_bytes(files)
            if (damage := self.codec.check(data)) is not None:
                yield Problem(path, "damaged", damage.message)
            yield leaf.entry._replace(details=self.codec.describe(data))

    def damages(self, key: str, files: trees.Members) -> Iterator[Damage]:
        """Yield what is wrong with an entry, by its checked files."""
        if (damage := self.codec.check(archive.entry_bytes(files))) is not None:
            yield damage

    def detail(self, key: str, files: trees.Members) -> Mapping[str, str]:
        """Return the facts that an artifact states of itself."""
        return self.codec.describe(archive.entry_bytes(files)).stated

    def changing(self, root: Root) -> AbstractContextManager[trees.Tidy]:
        """Return the context of a change; its value says whether no program can be making a folder."""
        return nullcontext(lambda: self.tidies)

    def guarded(self, root: Root, keys: Iterable[str]) -> Iterator[tuple[str, trees.Guard, list[str]]]:
        """Yield groups of keys that change together, each after a name for failures and the guard of its renames."""
        if listed := list(keys):
            yield str(root.path), nullcontext, listed

    def require_replaceable(self, root: Root, key: str, files: trees.Members) -> None:
        """Raise :class:`LayerError` if an entry must not be replaced by these files now."""
        existing = self.tree_of(root).read_members(key)
        if existing and (reason := self.codec.foreign(archive.entry_bytes(existing))) is not None:
            raise UnknownFormat(self.name, f"is not replaced: {reason}", root.path / key)

    def check_index(self, root: Root) -> Iterator[Finding]:
        """Yield differences between an index and the entries, after all of these could be read."""
        yield from ()

    def tagged_text(self, tree: trees.Tree, entry: Entry) -> bytes | None:
        """Return the part of an entry, or of an orphan, that has the tag of its build."""
        return None

    def tree_of(self, root: Root) -> trees.Tree:
        """Return the tree of a root."""
        return trees.Tree(self.name, root.path, *self.shapes_of(root))

    def leaves(self, root: Root) -> Iterator[trees.Leaf | Problem]:
        """Yield entries, orphans and abandoned locks, and problems of whatever else has such a name."""
        yield from self.tree_of(root).scan() if self.shapes_of(root) else ()
        if (shape := self.lock_shape) is not None:
            abandoned = (entry for entry, custody in locks_of(self, root) if custody == locks.ABANDONED)
            yield from (trees.Leaf(entry, {}, shape) for entry in abandoned)

    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        """Yield entries with the problems of their files, leaked temporaries, and the files of the cache as a whole."""
        tree = self.tree_of(root)
        for leaf in self.leaves(root):
            self.environment.step()
            if isinstance(leaf, Problem):
                yield leaf
            elif leaf.shape.sums and not leaf.entry.is_unknown:
                yield Usage(files=leaf.entry.files, bytes=leaf.entry.bytes)
            elif not leaf.is_entry:
                yield leaf.entry
            elif _is_no_entry(self, leaf.members):
                reason = "a build that failed" if leaf.members else "an empty program folder"
                yield orphan(leaf.entry, reason)
            else:
                yield from self.described(tree, leaf, selection, contents=contents)

    def written(self, root: Root) -> Iterator[Path]:
        """Yield the folders in which entries are made, and the files of the cache as a whole."""
        for shape in self.shapes_of(root):
            if shape.is_entry or shape.sums:
                yield from _matching(root.path, shape.levels[: None if shape.sums else -1])

    def kind_of(self, root: Root, path: str) -> str:
        """Compare with the names of entries, temporaries, and files next to them."""
        if trees.entry_shape(self.shapes, path) is not None:
            return ENTRY
        parts = path.split("/")
        return OWN if any(shape.owns(parts) for shape in self.shapes_of(root)) else FOREIGN

    def find_tagged(
        self, root: Root, tag: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Entry, str]]:
        """Look for the tag in what has changed."""
        tree = self.tree_of(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem) or leaf.shape.sums or leaf.entry.is_unknown:
                continue
            if (leaf.entry.modified or 0) >= since:
                match = tag.search(self.tagged_text(tree, leaf.entry) or b"")
                if match is not None or leaf.entry.key in known:
                    yield leaf.entry, "" if match is None else match[0].decode()

    def read(self, root: Root, keys: Sequence[str]) -> Mapping[str, Artifact | EntryError]:
        """Read entries one by one."""
        return read_each(partial(read_entry, self, root), keys)

    def require_whole(self, key: str, files: trees.Members, path: Path | str) -> None:
        """Raise :class:`Damaged` for an entry that its library could not use."""
        for damage in self.damages(key, files):
            if not isinstance(damage, Doubt):
                raise Damaged(self.name, damage.message, path)

    def write(self, root: Root, artifacts: Sequence[Artifact], *, replace: bool = False) -> trees.Placed:
        """Check entries, then place them together."""
        results: trees.Placed = {}
        complete: dict[str, trees.Members] = {}
        for artifact in artifacts:
            try:
                files = files_of(self, artifact)
                if replace:
                    self.require_replaceable(root, artifact.key, files)
            except (LayerError, OSError) as error:  # noqa: PERF203 - one must not end the rest
                results[artifact.key] = error
            else:
                complete[artifact.key] = files
        try:
            # Even if all of them exist already: this repairs the index.
            with self.changing(root) if complete else nullcontext():
                tree = self.tree_of(root)
                for _, guard, keys in self.guarded(root, complete):
                    group = {key: complete[key] for key in keys}
                    results |= write_entries(tree, group, guard=guard, replace=replace, wanted=self.is_carried)
        except (LayerError, OSError) as error:
            # What was placed is unsettled.
            for key in complete:
                if results.get(key, True) is True:
                    results[key] = error
        return results

    def may_be_written(self, orphan: Entry) -> bool:
        """Return whether a live process may still be writing an orphan, by the shape of its name."""
        shape = next((shape for shape in (*self.shapes, trees.OWN) if shape.accepts(orphan.key)), None)
        return shape is None or shape.idle_only

    def in_use(self, targets: Iterable[Entry]) -> Iterator[tuple[Entry, str | None]]:
        """Skip temporaries that a program may still be writing."""
        users = processes.using(self.writers, processes=self.environment.processes) if self.writers else ()
        reason, now = f"{processes.process_names(users)} may be writing it", self.environment.clock()
        for target in targets:
            may_change = users != () and now - (target.modified or now) <= self.rest_time
            is_skipped = target.is_orphan and may_change and self.may_be_written(target)
            yield target, reason if is_skipped else None

    def remove(self, root: Root, targets: tuple[Entry, ...]) -> Outcome:
        """Remove entries: lookups then miss, and programs that have one mapped keep it."""
        planned = {target.key: target for target in targets}
        tree, outcome, failed = self.tree_of(root), Outcome(self.name), list[Note]()
        is_done, shape = False, self.lock_shape
        # First, because removing entries takes over an abandoned lock, which would then be missing here.
        for key in [key for key in planned if shape is not None and shape.accepts(key)]:
            size, lock = planned.pop(key).bytes, root.path / key
            is_removed = locks.remove_abandoned(self.environment, lock, self.lock_waits)
            skipped = () if is_removed else (Note(key, trees.CHANGED),)
            outcome = outcome.plus(Outcome(self.name, bytes_freed=size * is_removed, skipped=skipped))
        try:
            with self.changing(root) as tidy:
                for name, guard, keys in self.guarded(root, planned):
                    with noted(failed, name):
                        items = [planned[key] for key in keys]
                        step = self.environment.step
                        outcome = outcome.plus(remove_things(tree, items, tidy=tidy, guard=guard, step=step))
                is_done = True
        except (LayerError, OSError) as error:
            if not is_done:
                raise
            # They were removed, but the end of the change, such as a new count of the others, failed.
            where = error.path if isinstance(error, LayerError) else error.filename
            failed.append(Note(str(where or "*"), reason_of(error)))
        return outcome._replace(failed=(*outcome.failed, *failed))

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check every entry, and the files of the cache as a whole."""
        complete, tree = True, self.tree_of(root)
        for leaf in self.leaves(root):
            self.environment.step()
            for finding in examine(self, root, tree, leaf):
                complete = complete and finding.code != "unreadable"
                yield finding
        if complete:
            yield from self.check_index(root)


def locks_of(store: Files, root: Root) -> Iterator[tuple[Entry, locks.Custody]]:
    """Yield the lock files of a store as orphans, each with its holders."""
    for path in sorted(_matching(root.path, () if store.lock_shape is None else store.lock_shape.levels)):
        key = str(path.relative_to(root.path))
        if store.kind_of(root, key) != FOREIGN:
            # No link is followed, and a lock may go at any moment.
            with suppress(OSError), handles.opened(str(path.parent)) as folder:
                status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
                custody = locks.custody_of(store.environment, path, store.lock_waits, folder=folder)
                entry = Entry(store.name, key, root.path, handles.size_of(status), 1, modified=status.st_mtime)
                yield orphan(entry, "a lock that nobody holds any more"), custody


def _matching(folder: Path, levels: Sequence[re.Pattern[str]]) -> Iterator[Path]:
    """Yield the paths below a folder that match one or more of the first levels."""
    with suppress(OSError):
        for name in os.listdir(folder) if levels else ():
            if levels[0].fullmatch(name):
                yield folder / name
                yield from _matching(folder / name, levels[1:])


def read_entry(store: Files, root: Root, key: str) -> Artifact | None:
    """Read one entry. Raises :class:`Damaged` if it is incomplete, as while a program writes it."""
    files = store.tree_of(root).read_members(key, store.is_carried)
    if files is None or _is_no_entry(store, files):
        return None
    store.require_whole(key, files, root.path / key)
    return Artifact(store.name, key, store.forms[-1], archive.entry_bytes(files), store.detail(key, files))


def files_of(store: Files, artifact: Artifact) -> dict[str, bytes]:
    """Return the files of an artifact. Raises :class:`LayerError` unless they make a complete entry."""
    key, shape = artifact.key, trees.entry_shape(store.shapes, artifact.key)
    if shape is None:
        raise not_a_key(store.name, key)
    try:
        files = archive.unpack(artifact.data) if shape.folders else {"": artifact.data}
    except ValueError as error:
        raise Damaged(store.name, f"not the tar of an entry: {error}", key) from error
    if (strange := shape.strange(files)) is not None:
        raise Damaged(store.name, f"{strange!r} does not belong to an entry", key)
    if _is_no_entry(store, files):
        raise Damaged(store.name, "the artifact holds no program", key)
    Files.require_whole(store, key, files, key)
    return files


def _is_no_entry(store: Files, files: Mapping[str, object]) -> bool:
    return store.no_entry is not None and files.keys() <= store.no_entry


def examine(store: Files, root: Root, tree: trees.Tree, leaf: trees.Leaf | Problem) -> Iterator[Finding]:
    """Yield the findings of an entry, or that of a path that could not be read or used."""
    if isinstance(leaf, Problem):
        path = os.path.relpath(leaf.path, root.path)
        # Files of the cache as a whole are not entries; :meth:`Files.check_index` checks their contents.
        if leaf.hides or not any(shape.sums and shape.accepts(path) for shape in store.shapes_of(root)):
            yield finding_of(store, root, leaf)
        return
    key = leaf.entry.key
    if leaf.entry.is_unknown:
        yield unknown_finding(store, root, leaf.entry)
    if not leaf.is_entry or _is_no_entry(store, leaf.members):
        return
    files: trees.Members | None = None
    try:
        files = tree.read_members(key, store.is_checked)
        damages = [] if files is None else list(store.damages(key, files))
    except Unreachable as error:
        yield finding_of(store, root, unreadable(Path(error.path or root.path), error))
        return
    except LayerError as error:
        damages = [Damage(store.unread.severity, error.message + store.unread.message)]
    foreign = store.codec.foreign(archive.entry_bytes(files)) if files and damages else None
    yield from damage_findings(store, root, leaf.entry, damages, foreign)
