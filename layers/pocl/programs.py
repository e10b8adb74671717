"""The store of PoCL's cache: a folder for each program, folders of failed builds, and leaked temporaries.

The files of one program are described in :mod:`cachectl.layers.formats.pocl_programs`. Source:
``lib/CL/pocl_cache.c``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Final

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Busy, Damaged, LayerError, Unreachable
from cachectl.layers.base.facts import Problem, Removable, Root, Severity
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.selection import Selection
from cachectl.layers.base.store import unreadable
from cachectl.layers.formats import pocl_programs
from cachectl.layers.formats.pocl_programs import BITCODE, MEMBERS, NO_PROGRAM
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.host.processes import age_of, process_names
from cachectl.layers.pocl.orphans import LEVELS, NAMED, UNCACHED, shape_of
from cachectl.layers.pocl.roots import users_of
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.tree import Leaf, Tree
from cachectl.layers.stores.tree_store import TreeStore

#: Seconds without change after which no compile can be using an entry: longer than any one compile.
ENTRY_REST: Final = 600.0
#: The same for temporaries, which a slow compile may hold longer.
ORPHAN_REST: Final = 3600.0
#: Seconds by which the clocks of files and processes may differ.
_CLOCK_ERROR: Final = 5.0


class Programs(TreeStore):
    """A folder for each program, with its bitcode and the native code of its kernels."""

    forms = ("pocl-entry/1",)
    unchecked = "machine code, and the records of LLVM bitcode"

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield programs as entries; failed builds, temporaries and uncached programs as orphans.

        With ``contents=False`` the kernels of a program with a shortened kernel name are unknown: only its files hold
        the whole name.
        """
        for leaf in self.tree(root).scan():
            yield from self._found(root, leaf, contents=contents)

    def find(self, root: Root, selection: Selection) -> Iterator[facts.Found]:
        """Compare the names of kernel folders; read only programs with shortened names."""
        pattern = selection.kernel_pattern
        if pattern is None:
            yield from self.scan(root)
            return
        prefix = pocl_programs.kept_part(selection.kernel_prefix)
        shortened = f"(?={pocl_programs.SHORTENED.pattern}\\Z){re.escape(prefix)}.*"
        child = regex(f"(?:{pattern.pattern})|(?s:{shortened})", pattern.flags)
        for leaf in Tree(self.name, root.path, shape_of(root), child=child).scan():
            yield from self._found(root, leaf, contents=True)

    def iter_usage(self, root: Root) -> Iterator[facts.Found]:
        """Yield programs without the names of their kernels."""
        for leaf in self.tree(root).scan():
            if isinstance(leaf, Problem):
                yield leaf
            else:
                yield self._orphan(root, leaf) or leaf.entry(self.name, root.path)

    def _found(self, root: Root, leaf: Leaf | Problem, *, contents: bool) -> Iterator[facts.Found]:
        """Yield the entry or orphan of a leaf, and a problem for each of its files that could not be read."""
        unread: dict[str, LayerError] = {}
        yield leaf if isinstance(leaf, Problem) else self._describe(root, leaf, unread, contents=contents)
        for key, error in unread.items():
            yield Problem(root.path / key, "unreadable", error.message)

    def _describe(self, root: Root, leaf: Leaf, unread: dict[str, LayerError], *, contents: bool) -> Removable:
        if (orphan := self._orphan(root, leaf)) is not None:
            return orphan
        paths = [member.path for member in leaf.members]
        names = pocl_programs.kernel_names(paths, partial(self._content, root, leaf, unread) if contents else _unread)
        # A kernel has a folder once it was launched.
        kernels = sorted(name for name in names.values() if name is not None)
        variants = pocl_programs.variants(paths)
        program, used = leaf.member(BITCODE), leaf.member("last_accessed")
        return facts.Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            disk=leaf.disk,
            files=len(leaf.members),
            created=None if program is None else program.modified,
            modified=leaf.modified,
            used=None if used is None else used.modified,
            # An incomplete list would hide kernels from a selection.
            kernels=tuple(kernels) if kernels and len(kernels) == len(names) else None,
            detail={names[folder] or folder: " ".join(found) for folder, found in variants.items()},
            stamp=leaf.stamp,
        )

    def _orphan(self, root: Root, leaf: Leaf) -> facts.Orphan | None:
        """Return a leaf that is no program."""
        if leaf.orphan_rule is not None:
            return leaf.orphan(root.path)
        if all(member.path in NO_PROGRAM for member in leaf.members):
            return leaf.orphan(root.path, "a build that failed" if leaf.members else "an empty program folder")
        return None

    def _content(self, root: Root, leaf: Leaf, unread: dict[str, LayerError], path: str) -> bytes | None:
        """Read a file of a program; ``None`` where it is missing, or unreadable, which is added to ``unread``."""
        try:
            return self.tree(root).read_file(leaf.key, path)
        except LayerError as error:
            unread[f"{leaf.key}/{path}"] = error
            return None

    def owns(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Compare with the names of programs and temporaries."""
        return self.tree(root).shape.owns(parts)

    def tree(self, root: Root) -> Tree:
        """Return the tree of programs of a root."""
        return Tree(self.name, root.path, shape_of(root))

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Compare with the pattern of entries."""
        return NAMED.accepts(key)

    def read(self, root: Root, key: str) -> facts.Artifact | None:
        """Read a program folder as a deterministic tar without temporaries; a folder without a program is a miss.

        Raises :class:`Damaged` where PoCL could not use the program, for example while it is being built.
        """
        members = self.tree(root).read_members(key)
        if members is None:
            return None
        kept = {
            path: data for path, data in members.items() if not pocl_programs.is_temporary(path) and path != "build.log"
        }
        _demand_whole(self.name, kept, key)
        if not kept.keys() - NO_PROGRAM:
            return None
        kernels = sorted(name or folder for folder, name in pocl_programs.kernel_names(kept, kept.get).items())
        return facts.Artifact(self.name, key, self.forms[0], pack(kept), {"kernels": " ".join(kernels)})

    def tree_of(self, root: Root, key: str) -> Tree:
        """Return the only tree."""
        del key
        return self.tree(root)

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check every file, since PoCL tests only whether they exist."""
        try:
            members = unpack(artifact.data)
        except ValueError as error:
            raise Damaged(self.name, str(error), key) from error
        if not members.keys() - NO_PROGRAM:
            raise Damaged(self.name, "the artifact holds no program", key)
        for path in members:
            if not MEMBERS.fullmatch(path):
                raise Damaged(self.name, f"{path!r} is no file of a PoCL program", key)
        _demand_whole(self.name, members, key)
        return members

    def demand_replaceable(self, root: Root, key: str, files: Mapping[str, bytes]) -> None:
        """Refuse to replace a program that PoCL may be using."""
        if self.tree(root).standing(key) not in (None, files):
            self._demand_unused(root, key)

    def _demand_unused(self, root: Root, key: str) -> None:
        """Raise :class:`Busy` while a process of this user may use PoCL with this root."""
        if (users := users_of(root.path, self.environment)) != ():
            named = process_names(users, processes=self.environment.processes)
            raise Busy(self.name, f"is not replaced while PoCL is in use by {named}", key)

    # ------------------------------------------------------------------ clear

    def in_use(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Skip entries that a running compile may use, and programs that a running process may hold.

        A process whose file vanishes fails or, before PoCL 7, aborts. A process reads the binary of a program from the
        entry when it first needs it; PoCL 3 crashes in a build from a binary without bitcode. Each build updates
        ``last_accessed``, so a process cannot hold an entry that was last changed before the process started. Nothing
        is in use where no process of this user has loaded PoCL, or all of them use other roots.
        """
        processes = self.environment.processes
        users_at = lru_cache(maxsize=None)(partial(users_of, environment=self.environment))
        age_at = lru_cache(maxsize=None)(partial(age_of, processes=processes))
        now = self.environment.clock()
        # Processes of other machines cannot be listed.
        shared = lru_cache(maxsize=None)(partial(network_file_system, mounts=self.environment.mounts))
        for target in targets:
            users = users_at(target.root)
            if users == () and shared(target.root) is not None:
                users = None
            rest = ENTRY_REST if isinstance(target, facts.Entry) else ORPHAN_REST
            age = now - (target.modified or now)
            if users == () or (isinstance(target, facts.Orphan) and not target.idle_only):
                yield target, None
                continue
            named = partial(process_names, processes=processes)
            running = ((pid, age_at(pid)) for pid in users or ())
            holders = tuple(pid for pid, seconds in running if seconds is None or age <= seconds + _CLOCK_ERROR)
            because = None
            if LEVELS[0].fullmatch(target.key):
                # A program may be about to make a folder in it, whatever its age.
                because = f"PoCL is in use by {named(users)}, which may be about to build in it"
            elif age <= rest:
                because = f"changed {max(0, age):.0f} s ago, and PoCL is in use by {named(users)}"
            elif holders and (isinstance(target, facts.Entry) or target.key.startswith(UNCACHED)):
                # Nothing shows which of these processes built it.
                because = f"may be held by {named(holders)}, which ran when it was last used; purge again after its end"
            yield target, because

    def remove(self, root: Root, targets: tuple[facts.Removable, ...]) -> facts.Outcome:
        """Rename programs away, then delete them; never the top folder."""
        return self.tree(root).remove(targets, tidy=partial(self._is_unused, root))

    def _is_unused(self, root: Root) -> bool:
        """Return whether no process can be using a root: other machines may use it on a network file system."""
        if network_file_system(root.path, mounts=self.environment.mounts) is not None:
            return False
        return users_of(root.path, self.environment) == ()

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Check that bitcode and native files are whole: PoCL checks nothing, and fails with a damaged one."""
        tree = self.tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield self.to_finding(root, leaf)
                continue
            if leaf.orphan_rule is not None:
                continue
            unread: dict[str, LayerError] = {}
            for path, message in self._damage(tree, leaf, unread):
                yield self._damaged(root, leaf, path, message)
            for path, error in unread.items():
                yield self.to_finding(root, unreadable(root.path / f"{leaf.key}/{path}", error))

    def _damage(self, tree: Tree, leaf: Leaf, unread: dict[str, LayerError]) -> Iterator[tuple[str, str]]:
        """Yield the path and damage of each damaged file of a program; add unreadable files to ``unread``."""
        contents: dict[str, bytes] = {}
        for member in leaf.members:
            if member.path == BITCODE or pocl_programs.is_native(member.path):
                try:
                    data = tree.read_file(leaf.key, member.path)
                except Unreachable as error:
                    unread[member.path] = error
                    continue
                except LayerError as error:
                    yield member.path, error.message
                    continue
                if data is not None:
                    contents[member.path] = data
        yield from pocl_programs.damage(contents)

    def _damaged(self, root: Root, leaf: Leaf, path: str, message: str) -> facts.Finding:
        severity = Severity.FAILS
        if path.endswith(pocl_programs.OBJECT):
            # PoCL links these itself, and compiles the kernel again, once, if that fails.
            severity, message = Severity.HEALS, f"{message}; PoCL compiles the kernel again"
        fix = f"cachectl purge --damaged {self.name}"
        thing = leaf.entry(self.name, root.path)
        return facts.Finding(self.name, root.path, leaf.key, severity, "magic", f"{path}: {message}", fix, thing)


def _unread(path: str) -> bytes | None:  # noqa: ARG001 - the signature of a reader
    return None


def _demand_whole(layer: str, contents: Mapping[str, bytes], key: str) -> None:
    """Raise :class:`Damaged` for the first damaged file of a program."""
    for path, message in pocl_programs.damage(contents):
        raise Damaged(layer, f"{path}: {message}", key)
