"""Entries in the order a user asked for, and damage across layers."""

from __future__ import annotations

import heapq
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import BadRequest, LayerError, reason_of
from cachectl.layers.base.facts import Entry, Finding, Problem, Root, Severity, Unverified
from cachectl.layers.base.guard import FAILURES, PluginFailed
from cachectl.layers.base.selection import Selection

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

_UNKNOWN: Final = float("inf")

#: What each order puts first; a time that is not known comes last.
_ORDERS: Final[dict[str, Callable[[Entry], float]]] = {
    "size": lambda entry: -entry.bytes,
    "age": lambda entry: _UNKNOWN if entry.modified is None else entry.modified,
    "used": lambda entry: _UNKNOWN if entry.used is None else entry.used,
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that a listing met and that is no entry; ``failed`` where it kept entries from being listed."""

    layer: str
    problem: Problem | None
    message: str
    failed: bool


def listed(
    layers: Iterable[Layer], selection: Selection, notice: Callable[[Trouble], None], *, contents: bool = True
) -> Iterator[Entry]:
    """Yield the selected entries of every root; a root that fails is noticed, and the others go on.

    Without ``contents`` entries are not looked into, as :meth:`Layer.scan` has it.
    """
    for layer in layers:
        try:
            roots = layer.roots()
        except FAILURES as error:
            notice(Trouble(layer.name, None, reason_of(error), failed=True))
            continue
        for root in roots:
            yield from _listed_root(layer, root, selection, notice, contents=contents)


def _listed_root(
    layer: Layer, root: Root, selection: Selection, notice: Callable[[Trouble], None], *, contents: bool
) -> Iterator[Entry]:
    try:
        for found in layer.store.searched(root, selection) if contents else layer.scan(root, contents=False):
            if isinstance(found, Problem):
                notice(Trouble(layer.name, found, found.message, failed=found.hides))
            elif isinstance(found, Entry) and selection.matches(found):
                yield found
    except FAILURES as error:
        problem = Problem(root.path, "unreadable", reason_of(error))
        notice(Trouble(layer.name, problem, problem.message, failed=True))


def warn_of_failures(trouble: Trouble) -> None:
    """Warn of what kept entries from being listed: a program that asked for them would not know."""
    if trouble.failed:
        warnings.warn(f"{trouble.layer}: {trouble.message}", RuntimeWarning, stacklevel=3)


def ordered(entries: Iterable[Entry], *, sort: str | None, limit: int | None) -> list[Entry]:
    """Return entries largest, oldest or longest unused first, no more than ``limit``; unknown times come last.

    No more than ``limit`` entries are kept at any time.
    """
    if limit is not None and limit < 0:
        message = f"--limit {limit} is negative"
        raise BadRequest(message)
    enough = None if limit is None else min(limit, sys.maxsize)
    if sort is None:
        return list(islice(entries, enough))
    order = _ORDERS[sort]
    return sorted(entries, key=order) if enough is None else heapq.nsmallest(enough, entries, key=order)


def findings(layers: Iterable[Layer]) -> list[Finding]:
    """Collect what is damaged in every root of the given layers."""
    return list(verified(layers).findings)


@dataclass(frozen=True, slots=True)
class Verification:
    """What is damaged in some layers, and what was not checked."""

    findings: tuple[Finding, ...]
    unverified: tuple[Unverified, ...]


def verified(layers: Iterable[Layer], *, deep: bool = False) -> Verification:
    """Verify every root of the given layers; ``deep`` also runs installed tools that can check more.

    What was not checked in several roots of a layer for the same reason is counted together.
    """
    found = [one for layer in layers for one in _examined(layer, deep=deep)]
    counts: Counter[Unverified] = Counter()
    for one in found:
        if isinstance(one, Unverified):
            counts[replace(one, count=0)] += one.count
    return Verification(
        tuple(one for one in found if isinstance(one, Finding)),
        tuple(replace(one, count=count) for one, count in counts.items() if count),
    )


def _examined(layer: Layer, *, deep: bool) -> Iterator[Finding | Unverified]:
    try:
        roots = layer.roots()
    except FAILURES as error:
        # There is no place to name: the layer as a whole.
        yield failure(layer, Path("*"), error)
        return
    for root in roots:
        yield from _examined_root(layer, root, deep=deep)


def _examined_root(layer: Layer, root: Root, *, deep: bool) -> Iterator[Finding | Unverified]:
    try:
        yield from layer.store.examine(root, deep=deep)
    except FAILURES as error:
        yield failure(layer, root.path, error)


def failure(layer: Layer, place: Path, error: LayerError | OSError) -> Finding:
    """Put into words that a layer, or one place of it, could not be looked at."""
    strange = isinstance(error, PluginFailed)
    fix = f"fix or uninstall the plug-in {layer.name}" if strange else f"make {place} readable"
    code = "plugin" if strange else "unreadable"
    return Finding(layer.name, place, None, Severity.FAILS, code, reason_of(error), fix)
