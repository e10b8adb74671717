"""``cachectl doctor``: problems of this set-up, each with the command that fixes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.inspecting.verify import FINDING_COLUMNS, show_findings
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from cachectl.inspecting.doctor import Diagnosis
    from cachectl.inspecting.space import Space


def add_options(parser: Parser) -> None:
    parser.add_layers()
    parser.add_places(users=True)
    parser.add_form("--python")


def run(call: Call) -> int:
    with call.working("examining"):
        done = call.stack.doctor(layers=call.options.layers)
    return call.show(done, _show, lambda done: (FINDING_COLUMNS, done.findings))


def _show(done: Diagnosis) -> None:
    from cachectl.inspecting.space import shortage

    short = [space for space in done.space if any(shortage(space))]
    for space in short:
        output.show_message(_described(space), indent="  ")
    if short:
        output.show_lines([""])
    show_findings(done.findings, "nothing is wrong")


def _described(space: Space) -> str:
    """Format what is free, what each layer holds there, and the command that frees most."""
    known = ((space.free_bytes, output.size), (space.free_files, lambda number: f"{output.count(number)} files"))
    free = " and ".join(words(amount) for amount, words in known if amount is not None)
    held = ", ".join(f"{share.layer} {output.size(share.bytes)}" for share in space.layers if share.bytes)
    parts = (f"{free or 'an unknown amount'} free ({space.source})", held, space.fix and f"{space.fix} frees most")
    return f"{space.path}: {'; '.join(filter(None, parts))}"
