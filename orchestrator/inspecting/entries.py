"""``cachectl ls``: the entries of all layers, in the order a user asked for."""

from __future__ import annotations

import heapq
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, BadRequest, reason_of
from cachectl.layers.base.facts import Entry, Orphan, Problem, Root
from cachectl.layers.base.selection import ALL, Selection

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

_UNKNOWN: Final = float("inf")
#: Characters of a key that are enough to mean one, and keys that an error names.
_SHORTEST: Final = 4
_SOME: Final = 4

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


def full_key(layers: Iterable[Layer], text: str) -> str:
    """Return the only key of some layers that begins with a text, or whose last part does.

    A text that is a key, or that begins none, is returned as it is; so is one of fewer than 4 characters. Raises
    :class:`BadRequest`, with some of the keys, if it begins several.
    """
    found: set[str] = set()
    for layer in layers if len(text) >= _SHORTEST else ():
        with suppress(*FAILURES):
            if layer.store.is_key(text):
                return text
            for root in layer.roots():
                for thing in layer.scan(root, contents=False):
                    if isinstance(thing, (Entry, Orphan)) and thing.key == text:
                        return text
                    if isinstance(thing, Entry) and any(
                        part.startswith(text) for part in (thing.key, thing.key.rpartition("/")[2])
                    ):
                        found.add(thing.key)
    if len(found) > 1:
        some = ", ".join(sorted(found)[:_SOME])
        more = f" and {len(found) - _SOME} more" if len(found) > _SOME else ""
        message = f"{len(found)} keys begin with {text!r}: {some}{more}; write more of it"
        raise BadRequest(message)
    return found.pop() if found else text


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
