"""Tables as data: columns, rows and the texts of cells. The command line prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")

#: Stands for what is unknown.
DASH: Final = "-"


class Column(Generic[T]):
    """A column of a table: its title, the text of its cells, and whether that is a number.

    ``raw`` is the value for machines, by default the text; ``name`` is its title there.
    """

    def __init__(
        self,
        title: str,
        value: Callable[[T], str],
        *,
        right: bool = False,
        raw: Callable[[T], object] | None = None,
        name: str | None = None,
    ) -> None:
        self.title = title
        self.value = value
        self.right = right
        self.raw = raw or value
        self.name = title if name is None else name


class Table(Generic[T]):
    """Rows, and the columns that show them; ``last`` are the cells of one more row."""

    def __init__(self, columns: Sequence[Column[T]], rows: Iterable[T], last: Sequence[str] | None = None) -> None:
        self.columns = columns
        self.rows = tuple(rows)
        self.last = last


class Whole(str):
    """A line that is never wrapped, such as a command to copy."""

    __slots__ = ()


class Raw(tuple[str, ...]):
    """Lines for machines: written byte for byte, except on a terminal."""

    __slots__ = ()


def counts(title: str, value: Callable[[T], int | None]) -> Column[T]:
    """Return a column of numbers."""
    return Column(title, lambda row: count(value(row)), right=True, raw=value)


def sizes(title: str, value: Callable[[T], int | None]) -> Column[T]:
    """Return a column of sizes in bytes."""
    return Column(title, lambda row: size(value(row)), right=True, raw=value)


def ages(title: str, value: Callable[[T], float | None], now: float) -> Column[T]:
    """Return a column of ages: the time from epoch seconds to ``now``; for machines in seconds."""

    def seconds(row: T) -> int | None:
        moment = value(row)
        return None if moment is None else max(0, round(now - moment))

    return Column(title, lambda row: age(value(row), now), right=True, raw=seconds)


def size(amount: int | None) -> str:
    """Format bytes in powers of 1024, a dash for unknown."""
    if amount is None:
        return DASH
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - the definition of the units
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(amount: int | None) -> str:
    """Format a number, a dash for unknown."""
    return DASH if amount is None else f"{amount:,}"


def age(moment: float | None, now: float) -> str:
    """Format how long ago a moment was, a dash for unknown."""
    if moment is None:
        return DASH
    seconds = max(0.0, now - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
