"""Entries summed by the Python and the packages that wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.inspecting.entries import listed
from cachectl.layers.base.selection import ALL

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.facts import Entry
    from cachectl.layers.base.layer import Layer


@dataclass(frozen=True, slots=True)
class PythonShare:
    """The entries of one Python: its five-part version, the packages they name, and the interpreters of that version.

    ``stale`` counts the entries that no known Python can hit.
    """

    python: str
    packages: Mapping[str, str | None]
    entries: int
    bytes: int
    stale: int
    interpreters: tuple[Path, ...]


def by_python(layers: Iterable[Layer], environment: Environment) -> tuple[PythonShare, ...]:
    """Sum the entries that name a Python, the largest sum first; entries that cannot be read are left out."""
    from cachectl.layers.host.pythons import pythons_of

    groups: dict[tuple[tuple[str, str | None], ...], list[Entry]] = {}
    for entry in listed(layers, ALL, lambda _: None, contents=False):
        if entry.versions.get("python"):
            groups.setdefault(tuple(sorted(entry.versions.items())), []).append(entry)
    shares = []
    for versions, entries in groups.items():
        packages = dict(versions)
        python = str(packages.pop("python"))
        shares.append(
            PythonShare(
                python=python,
                packages=packages,
                entries=len(entries),
                bytes=sum(entry.bytes for entry in entries),
                stale=sum(entry.stale is True for entry in entries),
                interpreters=tuple(
                    one.path for one in pythons_of(environment) if one.version == python and one.present is not False
                ),
            )
        )
    return tuple(sorted(shares, key=lambda share: -share.bytes))
