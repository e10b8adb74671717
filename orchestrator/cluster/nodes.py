"""One report, or one purge, over every node of an MPI job.

Every rank resolves its own roots, because ranks may have different variables. One of the ranks that see a root reads or
clears it: a shared root is counted once, and a root on a node's own disk is handled by a rank of that node.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from cachectl.clearing.purge import PurgeResult, plan, recover
from cachectl.cluster.stage import failing_together, node_name, world
from cachectl.inspecting.report import LayerReport, Report, RootReport, build_report
from cachectl.layers.base.errors import FAILURES
from cachectl.layers.base.facts import Condition, Note, Outcome, Root, State
from cachectl.layers.base.registry import Broken
from cachectl.layers.base.texts import plural
from cachectl.layers.host.mounts import place_of

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.selection import Selection

T = TypeVar("T")

#: Differs between machines, and between two boots of one, even if their host names are equal.
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
#: A layer, and a text that identifies one of its roots in the whole job.
_Identity = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The rank that handles a root, and the nodes that see it."""

    rank: int
    nodes: frozenset[str]

    def plus(self, other: _Seen) -> _Seen:
        """Combine with what another rank sees; the lowest rank handles the root."""
        return _Seen(min(self.rank, other.rank), self.nodes | other.nodes)


class Nodes:
    """The ranks of a job that report or purge together. All ranks must call each method, in the same order.

    Methods return the result on rank 0 and ``None`` on the others. They raise :class:`BadRequest`, on every rank, for a
    layer that no rank has, and :class:`NotConnected` if MPI does not connect the ranks.
    """

    def __init__(self, stack: LayerSet, notice: Callable[[str], None], comm: Intracomm | None = None) -> None:
        self._stack = stack
        self._comm = world(stack.environment) if comm is None else comm
        self._notice = notice
        self._node = node_name(stack.environment)
        self._machine = _machine()
        self._identities: dict[tuple[str, Path], _Identity] = {}

    @property
    def first(self) -> bool:
        """Return whether this is rank 0."""
        return bool(self._comm.rank == 0)

    def report(self, names: Sequence[str] = ()) -> Report | None:
        """Count every root that a rank sees, each once."""
        with failing_together(self._notice):
            layers = self._named(names) if names else tuple(self._stack)
            seen = self._divided(layers)
            mine = build_report(self._stack, layers, within=self._mine(seen))
            parts = self._comm.gather(_labelled(mine, self._nodes_of(seen)))
            nodes = self._comm.gather(self._node)
        if parts is None or nodes is None:
            return None
        return _report_of(parts, tuple(dict.fromkeys(nodes)))

    def purge(self, selection: Selection, names: Sequence[str] = (), *, dry_run: bool = False) -> PurgeResult | None:
        """Clear a selection in every root that a rank sees, each by one rank; ``dry_run`` only plans that."""
        with failing_together(self._notice):
            layers = self._named(names) if names else self._stack.clearable()
            mine = self._mine(self._divided(layers))
            if not dry_run:
                recover(layers, mine)
            planned = plan(layers, selection, within=mine)
            result = planned.result if dry_run else planned.apply()
            parts = self._comm.gather([_placed(outcome, self._node) for outcome in result.layers])
        if parts is None:
            return None
        outcomes: dict[str, Outcome] = {}
        for outcome in chain.from_iterable(parts):
            before = outcomes.get(outcome.layer)
            outcomes[outcome.layer] = outcome if before is None else before.plus(outcome)
        return PurgeResult(dry_run, tuple(outcomes.values()))

    def _named(self, names: Sequence[str]) -> tuple[Layer, ...]:
        """Return those of the named layers that this rank has, maybe none."""
        known = self._comm.allreduce({layer.name for layer in self._stack}, op=_union)
        for name in names:
            if name not in known:
                raise self._stack.no_layer(name, sorted(known))
        return tuple(self._stack[name] for name in dict.fromkeys(names) if name in self._stack)

    def _divided(self, layers: Iterable[Layer]) -> Mapping[_Identity, _Seen]:
        """Agree with the other ranks which of them handles each root."""
        here = _Seen(int(self._comm.rank), frozenset({self._node}))
        self._identities.clear()
        mine = {self._identity(layer.name, root): here for layer in layers for root in _roots(layer)}
        return dict(self._comm.allreduce(mine, op=_joined))

    def _mine(self, seen: Mapping[_Identity, _Seen]) -> Callable[[Layer, Root], bool]:
        def mine(layer: Layer, root: Root) -> bool:
            found = seen.get(self._identity(layer.name, root))
            # A root that appeared after the agreement belongs to this rank.
            return found is None or found.rank == self._comm.rank

        return mine

    def _nodes_of(self, seen: Mapping[_Identity, _Seen]) -> Callable[[str, Root], tuple[str, ...]]:
        def nodes(layer: str, root: Root) -> tuple[str, ...]:
            found = seen.get(self._identity(layer, root))
            return (self._node,) if found is None else tuple(sorted(found.nodes))

        return nodes

    def _identity(self, layer: str, root: Root) -> _Identity:
        """Return the identity of a root, computed once: other processes make and remove folders meanwhile."""
        name = layer, root.path
        if name not in self._identities:
            self._identities[name] = layer, self._place(root.path)
        return self._identities[name]

    def _place(self, path: Path) -> str:
        """Return a text that identifies a folder among all machines.

        On a network file system: the mounted source, the path in it and the inode, since some network file systems
        number files differently on each machine. Elsewhere: the machine, device and inode. A folder that does not exist
        yet is identified by its path.
        """
        located = place_of(path, mounts=self._stack.environment.mounts)
        shared = located is not None and located[0].is_network
        where = " ".join((*located[0], located[1])) if located is not None and shared else self._machine
        try:
            status = os.stat(path)
        except OSError:
            return where if shared else f"{where} {os.path.realpath(path)}"
        return f"{where} {status.st_ino}" if shared else f"{where} {status.st_dev} {status.st_ino}"


def _machine() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        import platform

        return platform.node()


def _roots(layer: Layer) -> tuple[Root, ...]:
    try:
        return layer.roots()
    except FAILURES:
        # The report or the plan contains the error.
        return ()


def _union(one: set[str], other: set[str]) -> set[str]:
    return one | other


def _joined(one: Mapping[_Identity, _Seen], other: Mapping[_Identity, _Seen]) -> dict[_Identity, _Seen]:
    return {**one, **other, **{root: one[root].plus(other[root]) for root in one.keys() & other.keys()}}


# ---------------------------------------------------------------------- one report of many


def _labelled(report: Report, nodes: Callable[[str, Root], tuple[str, ...]]) -> Report:
    """Return a report with the nodes that see each root."""
    layers = tuple(
        replace(layer, roots=tuple(replace(one, nodes=nodes(layer.layer, one.root)) for one in layer.roots))
        for layer in report.layers
    )
    return replace(report, layers=layers)


def _report_of(parts: Sequence[Report], nodes: tuple[str, ...]) -> Report:
    by_name: dict[str, list[LayerReport]] = {}
    for layer in chain.from_iterable(part.layers for part in parts):
        by_name.setdefault(layer.layer, []).append(layer)
    broken: tuple[Broken, ...] = tuple(dict.fromkeys(chain.from_iterable(part.broken for part in parts)))
    return Report(parts[0].generated, tuple(map(_layer_of, by_name.values())), broken, nodes=nodes)


def _layer_of(parts: Sequence[LayerReport]) -> LayerReport:
    roots: tuple[RootReport, ...] = tuple(chain.from_iterable(part.roots for part in parts))
    failures = tuple(dict.fromkeys(chain.from_iterable(part.failures for part in parts)))
    return replace(parts[0], state=_state_of([part.state for part in parts]), roots=roots, failures=failures)


def _state_of(states: Sequence[State]) -> State:
    """Return the common state of all ranks, or the most frequent one with the others in its reason."""
    drivers = tuple(dict.fromkeys(chain.from_iterable(state.drivers for state in states)))
    (most, _), *others = counted = Counter(replace(state, drivers=drivers) for state in states).most_common()
    if not others:
        return most
    why = "; ".join(f"on {plural(count, 'rank')} {state.condition.value}, {state.why}" for state, count in counted)
    return State(most.condition if len({state.condition for state in states}) == 1 else Condition.UNKNOWN, why, drivers)


def _placed(outcome: Outcome, node: str) -> Outcome:
    """Return an outcome with the node added to each note."""
    skipped, failed = (
        tuple(Note(note.key, f"{note.because} (on {node})") for note in notes)
        for notes in (outcome.skipped, outcome.failed)
    )
    return replace(outcome, skipped=skipped, failed=failed)
