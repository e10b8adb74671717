"""``cachectl purge``: remove entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import CHANGING, Parser

if TYPE_CHECKING:
    from cachectl.clearing.purge import PurgeResult
    from cachectl.cli.call import Columns
    from cachectl.layers.base.facts import Note, Outcome, Removable


def add_options(parser: Parser) -> None:
    parser.add_layers("name one, or use --all")
    parser.add_argument("--all", action="store_true", help="every user layer that is not precious")
    parser.add_selection()
    damaged = "only entries that verify finds damaged, which a run makes again; never results of tuning"
    parser.add_argument("--damaged", action="store_true", help=damaged)
    parser.add_dry_run("go")
    parser.add_shared("--verbose")
    parser.add_places(users=True)
    parser.add_form(*CHANGING)


def run(call: Call) -> int:
    given = call.options
    if given.all == bool(given.layers):
        call.misuse("name the layers to purge, or use --all" if not given.all else "--all needs no LAYER")
    selected = call.selection()
    with output.working("purging"):
        result = call.stack.purge(
            selected, layers=given.layers, damaged=given.damaged, dry_run=given.dry_run, notice=output.warn
        )
    missing = given.key is not None and result.found_nothing
    status = 1
    if not missing or call.form != "table":
        status = show_result(call, result)
    if missing:
        output.warn(f"no entry that is selected has the key {given.key!r}; cachectl ls -q lists keys")
    return 1 if missing else status


def show_result(call: Call, result: PurgeResult) -> int:
    """Show what a purge did, or would do, in the form that was asked for, and return the exit status."""
    verbose, named = call.options.verbose, bool(call.options.layers)

    def table(result: PurgeResult) -> Columns[Any]:
        if not result.dry_run:
            return columns("removed"), result.layers
        return entry_columns(call.now), list(_planned(result))

    def show(result: PurgeResult) -> None:
        entries = list(_planned(result)) if verbose else []
        if entries:
            output.show_table(entry_columns(call.now), entries)
            output.show_lines([""])
        show_purge(result, all_layers=verbose or named)

    return call.show(result, show, table)


def _planned(result: PurgeResult) -> Iterable[tuple[str, Removable]]:
    """Yield each entry of a plan, with its layer."""
    for outcome in result.layers:
        for entry in outcome.entries or ():
            yield outcome.layer, entry


def entry_columns(now: float) -> tuple[output.Column[tuple[str, Removable]], ...]:
    """Return the columns of a plan's entries; ages refer to ``now``."""
    return (
        output.Column("layer", lambda row: row[0]),
        output.Column("state", lambda row: row[1].state),
        output.sizes("size", lambda row: row[1].bytes),
        output.ages("age", lambda row: row[1].modified, now),
        output.Column("key", lambda row: row[1].key),
    )


def columns(verb: str) -> tuple[output.Column[Outcome], ...]:
    """Return the columns of a purge; ``verb`` is the title over the number of entries."""
    return (
        output.Column("layer", lambda outcome: outcome.layer),
        output.counts(verb, lambda outcome: outcome.removed),
        output.counts("orphans", lambda outcome: outcome.orphans_removed),
        output.sizes("size", lambda outcome: outcome.bytes_freed),
        output.counts("skipped", lambda outcome: len(outcome.skipped)),
    )


def show_purge(result: PurgeResult, *, all_layers: bool = False) -> None:
    """Print what a purge did, or would do, layer by layer. Reasons go to standard error.

    Layers without anything to remove are one line unless ``all_layers``.
    """
    done = [outcome for outcome in result.layers if not outcome.failed or outcome.removed]
    shown = [one for one in done if all_layers or one.removed or one.orphans_removed or one.bytes_freed or one.skipped]
    if shown:
        total = result.total
        numbers = (output.count(total.removed), output.count(total.orphans_removed), output.size(total.bytes_freed))
        last = ("total", *numbers, output.count(total.skipped))
        output.show_table(columns("would go" if result.dry_run else "removed"), shown, last)
    output.show_more_layers(len(done) - len(shown), shown, "nothing to remove")
    made = "would be made" if result.dry_run else "is made"
    for outcome in result.layers:
        for path in outcome.recreated:
            output.warn(f"{outcome.layer}: {path} {made} again, because running programs need it")
        output.warn_notes(f"{outcome.layer}: skipped", outcome.skipped)
        for because, keys in _by_reason(outcome.failed).items():
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            output.warn(f"{outcome.layer}: {'' if keys[0] == '*' else keys[0] + more + ': '}{because}")


def _by_reason(notes: Iterable[Note]) -> dict[str, list[str]]:
    """Group the keys that failed for one reason: a full disk is one warning, however many files it holds."""
    gathered: dict[str, list[str]] = {}
    for note in notes:
        gathered.setdefault(note.because, []).append(note.key)
    return gathered
