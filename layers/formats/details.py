"""The details in the bytes of an entry, and bounds-checked reads."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mmap import mmap


class Details(NamedTuple):
    """What the bytes of an entry reveal: its kernels, device, and the versions that compiled it; ``None`` is unknown.

    ``detail`` maps names to further facts, such as the ``kind`` of an entry in a cache of several kinds. ``created`` is
    when the program was compiled (epoch seconds).
    """

    kernels: tuple[str, ...] | None = None
    device: str | None = None
    versions: Mapping[str, str] = {}
    detail: Mapping[str, str] = {}
    created: float | None = None

    @property
    def stated(self) -> Mapping[str, str]:
        """The details as a flat mapping, for an artifact."""
        return {**self.detail, "kernels": " ".join(self.kernels or ()), "device": self.device or "", **self.versions}


def of_kind(
    kind: str, kernels: tuple[str, ...] | None = None, device: str | None = None, versions: Mapping[str, str] = {}
) -> Details:
    """Return the details of an entry in a cache of several kinds."""
    return Details(kernels, device, versions, {"kind": kind})


class Cut(ValueError):
    """Data that is shorter than it states."""

    def __init__(self, data: bytes | mmap) -> None:
        super().__init__(f"is cut short at {len(data)} bytes")


def require(data: bytes | mmap, begin: int, length: int) -> None:
    """Raise :class:`Cut` if a part is not completely within the data."""
    if length and begin + length > len(data):
        raise Cut(data)


def part(data: bytes | mmap, begin: int, length: int) -> bytes:
    """Return a part of the data. Raises :class:`Cut` if it is incomplete."""
    require(data, begin, length)
    return data[begin : begin + length]


def fields(layout: struct.Struct, data: bytes | mmap, at: int = 0) -> tuple[Any, ...]:
    """Return the fields at an offset. Raises :class:`Cut` if they are incomplete."""
    return layout.unpack(part(data, at, layout.size))


def names_or_none(names: Iterable[str]) -> tuple[str, ...] | None:
    """Return the distinct non-empty names, sorted; ``None`` if there are none."""
    return tuple(sorted(set(names) - {""})) or None
