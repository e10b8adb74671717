"""``cachectl restore``: list what ``verify --quarantine`` moved aside, or restore it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.clearing.purge import warn_of_outcomes
from cachectl.cli.parser import CHANGING, Parser

if TYPE_CHECKING:
    from cachectl.clearing.quarantine import Restoration
    from cachectl.layers.base.facts import Quarantined


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="what to restore (default: list everything in quarantine)"
    )
    parser.add_argument("--all", action="store_true", help="bring everything back")
    parser.add_argument("--replace", action="store_true", help="also if another entry has taken its place")
    parser.add_dry_run("come back")
    parser.add_form(*CHANGING)


def run(call: Call) -> int:
    given = call.options
    if given.all and given.names:
        call.misuse("--all needs no NAME")
    named = bool(given.all or given.names)
    if given.dry_run and not named:
        call.misuse("--dry-run needs a NAME, or --all")
    with output.working("looking into quarantine"):
        done = call.stack.restore(given.names, everything=given.all, replace=given.replace, dry_run=given.dry_run)
    show = _show_restored if named else _show_quarantine
    table = [one.thing for one in done.restored if one.because is None] if named else done.quarantine
    status = call.show(done, lambda done: show(done, call.now), lambda _: ((*columns(call.now), _NAME), table))
    for name in done.unknown:
        output.warn(f"nothing in quarantine has the name {name!r}; cachectl restore lists the names")
    warn_of_outcomes(done.unread)
    return status


def _show_quarantine(done: Restoration, now: float) -> None:
    """Print what is in quarantine, with the names that restore it."""
    for thing in done.quarantine:
        heading = f"{thing.name}  {thing.layer}  {output.size(thing.bytes)}  {output.age(thing.moved, now)}"
        output.show_lines([heading])
        output.show_message(f"  {thing.key}: {thing.message}", indent="    ")
    if not done.quarantine:
        output.show_lines([_NOTHING])


def columns(now: float) -> tuple[output.Column[Quarantined], ...]:
    """Return the columns of a dry run; ``now`` is the time that ages refer to."""
    return (
        output.Column("layer", lambda thing: thing.layer),
        output.sizes("size", lambda thing: thing.bytes),
        output.ages("age", lambda thing: thing.moved, now),
        output.Column("key", lambda thing: thing.key),
        output.Column("why", lambda thing: thing.message),
    )


_NOTHING: Final = "nothing is in quarantine"
#: The name of each, which ``restore`` takes.
_NAME: Final[output.Column[Quarantined]] = output.Column("name", lambda thing: thing.name)


def _show_restored(done: Restoration, now: float) -> None:
    """Print what was or would be restored, and why the rest was not."""
    back = [one.thing for one in done.restored if one.because is None]
    if done.dry_run:
        if back:
            output.show_table(columns(now), back)
        output.show_lines([*([""] if back else []), f"{output.count(len(back))} would come back"])
    else:
        nothing = [] if done.restored or done.unknown else [_NOTHING]
        output.show_lines([*nothing, *(f"{thing.layer}: {thing.key} is back" for thing in back)])
    stays = "would stay" if done.dry_run else "stays"
    for one in done.restored:
        if one.because is not None:
            output.warn(f"{one.thing.layer}: {one.thing.name} {stays} in quarantine: {one.because}")
        if one.trouble is not None:
            output.warn(f"{one.thing.layer}: {one.thing.name}: {one.trouble}")
