"""``cachectl purge``: remove entries."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachectl.cli import options
from cachectl.cli.inspecting.ls import show_things
from cachectl.cli.output import (
    Column,
    count,
    counts,
    show_json,
    show_lines,
    show_table,
    size,
    sizes,
    warn,
    warn_notes,
    working,
)

if TYPE_CHECKING:
    from cachectl.clearing.purge import PurgeResult
    from cachectl.cli.call import Call
    from cachectl.layers.base.facts import Note, Outcome


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_layers(parser)
    parser.add_argument("--all", action="store_true", help="every user layer that is not precious")
    options.add_selection(parser)
    options.add_dry_run(parser, "go")
    options.add_mpi(parser)
    options.add_changing(parser)
    options.add_json(parser)


def run(call: Call) -> int:
    """Purge on one machine, or with ``--mpi`` on all nodes of a job."""
    given = call.options
    if given.all == bool(given.layers):
        call.misuse("name the layers to purge, or say --all" if not given.all else "--all needs no LAYER")
    selected = call.selection()
    with working("purging"):
        if given.mpi:
            result = call.over_nodes(lambda nodes: nodes.purge(selected, given.layers, dry_run=given.dry_run))
        else:
            result = call.stack.purge(selected, layers=given.layers, dry_run=given.dry_run, notice=warn)
    if result is None:
        # Rank 0 shows it.
        return 0
    missing = given.key is not None and result.found_nothing
    if given.json:
        show_json(result)
    elif not missing:
        show_purge(result, call.now)
    if missing:
        warn(f"no entry that is selected has the key {given.key!r}; cachectl ls -q lists keys")
    return 1 if missing or result.failed else 0


def columns(verb: str) -> tuple[Column[Outcome], ...]:
    """Return the columns of a purge; ``verb`` is the title over the number of entries."""
    return (
        Column("layer", lambda outcome: outcome.layer),
        counts(verb, lambda outcome: outcome.removed),
        sizes("size", lambda outcome: outcome.bytes_freed),
        counts("skipped", lambda outcome: len(outcome.skipped)),
    )


def show_purge(result: PurgeResult, now: float) -> None:
    """Print what a purge did, or would do: then each entry as well. Reasons go to standard error."""
    if any(outcome.things for outcome in result.outcomes):
        show_things(((outcome.layer, thing) for outcome in result.outcomes for thing in outcome.things), now)
        show_lines([""])
    if shown := [outcome for outcome in result.outcomes if not outcome.failed or outcome.removed]:
        total = result.total
        last = ("total", count(total.removed), size(total.bytes_freed), count(total.skipped))
        show_table(columns("would go" if result.dry_run else "removed"), shown, last)
    made = "would be made" if result.dry_run else "is made"
    for outcome in result.outcomes:
        for path in outcome.remade:
            warn(f"{outcome.layer}: {path} {made} again: it had gone, and programs that are running fail without it")
    warn_of_outcomes(result.outcomes)


def warn_of_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Warn of what was skipped, and of what failed."""
    for outcome in outcomes:
        warn_notes(f"{outcome.layer}: skipped", outcome.skipped)
        for because, keys in _by_reason(outcome.failed).items():
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            warn(f"{outcome.layer}: {'' if keys[0] == '*' else keys[0] + more + ': '}{because}")


def _by_reason(notes: Iterable[Note]) -> dict[str, list[str]]:
    """Group the keys that failed for one reason: a full disk is one warning, however many files it holds."""
    gathered: dict[str, list[str]] = {}
    for note in notes:
        gathered.setdefault(note.because, []).append(note.key)
    return gathered
