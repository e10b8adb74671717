"""What a notebook shows: facts as HTML, and the cell magics of ``%load_ext cachectl``.

``%%cold`` runs a cell with every cache off, ``%%isolated`` with every cache on in an empty root, and ``%%traced`` shows
what the cell lost to misses. A driver that has started cannot be moved: ``%%isolated`` then says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from html import escape
from typing import Any

import cachectl
from cachectl import verbs
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.text import printable


def load(shell: Any) -> None:  # noqa: ANN401 - IPython's, which is not imported
    """Register the magics with IPython's shell."""
    for magic in (cold, isolated, traced):
        name, run = magic.__name__, _with_shell(shell, magic)
        shell.register_magic_function(run, "cell", name)


def cold() -> AbstractContextManager[object]:
    """Run the cell with every cache off; where a driver has started, its builds are salted."""
    return cachectl.disabled(strict=False)


def isolated() -> AbstractContextManager[object]:
    """Run the cell with every cache on, in an empty root."""
    return cachectl.isolated()


def traced() -> AbstractContextManager[object]:
    """Run the cell, and show what it lost to misses."""
    return cachectl.traced()


def _with_shell(shell: Any, magic: Callable[[], AbstractContextManager[object]]) -> Callable[[str, str], object]:  # noqa: ANN401 - as load
    def run(_line: str, cell: str) -> object:
        try:
            with magic() as result:
                shell.run_cell(cell)
        except CachectlError as error:
            # As on the command line: one line, no traceback.
            print(f"cachectl: {printable(str(error))}")  # noqa: T201 - a notebook has no other place
            return None
        return result if magic is traced else None

    run.__doc__ = magic.__doc__
    return run


def html(parts: Iterable[object]) -> str:
    """Return what a verb shows as HTML: tables as tables, lines as they are."""
    shown = (part for part in parts if part and isinstance(part, (verbs.Table, str)))
    return "\n".join(
        _table(part) if isinstance(part, verbs.Table) else f"<div>{escape(printable(part))}</div>" for part in shown
    )


def _table(table: verbs.Table) -> str:
    columns = list(table.columns.items())
    lines = ["<tr>" + "".join(f"<th>{escape(title)}</th>" for title, _ in columns) + "</tr>"]
    for row in (*table.rows, *([table.last] if table.last else [])):
        cells = []
        for (_, shown), cell in zip(columns, row, strict=True):
            side = "left" if shown is str else "right"
            text = printable(cell if isinstance(cell, str) else shown(cell))
            cells.append(f'<td style="text-align: {side}">{escape(text)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def framed(page: bytes, title: str) -> str:
    """Return a page of :mod:`cachectl.pages` to be opened in place; its own policy holds in the frame."""
    frame = f'<iframe srcdoc="{escape(page.decode())}" style="width: 100%; height: 40em; border: 0"></iframe>'
    return f"<details><summary>{escape(title)}</summary>{frame}</details>"
