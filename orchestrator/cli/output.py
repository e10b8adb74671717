"""How facts are shown, as text and as JSON. Only this module prints.

JSON follows from the dataclass of a fact (:mod:`cachectl.layers.base.facts`). The file of a verb declares its tables
(:mod:`cachectl.table`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import chain, cycle, repeat
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, TextIO

from cachectl.layers.base.errors import printable
from cachectl.table import DASH, Raw, Table, Whole

if TYPE_CHECKING:
    from cachectl.layers.base.facts import Note
    from cachectl.options import Step

#: The width of a line where nothing is to be cut.
_ENDLESS: Final = 1 << 30
#: Where nothing is cut, longer cells do not widen their column: one long cell would pad every row.
_PADDED: Final = 60
#: Characters of a shortened word that are still readable.
_READABLE: Final = 8
#: By how much the further lines of a row are indented.
_INDENT: Final = 2
#: Seconds until a spinner appears.
_DELAY: Final = 0.5
#: Seconds between two looks at what it says.
_TICK: Final = 0.1
#: The width of a progress bar.
_BAR: Final = 20
#: How many of a kind text names; JSON lists them all.
_MANY: Final = 3


# ---------------------------------------------------------------------- JSON


def to_json(fact: Any) -> Any:  # noqa: ANN401 - a fact of any class, and JSON
    """Return a fact as what :mod:`json` writes."""
    from cachectl.layers.base.facts import declared, members

    if fact is None or isinstance(fact, (str, int, float)):
        return fact
    if isinstance(fact, Enum):
        return fact.value
    if isinstance(fact, PurePath):
        return str(fact)
    if isinstance(fact, Mapping):
        return {key: to_json(value) for key, value in fact.items()}
    if isinstance(fact, (tuple, list)):
        return [to_json(one) for one in fact]
    schema = declared(type(fact)).schema
    document: dict[str, object] = {} if schema is None else {"schema": schema}
    for member in members(type(fact)):
        value = getattr(fact, member.attribute)
        if member.flat:
            document.update(to_json(value))
        elif value is not None or not member.optional:
            document[member.key] = to_json(value)
    return document


def json_bytes(fact: object) -> bytes:
    """Return a fact as the JSON document of a file."""
    import json

    return json.dumps(to_json(fact), indent=2).encode() + b"\n"


def show_json(fact: object) -> None:
    """Print a fact as a JSON document."""
    with _output():
        print(json_bytes(fact).decode(), end="")


# ---------------------------------------------------------------------- words


def shorten(text: str, width: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= width:
        return text
    mark = _ellipsis()[:width]
    room = width - len(mark)
    tail = (room + 1) // 2
    return text[: room - tail] + mark + text[len(text) - tail :]


def _ellipsis() -> str:
    try:
        "…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return "..."
    return "…"


def width(stream: TextIO) -> int:
    """Return the width of a line: that of the terminal, and without end elsewhere, so that nothing is cut."""
    if not stream.isatty():
        return _ENDLESS
    from cachectl.layers.base.environment import process_variable

    named = process_variable("COLUMNS") or ""
    with suppress(OSError):
        return (int(named) if named.isdecimal() else 0) or os.get_terminal_size(stream.fileno()).columns or 80
    return 80


# ---------------------------------------------------------------------- lines


@contextmanager
def _output() -> Iterator[None]:
    """Name standard output in an error of writing to it; the error itself names nothing."""
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


def show_lines(lines: Iterable[str]) -> None:
    """Print lines of text."""
    with _output():
        for line in lines:
            print(printable(line))


def say(parts: Iterable[object]) -> None:
    """Print what a verb shows: tables, lines, and lines that stay whole; on a terminal other lines are wrapped."""
    for part in parts:
        if isinstance(part, Table):
            _show_table(part)
        elif isinstance(part, Raw):
            show_raw(part)
        elif isinstance(part, Whole) or not sys.stdout.isatty():
            show_lines([str(part)])
        else:
            line = printable(str(part))
            show_lines(_wrapped(line, " " * (len(line) - len(line.lstrip()) + 2)))


def _wrapped(line: str, indent: str) -> list[str]:
    """Divide a line into several of the width of the terminal, all but the first indented; a long word stays whole."""
    import textwrap

    wrap = textwrap.TextWrapper(
        max(20, width(sys.stdout)), subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return wrap.wrap(line) or [""]


def tell(parts: Iterable[object]) -> None:
    """Print tables and lines on standard error, and bytes as they are; a stream that is closed is no failure."""
    for part in parts:
        if isinstance(part, Table):
            show_errors(plain_table(part, width(sys.stderr)))
        elif isinstance(part, bytes):
            with suppress(OSError):
                sys.stderr.flush()
                os.write(2, part)
        else:
            show_errors([str(part)])


def show_raw(lines: Iterable[str]) -> None:
    """Print lines for a machine, byte for byte; on a terminal control characters are escaped."""
    if sys.stdout.isatty():
        show_lines(lines)
    else:
        show_bytes(b"".join(os.fsencode(line) + b"\n" for line in lines))


def show_bytes(data: bytes) -> None:
    """Write bytes to standard output."""
    with _output():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def finish() -> None:
    """Flush standard output, so that a failure is noticed."""
    with _output():
        sys.stdout.flush()


def warn(line: str, speaker: str = "cachectl") -> None:
    """Print one line on standard error."""
    show_errors([f"{speaker}: {line}"])


def show_errors(lines: Iterable[str]) -> None:
    """Print lines on standard error; one that is closed is no failure."""
    with suppress(OSError):
        for line in lines:
            print(printable(line), file=sys.stderr)


def warn_notes(about: str, notes: Sequence[Note]) -> None:
    """Warn of the first notes, and of how many more there are."""
    for note in notes[:_MANY]:
        warn(f"{about} {note.key}: {note.because}")
    if len(notes) > _MANY:
        warn(f"{about} {len(notes) - _MANY} more; --json lists them all")


# ---------------------------------------------------------------------- tables


def show_csv(table: Table[Any]) -> None:
    """Print a table as CSV: sizes in bytes, ages in seconds, and nothing for what is unknown."""
    import csv

    def cell(value: object) -> object:
        return printable(value) if isinstance(value, str) and value != DASH else None if value == DASH else value

    with _output():
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([column.name for column in table.columns])
        writer.writerows([cell(column.raw(thing)) for column in table.columns] for thing in table.rows)


def _show_table(table: Table[Any]) -> None:
    """Print a table; titles are bold on a terminal, unless NO_COLOR is set."""
    from cachectl.layers.base.environment import process_variable

    titles, rows = _lines(table, width(sys.stdout))
    if sys.stdout.isatty() and not process_variable("NO_COLOR") and process_variable("TERM") != "dumb":
        with _output():
            for title in titles:
                print(f"\x1b[1m{printable(title)}\x1b[0m")
        titles = []
    show_lines([*titles, *rows])


def plain_table(table: Table[Any], width: int = _ENDLESS) -> list[str]:
    """Return the lines of a table of at most ``width`` columns.

    Text that does not fit is shortened in the middle, in the widest column first. Numbers are never shortened, and
    names in the first column stay different from each other. If the columns still do not fit, a row takes several
    lines, each but the first indented.
    """
    titles, rows = _lines(table, width)
    return [*titles, *rows]


def _lines(table: Table[Any], width: int) -> tuple[list[str], list[str]]:
    """Return the lines of the titles, and those of the rows."""
    columns = table.columns
    rows = [[column.title for column in columns]]
    rows += [[printable(column.value(thing)) for column in columns] for thing in table.rows]
    rows += [] if table.last is None else [list(table.last)]
    texts = [list(cells) for cells in zip(*rows, strict=True)]
    shown = [
        _Shown(cells, right=column.right, first=column is columns[0])
        for column, cells in zip(columns, texts, strict=True)
        if any(cells)
    ]
    for gap in (2, 1):
        if sum(one.least for one in shown) + gap * (len(shown) - 1) <= width:
            lines = _beside(shown, width, gap)
            return lines[:1], lines[1:]
    # There is room for whole names.
    shown[0].least = min(shown[0].width, width)
    parts = [
        [" " * indent + line for line in _beside(group, width - indent)]
        for group, indent in zip(_groups(shown, width), chain((0,), repeat(_INDENT)), strict=False)
    ]
    lines = [line for row in zip(*parts, strict=True) for line in row]
    return lines[: len(parts)], lines[len(parts) :]


class _Shown:
    """The cells of a column, title included, with their width and the least width that keeps them readable."""

    def __init__(self, cells: list[str], *, right: bool, first: bool) -> None:
        self.cells = cells
        self.right = right
        self.width = max(map(len, cells))
        self.least = self.width if right else min(self.width, _READABLE)
        names = set(cells)
        while first and len({shorten(name, self.least) for name in names}) < len(names):
            self.least += 1


def _groups(shown: Sequence[_Shown], width: int) -> list[list[_Shown]]:
    """Divide columns into lines; a column that is too wide has a line of its own."""
    groups: list[list[_Shown]] = [[]]
    for one in shown:
        room = width - _INDENT * (len(groups) > 1)
        if groups[-1] and sum(other.least + 2 for other in groups[-1]) + one.least > room:
            groups.append([])
        groups[-1].append(one)
    return groups


def _beside(shown: Sequence[_Shown], width: int, gap: int = 2) -> list[str]:
    """Return columns beside each other, a line for each row."""
    widths = [one.width if width < _ENDLESS else min(one.width, _PADDED) for one in shown]
    room = width - gap * (len(shown) - 1)
    while sum(widths) > room:
        longer = [place for place, one in enumerate(shown) if widths[place] > one.least]
        # A column on a line of its own is shortened to the line.
        place = max(longer or range(len(widths)), key=widths.__getitem__)
        widths[place] -= 1
    fitted = (_fitted(one, most, cut=width < _ENDLESS) for one, most in zip(shown, widths, strict=True))
    return [(" " * gap).join(row).rstrip() for row in zip(*fitted, strict=True)]


def _fitted(shown: _Shown, width: int, *, cut: bool) -> list[str]:
    """Return the cells of a column, padded to a width and, if they are to be ``cut``, none longer."""
    cells = [shorten(cell, width) for cell in shown.cells] if cut else shown.cells
    return [cell.rjust(width) if shown.right else cell.ljust(width) for cell in cells]


# ---------------------------------------------------------------------- progress


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on a terminal, from the first half second on; yield a function to call with other words."""
    words = [what]
    if not _shows_progress():
        yield lambda _: None
        return
    import threading

    finished = threading.Event()

    def spin() -> None:
        if finished.wait(_DELAY):
            return
        for frame in cycle("|/-\\"):
            _show_line(f"{frame} {words[0]}")
            if finished.wait(_TICK):
                break
        _show_line("")

    spinner = threading.Thread(target=spin, daemon=True)
    spinner.start()
    try:
        yield lambda now: words.__setitem__(0, now)
    finally:
        finished.set()
        spinner.join()


@contextmanager
def progress() -> Iterator[Callable[[Step], None]]:
    """Yield a function to call with each step of long work; on a terminal it shows a bar."""
    if not _shows_progress():
        yield lambda _: None
        return

    def show(step: Step) -> None:
        full = _BAR * step.done // (step.total or 1)
        _show_line(f"{step.doing} [{'#' * full}{'.' * (_BAR - full)}] {step.done}/{step.total}")

    try:
        yield show
    finally:
        _show_line("")


def _shows_progress() -> bool:
    from cachectl.layers.base.environment import process_variable

    return sys.stderr.isatty() and process_variable("TERM") != "dumb"


def _show_line(line: str) -> None:
    """Replace the last line of a terminal."""
    with suppress(OSError):
        print(f"\r\x1b[K{shorten(printable(line), width(sys.stderr) - 1)}", end="", file=sys.stderr, flush=True)
