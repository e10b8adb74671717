"""``cachectl ls``: the entries of all layers, in the order a user asked for."""

from __future__ import annotations

import heapq
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, BadRequest, reason_of
from cachectl.layers.base.facts import Entry, Problem, Root
from cachectl.layers.base.selection import ALL, Selection

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

_UNKNOWN: Final = float("inf")

#: The sort key of each order; an unknown time comes last.
_ORDERS: Final[dict[str, Callable[[Entry], float]]] = {
    "size": lambda entry: -entry.bytes,
    "age": lambda entry: _UNKNOWN if entry.modified is None else entry.modified,
    "used": lambda entry: _UNKNOWN if entry.used is None else entry.used,
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem of a listing; ``failed`` if entries could not be listed because of it.

    ``path`` is ``None`` if the layer as a whole failed.
    """

    layer: str
    path: Path | None
    code: str
    message: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """The selected entries, and the problems met."""

    entries: tuple[Entry, ...]
    problems: tuple[Trouble, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/ls/1")

    @property
    def failed(self) -> bool:
        """Return whether entries may be missing."""
        return any(trouble.failed for trouble in self.problems)


def list_entries(
    layers: Iterable[Layer], selection: Selection = ALL, *, sort: str | None = None, limit: int | None = None
) -> Listing:
    """Return the selected entries, sorted by ``size``, ``age`` or ``used``, no more than ``limit``."""
    troubles: list[Trouble] = []
    entries = ordered(listed(layers, selection, troubles.append), sort=sort, limit=limit)
    return Listing(tuple(entries), tuple(troubles))


def listed(
    layers: Iterable[Layer], selection: Selection, notice: Callable[[Trouble], None], *, contents: bool = True
) -> Iterator[Entry]:
    """Yield the selected entries of every root. A root that fails is given to ``notice``, and the others go on.

    Without ``contents`` entries are not opened, as in :meth:`Layer.scan`.
    """
    for layer in layers:
        try:
            roots = layer.roots()
        except FAILURES as error:
            notice(Trouble(layer.name, None, "failed", reason_of(error), failed=True))
            continue
        for root in roots:
            yield from _listed_root(layer, root, selection, notice, contents=contents)


def _listed_root(
    layer: Layer, root: Root, selection: Selection, notice: Callable[[Trouble], None], *, contents: bool
) -> Iterator[Entry]:
    try:
        for found in layer.store.find(root, selection) if contents else layer.scan(root, contents=False):
            if isinstance(found, Problem):
                notice(Trouble(layer.name, found.path, found.code, found.message, failed=found.hides))
            elif isinstance(found, Entry) and selection.matches(found):
                yield found
    except FAILURES as error:
        notice(Trouble(layer.name, root.path, "unreadable", reason_of(error), failed=True))


def warn_of_failures(trouble: Trouble) -> None:
    """Issue a :class:`RuntimeWarning` if entries could not be listed."""
    if trouble.failed:
        warnings.warn(f"{trouble.layer}: {trouble.message}", RuntimeWarning, stacklevel=3)


def ordered(entries: Iterable[Entry], *, sort: str | None, limit: int | None) -> list[Entry]:
    """Return entries largest, oldest or longest unused first, no more than ``limit``; unknown times come last.

    At most ``limit`` entries are kept at any time. Raises :class:`BadRequest` for a negative limit.
    """
    if limit is not None and limit < 0:
        message = f"--limit {limit} is negative"
        raise BadRequest(message)
    enough = None if limit is None else min(limit, sys.maxsize)
    if sort is None:
        return list(islice(entries, enough))
    order = _ORDERS[sort]
    return sorted(entries, key=order) if enough is None else heapq.nsmallest(enough, entries, key=order)
