"""The measurements of ``cachectl bench`` as a picture for a slide."""

from __future__ import annotations

import io
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.output_files import MAKER, STREAM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Endings, and matplotlib's names for the formats.
_FORMS: Final = {".png": "png", ".svg": "svg"}
#: Colours that differ in print and for colour-blind readers: warm, without one layer, without any.
_WARM: Final = "#2a9d8f"
_ONE_OFF: Final = "#e9a03b"
_NONE: Final = "#9aa5b1"
_INK: Final = "#1f2933"
_FAINT: Final = "#616e7c"
#: How many settings, the last ones, have no cache.
_WITHOUT_CACHES: Final = 2
#: Length of a command that fits above the bars.
_TITLE: Final = 58
#: Inches: of the whole picture across, of one bar, of the titles above the bars, and of the scale below.
_WIDTH: Final = 10.0
_BAR: Final = 0.52
_TOP: Final = 1.0
_BOTTOM: Final = 0.9
#: Where titles begin, as a part of the width.
_LEFT: Final = 0.025
#: Where the columns of numbers end, as a part of the scale, and the height over which runs are spread, in bars.
_MEDIAN: Final = 1.1
_OVER: Final = 1.24
_SPREAD: Final = 0.36


def check(name: str) -> None:
    """Raise :class:`CachectlError` if no picture of that name can be drawn: wrong ending, or no matplotlib."""
    if _form(name) is None:
        message = f"--plot {name!r}: the file name must end in {' or '.join(_FORMS)}"
        raise BadRequest(message)
    if find_spec("matplotlib") is None:
        raise CachectlError("--plot needs matplotlib, the extra plot: pip install 'opencl-cachectl[plot]'")


def draw(name: str, command: Sequence[str], below: str, settings: Mapping[str, tuple[float, ...]]) -> bytes:
    """Draw medians as bars with every run as a point; return the bytes of the file in the format of its ending.

    ``settings`` maps the titles of bars to the seconds of their runs: first the one with all caches, last the ones
    with none. ``below`` stands below the command.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    warm = statistics.median(next(iter(settings.values())))
    bars = list(settings.items())[::-1]
    # Text stays text in an SVG, so that a slide can be searched.
    with mpl.rc_context({"font.size": 13, "svg.fonttype": "none", "font.family": "sans-serif"}):
        height = _TOP + _BOTTOM + _BAR * len(bars)
        # A margin, because slides crop pictures.
        layout = ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.1, rect=(0, 0, 1, 1 - _TOP / height))
        figure = Figure(figsize=(_WIDTH, height), layout=layout)
        axes = figure.add_subplot()
        for place, (_, seconds) in enumerate(bars):
            first = place == len(bars) - 1
            colour = _WARM if first else _NONE if place < _WITHOUT_CACHES else _ONE_OFF
            _bar(axes, place, seconds, colour, None if first else warm)
        _scale(axes, [title for title, _ in bars], max(map(max, settings.values())))
        _title(figure, height, command, below)
        file = io.BytesIO()
        form = _form(name)
        figure.savefig(file, format=form, dpi=160, metadata={"Software" if form == "png" else "Creator": MAKER})
    return file.getvalue()


def _form(name: str) -> str | None:
    return "svg" if name == STREAM else _FORMS.get(os.path.splitext(name)[1].lower())


def _bar(axes: Axes, place: int, seconds: Sequence[float], colour: str, warm: float | None) -> None:
    median = statistics.median(seconds)
    axes.barh(place, median, height=0.62, color=colour, zorder=2)
    # Runs that took equally long lie above one another.
    step = _SPREAD / max(1, len(seconds) - 1)
    heights = [place + _SPREAD / 2 - number * step for number in range(len(seconds))]
    axes.scatter(seconds, heights, s=26, color=_INK, edgecolors="white", linewidths=0.8, zorder=3)
    # Avoid -0.00.
    over = "" if warm is None else f"{round(median - warm, 2) or 0.0:+.2f}"
    _beside(axes, place, (f"{median:.2f}", over))


def _beside(axes: Axes, place: float, words: tuple[str, str], colour: str = _INK, size: int = 13) -> None:
    """Write two columns beside the scale, where no run can be: the median, and how it differs from the warm one."""
    for text, column in zip(words, (_MEDIAN, _OVER), strict=True):
        axes.text(
            column, place, text, transform=axes.get_yaxis_transform(), ha="right", va="center", color=colour, size=size
        )


def _scale(axes: Axes, names: list[str], longest: float) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, longest * 1.04)
    axes.set_ylim(-0.5, len(names) - 0.5)
    _beside(axes, len(names) - 0.35, ("median", "to warm"), _FAINT, 12)
    axes.set_xlabel("wall seconds; every run is a point", color=_FAINT, fontsize=12)
    axes.tick_params(axis="both", length=0, colors=_INK)
    axes.tick_params(axis="x", colors=_FAINT)
    axes.grid(visible=True, axis="x", color="#e4e7eb", zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _title(figure: Figure, height: float, command: Sequence[str], below: str) -> None:
    # Programs and files without their folders, cut to the width of the picture.
    words = shlex.join(os.path.basename(word) if os.path.isabs(word) else word for word in command)
    title = words if len(words) <= _TITLE else words[: _TITLE - 1] + "…"
    for text in (
        figure.text(_LEFT, 1 - 0.2 / height, title, va="top", fontsize=18, fontweight="bold", color=_INK),
        figure.text(_LEFT, 1 - 0.6 / height, below, va="top", fontsize=13, color=_FAINT),
    ):
        # A typed $ does not begin a formula.
        text.set_parse_math(False)
