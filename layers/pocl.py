"""The layer ``pocl``: PoCL's kernel cache, its ``uncached`` folder and its leaked temporaries.

A tree of programs, each a folder of linked bitcode and native work-group functions. Sources:
``lib/CL/pocl_cache.c`` (places, names), ``lib/CL/devices/devices.c`` (when the variables are read).
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import Busy, Damaged, LayerError, Unreachable
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    ClearPlan,
    Condition,
    Counted,
    Entry,
    Finding,
    Found,
    Hazard,
    Orphan,
    Outcome,
    Problem,
    Quarantined,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
    Unverified,
)
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import module, regex, replace
from cachectl.layers.base.selection import Selection
from cachectl.layers.base.store import Store, target_of
from cachectl.layers.base.switches import misread, off, strtobool
from cachectl.layers.disk.presence import is_there
from cachectl.layers.host.drivers import opencl_drivers
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.host.processes import age_of, first_variables, spell, using
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.tree import REFUSALS, Leaf, Shape, StrayRule, Tree, bulk, planned
from cachectl.layers.stores.walk import Group

if TYPE_CHECKING:
    from cachectl.layers.formats import bitcode, elf, elf_checks, pocl_names
    from cachectl.layers.host.llvm_tools import Disassembler
else:
    bitcode = module("cachectl.layers.formats.bitcode")
    elf = module("cachectl.layers.formats.elf")
    elf_checks = module("cachectl.layers.formats.elf_checks")
    pocl_names = module("cachectl.layers.formats.pocl_names")

#: Seconds without change after which no compile can be using an entry: longer than any one compile.
ENTRY_REST: Final = 600.0
#: The same for temporaries, which a slow compile may hold longer.
ORPHAN_REST: Final = 3600.0
#: Seconds by which the clocks of files and processes may differ.
_CLOCK_ERROR: Final = 5.0
LIBRARIES: Final = ("libpocl",)
_PLATFORMS: Final = ("Portable Computing Language",)

#: Six characters that mkstemp has drawn.
_DRAWN: Final = "[A-Za-z0-9]{6}"
#: The same where a file may be anybody's: one draw in ninety is a word, which is more likely somebody's own.
_NO_WORD: Final = f"(?=.*[0-9]|.+[A-Z]){_DRAWN}"
#: Begins the name of a program's folder that is built with the cache off.
_UNCACHED: Final = "_UNCACHED_"
_TEMPORARY: Final = regex(rf".*_{_DRAWN}\.(?:temp|so)")
_SUFFIX: Final = r"\.(?:cl|preproc\.cl|so|so\.o|spirv|spv|bc|s|binary|map)"
#: Files of a work-group function: native code, and what ``POCL_LEAVE_KERNEL_COMPILER_TEMP_FILES`` and other devices
#: add (``lib/CL/devices``: ``common.c``, ``hsa``, ``tce``). Any other file there is somebody's own.
_FUNCTION: Final = (
    r"[^/]+\.(?:so|so\.o|o|obj|dll|tpef|img)|parallel\.bc(?:\.brig)?|descriptor\.so\.kernel_obj\.c"
    rf"|[^/]+_{_DRAWN}\.(?:temp|so)"
)
_VARIANT: Final = regex(rf"(?P<kernel>[^/]+)/(?P<variant>\d+-\d+-\d+(?:-goffs0)?(?:-smallgrid)?)/(?P<file>{_FUNCTION})")
_PROGRAM: Final = (
    r"program\.(?:bc|spv|map|mlir|bc\.(?:noOfs|Ofs)\.ptx)|last_accessed|build\.log|native/[^/]+\.native|parallel\.bc"
)
_MEMBERS: Final = regex(f"{_PROGRAM}|{_VARIANT.pattern}|{_TEMPORARY.pattern}")


def _strays(drawn: str) -> tuple[StrayRule, StrayRule]:
    leaked, uncached = regex(f"tempfile_{drawn}"), regex(f"{_UNCACHED}{drawn}")
    return (
        StrayRule(leaked, "leaked by a PoCL process", idle_only=False, empty=True, private=True),
        StrayRule(uncached, "a program built with the cache off", private=True, members=_MEMBERS),
    )


def _compiling(drawn: str) -> StrayRule:
    """Know a temporary by its name: it may be anybody's draft, except in a folder that bears PoCL's name."""
    return StrayRule(regex(f"tempfile_{drawn}{_SUFFIX}"), "a compile's temporary file", private=True)


#: Headers handed to a compile may have any name: only in a folder that is all PoCL's own are they known for its.
_HEADERS: Final = StrayRule(
    regex(f"tempdir_{_DRAWN}"), "a compile's temporary folder", private=True, members=regex(".*", re.DOTALL)
)
_LEVELS: Final = (regex("[A-P]{2}"), regex("[A-P]{37}"))
#: A purge beside a running PoCL leaves these: PoCL makes one if it is missing, then a program's folder in it, and the
#: build fails if it vanishes between the two (``pocl_mkdir_p`` in ``lib/CL/pocl_file_util.c``).
_EMPTY: Final = StrayRule(_LEVELS[0], "an empty folder of programs", members=regex("(?!)"))
_NAMED: Final = Shape(
    _LEVELS, folders=True, members=_MEMBERS, strays=_strays(_NO_WORD), first=("program.bc", "program.spv")
)
_BEARING: Final = _NAMED._replace(
    strays=(*_strays(_NO_WORD), _compiling(_NO_WORD)), empty=_EMPTY._replace(private=True)
)
_OWN: Final = _NAMED._replace(strays=(*_strays(_DRAWN), _compiling(_DRAWN), _HEADERS), empty=_EMPTY)
_NATIVE: Final = (".so", ".o")
#: The symbol of a kernel's work-group function in a native file.
_WORK_GROUP: Final = regex("_pocl_kernel_(.+)_workgroup")
#: Of these, what PoCL since version 7.2 links itself.
_OBJECT: Final = ".o"
_BITCODE: Final = "program.bc"
#: What alone makes no program.
_NO_PROGRAM: Final = frozenset({"build.log", "last_accessed"})


class Programs(Store):
    """A folder for each program, with its bitcode and the native code of its kernels."""

    forms = ("pocl-entry/1",)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse what needs directory handles where there are none."""
        return REFUSALS

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield programs as entries; failed builds, temporaries and uncached programs as orphans.

        With ``contents=False`` the kernels of a program with a shortened kernel name are unknown: only its files hold
        the whole name.
        """
        for leaf in self._tree(root).scan():
            yield from self._found(root, leaf, contents=contents)

    def searched(self, root: Root, selection: Selection) -> Iterator[Found]:
        """Look for a kernel by the folders it has in programs; only programs with shortened names are read."""
        pattern = selection.kernel_pattern
        if pattern is None:
            yield from self.scan(root)
            return
        prefix = pocl_names.kept_part(selection.kernel_prefix)
        shortened = f"(?={pocl_names.SHORTENED.pattern}\\Z){re.escape(prefix)}.*"
        child = regex(f"(?:{pattern.pattern})|(?s:{shortened})", pattern.flags)
        for leaf in self._tree(root).holding(child):
            yield from self._found(root, leaf, contents=True)

    def counted(self, root: Root) -> Iterator[Counted]:
        """Yield whole programs only weighed."""
        for found in self._tree(root).weigh(hollow=_NO_PROGRAM):
            if isinstance(found, Group):
                yield from bulk(found)
            else:
                yield from self._found(root, found, contents=False)

    def _found(self, root: Root, leaf: Leaf | Problem, *, contents: bool) -> Iterator[Found]:
        """Yield what a leaf is, and a problem for each of its files that should have been read and could not."""
        unread: dict[str, LayerError] = {}
        yield leaf if isinstance(leaf, Problem) else self._describe(root, leaf, unread, contents=contents)
        for key, error in unread.items():
            yield Problem(root.path / key, "unreadable", error.message)

    def _describe(self, root: Root, leaf: Leaf, unread: dict[str, LayerError], *, contents: bool) -> Removable:
        if leaf.stray is not None:
            return leaf.orphan(root.path)
        paths = [member.path for member in leaf.members]
        if not any(path not in _NO_PROGRAM for path in paths):
            return leaf.orphan(root.path, "a build that failed" if paths else "an empty program folder")
        variants: dict[str, list[str]] = {}
        for match in map(_VARIANT.fullmatch, paths):
            if match is not None:
                variants.setdefault(match["kernel"], []).append(match["variant"])
        names = _kernel_names(paths, partial(self._content, root, leaf, unread) if contents else _unread)
        # Only kernels that were launched have a folder: a program never launched names none.
        kernels = sorted(name for name in names.values() if name is not None)
        program, used = leaf.member("program.bc"), leaf.member("last_accessed")
        return Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            files=len(leaf.members),
            created=None if program is None else program.modified,
            modified=leaf.modified,
            used=None if used is None else used.modified,
            # A part of the names would make the program look as if it had no other kernel.
            kernels=tuple(kernels) if kernels and len(kernels) == len(names) else None,
            detail={
                names[folder] or folder: " ".join(sorted(set(found))) for folder, found in sorted(variants.items())
            },
            mark=leaf.mark,
        )

    def _content(self, root: Root, leaf: Leaf, unread: dict[str, LayerError], path: str) -> bytes | None:
        """Read a file of a program; ``None`` where it is not there, or cannot be read, which is noted."""
        try:
            return self._tree(root).read_file(leaf.key, path)
        except LayerError as error:
            unread[f"{leaf.key}/{path}"] = error
            return None

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Tell by the names of programs and temporaries."""
        return self._tree(root).shape.claims(parts)

    def _tree(self, root: Root) -> Tree:
        own = root.path.name == root.role
        return Tree(self.name, root.path, _OWN if own else _BEARING if "pocl" in root.path.name.lower() else _NAMED)

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Tell by the pattern of entries."""
        return _NAMED.accepts(key)

    def read(self, root: Root, key: str) -> Artifact | None:
        """Read a program folder as a deterministic tar, temporaries left out; one without a program is a miss.

        Raises :class:`Damaged` for what no PoCL could use: a program that is being built is not whole yet.
        """
        members = self._tree(root).read_members(key)
        if members is None:
            return None
        kept = {path: data for path, data in members.items() if not _is_temporary(path) and path != "build.log"}
        _demand_whole(self.name, kept, key)
        if not kept.keys() - _NO_PROGRAM:
            return None
        kernels = sorted(name or folder for folder, name in _kernel_names(kept, kept.get).items())
        return Artifact(self.name, key, self.forms[0], pack(kept), {"kernels": " ".join(kernels)})

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Place a program folder whole; PoCL tests only whether files exist, so each is checked here."""
        try:
            members = unpack(artifact.data)
        except ValueError as error:
            raise Damaged(self.name, str(error), key) from error
        if not members.keys() - _NO_PROGRAM:
            raise Damaged(self.name, "the artifact holds no program", key)
        for path in members:
            if not _MEMBERS.fullmatch(path):
                raise Damaged(self.name, f"{path!r} is no file of a PoCL program", key)
        _demand_whole(self.name, members, key)
        tree = self._tree(root)
        if (
            replace
            and (users := using(LIBRARIES, processes=self.environment.processes)) != ()
            and tree.standing(key) not in (None, members)
        ):
            raise Busy(
                self.name,
                f"is not replaced while PoCL is in use by {spell(users, processes=self.environment.processes)}",
                key,
            )
        tree.write_members(key, members, replace=replace)

    # ------------------------------------------------------------------ clear

    def idle_gate(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Leave alone what a live compile may be using, and the programs that a live process may hold.

        A program whose file vanishes under it fails or, before PoCL 7, aborts. A process that holds a built program
        takes its binary from the entry when it is first asked for it; PoCL 3 crashes in a build from a binary without
        bitcode. Each build of a program updates ``last_accessed``, so a process holds no entry that was last
        changed before the process started. Where no process of this user has PoCL loaded, nothing is in use.
        """
        processes = self.environment.processes
        users = using(LIBRARIES, processes=processes)
        running = {pid: age_of(pid, processes=processes) for pid in users or ()}
        now = self.environment.clock()
        # Processes of other machines do not show here.
        shared = lru_cache(maxsize=None)(partial(network_file_system, mounts=self.environment.mounts))
        for target in targets:
            if users == () and shared(target.root) is not None:
                users = None
            rest = ENTRY_REST if isinstance(target, Entry) else ORPHAN_REST
            age = now - (target.modified or now)
            if users == () or (isinstance(target, Orphan) and not target.idle_only):
                yield target, None
                continue
            named = partial(spell, processes=processes)
            holders = tuple(pid for pid, seconds in running.items() if seconds is None or age <= seconds + _CLOCK_ERROR)
            because = None
            if _LEVELS[0].fullmatch(target.key):
                # However old it is, a program may be about to make a folder in it.
                because = f"PoCL is in use by {named(users)}, which may be about to build in it"
            elif age <= rest:
                because = f"changed {max(0, age):.0f} s ago, and PoCL is in use by {named(users)}"
            elif holders and (isinstance(target, Entry) or target.key.startswith(_UNCACHED)):
                # It cannot be known which of them built it.
                because = f"may be held by {named(holders)}, which ran when it was last used; purge again after its end"
            yield target, because

    def marked(
        self, root: Root, mark: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Removable, str]]:
        """Look for the mark among the names in the bitcode, and among those in the log of a build that failed.

        A kernel launched in a new work-group shape after its program was removed leaves a folder without bitcode.
        """
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem) or leaf.modified < since:
                continue
            if leaf.stray is not None:
                # The source of a build that failed in the preprocessor.
                if (found := mark.search(leaf.key.encode())) is not None:
                    yield leaf.orphan(root.path), found[0].decode()
                continue
            found = mark.search(b"".join(tree.read_file(leaf.key, file) or b"" for file in ("program.bc", "build.log")))
            if found is not None or leaf.key in known:
                yield leaf.entry(self.name, root.path), "" if found is None else found[0].decode()

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Rename programs away, then delete them; the top folder itself always stays."""
        tree = self._tree(root)
        is_unused = partial(self._is_unused, root)
        return tree.remove_unused(targets, is_unused) if is_unused() else tree.remove(targets)

    def _is_unused(self, root: Root) -> bool:
        """Tell whether no program can be using what lies in a root: none of this machine, where no other may."""
        if network_file_system(root.path, mounts=self.environment.mounts) is not None:
            return False
        return using(LIBRARIES, processes=self.environment.processes) == ()

    def plan_everything(self, root: Root) -> ClearPlan | None:
        """Plan every program by its weight, where nothing is in use."""
        if not self._is_unused(root):
            return None
        targets: list[Target] = []
        problems: list[Problem] = []
        for found in self._tree(root).weigh(hollow=_NO_PROGRAM):
            if isinstance(found, Group):
                targets += planned(root.path, found)
            elif isinstance(found, Leaf):
                targets.append(target_of(self._describe(root, found, {}, contents=False)))
            else:
                problems.append(found)
        skipped = tuple(problem.note for problem in problems if problem.stays)
        failed = tuple(problem.note for problem in problems if problem.hides)
        return ClearPlan(self.name, tuple(targets), skipped, failed)

    # ------------------------------------------------------------------ quarantine

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Rename a whole program into quarantine: PoCL compiles it anew."""
        return self._tree(root).set_aside(target, thing)

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Rename a whole program back."""
        users = using(LIBRARIES, processes=self.environment.processes)
        if replace and users != () and self._tree(root).find(thing.key) is not None:
            raise Busy(
                self.name,
                f"is not replaced while PoCL is in use by {spell(users, processes=self.environment.processes)}",
                thing.key,
            )
        self._tree(root).bring_back(thing, replace=replace)

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check the structure of bitcode and native files: PoCL checks nothing, and a bad one fails its program."""
        for found in self.examine(root, deep=False):
            if isinstance(found, Finding):
                yield found

    def examine(self, root: Root, *, deep: bool) -> Iterator[Finding | Unverified]:
        """Verify; ``deep`` also has ``llvm-dis`` read the bitcode. No tool can check machine code."""
        tree = self._tree(root)
        natives, programs = 0, []
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield self.told(root, leaf)
                continue
            if leaf.stray is not None:
                continue
            unread: dict[str, LayerError] = {}
            damage = dict(self._damage(tree, leaf, unread))
            for path, message in damage.items():
                yield self._damaged(root, leaf, path, message)
            for path, error in unread.items():
                yield self.unreadable(root, f"{leaf.key}/{path}", error)
            whole = [member.path for member in leaf.members if member.path not in damage.keys() | unread.keys()]
            natives += sum(map(_is_native, whole))
            if _BITCODE in whole:
                programs.append(leaf)
        yield Unverified(self.name, "machine code of", natives, "native file")
        if deep:
            yield from self._examined_by_llvm(root, tree, programs)
        else:
            remedy = "--deep checks them with llvm-dis"
            yield Unverified(self.name, "bitcode records of", len(programs), "program", remedy)

    def _damage(self, tree: Tree, leaf: Leaf, unread: dict[str, LayerError]) -> Iterator[tuple[str, str]]:
        """Yield the damaged files of a program, each with what is wrong; note those that cannot be read."""
        contents: dict[str, bytes] = {}
        for member in leaf.members:
            if member.path == _BITCODE or _is_native(member.path):
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
        yield from _damage_among(contents)

    def _examined_by_llvm(self, root: Root, tree: Tree, programs: list[Leaf]) -> Iterator[Finding | Unverified]:
        from cachectl.layers.host.llvm_tools import Disassemblers, in_parallel

        tools = Disassemblers(self.environment)
        unread: Counter[str] = Counter()

        def with_tools() -> Iterator[tuple[Leaf, bytes, Disassembler]]:
            for leaf in programs:
                data = tree.read_file(leaf.key, _BITCODE) or b""
                release = bitcode.llvm_release(data)
                tool = None if release is None else tools.of(release)
                if tool is not None:
                    yield leaf, data, tool
                elif release is None:
                    unread[f"not written by a release of LLVM, but by {bitcode.producer(data)}"] += 1
                else:
                    unread[f"no llvm-dis of LLVM {release} or newer was found; install the package llvm-{release}"] += 1

        for (leaf, _, tool), readable in in_parallel(lambda item: item[2].reads(item[1]), with_tools()):
            if readable is None:
                unread[f"llvm-dis {tool.release} did not end in a minute"] += 1
            elif not readable:
                yield self._damaged(root, leaf, _BITCODE, f"llvm-dis {tool.release} cannot read it")
        for reason, count in unread.items():
            yield Unverified(self.name, "bitcode records of", count, "program", reason)

    def _damaged(self, root: Root, leaf: Leaf, path: str, message: str) -> Finding:
        severity = Severity.FAILS
        if path.endswith(_OBJECT):
            # PoCL links these itself. It compiles the kernel again, once, if it cannot.
            severity, message = Severity.HEALS, f"{message}; PoCL compiles the kernel again"
        fix = f"cachectl purge pocl --key {leaf.key}"
        thing = leaf.entry(self.name, root.path)
        return Finding(self.name, root.path, leaf.key, severity, "magic", f"{path}: {message}", fix, thing)


class PoclKernels(Layer):
    """Programs and work-group functions that PoCL has compiled."""

    name = "pocl"
    title = "PoCL kernel cache"
    failure_mark = regex(f"tempfile_{_DRAWN}")
    on_network = Hazard(
        Severity.HARMLESS,
        "every lookup goes over the network, and some builds of PoCL load what another kind of processor compiled",
    )
    among_ranks = Hazard(
        Severity.RISKS,
        "PoCL before 6.0 removes a program before it replaces it, so those that build it at once may not find it",
    )
    when_closed = Hazard(Severity.FAILS, "PoCL can build no program")
    store = Programs()

    # ------------------------------------------------------------------ where and whether

    def roots(self) -> tuple[Root, ...]:
        """Resolve as PoCL does when its first device is asked for.

        ``POCL_CACHE_DIR`` serves both modes as it stands; every other rule has a leaf for each.
        """
        environment = self.environment
        named = environment.get("POCL_CACHE_DIR")
        if named is not None:
            return (Root(environment.absolute(named), Scope.USER, "POCL_CACHE_DIR", "kcache"),) if named else ()
        if environment.platform == "win32":
            return self._windows_roots()
        xdg, home = environment.get("XDG_CACHE_HOME"), environment.get("HOME")
        if xdg:
            base, source = environment.absolute(xdg) / "pocl", "XDG_CACHE_HOME"
        elif home is not None:
            base, source = environment.absolute(home + "/.cache/pocl"), "default (HOME)"
        else:
            base, source = Path("/tmp/pocl"), "default (HOME is not set)"  # noqa: S108 - PoCL's own rule
        return tuple(Root(base / leaf, Scope.USER, source, leaf) for leaf in ("kcache", "uncached"))

    def _windows_roots(self) -> tuple[Root, ...]:
        for variable in ("LOCALAPPDATA", "TEMP"):
            value = self.environment.get(variable)
            if value:
                return (Root(Path(value, "pocl"), Scope.USER, variable, "kcache"),)
        return ()

    def _switched_on(self) -> bool | None:
        value = self.environment.get("POCL_KERNEL_CACHE")
        return None if value is None else value.startswith("1")

    def state(self) -> State:
        """Judge the variables: only a value that begins with 1 means on."""
        environment = self.environment
        if environment.get("POCL_CACHE_DIR") == "":
            return State(Condition.DISABLED, "POCL_CACHE_DIR is set but empty: PoCL finds no device; unset it")
        if self._switched_on() is False:
            value = environment.get("POCL_KERNEL_CACHE")
            hint = "" if value == "0" else " (only a value that begins with 1 means on)"
            return State(Condition.DISABLED, f"POCL_KERNEL_CACHE={value}{hint}")
        if "PoCL" not in opencl_drivers(environment) and not any(root.exists for root in self.roots()):
            return State(Condition.ABSENT, "no PoCL driver is registered here, and none has left a cache")
        return State(Condition.ENABLED, "on by default" if self._switched_on() is None else "POCL_KERNEL_CACHE=1")

    def diagnose(self) -> Iterator[Finding]:
        """Yield what is wrong with the variables."""
        yield from self._relative()
        value = self.environment.get("POCL_KERNEL_CACHE")
        if value is not None and not self._switched_on():
            if strtobool(value) is False:
                yield off(self, "POCL_KERNEL_CACHE")
            else:
                outcome = "switches the cache off: only a value that begins with 1 means on"
                yield misread(self, "POCL_KERNEL_CACHE", Severity.RECOMPILES, outcome, "export POCL_KERNEL_CACHE=1")

    def _relative(self) -> Iterator[Finding]:
        variable = "XDG_CACHE_HOME" if self.environment.get("POCL_CACHE_DIR") is None else "POCL_CACHE_DIR"
        value = self.environment.get(variable)
        if value == "" and variable == "POCL_CACHE_DIR":
            yield misread(self, variable, Severity.FAILS, "leaves PoCL without a device")
        elif value and self.environment.platform != "win32" and not Path(value).is_absolute():
            outcome = "is not absolute: PoCL makes a cache of its own in every folder it is started from"
            fix = f"export {variable}={shlex.quote(str(self.environment.absolute(value)))}"
            yield misread(self, variable, Severity.RECOMPILES, outcome, fix)

    def switched(self, *, on: bool) -> Switch:
        """Give the variable, which PoCL reads once, when its first device is asked for."""
        variables = {"POCL_KERNEL_CACHE": "1" if on else "0"}
        return Switch(self.name, variables, latches=LIBRARIES, salts=LIBRARIES, platforms=_PLATFORMS)

    def relocate(self, folder: Path) -> Switch:
        """Give PoCL's own variable; the folder is made by PoCL."""
        return Switch(self.name, {"POCL_CACHE_DIR": str(folder / "pocl")}, latches=LIBRARIES)

    def lacking(self) -> tuple[Root, ...]:
        """Name the folder that PoCL made when it started, and that somebody has removed under it.

        Without it every later build of a running program fails.
        """
        lacking = [root for root in self.roots() if not is_there(root.path)]
        if not lacking:
            return ()
        needed = {root.path for root in self._roots_of_programs()}
        return tuple(root for root in lacking if root.path in needed)

    def _roots_of_programs(self) -> Iterator[Root]:
        """Yield the roots that running programs keep entries in, by the variables they were started with."""
        processes = self.environment.processes
        for number in using(LIBRARIES, processes=processes) or ():
            variables = first_variables(number, processes=processes)
            if variables is not None:
                program = PoclKernels(replace(self.environment, variables=variables))
                role = "uncached" if program._switched_on() is False else "kcache"
                roots = program.roots()
                yield from (root for root in roots if root.role == role or len(roots) == 1)


def _unread(path: str) -> bytes | None:  # noqa: ARG001 - the signature of a reader
    return None


def _kernel_names(paths: Iterable[str], content: Callable[[str], bytes | None]) -> dict[str, str | None]:
    """Map the kernel folders of a program to the kernels' names, ``None`` where its files do not give the name.

    PoCL shortens long names. Native files hold them whole, as ``_pocl_kernel_NAME_workgroup``
    (``lib/llvmopencl/Workgroup.cc``), and so does the bitcode, which takes longer to read.
    """
    names: dict[str, str | None] = {}
    natives: dict[str, list[str]] = {}
    for match in map(_VARIANT.fullmatch, paths):
        if match is not None:
            folder = match["kernel"]
            names[folder] = None if pocl_names.SHORTENED.fullmatch(folder) else folder
            if match["file"].endswith(_NATIVE):
                natives.setdefault(folder, []).append(match[0])
    for folder in [folder for folder, name in names.items() if name is None]:
        found = (pocl_names.whole_name(folder, _launched(content(path))) for path in natives.get(folder, ()))
        names[folder] = next(filter(None, found), None)
    if None in names.values():
        functions = bitcode.function_names(content("program.bc") or b"")
        return {folder: name or pocl_names.whole_name(folder, functions) for folder, name in names.items()}
    return names


def _launched(data: bytes | None) -> Iterator[str]:
    """Yield the kernels that a native file holds work-group functions of."""
    native = elf.read_elf(data or b"")
    for match in map(_WORK_GROUP.fullmatch, () if native is None else native.symbols()):
        if match is not None:
            yield match[1]


def _is_temporary(path: str) -> bool:
    """Tell whether a file is a compile's own; a kernel may have a name that ends like one of these."""
    variant = _VARIANT.fullmatch(path)
    finished = variant is not None and variant["file"] == f"{variant['kernel']}.so"
    return not finished and _TEMPORARY.fullmatch(path) is not None


def _is_native(path: str) -> bool:
    return path.endswith(_NATIVE) and _VARIANT.fullmatch(path) is not None


def _demand_whole(layer: str, contents: Mapping[str, bytes], key: str) -> None:
    """Raise :class:`Damaged` for the first file of a program that is not whole."""
    for path, message in _damage_among(contents):
        raise Damaged(layer, f"{path}: {message}", key)


def _damage_among(contents: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield the damaged files of a program, each with what is wrong, as far as its name says what it is."""
    functions: frozenset[str] = frozenset()
    if _BITCODE in contents:
        wrong, functions = bitcode.examine(contents[_BITCODE])
        if wrong is not None:
            yield _BITCODE, wrong
    unnamed: set[str] = set()
    for path in filter(_is_native, contents):
        match = _VARIANT.fullmatch(path)
        # A shortened name holds a dot or a blank, as no kernel's name does.
        kernel = "" if match is None or re.search("[. ]", match["kernel"]) else match["kernel"]
        if (wrong := _native_complaint(contents[path], kernel)) is not None:
            yield path, wrong
        elif kernel and functions and kernel not in functions:
            unnamed.add(kernel)
    if unnamed:
        yield _BITCODE, f"has no function of the name {' or '.join(sorted(unnamed))}, which was launched"


def _native_complaint(data: bytes, kernel: str) -> str | None:
    """Return what is wrong with a native file; ``kernel`` is empty where its name is not known."""
    if (wrong := elf_checks.complaint(data)) is not None:
        return wrong
    found = elf.read_elf(data)
    # ``_pocl_kernel_NAME_workgroup``, perhaps with more on both ends (``lib/llvmopencl/Workgroup.cc``).
    if found is None or not any(f"{kernel}_workgroup" in symbol for symbol in found.symbols()):
        return f"holds no work-group function of {kernel or 'a kernel'}"
    return None
