"""The layer ``cuda``: the ComputeCache that the CUDA JIT and NVIDIA's OpenCL share.

Sources: the CUDA programming guide (variables), and what driver 580.159.04 did on an H200 (everything else;
the format is in :mod:`cachectl.layers.formats.compute_cache`).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import Busy, Damaged, LayerError, Unreachable
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    Condition,
    Entry,
    Finding,
    Found,
    Hazard,
    Housekeeping,
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
)
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import module, regex
from cachectl.layers.base.store import Store, counting, remove_counted
from cachectl.layers.base.switches import first_place, misread, off
from cachectl.layers.disk.atomic import overwrite
from cachectl.layers.disk.handles import opened_root, status_of
from cachectl.layers.disk.locks import record_lock
from cachectl.layers.disk.plain import read_locked
from cachectl.layers.disk.presence import means_no_file
from cachectl.layers.host.drivers import opencl_drivers
from cachectl.layers.host.processes import spell, using
from cachectl.layers.stores.tree import REFUSALS, Leaf, Shape, Tree

if TYPE_CHECKING:
    from cachectl.layers.formats import compute_cache
else:
    compute_cache = module("cachectl.layers.formats.compute_cache")

LIBRARIES: Final = ("libcuda.so", "libnvidia-opencl.so")
_OPENCL: Final = ("libnvidia-opencl.so",)
_PLATFORMS: Final = ("NVIDIA CUDA",)
INDEX: Final = "index"
_DIGIT: Final = regex("[0-9a-f]")
_SHAPE: Final = Shape((_DIGIT, _DIGIT, regex("[0-9a-f]{14}")), folders=False)
_INDEX: Final = Shape((regex(INDEX),), folders=False)
#: Four million entries: a longer one cannot be true.
_LARGEST_INDEX: Final = 1 << 26
_KERNEL_MODULE: Final = Path("/proc/driver/nvidia")
#: The driver's own limit in bytes, on a desktop or a server, and the highest that can be set.
_DEFAULT_CAP: Final = 1 << 30
_HIGHEST_CAP: Final = 1 << 32
#: From this part of the limit on, the driver is about to drop entries.
_NEARLY: Final = 0.9
#: A size as the driver reads it: units, and whatever else follows the digits, are passed over.
_LIMIT: Final = regex(r"\s*[+-]?\d{1,18}", re.ASCII)
_PLAIN_LIMIT: Final = regex(r"\s*[+-]?\d+\s*", re.ASCII)


class ComputeCache(Store):
    """One file for each entry, two levels deep, and an index that the driver keeps under a lock."""

    forms = ("cuda-entry/65",)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse what needs directory handles where there are none."""
        return REFUSALS

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield entries by name and header; files of another format version are opaque."""
        tree = self._tree(root)
        index = None
        try:
            index = _read_index_file(root)
        except OSError as error:
            yield Problem(root.path / INDEX, "unreadable", f"cannot be read: {error.strerror}")
        for leaf in tree.scan(head=compute_cache.HEADER.size):
            if isinstance(leaf, Problem):
                yield leaf
            elif leaf.stray is not None:
                yield leaf.orphan(root.path)
            else:
                yield from self._describe(root, tree, leaf, index, contents=contents)
        if index is not None:
            if compute_cache.read_index(index) is None:
                yield Problem(root.path / INDEX, "index", "is not whole")
            yield Housekeeping(INDEX, root.path, len(index))

    def _describe(self, root: Root, tree: Tree, leaf: Leaf, index: bytes | None, *, contents: bool) -> Iterator[Found]:
        header = compute_cache.read_header(leaf.head)
        if header is None or not header.known:
            # A file too short for a header, or of another version, is the cache's only if its index says so.
            listed = None if index is None else compute_cache.read_index(index)
            known = listed is not None and compute_cache.identifier_of(leaf.key) in dict(listed.records)
            if not known and not (index is not None and compute_cache.vouches(index, leaf.head)):
                yield Problem(
                    root.path / leaf.key, "unrecognised", "has the name of an entry but not its format; left alone"
                )
                return
        if header is None or (header.known and header.file_size != leaf.bytes):
            yield Problem(root.path / leaf.key, "damaged", f"is {leaf.bytes} bytes long, which its header does not say")
        whole = header is not None and header.known and header.file_size == leaf.bytes
        key = None
        if whole and contents and header is not None:
            data = tree.read_file(leaf.key, limit=compute_cache.HEADER.size + header.key_length)
            key = None if data is None else compute_cache.key_of(data)
        opaque = header is not None and not header.known
        yield Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            files=1,
            modified=leaf.modified,
            kernels=None if key is None else compute_cache.kernels(key),
            device=None if key is None else compute_cache.device(key),
            versions={} if key is None else compute_cache.driver(key),
            detail={"format": "unknown"} if opaque else {} if key is None else {"half": compute_cache.half(key)},
            mark=leaf.mark,
        )

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Tell by the names of entries and index."""
        del root
        return _SHAPE.claims(parts) or parts == (INDEX,)

    def _tree(self, root: Root, handle: int | None = None) -> Tree:
        return Tree(self.name, root.path, _SHAPE, handle)

    # ------------------------------------------------------------------ get and put

    def is_key(self, key: str) -> bool:
        """Tell by the pattern of entries."""
        return _SHAPE.accepts(key)

    def read(self, root: Root, key: str) -> Artifact | None:
        """Read an entry file as it stands, header included."""
        data = self._tree(root).read(key)
        if data is None:
            return None
        text = compute_cache.key_of(data)
        if text is None:
            raise Damaged(self.name, compute_cache.complaint(key, data) or "cannot be read", root.path / key)
        named = {"kernels": " ".join(compute_cache.kernels(text) or ()), "device": compute_cache.device(text) or ""}
        return Artifact(self.name, key, self.forms[0], data, {**named, **compute_cache.driver(text)})

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Place an entry whose name and checksum hold, and count it in the index.

        Where there is no index, or an empty one, the driver drops every entry the next time it stores one.
        """
        if complaint := compute_cache.complaint(key, artifact.data):
            raise Damaged(self.name, complaint, key)
        with self._counting(root):
            self._tree(root).write(key, artifact.data, replace=replace, file_mode=0o644)

    # ------------------------------------------------------------------ clear

    def marked(
        self, root: Root, mark: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Removable, str]]:
        """Look for the mark in the keys: a front end's holds the source, a back end's names its constants."""
        del known
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem) or leaf.stray is not None or leaf.modified < since:
                continue
            key = compute_cache.key_of(tree.read_file(leaf.key) or b"")
            found = None if key is None else mark.search(key)
            if found is not None:
                yield leaf.entry(self.name, root.path), found[0].decode()

    def lock_files(self, root: Root, keys: Iterable[str]) -> Iterable[Path]:
        """Name the index, which the driver locks."""
        del keys
        return (root.path / INDEX,)

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Remove entry files, then take them out of the index, so that the driver does not count ghosts."""
        idle = using(LIBRARIES, processes=self.environment.processes) == ()
        remove = partial(self._tree(root).remove, targets, tidy=idle)
        return remove_counted(self.name, self._counting(root), lambda _: remove())

    @contextmanager
    def _counting(self, root: Root) -> Iterator[None]:
        """Hold the driver's own lock around a change, then make the index list exactly the entries there are.

        That is done also where the change fails, which may have got halfway. Raises :class:`Unsettled` where only the
        counting fails. Entries that the index lists keep their order, which is the order of eviction; others follow by
        age. It is written over in place, then shortened: in between it is too long, which the driver takes. What is no
        index of the known version is left alone.
        """
        path = root.path / INDEX
        with ExitStack() as stack:
            folder = stack.enter_context(self._opened(root))
            handle = None
            if folder is not None and self._has_index(root, folder):
                lock = record_lock(self.name, path, folder=folder, patience=self.environment.patience, create=False)
                handle = stack.enter_context(lock)
            stack.enter_context(counting(self.name, path, partial(self._recount, root, folder, handle)))
            yield

    @contextmanager
    def _opened(self, root: Root) -> Iterator[int | None]:
        """Open the root; ``None`` where there is none."""
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(opened_root(root.path))
            except OSError as error:
                raise Unreachable(self.name, f"cannot be read: {error.strerror}", root.path) from error
            yield folder

    def _has_index(self, root: Root, folder: int) -> bool:
        try:
            return status_of(folder, INDEX) is not None
        except OSError as error:
            raise Unreachable(self.name, f"cannot be read: {error.strerror}", root.path / INDEX) from error

    def _recount(self, root: Root, folder: int | None, handle: int | None) -> None:
        """Write the index, which is open and locked, or made where there is none and an entry to list.

        ``folder`` is the open root, or ``None`` where there was none before the change.
        """
        if folder is None:
            with self._opened(root) as made:
                if made is not None:
                    self._recount(root, made, handle)
        elif handle is not None:
            self._count_anew(root, folder, handle)
        elif self._records(root, folder, None):
            path = root.path / INDEX
            with record_lock(self.name, path, folder=folder, patience=self.environment.patience) as created:
                self._count_anew(root, folder, created)

    def _count_anew(self, root: Root, folder: int, handle: int) -> None:
        old = os.pread(handle, min(os.fstat(handle).st_size, _LARGEST_INDEX), 0)
        if old and not compute_cache.is_index(old):
            return
        new = compute_cache.write_index(self._records(root, folder, compute_cache.read_index(old)))
        if new != old:
            overwrite(handle, old, new)

    def _records(self, root: Root, folder: int, index: compute_cache.Index | None) -> list[tuple[int, int]]:
        """Return what the index in the open root is to list.

        It keeps its records of entries that cannot be looked at now.
        """
        old = () if index is None else index.records
        sizes: dict[int, int] = {}
        changes: dict[int, int] = {}
        unread: list[Path] = []
        tree = self._tree(root, folder)
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                unread += [leaf.path] if leaf.hides else []
                continue
            try:
                is_whole = _whole(tree, leaf)
            except Unreachable:
                unread.append(root.path / leaf.key)
                continue
            if is_whole:
                identifier = compute_cache.identifier_of(leaf.key)
                sizes[identifier], changes[identifier] = leaf.bytes - compute_cache.HEADER.size, leaf.newest
        for identifier, size in old if unread else ():
            path = root.path / compute_cache.key_from(identifier)
            if any(place in (path, *path.parents) for place in unread):
                sizes.setdefault(identifier, size)
        order = {identifier: place for place, (identifier, _) in enumerate(old)}
        listed = sorted(sizes, key=lambda one: (order.get(one, len(order)), changes.get(one, 0)))
        return [(identifier, sizes[identifier]) for identifier in listed]

    # ------------------------------------------------------------------ quarantine

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Rename an entry into quarantine, or an index that is none; then count anew."""
        with self._counting(root):
            because = self._tree_of(root, target.key).set_aside(target, thing)
        if target.key == INDEX:
            with self._counting(root):
                pass
        return because

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Rename an entry back and count it, or an index, as bad as it was."""
        if thing.key == INDEX:
            if (users := using(LIBRARIES, processes=self.environment.processes)) != ():
                raise Busy(self.name, f"the index is not exchanged while {spell(users)} may use it", root.path / INDEX)
            self._tree_of(root, INDEX).bring_back(thing, replace=replace)
            return
        with self._counting(root):
            self._tree_of(root, thing.key).bring_back(thing, replace=replace)

    def _tree_of(self, root: Root, key: str) -> Tree:
        return Tree(self.name, root.path, _INDEX) if key == INDEX else self._tree(root)

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check lengths, name and checksum of every entry, and the index against the files."""
        tree = self._tree(root)
        sizes: dict[int, int] = {}
        unread = False
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                unread = unread or leaf.hides
                yield self.told(root, leaf)
            elif leaf.stray is None:
                try:
                    yield from self._verify_entry(root, tree, leaf, sizes)
                except Unreachable as error:
                    unread = True
                    yield self.unreadable(root, leaf.key, error)
        # The index cannot be compared with what was not read.
        if not unread:
            yield from self._verify_index(root, sizes)

    def _verify_entry(self, root: Root, tree: Tree, leaf: Leaf, sizes: dict[int, int]) -> Iterator[Finding]:
        """Check one entry, and note its size under its identifier. Raises :class:`Unreachable`."""
        try:
            data = tree.read_file(leaf.key)
        except Damaged as error:
            yield self._damaged(root, leaf, error.message)
            return
        if data is None:
            return
        if _whole(tree, leaf):
            sizes[compute_cache.identifier_of(leaf.key)] = len(data) - compute_cache.HEADER.size
        if complaint := compute_cache.complaint(leaf.key, data):
            yield self._damaged(root, leaf, f"{complaint}; the driver compiles it again and rewrites it")

    def _verify_index(self, root: Root, sizes: Mapping[int, int]) -> Iterator[Finding]:
        try:
            index = _read_index_file(root)
        except OSError as error:
            yield self.unreadable(root, INDEX, error)
            return
        if (complaint := _index_complaint(index, sizes)) is not None:
            fix, thing = "nothing: the next put or purge in this layer counts anew", None
            if index and not compute_cache.is_index(index):
                fix = "cachectl verify --quarantine cuda"
                standing = self._tree_of(root, INDEX).find(INDEX)
                thing = None if standing is None else standing.orphan(root.path, complaint)
            yield Finding(self.name, root.path, INDEX, Severity.WASTES, "index", complaint, fix, thing)

    def _damaged(self, root: Root, leaf: Leaf, message: str) -> Finding:
        fix = f"cachectl purge cuda --key {leaf.key}"
        thing = leaf.entry(self.name, root.path)
        return Finding(self.name, root.path, leaf.key, Severity.HARMLESS, "damaged", message, fix, thing)


class CudaComputeCache(Layer):
    """Programs that the CUDA driver has compiled: a front-end and a back-end entry for each OpenCL program."""

    name = "cuda"
    title = "CUDA ComputeCache"
    on_network = Hazard(
        Severity.RISKS, "programs of all nodes wait for one lock on its index, and read entries that are half written"
    )
    among_ranks = Hazard(
        Severity.RISKS, "they wait for one lock on its index, and may miss files that another is just replacing"
    )
    store = ComputeCache()

    # ------------------------------------------------------------------ where and whether

    def roots(self) -> tuple[Root, ...]:
        """Resolve as the driver does when it starts; a relative or empty path leaves it without a cache."""
        environment = self.environment
        named = environment.get("CUDA_CACHE_PATH")
        if named is not None:
            return (Root(Path(named), Scope.USER, "CUDA_CACHE_PATH"),) if Path(named).is_absolute() else ()
        if environment.platform == "win32":
            base = environment.get("APPDATA")
            return (Root(Path(base, "NVIDIA", "ComputeCache"), Scope.USER, "APPDATA"),) if base else ()
        home = environment.get("HOME") or ""
        if not Path(home).is_absolute():
            return ()
        return (Root(Path(home, ".nv", "ComputeCache"), Scope.USER, "default (HOME)"),)

    def state(self) -> State:
        """Judge the variables: only the value 1 switches off, and a path that cannot be used does too."""
        environment = self.environment
        switch, named = environment.get("CUDA_CACHE_DISABLE"), environment.get("CUDA_CACHE_PATH")
        if switch == "1":
            return State(Condition.DISABLED, "CUDA_CACHE_DISABLE=1")
        if named is not None and not Path(named).is_absolute():
            return State(Condition.DISABLED, f"CUDA_CACHE_PATH={named!r} is not absolute: every run compiles")
        limit = environment.get("CUDA_CACHE_MAXSIZE")
        if limit is not None and _read_limit(limit) == 0:
            hint = "" if limit == "0" else " (the driver takes it for 0)"
            return State(Condition.DISABLED, f"CUDA_CACHE_MAXSIZE={limit}: nothing is stored{hint}")
        roots = self.roots()
        if not roots:
            return State(Condition.DISABLED, "HOME is not set to an absolute folder: the driver keeps no cache")
        if not roots[0].exists and not self._driver_is_here():
            return State(Condition.ABSENT, "no NVIDIA driver is present, and none has left a cache")
        ignored = f"; CUDA_CACHE_DISABLE={switch!r} is not 1, so it does nothing" if switch not in (None, "0") else ""
        return State(Condition.ENABLED, f"on by default{ignored}")

    def diagnose(self) -> Iterator[Finding]:
        """Yield what is wrong with the variables, and a cache that is nearly as large as it may be."""
        value = self.environment.get("CUDA_CACHE_DISABLE")
        if value == "1":
            yield off(self, "CUDA_CACHE_DISABLE")
        elif value not in (None, "0"):
            yield misread(self, "CUDA_CACHE_DISABLE", Severity.HARMLESS, "is not 1, so it does nothing")
        yield from self._placeless()
        limit = self.environment.get("CUDA_CACHE_MAXSIZE")
        held = None if limit is None else _read_limit(limit)
        if limit is not None and not _PLAIN_LIMIT.fullmatch(limit):
            outcome = f"is no number of bytes: the driver takes it for {held}"
            yield misread(self, "CUDA_CACHE_MAXSIZE", Severity.RECOMPILES, outcome)
        elif held == 0:
            yield off(self, "CUDA_CACHE_MAXSIZE")
        elif held is None or held > 0:
            yield from self._nearly_full(_DEFAULT_CAP if held is None else min(held, _HIGHEST_CAP))

    def _placeless(self) -> Iterator[Finding]:
        """Find why the driver has no place for a cache."""
        environment = self.environment
        named = environment.get("CUDA_CACHE_PATH")
        if named is not None and not self.roots():
            path = shlex.quote(str(environment.absolute(named)))
            fix = f"export CUDA_CACHE_PATH={path}" if named else None
            outcome = "is not absolute: the driver keeps nothing, and every run compiles"
            yield misread(self, "CUDA_CACHE_PATH", Severity.RECOMPILES, outcome, fix)
        elif not self.roots() and environment.platform != "win32" and self._driver_is_here():
            fix = f"export HOME={shlex.quote(str(environment.home))}"
            yield misread(self, "HOME", Severity.RECOMPILES, "is no absolute folder: the driver keeps nothing", fix)

    def _driver_is_here(self) -> bool:
        return "NVIDIA" in opencl_drivers(self.environment) or _KERNEL_MODULE.exists()

    def _nearly_full(self, limit: int) -> Iterator[Finding]:
        held = 0
        # A root that cannot be read is told of by whoever counts it.
        with suppress(LayerError, OSError):
            held = sum(self.census(root).bytes or 0 for root in self.roots())
        if held < _NEARLY * limit:
            return
        said = "CUDA_CACHE_MAXSIZE" if self.environment.get("CUDA_CACHE_MAXSIZE") else "the driver's default"
        message = f"holds {held:,} of at most {limit:,} bytes ({said}): the driver drops entries to make room"
        fix = f"export CUDA_CACHE_MAXSIZE={min(max(2 * limit, 2 * held), _HIGHEST_CAP)}"
        if limit >= _HIGHEST_CAP:
            fix = f"cachectl prune --max-size {limit // 2} cuda"
        yield Finding(self.name, first_place(self), None, Severity.RECOMPILES, "cap", message, fix)

    def switched(self, *, on: bool) -> Switch:
        """Give the variable, which the driver reads once, when it starts."""
        variables = {} if on else {"CUDA_CACHE_DISABLE": "1"}
        unset = frozenset({"CUDA_CACHE_DISABLE"} if on else ())
        return Switch(self.name, variables, unset, latches=LIBRARIES, salts=_OPENCL, platforms=_PLATFORMS)

    def relocate(self, folder: Path) -> Switch:
        """Give the path; the driver makes the folder."""
        return Switch(self.name, {"CUDA_CACHE_PATH": str(folder / "cuda")}, latches=LIBRARIES)


def _read_limit(value: str) -> int:
    """Read ``CUDA_CACHE_MAXSIZE`` as the driver does: ``1G`` is one byte, and what does not begin with a number 0."""
    match = _LIMIT.match(value)
    return 0 if match is None else int(match[0])


def _whole(tree: Tree, leaf: Leaf) -> bool:
    """Tell whether a file is an entry of the known version, as long as its header says."""
    head = None if leaf.stray is not None else tree.read_file(leaf.key, limit=compute_cache.HEADER.size)
    header = None if head is None else compute_cache.read_header(head)
    return header is not None and header.known and header.file_size == leaf.bytes


def _index_complaint(data: bytes | None, sizes: Mapping[int, int]) -> str | None:
    """Say what the driver makes of an index, given the sizes of the entries that are there."""
    index = compute_cache.read_index(data) if data else None
    if index is None:
        lacking = "is not whole" if data else "is empty or missing"
        return f"the index {lacking}: the driver drops every entry when it next stores one" if sizes or data else None
    return None if dict(index.records) == sizes else "the index does not list the entries that are there"


def _read_index_file(root: Root) -> bytes | None:
    try:
        return read_locked(root.path / INDEX, limit=_LARGEST_INDEX)
    except OSError as error:
        # What is no plain file is no index.
        if means_no_file(error):
            return None
        raise
