"""Salted builds: each program is built with a unique constant, so that no cache has an entry for it.

A driver that has started has read its switches, but it cannot hit for a source that was never compiled. The source gets
a constant, and the options a macro, that no other build has. The caches store the name of the constant with the
program, so that the entries of salted builds can be recognized and removed.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import os
import re
import sys
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cachectl.layers.base import processes
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.text import plural
from cachectl.layers.core.entry import Entry
from cachectl.layers.core.layer import Layer, plan_removal
from cachectl.layers.core.root import Root
from cachectl.layers.inside import tagged_builds

SALT = "cachectl_salt"
#: How many seconds the clock of a file server may be behind.
_SLACK = 3600.0


@dataclasses.dataclass(slots=True)
class _Built:
    """One salted build: its program, while it may be in use, and what identifies its entries."""

    #: The name of its constant.
    tag: str
    #: Our own reference, which the driver counts, so that a higher count shows other holders.
    program: Any = None
    traces: frozenset[str] = frozenset()
    done: bool = False
    #: Whether the driver holds the complete binary; if not, it may assemble it from entries that will be removed.
    complete: bool = False
    #: Keys of removed entries, which a launch of the program may recreate.
    keys: set[str] = dataclasses.field(default_factory=set)


class Salting:
    """All salted builds of one process, in all blocks and threads."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex[:16]
        self._armed = False
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._built: dict[str, _Built] = {}
        self._roots: dict[tuple[str, Path], tuple[Layer, Root]] = {}
        #: The names of the platforms that each block salts.
        self._blocks: list[frozenset[str]] = []
        self._since = 0.0
        self._forked = False

    @contextmanager
    def salted(self, platforms: frozenset[str], layers: Iterable[Layer], now: float) -> Iterator[None]:
        """Salt builds for OpenCL platforms; at the end, remove what they stored in ``layers`` unless it is still used.

        Warns of entries that could not be removed.
        """
        with self._lock:
            if not self._armed:
                self._armed = True
                atexit.register(self._end)
                if hasattr(os, "register_at_fork"):
                    os.register_at_fork(after_in_parent=self._note_fork, after_in_child=self._begin_child)
            if not self._built and not self._blocks:
                self._since = now - _SLACK
            for layer in layers:
                with suppress(*FAILURES):
                    for root in layer.roots():
                        self._roots.setdefault((layer.name, root.path), (layer, root))
            self._blocks.append(platforms)
        try:
            yield
        except BaseException as error:
            self._leave(platforms, error)
            raise
        self._leave(platforms)

    def _leave(self, platforms: frozenset[str], error: BaseException | None = None) -> None:
        with self._lock:
            self._blocks.remove(platforms)
        _warn(self.sweep()[1], error)

    def _note_fork(self) -> None:
        self._forked = self._forked or bool(self._blocks)

    def _begin_child(self) -> None:
        """Continue salting in a forked child, which has built nothing, without touching its parent's programs."""
        self._inherited, self._built = self._built, {}
        self._lock, self._forked = threading.RLock(), False

    def _end(self) -> None:
        busy, notes = self.sweep(ends=True)
        if busy:
            builds = plural(busy, "salted build")
            notes.append(f"entries of {builds} stay, because commands still use them; purge them later")
        # Drivers must not be called during interpreter shutdown.
        self._built.clear()
        _warn(notes)

    @contextmanager
    def build(self) -> Iterator[_Built]:
        """Give a build its salt, and record it; a build that outlives the last block is swept when it ends."""
        # The last character marks the end of the name, because in bitcode another name may follow directly.
        salt = f"{SALT}_{self._token}_{os.getpid()}_{next(self._numbers)}_"
        built = _Built(salt)
        with self._lock:
            self._built[salt] = built
        try:
            yield built
        except BaseException as error:
            patterns = {layer.about.failure_trace for layer, _ in self._roots.values()}
            matches = (match for pattern in patterns if pattern is not None for match in pattern.finditer(str(error)))
            built.traces = frozenset(match[0] for match in matches)
            # A failed build has no binary, and stores no program.
            built.complete = True
            self._ended(built, error)
            raise
        self._ended(built)

    def _ended(self, built: _Built, error: BaseException | None = None) -> None:
        built.done = True
        if not self._blocks:
            _warn(self.sweep()[1], error)

    def salts(self, platform: str) -> bool:
        """Return whether builds for a platform get a salt.

        Builds for other platforms keep their source: a salt would only fill their caches, and the SPIR-V translator of
        Rusticl aborts the process because of the constant.
        """
        return any(platform in platforms for platforms in tuple(self._blocks))

    def sweep(self, *, ends: bool = False) -> tuple[int, list[str]]:
        """Remove the entries of salted builds, except those whose kernels may be compiling now.

        Returns the number of builds that may still have entries, and a note for each entry that could not be removed.
        Unless the process ``ends``, programs that are still held stay usable.
        """
        with self._lock:
            if not self._built and not self._forked:
                return 0, []
            counts = {salt: tagged_builds.count_references(built.program) for salt, built in self._built.items()}
            held, kernels = tagged_builds.holders() if max(counts.values(), default=0) > 1 else (Counter[int](), None)
            # Another thread could launch a kernel with a new shape at any time.
            alone = threading.active_count() == 1
            # Idle builds are finished, and no launched command holds their program: a driver holds the kernel of a
            # command until the command ends, and a kernel holds its program.
            idle = {
                salt
                for salt, built in self._built.items()
                if built.done and (counts[salt] <= 1 or tagged_builds.rests(built.program, held, kernels, alone=alone))
            }
            for built in () if ends else [self._built[salt] for salt in idle]:
                # The record itself is one holder. PoCL assembles a binary from the entry's folder, once: without the
                # folder the bitcode is missing, and a process that loads the binary crashes.
                if not built.complete and built.program is not None and held[built.program.int_ptr] > 1:
                    built.complete = True
                    tagged_builds.ask_for_binaries(built.program)
            notes = [note for layer, root in tuple(self._roots.values()) for note in self._sweep(layer, root, idle)]
            busy = len(self._built.keys() - idle)
            for salt in () if notes else idle:
                if tagged_builds.count_references(self._built[salt].program) <= 1:
                    # No kernel of it can be launched any more.
                    del self._built[salt]
            if not self._built and not self._blocks and not self._forked and not notes:
                self._roots.clear()
            return busy, notes

    def _sweep(self, layer: Layer, root: Root, idle: set[str]) -> Iterator[str]:
        """Remove the entries of finished builds in one root, of this process or of forked children that have ended.

        Yields a note for each entry that was not removed.
        """
        traces = {trace: salt for salt, built in self._built.items() for trace in built.traces}
        keys = {key: salt for salt, built in self._built.items() for key in built.keys}
        salts = rf"{SALT}_{self._token}_\d+_\d+_"
        pattern = re.compile("|".join([*map(re.escape, traces), salts]).encode())
        # Only stores of layers that find tags have this method.
        store: Any = layer.store
        spent: list[Entry] = []
        try:
            for item, tag in store.find_tagged(root, pattern, self._since, keys):
                salt = traces.get(tag) or tag or keys[item.key]
                if salt in idle:
                    self._built[salt].keys.add(item.key)
                    spent.append(item)
                elif salt not in self._built and processes.has_ended(int(salt.split("_")[3])):
                    spent.append(item)
            outcome = layer.clear(plan_removal(layer, spent, in_use=True)) if spent else None
        except FAILURES as error:
            yield f"{layer.name} keeps an entry of a salted build: {reason_of(error)}"
            return
        for note in () if outcome is None else (*outcome.failed, *outcome.skipped):
            yield f"{layer.name} keeps an entry of a salted build: {note.key} {note.because}"


def _warn(notes: Iterable[str], error: BaseException | None = None) -> None:
    """Issue warnings; if these are errors, attach them as notes to the ``error`` that ended a block or build."""
    for note in notes:
        try:
            warnings.warn(note, RuntimeWarning, stacklevel=4)
        except RuntimeWarning:  # noqa: PERF203 - only where warnings are errors
            if error is None:
                raise
            if sys.version_info >= (3, 11):
                error.add_note(note)


#: The salted builds of this process.
SALTING = Salting()
