"""Warm caches on every node of an MPI job: rank 0 reads a bundle once and broadcasts it, each node unpacks it.

The ranks that share memory are a node, and the lowest of them is its leader. Rank 0 reads the bundle, checks its
signature or checksum, and broadcasts it to the leaders in chunks; each unpacks it on its own node's disk. At the end
the leaders agree which of them sends each new entry, so that each is sent once, and rank 0 writes new and old ones.

mpi4py is imported here and nowhere else. Any launcher may start the ranks.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from cachectl.cluster.rank_roots import root_stack
from cachectl.cluster.staging import Name, NodeRoot, Sink, names_in
from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, CachectlError, reason_of
from cachectl.layers.base.selection import moment_text
from cachectl.layers.base.texts import plural
from cachectl.layers.disk.private_folders import private_folder
from cachectl.layers.host.launcher import Launch, launched
from cachectl.moving.exporting import pack, unseen
from cachectl.moving.importing import Trust, private_copy, trusted_bundle
from cachectl.moving.merging import Merged, merge_bundles
from cachectl.moving.output_files import BUNDLE, SIGNATURE, OutputFile
from cachectl.moving.transfer import signature_name
from cachectl.moving.whole_files import STREAM
from cachectl.switching.overlay import PROCESS, Variable

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from cachectl.switching.run import Signals

    # The module mpi4py.MPI, which cannot be named as a type.
    _Module = Any

#: For tests on one machine: ranks with different values count as different nodes.
NODE: Final = "CACHECTL_NODE"
#: Bytes broadcast or sent at once.
CHUNK: Final = 4 << 20
#: Seconds that a failing rank waits for the others to notice.
_FAILING_WAIT: Final = 5.0
_SHORTEST, _LONGEST = 0.001, 0.05


class NotConnected(CachectlError):
    """The launcher started several ranks, but MPI shows each of them alone; every rank gets this error.

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
    """The request of a job: the bundle to start with, the proof that it is trusted, and the bundle to write at the end.

    ``scratch`` is a folder on a local disk of each node, by default the node's temporary folder. ``force`` overwrites
    an existing output file that is no bundle.
    """

    bundle: str | None = None
    trust: Trust | None = None
    out: str | None = None
    sign: str | None = None
    scratch: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.bundle is not None and self.trust is None:
            raise BadRequest("a bundle is code: give one of --allowed-signers, --sha256 and --trust")
        if self.bundle is None and self.trust is not None:
            raise BadRequest("--allowed-signers, --sha256 and --trust need a bundle")
        if self.sign is not None and self.out is None:
            raise BadRequest("--sign needs --out FILE")
        if self.bundle is None and self.out is None:
            raise BadRequest("nothing to stage: name a BUNDLE to start with, or --out FILE for what is compiled")


@dataclass(frozen=True, slots=True)
class Staged:
    """The result of staging on all nodes: the number of warm nodes, and how often the bundle's file was read."""

    nodes: int
    warm: int
    entries: int
    bytes: int
    reads: int
    trusted: str

    @property
    def words(self) -> str:
        """Return a line for the user."""
        chunks = -(-self.bytes // CHUNK)
        return (
            f"staged {self.entries:,} entries on {self.warm} of {plural(self.nodes, 'node')}: "
            f"{self.bytes:,} bytes, read {'once' if self.reads == 1 else f'{self.reads} times'}, "
            f"broadcast in {plural(chunks, 'chunk')}; trusted: {self.trusted}"
        )


@dataclass(frozen=True, slots=True)
class _Announced:
    """Facts about the bundle that rank 0 broadcasts to the leaders; ``sha256`` is ``None`` without a usable bundle."""

    bytes: int = 0
    sha256: str | None = None
    trusted: str = ""
    note: str | None = None
    misuse: str | None = None
    writes: bool = False


@dataclass(frozen=True, slots=True)
class _Results:
    """The results that leaders send to rank 0: numbers to add, and for each note one node and the number of nodes."""

    warm: int = 0
    entries: int = 0
    reads: int = 0
    notes: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def plus(self, other: _Results) -> _Results:
        """Add another one."""
        notes = dict(self.notes)
        for note, (count, node) in other.notes.items():
            before, first = notes.get(note, (0, node))
            notes[note] = before + count, first
        return _Results(self.warm + other.warm, self.entries + other.entries, self.reads + other.reads, notes)

    def lines(self) -> Iterator[str]:
        """Yield a line for each note."""
        for note, (count, node) in self.notes.items():
            where = node if count == 1 else f"{node} and {count - 1} more"
            yield f"{where}: {note}"


class Fleet:
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
        self._name = node_name(environment)
        self._scratch = job.scratch or environment.temporary
        self._here: NodeRoot | None = None
        self._held = ExitStack()
        self._base: BinaryIO | None = None
        self._writes = False
        self._reads = 0
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
        misuse: str | None = None
        if self._leaders is not None:
            said = self._leaders.bcast(self._read() if self.rank == 0 else None)
            misuse = said.misuse
            if misuse is None:
                self._here = NodeRoot.make(self.environment, self._scratch)
                self._writes = said.writes
                self._take(self._here, said)
                self._report_staged(self._here, said)
        rest(self._node)
        result = (misuse, None, {}) if self._here is None else (misuse, self._here.root, dict(self._here.variables))
        misuse, self.root, variables = self._node.bcast(result)
        if misuse is not None:
            raise BadRequest(misuse)
        return cast("Mapping[str, str | None]", variables)

    def _misused(self) -> str | None:
        """Return why the output file must not be written; ``None`` if it may."""
        job = self._job
        if job.out is None:
            return None
        if job.bundle is not None and _same(job.bundle, job.out):
            # If it cannot be read, the job starts cold and leaves it as it is.
            return None
        if job.out == STREAM:
            return "--out -: standard output is the command's; name a file"
        names = frozenset(layer.name for layer in LayerSet(self.environment))
        try:
            OutputFile(job.out, BUNDLE, names, job.force).demand()
            if job.sign is not None:
                OutputFile(signature_name(job.out), SIGNATURE, names, job.force).demand()
        except CachectlError as error:
            return f"--out {error}"
        return None

    def _read(self) -> _Announced:
        """Read the bundle, on rank 0."""
        job = self._job
        folder = os.path.dirname(job.out or "")
        if job.out is not None and (os.path.isdir(job.out) or (folder and not os.path.isdir(folder))):
            return _Announced(misuse=f"--out {job.out!r} is a folder, or its folder does not exist")
        if (misuse := self._misused()) is not None:
            return _Announced(misuse=misuse)
        writes = job.out is not None
        if job.bundle is None or job.trust is None:
            return _Announced(writes=writes)
        try:
            self._reads += 1
            copy = self._copied(job.bundle)
            checked = trusted_bundle(copy, job.bundle, job.trust)
        except FileNotFoundError:
            return _Announced(note=f"{job.bundle}: there is no such file yet; all nodes start cold", writes=writes)
        except (OSError, CachectlError) as error:
            note = f"all nodes start cold: {job.bundle}: {_reason(error)}"
            # An unreadable bundle may be valuable, so it is not overwritten; another file is.
            kept = writes and _same(job.bundle, job.out or "")
            note += f"; nothing will be written to {job.out}, which stays as it is" if kept else ""
            return _Announced(note=note, writes=writes and not kept)
        self._base = copy
        made = checked.manifest.made
        trusted = checked.trusted if made is None else f"{checked.trusted}, made {moment_text(made)}"
        return _Announced(checked.bytes, checked.sha256, trusted, writes=writes)

    def _copied(self, bundle: str) -> BinaryIO:
        """Return a private copy of a bundle, or of a root packed as a bundle, that no other process can change."""
        apart = self._apart()
        if not os.path.isdir(bundle):
            return self._held.enter_context(private_copy(LayerSet(apart, plugins=False), bundle))
        root = root_stack(apart, apart.absolute(bundle))
        copy = self._held.enter_context(unseen(apart))
        pack(root, copy, names_in(root))
        return copy

    def _apart(self) -> Environment:
        """Return an environment whose unnamed temporary files lie on the node's own disk, if possible."""
        try:
            return replace(self.environment, temporary=private_folder(self._scratch, make=True))
        except (OSError, CachectlError):
            return self.environment

    def _take(self, here: NodeRoot, said: _Announced) -> None:
        if said.sha256 is None or self._leaders is None:
            return
        mpi = _mpi()
        sink = None if self._base is not None else Sink(here)
        buffer = memoryview(bytearray(min(CHUNK, said.bytes)))
        if self._base is not None:
            self._base.seek(0)
        for start in range(0, said.bytes, CHUNK):
            chunk = buffer[: min(CHUNK, said.bytes - start)]
            if self._base is not None:
                chunk[:] = self._base.read(len(chunk))
            # A leader that cannot store it must still take part in the broadcast.
            self._leaders.Bcast([chunk, mpi.BYTE], root=0)
            if sink is not None:
                sink.write(chunk)
        file = self._base if sink is None else sink.file
        if file is not None:
            here.fill(file, self._job.bundle or "", said.sha256)
        if sink is not None and sink.file is not None:
            sink.file.close()

    def _report_staged(self, here: NodeRoot, said: _Announced) -> None:
        total = self._sum(here)
        if total is None or self._leaders is None:
            return
        if said.note is not None:
            self.notice(said.note)
        if said.sha256 is not None:
            done = Staged(self._leaders.size, total.warm, total.entries, said.bytes, total.reads, said.trusted)
            self._inform(done.words)
        for line in total.lines():
            self.notice(line)

    def _sum(self, here: NodeRoot) -> _Results | None:
        """Sum the results of all nodes; rank 0 gets the sum, the others ``None``."""
        notes = dict.fromkeys(here.notes, (1, self._name))
        here.notes.clear()
        mine = _Results(int(here.placed > 0), here.placed, self._reads, notes)
        return None if self._leaders is None else self._leaders.reduce(mine, op=_Results.plus)

    # ------------------------------------------------------------------ out

    def stage_out(self, *, ok: bool = True) -> Merged | None:
        """Wait for all ranks; gather new entries if requested. Rank 0 gets the bundle written, the others ``None``.

        If a rank is not ``ok``, nothing is gathered, and it waits only a few seconds for the others.
        """
        if not self._all_are(ok=ok):
            if self._here is not None and self._writes and self.rank == 0:
                self.notice(f"a rank has failed: nothing was written to {self._job.out}")
            return None
        if self._leaders is None or self._here is None or not self._writes:
            return None
        merged = self._gather(self._leaders, self._here)
        total = self._sum(self._here)
        for line in () if total is None else total.lines():
            self.notice(line)
        return merged

    def _all_are(self, *, ok: bool) -> bool:
        """Agree whether every rank is ``ok``."""
        mpi = _mpi()
        mine, everybody = bytearray([ok]), bytearray(1)
        request = self._world.Iallreduce([mine, mpi.BYTE], [everybody, mpi.BYTE], op=mpi.BAND)
        if not _poll(request.Test, None if ok else _FAILING_WAIT):
            # The others may never arrive here; leave them the folder that they still use.
            self._abandoned = True
            self._pending = (request, mine, everybody)
            return False
        return bool(everybody[0])

    def _gather(self, leaders: Intracomm, here: NodeRoot) -> Merged | None:
        owners: Mapping[Name, int] = leaders.allreduce(dict.fromkeys(here.new(), leaders.rank), op=_lowest)
        mine = [name for name, owner in owners.items() if owner == leaders.rank]
        packed = here.pack(mine) if mine else None
        size = 0 if packed is None else packed.seek(0, os.SEEK_END)
        sizes = leaders.gather(size)
        if sizes is None:
            if packed is not None:
                self._send(leaders, packed, size)
                packed.close()
            return None
        return self._collect(leaders, packed, sizes)

    @staticmethod
    def _send(leaders: Intracomm, packed: BinaryIO, size: int) -> None:
        mpi = _mpi()
        packed.seek(0)
        for start in range(0, size, CHUNK):
            # Synchronous, so that rank 0 holds one chunk at a time.
            leaders.Ssend([packed.read(min(CHUNK, size - start)), mpi.BYTE], dest=0)

    def _collect(self, leaders: Intracomm, own: BinaryIO | None, sizes: Sequence[int]) -> Merged | None:
        """Receive the new entries of one leader after the other, and write them all."""
        parts = [part for part in (self._base, own) if part is not None]
        chunks = _chunks(leaders, sizes)
        try:
            done = merge_bundles(
                self._apart(),
                chain(parts, self._files(chunks)),
                self._job.out or "",
                sign=self._job.sign,
                base=self._base is not None,
            )
        except (OSError, CachectlError) as error:
            self.notice(f"new entries are lost: {self._job.out}: {_reason(error)}")
            return None
        finally:
            # A sender waits until all of its chunks are received.
            deque(chunks, maxlen=0)
        self._inform(_written(done, sum(map(bool, sizes))))
        return done

    def _files(self, chunks: Iterator[tuple[int, memoryview]]) -> Iterator[BinaryIO]:
        """Yield a file for each leader that sends."""
        for _, sent in groupby(chunks, key=itemgetter(0)):
            file = unseen(self._apart())
            try:
                for _, chunk in sent:
                    file.write(chunk)
            except OSError:
                file.close()
                raise
            yield file

    def highest(self, status: int) -> int:
        """Return the highest ``status`` of all ranks."""
        rest(self._world)
        return int(self._world.allreduce(status, op=max))

    def united(self, mine: Mapping[str, str]) -> dict[str, str]:
        """Return the union of the mappings of all ranks."""
        return dict(self._world.allreduce(dict(mine), op=_united))

    def close(self, *, wait: bool = False) -> None:
        """Remove this node's folder. With ``wait``, wait first until all ranks of the node call this."""
        self._held.close()
        if wait and not self._abandoned and not _mpi().Is_finalized():
            rest(self._node)
        if self._here is not None:
            self._here.remove()


def _chunks(leaders: Intracomm, sizes: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
    """Yield the chunks that the leaders send, each with the rank of its sender; rank 0 sends nothing."""
    mpi = _mpi()
    buffer = memoryview(bytearray(CHUNK))
    for source, size in enumerate(sizes):
        for start in range(0, size if source else 0, CHUNK):
            chunk = buffer[: min(CHUNK, size - start)]
            leaders.Recv([chunk, mpi.BYTE], source=source)
            yield source, chunk


def _written(done: Merged, nodes: int) -> str:
    foreign = "".join(
        f"; {count} of {layer} left out: made on a node with another processor, driver or library"
        for layer, count in done.foreign.items()
    )
    origin = f", from {plural(nodes, 'node')}" * bool(done.added)
    differing = f"; {done.differing} had other bytes under the same key, and the first was kept" * bool(done.differing)
    return (
        f"{done.file}: {done.entries:,} entries, {done.added:,} of them new{origin}{differing}{foreign}; "
        f"{done.bytes:,} bytes, SHA-256 {done.sha256}"
    )


def _lowest(one: Mapping[Name, int], other: Mapping[Name, int]) -> dict[Name, int]:
    """Merge two mappings of entries to ranks; the lowest leader that has an entry sends it."""
    return {**other, **one, **{name: min(one[name], other[name]) for name in one.keys() & other.keys()}}


def _united(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    return {**other, **one}


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _reason(error: OSError | CachectlError) -> str:
    return str(error) if isinstance(error, CachectlError) else reason_of(error)


def world(environment: Environment) -> Intracomm:
    """Return a communicator of all ranks, separate from those of the program.

    Raises :class:`CachectlError` without MPI, and :class:`NotConnected`.
    """
    return cast("Intracomm", _connected(environment).COMM_WORLD.Dup())


def _connected(environment: Environment) -> _Module:
    """Return mpi4py's MPI. Raises :class:`NotConnected` if the ranks of the job are not connected through it."""
    mpi = _mpi()
    launch = launched(environment) if mpi.COMM_WORLD.size == 1 else None
    if launch is not None:
        name, version = mpi.get_vendor()
        raise NotConnected(launch, " ".join((name, ".".join(map(str, version)))))
    return mpi


@contextmanager
def one_voice() -> Iterator[None]:
    """Let one rank report that ranks are not connected; the others exit silently with status 1.

    They wait before they exit: some launchers end a job as soon as one rank fails, before rank 0 has reported.
    """
    try:
        yield
    except NotConnected as error:
        if error.first:
            raise
        time.sleep(_FAILING_WAIT)
        raise SystemExit(1) from None


def node_name(environment: Environment) -> str:
    """Return the name of the node this rank runs on."""
    return str(_mpi().Get_processor_name()) + _suffix(environment)


def _suffix(environment: Environment) -> str:
    colour = environment.get(NODE)
    return "" if colour is None else f" ({NODE}={colour})"


@contextmanager
def failing_together(notice: Callable[[str], None]) -> Iterator[None]:
    """Abort the job if a rank fails unexpectedly: the others would wait for it for ever."""
    try:
        yield
    except BadRequest:
        raise
    except BaseException as error:
        notice(f"rank {_mpi().COMM_WORLD.rank}: {type(error).__name__}: {error}")
        _mpi().COMM_WORLD.Abort(1)
        raise


def rest(comm: Intracomm) -> None:
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


# ---------------------------------------------------------------------- two ways to use it


def run_staged(command: Sequence[str], environment: Environment, job: Job, notice: Callable[[str], None]) -> int:
    """Run a command on every rank, as its child, with staged caches; return the highest exit status of all.

    A command killed by signal n gives 128+n, and the other ranks go on. For an invalid request, raises
    :class:`BadRequest` on rank 0 and returns 2 on the others. If MPI does not connect the ranks, raises
    :class:`NotConnected` on the launcher's rank 0, and ends the others.
    """
    from cachectl.switching.run import signals_held

    with one_voice():
        fleet = Fleet(environment, job, notice=notice, inform=notice)
    with signals_held() as signals:
        try:
            with failing_together(notice):
                return _run(command, fleet, signals)
        except BadRequest:
            if fleet.rank == 0:
                raise
            return 2


def _run(command: Sequence[str], fleet: Fleet, signals: Signals) -> int:
    from cachectl.switching.run import CannotStart, run

    changes = fleet.stage_in()
    try:
        status = run(command, changes, fleet.environment, signals)
    except CannotStart as error:
        fleet.notice(f"rank {fleet.rank}: {error}")
        status = error.status
    if status > 128:  # noqa: PLR2004 - what a shell gives for a signal
        fleet.notice(f"rank {fleet.rank}: the command was ended by signal {status - 128}")
    fleet.stage_out()
    status = fleet.highest(status)
    fleet.close()
    return status


@contextmanager
def staged(
    bundle: str | None = None,
    *,
    sha256: str | None = None,
    allowed_signers: str | None = None,
    trust: bool = False,
    after: float | None = None,
    out: str | None = None,
    sign: str | None = None,
    scratch: Path | str | None = None,
    comm: Intracomm | None = None,
    notice: Callable[[str], None] | None = None,
) -> Iterator[Path | None]:
    """Stage caches for a program that runs under MPI itself; all ranks of ``comm`` (the world) enter and leave it.

    Yields the folder of this node's caches, ``None`` if its disk could not be used. Enter the block before loopy is
    imported and before a driver starts: if that is too late on one rank, raises :class:`CachectlError` on all ranks
    before anything is changed. Raises :class:`NotConnected` if MPI does not connect the ranks. A bundle needs exactly
    one of ``sha256``, ``allowed_signers`` and ``trust``; with ``after``, in epoch seconds, it must have been signed
    later than that. ``out`` is written when the block ends, unless a rank leaves it by an exception. The folder is
    removed at process exit, because libraries go on using it. On rank 0 ``notice`` gets a line for each thing done and
    each problem; without it, problems are warnings.
    """
    from cachectl.switching.disabled import too_late

    environment = Environment.here()
    vouchers = (allowed_signers, sha256, trust)
    believed = Trust(*vouchers, after) if bundle is not None or any(vouchers) else None
    job = Job(bundle, believed, out, sign, None if scratch is None else Path(scratch).absolute())
    lines: list[str] = []
    fleet = Fleet(environment, job, comm, notice=lines.append, inform=lambda _: None if notice is None else notice(_))
    late = fleet.united(too_late(LayerSet(environment).clearable(), environment.temporary))
    if late:
        reasons = "; ".join(f"{name}: {why}" for name, why in late.items())
        message = f"too late to stage; enter the block before these are used: {reasons}"
        raise CachectlError(message)
    variables = fleet.stage_in()
    process = os.getpid()
    atexit.register(_close_in, process, fleet)
    hold = PROCESS.push({Variable(name): value for name, value in variables.items()}, {})
    ok = False
    try:
        # Only after all ranks have passed: a warning may be an error.
        _say(lines, notice)
        yield fleet.root
        ok = True
    finally:
        PROCESS.pop(hold)
        # A forked child leaves the block too, but is no rank.
        if os.getpid() == process:
            fleet.stage_out(ok=ok)
            _say(lines, notice)


def _say(lines: list[str], notice: Callable[[str], None] | None) -> None:
    while lines:
        line = lines.pop(0)
        if notice is None:
            warnings.warn(line, RuntimeWarning, stacklevel=4)
        else:
            notice(line)


def _close_in(process: int, fleet: Fleet) -> None:
    if os.getpid() == process:
        fleet.close(wait=True)


def _mpi() -> _Module:
    try:
        with warnings.catch_warnings():
            # NotConnected reports the same in one line.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
            from mpi4py import MPI
    except ImportError as error:
        message = "an MPI job needs an MPI library and mpi4py, the extra mpi: pip install 'opencl-cachectl[mpi]'"
        raise CachectlError(message) from error
    except RuntimeError as error:
        message = f"mpi4py finds no MPI library: {str(error).splitlines()[0]}"
        raise CachectlError(message) from error
    return MPI
