"""The details in the bytes of an entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Details:
    """The kind of an entry, its kernels and device, and the versions that compiled it; ``None`` is unknown.

    ``kind`` is one of the kinds of entry in a cache that holds several.
    """

    kind: str | None = None
    kernels: tuple[str, ...] | None = None
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> Mapping[str, str]:
        """The kind, as a detail of the entry."""
        return {} if self.kind is None else {"kind": self.kind}
