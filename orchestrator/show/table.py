"""Tables: as data, as lines of text with a given width, and as CSV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cachectl.layers.base.text import printable
from cachectl.show.units import DASH

#: The width of a line in which nothing is cut.
ENDLESS = 1 << 30
#: Where nothing is cut, longer cells do not widen their column: otherwise one long cell would pad every row.
_PADDED = 60
#: Characters of a shortened word that are still readable.
_READABLE = 8
#: The format of the cells of each column, by title: ``str`` for texts, a function for numbers, which are right-aligned.
Columns = Mapping[str, Callable[[Any], str]]


class Table(NamedTuple):
    """Rows and their columns; ``last`` is one more row, for people only."""

    columns: Columns
    rows: Sequence[Sequence[Any]]
    last: Sequence[Any] = ()


def shorten(text: str, width: int, *, at_end: bool = False) -> str:
    """Shorten a text in the middle, or at its end."""
    if len(text) <= width:
        return text
    mark = "…"
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        mark = "..."
    room = max(0, width - len(mark))
    tail = 0 if at_end else (room + 1) // 2
    return text[: room - tail] + mark[:width] + text[len(text) - tail :]


def csv_text(table: Table) -> str:
    """Return a table as CSV: sizes in bytes, ages in seconds; unknown cells are empty."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        cells = [None if cell == DASH else cell for cell in row]
        writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()


def plain_table(table: Table, width: int = ENDLESS) -> list[str]:
    """Return the lines of a table of at most ``width`` columns.

    Text that does not fit is shortened, in the widest column first: in the middle, a :func:`sentence` at its end.
    Numbers are never shortened, and different names in the first column stay different. If the columns still do not
    fit, a row takes several lines, all but the first indented.
    """
    return [line for lines in row_lines(table, width) for line in lines]


def sentence(text: str) -> str:
    """Return a cell as it is; what does not fit of it is left out at its end."""
    return text


class _Column(NamedTuple):
    """The cells of a column with its title, and the least width at which they are readable; numbers are padded."""

    cells: list[str]
    least: int
    is_sentence: bool = False


def row_lines(table: Table, width: int) -> list[tuple[str, ...]]:
    """Return the lines of each row, that of the titles first."""
    rows = [*table.rows, *([table.last] if table.last else [])]
    columns: list[_Column] = []
    for number, (title, shown) in enumerate(table.columns.items()):
        cells = [row[number] for row in rows]
        texts = [title, *(printable(cell if isinstance(cell, str) else shown(cell)) for cell in cells)]
        least = widest = max(map(len, texts))
        if shown not in (str, sentence):
            texts = [text.rjust(widest) for text in texts]
        else:
            least = min(widest, _READABLE)
            while not number and len({shorten(text, least) for text in texts}) < len({*texts}):
                least += 1
        if any(texts):
            columns.append(_Column(texts, least, is_sentence=shown is sentence))
    for gap in (2, 1):
        if sum(column.least + gap for column in columns) - gap <= width:
            return [(line,) for line in _side_by_side(columns, width, gap)]
    # On several lines, there is room for full names.
    names = columns[0].cells
    columns[0] = _Column(names, min(max(map(len, names)), width))
    groups: list[list[_Column]] = [[]]
    for column in columns:
        room = width - 2 * (len(groups) > 1)
        if groups[-1] and sum(earlier.least + 2 for earlier in groups[-1]) + column.least > room:
            groups.append([])
        groups[-1].append(column)
    parts = [_side_by_side(groups[0], width, 2)]
    parts += [[f"  {line}" for line in _side_by_side(group, width - 2, 2)] for group in groups[1:]]
    return list(zip(*parts, strict=True))


def _side_by_side(columns: Sequence[_Column], width: int, gap: int) -> list[str]:
    """Return one line for each row of some columns; the widest columns are shortened until the line fits."""
    cut = width < ENDLESS // 2
    widths = [min(max(map(len, column.cells)), ENDLESS if cut else _PADDED) for column in columns]
    while sum(widths) + gap * (len(columns) - 1) > width:
        longer = [place for place, column in enumerate(columns) if widths[place] > column.least]
        # The only column of a line can become narrower than readable.
        place = max(longer or range(len(widths)), key=widths.__getitem__)
        widths[place] -= 1
    lines = []
    for row in zip(*(column.cells for column in columns), strict=True):
        fields = zip(row, widths, columns, strict=True)
        cells = [
            (shorten(cell, most, at_end=column.is_sentence) if cut else cell).ljust(most)
            for cell, most, column in fields
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return lines
