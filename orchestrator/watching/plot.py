"""The measurements of ``cachectl bench`` as a picture for a slide."""

from __future__ import annotations

import io
import os
import shlex
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.moving.output_files import MAKER
from cachectl.moving.whole_files import STREAM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cachectl.watching.bench import Bench, Setting

#: Endings, and matplotlib's names for the formats.
_FORMS: Final = {".png": "png", ".svg": "svg"}
#: Colours that differ in print and for colour-blind readers: warm, without one layer, without any.
_WARM: Final = "#2a9d8f"
_ONE_OFF: Final = "#e9a03b"
_NONE: Final = "#9aa5b1"
_INK: Final = "#1f2933"
_FAINT: Final = "#616e7c"
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


def draw(bench: Bench, name: str) -> bytes:
    """Draw medians as bars with every run as a point; return the bytes of the file in the format of its ending."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    settings = list(reversed(bench.settings))
    # Text stays text in an SVG, so that a slide can be searched.
    with mpl.rc_context({"font.size": 13, "svg.fonttype": "none", "font.family": "sans-serif"}):
        height = _TOP + _BOTTOM + _BAR * len(settings)
        # A margin, because slides crop pictures.
        layout = ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.1, rect=(0, 0, 1, 1 - _TOP / height))
        figure = Figure(figsize=(_WIDTH, height), layout=layout)
        axes = figure.add_subplot()
        for place, one in enumerate(settings):
            _bar(axes, place, one, bench)
        _scale(axes, [_label(one) for one in settings], max(second for one in settings for second in one.seconds))
        _title(figure, height, bench)
        file = io.BytesIO()
        form = _form(name)
        figure.savefig(file, format=form, dpi=160, metadata={"Software" if form == "png" else "Creator": MAKER})
    return file.getvalue()


def _form(name: str) -> str | None:
    return "svg" if name == STREAM else _FORMS.get(os.path.splitext(name)[1].lower())


def _bar(axes: Axes, place: int, one: Setting, bench: Bench) -> None:
    colour = _WARM if one.setting == "warm" else _NONE if one.layer is None else _ONE_OFF
    axes.barh(place, one.median, height=0.62, color=colour, zorder=2)
    # Runs that took equally long lie above one another.
    step = _SPREAD / max(1, len(one.seconds) - 1)
    heights = [place + _SPREAD / 2 - number * step for number in range(len(one.seconds))]
    axes.scatter(one.seconds, heights, s=26, color=_INK, edgecolors="white", linewidths=0.8, zorder=3)
    over = round(one.median - bench["warm"].median, 2)
    # Avoid -0.00.
    _beside(axes, place, (f"{one.median:.2f}", "" if one.setting == "warm" else f"{over or 0.0:+.2f}"))


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


def _label(one: Setting) -> str:
    return f"all caches {one.setting}" if one.layer is None else f"without {one.layer}"


def _title(figure: Figure, height: float, bench: Bench) -> None:
    runs = len(bench["warm"].seconds)
    repeated = "once each" if runs == 1 else f"{runs} times each"
    said = f"{bench.machine.title} · {repeated}"
    command = figure.text(_LEFT, 1 - 0.2 / height, _command(bench.command), va="top", fontsize=18, fontweight="bold")
    below = figure.text(_LEFT, 1 - 0.6 / height, said, va="top", fontsize=13)
    for text, colour in ((command, _INK), (below, _FAINT)):
        text.set_color(colour)
        # A typed $ does not begin a formula.
        text.set_parse_math(False)


def _command(command: tuple[str, ...]) -> str:
    """Return a short form of a command: programs and files without their folders, cut to the width of the picture."""
    words = shlex.join(os.path.basename(word) if os.path.isabs(word) else word for word in command)
    return words if len(words) <= _TITLE else words[: _TITLE - 1] + "…"
