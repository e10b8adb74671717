"""What the bytes of an entry say about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Details:
    """What an entry is, and for what it was compiled, by what; ``None`` is unknown.

    ``kind`` is one of the kinds of entry that the cache holds, where it holds several.
    """

    kind: str | None = None
    kernels: tuple[str, ...] | None = None
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> Mapping[str, str]:
        """The kind, as a detail of the entry."""
        return {} if self.kind is None else {"kind": self.kind}
