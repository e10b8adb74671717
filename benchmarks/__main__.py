"""``python -m benchmarks``: how fast cachectl is, against what people would use instead.

Prints a table: what is measured, against what, the target, the measured figure with the lowest and highest of any
single pair of runs, and the median of either side. Both sides are run by turns, once unmeasured first. Caches are made
in a scratch folder and go away again; the user's own are neither read nor written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.commands import cachectl
from benchmarks.growth import CURVES, SIZES, Curve
from benchmarks.races import Figure, Line, Result, run
from benchmarks.table import lines
from cachectl.layers.host.here import this_environment
from cachectl.verbs.bench import machine

_WIDTHS = (15, 69, 30, 15, 16, 26, 12, 12, 4)
_HEAD = ("name", "what", "against", "target", "measured", "lowest to highest", "ours", "other", "held")


def main() -> int:
    """Run what was asked for."""
    options = _options()
    known = {one.name: one for one in (CURVES if options.growth else lines())}
    if options.list:
        sys.stdout.writelines(f"{one.name:15} {_said(one)}, against {one.against}\n" for one in known.values())
        return 0
    if unknown := [name for name in options.only or () if name not in known]:
        sys.stderr.write(f"no line is called {unknown[0]!r}; there are {', '.join(known)}\n")
        return 2
    if options.scale != 1:
        sys.stdout.write(f"SCALE {options.scale:g}: the caches are NOT as large as the lines say; nothing is judged\n")
    sys.stdout.write(f"measured: {' '.join(cachectl())}\n")
    _row(_HEAD)
    chosen = list(known.values()) if options.only is None else [known[name] for name in options.only]
    measured = [found for one in chosen for found in _measured(one, options)]
    document = {**_circumstances(options), "growth" if options.growth else "lines": measured}
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot is not None:
        from benchmarks.pictures import draw

        sys.stdout.writelines(f"{path}\n" for path in draw(document, options.plot))
    return 0


def _said(one: Line | Curve) -> str:
    return one.what if isinstance(one, Line) else f"{one.verb}, {SIZES[0]:,} to {SIZES[-1]:,} {one.cache}"


def _measured(one: Line | Curve, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Measure a line, or a curve at every size, and show it at once."""
    for entries in (None,) if isinstance(one, Line) else SIZES:
        line = one if isinstance(one, Line) else one.at(entries or 0)
        result = run(line, options.scratch, options.scale, options.repeat)
        _row(_cells(result, options.scale))
        growth = (
            {} if isinstance(one, Line) else {"verb": one.verb, "cache": one.cache, "entries": _size(entries, options)}
        )
        yield {**growth, **_line(result)}


def _size(entries: int | None, options: argparse.Namespace) -> int:
    part: float = options.scale
    return max(10, round((entries or 0) * part))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", help="these lines alone")
    parser.add_argument("--list", action="store_true", help="name the lines, and measure nothing")
    parser.add_argument("--scale", metavar="F", type=float, default=1.0, help="make caches of this part of their size")
    parser.add_argument("--repeat", metavar="N", type=int, help="how often either side is measured; default: by line")
    parser.add_argument("--scratch", metavar="FOLDER", type=Path, help="default: /dev/shm, else the temporary folder")
    parser.add_argument("--growth", action="store_true", help="measure each verb at 1,000 to 1,000,000 entries instead")
    parser.add_argument("--plot", metavar="FOLDER", type=Path, help="draw what --growth measured: a PNG per verb")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every run there")
    options = parser.parse_args()
    if options.plot is not None and not options.growth:
        parser.error("--plot draws what --growth measures: give both")
    return options


def _row(cells: tuple[str, ...]) -> None:
    line = "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


def _cells(result: Result, scale: float) -> tuple[str, ...]:
    line = result.line
    if result.missing is not None:
        return (line.name, line.what, line.against, line.target, result.missing, "", "", "", "-")
    lowest, highest = result.spread
    held = "-" if result.held is None or scale != 1 else "yes" if result.held else "NO"
    peer = line.unit.write(statistics.median(result.peers)) if result.peers else "-"
    spread = f"{line.write(lowest)} to {line.write(highest)}".replace(" over it", "")
    ours = line.unit.write(statistics.median(result.ours))
    return (line.name, line.what, line.against, line.target, line.write(result.value), spread, ours, peer, held)


def _circumstances(options: argparse.Namespace) -> dict[str, object]:
    return {
        "schema": "cachectl/benchmarks/1",
        "generated": time.time(),
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "cachectl": list(cachectl()),
        "scale": options.scale,
        "machine": machine(this_environment())._asdict(),
        "python": sys.version,
    }


def _line(result: Result) -> dict[str, object]:
    line = result.line
    said: dict[str, object] = {"name": line.name, "what": line.what, "against": line.against, "target": line.target}
    if result.missing is not None:
        return {**said, "missing": result.missing}
    figures = {"figure": line.figure.value, "measured": result.value, "spread": result.spread, "held": result.held}
    if line.figure is Figure.RATIO:
        figures["unit"] = line.unit.what
    runs = [{"ours": asdict(ours), "peer": None if peer is None else asdict(peer)} for ours, peer in result.runs]
    return {**said, **figures, "folder": result.folder, "runs": runs}


if __name__ == "__main__":
    sys.exit(main())
