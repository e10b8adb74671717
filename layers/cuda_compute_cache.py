"""The layer ``cuda``: the ComputeCache that the CUDA JIT and NVIDIA's OpenCL share.

Sources: the CUDA programming guide (variables), and what driver 580.159.04 did on an H200 (everything else;
the format is in :mod:`cachectl.layers.formats.compute_cache`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from cachectl.layers.drivers import opencl_drivers
from cachectl.layers.errors import Damaged
from cachectl.layers.facts import (
    Ability,
    Artifact,
    Condition,
    Entry,
    Finding,
    Found,
    Housekeeping,
    Orphan,
    Outcome,
    Problem,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
)
from cachectl.layers.formats import compute_cache
from cachectl.layers.layer import Layer
from cachectl.layers.processes import using
from cachectl.layers.stores.locks import record_lock
from cachectl.layers.stores.tree import HANDLES, NO_HANDLES, Leaf, Shape, Tree

LIBRARIES: Final = ("libcuda.so", "libnvidia-opencl.so")
INDEX: Final = "index"
_DIGIT: Final = re.compile("[0-9a-f]")
_SHAPE: Final = Shape((_DIGIT, _DIGIT, re.compile("[0-9a-f]{14}")), folders=False)
_KERNEL_MODULE: Final = Path("/proc/driver/nvidia")


class CudaComputeCache(Layer):
    """Programs that the CUDA driver has compiled: a front-end and a back-end entry for each OpenCL program."""

    name = "cuda"
    title = "CUDA ComputeCache"
    forms = ("cuda-entry/65",)

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
        if environment.get("CUDA_CACHE_MAXSIZE") == "0":
            return State(Condition.DISABLED, "CUDA_CACHE_MAXSIZE=0: nothing is stored")
        roots = self.roots()
        if not roots:
            return State(Condition.DISABLED, "HOME is not set to an absolute folder: the driver keeps no cache")
        if not roots[0].exists and "NVIDIA" not in opencl_drivers(environment) and not _KERNEL_MODULE.exists():
            return State(Condition.ABSENT, "no NVIDIA driver is present, and none has left a cache")
        ignored = f"; CUDA_CACHE_DISABLE={switch!r} is not 1, so it does nothing" if switch not in (None, "0") else ""
        return State(Condition.ENABLED, f"on by default{ignored}")

    def switch(self, *, on: bool) -> Switch:
        """Give the variable, which the driver reads once, when it starts."""
        if on:
            return Switch(self.name, unset=frozenset({"CUDA_CACHE_DISABLE"}), latches=LIBRARIES)
        return Switch(self.name, {"CUDA_CACHE_DISABLE": "1"}, latches=LIBRARIES)

    def relocate(self, folder: Path) -> Switch:
        """Give the path; the driver makes the folder."""
        return Switch(self.name, {"CUDA_CACHE_PATH": str(folder / "cuda")}, latches=LIBRARIES)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse what needs directory handles where there are none."""
        return {} if HANDLES else {Ability.PUT: NO_HANDLES, Ability.CLEAR: NO_HANDLES}

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield entries by name and header; files of another format version are opaque."""
        tree = self._tree(root)
        index = _read_index_file(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield leaf
            elif leaf.stray is not None:
                why, idle_only = leaf.stray.why, leaf.stray.idle_only
                yield Orphan(leaf.key, root.path, leaf.bytes, len(leaf.members), leaf.modified, why, idle_only)
            else:
                yield from self._describe(root, tree, leaf, index, contents=contents)
        if index is not None:
            if compute_cache.read_index(index) is None:
                yield Problem(root.path / INDEX, "index", "is not whole; removing it makes the driver count again")
            yield Housekeeping(INDEX, root.path, len(index))

    def _describe(self, root: Root, tree: Tree, leaf: Leaf, index: bytes | None, *, contents: bool) -> Iterator[Found]:
        path = root.path / leaf.key
        head = tree.read_file(leaf.key, limit=compute_cache.HEADER.size)
        if head is None:
            return
        header = compute_cache.read_header(head)
        if header is None:
            yield Problem(path, "damaged", f"is cut short at {len(head)} bytes")
        elif not header.known:
            # Only a cache whose index has the same unknown version vouches for such a file.
            if index is None or index[:4] != head[:4]:
                yield Problem(path, "unrecognised", "has the name of an entry but not its format; left alone")
                return
        elif header.file_size != leaf.bytes:
            yield Problem(path, "damaged", f"is {leaf.bytes} bytes long, its header says {header.file_size}")
        known = header is not None and header.known
        data = tree.read_file(leaf.key, limit=header.file_size) if contents and header is not None and known else None
        key = None if data is None else compute_cache.key_of(data)
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
            detail={"half": compute_cache.half(key)} if key is not None else {} if known else {"format": "unknown"},
        )

    def _tree(self, root: Root) -> Tree:
        return Tree(self.name, root.path, _SHAPE)

    # ------------------------------------------------------------------ get and put

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
        """Place an entry whose name and checksum hold, and count it in the index if there is one.

        The driver hits an entry that the index does not list, but never evicts it.
        """
        if not _SHAPE.accepts(key):
            raise Damaged(self.name, f"{key!r} is not the name of an entry", key)
        if complaint := compute_cache.complaint(key, artifact.data):
            raise Damaged(self.name, complaint, key)
        self._tree(root).write(key, artifact.data, replace=replace, file_mode=0o644)
        record = (compute_cache.identifier_of(key), len(artifact.data) - compute_cache.HEADER.size)
        self._edit_index(root, add=record)

    # ------------------------------------------------------------------ clear

    def mark(self, root: Root, found: Removable) -> tuple[int, ...] | None:
        """Fingerprint a file by size and change."""
        leaf = self._tree(root).find(found.key)
        return None if leaf is None else leaf.mark

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Remove entry files, then take them out of the index, so that the driver does not count ghosts."""
        idle = using(LIBRARIES) == ()
        outcome = self._tree(root).remove(targets, tidy=idle)
        kept = {note.key for note in outcome.skipped + outcome.failed}
        gone = {compute_cache.identifier_of(target.key) for target in targets if target.entries} - {
            compute_cache.identifier_of(key) for key in kept if _SHAPE.accepts(key)
        }
        self._edit_index(root, drop=gone, idle=idle)
        return outcome

    def _edit_index(
        self, root: Root, *, add: tuple[int, int] | None = None, drop: set[int] | None = None, idle: bool = False
    ) -> None:
        """Rewrite the index in place under the driver's own lock.

        It is emptied first: the driver rebuilds an empty index from the files, so a crash between the two
        writes loses nothing. An empty or foreign index is left to the driver.
        """
        path = root.path / INDEX
        if not path.is_file() or path.is_symlink():
            return
        with record_lock(self.name, path, patience=self.environment.patience) as handle:
            index = compute_cache.read_index(os.pread(handle, os.fstat(handle).st_size, 0))
            if index is None or not index.records:
                return
            records = [record for record in index.records if record[0] not in (drop or ())]
            if add is not None and add[0] not in {identifier for identifier, _ in records}:
                records.append(add)
            os.ftruncate(handle, 0)
            if records:
                os.pwrite(handle, compute_cache.write_index(records), 0)
            elif idle:
                with suppress(FileNotFoundError):
                    path.unlink()

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check lengths, name and checksum of every entry, and the index against the files."""
        tree = self._tree(root)
        sizes: dict[int, int] = {}
        for leaf in tree.scan():
            if isinstance(leaf, Problem) or leaf.stray is not None:
                continue
            data = tree.read_file(leaf.key)
            if data is None:
                continue
            sizes[compute_cache.identifier_of(leaf.key)] = len(data) - compute_cache.HEADER.size
            if complaint := compute_cache.complaint(leaf.key, data):
                message = f"{complaint}; the driver compiles it again and rewrites it"
                fix = f"cachectl purge cuda --key {leaf.key}"
                yield Finding(self.name, root.path, leaf.key, Severity.HARMLESS, "damaged", message, fix)
        index = _read_index_file(root)
        records = None if index is None else compute_cache.read_index(index)
        if index is not None and (records is None or (records.records and dict(records.records) != sizes)):
            message = "the index does not match the entries, so the driver miscounts its cap"
            fix = f"end every CUDA program, then remove {root.path / INDEX}: the driver counts again"
            yield Finding(self.name, root.path, None, Severity.WASTES, "index", message, fix)


def _read_index_file(root: Root) -> bytes | None:
    path = root.path / INDEX
    if path.is_symlink():
        return None
    try:
        return path.read_bytes()
    except OSError:
        return None
