"""Warm caches on every node of an MPI job: one rank of each node pulls a source to the node's own disk.

The ranks that share memory are a node, and the lowest of them is its leader. At the end the leaders agree on who sends
each new entry, so that each is sent once, and rank 0 pushes them. Programs run after any failure: with an empty folder
if the source is unusable, and without staging if the disk is.

Only this module imports mpi4py. Any launcher can start the ranks.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cachectl.exchange import bundle, copying, place, push_pull
from cachectl.exchange import trust as trusting
from cachectl.exchange.node_root import Filling, Name, NodeRoot, full_reason, missing_words
from cachectl.exchange.store import StoreCollection, place_of
from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, BadRequest, CachectlError
from cachectl.layers.base.text import plural
from cachectl.layers.host import launcher
from cachectl.layers.host.here import this_environment
from cachectl.switching import overlay

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    # The module mpi4py.MPI, which cannot be named as a type.
    _Module = Any

#: For tests on one machine: ranks with different values count as different nodes.
NODE = "CACHECTL_NODE"
#: Seconds that a failing rank waits for the others to notice.
FAILING_WAIT = 5.0
#: The shortest and the longest pause while a rank waits, in seconds.
_SHORTEST, _LONGEST = 0.001, 0.05
#: Requests and buffers that MPI still uses after a failing rank has stopped waiting.
_PENDING: list[object] = []


class NotConnected(CachectlError):
    """The launcher started several ranks, but in MPI each is alone; every rank gets this error.

    ``first`` is true on the ranks that report it: the launcher's rank 0, or all if the number of ranks is unknown.
    """

    def __init__(self, launch: launcher.Launch, library: str) -> None:
        self.first = not launch.rank or launch.ranks is None
        ranks = "several ranks" if launch.ranks is None else f"{launch.ranks} ranks"
        hint = "; srun --mpi=list shows what Slurm supports" * launch.setting.startswith("SLURM")
        super().__init__(
            f"the launcher started {ranks} ({launch.setting}), but MPI does not connect them: mpi4py uses {library}; "
            f"start them with the mpiexec of that MPI, or install mpi4py for the launcher's MPI{hint}"
        )


class Route(NamedTuple):
    """Source, trust in it, target for new entries, and key to sign them; ``force`` replaces what is not a bundle."""

    source: str | None
    trust: trusting.Trust | None
    out: str | None
    sign: str | None
    force: bool = False

    def require_sense(self) -> None:
        """Raise :class:`BadRequest` if the values do not go together."""
        if self.source is None and self.trust is not None:
            raise BadRequest("--allowed-signers, --digest and --trust need a SOURCE")
        if place.STREAM in (self.source, self.out):
            raise BadRequest("the command uses the standard streams; name a FILE")
        if self.sign is not None and self.out is None:
            raise BadRequest("--sign needs --out FILE")
        if self.source is None and self.out is None:
            raise BadRequest("nothing to stage: name a SOURCE to start from, or --out FILE for new entries")

    def is_round(self, environment: Environment) -> bool:
        """Return whether the target is the source, which is not changed if it is unusable."""
        ends = (self.source, self.out)
        return None not in ends and len({environment.expand(str(end)).resolve() for end in ends}) == 1

    def complaint(self, environment: Environment) -> str | None:
        """Return why nothing can be staged; ``None`` if it can."""
        layers, source, out = LayerSet(environment), self.source, self.out
        if name := next((name for name in (out, source) if name in layers), None):
            return f"{name!r} is a layer, not a FILE; write ./NAME for a file"
        if source is not None and self.trust is None and not os.path.isdir(environment.expand(source)):
            may_exist = place.is_url(source) or os.path.lexists(environment.expand(source))
            return trusting.UNTRUSTED if may_exist else missing_words(source)
        try:
            if out is not None and not place.is_url(out) and not (folder := environment.expand(out).parent).is_dir():
                return f"--out {out!r}: the folder {folder} does not exist"
            if out is not None and not self.is_round(environment):
                place_of(out, environment, writes=True, force=self.force).names("index")
        except (OSError, CachectlError) as error:
            return f"--out {full_reason(error)}"
        return None


class Ranks(NamedTuple):
    """All ranks, the ranks of this node, on its leader also the leaders of all nodes, and the name of the node."""

    world: Intracomm
    node: Intracomm
    leaders: Intracomm | None
    name: str


class Job(NamedTuple):
    """What is staged for which ranks. On rank 0 ``notice`` gets a line for each problem, ``inform`` for each result."""

    environment: Environment
    route: Route
    ranks: Ranks
    notice: Callable[[str], None]
    inform: Callable[[str], None]


class Staged(NamedTuple):
    """The folder of this rank's node, and the variables that make programs use it.

    Leaders also have the node's root, and whether new entries are to be written.
    """

    folder: Path | None
    variables: Mapping[str, str | None]
    root: NodeRoot | None
    writes: bool

    def remove(self) -> None:
        """Remove the folder of the node, if this rank leads it."""
        if self.root is not None:
            self.root.remove()


def join(environment: Environment, comm: Intracomm | None = None) -> Ranks:
    """Return the ranks of ``comm``, by default the world. Collective over all ranks. Raises :class:`NotConnected`."""
    mpi = _mpi()
    if mpi.COMM_WORLD.size == 1 and (launch := launcher.innermost_launch(environment)) is not None:
        name, version = mpi.get_vendor()
        raise NotConnected(launch, " ".join((name, ".".join(map(str, version)))))
    # A separate communicator keeps our messages apart from the program's.
    world: Intracomm = (mpi.COMM_WORLD if comm is None else comm).Dup()
    colour = environment.get(NODE)
    suffix = "" if colour is None else f" ({NODE}={colour})"
    memory = world.Split_type(mpi.COMM_TYPE_SHARED, world.rank)
    suffixes = sorted(set(memory.allgather(suffix)))
    node = cast("Intracomm", memory.Split(suffixes.index(suffix), world.rank))
    leaders = cast("Intracomm", world.Split(mpi.UNDEFINED if node.rank else 0, world.rank))
    return Ranks(world, node, None if node.rank else leaders, f"{mpi.Get_processor_name()}{suffix}")


def stage_in(job: Job) -> Staged:
    """Fill the folder of each node; return what programs of this rank need. Collective over all ranks.

    Raises :class:`BadRequest`, on every rank, for an invalid request.
    """
    environment, route, (world, node, leaders, name) = job.environment, job.route, job.ranks
    complaint = world.bcast(route.complaint(environment) if world.rank == 0 else None)
    if complaint is not None:
        raise BadRequest(complaint)
    root, writes = None, route.out is not None
    if leaders is not None:
        root = NodeRoot(environment)
        filling = Filling() if route.source is None else root.fill(route.source, route.trust)
        is_usable = leaders.allreduce(filling.usable, op=min)
        if writes and route.is_round(environment) and not is_usable:
            writes = False
            if leaders.rank == 0:
                root.notes.append(f"nothing will be written to {route.out}")
        fillings = leaders.gather(filling) or ()
        if reasons := dict.fromkeys(reason for each in fillings for reason in each.trusted):
            numbers = [each.placed for each in fillings if each.placed]
            nodes = f"{len(numbers)} of {plural(len(fillings), 'node')}"
            job.inform(f"staged {sum(numbers):,} entries on {nodes}; accepted: {', '.join(reasons)}")
        _say_notes(job.notice, leaders.gather((name, root.take_notes())) or ())
    wait_for_all(node)
    folder, variables = node.bcast(None if root is None else (root.root, dict(root.variables)))
    return Staged(folder, variables, root, writes)


def stage_out(job: Job, staged: Staged, *, ok: bool = True) -> bool | None:
    """Wait for all ranks; push the new entries of all nodes if requested. Collective over all ranks.

    If a rank is not ``ok``, nothing is pushed, and it waits only a few seconds for the others. Returns whether all are
    ok; ``None`` if some ranks did not arrive.
    """
    mpi, (world, _, leaders, name), root = _mpi(), job.ranks, staged.root
    mine, everybody = bytearray([ok]), bytearray(1)
    request = world.Iallreduce([mine, mpi.BYTE], [everybody, mpi.BYTE], op=mpi.BAND)
    have_arrived = _poll(request.Test, None if ok else FAILING_WAIT)
    if not have_arrived:
        _PENDING.append((request, mine, everybody))
    if not everybody[0]:
        if staged.writes and world.rank == 0:
            job.notice(f"a rank failed, so nothing was written to {job.route.out}")
    elif leaders is not None and root is not None:
        if staged.writes:
            _gather_new(job, root, leaders)
        _say_notes(job.notice, leaders.gather((name, root.take_notes())) or ())
    return bool(everybody[0]) if have_arrived else None


def _gather_new(job: Job, root: NodeRoot, leaders: Intracomm) -> None:
    """Push the new entries of all nodes: an entry that several leaders have is sent once."""
    lower: frozenset[Name] = leaders.exscan(root.new(), op=or_)
    if leaders.rank:
        # A bundle of what no lower leader has, in chunks.
        try:
            with open(root.pack(lower) or os.devnull, "rb") as file:
                for chunk in bundle.pieces(file):
                    leaders.ssend(chunk, dest=0)
        except OSError as error:
            root.notes.append(f"new entries are lost: {full_reason(error)}")
        # The end, also after an error: rank 0 waits for it.
        leaders.ssend(b"", dest=0)
        return
    environment, shown, received = root.stack().environment, "the bundle from a node", list[StoreCollection]()
    # Before any push, because a sender waits until its chunks are received.
    for sender in range(1, leaders.size):
        chunks = iter(partial(leaders.recv, source=sender), b"")
        try:
            spooled = bundle.spooled(environment, chunks, shown, spared=0)
            parcel = bundle.BundlePlace(None, environment, shown=shown, file=spooled)
            received.append(StoreCollection(parcel, environment))
        except FAILURES as error:
            deque(chunks, maxlen=0)
            job.notice(f"the new entries of a node are lost: {full_reason(error)}")
    try:
        _push_new(job, root, received)
    except FAILURES as error:
        job.notice(f"new entries are lost: {job.route.out}: {full_reason(error)}")


def _say_notes(notice: Callable[[str], None], gathered: Iterable[tuple[str, list[str]]]) -> None:
    """Give one line for each note, even if many nodes have it."""
    nodes: dict[str, list[str]] = {}
    for node, notes in gathered:
        for note in notes:
            nodes.setdefault(note, []).append(node)
    for note, names in nodes.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notice(f"{names[0]}{more}: {note}")


def _push_new(job: Job, root: NodeRoot, received: Iterable[StoreCollection]) -> None:
    """Push the new entries of this node, and those that other leaders sent."""
    # Temporary files are on the node's own disk.
    stack, route = root.stack(), job.route
    with trusting.allowed_list(job.environment, route.sign, None) as allowed:
        target = place_of(route.out or "", stack.environment, writes=True, force=route.force)
        store = StoreCollection(target, stack.environment, allowed, key=route.sign)
        result = push_pull.push_layers(stack, store, stack.clearable() if root.root is not None else ())
        for parcel in received:
            plan = copying.missing(parcel, store, parcel.portability_keys(), result)
            copying.copy(parcel, store, plan, result)
        store.finish()
    digest = f"; digest {store.digest}" * bool(store.written or store.parts)
    job.inform(f"{target.shown}: {plural(result.total.placed, 'entry', 'entries')} added{digest}")


def _mpi() -> _Module:
    try:
        with warnings.catch_warnings():
            # NotConnected reports it in one line.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
            from mpi4py import MPI
    except ImportError as error:
        message = "an MPI job needs an MPI library and mpi4py: pip install 'opencl-cachectl[mpi]'"
        raise CachectlError(message) from error
    except RuntimeError as error:
        raise CachectlError(f"mpi4py finds no MPI library: {str(error).splitlines()[0]}") from error
    return MPI


def wait_for_all(comm: Intracomm) -> None:
    """Wait for all ranks of ``comm`` without keeping a CPU busy, which other processes of the node may need."""
    _poll(comm.Ibarrier().Test, None)


def _poll(is_complete: Callable[[], bool], limit: float | None) -> bool:
    """Poll ``is_complete`` with growing pauses, for at most ``limit`` seconds; return whether it became true."""
    deadline = None if limit is None else time.monotonic() + limit
    pause = _SHORTEST
    while not is_complete():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return True


@contextmanager
def staged(
    source: str | None = None,
    *,
    digest: str | None = None,
    allowed_signers: str | None = None,
    trust: bool = False,
    out: str | None = None,
    sign: str | None = None,
    comm: Intracomm | None = None,
    notice: Callable[[str], None] | None = None,
) -> Iterator[Path | None]:
    """Stage caches for a program that is itself an MPI program; all ranks of ``comm`` must enter and leave the block.

    Enter the block before loopy is imported and before a driver starts. The folder is removed at process exit, because
    libraries use it until then.

    :param source: what to start from; needs exactly one of ``digest``, ``allowed_signers`` and ``trust``, unless it
        is an isolated root
    :param out: gets the new entries when the block ends, unless a rank leaves it with an exception
    :param sign: an OpenSSH key for ``out``
    :param comm: by default the world
    :param notice: gets, on rank 0, a line for each result and each problem; without it, problems are warnings
    :returns: a context that yields the folder of this node's caches, ``None`` if the node's disk is unusable
    :raises CachectlError: on all ranks, before anything is changed, if it is too late on one
    :raises NotConnected: if MPI does not connect the ranks
    """
    from cachectl.switching.disabled import too_late

    environment = this_environment()
    vouchers = (allowed_signers, digest, trust)
    route = Route(source, trusting.Trust(*vouchers) if any(vouchers) else None, out, sign)
    route.require_sense()
    lines: list[str] = []
    warn = notice or partial(warnings.warn, category=RuntimeWarning, stacklevel=3)
    job = Job(environment, route, join(environment, comm), lines.append, notice or (lambda _: None))
    world, node, *_ = job.ranks
    if late := world.allreduce(too_late(LayerSet(environment).clearable(), environment.temporary), op=or_):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in late.items())
        raise CachectlError(f"too late to stage; enter the block before these are used: {reasons}")
    here, process, ok = stage_in(job), os.getpid(), False
    all_ok: bool | None = True

    def close() -> None:
        if os.getpid() == process:
            # The other ranks of the node use the folder until they end. A failed rank may not get here.
            if all_ok is not None and not _mpi().Is_finalized():
                _poll(node.Ibarrier().Test, None if all_ok else FAILING_WAIT)
            here.remove()

    atexit.register(close)
    try:
        with overlay.applied(overlay.variables(here.variables)):
            # Only after the collective calls, because a warning may be turned into an error.
            while lines:
                warn(lines.pop(0))
            yield here.folder
        ok = True
    finally:
        # A forked child leaves the block too, but is not a rank.
        if os.getpid() == process:
            all_ok = stage_out(job, here, ok=ok)
            while lines:
                warn(lines.pop(0))
