"""Printing: what verbs show. No other module prints.

:mod:`cachectl.show` has tables, units and JSON. It is imported when something is shown: help does not need it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from cachectl.layers.base.text import printable
from cachectl.layers.host.variables import process_variable

# Help needs neither typing nor the code that verbs share.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

    from cachectl import verbs
    from cachectl.layers.core.entry import Note
    from cachectl.show.table import Table

#: The width of a progress bar.
_BAR = 20
#: Seconds before a bar is drawn, and between two drawings.
_PATIENCE, _REDRAWN = 0.5, 0.1
#: The bar that is shown, if any.
_BARS: list[_Bar] = []
#: Up to so many reasons, each has its own line.
_MANY = 3


def show_json(fact: object) -> None:
    """Print a fact as a JSON document."""
    from cachectl.show.document import json_bytes

    _write(json_bytes(fact).decode())


def show_rows(fact: object) -> None:
    """Print a fact as JSON, one row per line."""
    from cachectl.show.document import json_rows

    _write(json_rows(fact).decode())


def _write(text: str) -> None:
    """Write to standard output; an error names it."""
    try:
        sys.stdout.write(text)
    except OSError as error:
        error.filename = "standard output"
        raise


def show_bytes(data: bytes) -> None:
    """Write bytes to standard output and flush it, to notice a failure."""
    try:
        sys.stdout.flush()
        if data:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except OSError as error:
        error.filename = "standard output"
        raise


def show_raw(lines: Iterable[str]) -> None:
    """Print lines for programs, byte for byte; on a terminal, control characters are escaped."""
    if sys.stdout.isatty():
        say([lines])
    else:
        show_bytes(b"".join(os.fsencode(line) + b"\n" for line in lines))


def say(parts: Iterable[Any]) -> None:
    """Print tables, lines (wrapped on a terminal), and lists of lines (never wrapped)."""
    from cachectl.show.table import Table, row_lines

    terminal = sys.stdout.isatty()
    has_colour = terminal and not process_variable("NO_COLOR") and process_variable("TERM") != "dumb"
    for part in parts:
        lines = [part] if isinstance(part, str) else part
        if isinstance(part, Table):
            rows = row_lines(part, width(sys.stdout))
            if has_colour:
                _write("".join(f"\x1b[1m{printable(title)}\x1b[0m\n" for title in rows.pop(0)))
            lines = [line for row in rows for line in row]
        elif isinstance(part, str) and terminal:
            import textwrap

            text, most = printable(part), max(20, width(sys.stdout))
            indent = " " * (len(text) - len(text.lstrip()) + 2)
            lines = textwrap.wrap(
                text, most, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
            ) or [""]
        for line in lines:
            _write(f"{printable(line)}\n")


def say_on_stderr(parts: Iterable[Any]) -> None:
    """Print tables and lines on standard error, and bytes as they are; a closed stream is no failure."""
    from cachectl.show.table import Table, plain_table

    with suppress(OSError):
        for part in parts:
            for bar in _BARS:
                bar.draw("")
            if isinstance(part, bytes):
                sys.stderr.flush()
                os.write(2, part)
                continue
            lines = plain_table(part, width(sys.stderr)) if isinstance(part, Table) else part
            for line in [lines] if isinstance(lines, str) else lines:
                print(printable(line), file=sys.stderr)


def warn(line: str, speaker: str = "cachectl") -> None:
    """Print one line on standard error."""
    say_on_stderr([f"{speaker}: {line}"])


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each Python warning of a block as one line."""
    import warnings

    with warnings.catch_warnings():
        # Each one once, whatever filters the user has set.
        warnings.simplefilter("default", RuntimeWarning)
        warnings.showwarning = lambda message, *_: warn(str(message))
        yield


def warn_notes(about: str, notes: Sequence[Note], *, verbose: bool) -> None:
    """Warn of notes: with ``verbose`` one line each, else one line per reason, or one for many reasons."""
    from cachectl.layers.core.entry import keys_by_reason
    from cachectl.show.units import examples

    reasons = keys_by_reason(notes) if notes else {}
    if not verbose and len(reasons) > _MANY:
        warn(f"{about} {len(notes):,}: {'; '.join(examples([f'{note.key}: {note.because}' for note in notes]))}")
        return
    for reason, keys in reasons.items():
        if verbose or len(keys) == 1:
            for key in keys:
                warn(f"{about} {reason}" if key == "*" else f"{about} {key}: {reason}")
        else:
            warn(f"{about} {len(keys):,}: {reason}: {', '.join(examples(keys))}")


def width(stream: TextIO) -> int:
    """Return the width of the terminal; elsewhere it is endless, so that nothing is cut."""
    if not stream.isatty():
        from cachectl.show.table import ENDLESS

        return ENDLESS
    named = process_variable("COLUMNS") or ""
    with suppress(OSError):
        return (int(named) if named.isdecimal() else 0) or os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def show_csv(table: Table) -> None:
    """Print a table as CSV."""
    from cachectl.show.table import csv_text

    _write(csv_text(table))


# ---------------------------------------------------------------------- progress


class _Bar:
    """A progress line on a terminal, which a thread draws after half a second."""

    def __init__(self, what: str) -> None:
        import threading

        self.line = ""
        self.step(0, what)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.keep_drawing, daemon=True)
        with suppress(RuntimeError):
            self._thread.start()

    def step(self, number: float = 1, what: str | None = None, total: int | None = None) -> None:
        """Add a number to the count; ``what`` starts a new count, of a ``total`` if known."""
        if what is not None:
            self._what, self._count, self._total = what, 0.0, total
        self._count += number

    def keep_drawing(self) -> None:
        """Draw until the end."""
        seconds = _PATIENCE
        while not self._ended.wait(seconds):
            seconds = _REDRAWN
            what, count, total = self._what, int(self._count), self._total
            if total:
                full = _BAR * min(count, total) // total
                self.draw(f"{what} [{'#' * full}{'.' * (_BAR - full)}] {count:,}/{total:,}")
            else:
                self.draw(f"{what} {count:,}" if count else what)

    def draw(self, text: str) -> None:
        """Replace the line; an empty text removes it."""
        from cachectl.show.table import shorten

        if printable(text) != self.line:
            self.line = printable(text)
            with suppress(OSError):
                print(f"\r\x1b[K{shorten(self.line, width(sys.stderr) - 1)}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the line."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.draw("")


def step(number: float = 1, what: str | None = None, total: int | None = None) -> None:
    """Count on the bar that is shown, if any, as :meth:`_Bar.step` does."""
    for bar in _BARS:
        bar.step(number, what, total)


@contextmanager
def progress(what: str = "") -> Iterator[verbs.Progress]:
    """Show progress on a terminal; yield :func:`step`, which environments of the command line have too."""
    if not sys.stderr.isatty() or process_variable("TERM") == "dumb":
        yield step
        return
    bar = _Bar(what)
    _BARS.append(bar)
    try:
        yield step
    finally:
        _BARS.remove(bar)
        bar.end()
