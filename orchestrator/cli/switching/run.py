"""``cachectl run``: run a command with caches off, or on in empty roots."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser, folder
from cachectl.layers.base.texts import plural

if TYPE_CHECKING:
    from cachectl.watching.proof import Attestation, Proof

#: How many paths the proof of a layer names.
_FEW = 3


def add_options(parser: Parser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--no-cache", action="store_true", help="every layer off")
    how.add_argument(
        "--isolated",
        nargs="?",
        type=folder,
        metavar="=DIR",
        help="every layer on, in an empty root or in DIR, which is kept",
    )
    parser.add_argument(
        "--base",
        metavar="DIR",
        help="every layer on and warm from DIR, which may be read-only; new entries go to a root of your own",
    )
    parser.add_shared("--layer", "unexpected")
    parser.add_argument(
        "--prove",
        action="store_true",
        help="attest that no real root was read or written; also without another option",
    )
    parser.add_store_use()
    choices = "--no-cache | --base DIR | --isolated[=DIR] | --prove | --store URL"
    parser.usage = f"cachectl run ({choices})\n       [--layer LAYER]... [--prove] -- COMMAND..."


def run(call: Call) -> int:
    given = call.options
    if not (given.no_cache or given.prove or given.store or given.isolated is not None or given.base is not None):
        call.misuse(
            f"choose --no-cache, --base, --isolated, --prove or --store, then write -- and the command{_such_as(call)}"
        )
    if given.no_cache and given.base is not None:
        call.misuse("--no-cache switches off what --base would start warm; choose one of them")
    store = call.store_use()
    call.demand_command()
    ran = call.stack.run(
        call.command,
        no_cache=given.no_cache,
        base=given.base,
        isolated=Path(given.isolated) if given.isolated else given.isolated is not None,
        layers=given.layers,
        prove=given.prove,
        store=store,
        notice=output.warn,
    )
    if ran.proof is None:
        return ran.status
    _show_proof(ran.proof)
    return ran.status if ran.proof.holds else 1


def _such_as(call: Call) -> str:
    """Return a line that would run the words that look like a command, if there are any."""
    words = call.command or call.options.unexpected
    return f", such as: {shlex.join(['cachectl', 'run', '--isolated', '--', *words])}" if words else ""


def _show_proof(proof: Proof) -> None:
    """Print on standard error the proof of each layer, then the verdict."""
    from cachectl.watching.proof import Verdict

    for one in proof.attestations:
        output.warn(f"proof: {one.layer}: {_attested(one)}")
    for name in proof.left_out:
        output.warn(f"proof: {name}: stays in use, so nothing is proved of it")
    if proof.of(Verdict.FAILS):
        output.warn("proof: other programs that use these caches count too; if one may have run, try again without it")
    bad = [
        f"{verdict.value} for {', '.join(names)}"
        for verdict in (Verdict.FAILS, Verdict.UNKNOWN)
        if (names := proof.of(verdict))
    ]
    output.warn(
        f"proof {'; '.join(bad) or ('holds' if proof.holds else 'cannot be given: no layer is left to prove it of')}"
    )


def _attested(one: Attestation) -> str:
    from cachectl.watching.proof import Verdict

    if one.verdict is Verdict.FAILS:
        shown = [f"{touch.path} {', '.join(touch.what)}" for touch in one.touches[:_FEW]]
        more = len(one.touches) - len(shown)
        return "; ".join([*shown, *([f"and {more:,} more"] if more else [])])
    files = f"{plural(one.compared, 'file')} compared"
    means = ", ".join([f"file events on {plural(one.folders, 'folder')}", *one.notes])
    if one.verdict is Verdict.UNKNOWN:
        return f"no write seen ({files}), but reads are unknown: {'; '.join(one.unknown)}"
    if not one.roots:
        return "keeps nothing in this environment"
    if not one.present:
        verb = "is" if len(one.roots) == 1 else "are"
        return f"not written, not read ({' and '.join(map(str, one.roots))} {verb} not there)"
    return f"not written ({files}), not read ({means})"
