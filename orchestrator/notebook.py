"""What a notebook shows: results as HTML, and the cell magics of ``%load_ext cachectl``.

``%%disabled`` runs a cell with every cache off, ``%%isolated`` with every cache on in an empty root, and ``%%traced``
shows what the cell lost to misses. A driver that has started cannot be moved: ``%%isolated`` then says what to do
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from html import escape
from typing import TYPE_CHECKING, Any

import cachectl
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.text import printable
from cachectl.layers.host.here import this_environment
from cachectl.show.html import html

if TYPE_CHECKING:
    from cachectl.removal import Removal, RemovalPlan
    from cachectl.verbs import report
    from cachectl.watching import timeline


def load(shell: Any) -> None:  # noqa: ANN401 - IPython's, which is not imported
    """Register the magics with IPython's shell."""
    for magic in (disabled, isolated, traced):
        name, run = magic.__name__, _with_shell(shell, magic)
        shell.register_magic_function(run, "cell", name)


def show_results(shell: Any) -> None:  # noqa: ANN401 - as load
    """Have IPython's shell show results as HTML."""
    formatter = shell.display_formatter.formatters["text/html"]
    for module, name, shown in (
        ("cachectl.verbs.report", "Report", report_html),
        ("cachectl.removal", "RemovalPlan", removal_html),
        ("cachectl.removal", "Removal", removal_html),
        ("cachectl.watching.timeline", "Trace", trace_html),
    ):
        # By name, so that none of them is imported before there is one.
        formatter.for_type_by_name(module, name, shown)


def disabled() -> AbstractContextManager[object]:
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
            with magic() as entered:
                shell.run_cell(cell)
        except CachectlError as error:
            # As on the command line: one line, no traceback.
            print(f"cachectl: {printable(str(error))}")  # noqa: T201 - a notebook has no other place
            return None
        # What a trace entered has one.
        return getattr(entered, "trace", None)

    run.__doc__ = magic.__doc__
    return run


def report_html(result: report.Report) -> str:
    """Return a report as HTML."""
    from cachectl.verbs import report

    return html(report.lines(result, str(this_environment().home_folder)))


def removal_html(result: RemovalPlan | Removal) -> str:
    """Return the layers from which something goes or has gone, as HTML."""
    from cachectl.verbs.purge import is_empty, layers_table

    shown = [layer for layer in result.layers if not is_empty(layer)]
    failed = (f"{layer.layer}: {note.key}: {note.because}" for layer in result.layers for note in layer.failed)
    return html([layers_table(result, shown, "/", sums=True), *failed])


def trace_html(result: timeline.Trace) -> str:
    """Return a verdict and its timeline as HTML."""
    from cachectl.verbs import trace
    from cachectl.watching import timeline

    shown = [html(trace.show(result))]
    if result.processes:
        # The policy of the page holds in the frame.
        page = escape(timeline.page(result).decode())
        frame = f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'
        shown.append(f"<details><summary>timeline</summary>{frame}</details>")
    return "\n".join(shown)
