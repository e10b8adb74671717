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
from dataclasses import asdict
from pathlib import Path

from benchmarks.commands import cachectl
from benchmarks.races import Figure, Result, run
from benchmarks.table import lines
from cachectl.layers.environment import Environment
from cachectl.machine import machine

_WIDTHS = (15, 44, 30, 16, 14, 24, 13, 13, 5)
_HEAD = ("name", "what", "against", "target", "measured", "lowest to highest", "ours", "other", "held")


def main() -> int:
    """Run what was asked for."""
    options = _options()
    known = {line.name: line for line in lines()}
    if options.list:
        sys.stdout.writelines(f"{line.name:15} {line.what}, against {line.against}\n" for line in known.values())
        return 0
    if unknown := [name for name in options.only or () if name not in known]:
        sys.stderr.write(f"no line is called {unknown[0]!r}; there are {', '.join(known)}\n")
        return 2
    if options.scale != 1:
        sys.stdout.write(f"SCALE {options.scale:g}: the caches are NOT as large as the lines say; nothing is judged\n")
    sys.stdout.write(f"measured: {' '.join(cachectl())}\n")
    results = []
    _row(_HEAD)
    for line in known.values() if options.only is None else [known[name] for name in options.only]:
        result = run(line, options.scratch, options.scale, options.repeat)
        results.append(result)
        _row(_cells(result, options.scale))
    if options.json is not None:
        options.json.write_text(json.dumps(_document(results, options), indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", help="these lines alone")
    parser.add_argument("--list", action="store_true", help="name the lines, and measure nothing")
    parser.add_argument("--scale", metavar="F", type=float, default=1.0, help="make caches of this part of their size")
    parser.add_argument("--repeat", metavar="N", type=int, help="how often either side is measured; default: by line")
    parser.add_argument("--scratch", metavar="FOLDER", type=Path, help="default: /dev/shm, else the temporary folder")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every run there")
    return parser.parse_args()


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


def _document(results: list[Result], options: argparse.Namespace) -> dict[str, object]:
    return {
        "schema": "cachectl/benchmarks/1",
        "generated": time.time(),
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "cachectl": list(cachectl()),
        "scale": options.scale,
        "machine": asdict(machine(Environment.here())),
        "python": sys.version,
        "lines": [_line(result) for result in results],
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
