"""The layer ``pyopencl``: PyOpenCL's cache of program sources and binaries.

Sources: ``pyopencl/cache.py`` (layout, lock, header check), ``pyopencl/__init__.py`` (when it is bypassed).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.environment import user_cache_folder
from cachectl.layers.base.errors import Damaged, LayerError, Unreachable, not_a_key
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    Condition,
    Counted,
    Entry,
    Finding,
    Foresight,
    Found,
    Hazard,
    Note,
    Orphan,
    Outcome,
    Patch,
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
    When,
)
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import module, regex
from cachectl.layers.base.store import Store, each_part
from cachectl.layers.base.switches import diagnosed, relative_cache_home, switched_off
from cachectl.layers.disk.foresight import closed_because
from cachectl.layers.disk.handles import opened
from cachectl.layers.disk.locks import is_abandoned, presence_lock, remove_abandoned, wait_until_absent
from cachectl.layers.disk.plain import open_plain, read_plain
from cachectl.layers.disk.presence import means_no_file
from cachectl.layers.formats.opencl_source import kernel_names
from cachectl.layers.formats.pickles import Thing, attributes, things, walk
from cachectl.layers.host.drivers import opencl_drivers
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.host.processes import spell, using
from cachectl.layers.pyopencl_invoker import MEMOS, VARIABLE, no_cache_switch
from cachectl.layers.pytools import Staleness, relocate_user_cache, unexamined_python
from cachectl.layers.stores.archive import unpack
from cachectl.layers.stores.tree import REFUSALS, Guard, Leaf, Shape, Tree, bulk
from cachectl.layers.stores.walk import Group

if TYPE_CHECKING:
    from cachectl.layers.formats import device_binaries
else:
    device_binaries = module("cachectl.layers.formats.device_binaries")

#: Platforms whose drivers cache source builds, so that PyOpenCL leaves its own cache alone
#: (``pyopencl/characterize/__init__.py``, ``has_src_build_cache``).
BYPASSED_ON: Final = frozenset({"PoCL", "NVIDIA"})
_BASE: Final = regex(r"pyopencl-compiler-cache-v\d+-(?:uid\w+-)?py(?P<python>[\w.]+)")
_FILES: Final = frozenset({"source.cl", "binary", "info"})
_MEMBERS: Final = regex("source\\.cl|binary|info")
#: Without ``info`` PyOpenCL takes an entry for a miss; without ``binary`` alone it fails.
_SHAPE: Final = Shape((_BASE, regex("[0-9a-f]{32}")), folders=True, members=_MEMBERS, first=("info",))
#: The extension module of PyOpenCL, and the age in seconds from which a lock is no running program's: holders
#: keep it for milliseconds, and give up on another's after a minute.
_EXTENSION: Final = ("_cl.",)
_STALE_LOCK: Final = 120.0
_LOCK: Final = "lock"
#: A header that is larger is none.
_HEADER: Final = 1 << 26


class ProgramFolders(Store):
    """A folder for each program, below one for each Python; PyOpenCL's lock file serves all of one Python."""

    forms = ("pyopencl-binary/2",)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse what needs directory handles where there are none."""
        return REFUSALS

    def possible_holder(self, lock: Path) -> str | None:
        """Name who may hold a lock, however old; ``None`` where surely nobody does, as :meth:`_locked` decides."""
        owner = _holding_cachectl(lock)
        if owner is not None:
            return owner
        users = using(_EXTENSION, processes=self.environment.processes)
        if users == () and network_file_system(lock, mounts=self.environment.mounts) is not None:
            return "a program of another machine"
        return None if users == () else spell(users)

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield programs; one that lacks a half is listed and named as a problem."""
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield leaf
            else:
                yield from self._found(root, tree, leaf, contents=contents)
        yield from self._abandoned_locks(root)

    def counted(self, root: Root) -> Iterator[Counted]:
        """Yield whole programs only weighed."""
        tree = self._tree(root)
        for found in tree.weigh(whole=("info", "binary")):
            if isinstance(found, Group):
                yield from bulk(found, stale=self._staleness(found.folder).stale)
            elif isinstance(found, Problem):
                yield found
            else:
                yield from self._found(root, tree, found, contents=False)
        yield from self._abandoned_locks(root)

    def _abandoned_locks(self, root: Root) -> Iterator[Orphan]:
        """Yield locks that nobody holds any more."""
        for lock in self.locks(root):
            if is_abandoned(lock, partial(self._is_abandoned, lock.parent)):
                with suppress(FileNotFoundError):
                    status = lock.lstat()
                    key, why = str(lock.relative_to(root.path)), "a lock that nobody holds any more"
                    yield Orphan(key, root.path, status.st_size, 1, status.st_mtime, why, idle_only=False)

    @staticmethod
    def locks(root: Root) -> list[Path]:
        """Return the lock files of a root, held or not."""
        found = sorted(root.path.glob(f"*/{_LOCK}"))
        return [lock for lock in found if _BASE.fullmatch(lock.parent.name) and not lock.parent.is_symlink()]

    def _found(self, root: Root, tree: Tree, leaf: Leaf, *, contents: bool) -> Iterator[Found]:
        if leaf.stray is not None or not leaf.members:
            yield leaf.orphan(root.path, None if leaf.stray is not None else "an empty program folder")
        else:
            yield from self._describe(root, tree, leaf, contents=contents)

    def _describe(self, root: Root, tree: Tree, leaf: Leaf, *, contents: bool) -> Iterator[Found]:
        for half in ("info", "binary"):
            member = leaf.member(half)
            if member is None or not member.bytes:
                yield Problem(root.path / leaf.key, "half", f"{half} is {'missing' if member is None else 'empty'}")
        staleness = self._staleness(leaf.key)
        source = None
        try:
            if contents:
                # PyOpenCL under any Python rebuilds an entry whose header has changed.
                staleness = _staleness_by_headers(tree.read_file(leaf.key, "info") or b"") or staleness
                source = tree.read_file(leaf.key, "source.cl")
        except LayerError as error:
            yield Problem(root.path / leaf.key, "unreadable", error.message)
            staleness = Staleness(stale=None, because="unknown: the entry could not be read")
        yield Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            files=len(leaf.members),
            modified=leaf.modified,
            kernels=None if source is None else kernel_names(source),
            versions={"python": _python_of(leaf.key)},
            stale=staleness.stale,
            stale_because=staleness.because,
            mark=leaf.mark,
        )

    def _staleness(self, key: str) -> Staleness:
        """Judge an entry by the Python in its key alone: unknown for a Python that cachectl does not run under."""
        python = _python_of(key)
        if python != self.environment.python:
            return unexamined_python("built under", python, self.environment)
        return Staleness(stale=False)

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Tell by the name of the folder that holds all."""
        del root
        return _BASE.fullmatch(parts[0]) is not None

    def _tree(self, root: Root) -> Tree:
        return Tree(self.name, root.path, _SHAPE)

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Tell by the pattern of entries."""
        return _SHAPE.accepts(key)

    def read(self, root: Root, key: str) -> Artifact | None:
        """Read source, binary and info as a deterministic tar."""
        data = self._tree(root).read(key)
        return None if data is None else Artifact(self.name, key, self.forms[0], data, {"python": _python_of(key)})

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Place a program folder whole, under PyOpenCL's lock: a bad one fails its program for ever."""
        try:
            members = unpack(artifact.data)
        except ValueError as error:
            raise Damaged(self.name, str(error), key) from error
        if not {"binary", "info"} <= set(members) <= _FILES:
            raise Damaged(self.name, f"needs binary and info, has {', '.join(sorted(members)) or 'nothing'}", key)
        damage = self._binary_damage(members["binary"])
        if damage is not None or (complaint := _info_complaint(members["info"])):
            raise Damaged(self.name, str(complaint) if damage is None else damage.message, key)
        self._tree(root).write_members(key, members, replace=replace, guard=self._guard(root, key))

    # ------------------------------------------------------------------ clear

    def marked(
        self, root: Root, mark: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Removable, str]]:
        """Look for the mark in the sources, which PyOpenCL keeps beside the binaries."""
        del known
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem) or leaf.stray is not None or leaf.modified < since:
                continue
            found = mark.search(tree.read_file(leaf.key, "source.cl") or b"")
            if found is not None:
                yield leaf.entry(self.name, root.path), found[0].decode()

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Remove program folders, those of one Python under its lock; the bases stay."""
        locks = [target for target in targets if _is_lock(target.key)]
        parts = [(target.key, partial(self._remove_lock, root, target)) for target in locks]
        by_base: dict[str, list[Target]] = {}
        for target in targets:
            if target not in locks:
                by_base.setdefault(target.key.partition("/")[0], []).append(target)
        parts += [(base, partial(self._remove_from, root, base, tuple(by_base[base]))) for base in sorted(by_base)]
        return each_part(self.name, parts)

    def _remove_lock(self, root: Root, target: Target) -> Outcome:
        lock = root.path / target.key
        if remove_abandoned(lock, partial(self._is_abandoned, lock.parent)):
            return Outcome(self.name, bytes_freed=target.bytes)
        reason = "changed since it was planned" if os.path.lexists(lock) else "already gone"
        return Outcome(self.name, skipped=(Note(target.key, reason),))

    def foresee_removal(self, root: Root, targets: tuple[Target, ...]) -> Foresight:
        """Look at the folder of each Python: without its lock nothing goes."""
        seen = Foresight()
        for base in sorted({target.key.partition("/")[0] for target in targets}):
            planned = tuple(target for target in targets if target.key.partition("/")[0] == base)
            try:
                self._foresee_lock(root, base)
            except LayerError as error:
                seen = seen.plus(Foresight(failed=(Note(base, error.message),)))
            else:
                seen = seen.plus(super().foresee_removal(root, planned))
        return seen

    def foresee_write(self, root: Root, keys: Sequence[str]) -> Mapping[str, LayerError]:
        """Look at the folder of each Python."""
        for base in sorted({key.partition("/")[0] for key in keys}):
            self._foresee_lock(root, base)
        return super().foresee_write(root, keys)

    def _foresee_lock(self, root: Root, base: str) -> None:
        """Raise what taking PyOpenCL's lock in a folder would raise."""
        folder = root.path / base
        if not _BASE.fullmatch(base) or not folder.is_dir():
            return
        if (because := closed_because(folder, "lock")) is not None:
            raise Unreachable(self.name, f"cannot lock: {because}", folder)
        abandoned = partial(self._is_abandoned, folder)
        wait_until_absent(self.name, folder / "lock", patience=self.environment.patience, abandoned=abandoned)

    def _remove_from(self, root: Root, base: str, planned: tuple[Target, ...]) -> Outcome:
        if not _BASE.fullmatch(base):
            return self._tree(root).remove(planned)
        return self._tree(root).remove(planned, guard=partial(self._locked, root, base))

    @contextmanager
    def _locked(self, root: Root, base: str, handle: int) -> Iterator[None]:
        """Hold PyOpenCL's lock in a folder of the open root; one that no living process can hold any more goes."""
        folder = root.path / base
        abandoned = partial(self._is_abandoned, folder)
        patience = self.environment.patience
        with (
            opened(base, handle) as inside,
            presence_lock(self.name, folder / "lock", folder=inside, patience=patience, abandoned=abandoned),
        ):
            yield

    def _is_abandoned(self, base: Path, age: float) -> bool:
        """Tell whether a lock of this age (seconds) in a folder can have no holder any more."""
        return (
            age > _STALE_LOCK
            and using(_EXTENSION, processes=self.environment.processes) == ()
            and network_file_system(base, mounts=self.environment.mounts) is None
        )

    # ------------------------------------------------------------------ quarantine

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Rename a program folder into quarantine, under PyOpenCL's lock."""
        return self._tree(root).set_aside(target, thing, guard=self._guard(root, target.key))

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Rename a program folder back, under PyOpenCL's lock."""
        if not _SHAPE.accepts(thing.key):
            raise not_a_key(self.name, thing.key)
        self._tree(root).bring_back(thing, replace=replace, guard=self._guard(root, thing.key))

    def _guard(self, root: Root, key: str) -> Guard:
        return partial(self._locked, root, key.partition("/")[0])

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check that info is a pickle of what PyOpenCL stores, and the structure of the binary."""
        for found in self.examine(root, deep=False):
            if isinstance(found, Finding):
                yield found

    def examine(self, root: Root, *, deep: bool) -> Iterator[Finding | Unverified]:
        """Verify. No tool can check machine code, or a binary in a format of the driver's own."""
        del deep
        tree = self._tree(root)
        programs, unknown = 0, 0
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield self.told(root, leaf)
                continue
            if leaf.stray is not None or not leaf.members:
                continue
            try:
                binary, info = tree.read_file(leaf.key, "binary") or b"", tree.read_file(leaf.key, "info")
            except Unreachable as error:
                yield self.unreadable(root, leaf.key, error)
                continue
            finding = self._finding(root, leaf, binary, info)
            if finding is not None:
                yield finding
            elif device_binaries.is_known(binary):
                programs += 1
            else:
                unknown += 1
        yield Unverified(self.name, "machine code of", programs, "binary program")
        yield Unverified(self.name, "the whole binary of", unknown, "program", "its format is not known")

    def _finding(self, root: Root, leaf: Leaf, binary: bytes, info: bytes | None) -> Finding | None:
        """Return what is wrong with a program, and what PyOpenCL makes of it."""
        damage = self._binary_damage(binary)
        if damage is None and info and (complaint := _info_complaint(info)) is not None:
            damage = device_binaries.Damage(complaint)
        if damage is not None:
            fix, severity = f"cachectl purge pyopencl --key {leaf.key}", Severity.FAILS
            if damage.runs:
                severity = Severity.RISKS
            thing = leaf.entry(self.name, root.path)
            return Finding(self.name, root.path, leaf.key, severity, "damaged", damage.message, fix, thing)
        if not info:
            message, fix = "info is missing or empty", "nothing: PyOpenCL rebuilds the entry when it is asked for"
            return Finding(self.name, root.path, leaf.key, Severity.HARMLESS, "info", message, fix)
        return None

    def _binary_damage(self, binary: bytes) -> device_binaries.Damage | None:
        if not binary:
            return device_binaries.Damage("binary is missing or empty")
        if (damage := device_binaries.damage(binary)) is not None:
            return device_binaries.Damage(f"binary: {damage.message}", damage.runs)
        if not device_binaries.is_known(binary):
            used = [driver for driver in opencl_drivers(self.environment) if driver not in BYPASSED_ON]
            # Another driver than those here may have made it only where one is here whose formats are not all known.
            if used and set(used) <= device_binaries.KNOWN_DRIVERS:
                return device_binaries.Damage(f"binary: is no program of {' or '.join(used)}")
        return None


class PyOpenCLBinaries(Layer):
    """Programs that PyOpenCL has built from source, with the binaries it read back."""

    name = "pyopencl"
    title = "PyOpenCL program binaries"
    on_network = Hazard(
        Severity.RISKS,
        "its one lock is a file, which a program killed on any node leaves behind; then every build waits a minute "
        "and fails",
    )
    among_ranks = Hazard(
        Severity.RISKS,
        "one lock file serves them all, and if one of them is killed while it holds it, the builds of the others fail",
    )
    when_closed = Hazard(Severity.FAILS, "every build fails, after a minute where its lock cannot be made")
    store = ProgramFolders()

    # ------------------------------------------------------------------ where and whether

    def roots(self) -> tuple[Root, ...]:
        """Return the folder above the per-Python caches; a context's own ``cache_dir`` cannot be known."""
        path, source = user_cache_folder(self.environment, "pyopencl")
        return (Root(path, Scope.USER, source),)

    def state(self) -> State:
        """Judge the variable, then the drivers: on PoCL and NVIDIA this cache is not consulted."""
        if (off := switched_off(self.environment, "pyopencl", (VARIABLE,))) is not None:
            return off
        if self.environment.installed("pyopencl") is None and not self.roots()[0].exists:
            return State(Condition.ABSENT, "pyopencl is not installed here and has left no binaries")
        drivers = opencl_drivers(self.environment)
        bypassed = [driver for driver in drivers if driver in BYPASSED_ON]
        if not drivers:
            return State(Condition.UNKNOWN, "no OpenCL driver is registered here")
        if len(bypassed) == len(drivers):
            return State(Condition.BYPASSED, f"PyOpenCL leaves {' and '.join(bypassed)} to the driver's own cache")
        used = [driver for driver in drivers if driver not in BYPASSED_ON]
        return State(Condition.ENABLED, " ".join(["on for", *used, *(["but not", *bypassed] if bypassed else [])]))

    def switched(self, *, on: bool) -> Switch:
        """Give PyOpenCL's one switch, consulted at every build."""
        return no_cache_switch(self.name, on=on)

    def refresher(self) -> Switch:
        """Let every lookup miss; what is built then is stored over what was there."""
        patch = Patch("pyopencl.cache", None, "retrieve_from_cache", _missing)
        drops = (("pyopencl.tools", "clear_first_arg_caches"),)
        return Switch(self.name, patches=(patch,), memos=MEMOS, drops=drops, takes_effect=When.NOW)

    def relocate(self, folder: Path) -> Switch:
        """Move the user cache folder, which PyOpenCL resolves at every build."""
        return relocate_user_cache(self, folder)

    def diagnose(self) -> Iterator[Finding]:
        """Yield what is wrong with the variables, and locks that outlived their holders."""
        yield from diagnosed(self, "pyopencl", (VARIABLE,))
        yield from relative_cache_home(self)
        for root in self.roots():
            for lock in self.store.locks(root):
                yield from self._stale_lock(root, lock)

    def _stale_lock(self, root: Root, lock: Path) -> Iterator[Finding]:
        try:
            age = self.environment.clock() - lock.lstat().st_mtime
        except OSError:
            # It has been let go.
            return
        if age <= _STALE_LOCK:
            return
        consulted = self.state().condition in (Condition.ENABLED, Condition.UNKNOWN)
        outcome = "every build waits a minute for it, and fails" if consulted else "no build of this set-up asks for it"
        severity, fix = Severity.FAILS, f"rm {shlex.quote(str(lock))}"
        holder = self.store.possible_holder(lock)
        if holder is None:
            message = f"a lock that is {age:.0f} s old has been left behind, since it is held for milliseconds"
        else:
            message = f"a lock has been held for {age:.0f} s, perhaps by {holder} (stopped?)"
            severity, fix = Severity.RISKS, f"end {holder}, then: {fix}"
        severity = severity if consulted else Severity.HARMLESS
        key = str(lock.relative_to(root.path))
        yield Finding(self.name, root.path, key, severity, "lock", f"{message}: {outcome}", fix)


def _holding_cachectl(lock: Path) -> str | None:
    """Name the cachectl that holds a lock now, as the system tells; ``None`` where none does. Asking hinders nobody."""
    with suppress(ImportError, OSError), open(open_plain(lock), "rb") as file:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            match = re.match(rb"cachectl (\d+) ", file.read(300))
            return "another process" if match is None else f"process {int(match[1])}"
    return None


def _is_lock(key: str) -> bool:
    base, _, name = key.partition("/")
    return name == _LOCK and _BASE.fullmatch(base) is not None


def _python_of(key: str) -> str:
    match = _BASE.fullmatch(key.partition("/")[0])
    return "" if match is None else match["python"]


def _source_info(info: bytes) -> dict[str, object] | None:
    """Return the attributes of the pickled ``_SourceInfo``, without unpickling; ``None`` if it is none."""
    try:
        top, length = walk(info)
    except ValueError:
        return None
    if not isinstance(top, Thing) or length != len(info):
        return None
    named = [part for thing in things(top) if thing.kind == "global" for part in thing.items[-1:]]
    return attributes(top) if any(isinstance(part, str) and part.endswith("_SourceInfo") for part in named) else None


def _info_complaint(info: bytes) -> str | None:
    return "info is not the pickle that PyOpenCL stores" if _source_info(info) is None else None


def _dependencies(info: bytes) -> Iterator[tuple[str, float, str]]:
    """Yield the included headers that an entry was built with: path, change (epoch seconds), md5."""
    found = (_source_info(info) or {}).get("dependencies")
    for item in found.items if isinstance(found, Thing) else ():
        if isinstance(item, Thing) and len(item.items) == 3:  # noqa: PLR2004 - path, time, md5
            path, changed, digest = item.items
            if isinstance(path, str) and isinstance(changed, float) and isinstance(digest, str):
                yield path, changed, digest


def _staleness_by_headers(info: bytes) -> Staleness | None:
    """Return that an entry is stale where a header has gone or changed, ``None`` where none has.

    It judges as ``check_dependencies`` does: by time, then by md5 of the text. Of a header that cannot be read it is
    unknown.
    """
    import hashlib

    for path, changed, digest in _dependencies(info):
        try:
            if os.stat(path).st_mtime == changed:
                continue
            data = read_plain(os.path.realpath(path), limit=_HEADER)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or means_no_file(error):
                return Staleness(stale=True, because=f"includes {path}, which is gone")
            return Staleness(stale=None, because=f"unknown: {path}, which it includes, cannot be read")
        # It is read as text there, which turns every end of line into one of Unix.
        text = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if hashlib.md5(text, usedforsecurity=False).hexdigest() != digest:
            return Staleness(stale=True, because=f"includes {path}, which has changed")
    return None


def _missing(lookup: Callable[..., object]) -> Callable[..., object]:
    """Make a lookup that finds nothing."""

    @wraps(lookup)
    def find_nothing(*_: object, **__: object) -> None:
        return None

    return find_nothing
