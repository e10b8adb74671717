"""``cachectl stage``: warm caches to every node of an MPI job, and back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from cachectl import verbs
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.text import plural

if TYPE_CHECKING:
    from cachectl.stage import Job, Staged
    from cachectl.switching import child
    from cachectl.watching.timeline import Trace

EXAMPLE = "mpiexec -n 64 cachectl stage /shared/warm --trust -- python simulation.py"
OPTIONS = (
    ("source", "SOURCE", "a bundle, folder, URL or isolated root, as for pull (default: empty caches)", {"nargs": "?"}),
    verbs.TRUST,
    ("--out", "TARGET", "push the new entries of all nodes to this bundle or store at the end"),
    verbs.SIGN,
    verbs.FORCE_BUNDLE,
    verbs.PORTABLE,
)
USAGE = """\
mpiexec -n N cachectl stage
       [SOURCE (--allowed-signers LIST | --digest HEX | --trust)]
       [--out TARGET [--sign KEY] [--force]] [--portable] -- COMMAND..."""


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl stage``: run the command with staged caches, as a child process of every rank.

    Returns the highest exit status. A command killed by signal n counts as 128+n, and the other ranks go on. For an
    invalid request, raises :class:`BadRequest` on rank 0 and returns 2 on the others. If MPI does not connect the
    ranks, raises :class:`NotConnected` on the launcher's rank 0, and ends the others.
    """
    from cachectl import stage
    from cachectl.switching.child import signals_held
    from cachectl.watching.portable import building

    options = request.options
    request.demand_command()
    environment, notice = request.stack.environment, request.notice
    route = stage.Route(options.source, request.trust(), options.out, options.sign, options.force)
    route.require_sense()
    try:
        job = stage.Job(environment, route, stage.join(environment), notice, notice)
    except stage.NotConnected as error:
        if error.first:
            raise
        # Some launchers end a job when a rank fails, even before rank 0 has printed the reason.
        time.sleep(stage.FAILING_WAIT)
        raise SystemExit(1) from None
    world = job.ranks.world
    with signals_held() as signals:
        try:
            # One rank's lines are enough.
            say = notice if world.rank == 0 else lambda _: None
            with building(request.stack, say, portable=request.portable) as stack:
                return _run(request, job._replace(environment=stack.environment), signals)
        except BadRequest:
            if world.rank == 0:
                raise
            return 2
        except BaseException as error:
            notice(f"rank {world.rank}: {type(error).__name__}: {error}")
            # The others would wait for this rank forever.
            world.Abort(1)
            raise


def _run(request: verbs.Request, job: Job, signals: child.Signals) -> int:
    from cachectl import stage
    from cachectl.switching import child
    from cachectl.watching.portable import remember

    world = job.ranks.world
    with request.output.progress("staging"):
        staged = stage.stage_in(job)
    try:
        with _watched(job, staged) as variables:
            status = child.run(request.command, {**staged.variables, **variables}, job.environment, signals)
    except child.CannotStart as error:
        job.notice(f"rank {world.rank}: {error}")
        status = error.status
    if status > 128:  # noqa: PLR2004 - what a shell gives for a signal
        job.notice(f"rank {world.rank}: the command was ended by signal {status - 128}")
    # Before the leader of the node pushes.
    child.try_extra("portable builds are not remembered", partial(remember, job.environment), job.notice)
    with request.output.progress("gathering new entries"):
        stage.stage_out(job, staged)
    stage.wait_for_all(world)
    highest = int(world.allreduce(status, op=max))
    staged.remove()
    return highest


@contextmanager
def _watched(job: Job, staged: Staged) -> Iterator[Mapping[str, str]]:
    """Watch the command on one rank of each node, and note its lookups and seconds; yield the variables for this."""
    from cachectl.layer_set import LayerSet
    from cachectl.switching import child
    from cachectl.watching.trace import judged

    if staged.root is None:
        yield {}
        return
    notice = staged.root.notes.append

    def say(traced: Trace) -> None:
        hits, misses = (sum(getattr(use, name) or 0 for use in traced.layers) for name in ("hits", "misses"))
        counted = f"{plural(hits, 'hit')}, {plural(misses, 'miss', 'misses')}, {traced.wall_seconds:.1f} s"
        notice(f"{'at least ' * bool(traced.unwatched)}{counted} (one rank of the node)")

    with ExitStack() as block:
        scratch = partial(block.enter_context, child.isolated_root(job.environment, notice=notice))
        if (folder := child.try_extra("no verdict", scratch, notice)) is None:
            yield {}
            return
        stack = LayerSet(job.environment.with_variables(staged.variables))
        yield block.enter_context(judged(stack, folder, say, notice, remembers=False))
