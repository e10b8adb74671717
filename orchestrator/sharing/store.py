"""A shared store as a whole: what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson, total
from cachectl.sharing.index import Index
from cachectl.sharing.places import place_of

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.layer_set import LayerSet
    from cachectl.sharing.checking import StoreCheck
    from cachectl.sharing.collecting import Collection


@dataclass(frozen=True, slots=True)
class ListedKey:
    """The entries of one portability key, in how many index parts.

    ``oldest`` and ``newest`` are when the parts were made, in epoch seconds. ``unsigned`` counts those without a
    signature.
    """

    key: str
    layer: str
    entries: int
    bytes: int
    parts: int
    unsigned: int
    oldest: int
    newest: int
    portability_key: Mapping[str, str | None]
    as_json: ClassVar[AsJson] = AsJson(names={"portability_key": "fingerprint"})


@dataclass(frozen=True, slots=True)
class StoreTotal:
    """The sums over all portability keys."""

    entries: int
    bytes: int
    parts: int


@dataclass(frozen=True, slots=True)
class StoreListing:
    """The content of a store; ``digest`` pins it, and so does the address ``pinned``, which registries have."""

    url: str
    store: str
    digest: str
    keys: tuple[ListedKey, ...]
    pinned: str | None = None
    as_json: ClassVar[AsJson] = AsJson("cachectl/store/1", also=("total",))

    @property
    def total(self) -> StoreTotal:
        """Return the sums over all portability keys."""
        return total(StoreTotal, self.keys)

    @property
    def failed(self) -> bool:
        """Return ``False``: a store that cannot be read raises an error."""
        return False


class SharedStore:
    """The shared store at a folder or a URL."""

    def __init__(self, stack: LayerSet, url: str | Path) -> None:
        self._environment = stack.environment
        self._place = place_of(url, stack.environment)

    def ls(self) -> StoreListing:
        """Return what is in the store, by portability key. Raises :class:`BadStore` and :class:`Missing`."""
        index = Index(self._place, self._environment)
        store = index.demand()
        groups: dict[str, list[tuple[int, int, int, bool]]] = {}
        for name in index.names.parts:
            read = index.read(name)
            weight = sum(one.item.bytes for one in read.part.entries)
            groups.setdefault(name.key, []).append((len(read.part.entries), weight, name.made, not read.signature))
        keys = []
        for group, parts in groups.items():
            key = index.key(group)
            entries, sizes, made, unsigned = zip(*parts, strict=True)
            sums = (sum(entries), sum(sizes), len(parts), sum(unsigned), min(made), max(made))
            keys.append(ListedKey(group, key.layer, *sums, dict(key.facts)))
        index.save()
        keys.sort(key=lambda one: (one.layer, one.key))
        return StoreListing(self._place.shown, store, index.names.digest, tuple(keys), self._place.pin())

    def gc(
        self,
        *,
        older_than: float | None = None,
        max_size: int | None = None,
        grace: float | None = None,
        dry_run: bool = False,
    ) -> Collection:
        """Remove old index parts, and what nothing has listed for a grace period; ages are in seconds.

        ``older_than`` is an age, ``max_size`` the bytes that may stay. Raises :class:`BadStore` and :class:`Missing`.
        """
        from cachectl.sharing.collecting import GRACE, Limits, collect

        limits = Limits(older_than, max_size, GRACE if grace is None else grace)
        return collect(self._place, self._environment, limits, dry_run=dry_run)

    def verify(self, *, allowed_signers: str | None = None) -> StoreCheck:
        """Check everything in the store; with ``allowed_signers`` also who has signed it. Raises :class:`Missing`."""
        from cachectl.sharing.checking import check

        return check(self._place, self._environment, allowed_signers)
