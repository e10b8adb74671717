"""``cachectl stage``: warm caches to every node of an MPI job, and back."""

from __future__ import annotations

from typing import Final

from cachectl.options import FORCE_BUNDLE, SIGN, TRUST, Option, Request

OPTIONS: Final = (
    Option(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="what pull takes: a bundle, a folder, a URL or an isolated root (default: empty caches)",
    ),
    TRUST,
    Option("--out", metavar="TARGET", help="push what the nodes have at the end to this bundle or store"),
    SIGN,
    FORCE_BUNDLE,
    Option(
        "--scratch",
        metavar="DIR",
        help="on each node's own disk: your folder of mode 700, or its parent (default: TMPDIR)",
    ),
)
USAGE: Final = """\
mpiexec -n N cachectl stage
       [SOURCE (--allowed-signers LIST | --digest HEX | --trust)]
       [--out TARGET [--sign KEY] [--force]] [--scratch DIR] -- COMMAND..."""


def run(request: Request) -> int:
    """Carry out ``cachectl stage``."""
    from cachectl.stage import Job, run_staged

    options = request.options
    request.demand_command()
    environment = request.stack.environment
    scratch = None if options.scratch is None else environment.expand(options.scratch)
    job = Job(options.source, request.trust(), options.out, options.sign, scratch, options.force)
    return run_staged(request.command, environment, job, request.notice)
