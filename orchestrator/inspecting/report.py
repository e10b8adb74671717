"""``cachectl report``: the places, state and size of every layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.facts import Condition, Orphan, Problem, Root, Scope, State, Usage
from cachectl.layers.base.registry import Broken
from cachectl.layers.base.store import unknown_usage
from cachectl.layers.disk.leftovers import abandoned_temporaries

if TYPE_CHECKING:
    from cachectl.inspecting.by_python import PythonShare
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.host.neighbours import Neighbour


@dataclass(frozen=True, slots=True)
class RootReport:
    """One root and what it holds; ``link_to`` is where it leads if it is itself a link."""

    root: Root
    exists: bool
    usage: Usage
    link_to: Path | None = None
    as_json: ClassVar[AsJson] = AsJson(flat=("root", "usage"))


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer: its state and its roots; ``failures`` are the errors met while reading them."""

    layer: str
    title: str
    state: State
    scope: Scope
    precious: bool
    roots: tuple[RootReport, ...]
    failures: tuple[str, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(
        flat=("state",), also=("entries", "files", "bytes", "complete", "stale_entries", "stale_bytes", "disk_bytes")
    )

    @property
    def complete(self) -> bool:
        """Return whether everything in every root could be counted; if not, the sums are lower bounds."""
        return not self.failures and all(root.usage.complete for root in self.roots)

    @property
    def entries(self) -> int | None:
        """Count the entries of all roots; ``None`` where nothing could be counted."""
        return _sum((root.usage.entries for root in self.roots), complete=self.complete)

    @property
    def files(self) -> int | None:
        """Count the files of all roots, orphans included; ``None`` where nothing could be counted."""
        counts = ((root.usage.files, root.usage.orphan_files) for root in self.roots)
        return _sum((count for pair in counts for count in pair), complete=self.complete)

    @property
    def bytes(self) -> int | None:
        """Sum the bytes of all roots, orphans included; ``None`` where nothing could be measured."""
        sizes = ((root.usage.bytes, root.usage.orphan_bytes) for root in self.roots)
        return _sum((size for pair in sizes for size in pair), complete=self.complete)

    @property
    def disk_bytes(self) -> int | None:
        """Sum the disk blocks of all roots in bytes; ``None`` if those of a root are unknown."""
        return _sum_if_known(root.usage.disk_bytes for root in self.roots)

    @property
    def stale_entries(self) -> int | None:
        """Count stale entries; ``None`` if the layer cannot know."""
        return _known_sum(root.usage.stale_entries for root in self.roots)

    @property
    def stale_bytes(self) -> int | None:
        """Sum the bytes of stale entries; ``None`` if the layer cannot know."""
        return _known_sum(root.usage.stale_bytes for root in self.roots)

    @property
    def orphan_bytes(self) -> int | None:
        """Sum the bytes of the orphans of all roots; ``None`` where nothing could be measured."""
        return _sum((root.usage.orphan_bytes for root in self.roots), complete=self.complete)

    @property
    def idle(self) -> bool:
        """Return whether the layer is complete and empty, and nobody has switched it off."""
        off = self.state.condition is Condition.DISABLED
        return self.complete and not (off or self.entries or self.files or self.problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the problems of all roots."""
        return tuple(problem for root in self.roots for problem in root.usage.problems)


@dataclass(frozen=True, slots=True)
class ReportTotal:
    """The sums over all layers; lower bounds unless ``complete``.

    ``prune --stale`` removes ``stale_bytes`` and ``orphan_bytes``; what is unknown is not in them.
    """

    entries: int | None
    files: int | None
    bytes: int | None
    complete: bool
    disk_bytes: int | None
    stale_bytes: int | None
    orphan_bytes: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """The whole stack at one moment (epoch seconds).

    ``leftovers`` are temporary folders that killed commands left outside the roots. ``neighbours`` are the caches of no
    layer, and ``pythons`` the sums by Python; ``None`` if not requested.
    """

    generated: float
    layers: tuple[LayerReport, ...]
    broken: tuple[Broken, ...] = ()
    leftovers: tuple[Orphan, ...] = ()
    neighbours: tuple[Neighbour, ...] | None = None
    pythons: tuple[PythonShare, ...] | None = None
    as_json: ClassVar[AsJson] = AsJson("cachectl/report/1", also=("total",), optional=("neighbours", "pythons"))

    @property
    def total(self) -> ReportTotal:
        """Return the sums over all layers."""
        disk = _sum_if_known(layer.disk_bytes for layer in self.layers)
        stale = _known_sum(layer.stale_bytes for layer in self.layers)
        orphans = _sum((layer.orphan_bytes for layer in self.layers), complete=self.complete)
        return ReportTotal(self.entries, self.files, self.bytes, self.complete, disk, stale, orphans)

    @property
    def failed(self) -> bool:
        """Return whether anything could not be counted."""
        return not self.complete

    @property
    def complete(self) -> bool:
        """Return whether everything could be counted; if not, the sums are lower bounds."""
        return all(layer.complete for layer in self.layers)

    @property
    def entries(self) -> int | None:
        """Count the entries of all layers; ``None`` where nothing could be counted."""
        return _sum((layer.entries for layer in self.layers), complete=self.complete)

    @property
    def files(self) -> int | None:
        """Count the files of all layers; ``None`` where nothing could be counted."""
        return _sum((layer.files for layer in self.layers), complete=self.complete)

    @property
    def bytes(self) -> int | None:
        """Sum the bytes of all layers; ``None`` where nothing could be measured."""
        return _sum((layer.bytes for layer in self.layers), complete=self.complete)


def build_report(
    stack: LayerSet, layers: Iterable[Layer], *, within: Callable[[Layer, Root], bool] = lambda _layer, _root: True
) -> Report:
    """Count every root of the given layers for which ``within`` is true."""
    return Report(
        stack.environment.clock(),
        tuple(_layer_report(layer, within) for layer in layers),
        stack.broken,
        abandoned_temporaries(stack.environment),
    )


def _layer_report(layer: Layer, within: Callable[[Layer, Root], bool]) -> LayerReport:
    failures: list[str] = []
    state = State(Condition.UNKNOWN, "its state could not be read")
    roots: tuple[Root, ...] = ()
    try:
        roots = tuple(root for root in layer.roots() if within(layer, root))
    except FAILURES as error:
        failures.append(reason_of(error))
    try:
        state = layer.state()
    except FAILURES as error:
        failures.append(reason_of(error))
    reports = tuple(_root_report(layer, root) for root in roots)
    said = tuple(dict.fromkeys(failures))
    return LayerReport(layer.name, layer.title, state, layer.scope, layer.precious, reports, said)


def _root_report(layer: Layer, root: Root) -> RootReport:
    try:
        return RootReport(root, root.exists, layer.usage(root), _link_to(root.path))
    except FAILURES as error:
        # An unreadable root exists.
        return RootReport(
            root,
            exists=True,
            usage=unknown_usage(Problem(root.path, "unreadable", reason_of(error))),
            link_to=_link_to(root.path),
        )


def _link_to(path: Path) -> Path | None:
    """Return the target of a path that is a link; a circular link leads to itself."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else None


def _sum(values: Iterable[int | None], *, complete: bool) -> int | None:
    """Add the known values. If the count is incomplete, the sum is a lower bound, and ``None`` instead of 0."""
    total = sum(value for value in values if value is not None)
    return total if total or complete else None


def _known_sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    listed = list(values)
    return None if None in listed else sum(value or 0 for value in listed)
