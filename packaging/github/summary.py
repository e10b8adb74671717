"""Write the layers of a trace as a table for the summary of a GitHub step, and the number of misses as its output.

The standard library alone: the action runs it with the Python of the traced program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(trace: dict[str, Any]) -> str:
    """Return the layers that were used as a Markdown table; a dash is unknown."""
    rows = ["| layer | hits | misses | stores | evidence |", "|---|--:|--:|--:|---|"]
    for layer in used(trace):
        numbers = ("-" if layer[name] is None else f"{layer[name]:,}" for name in ("hits", "misses", "stores"))
        rows.append(f"| {layer['layer']} | {' | '.join(numbers)} | {layer['evidence']} |")
    return "\n".join([f"### Kernel caches: {trace['wall_seconds']:.1f} s", "", *rows, ""])


def used(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the layers with a lookup or a store."""
    return [layer for layer in trace["layers"] if any(layer[name] for name in ("hits", "misses", "stores"))]


def compiled(trace: dict[str, Any]) -> int:
    """Return the number of misses; an entry that was stored without a known lookup was missed before."""
    return sum(layer["stores"] or 0 if layer["misses"] is None else layer["misses"] for layer in trace["layers"])


def main(trace: str, summary: str, output: str) -> None:
    """Append the table and the number to the files that GitHub names; without a whole trace, warn."""
    try:
        found = json.loads(Path(trace).read_text(encoding="utf-8"))
        shown, missed = table(found), compiled(found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        # The status of the step is that of the traced command.
        sys.stdout.write(f"::warning::no summary of the kernel caches: {type(error).__name__} in {trace}\n")
        return
    with open(summary, "a", encoding="utf-8") as file:
        file.write(shown)
    with open(output, "a", encoding="utf-8") as file:
        file.write(f"compiled={missed}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
