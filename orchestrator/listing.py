"""The entries of several layers that a selection matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cachectl import layer_set, verbs
from cachectl.layers.base import errors, facts

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.selection import Selection


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

    entries: tuple[facts.Entry, ...]
    problems: tuple[Trouble, ...]
    as_json: ClassVar[facts.AsJson] = facts.AsJson("cachectl/ls/1")

    @property
    def failed(self) -> bool:
        """Return whether entries may be missing."""
        return any(trouble.failed for trouble in self.problems)


def _warn_of_failures(trouble: Trouble) -> None:
    if trouble.failed:
        layer_set.warn_user(f"{trouble.layer}: {trouble.message}")


def listed(
    layers: Iterable[Layer],
    selection: Selection,
    notice: Callable[[Trouble], None] = _warn_of_failures,
    *,
    contents: bool = True,
) -> Iterator[facts.Entry]:
    """Yield the selected entries of every root. A root that fails is given to ``notice``, and the others go on.

    ``notice`` gets what could not be listed, and what looks damaged; by default it warns of the first. Without
    ``contents`` entries are not opened, as in :meth:`Layer.scan`.
    """
    for layer in layers:
        try:
            roots = layer.roots()
        except errors.FAILURES as error:
            notice(Trouble(layer.name, None, "failed", errors.reason_of(error), failed=True))
            continue
        for root in roots:
            try:
                for thing in layer.store.scan(root, selection, contents=contents):
                    if isinstance(thing, facts.Problem):
                        notice(Trouble(layer.name, thing.path, thing.code, thing.message, failed=thing.hides))
                    elif thing.is_listed and selection.matches(thing):
                        yield thing
            except errors.FAILURES as error:  # noqa: PERF203 - one must not end the rest
                notice(Trouble(layer.name, root.path, "unreadable", errors.reason_of(error), failed=True))


def entries_table(entries: Iterable[facts.Entry], now: float) -> verbs.Table:
    """Return the rows of entries; ``now`` is the time that ages refer to."""
    stale = verbs.Column("", lambda stale: "stale" if stale else "", name="stale")
    columns = ("layer", "kernels", verbs.sizes("size"), verbs.ages("age", now), stale, "key")
    rows = []
    for entry in entries:
        kernels, moment = " ".join(entry.kernels or (verbs.DASH,)), entry.modified if entry.used is None else entry.used
        rows.append((entry.layer, kernels, entry.bytes, moment, entry.stale, entry.key))
    return verbs.Table(columns, rows)
