"""How facts are shown, as text and as JSON. Only this module prints.

JSON follows from the class of a fact (:mod:`cachectl.layers.core.json_form`). The file of a verb declares its tables
(:mod:`cachectl.verbs`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from types import SimpleNamespace

from cachectl.layers.base.text import printable
from cachectl.layers.host.variables import process_variable

# Help needs neither typing nor what verbs share.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

    from cachectl import verbs
    from cachectl.layers.core.entry import Note

#: The width of a line where nothing is to be cut.
_ENDLESS = 1 << 30
#: Where nothing is cut, longer cells do not widen their column: one long cell would pad every row.
_PADDED = 60
#: Characters of a shortened word that are still readable.
_READABLE = 8
#: The width of a progress bar.
_BAR = 20
#: The line of progress that stands on the terminal, if there is one.
_PROGRESS: list[str] = []
#: How many of a kind text names; JSON lists them all.
_MANY = 3


# ---------------------------------------------------------------------- JSON


def json_bytes(fact: object) -> bytes:
    """Return a fact as the JSON document of a file."""
    from cachectl.layers.base.documents import encode_json

    return encode_json(_plain(fact), indent=2) + b"\n"


def _plain(fact: Any) -> Any:  # noqa: ANN401 - a fact of any class, and what JSON has
    """Return what JSON has for a fact: its keys, with what JSON has for their values."""
    if fact is None or isinstance(fact, (str, int, float)):
        # What no number of JSON can say is unknown.
        return None if isinstance(fact, float) and not math.isfinite(fact) else fact
    if isinstance(fact, Enum):
        return fact.value
    if isinstance(fact, os.PathLike):
        return os.fspath(fact)
    if isinstance(fact, SimpleNamespace):
        fact = vars(fact)
    if isinstance(fact, Mapping):
        return {key: _plain(value) for key, value in fact.items()}
    if isinstance(fact, (list, tuple)) and not hasattr(fact, "_fields"):
        return [_plain(value) for value in fact]
    from cachectl.layers.core.json_form import declared, json_keys

    say = declared(type(fact))
    document: dict[str, object] = {} if say.schema is None else {"schema": say.schema}
    for attribute, key in json_keys(type(fact)).items():
        value = getattr(fact, attribute)
        if attribute in say.flat:
            document.update(_plain(value))
        elif value is not None or attribute not in say.optional:
            document[key] = _plain(value)
    return document


def show_json(fact: object) -> None:
    """Print a fact as a JSON document."""
    _write(json_bytes(fact).decode())


def show_rows(fact: object) -> None:
    """Print a fact as one JSON document a line: what it has beside lists, and how long these are, then each item."""
    from cachectl.layers.base.documents import encode_json

    document = _plain(fact)
    lists = {name: value for name, value in document.items() if isinstance(value, list)}
    head = {name: value for name, value in document.items() if name not in lists}
    rows = [{name: item} for name, items in lists.items() for item in items]
    counts = {name: len(items) for name, items in lists.items()}
    _write("".join(f"{encode_json(row).decode()}\n" for row in ({**head, "rows": counts}, *rows)))


# ---------------------------------------------------------------------- lines


def _write(text: str) -> None:
    """Write to standard output, and name it in an error, which by itself names nothing."""
    try:
        sys.stdout.write(text)
    except OSError as error:
        error.filename = "standard output"
        raise


def show_bytes(data: bytes) -> None:
    """Write bytes to standard output, and flush it, so that a failure is noticed."""
    try:
        sys.stdout.flush()
        if data:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except OSError as error:
        error.filename = "standard output"
        raise


def show_raw(lines: Iterable[str]) -> None:
    """Print lines for a machine, byte for byte; on a terminal control characters are escaped."""
    if sys.stdout.isatty():
        _show_lines(lines)
    else:
        show_bytes(b"".join(os.fsencode(line) + b"\n" for line in lines))


def _show_lines(lines: Iterable[str]) -> None:
    for line in lines:
        _write(f"{printable(line)}\n")


def say(parts: Iterable[Any]) -> None:
    """Print what a verb shows: tables, lines, which are wrapped on a terminal, and lists of lines, which are not."""
    from cachectl import verbs

    terminal = sys.stdout.isatty()
    for part in parts:
        if isinstance(part, verbs.Table):
            rows = _rows(part, width(sys.stdout))
            if terminal and not process_variable("NO_COLOR") and process_variable("TERM") != "dumb":
                _write("".join(f"\x1b[1m{printable(title)}\x1b[0m\n" for title in rows.pop(0)))
            _show_lines(line for lines in rows for line in lines)
        elif isinstance(part, str):
            _show_lines(_wrapped(printable(part)) if terminal else [part])
        else:
            _show_lines(part)


def _wrapped(line: str) -> list[str]:
    """Divide a line into several of the width of the terminal, all but the first indented; a long word stays whole."""
    import textwrap

    indent = " " * (len(line) - len(line.lstrip()) + 2)
    most = max(20, width(sys.stdout))
    wrapped = textwrap.wrap(line, most, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return wrapped or [""]


def say_on_stderr(parts: Iterable[Any]) -> None:
    """Print tables and lines on standard error, and bytes as they are; a stream that is closed is no failure."""
    from cachectl import verbs

    with suppress(OSError):
        for part in parts:
            if _PROGRESS:
                _show_progress("")
            if isinstance(part, bytes):
                sys.stderr.flush()
                os.write(2, part)
                continue
            lines = plain_table(part, width(sys.stderr)) if isinstance(part, verbs.Table) else part
            for line in [lines] if isinstance(lines, str) else lines:
                print(printable(line), file=sys.stderr)


def warn(line: str, speaker: str = "cachectl") -> None:
    """Print one line on standard error."""
    say_on_stderr([f"{speaker}: {line}"])


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each warning that Python code of a block issues as one line."""
    import warnings

    with warnings.catch_warnings():
        # Each once, whatever the user has set for programs.
        warnings.simplefilter("default", RuntimeWarning)
        warnings.showwarning = lambda message, *_: warn(str(message))
        yield


def warn_notes(about: str, notes: Sequence[Note]) -> None:
    """Warn of the first notes, and of how many more there are."""
    for note in notes[:_MANY]:
        warn(f"{about} {note.key}: {note.because}")
    if len(notes) > _MANY:
        warn(f"{about} {len(notes) - _MANY} more; --json lists them all")


# ---------------------------------------------------------------------- tables


def width(stream: TextIO) -> int:
    """Return the width of a line: that of the terminal, and without end elsewhere, so that nothing is cut."""
    if not stream.isatty():
        return _ENDLESS
    named = process_variable("COLUMNS") or ""
    with suppress(OSError):
        return (int(named) if named.isdecimal() else 0) or os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def shorten(text: str, width: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= width:
        return text
    mark = "…"
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        mark = "..."
    room = max(0, width - len(mark))
    tail = (room + 1) // 2
    return text[: room - tail] + mark[:width] + text[len(text) - tail :]


def show_csv(table: verbs.Table) -> None:
    """Print a table as CSV: sizes in bytes, ages in seconds, and nothing for what is unknown."""
    import csv
    import io

    from cachectl import verbs

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        cells = [None if cell == verbs.DASH else cell for cell in row]
        writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in cells])
    _write(text.getvalue())


def plain_table(table: verbs.Table, width: int = _ENDLESS) -> list[str]:
    """Return the lines of a table of at most ``width`` columns.

    Text that does not fit is shortened in the middle, in the widest column first. Numbers are never shortened, and
    names in the first column stay different from each other. If the columns still do not fit, a row takes several
    lines, each but the first indented.
    """
    return [line for lines in _rows(table, width) for line in lines]


#: The cells of a column, title included, and the least width that keeps them readable; numbers are padded to theirs.
_Column = tuple[list[str], int]


def _column(title: str, shown: Callable[[Any], str], cells: Iterable[Any], *, first: bool) -> _Column:
    texts = [title, *(printable(cell if isinstance(cell, str) else shown(cell)) for cell in cells)]
    widest = max(map(len, texts))
    if shown is not str:
        return [text.rjust(widest) for text in texts], widest
    least, names = min(widest, _READABLE), set(texts)
    while first and len({shorten(name, least) for name in names}) < len(names):
        least += 1
    return texts, least


def _rows(table: verbs.Table, width: int) -> list[tuple[str, ...]]:
    """Return the lines of each row, that of the titles first."""
    rows = [*table.rows, *([table.last] if table.last else [])]
    columns = [
        _column(title, shown, [row[number] for row in rows], first=not number)
        for number, (title, shown) in enumerate(table.columns.items())
    ]
    columns = [column for column in columns if any(column[0])]
    for gap in (2, 1):
        if sum(least + gap for _, least in columns) - gap <= width:
            return [(line,) for line in _side_by_side(columns, width, gap)]
    # There is room for whole names.
    names = columns[0][0]
    columns[0] = (names, min(max(map(len, names)), width))
    groups: list[list[_Column]] = [[]]
    for column in columns:
        room = width - 2 * (len(groups) > 1)
        if groups[-1] and sum(least + 2 for _, least in groups[-1]) + column[1] > room:
            groups.append([])
        groups[-1].append(column)
    parts = [_side_by_side(groups[0], width, 2)]
    parts += [[f"  {line}" for line in _side_by_side(group, width - 2, 2)] for group in groups[1:]]
    return list(zip(*parts, strict=True))


def _side_by_side(columns: Sequence[_Column], width: int, gap: int) -> list[str]:
    """Return a line for each row of some columns, with the widest columns shortened to the width."""
    cut = width < _ENDLESS // 2
    widths = [min(max(map(len, cells)), _ENDLESS if cut else _PADDED) for cells, _ in columns]
    while sum(widths) + gap * (len(columns) - 1) > width:
        longer = [place for place, (_, least) in enumerate(columns) if widths[place] > least]
        # A column on a line of its own is shortened to the line.
        place = max(longer or range(len(widths)), key=widths.__getitem__)
        widths[place] -= 1
    lines = []
    for row in zip(*(cells for cells, _ in columns), strict=True):
        cells = [(shorten(cell, most) if cut else cell).ljust(most) for cell, most in zip(row, widths, strict=True)]
        lines.append((" " * gap).join(cells).rstrip())
    return lines


# ---------------------------------------------------------------------- progress


@contextmanager
def progress(what: str = "") -> Iterator[verbs.Progress]:
    """Show on a terminal what is done; yield a function to call with what is done next, with a bar for long work."""
    if not sys.stderr.isatty() or process_variable("TERM") == "dumb":
        yield lambda *_: None
        return
    try:
        if what:
            _show_progress(what)
        yield _show_progress
    finally:
        _show_progress("")


def _show_progress(text: str, done: int | None = None, total: int | None = None) -> None:
    """Replace the last line of a terminal."""
    if done is not None:
        full = _BAR * done // (total or 1)
        text = f"{text} [{'#' * full}{'.' * (_BAR - full)}] {done}/{total}"
    line = printable(text)
    _PROGRESS[:] = [line] if line else []
    with suppress(OSError):
        print(f"\r\x1b[K{shorten(line, width(sys.stderr) - 1)}", end="", file=sys.stderr, flush=True)
