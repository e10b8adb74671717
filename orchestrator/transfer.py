"""The results of ``push`` and ``pull``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

from cachectl.layers.core.entry import Entry, Note
from cachectl.layers.core.json_form import as_json, total
from cachectl.layers.core.parts import Outlook

_SUMS = ("placed", "bytes", "there", "cannot_hit", "kept", "skipped", "failed")


@as_json(also=("foreseen",), hidden=("outlooks",), optional=("entries",), names={"foreseen": "outlook"})
@dataclass
class Moved:
    """What was done so far with the entries of one layer, or in a dry run would be done.

    ``there`` counts entries that the target had, ``kept`` lists different entries that it keeps, and ``cannot_hit``
    counts entries that were not placed because they cannot be hit here. ``outlooks`` counts all that the target lacked.
    ``sensitive`` says what pushed entries reveal. ``entries`` are those that a dry run would place.
    """

    layer: str
    placed: int = 0
    bytes: int = 0
    there: int = 0
    cannot_hit: int = 0
    kept: list[Note] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)
    outlooks: Counter[Outlook] = field(default_factory=Counter)
    sensitive: str | None = None
    entries: list[Entry] | None = None

    @property
    def foreseen(self) -> tuple[Outlook, ...]:
        """Return the outlooks with their numbers of entries; where nothing was placed, only those without hits."""
        is_there = self.entries is not None or self.placed or self.there
        seen = [outlook._replace(entries=number) for outlook, number in self.outlooks.items()]
        return tuple(outlook for outlook in seen if is_there or outlook.hits is False)

    def add(self, other: Moved) -> None:
        """Add the result for more entries of the layer."""
        for name in (*_SUMS, "outlooks"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.entries is not None:
            self.entries = [*(self.entries or ()), *other.entries]


@as_json("cachectl/transfer/1", also=("total",), sums=_SUMS)
@dataclass
class Transfer:
    """What a push or a pull did with each layer, or (``dry_run``) would do.

    ``url`` names the target or the sources. ``digest`` pins the content of a store; it is ``None`` for several sources
    and those that are no store. ``moved`` is the number of bytes uploaded, or downloaded in packs. ``trusted`` says why
    entries were accepted, ``unread`` lists by layer what cannot be hit here, and ``left_out`` untrusted index parts.
    """

    url: str = ""
    digest: str | None = None
    moved: int = 0
    layers: tuple[Moved, ...] = ()
    dry_run: bool = False
    trusted: tuple[str, ...] = ()
    unread: tuple[Note, ...] = ()
    left_out: tuple[Note, ...] = ()

    def layer(self, name: str) -> Moved:
        """Return the result of a layer, to which callers add."""
        for layer in self.layers:
            if layer.layer == name:
                return layer
        self.layers += (Moved(name, entries=[] if self.dry_run else None),)
        return self.layers[-1]

    def add(self, other: Transfer) -> None:
        """Add the result for another source."""
        self.url, self.digest = f"{self.url} {other.url}", None
        self.moved += other.moved
        for layer in other.layers:
            self.layer(layer.layer).add(layer)
        self.trusted = tuple(dict.fromkeys((*self.trusted, *other.trusted)))
        self.unread += other.unread
        self.left_out += other.left_out

    @property
    def total(self) -> SimpleNamespace:
        """Return the sums over all layers."""
        return total(self)

    @property
    def failed(self) -> bool:
        """Return whether an entry or a layer could not be read or placed."""
        return any(layer.failed for layer in self.layers)
