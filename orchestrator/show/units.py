"""Bytes, numbers, ages and paths for people; a dash means unknown."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: An unknown value.
DASH = "-"
#: How many similar messages are shown without ``-v``.
_EXAMPLES = 3


def examples(texts: Sequence[str], *, verbose: bool = False) -> list[str]:
    """Return the first few texts, or with ``verbose`` all; the last text says how many more there are."""
    shown = len(texts) if verbose else _EXAMPLES
    return [*texts[:shown], *([f"{more:,} more; -v shows all"] if (more := len(texts) - shown) > 0 else [])]


def merged(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each distinct text, with all names that have it."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    yield from ((", ".join(equal), text) for text, equal in names.items())


def short_path(place: Path | str, home: str) -> str:
    """Format a path, with ``~`` for the home folder."""
    path = str(place)
    return "~" + path[len(home) :] if home != "/" and path.startswith(home.rstrip("/") + "/") else path


def size(amount: int | None) -> str:
    """Format bytes in powers of 1024, a dash for unknown."""
    if amount is None:
        return DASH
    number = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:  # noqa: PLR2004 - the definition of the units
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def count(amount: int | None) -> str:
    """Format a number, a dash for unknown."""
    return DASH if amount is None else f"{amount:,}"


def since(moment: float | None, now: float) -> int | None:
    """Return the seconds from a moment until now; ``None`` for unknown."""
    return None if moment is None else max(0, round(now - moment))


def duration(seconds: float | None) -> str:
    """Format seconds of work, a dash for unknown."""
    return DASH if seconds is None else f"{seconds:.2f} s"


def age(passed: int | None) -> str:
    """Format an age in seconds, a dash for unknown."""
    if passed is None:
        return DASH
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if passed >= length:
            return f"{passed / length:.0f}{unit}"
    return f"{passed}s"


def moment(seconds: float) -> str:
    """Format a time in epoch seconds in local time; a dash for an invalid one."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return DASH
