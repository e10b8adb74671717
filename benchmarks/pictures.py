"""How cost grows, as a picture for each verb: ``python -m benchmarks.pictures GROWTH.json FOLDER``."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The colours of ``cachectl bench``: ours, and the other.
_OURS = "#2a9d8f"
_PEER = "#9aa5b1"
_INK = "#1f2933"
_FAINT = "#616e7c"
_TITLES = {"report": "cachectl report", "ls": "cachectl ls --kernel NAME", "purge": "cachectl purge"}
#: What is counted along the lower edge.
_COUNTED = {"programs": "programs of PoCL (three files each)", "rows": "rows of a loopy dictionary (5 kB each)"}

#: One point of a curve, as it stands in the JSON.
Point = dict[str, Any]


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw a PNG per verb: a panel for each kind of cache, ours against the other, both axes logarithmic."""
    folder.mkdir(parents=True, exist_ok=True)
    points = [point for point in document["growth"] if "missing" not in point]
    made = []
    for verb in dict.fromkeys(point["verb"] for point in points):
        path = folder / f"growth-{verb}.png"
        _picture([point for point in points if point["verb"] == verb], verb, document, path)
        made.append(path)
    return made


def _picture(points: list[Point], verb: str, document: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # In the same order in each picture, whichever was measured first.
    caches = [cache for cache in _COUNTED if any(point["cache"] == cache for point in points)]
    with mpl.rc_context({"font.size": 13, "font.family": "sans-serif"}):
        figure = Figure(figsize=(5.6 * len(caches) + 0.4, 5.4), layout="constrained")
        panels = figure.subplots(1, len(caches), squeeze=False)[0]
        for axes, cache in zip(panels, caches, strict=True):
            _panel(axes, [point for point in points if point["cache"] == cache], cache)
        figure.suptitle(_TITLES[verb], x=0.02, ha="left", fontsize=18, fontweight="bold", color=_INK)
        figure.supxlabel(_said(document), x=0.02, ha="left", fontsize=11, color=_FAINT)
        figure.savefig(path, dpi=160)


def _said(document: dict[str, Any]) -> str:
    found = document["machine"]
    scale = "" if document["scale"] == 1 else f" - SCALE {document['scale']:g}"
    return f"{found['cpu']}, {found['cpus']} CPUs - median of wall seconds, bars from lowest to highest{scale}"


def _panel(axes: Axes, points: list[Point], cache: str) -> None:
    points = sorted(points, key=lambda point: point["entries"])
    against = points[0]["against"]
    for side, colour, name in (("peer", _PEER, against), ("ours", _OURS, "cachectl")):
        seconds = [[run[side]["wall"] for run in point["runs"]] for point in points]
        middle = [statistics.median(one) for one in seconds]
        reach = (
            [here - min(one) for here, one in zip(middle, seconds, strict=True)],
            [max(one) - here for here, one in zip(middle, seconds, strict=True)],
        )
        entries = [point["entries"] for point in points]
        axes.errorbar(
            *(entries, middle, reach), color=colour, marker="o", markersize=7, linewidth=2.5, capsize=3, label=name
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(_COUNTED[cache], color=_FAINT, fontsize=12)
    axes.set_ylabel("seconds", color=_FAINT, fontsize=12)
    axes.tick_params(axis="both", which="both", length=0, colors=_FAINT)
    axes.grid(visible=True, color="#e4e7eb", zorder=0)
    axes.set_axisbelow(True)
    axes.margins(x=0.08, y=0.12)
    axes.legend(loc="upper left", frameon=False, labelcolor="linecolor", prop={"weight": "bold"})
    for edge in ("top", "right", "bottom", "left"):
        axes.spines[edge].set_visible(False)


def main() -> None:
    """Draw what an earlier run has written."""
    document, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    sys.stdout.writelines(f"{path}\n" for path in draw(document, folder))


if __name__ == "__main__":
    main()
