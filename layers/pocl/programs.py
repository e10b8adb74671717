"""The store of PoCL's cache: a folder for each program, folders of failed builds, and leaked temporaries.

The files of one program are described in :mod:`cachectl.layers.formats.pocl_programs`. Files and folders with other
names are left alone. Sources: ``lib/CL/pocl_cache.c``, ``lib/CL/pocl_file_util.c``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from cachectl.layers.base import errors, facts, store
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.selection import Selection
from cachectl.layers.formats import pocl_programs
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.host.processes import age_of, process_names
from cachectl.layers.pocl import users_of
from cachectl.layers.stores.files import Folders
from cachectl.layers.stores.tree import Leaf, OrphanRule, Shape, Tree

#: Seconds without change after which no compile can be using an entry: longer than any one compile.
ENTRY_REST: Final = 600.0
#: The same for temporaries, which a slow compile may hold longer.
ORPHAN_REST: Final = 3600.0
#: Seconds by which the clocks of files and processes may differ.
_CLOCK_ERROR: Final = 5.0

#: Drawn characters that are no word, for folders that may contain files of others: one draw in ninety is a word, and a
#: word is more likely somebody's own name.
_NO_WORD: Final = f"(?=.*[0-9]|.+[A-Z]){pocl_programs.DRAWN}"
#: Begins the name of a program's folder that is built with the cache off.
UNCACHED: Final = "_UNCACHED_"
_SUFFIX: Final = r"\.(?:cl|preproc\.cl|so|so\.o|spirv|spv|bc|s|binary|map)"


def _leaked(drawn: str) -> tuple[OrphanRule, OrphanRule]:
    """Return the rules for leaked temporaries with these random characters in their names."""
    leaked, uncached = regex(f"tempfile_{drawn}"), regex(f"{UNCACHED}{drawn}")
    return (
        OrphanRule(leaked, "leaked by a PoCL process", idle_only=False, empty=True, private=True),
        OrphanRule(uncached, "a program built with the cache off", private=True, members=pocl_programs.MEMBERS),
    )


def _compiling(drawn: str) -> OrphanRule:
    """Return the rule for a compile's temporaries, which is safe only in a folder with PoCL's name."""
    return OrphanRule(regex(f"tempfile_{drawn}{_SUFFIX}"), "a compile's temporary file", private=True)


#: Headers handed to a compile may have any name, so they are recognised only in a folder that belongs to PoCL alone.
_HEADERS: Final = OrphanRule(
    regex(f"tempdir_{pocl_programs.DRAWN}"),
    "a compile's temporary folder",
    private=True,
    members=regex(".*", re.DOTALL),
)
LEVELS: Final = (regex("[A-P]{2}"), regex("[A-P]{37}"))
#: A purge beside a running PoCL leaves these: PoCL makes one if it is missing, then a program's folder in it, and the
#: build fails if it vanishes between the two (``pocl_mkdir_p`` in ``lib/CL/pocl_file_util.c``).
_EMPTY: Final = OrphanRule(LEVELS[0], "an empty folder of programs", members=regex("(?!)"))
#: Shapes of three kinds of root: any folder, one whose name contains ``pocl``, and one that PoCL alone uses.
NAMED: Final = Shape(
    LEVELS,
    folders=True,
    members=pocl_programs.MEMBERS,
    orphans=_leaked(_NO_WORD),
    first=(pocl_programs.BITCODE, "program.spv"),
)
_BEARING: Final = NAMED._replace(
    orphans=(*_leaked(_NO_WORD), _compiling(_NO_WORD)), empty=_EMPTY._replace(private=True)
)
_OWN: Final = NAMED._replace(
    orphans=(*_leaked(pocl_programs.DRAWN), _compiling(pocl_programs.DRAWN), _HEADERS), empty=_EMPTY
)


class Programs(Folders):
    """A folder for each program, with its bitcode and the native code of its kernels."""

    shape = NAMED
    beside = pocl_programs.NO_PROGRAM
    forms = ("pocl-entry/1",)

    def shape_of(self, root: facts.Root) -> Shape:
        """Return the shape of a root: the less certain it is that PoCL alone uses it, the fewer temporaries it has."""
        if root.path.name == root.role:
            return _OWN
        return _BEARING if "pocl" in root.path.name.lower() else NAMED

    def selected(self, root: facts.Root, selection: Selection) -> Tree:
        """Compare the names of kernel folders: only programs with shortened names must be read."""
        pattern = selection.kernel_pattern
        if pattern is None:
            return self.tree_of(root)
        prefix = pocl_programs.kept_part(selection.kernel_prefix)
        shortened = f"(?={pocl_programs.SHORTENED.pattern}\\Z){re.escape(prefix)}.*"
        child = regex(f"(?:{pattern.pattern})|(?s:{shortened})", pattern.flags)
        return Tree(self.name, root.path, self.shape_of(root), child=child)

    def described(self, root: facts.Root, tree: Tree, leaf: Leaf, *, contents: bool) -> Iterator[facts.Found]:
        """Yield a program; its kernels are unknown unless all their names are known."""
        program, used = leaf.member(pocl_programs.BITCODE), leaf.member("last_accessed")
        entry = replace(
            leaf.entry(self.name, root.path),
            created=None if program is None else program.modified,
            used=None if used is None else used.modified,
        )
        if not contents:
            yield entry
            return
        unread: dict[str, errors.LayerError] = {}

        def content(path: str) -> bytes | None:
            try:
                return tree.read_file(leaf.key, path)
            except errors.LayerError as error:
                unread[path] = error
                return None

        paths = [member.path for member in leaf.members]
        names = pocl_programs.kernel_names(paths, content)
        # A kernel has a folder once it was launched.
        kernels = sorted(name for name in names.values() if name is not None)
        detail = {names[folder] or folder: " ".join(found) for folder, found in pocl_programs.variants(paths).items()}
        yield replace(entry, kernels=tuple(kernels) if 0 < len(kernels) == len(names) else None, detail=detail)
        for path, error in unread.items():
            yield store.unreadable(root.path / leaf.key / path, error)

    # ------------------------------------------------------------------ contents

    def is_carried(self, path: str) -> bool:
        """Leave temporaries and logs behind."""
        return not pocl_programs.is_temporary(path) and path != "build.log"

    def is_checked(self, path: str) -> bool:
        """Return whether a file is bitcode or native code."""
        return path == pocl_programs.BITCODE or pocl_programs.is_native(path)

    def detail(self, key: str, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return the names of the kernels."""
        del key
        names = pocl_programs.kernel_names(files, files.get)
        return {"kernels": " ".join(sorted(name or folder for folder, name in names.items()))}

    def damages(self, contents: Mapping[str, bytes]) -> Iterator[store.Damage]:
        """Yield damaged files: PoCL checks nothing, and fails with one, but for an object that it links itself."""
        for path, message in pocl_programs.damage(contents):
            if path.endswith(pocl_programs.OBJECT):
                yield store.Damage(facts.Severity.HEALS, f"{path}: {message}; PoCL compiles the kernel again")
            else:
                yield store.Damage(facts.Severity.FAILS, f"{path}: {message}")

    def demand_replaceable(self, root: facts.Root, key: str, files: Mapping[str, bytes]) -> None:
        """Refuse to replace a program that PoCL may be using."""
        if self.tree_of(root).standing(key) not in (None, files):
            users = users_of(root.path, self.environment)
            if users != ():
                named = process_names(users, processes=self.environment.processes)
                raise errors.Busy(self.name, f"is not replaced while PoCL is in use by {named}", key)

    # ------------------------------------------------------------------ clear

    def in_use(self, targets: Iterable[facts.Removable]) -> Iterator[tuple[facts.Removable, str | None]]:
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

    def remove(self, root: facts.Root, targets: tuple[facts.Removable, ...]) -> facts.Outcome:
        """Rename programs away, then delete them; never the top folder."""
        return self.tree_of(root).remove(targets, tidy=partial(self._is_unused, root))

    def _is_unused(self, root: facts.Root) -> bool:
        """Return whether no process can be using a root: other machines may use it on a network file system."""
        if network_file_system(root.path, mounts=self.environment.mounts) is not None:
            return False
        return users_of(root.path, self.environment) == ()

    # ------------------------------------------------------------------ tagged builds

    def find_tagged(
        self, root: facts.Root, tag: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[facts.Removable, str]]:
        """Yield what tagged builds left, as :meth:`Store.find_tagged` says.

        A kernel launched in a new work-group shape after its program was removed leaves a folder without bitcode.
        """
        tree = self.tree_of(root)
        for leaf in tree.scan():
            if isinstance(leaf, facts.Problem) or leaf.modified < since:
                continue
            if leaf.orphan_rule is not None:
                # The source of a build that failed in the preprocessor.
                if (found := tag.search(leaf.key.encode())) is not None:
                    yield leaf.orphan(root.path), found[0].decode()
                continue
            found = tag.search(
                b"".join(tree.read_file(leaf.key, file) or b"" for file in (pocl_programs.BITCODE, "build.log"))
            )
            if found is not None or leaf.key in known:
                yield leaf.entry(self.name, root.path), "" if found is None else found[0].decode()
