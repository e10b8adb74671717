"""Where a shared store lies: named bytes that are written once and never changed.

A name is ``index/NAME``, ``packs/SHA256`` or ``objects/SHA256``. The names under ``index/`` are the
index: a writer adds its part last, so that whatever a reader finds there is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cachectl.layers.base.errors import CachectlError


class Missing(CachectlError, FileNotFoundError):
    """A name that a store does not have."""


class BadStore(CachectlError, ValueError):
    """A store in which something is missing, cut or changed. Nothing in it may be used."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A name in a store, with its size in bytes and when it was written, in epoch seconds; ``None`` if unknown."""

    name: str
    bytes: int | None
    modified: float | None


class Place(Protocol):
    """A folder, a bucket or a repository that holds a store.

    Every method raises :class:`~cachectl.moving.transfer.TransferFailed` or :class:`OSError` if the place cannot be
    reached.
    """

    #: The address, without a password.
    shown: str

    def names(self) -> Sequence[Stored]:
        """List the names under ``index/``, with one request for each 1,000 names; empty if there is no store."""
        ...

    def contents(self) -> Sequence[Stored]:
        """List all names."""
        ...

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a name. Raises :class:`Missing`, and :class:`BadStore` for more than ``most`` bytes."""
        ...

    def write(self, name: str, data: bytes, holds: Sequence[str] = ()) -> None:
        """Write a name whole or not at all, also over the same name.

        ``holds`` are the packs and objects that an index part lists: a registry keeps only what a manifest names.
        """
        ...

    def finish(self) -> None:
        """Do what is done once after all writing. A store that lacks it is whole."""
        ...

    def pin(self) -> str | None:
        """Return the address of the store in exactly its present state; ``None`` if a place has no such addresses."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove names; one that is not there is no error."""
        ...
