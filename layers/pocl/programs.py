"""The store of PoCL's cache: a folder for each program, folders of failed builds, and leaked temporaries.

Files and folders with other names are left alone. Sources: ``lib/CL/pocl_cache.c`` (names),
``lib/CL/pocl_file_util.c``, ``lib/CL/devices`` (``common.c``, ``hsa``, ``tce``: files next to native code),
``lib/llvmopencl/Workgroup.cc`` (symbols of work-group functions).

Since version 4.0 PoCL shortens the name of a kernel's folder to a prefix, ``.`` (on Windows a blank) and the SHA-1 of
the name in 40 letters (``pocl_hash_clipped_name``). This does not give the name, but a name that is found in the
program's files can be compared with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path

from cachectl.layers import pocl
from cachectl.layers.base import processes
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Busy, Damaged, LayerError
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.entry import Entry, Found, Problem
from cachectl.layers.core.finding import FAILS
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import Selection
from cachectl.layers.core.store import Damage, attempt, unreadable
from cachectl.layers.formats import bitcode, elf
from cachectl.layers.formats.details import Details
from cachectl.layers.host import record
from cachectl.layers.pocl import releases
from cachectl.layers.stores import files
from cachectl.layers.stores import tree_read as trees

#: The bitcode of a work-group function, which ``POCL_LEAVE_KERNEL_COMPILER_TEMP_FILES`` keeps.
PARALLEL = "parallel.bc"
#: Six characters drawn by ``mkstemp``.
DRAWN = "[A-Za-z0-9]{6}"
#: A folder name that may be shortened: no OpenCL C name contains a dot or a blank.
SHORTENED = regex(r".+[. ][A-P]{40}", re.DOTALL)
#: The longest names that are not shortened, in bytes: by PoCL 7.0 and newer, by 6.0, and by 4.0 and 5.0.
_LIMITS = (59, 64, 255)
_HASH_AND_DOT = 41
_TEMPORARY = regex(rf".*_{DRAWN}\.(?:temp|so)")
#: Files of a work-group function: native code, and what ``POCL_LEAVE_KERNEL_COMPILER_TEMP_FILES`` and other devices
#: add. Other files there do not belong to PoCL.
_FUNCTION = (
    r"[^/]+\.(?:so|so\.o|o|obj|dll|tpef|img)|parallel\.bc(?:\.brig)?|descriptor\.so\.kernel_obj\.c"
    rf"|[^/]+_{DRAWN}\.(?:temp|so)"
)
_VARIANT = regex(rf"(?P<kernel>[^/]+)/(?P<variant>\d+-\d+-\d+(?:-goffs0)?(?:-smallgrid)?)/(?P<file>{_FUNCTION})")
_PROGRAM = (
    r"program\.(?:bc|spv|map|mlir|bc\.(?:noOfs|Ofs)\.ptx)|last_accessed|build\.log|native/[^/]+\.native|parallel\.bc"
)
#: Every file that a program may have.
MEMBERS = regex(f"{_PROGRAM}|{_VARIANT.pattern}|{_TEMPORARY.pattern}")
#: Files that a folder may have without being a program.
NO_PROGRAM = frozenset({"build.log", "last_accessed"})
#: The symbol of a work-group function, in a string table; PoCL also looks it up without the first underscore.
_WORK_GROUP = regex(rb"pocl_kernel_([^\0]+)_workgroup\0")
#: The bytes of bitcode that state which LLVM wrote it: its first block.
_HEAD = 64
#: Seconds without change after which a compile is considered over.
ENTRY_REST = 600.0
#: The same for temporaries, which a slow compile may hold longer.
ORPHAN_REST = 3600.0
#: Seconds by which the clocks of files and processes may differ.
_CLOCK_ERROR = 5.0
#: Drawn characters that are not a word, for folders that may contain others' files: only one draw in ninety is a word,
#: which is more likely a name that somebody chose.
_NO_WORD = f"(?=.*[0-9]|.+[A-Z]){DRAWN}"
#: The beginning of the name of a program's folder that is built with the cache off.
UNCACHED = "_UNCACHED_"
_SUFFIX = r"\.(?:cl|preproc\.cl|so|so\.o|spirv|spv|bc|s|binary|map)"


def _temporaries(drawn: str) -> tuple[trees.Shape, ...]:
    """Return the shapes of temporaries with such random characters; the last is safe only in PoCL's own folder."""
    leaked, uncached, compiling = map(regex, (f"tempfile_{drawn}", f"{UNCACHED}{drawn}", f"tempfile_{drawn}{_SUFFIX}"))
    built = trees.Shape(
        (uncached,), folders=True, members=MEMBERS, because="a program built with the cache off", private=True
    )
    return (
        trees.Shape((leaked,), because="leaked by a PoCL process", idle_only=False, sizes=(0,), private=True),
        built,
        trees.Shape((compiling,), because="a compile's temporary file", private=True),
    )


#: The headers of a compile may have any name, so they are recognised only in a folder that only PoCL uses.
_HEADERS = trees.Shape((regex(f"tempdir_{DRAWN}"),), folders=True, because="a compile's temporary folder", private=True)
LEVELS = (regex("[A-P]{2}"), regex("[A-P]{37}"))
#: A purge keeps these while PoCL runs: PoCL makes one if it is missing, then a program's folder in it, and the build
#: fails if it vanishes in between (``pocl_mkdir_p`` in ``lib/CL/pocl_file_util.c``).
_EMPTY = trees.Shape((LEVELS[0],), folders=True, because="an empty folder of programs", sizes=(0,))
_ENTRY = trees.Shape(LEVELS, folders=True, members=MEMBERS, first=(pocl.BITCODE, "program.spv"))
#: Names that no release of PoCL has made: longer or shorter hashes, or divided differently.
_LIKE = (trees.resembling("[A-P]{1,6}", "[A-P]{16,}"), trees.resembling("[A-P]{32,}"))
#: The shapes in three kinds of root: any folder, one whose name contains ``pocl``, and one that only PoCL uses.
NAMED = (_ENTRY, *_temporaries(_NO_WORD)[:2], *_LIKE)
_BEARING = (_EMPTY._replace(private=True), _ENTRY, *_temporaries(_NO_WORD), *_LIKE)
_OWN = (_EMPTY, _ENTRY, *_temporaries(DRAWN), _HEADERS, *_LIKE)


class Programs(files.Files):
    """A folder for each program, with its bitcode and the native code of its kernels."""

    shapes = NAMED
    no_entry = NO_PROGRAM
    forms = ("pocl-entry/1",)
    unread = Damage(FAILS, "")

    def shapes_of(self, root: Root) -> tuple[trees.Shape, ...]:
        """Return the shapes in a root: fewer temporaries the less certain it is that only PoCL uses it."""
        if root.path.name == root.role:
            return _OWN
        return _BEARING if "pocl" in root.path.name.lower() else NAMED

    def described(self, tree: trees.Tree, leaf: trees.Leaf, selection: Selection, *, contents: bool) -> Iterator[Found]:
        """Yield a program; its kernels are unknown unless all their names are known."""
        if (pattern := selection.kernel_pattern) is not None:
            folders = {path.partition("/")[0] for path in leaf.members}
            if not any(pattern.fullmatch(folder) or SHORTENED.fullmatch(folder) for folder in folders):
                return
        program, used = leaf.members.get(pocl.BITCODE), leaf.members.get("last_accessed")
        about = Details(created=None if program is None else program.st_mtime)
        entry = leaf.entry._replace(details=about, used=None if used is None else used.st_mtime)
        if leaf.head and (compiler := bitcode.producer(leaf.head)):
            entry = self._judged(entry, compiler)
        if not contents:
            yield entry
            return

        unread: dict[str, LayerError] = {}

        def content(path: str, limit: int = -1) -> bytes | None:
            try:
                return tree.read_file(entry.key, path, limit)
            except LayerError as error:
                unread[path] = error
                return None

        compiler = bitcode.producer(leaf.head or content(pocl.BITCODE, _HEAD) or b"")
        names = kernel_names(leaf.members, content)
        # A kernel has a folder after its first launch.
        kernels = tuple(sorted(filter(None, names.values())))
        shapes = {
            names[folder] or folder: " ".join(sorted({match["variant"] for match in matches}))
            for folder, matches in sorted(kernel_folders(leaf.members).items())
        }
        details = about._replace(
            kernels=kernels if 0 < len(kernels) == len(names) else None,
            versions={"llvm": compiler.removeprefix("LLVM")} if compiler else {},
            detail=shapes,
        )
        yield entry._replace(details=details)
        for path, error in unread.items():
            yield unreadable(tree.root / entry.key / path, error)

    def leaves(self, root: Root) -> Iterator[trees.Leaf | Problem]:
        """Read the beginning of programs that are older than the last removal of a PoCL from here."""
        before = releases.note_here(self.environment).last_gone(releases.PRODUCT)
        return self.tree_of(root).scan(head=_HEAD, before=before)

    def _judged(self, entry: Entry, compiler: str) -> Entry:
        """Return an entry, stale if the record shows that its PoCL was removed, and no other here has its LLVM.

        PoCL hashes its version and LLVM's into every key. A shared LLVM may have been updated without PoCL, so an entry
        of the same major version may be hit.
        """
        version, by = compiler.removeprefix("LLVM"), compiler.replace("LLVM", "LLVM ")
        if not releases.note_all(self.environment):
            return entry._replace(because=f"unknown: compiled by {by}, and not every PoCL here can be read")
        stale, because = record.record_of(self.environment).judge(
            releases.PRODUCT,
            entry.used,
            f"compiled by {by}",
            made=lambda release: release.endswith(f" LLVM {version}"),
            hits=lambda release: f" LLVM {version.partition('.')[0]}." in release,
        )
        return entry._replace(stale=stale, because=because)

    def is_carried(self, path: str) -> bool:
        """Exclude temporaries and logs. The name of a finished kernel may end like that of a temporary."""
        variant = _VARIANT.fullmatch(path)
        if variant is not None and variant["file"] == f"{variant['kernel']}.so":
            return True
        return not _TEMPORARY.fullmatch(path) and path != "build.log"

    def is_checked(self, path: str) -> bool:
        """Return whether a file is bitcode, or native code of a work-group function; a temporary is neither."""
        return path.endswith((pocl.BITCODE, PARALLEL)) or (
            path.endswith(pocl.NATIVE) and _VARIANT.fullmatch(path) is not None and self.is_carried(path)
        )

    def detail(self, key: str, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return the names of the kernels."""
        names = kernel_names(files, files.get)
        return {"kernels": " ".join(sorted(name or folder for folder, name in names.items()))}

    def damages(self, key: str, files: Mapping[str, bytes]) -> Iterator[Damage]:
        """Yield damaged files, and those of other programs or machines."""
        from cachectl.layers.pocl.identity import judge_files

        return judge_files({path: files[path] for path in filter(self.is_checked, files)}, self.environment)

    def require_whole(self, key: str, files: Mapping[str, bytes], path: Path | str) -> None:
        """Check that each file is complete; whether they belong together is checked before a put."""
        for file in filter(self.is_checked, files):
            wrong = bitcode.complaint(files[file]) if file.endswith(".bc") else elf.linking_complaint(files[file], None)
            if wrong is not None:
                raise Damaged(self.name, f"{file}: {wrong}", path)

    def require_replaceable(self, root: Root, key: str, files: Mapping[str, bytes]) -> None:
        """Refuse to replace a program that PoCL may be using."""
        existing = attempt(partial(self.tree_of(root).read_members, key, self.is_carried))
        if existing not in (None, files):
            users = users_of(root.path, self.environment)
            if users != ():
                named = processes.process_names(users, processes=self.environment.processes)
                raise Busy(self.name, f"is not replaced while PoCL is in use by {named}", key)

    def may_be_written(self, orphan: Entry) -> bool:
        """Judge by the shapes in a folder that only PoCL uses, which include all others."""
        is_settled = any(shape.accepts(orphan.key) and not shape.idle_only for shape in _OWN)
        return not is_settled and super().may_be_written(orphan)

    def in_use(self, targets: Iterable[Entry]) -> Iterator[tuple[Entry, str | None]]:
        """Skip entries that a running compile may use, and programs that a running process may hold.

        A process whose file vanishes fails or, before PoCL 7, aborts. It reads the binary of a program from the entry
        when it first needs it; PoCL 3 crashes in a build from a binary without bitcode. Each build updates
        ``last_accessed``, so a process cannot hold an entry that was last changed before the process started. Nothing
        is in use if no process of this user has loaded PoCL, or all of them use other roots.
        """
        folder, now = self.environment.processes, self.environment.clock()
        users_at = lru_cache(maxsize=None)(self._users_of)
        age_at = lru_cache(maxsize=None)(partial(processes.age_of, processes=folder))
        named = partial(processes.process_names, processes=folder)
        for target in targets:
            users = users_at(target.root)
            rest = ORPHAN_REST if target.is_orphan else ENTRY_REST
            age = now - (target.modified or now)
            if users == () or (target.is_orphan and not self.may_be_written(target)):
                yield target, None
                continue
            running = ((pid, age_at(pid)) for pid in users or ())
            holders = tuple(pid for pid, seconds in running if seconds is None or age <= seconds + _CLOCK_ERROR)
            because = None
            if LEVELS[0].fullmatch(target.key):
                # At any age of the folder a program may be about to make another in it.
                because = f"PoCL is in use by {named(users)}, which may be about to build in it"
            elif age <= rest:
                because = f"changed {max(0, age):.0f} s ago, and PoCL is in use by {named(users)}"
            elif holders and (not target.is_orphan or target.key.startswith(UNCACHED)):
                # Nothing shows which of these processes built it.
                advice = "purge again when that has ended"
                because = f"may be held by {named(holders)}, which ran when it was last used; {advice}"
            yield target, because

    def changing(self, root: Root) -> AbstractContextManager[trees.Tidy]:
        """Allow empty folders to be removed only while no process can use the root."""
        return nullcontext(lambda: self._users_of(root.path) == ())

    def _users_of(self, root: Path) -> tuple[int, ...] | None:
        """Return the processes that may use a root; ``None`` if they are unknown, such as those of other machines."""
        users = users_of(root, self.environment)
        is_shared = users == () and processes.network_file_system(self.environment, root) is not None
        return None if is_shared else users

    def tagged_text(self, tree: trees.Tree, entry: Entry) -> bytes | None:
        """Return bitcode and log; for the leftover source of a build that failed in the preprocessor, its name.

        A kernel launched in a new work-group shape after its program was removed leaves a folder without bitcode.
        """
        if entry.is_orphan:
            return entry.key.encode()
        return b"".join(tree.read_file(entry.key, file) or b"" for file in (pocl.BITCODE, "build.log"))


def kernel_folders(paths: Iterable[str]) -> dict[str, list[re.Match[str]]]:
    """Map the kernel folders of a program to the files of work-group functions in them."""
    folders: dict[str, list[re.Match[str]]] = {}
    for match in map(_VARIANT.fullmatch, paths):
        if match is not None:
            folders.setdefault(match["kernel"], []).append(match)
    return folders


def kernel_names(paths: Iterable[str], content: Callable[[str], bytes | None]) -> dict[str, str | None]:
    """Map the kernel folders of a program to the kernels' names, ``None`` where its files do not contain the name.

    Native files contain full names, and so does the bitcode, which takes longer to read.
    """
    names: dict[str, str | None] = {}
    for folder, matches in kernel_folders(paths).items():
        natives = (match[0] for match in matches if match["file"].endswith(pocl.NATIVE))
        candidates = (name for path in natives for name in functions_in(content(path)))
        names[folder] = whole_name(folder, candidates) if SHORTENED.fullmatch(folder) else folder
    if None in names.values():
        symbols = bitcode.read_symbols(content(pocl.BITCODE) or b"")
        defined = frozenset() if symbols is None else symbols.defined
        return {folder: name or whole_name(folder, defined) for folder, name in names.items()}
    return names


def functions_in(strings: bytes | None) -> Iterator[str]:
    """Yield the kernels whose work-group functions some bytes name."""
    return (match[1].decode(errors="replace") for match in _WORK_GROUP.finditer(strings or b""))


def whole_name(folder: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate whose folder PoCL gives this name, shortened or not; ``None`` if no candidate fits."""
    wanted = os.fsencode(folder)
    return next((name for name in candidates if wanted in _folder_names(name.encode(errors="surrogateescape"))), None)


# Kernels are few, and programs many.
@lru_cache(maxsize=1000)
def _folder_names(name: bytes) -> frozenset[bytes]:
    """Return the folder names that versions of PoCL give a kernel, on any platform."""
    import hashlib

    limits = [limit for limit in _LIMITS if len(name) > limit]
    if not limits:
        return frozenset((name,))
    digest = hashlib.sha1(name, usedforsecurity=False).digest()
    letters = bytes(ord("A") + nibble for byte in digest for nibble in (byte & 15, byte >> 4))
    prefixes = (name[: limit - _HASH_AND_DOT] for limit in limits)
    return frozenset((name, *(prefix + dot + letters for prefix in prefixes for dot in (b".", b" "))))


def users_of(root: Path, environment: Environment) -> tuple[int, ...] | None:
    """Return the ids of processes with PoCL loaded whose root this is, or may be; ``None`` if they are unknown."""
    users = processes.using(pocl.LIBRARIES, processes=environment.processes)
    return None if users is None else tuple(number for number in users if _may_use(number, root, environment))


def _may_use(number: int, root: Path, environment: Environment) -> bool:
    """Return whether a process uses a root, by its initial variables or its mapped files, or may do so.

    It may if it is this very process, whose variables change, or if its variables name no absolute folder, because the
    directory in which a program started is unknown.
    """
    folder = environment.processes
    variables = processes.first_variables(number, processes=folder)
    if number == os.getpid() or not variables:
        return True
    roots = pocl.PoclKernels(environment._replace(variables=variables, cwd=Path())).roots()
    if not roots or not all(own.path.is_absolute() and own.source != pocl.NO_HOME for own in roots):
        return True
    try:
        leads_there = any(processes.finds(number, own.path, root, processes=folder) for own in roots)
        return leads_there or processes.maps_below(number, root, processes=folder)
    except OSError:
        return True
