"""HTML for notebooks of what a verb shows."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from cachectl.layers.base.text import printable
from cachectl.show.table import Table


def html(parts: Iterable[object]) -> str:
    """Return tables and lines as HTML."""
    shown = []
    for part in parts:
        if part and isinstance(part, str):
            shown.append(f"<div>{escape(printable(part))}</div>")
        elif isinstance(part, Table):
            titles = "".join(f"<th>{escape(title)}</th>" for title in part.columns)
            lines = [f"<tr>{titles}</tr>"]
            for row in (*part.rows, *([part.last] if part.last else [])):
                cells = []
                for form, cell in zip(part.columns.values(), row, strict=True):
                    side = "left" if form is str else "right"
                    text = escape(printable(cell if isinstance(cell, str) else form(cell)))
                    cells.append(f'<td style="text-align: {side}">{text}</td>')
                lines.append(f"<tr>{''.join(cells)}</tr>")
            shown.append(f"<table>{''.join(lines)}</table>")
    return "\n".join(shown)
