"""The details in the bytes of an entry, and reads that never go beyond the bytes there are."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mmap import mmap


class Details(NamedTuple):
    """What the bytes of an entry say: its kernels, its device, and the versions that compiled it; ``None`` is unknown.

    ``detail`` is what else they say by name, such as the ``kind`` of an entry in a cache that holds several kinds.
    ``created`` is when the program was compiled (epoch seconds).
    """

    kernels: tuple[str, ...] | None = None
    device: str | None = None
    versions: Mapping[str, str] = {}
    detail: Mapping[str, str] = {}
    created: float | None = None

    @property
    def stated(self) -> Mapping[str, str]:
        """What an artifact says of itself."""
        return {**self.detail, "kernels": " ".join(self.kernels or ()), "device": self.device or "", **self.versions}


def of_kind(
    kind: str, kernels: tuple[str, ...] | None = None, device: str | None = None, versions: Mapping[str, str] = {}
) -> Details:
    """Return the details of an entry of one of the kinds in a cache that holds several."""
    return Details(kernels, device, versions, {"kind": kind})


class Cut(ValueError):
    """Some bytes end before what they state."""

    def __init__(self, data: bytes | mmap) -> None:
        super().__init__(f"is cut short at {len(data)} bytes")


def require(data: bytes | mmap, begin: int, length: int) -> None:
    """Raise :class:`Cut` if a part of some bytes is not all there."""
    if length and begin + length > len(data):
        raise Cut(data)


def part(data: bytes | mmap, begin: int, length: int) -> bytes:
    """Return a part of some bytes. Raises :class:`Cut` if it is not all there."""
    require(data, begin, length)
    return data[begin : begin + length]


def fields(layout: struct.Struct, data: bytes | mmap, at: int = 0) -> tuple[Any, ...]:
    """Return the fields at an offset. Raises :class:`Cut` if they are not all there."""
    return layout.unpack(part(data, at, layout.size))


def names_or_none(names: Iterable[str]) -> tuple[str, ...] | None:
    """Return names sorted and once each, without an empty one; ``None`` where there is none."""
    return tuple(sorted(set(names) - {""})) or None
