"""The store of PyOpenCL's binary cache: a folder of source, binary and info for each program, and a lock file.

Source: ``pyopencl/cache.py`` (layout, lock, header check).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Damaged, LayerError, Unreachable
from cachectl.layers.base.lazy import module, regex
from cachectl.layers.base.store import Part, each_part, unreadable
from cachectl.layers.disk.handles import blocks_of, opened
from cachectl.layers.disk.locks import is_abandoned, presence_lock, remove_abandoned
from cachectl.layers.disk.plain import open_plain, read_plain
from cachectl.layers.disk.presence import means_no_file
from cachectl.layers.formats import source_info
from cachectl.layers.formats.opencl_source import kernel_names
from cachectl.layers.host.drivers import opencl_drivers
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.host.processes import process_names, using
from cachectl.layers.pyopencl import bypassed_on
from cachectl.layers.pytools.dictionaries import Staleness, staleness
from cachectl.layers.stores.archive import unpack
from cachectl.layers.stores.tree import Guard, Leaf, Shape, Tree
from cachectl.layers.stores.tree_store import TreeStore

if TYPE_CHECKING:
    from cachectl.layers.formats import device_binaries
else:
    device_binaries = module("cachectl.layers.formats.device_binaries")

_BASE: Final = regex(r"pyopencl-compiler-cache-v\d+-(?:uid\w+-)?py(?P<python>[\w.]+)")
_FILES: Final = frozenset({"source.cl", "binary", "info"})
_MEMBERS: Final = regex("source\\.cl|binary|info")
#: Without ``info`` PyOpenCL takes an entry for a miss; without ``binary`` alone it fails.
_SHAPE: Final = Shape((_BASE, regex("[0-9a-f]{32}")), folders=True, members=_MEMBERS, first=("info",))
#: PyOpenCL's extension module.
_EXTENSION: Final = ("_cl.",)
#: The age in seconds above which a lock has no running holder: PyOpenCL holds it for milliseconds, and waits a minute.
STALE_LOCK: Final = 120.0
_LOCK: Final = "lock"
#: The largest header that is read, in bytes.
_HEADER: Final = 1 << 26


class ProgramFolders(TreeStore):
    """A folder for each program, below a folder for each Python, which PyOpenCL locks with one lock file."""

    forms = ("pyopencl-binary/2",)
    # PyOpenCL's lock is a file.
    clearing_needs_room = True
    unchecked = "machine code, the records of LLVM bitcode, and binaries whose format only their driver knows"

    def possible_holder(self, lock: Path) -> str | None:
        """Return the words for who may hold a lock; ``None`` where nobody can."""
        owner = _holding_cachectl(lock)
        if owner is not None:
            return owner
        users = using(_EXTENSION, processes=self.environment.processes)
        if users == () and network_file_system(lock, mounts=self.environment.mounts) is not None:
            return "a program of another machine"
        return None if users == () else process_names(users)

    def stale_locks(self, root: facts.Root, *, consulted: bool) -> Iterator[facts.Finding]:
        """Yield a finding for each lock that was held too long; ``consulted`` says whether programs wait for it."""
        for lock in self.locks(root):
            try:
                age = self.environment.clock() - lock.lstat().st_mtime
            except OSError:
                # It was released meanwhile.
                continue
            if age <= STALE_LOCK:
                continue
            outcome = (
                "every build waits a minute for it, and fails" if consulted else "no build of this set-up asks for it"
            )
            severity, fix = facts.Severity.FAILS, f"rm {shlex.quote(str(lock))}"
            if (holder := self.possible_holder(lock)) is None:
                message = f"an abandoned lock, {age:.0f} s old; PyOpenCL holds it for milliseconds"
            else:
                message = f"a lock has been held for {age:.0f} s, perhaps by {holder} (stopped?)"
                severity, fix = facts.Severity.RISKS, f"end {holder}, then: {fix}"
            severity = severity if consulted else facts.Severity.HARMLESS
            key, text = str(lock.relative_to(root.path)), f"{message}: {outcome}"
            yield facts.Finding(self.name, root.path, key, severity, "lock", text, fix)

    # ------------------------------------------------------------------ listing

    def scan(self, root: facts.Root, *, contents: bool = True) -> Iterator[facts.Found]:
        """Yield programs, with a problem for each missing or empty half."""
        tree = self.tree_of(root)
        for leaf in tree.scan():
            yield from self._described(root, tree, leaf, contents=contents)
        yield from self._abandoned_locks(root)

    def _abandoned_locks(self, root: facts.Root) -> Iterator[facts.Orphan]:
        """Yield locks without a holder."""
        for lock in self.locks(root):
            if is_abandoned(lock, partial(self._is_abandoned, lock.parent)):
                with suppress(FileNotFoundError):
                    status = lock.lstat()
                    key, why = str(lock.relative_to(root.path)), "a lock that nobody holds any more"
                    yield facts.Orphan(
                        key, root.path, status.st_size, 1, status.st_mtime, why, idle_only=False, disk=blocks_of(status)
                    )

    @staticmethod
    def locks(root: facts.Root) -> list[Path]:
        """Return the lock files of a root, held or not."""
        found = sorted(root.path.glob(f"*/{_LOCK}"))
        return [lock for lock in found if _BASE.fullmatch(lock.parent.name) and not lock.parent.is_symlink()]

    def _described(
        self, root: facts.Root, tree: Tree, leaf: Leaf | facts.Problem, *, contents: bool
    ) -> Iterator[facts.Found]:
        if isinstance(leaf, facts.Problem):
            yield leaf
            return
        if leaf.orphan_rule is not None or not leaf.members:
            yield leaf.orphan(root.path, None if leaf.orphan_rule is not None else "an empty program folder")
            return
        for half in ("info", "binary"):
            member = leaf.member(half)
            if member is None or not member.bytes:
                yield facts.Problem(
                    root.path / leaf.key, "half", f"{half} is {'missing' if member is None else 'empty'}"
                )
        # The key has only the version of Python.
        python, source = _python_of(leaf.key), None
        stale = staleness(self.environment, "built under", python, lambda _: None, lambda _: True)
        try:
            if contents:
                # PyOpenCL rebuilds an entry whose header has changed, under any Python.
                stale = _staleness_by_headers(tree.read_file(leaf.key, "info") or b"") or stale
                source = tree.read_file(leaf.key, "source.cl")
        except LayerError as error:
            yield facts.Problem(root.path / leaf.key, "unreadable", error.message)
            stale = Staleness(stale=None, because="unknown: the entry could not be read")
        yield replace(
            leaf.entry(self.name, root.path),
            kernels=None if source is None else kernel_names(source),
            versions={"python": python},
            stale=stale.stale,
            stale_because=stale.because,
        )

    def owns(self, root: facts.Root, parts: tuple[str, ...]) -> bool:
        """Compare with the name of the folders of each Python."""
        del root
        return _BASE.fullmatch(parts[0]) is not None

    def tree_of(self, root: facts.Root, key: str = "") -> Tree:
        """Return the tree of programs of a root."""
        del key
        return Tree(self.name, root.path, _SHAPE)

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Compare with the pattern of entries."""
        return _SHAPE.accepts(key)

    def read(self, root: facts.Root, key: str) -> facts.Artifact | None:
        """Read source, binary and info as a deterministic tar."""
        data = self.tree_of(root).read(key)
        return (
            None if data is None else facts.Artifact(self.name, key, self.forms[0], data, {"python": _python_of(key)})
        )

    def files_of(self, key: str, artifact: facts.Artifact) -> Mapping[str, bytes]:
        """Check binary and info, since a damaged one fails its program in every run."""
        try:
            members = unpack(artifact.data)
        except ValueError as error:
            raise Damaged(self.name, str(error), key) from error
        if not {"binary", "info"} <= set(members) <= _FILES:
            raise Damaged(self.name, f"needs binary and info, has {', '.join(sorted(members)) or 'nothing'}", key)
        if (damage := self._damage(members["binary"], members["info"])) is not None:
            raise Damaged(self.name, damage, key)
        return members

    def guard(self, root: facts.Root, key: str) -> Guard:
        """Return PyOpenCL's lock, of which each Python has its own."""
        return partial(self._locked, root, key.partition("/")[0])

    def group(self, key: str) -> Hashable:
        """Return the folder of a Python."""
        return key.partition("/")[0]

    # ------------------------------------------------------------------ clear

    def remove(self, root: facts.Root, targets: tuple[facts.Removable, ...]) -> facts.Outcome:
        """Remove program folders, those of one Python under its lock; never the folder of a Python."""
        locks = [target for target in targets if _is_lock(target.key)]
        parts: list[Part] = [(target.key, (target,), partial(self._remove_lock, root, target)) for target in locks]
        by_base: dict[str, list[facts.Removable]] = {}
        for target in targets:
            if target not in locks:
                by_base.setdefault(target.key.partition("/")[0], []).append(target)
        for base in sorted(by_base):
            planned = tuple(by_base[base])
            guard: Guard = partial(self._locked, root, base) if _BASE.fullmatch(base) else nullcontext
            parts.append((base, planned, partial(self.tree_of(root).remove, planned, guard=guard)))
        return each_part(self.name, parts)

    def _remove_lock(self, root: facts.Root, target: facts.Removable) -> facts.Outcome:
        lock = root.path / target.key
        if remove_abandoned(lock, partial(self._is_abandoned, lock.parent)):
            return facts.Outcome(self.name, bytes_freed=target.bytes)
        reason = "changed since it was planned" if os.path.lexists(lock) else "already gone"
        return facts.Outcome(self.name, skipped=(facts.Note(target.key, reason),))

    @contextmanager
    def _locked(self, root: facts.Root, base: str, handle: int) -> Iterator[None]:
        """Hold PyOpenCL's lock in a folder of the open root, and first remove one without a holder."""
        folder = root.path / base
        abandoned = partial(self._is_abandoned, folder)
        lock_timeout = self.environment.lock_timeout
        with (
            opened(base, handle) as inside,
            presence_lock(self.name, folder / "lock", folder=inside, lock_timeout=lock_timeout, abandoned=abandoned),
        ):
            yield

    def _is_abandoned(self, base: Path, age: float) -> bool:
        """Return whether a lock of this age (seconds) in a folder can have no holder."""
        return (
            age > STALE_LOCK
            and using(_EXTENSION, processes=self.environment.processes) == ()
            and network_file_system(base, mounts=self.environment.mounts) is None
        )

    # ------------------------------------------------------------------ verify

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        """Check that info is the pickle that PyOpenCL stores, and that the binary is whole if its kind is known."""
        tree = self.tree_of(root)
        for leaf in tree.scan():
            if isinstance(leaf, facts.Problem):
                yield self.to_finding(root, leaf)
                continue
            if leaf.orphan_rule is not None or not leaf.members:
                continue
            try:
                binary, info = tree.read_file(leaf.key, "binary") or b"", tree.read_file(leaf.key, "info")
            except Unreachable as error:
                yield self.to_finding(root, unreadable(root.path / leaf.key, error))
                continue
            finding = self._finding(root, leaf, binary, info)
            if finding is not None:
                yield finding

    def _finding(self, root: facts.Root, leaf: Leaf, binary: bytes, info: bytes | None) -> facts.Finding | None:
        """Return what is wrong with a program; its severity says what PyOpenCL does with it."""
        damage = self._damage(binary, info or None)
        if damage is not None:
            fix = f"cachectl purge --damaged {self.name}"
            thing = leaf.entry(self.name, root.path)
            return facts.Finding(self.name, root.path, leaf.key, facts.Severity.FAILS, "damaged", damage, fix, thing)
        if not info:
            message, fix = "info is missing or empty", "nothing: PyOpenCL rebuilds the entry when it is asked for"
            return facts.Finding(self.name, root.path, leaf.key, facts.Severity.HARMLESS, "info", message, fix)
        return None

    def _damage(self, binary: bytes, info: bytes | None) -> str | None:
        if not binary:
            return "binary is missing or empty"
        if (wrong := device_binaries.complaint(binary)) is not None:
            return f"binary: {wrong}"
        if not device_binaries.is_known(binary):
            bypassed = bypassed_on(self.environment)
            used = [driver for driver in opencl_drivers(self.environment) if driver not in bypassed]
            # Every driver here returns known formats, so none of them made this.
            if used and set(used) <= device_binaries.KNOWN_DRIVERS:
                return f"binary: is no program of {' or '.join(used)}"
        return None if info is None else source_info.complaint(info)


def _holding_cachectl(lock: Path) -> str | None:
    """Return the words for the cachectl process that holds a lock; ``None`` where none does. Blocks no process."""
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


def _staleness_by_headers(info: bytes) -> Staleness | None:
    """Return that an entry is stale if a header is missing or has changed, or unknown if a header cannot be read.

    ``None`` where no header has changed. As ``check_dependencies`` does, it compares times, then md5 of the text.
    """
    import hashlib

    for path, changed, digest in source_info.dependencies(info):
        try:
            if os.stat(path).st_mtime == changed:
                continue
            data = read_plain(os.path.realpath(path), limit=_HEADER)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or means_no_file(error):
                return Staleness(stale=True, because=f"includes {path}, which is gone")
            return Staleness(stale=None, because=f"unknown: {path}, which it includes, cannot be read")
        # PyOpenCL reads it as text, with universal newlines.
        text = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if hashlib.md5(text, usedforsecurity=False).hexdigest() != digest:
            return Staleness(stale=True, because=f"includes {path}, which has changed")
    return None
