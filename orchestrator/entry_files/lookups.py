"""Hits, misses and stores of a layer, and who served a build, from what was seen of the files of its entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from cachectl.entry_files.events import EntryUse, Seen
from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, Damaged
from cachectl.layers.base.parts import EntryFiles, Lookups

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

#: Seconds by which the clock of an event may be behind that of a build.
_LATE: Final = 0.05


@dataclass(frozen=True, slots=True)
class EntryTrace:
    """One entry that was used: how often it was read and stored, its bytes, and what its bytes say.

    ``broken`` says that it is damaged, so that its readings are misses. ``at`` are the times of use (epoch seconds).
    """

    layer: str
    key: str
    hits: int
    stores: int
    bytes: int | None
    kernels: tuple[str, ...] | None
    device: str | None
    broken: bool = False
    at: tuple[float, ...] = ()
    root: str = ""
    as_json: ClassVar[AsJson] = AsJson(hidden=("at",))


class Listed(NamedTuple):
    """One entry before or after a run: its bytes, when it was used, and whether it is a foreign one in the root."""

    bytes: int
    used: float | None
    guest: bool


class Count(NamedTuple):
    """The numbers of a layer; ``None`` is unknown. ``exact`` is false for a lower bound, or an inference."""

    hits: int | None
    misses: int | None
    stores: int | None
    bytes: int | None
    exact: bool
    why: str


def entries_used(
    layer: Layer, seen: Seen, before: Mapping[str, Listed], after: Mapping[str, Listed]
) -> Iterator[EntryTrace]:
    """Yield the entries of a layer that were used; those of others that share the root are left out."""
    for use in sorted(seen.entries, key=lambda use: min((*use.hits, *use.stores), default=0.0)):
        name = f"{use.root.path}/{use.key}"
        listed = after.get(name) or before.get(name)
        if listed is None or not listed.guest:
            yield _described(layer, use, None if listed is None else listed.bytes)


def _described(layer: Layer, use: EntryUse, size: int | None) -> EntryTrace:
    detail: Mapping[str, str] = {}
    broken = False
    try:
        artifact = layer.store.read(use.root, use.key)
        detail = {} if artifact is None else artifact.detail
    except Damaged:
        broken = True
    except FAILURES:
        # It shows what is known without its content.
        pass
    kernels = tuple((detail.get("kernels") or "").split()) or None
    at = tuple(sorted((*use.hits, *use.stores)))
    return EntryTrace(
        layer=layer.name,
        key=use.key,
        hits=len(use.hits),
        stores=len(use.stores),
        bytes=size,
        kernels=kernels,
        device=detail.get("device") or None,
        broken=broken,
        at=at,
        root=str(use.root.path),
    )


def count(
    seen: Seen,
    used: Sequence[EntryTrace],
    before: Mapping[str, Listed],
    after: Mapping[str, Listed],
    lookups: Lookups,
    *,
    silent: Sequence[str],
) -> Count:
    """Return the numbers of a layer.

    A lookup that finds nothing touches no file: a miss is counted when its entry is stored. ``silent`` says why misses
    may have stored nothing.
    """
    hits = sum(one.hits for one in used if not one.broken)
    stores = sum(one.stores for one in used)
    misses = stores + sum(one.hits for one in used if one.broken)
    total = sum((one.bytes or 0) * bool(one.stores) for one in used)
    by = "the kernel's file events on its entries"
    others = "" if seen.by_process else "; other programs on the same cache are counted too, as only root sees who"
    if seen.others:
        new = [key for key in after if key not in before and not after[key].guest]
        names, openings = ", ".join(sorted({path.name for path in seen.others})), sum(seen.others.values())
        files = lookups.files or EntryFiles()
        hits_of, misses_of = lookups.by_openings(openings, len(new)) or (None, None)
        why = f"{names}: opened {openings} times; {files.otherwise}; stores are the entries that appeared"
        total = sum(after[key].bytes for key in new)
        return Count(hits_of, misses_of, len(new), total, exact=False, why=f"{why}{others}")
    limits = [*seen.gaps, *seen.doubts, *silent]
    bound = f"; a lower bound: {'; '.join(limits)}" if limits else ""
    return Count(hits, misses, stores, total, exact=not limits, why=f"{by}{others}{bound}")


# ---------------------------------------------------------------------- builds


def served(builds: Sequence[Mapping[str, Any]], used: Iterable[EntryTrace]) -> dict[int, tuple[str, bool]]:
    """Map builds, by their places in the list, to the layer of the driver and whether it compiled them.

    Builds that are not known to have been served otherwise, and whose kernels an entry names, are mapped. Builds of
    kernels of one name are distinguished by time: an entry counts for the last build that had begun.
    """
    begun = sorted((float(build.get("at") or 0) - float(build["seconds"]), place) for place, build in enumerate(builds))
    found: dict[int, list[EntryTrace]] = {}
    for entry in used:
        if entry.broken or not entry.kernels:
            continue
        for at in entry.at:
            names = set(entry.kernels)
            candidates = [place for start, place in begun if start <= at + _LATE and names & _kernels(builds[place])]
            if candidates:
                found.setdefault(candidates[-1], []).append(entry)
    return {place: (entries[0].layer, any(one.stores for one in entries)) for place, entries in found.items()}


def _kernels(build: Mapping[str, Any]) -> set[str]:
    return set(build.get("kernels") or ())
