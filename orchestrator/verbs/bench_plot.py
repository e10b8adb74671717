"""The measurements of ``cachectl bench`` as a picture for a slide."""

from __future__ import annotations

import io
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from cachectl import output_files
from cachectl.layers.base import errors

#: Endings, and matplotlib's names for the formats.
_FORMS: Final = {".png": "png", ".svg": "svg"}
#: Colours that differ in print and for colour-blind readers: warm, without one layer, without any.
_WARM, _ONE_OFF, _NONE, _INK = "#2a9d8f", "#e9a03b", "#9aa5b1", "#1f2933"
#: How many settings, the last ones, have no cache.
_WITHOUT_CACHES: Final = 2
#: Length of a command that fits above the bars.
_TITLE: Final = 58


def check(name: str) -> None:
    """Raise :class:`CachectlError` if no picture of that name can be drawn: wrong ending, or no matplotlib."""
    if _form(name) is None:
        message = f"--plot {name!r}: the file name must end in {' or '.join(_FORMS)}"
        raise errors.BadRequest(message)
    if find_spec("matplotlib") is None:
        raise errors.CachectlError("--plot needs matplotlib, the extra plot: pip install 'opencl-cachectl[plot]'")


def _form(name: str) -> str | None:
    return "svg" if name == output_files.STREAM else _FORMS.get(os.path.splitext(name)[1].lower())


def draw(name: str, command: Sequence[str], below: str, settings: Mapping[str, tuple[float, ...]]) -> bytes:
    """Draw medians as bars with every run as a point; return the bytes of the file in the format of its ending.

    ``settings`` maps the titles of bars to the seconds of their runs: first the one with all caches, last the ones
    with none. ``below`` stands below the command.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    medians = [statistics.median(seconds) for seconds in settings.values()]
    colours = [_WARM, *[_ONE_OFF] * (len(medians) - _WITHOUT_CACHES - 1), *[_NONE] * _WITHOUT_CACHES]
    # Text stays text in an SVG, so that a slide can be searched.
    with mpl.rc_context({"font.size": 13, "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(10, 2 + 0.52 * len(medians)), layout="constrained")
        axes = figure.add_subplot()
        axes.barh(list(settings), medians, height=0.62, color=colours, zorder=2)
        for place, seconds in enumerate(settings.values()):
            axes.scatter(seconds, [place] * len(seconds), s=26, color=_INK, edgecolors="white", zorder=3)
        axes.invert_yaxis()
        axes.set_xlabel("wall seconds; every run is a point, and in brackets is the difference to warm")
        axes.grid(visible=True, axis="x", color="#e4e7eb", zorder=0)
        # Numbers stand beside the scale, where no run can be. Avoid -0.00.
        numbers = axes.twinx()
        over = [f"{median:.2f} ({round(median - medians[0], 2) or 0.0:+.2f})" for median in medians]
        numbers.set_yticks(range(len(over)), over)
        numbers.set_ylim(axes.get_ylim())
        for spines in (axes.spines, numbers.spines):
            spines[:].set_visible(False)
        # Programs and files without their folders, cut to the width of the picture.
        words = shlex.join(os.path.basename(word) if os.path.isabs(word) else word for word in command)
        figure.suptitle(words if len(words) <= _TITLE else words[: _TITLE - 1] + "…", fontweight="bold", color=_INK)
        axes.set_title(below)
        file = io.BytesIO()
        form = _form(name)
        figure.savefig(
            file, format=form, dpi=160, metadata={"Software" if form == "png" else "Creator": output_files.MAKER}
        )
    return file.getvalue()
