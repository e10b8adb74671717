"""``cachectl stage``: warm caches to every node of an MPI job, and back."""

from __future__ import annotations

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser


def add_options(parser: Parser) -> None:
    what = "what pull takes: a bundle, a folder, a URL or an isolated root (default: empty caches)"
    parser.add_argument("source", nargs="?", metavar="SOURCE", help=what)
    parser.add_trust()
    parser.add_argument("--out", metavar="TARGET", help="push what the nodes have at the end to this bundle or store")
    parser.add_shared("--sign")
    parser.add_force("a bundle")
    parser.add_argument(
        "--scratch",
        metavar="DIR",
        help="on each node's own disk: your folder of mode 700, or its parent (default: TMPDIR)",
    )
    parser.usage = (
        "mpiexec -n N cachectl stage\n"
        "       [SOURCE (--allowed-signers LIST | --digest HEX | --trust)]\n"
        "       [--out TARGET [--sign KEY] [--force]] [--scratch DIR] -- COMMAND..."
    )


def run(call: Call) -> int:
    from cachectl.stage import Job, run_staged

    given = call.options
    call.demand_command()
    environment = call.stack.environment
    scratch = None if given.scratch is None else environment.expand(given.scratch)
    job = Job(given.source, call.trust(), given.out, given.sign, scratch, given.force)
    return run_staged(call.command, environment, job, output.warn)
