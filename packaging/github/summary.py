"""Write a trace for the summary of a GitHub step, its verdict as an annotation, and its misses as an output.

The standard library alone: the action runs it with the Python of the traced program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(trace: dict[str, Any]) -> str:
    """Return the verdict, and the layers that were used, as Markdown; a dash is unknown."""
    rows = ["| layer | hits | misses | stores | evidence |", "|---|--:|--:|--:|---|"]
    for layer in used(trace):
        numbers = ("-" if layer[name] is None else f"{layer[name]:,}" for name in ("hits", "misses", "stores"))
        rows.append(f"| {layer['layer']} | {' | '.join(numbers)} | {layer['evidence']} |")
    title = f"### Kernel caches (run: {trace['wall_seconds']:.1f} s)"
    return "\n".join([title, "", trace["verdict"], "", *rows, ""])


def used(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the layers with a lookup or a store."""
    return [layer for layer in trace["layers"] if any(layer[name] for name in ("hits", "misses", "stores"))]


def annotation(trace: dict[str, Any]) -> str:
    """Return the verdict as a notice; as a warning if the run is known not to be warm."""
    kind = "warning" if trace["warm"] is False else "notice"
    text = trace["verdict"].replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{kind} title=Kernel caches::{text}\n"


def count_misses(trace: dict[str, Any]) -> int:
    """Return the number of misses; an entry that was stored without a known lookup was missed before."""
    return sum(layer["stores"] or 0 if layer["misses"] is None else layer["misses"] for layer in trace["layers"])


def main(trace: str, summary: str, output: str) -> None:
    """Append the table and the numbers to the files that GitHub names, and print the verdict; without a trace, warn."""
    try:
        read = json.loads(Path(trace).read_text(encoding="utf-8"))
        shown, misses, said = table(read), count_misses(read), annotation(read)
        kernels = len({kernel["kernel"] for kernel in read["missed"] if kernel["kernel"]})
    except (OSError, ValueError, LookupError, TypeError) as error:
        # The status of the step is that of the traced command.
        sys.stdout.write(f"::warning::no summary of the kernel caches: {type(error).__name__} in {trace}\n")
        return
    with open(summary, "a", encoding="utf-8") as file:
        file.write(shown)
    with open(output, "a", encoding="utf-8") as file:
        file.write(f"misses={misses}\nkernels={kernels}\n")
    sys.stdout.write(said)


if __name__ == "__main__":
    main(*sys.argv[1:])
