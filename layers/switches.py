"""Boolean variables, read the way each library reads them."""

from __future__ import annotations

from typing import Final

_TRUE: Final = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE: Final = frozenset({"n", "no", "f", "false", "off", "0"})


def strtobool(value: str) -> bool | None:
    """Read a value as ``pytools.strtobool`` does; ``None`` where that raises (also for the empty string)."""
    lowered = value.lower()
    if lowered in _TRUE:
        return True
    return False if lowered in _FALSE else None
