"""What a file that a driver keeps tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Contents:
    """What a program is, and for what it was compiled, by what; ``None`` where it does not tell."""

    kind: str
    kernels: tuple[str, ...] | None = None
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
