"""``cachectl stage``: warm caches to every node of an MPI job, and back."""

from __future__ import annotations

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser


def add_options(parser: Parser) -> None:
    parser.add_argument("direction", choices=("in",), help="to every node; --out brings back what is new")
    parser.add_argument(
        "bundle", nargs="?", metavar="BUNDLE", help="a bundle or root to start with (default: empty caches)"
    )
    parser.add_trust("BUNDLE")
    parser.add_argument("--out", metavar="FILE", help="write BUNDLE and every new entry of all nodes to this bundle")
    parser.add_shared("--sign")
    parser.add_force("a bundle")
    parser.add_argument(
        "--scratch",
        metavar="DIR",
        help="on each node's own disk: your folder of mode 700, or its parent (default: TMPDIR)",
    )
    parser.usage = (
        "mpiexec -n N cachectl stage in\n"
        "       [BUNDLE (--allowed-signers LIST | --sha256 HEX | --trust) [--newer-than AGE]]\n"
        "       [--out FILE [--sign KEY] [--force]] [--scratch DIR] -- COMMAND..."
    )


def run(call: Call) -> int:
    from cachectl.cluster.stage import Job, run_staged

    given = call.options
    call.demand_command()
    if given.newer_than is not None and given.bundle is None:
        call.misuse("--newer-than needs a BUNDLE")
    environment = call.stack.environment
    scratch = None if given.scratch is None else environment.expand(given.scratch)
    job = Job(given.bundle, call.trust(), given.out, given.sign, scratch, given.force)
    return run_staged(call.command, environment, job, output.warn)
