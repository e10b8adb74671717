"""Warm caches on every node of an MPI job: one rank of each node pulls a source to the node's own disk.

The ranks that share memory are a node, and the lowest of them is its leader. At the end the leaders agree which of them
sends each new entry, so that each is sent once, and rank 0 pushes them. Programs run after any failure: with an empty
folder if the source is unusable, and as without staging if the disk is.

mpi4py is imported here and nowhere else. Any launcher may start the ranks.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cachectl.exchange import bundle, copying, place, push_pull
from cachectl.exchange import trust as trusting
from cachectl.exchange.store import StoreCollection, place_of
from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, BadRequest, CachectlError, reason_of
from cachectl.layers.base.text import plural
from cachectl.layers.disk import handles, temporaries
from cachectl.layers.host import launcher
from cachectl.layers.host.here import this_environment
from cachectl.switching import child, overlay

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    # The module mpi4py.MPI, which cannot be named as a type.
    _Module = Any

#: For tests on one machine: ranks with different values count as different nodes.
NODE = "CACHECTL_NODE"
#: Bytes of free space that a disk needs before programs are moved there.
_ROOM = 1 << 20
#: Seconds that a failing rank waits for the others to notice.
FAILING_WAIT = 5.0
_SHORTEST, _LONGEST = 0.001, 0.05

#: Layer and key: the name of an entry in any root.
Name = tuple[str, str]


class NotConnected(CachectlError):
    """The launcher started several ranks, but MPI shows each of them as the only one; every rank gets this error.

    ``first`` is true on the rank that reports it: the launcher's rank 0, or every rank if their number is unknown.
    """

    def __init__(self, launch: launcher.Launch, library: str) -> None:
        self.first = not launch.rank or launch.ranks is None
        ranks = "several ranks" if launch.ranks is None else f"{launch.ranks} ranks"
        hint = "; srun --mpi=list names what Slurm offers" * launch.setting.startswith("SLURM")
        super().__init__(
            f"the launcher started {ranks} ({launch.setting}), but MPI does not connect them: mpi4py uses {library}; "
            f"start them with the mpiexec of that MPI, or install mpi4py for the launcher's MPI{hint}"
        )


# ---------------------------------------------------------------------- one node


class NodeRoot:
    """The folder with the caches of all ranks of one node, for one job, made empty in the node's temporary folder.

    That is used directly if it is this user's own with mode 0700, else through its folder ``cachectl-UID``, which is.
    If another user could replace either, nothing is staged: ``root`` is ``None``, ``variables`` are empty, and programs
    run as without staging. Only layers that a rerun refills move: tuning results stay in place. Files of other programs
    in the user cache folder are linked. ``notes`` has a line for each problem. ``usable`` is whether the source could
    be read and was trusted.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.root: Path | None = None
        self._folders = ExitStack()
        self.variables: Mapping[str, str | None] = {}
        self.placed = 0
        self.trusted: tuple[str, ...] = ()
        self.usable = True
        self.notes: list[str] = []
        self._known: frozenset[Name] = frozenset()
        layers = LayerSet(environment).clearable()
        child.say_left_alone(layers, (), self.notes.append, off=False)
        try:
            with child.needed(environment.temporary):
                parent = temporaries.private_folder(environment.temporary, make=True)
                temporaries.remove_abandoned(environment, (parent,))
                folder = temporaries.owned_folder(parent, "cachectl-stage-", environment)
                self.root = self._folders.enter_context(folder)
                handles.probe_room(self.root, _ROOM)
                child.link_cache_home(environment, layers, self.root)
                self.variables = child.variables_isolated(layers, self.root)
        except CachectlError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self.notes.append(f"not staged, so programs run cold or with the caches they have anyway: {why}")
        self.variables = {}
        self.remove()

    def stack(self) -> LayerSet:
        """Return the layers as programs of this node find them."""
        moved = self._environment.with_variables(self.variables)
        return LayerSet(moved if self.root is None else moved._replace(temporary=self.root))

    def fill(self, source: str, trust: trusting.Trust | None) -> None:
        """Pull a source. A failure leaves programs cold."""
        if self.root is None:
            return
        stack = self.stack()
        try:
            done = push_pull.pull(stack, source, trust)
        except FAILURES as error:
            self.usable = isinstance(error, place.Missing)
            self.notes.append(f"starts cold: {_reason(error)}")
            return
        try:
            if done.failed:
                handles.probe_room(self.root, _ROOM)
        except OSError as error:
            self._give_up(f"{self.root.parent}: {_reason(error)}")
            return
        self._known = _names_in(stack)
        self.placed, self.trusted = done.total.placed, done.trusted
        for layer in done.layers:
            copying.say_failed(layer.layer, "not placed", layer.failed, self.notes.append)
        reasons = [f"{note.key}: {note.because}" for note in done.unread]
        reasons += [outlook.words for layer in done.layers for outlook in layer.outlooks if outlook.hits is False]
        if reasons and not self.placed:
            self.notes.append(f"starts cold: {reasons[0]}")

    def new(self) -> frozenset[Name]:
        """Return the names of the entries added since programs began. An entry that only grew is not new."""
        return _names_in(self.stack()) - self._known if self.root is not None else frozenset()

    def pack(self, others: frozenset[Name]) -> Path | None:
        """Return a bundle of the new entries that others lack; ``None`` if there is none, or, with a note, on failure.

        Entries that cannot be read are not pushed.
        """
        if self.root is None:
            return None
        besides: dict[str, set[str]] = {}
        for layer, key in self._known | others:
            besides.setdefault(layer, set()).add(key)
        file = self.root / "new.zip"
        try:
            push_pull.push(self.stack(), file, besides=besides)
        except FAILURES as error:
            self.notes.append(f"new entries are lost: {_reason(error)}")
        return file if file.exists() else None

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        self._folders.close()
        self.root = None


def _names_in(stack: LayerSet) -> frozenset[Name]:
    """Return the names of all entries that a rerun refills; a layer that cannot be listed adds none."""
    return frozenset((layer.name, key) for layer in stack.clearable() for key in copying.keys_of(layer))


# ---------------------------------------------------------------------- all nodes


class Ranks:
    """All ranks of a job. All ranks must call each method, in the same order.

    On rank 0 ``notice`` gets a line for each problem, and ``inform`` a line for each thing done.
    """

    def __init__(
        self,
        environment: Environment,
        source: str | None,
        trust: trusting.Trust | None,
        out: str | None,
        sign: str | None,
        *,
        force: bool = False,
        comm: Intracomm | None = None,
        notice: Callable[[str], None],
        inform: Callable[[str], None],
    ) -> None:
        if source is None and trust is not None:
            raise BadRequest("--allowed-signers, --digest and --trust need a SOURCE")
        if place.STREAM in (source, out):
            raise BadRequest("the standard streams are the command's; name a FILE")
        if sign is not None and out is None:
            raise BadRequest("--sign needs --out FILE")
        if source is None and out is None:
            raise BadRequest("nothing to stage: name a SOURCE to start with, or --out FILE for what is compiled")
        mpi = _mpi()
        if mpi.COMM_WORLD.size == 1 and (launch := launcher.innermost_launch(environment)) is not None:
            name, version = mpi.get_vendor()
            raise NotConnected(launch, " ".join((name, ".".join(map(str, version)))))
        self.environment = environment
        self.notice = notice
        self.root: Path | None = None
        self._source, self._trust, self._out, self._sign, self._force = source, trust, out, sign, force
        #: Whether the target is the source, which stays as it is if it cannot be used.
        self._is_same = (
            None not in (source, out) and len({environment.expand(str(name)).resolve() for name in (source, out)}) == 1
        )
        self._inform = inform
        # A separate communicator, so that our messages do not mix with the program's.
        self._world = (mpi.COMM_WORLD if comm is None else comm).Dup()
        colour = environment.get(NODE)
        suffix = "" if colour is None else f" ({NODE}={colour})"
        self._name = f"{mpi.Get_processor_name()}{suffix}"
        shared = self._world.Split_type(mpi.COMM_TYPE_SHARED, self._world.rank)
        colours = sorted(set(shared.allgather(suffix)))
        self._node = cast("Intracomm", shared.Split(colours.index(suffix), self._world.rank))
        leads = self._node.rank == 0
        leaders = self._world.Split(0 if leads else mpi.UNDEFINED, self._world.rank)
        self._leaders = cast("Intracomm", leaders) if leads else None
        self._here: NodeRoot | None = None
        self._writes = out is not None
        self._abandoned = self._failed = False

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return int(self._world.rank)

    def stage_in(self) -> Mapping[str, str | None]:
        """Stage; return the variables with which programs of this rank use the staged entries.

        Raises :class:`BadRequest`, on every rank, for an invalid request.
        """
        misuse = self._world.bcast(self._misuse() if self.rank == 0 else None)
        if misuse is not None:
            raise BadRequest(misuse)
        if self._leaders is not None:
            self._here = NodeRoot(self.environment)
            if self._source is not None:
                self._here.fill(self._source, self._trust)
            self._report(self._leaders, self._here)
        _rest(self._node)
        result = (None, {}) if self._here is None else (self._here.root, dict(self._here.variables))
        self.root, variables = self._node.bcast(result)
        return cast("Mapping[str, str | None]", variables)

    def _misuse(self) -> str | None:
        """Return why nothing can be staged; ``None`` if it can."""
        environment, out = self.environment, self._out
        layers = LayerSet(environment)
        if name := next((name for name in (out, self._source) if name in layers), None):
            return f"{name!r} is a layer, not a FILE; write ./NAME for a file"
        source = None if self._source is None else environment.expand(self._source)
        if source is not None and self._trust is None and not os.path.isdir(source):
            return trusting.UNTRUSTED
        try:
            if out is not None and not place.is_url(out) and not (folder := environment.expand(out).parent).is_dir():
                return f"--out {out!r}: the folder {folder} does not exist"
            if out is not None and not self._is_same:
                place_of(out, environment, writes=True, force=self._force).names("index")
        except (OSError, CachectlError) as error:
            return f"--out {_reason(error)}"
        return None

    def _report(self, leaders: Intracomm, here: NodeRoot) -> None:
        """Say on rank 0 what was staged. Nothing is written over a source that a node could not use."""
        staged = leaders.gather((here.placed, here.trusted)) or []
        if self._writes and self._is_same and not leaders.allreduce(here.usable, op=min):
            self._writes = False
            if self.rank == 0:
                here.notes.append(f"nothing will be written to {self._out}, which stays as it is")
        if why := dict.fromkeys(reason for _, reasons in staged for reason in reasons):
            numbers = [number for number, _ in staged if number]
            nodes = f"{len(numbers)} of {plural(leaders.size, 'node')}"
            self._inform(f"staged {sum(numbers):,} entries on {nodes}; trusted: {', '.join(why)}")
        self._say_notes(leaders, here)

    def _say_notes(self, leaders: Intracomm, here: NodeRoot) -> None:
        """Print a line for each note of all nodes, and forget it."""
        nodes: dict[str, list[str]] = {}
        for node, notes in leaders.gather((self._name, here.notes)) or []:
            for note in notes:
                nodes.setdefault(note, []).append(node)
        here.notes = []
        for note, names in nodes.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.notice(f"{names[0]}{more}: {note}")

    def stage_out(self, *, ok: bool = True) -> None:
        """Wait for all ranks; push new entries if requested.

        If a rank is not ``ok``, nothing is pushed, and it waits only a few seconds for the others.
        """
        mpi = _mpi()
        mine, everybody = bytearray([ok]), bytearray(1)
        request = self._world.Iallreduce([mine, mpi.BYTE], [everybody, mpi.BYTE], op=mpi.BAND)
        if not _poll(request.Test, None if ok else FAILING_WAIT):
            # The others may never arrive here; leave them the folder that they still use.
            self._abandoned = True
            self._pending = (request, mine, everybody)
        self._failed = not everybody[0]
        if self._failed:
            if self._writes and self.rank == 0:
                self.notice(f"a rank has failed: nothing was written to {self._out}")
        elif self._leaders is not None and self._here is not None and self._writes:
            self._collect(self._leaders, self._here)
            self._say_notes(self._leaders, self._here)

    def _collect(self, leaders: Intracomm, here: NodeRoot) -> None:
        """Send the new entries that no lower leader has to rank 0, which pushes its own and those it receives."""
        lower: frozenset[Name] = leaders.exscan(here.new(), op=or_)
        if leaders.rank:
            try:
                with open(here.pack(lower) or os.devnull, "rb") as file:
                    for chunk in bundle.pieces(file):
                        leaders.ssend(chunk, dest=0)
            except OSError as error:
                here.notes.append(f"new entries are lost: {_reason(error)}")
            # Rank 0 waits for it.
            leaders.ssend(b"", dest=0)
            return
        # All of them: a sender waits until its chunks are received.
        received = [self._received(leaders, source, here) for source in range(1, leaders.size)]
        try:
            self._push(here, received)
        except FAILURES as error:
            self.notice(f"new entries are lost: {self._out}: {_reason(error)}")

    def _received(self, leaders: Intracomm, source: int, here: NodeRoot) -> StoreCollection | None:
        """Return the bundle that a leader sends, empty if it sends none; ``None`` if it cannot be written."""
        chunks = iter(partial(leaders.recv, source=source), b"")
        environment = here.stack().environment
        try:
            shown = "what a node has sent"
            file = bundle.spooled(environment, chunks, shown, spared=0)
            return StoreCollection(bundle.BundlePlace(None, environment, shown=shown, file=file), environment)
        except FAILURES as error:
            deque(chunks, maxlen=0)
            self.notice(f"the new entries of a node are lost: {_reason(error)}")
            return None

    def _push(self, here: NodeRoot, received: Iterable[StoreCollection | None]) -> None:
        # Temporary files lie on the node's own disk.
        stack = here.stack()
        with trusting.allowed_list(self.environment, self._sign, None) as allowed:
            target = place_of(self._out or "", stack.environment, writes=True, force=self._force)
            store = StoreCollection(target, stack.environment, allowed, key=self._sign)
            result = push_pull.push_layers(stack, store, stack.clearable() if here.root is not None else ())
            for parcel in filter(None, received):
                plan = copying.missing(parcel, store, parcel.portability_keys(), result)
                copying.copy(parcel, store, plan, result)
            store.finish()
        digest = f"; digest {store.digest}" * bool(store.written or store.parts)
        self._inform(f"{target.shown}: {plural(result.total.placed, 'entry', 'entries')} added{digest}")

    def highest(self, status: int) -> int:
        """Return the highest ``status`` of all ranks."""
        _rest(self._world)
        return int(self._world.allreduce(status, op=max))

    def united(self, mine: Mapping[str, str]) -> dict[str, str]:
        """Return the union of the mappings of all ranks."""
        return dict(self._world.allreduce(dict(mine), op=or_))

    def abort(self) -> None:
        """End the job, if this rank fails unexpectedly: the others would wait for it forever."""
        _mpi().COMM_WORLD.Abort(1)

    def close(self, *, wait: bool = False) -> None:
        """Remove this node's folder. With ``wait``, wait first until all ranks of the node call this.

        After a failure it waits only a few seconds, because the rank that failed may not wait here.
        """
        if wait and not self._abandoned and not _mpi().Is_finalized():
            _poll(self._node.Ibarrier().Test, FAILING_WAIT if self._failed else None)
        if self._here is not None:
            self._here.remove()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CachectlError) else reason_of(error)


# ---------------------------------------------------------------------- MPI


def _mpi() -> _Module:
    try:
        with warnings.catch_warnings():
            # NotConnected reports the same in one line.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
            from mpi4py import MPI
    except ImportError as error:
        message = "an MPI job needs an MPI library and mpi4py: pip install 'opencl-cachectl[mpi]'"
        raise CachectlError(message) from error
    except RuntimeError as error:
        raise CachectlError(f"mpi4py finds no MPI library: {str(error).splitlines()[0]}") from error
    return MPI


def _rest(comm: Intracomm) -> None:
    """Wait for all ranks without keeping a processor busy: other processes of the node may need it."""
    _poll(comm.Ibarrier().Test, None)


def _poll(done: Callable[[], bool], limit: float | None) -> bool:
    """Poll ``done`` with growing pauses, for at most ``limit`` seconds; return whether it became true."""
    deadline = None if limit is None else time.monotonic() + limit
    pause = _SHORTEST
    while not done():
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
    """Stage caches for a program that runs under MPI itself; all ranks of ``comm`` enter and leave it.

    Enter the block before loopy is imported and before a driver starts. The folder is removed at process exit, because
    libraries go on using it.

    :param source: what to start with; needs exactly one of ``digest``, ``allowed_signers`` and ``trust``, unless it
        is an isolated root
    :param out: gets what is new when the block ends, unless a rank leaves it by an exception
    :param sign: an OpenSSH key for ``out``
    :param comm: by default the world
    :param notice: gets, on rank 0, a line for each thing done and each problem; without it, problems are warnings
    :returns: a context, which gives the folder of this node's caches, ``None`` if its disk could not be used
    :raises CachectlError: on all ranks, before anything is changed, if it is too late on one
    :raises NotConnected: if MPI does not connect the ranks
    """
    from cachectl.switching.disabled import too_late

    environment = this_environment()
    vouchers = (allowed_signers, digest, trust)
    reason = trusting.Trust(*vouchers) if any(vouchers) else None
    lines: list[str] = []
    warn = notice or partial(warnings.warn, category=RuntimeWarning, stacklevel=3)
    inform = notice or (lambda _: None)
    ranks = Ranks(environment, source, reason, out, sign, comm=comm, notice=lines.append, inform=inform)
    if late := ranks.united(too_late(LayerSet(environment).clearable(), environment.temporary)):
        reasons = "; ".join(f"{name}: {why}" for name, why in late.items())
        raise CachectlError(f"too late to stage; enter the block before these are used: {reasons}")
    variables = ranks.stage_in()
    process = os.getpid()

    def close() -> None:
        if os.getpid() == process:
            ranks.close(wait=True)

    atexit.register(close)
    ok = False
    try:
        with overlay.applied(overlay.variables(variables)):
            # Only after all ranks have passed: a warning may be an error.
            while lines:
                warn(lines.pop(0))
            yield ranks.root
        ok = True
    finally:
        # A forked child leaves the block too, but is no rank.
        if os.getpid() == process:
            ranks.stage_out(ok=ok)
            while lines:
                warn(lines.pop(0))
