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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from cachectl.exchange.bundle import BundlePlace, chunks_of, unnamed_file
from cachectl.exchange.copying import keys_of
from cachectl.exchange.index import StoreIndex, place_of
from cachectl.exchange.place import STREAM, Missing
from cachectl.exchange.pull import pull
from cachectl.exchange.push import Writer, push_layers
from cachectl.exchange.trust import UNTRUSTED, Trust, judges
from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, CachectlError, plural, reason_of
from cachectl.layers.base.selection import ALL
from cachectl.layers.disk.handles import probe_room
from cachectl.layers.disk.private_folders import NotPrivate, private_folder
from cachectl.layers.host.launcher import Launch, launched
from cachectl.switching.isolated import link_cache_home, make_isolated_root_in, remove_abandoned, remove_isolated_root
from cachectl.switching.overlay import PROCESS, Slot
from cachectl.switching.run import variables_isolated

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from cachectl.layers.base.layer import Layer

    # The module mpi4py.MPI, which cannot be named as a type.
    _Module = Any

#: For tests on one machine: ranks with different values count as different nodes.
NODE: Final = "CACHECTL_NODE"
#: Bytes of a message, and bytes of free space that a disk needs before programs are moved there.
_CHUNK: Final = 4 << 20
_ROOM: Final = 1 << 20
#: Seconds that a failing rank waits for the others to notice.
FAILING_WAIT: Final = 5.0
_SHORTEST, _LONGEST = 0.001, 0.05

#: Layer and key: the name of an entry in any root.
Name = tuple[str, str]


class NotConnected(CachectlError):
    """The launcher started several ranks, but MPI shows each of them as the only one; every rank gets this error.

    ``first`` is true on the rank that reports it: the launcher's rank 0, or every rank if their number is unknown.
    """

    def __init__(self, launch: Launch, library: str) -> None:
        self.first = not launch.rank or launch.ranks is None
        ranks = "several ranks" if launch.ranks is None else f"{launch.ranks} ranks"
        hint = "; srun --mpi=list names what Slurm offers" * launch.setting.startswith("SLURM")
        super().__init__(
            f"the launcher started {ranks} ({launch.setting}), but MPI does not connect them: mpi4py uses {library}; "
            f"start them with the mpiexec of that MPI, or install mpi4py for the launcher's MPI{hint}"
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What to stage: the source to start with, why it is trusted, and the target of what is compiled.

    ``scratch`` is a folder on a local disk of each node, by default the node's temporary folder. ``force`` replaces a
    target that is not a bundle.
    """

    source: str | None = None
    trust: Trust | None = None
    out: str | None = None
    sign: str | None = None
    scratch: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.source is None and self.trust is not None:
            raise BadRequest("--allowed-signers, --digest and --trust need a SOURCE")
        if STREAM in (self.source, self.out):
            raise BadRequest("the standard streams are the command's; name a FILE")
        if self.sign is not None and self.out is None:
            raise BadRequest("--sign needs --out FILE")
        if self.source is None and self.out is None:
            raise BadRequest("nothing to stage: name a SOURCE to start with, or --out FILE for what is compiled")


# ---------------------------------------------------------------------- one node


@dataclass
class NodeRoot:
    """The folder with the caches of all ranks of one node, for one job.

    Without a folder ``root`` is ``None`` and ``variables`` are empty: programs run as without staging. ``notes`` has a
    line for each problem. ``usable`` is whether the source could be read and was trusted.
    """

    environment: Environment
    root: Path | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    placed: int = 0
    trusted: tuple[str, ...] = ()
    usable: bool = True
    notes: list[str] = field(default_factory=list)
    _known: frozenset[Name] = frozenset()

    @classmethod
    def make(cls, environment: Environment, scratch: Path) -> NodeRoot:
        """Make an empty folder in ``scratch``, which is made if missing, and move every layer there.

        ``scratch`` is used directly if it is this user's own with mode 0700, else through its folder ``cachectl-UID``,
        which is. If another user could replace either, nothing is staged, and a note says so. Only layers that a rerun
        refills move: tuning results stay in place. Files of other programs in the user cache folder are linked.
        """
        made = cls(environment)
        try:
            parent = private_folder(scratch, make=True)
            remove_abandoned(environment, (parent,))
            made.root = make_isolated_root_in(parent, environment, "cachectl-stage-")
            probe_room(made.root, _ROOM)
            layers = LayerSet(environment).clearable()
            link_cache_home(environment, layers, made.root)
            made.variables = variables_isolated(layers, made.root)
        except NotPrivate as error:
            made.give_up(str(error))
        except (OSError, CachectlError) as error:
            made.give_up(f"{scratch}: {_reason(error)}")
        return made

    def give_up(self, why: str) -> None:
        """Stop using the folder: programs run as without staging, and a note gives the reason."""
        self.notes.append(f"not staged, so programs run cold or with the caches they have anyway: {why}")
        self.variables = {}
        self.placed = 0
        self.remove()

    def stack(self) -> LayerSet:
        """Return the layers as programs of this node find them."""
        moved = self.environment.with_variables(self.variables)
        return LayerSet(moved if self.root is None else replace(moved, temporary=self.root))

    def fill(self, source: str, trust: Trust | None) -> None:
        """Pull a source. A failure leaves programs cold."""
        if self.root is None:
            return
        stack = self.stack()
        try:
            done = pull(stack, source, trust, own=self.environment)
        except Missing:
            self.notes.append(f"starts cold: there is no {source} yet")
            return
        except (OSError, CachectlError) as error:
            self.usable = False
            self.notes.append(f"starts cold: {_reason(error)}")
            return
        try:
            if done.failed:
                probe_room(self.root, _ROOM)
        except OSError as error:
            self.give_up(f"{self.root.parent}: {_reason(error)}")
            return
        self._known = _names_in(stack)
        self.placed = done.total.placed
        self.trusted = done.trusted
        for layer in done.layers:
            if layer.failed:
                first = layer.failed[0]
                self.notes.append(f"{layer.layer}: {len(layer.failed)} entries not placed: {first.because}")
        reasons = [f"{key.layer}: {key.because}" for key in done.unread]
        reasons += [one.outlook.words for layer in done.layers for one in layer.foreseen if one.outlook.hits is False]
        if reasons and not self.placed:
            self.notes.append(f"starts cold: {reasons[0]}")

    def new(self) -> frozenset[Name]:
        """Return the names of the entries added since programs began. An entry that only grew is not new."""
        return _names_in(self.stack()) - self._known if self.root is not None else frozenset()

    def pack(self, names: frozenset[Name]) -> BinaryIO | None:
        """Return a bundle of these entries; ``None``, and a note, if it cannot be written."""
        try:
            stack = self.stack()
            parcel = _Parcel(stack.environment)
            writer = Writer(StoreIndex(parcel, stack.environment))
            layers = _read_by(stack)
            besides = {
                layer.name: {key for key in keys_of(layer) if (layer.name, key) not in names} for layer in layers
            }
            push_layers(stack, writer, ALL, layers, besides)
            writer.finish()
        except (OSError, CachectlError) as error:
            self.notes.append(f"{len(names)} new entries are lost: {_reason(error)}")
            return None
        return parcel.file

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        if self.root is not None:
            remove_isolated_root(self.root)
            self.root = None


class _Parcel(BundlePlace):
    """A bundle in an unnamed file, to be sent to rank 0 or as it came from another node."""

    def __init__(self, environment: Environment, file: BinaryIO | None = None) -> None:
        super().__init__(None, environment)
        self.file = file
        self.shown = "the new entries of a node"

    def _open(self) -> BinaryIO | None:
        return self.file

    def _publish(self, file: BinaryIO) -> None:
        self.file = file


def _read_by(stack: LayerSet) -> list[Layer]:
    return sorted(stack.clearable(), key=lambda layer: layer.name)


def _names_in(stack: LayerSet) -> frozenset[Name]:
    """Return the names of all entries that a rerun refills; a layer that cannot be listed adds none."""
    return frozenset((layer.name, key) for layer in stack.clearable() for key in keys_of(layer))


# ---------------------------------------------------------------------- all nodes


@dataclass(frozen=True, slots=True)
class _Told:
    """What the leader of a node tells rank 0."""

    node: str
    placed: int
    usable: bool
    trusted: tuple[str, ...]
    notes: tuple[str, ...]


class Ranks:
    """All ranks of a job. All ranks must call each method, in the same order.

    On rank 0 ``notice`` gets a line for each problem, and ``inform`` a line for each thing done.
    """

    def __init__(
        self,
        environment: Environment,
        job: Job,
        comm: Intracomm | None = None,
        *,
        notice: Callable[[str], None],
        inform: Callable[[str], None],
    ) -> None:
        mpi = _connected(environment)
        self.environment = environment
        self._job = job
        self.notice = notice
        self._inform = inform
        # A separate communicator, so that our messages do not mix with the program's.
        self._world = (mpi.COMM_WORLD if comm is None else comm).Dup()
        self._node = self._split(mpi)
        leads = self._node.rank == 0
        leaders = self._world.Split(0 if leads else mpi.UNDEFINED, self._world.rank)
        self._leaders = cast("Intracomm", leaders) if leads else None
        self._here: NodeRoot | None = None
        self._writes = job.out is not None
        self.root: Path | None = None
        self._abandoned = False

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return int(self._world.rank)

    def _split(self, mpi: _Module) -> Intracomm:
        shared = self._world.Split_type(mpi.COMM_TYPE_SHARED, self._world.rank)
        suffix = _suffix(self.environment)
        colours = sorted(set(shared.allgather(suffix)))
        return cast("Intracomm", shared.Split(colours.index(suffix), self._world.rank))

    # ------------------------------------------------------------------ in

    def stage_in(self) -> Mapping[str, str | None]:
        """Stage; return the variables with which programs of this rank use the staged entries.

        Raises :class:`BadRequest`, on every rank, for an invalid request.
        """
        misuse = self._world.bcast(self._misuse() if self.rank == 0 else None)
        if misuse is not None:
            raise BadRequest(misuse)
        job = self._job
        if self._leaders is not None:
            self._here = NodeRoot.make(self.environment, job.scratch or self.environment.temporary)
            if job.source is not None:
                self._here.fill(job.source, job.trust)
            self._report_staged(self._leaders, self._here)
        _rest(self._node)
        result = (None, {}) if self._here is None else (self._here.root, dict(self._here.variables))
        self.root, variables = self._node.bcast(result)
        return cast("Mapping[str, str | None]", variables)

    def _misuse(self) -> str | None:
        """Return why nothing can be staged; ``None`` if it can."""
        job, stack = self._job, LayerSet(self.environment)
        if job.out in stack or job.source in stack:
            return f"{job.out if job.out in stack else job.source!r} is a layer, not a FILE; write ./NAME for a file"
        if job.source is not None and job.trust is None and not os.path.isdir(self.environment.expand(job.source)):
            return UNTRUSTED
        if job.out is None:
            return None
        try:
            folder = self.environment.expand(job.out).parent
            if "://" not in job.out and not folder.is_dir():
                return f"--out {job.out!r}: the folder {folder} does not exist"
            if job.source is None or not self._is_same():
                place_of(job.out, self.environment, writes=True, force=job.force).names()
        except (OSError, CachectlError) as error:
            return f"--out {_reason(error)}"
        return None

    def _is_same(self) -> bool:
        """Return whether the target is the source, which stays as it is if it cannot be used."""
        job = self._job
        return os.path.realpath(job.source or "") == os.path.realpath(job.out or "")

    def _report_staged(self, leaders: Intracomm, here: NodeRoot) -> None:
        told = self._tell(leaders, here)
        if self._writes and self._is_same() and not leaders.bcast(all(node.usable for node in told)):
            self._writes = False
            note = f"nothing will be written to {self._job.out}, which stays as it is"
            told = [*told, replace(told[0], notes=(note,), placed=0)] if told else []
        if trusted := dict.fromkeys(why for node in told for why in node.trusted):
            nodes = f"{sum(node.placed > 0 for node in told)} of {plural(leaders.size, 'node')}"
            entries = sum(node.placed for node in told)
            self._inform(f"staged {entries:,} entries on {nodes}; trusted: {', '.join(trusted)}")
        self._say(told)

    def _tell(self, leaders: Intracomm, here: NodeRoot) -> list[_Told]:
        """Tell rank 0 the results of this node; return those of all nodes there, nothing elsewhere."""
        notes, here.notes = tuple(here.notes), []
        node = f"{_mpi().Get_processor_name()}{_suffix(self.environment)}"
        mine = _Told(node, here.placed, here.usable, here.trusted, notes)
        return leaders.gather(mine) or []

    def _say(self, told: Iterable[_Told]) -> None:
        """Print a line for each note."""
        nodes: dict[str, list[str]] = {}
        for node in told:
            for note in node.notes:
                nodes.setdefault(note, []).append(node.node)
        for note, names in nodes.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.notice(f"{names[0]}{more}: {note}")

    # ------------------------------------------------------------------ out

    def stage_out(self, *, ok: bool = True) -> None:
        """Wait for all ranks; push new entries if requested.

        If a rank is not ``ok``, nothing is pushed, and it waits only a few seconds for the others.
        """
        if not self._all_are(ok=ok):
            if self._writes and self.rank == 0:
                self.notice(f"a rank has failed: nothing was written to {self._job.out}")
            return
        if self._leaders is None or self._here is None or not self._writes:
            return
        self._collect(self._leaders, self._here)
        self._say(self._tell(self._leaders, self._here))

    def _all_are(self, *, ok: bool) -> bool:
        """Agree whether every rank is ``ok``."""
        mpi = _mpi()
        mine, everybody = bytearray([ok]), bytearray(1)
        request = self._world.Iallreduce([mine, mpi.BYTE], [everybody, mpi.BYTE], op=mpi.BAND)
        if not _poll(request.Test, None if ok else FAILING_WAIT):
            # The others may never arrive here; leave them the folder that they still use.
            self._abandoned = True
            self._pending = (request, mine, everybody)
            return False
        return bool(everybody[0])

    def _collect(self, leaders: Intracomm, here: NodeRoot) -> None:
        """Send the new entries that no lower leader has to rank 0, which pushes its own and those it receives."""
        new = here.new()
        lower: frozenset[Name] | None = leaders.exscan(new, op=or_)
        if leaders.rank:
            mine = new.difference(lower or ())
            parcel = here.pack(mine) if mine else None
            for chunk in () if parcel is None else chunks_of(parcel, _CHUNK):
                leaders.ssend(chunk, dest=0)
            leaders.ssend(b"", dest=0)
            return
        received: list[BinaryIO] = []
        try:
            # All of them: a sender waits until its chunks are received.
            received += [self._received(leaders, source) for source in range(1, leaders.size)]
            self._push(here, received)
        except (OSError, CachectlError) as error:
            self.notice(f"new entries are lost: {self._job.out}: {_reason(error)}")
        finally:
            for file in received:
                file.close()

    def _received(self, leaders: Intracomm, source: int) -> BinaryIO:
        """Return a file with what a leader sends; a full disk keeps the others from nothing."""
        file, failure = unnamed_file(self._apart()), None
        while chunk := leaders.recv(source=source):
            try:
                if failure is None:
                    file.write(chunk)
                    file.flush()
            except OSError as error:  # noqa: PERF203
                failure = error
        if failure is not None:
            self.notice(f"the new entries of a node are lost: {_reason(failure)}")
            file.close()
            file = unnamed_file(self._apart())
        return file

    def _push(self, here: NodeRoot, received: Sequence[BinaryIO]) -> None:
        job, stack = self._job, here.stack()
        with judges(self.environment, job.sign, None) as trusted:
            place = place_of(job.out or "", self._apart(), writes=True, force=job.force)
            writer = Writer(StoreIndex(place, self.environment, trusted), job.sign)
            done = push_layers(stack, writer, ALL, _read_by(stack) if here.root is not None else ())
            added = sum(layer.pushed for layer in done)
            for file in received:
                if file.tell():
                    added += writer.take(StoreIndex(_Parcel(self.environment, file), self.environment))
            writer.finish()
        digest = f"; digest {writer.digest}" * (writer.index.names.store is not None)
        self._inform(f"{place.shown}: {plural(added, 'entry', 'entries')} added{digest}")

    def _apart(self) -> Environment:
        """Return an environment whose unnamed temporary files lie on the node's own disk, if possible."""
        try:
            scratch = self._job.scratch or self.environment.temporary
            return replace(self.environment, temporary=private_folder(scratch, make=True))
        except (OSError, CachectlError):
            return self.environment

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
        """Remove this node's folder. With ``wait``, wait first until all ranks of the node call this."""
        if wait and not self._abandoned and not _mpi().Is_finalized():
            _rest(self._node)
        if self._here is not None:
            self._here.remove()


def _reason(error: OSError | CachectlError) -> str:
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
        message = f"mpi4py finds no MPI library: {str(error).splitlines()[0]}"
        raise CachectlError(message) from error
    return MPI


def _connected(environment: Environment) -> _Module:
    """Return mpi4py's MPI. Raises :class:`NotConnected` if the ranks of the job are not connected through it."""
    mpi = _mpi()
    launch = launched(environment) if mpi.COMM_WORLD.size == 1 else None
    if launch is not None:
        name, version = mpi.get_vendor()
        raise NotConnected(launch, " ".join((name, ".".join(map(str, version)))))
    return mpi


def _suffix(environment: Environment) -> str:
    colour = environment.get(NODE)
    return "" if colour is None else f" ({NODE}={colour})"


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
    scratch: Path | str | None = None,
    comm: Intracomm | None = None,
    notice: Callable[[str], None] | None = None,
) -> Iterator[Path | None]:
    """Stage caches for a program that runs under MPI itself; all ranks of ``comm`` (the world) enter and leave it.

    Yields the folder of this node's caches, ``None`` if its disk could not be used. Enter the block before loopy is
    imported and before a driver starts: if that is too late on one rank, raises :class:`CachectlError` on all ranks
    before anything is changed. Raises :class:`NotConnected` if MPI does not connect the ranks. A source needs exactly
    one of ``digest``, ``allowed_signers`` and ``trust``, unless it is an isolated root. ``out`` gets what is new when
    the block ends, unless a rank leaves it by an exception. The folder is removed at process exit, because libraries go
    on using it. On rank 0 ``notice`` gets a line for each thing done and each problem; without it, problems are
    warnings.
    """
    from cachectl.switching.disabled import too_late

    environment = Environment.here()
    vouchers = (allowed_signers, digest, trust)
    folder = None if scratch is None else Path(scratch).absolute()
    job = Job(source, Trust(*vouchers) if any(vouchers) else None, out, sign, folder)
    lines: list[str] = []
    ranks = Ranks(environment, job, comm, notice=lines.append, inform=lambda _: None if notice is None else notice(_))
    late = ranks.united(too_late(LayerSet(environment).clearable(), environment.temporary))
    if late:
        reasons = "; ".join(f"{name}: {why}" for name, why in late.items())
        message = f"too late to stage; enter the block before these are used: {reasons}"
        raise CachectlError(message)
    variables = ranks.stage_in()
    process = os.getpid()
    atexit.register(_close_in, process, ranks)
    hold = PROCESS.push({Slot(name): value for name, value in variables.items()}, {})
    ok = False
    try:
        # Only after all ranks have passed: a warning may be an error.
        _say(lines, notice)
        yield ranks.root
        ok = True
    finally:
        PROCESS.pop(hold)
        # A forked child leaves the block too, but is no rank.
        if os.getpid() == process:
            ranks.stage_out(ok=ok)
            _say(lines, notice)


def _say(lines: list[str], notice: Callable[[str], None] | None) -> None:
    while lines:
        line = lines.pop(0)
        if notice is None:
            warnings.warn(line, RuntimeWarning, stacklevel=4)
        else:
            notice(line)


def _close_in(process: int, ranks: Ranks) -> None:
    if os.getpid() == process:
        ranks.close(wait=True)
