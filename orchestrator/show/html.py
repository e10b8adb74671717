"""HTML for notebooks of what a verb shows."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from cachectl.layers.base.text import printable
from cachectl.show.table import Table


def html(parts: Iterable[object]) -> str:
    """Return tables and lines as HTML."""
    shown = (part for part in parts if part and isinstance(part, (Table, str)))
    return "\n".join(
        _table(part) if isinstance(part, Table) else f"<div>{escape(printable(part))}</div>" for part in shown
    )


def _table(table: Table) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in table.columns)
    lines = [f"<tr>{titles}</tr>"]
    for row in (*table.rows, *([table.last] if table.last else [])):
        cells = []
        for form, cell in zip(table.columns.values(), row, strict=True):
            side = "left" if form is str else "right"
            text = escape(printable(cell if isinstance(cell, str) else form(cell)))
            cells.append(f'<td style="text-align: {side}">{text}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"
