"""Sums of entries by kernel, driver or Python, for ``report --by``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cachectl import listing
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.entry import Entry
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.selection import ALL
from cachectl.layers.host.pythons import pythons_of


class PythonShare(NamedTuple):
    """The entries of one Python: its five-part version, the packages they name, and the interpreters of that version.

    ``stale`` counts the entries that nothing can hit; ``None`` if this is unknown for some.
    """

    python: str
    packages: Mapping[str, str | None]
    entries: int
    bytes: int
    stale: int | None
    interpreters: tuple[Path, ...]


class DriverShare(NamedTuple):
    """The entries of a layer that one driver or compiler wrote, as far as their bytes name its version and device.

    ``newest`` is the time of the latest change (epoch seconds).
    """

    layer: str
    versions: Mapping[str, str]
    device: str | None
    entries: int
    bytes: int
    newest: float | None


# Entries that cannot be read are in no sum.


def by_kernel(layers: Iterable[Layer], environment: Environment) -> tuple[listing.Kernel, ...]:
    """Sum the entries of each kernel, the largest sum first."""
    entries = listing.listed(layers, ALL, lambda _: None)
    return listing.by_kernel((entry for entry in entries if not entry.is_foreign), environment)


def by_driver(layers: Sequence[Layer]) -> tuple[DriverShare, ...]:
    """Sum the entries that name no Python, by layer, the newest first."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in listing.listed(layers, ALL, lambda _: None):
        details = entry.details
        if not entry.is_foreign and "python" not in details.versions:
            versions = tuple(sorted(details.versions.items()))
            groups.setdefault((entry.layer, versions, details.device), []).append(entry)
    shares = []
    for entries in groups.values():
        first, newest = entries[0], max((entry.modified for entry in entries if entry.modified), default=None)
        size, details = sum(entry.bytes for entry in entries), first.details
        shares.append(DriverShare(first.layer, details.versions, details.device, len(entries), size, newest))
    order = [layer.name for layer in layers]
    return tuple(sorted(shares, key=lambda share: (order.index(share.layer), -(share.newest or 0))))


def by_python(layers: Iterable[Layer], environment: Environment) -> tuple[PythonShare, ...]:
    """Sum the entries that name a Python, the largest sum first."""
    groups: dict[tuple[tuple[str, str], ...], list[Entry]] = {}
    for entry in listing.listed(layers, ALL, lambda _: None, contents=False):
        if entry.details.versions.get("python"):
            groups.setdefault(tuple(sorted(entry.details.versions.items())), []).append(entry)
    shares = []
    for versions, entries in groups.items():
        packages = dict(versions)
        python = packages.pop("python")
        paths = (other.path for other in pythons_of(environment) if other.version == python)
        stale = None if any(entry.stale is None for entry in entries) else sum(entry.stale is True for entry in entries)
        size = sum(entry.bytes for entry in entries)
        shares.append(PythonShare(python, packages, len(entries), size, stale, tuple(dict.fromkeys(paths))))
    return tuple(sorted(shares, key=lambda share: -share.bytes))
