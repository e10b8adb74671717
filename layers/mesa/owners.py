"""Whose an entry of Mesa's shader cache is: OpenCL's, or that of GL and Vulkan, which keep theirs in the same folders.

Only contents show it. All entries of one driver and device were stored by one build of one library, and Rusticl is a
library of its own. So if one of them contains a kernel, all are OpenCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.facts import Entry
from cachectl.layers.mesa import entries

#: How many entries of one driver are unpacked, the smallest first, to find a kernel.
_LOOKS: Final = 256
_GRAPHICS: Final = "is of GL or Vulkan, which share the folder"
_UNKNOWN: Final = "cannot be distinguished from what GL and Vulkan keep in the same folder"


class Raw(NamedTuple):
    """An entry with its header, a function that reads it, and its checksum in a larger file, 0 if it has none."""

    entry: Entry
    header: entries.Header | None
    read: Callable[[], bytes | None]
    checksum: int = 0


def raw_of(entry: Entry, read: Callable[..., bytes | None], checksum: int = 0) -> Raw:
    """Read the header of an entry. Raises :class:`LayerError`."""
    head = read(limit=entries.HEAD)
    return Raw(entry, None if head is None else entries.read_header(head), read, checksum)


def kernels_in(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels in an entry; ``None`` if it names none, or cannot be unpacked."""
    try:
        return entries.kernels(entries.inflate(data))
    except ValueError:
        return None


class Owners:
    """The owners of some entries, by driver and device; ``unread`` are the errors of those that could not be read."""

    def __init__(self, raws: Iterable[Raw]) -> None:
        self.unread: dict[Path, LayerError] = {}
        self._groups: dict[tuple[str, str], list[Raw]] = {}
        self._guests: dict[tuple[str, str], str | None] = {}
        for raw in raws:
            if raw.header is not None:
                self._groups.setdefault(raw.header.maker, []).append(raw)

    def entry(self, raw: Raw, *, contents: bool) -> Entry:
        """Return an entry with its owner; only ``contents`` unpacks the names of kernels."""
        header = raw.header
        if header is None:
            return replace(raw.entry, guest=_UNKNOWN)
        guest = self._guest(header.maker)
        return replace(
            raw.entry,
            kernels=self._kernels(raw) if contents and guest is None else None,
            device=header.device,
            versions={"driver": header.driver},
            detail={"of": "OpenCL" if guest is None else "GL or Vulkan" if guest == _GRAPHICS else "unknown"},
            guest=guest,
        )

    def _guest(self, maker: tuple[str, str]) -> str | None:
        """Return the owner of what a driver has stored for a device; ``None`` for OpenCL."""
        if maker not in self._guests:
            group = self._groups[maker]
            if any(raw.header.graphics for raw in group if raw.header is not None):
                guest: str | None = _GRAPHICS
            elif entries.RUSTICL in maker:
                guest = None
            else:
                # Kernels are smaller than the code that a driver makes from them.
                smallest = sorted(group, key=lambda raw: raw.entry.bytes)[:_LOOKS]
                guest = None if any(map(self._kernels, smallest)) else _UNKNOWN
            self._guests[maker] = guest
        return self._guests[maker]

    def _kernels(self, raw: Raw) -> tuple[str, ...] | None:
        try:
            return kernels_in(raw.read() or b"")
        except LayerError as error:
            self.unread[raw.entry.root / raw.entry.key] = error
            return None

    def without_kernel(self, keys: Collection[str]) -> Iterator[Entry]:
        """Yield the other entries of OpenCL that nothing could recognise without those of some keys."""
        for maker, group in self._groups.items():
            rest = [raw for raw in group if raw.entry.key not in keys]
            by_kernels = len(rest) < len(group) and entries.RUSTICL not in maker and self._guest(maker) is None
            # A kernel that cannot be read may remain.
            if by_kernels and not any(map(self._kernels, rest)) and not self.unread:
                yield from (self.entry(raw, contents=False) for raw in rest)

    def last_kernels(self) -> set[str]:
        """Return the key of a kernel of each driver and device that only kernels show to be OpenCL's."""
        groups = (group for maker, group in self._groups.items() if entries.RUSTICL not in maker)
        by_size = (sorted(group, key=lambda raw: raw.entry.bytes) for group in groups)
        found = (next(filter(self._kernels, group), None) for group in by_size)
        return {raw.entry.key for raw in found if raw is not None}
