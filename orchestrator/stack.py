"""The layers of one environment, and the verbs that work on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Generic, TypeVar

from cachectl.layer_set import LayerSet
from cachectl.layers import core

if TYPE_CHECKING:
    from cachectl import listing, removal, transfer
    from cachectl.verbs.bench import Bench
    from cachectl.verbs.report import Report
    from cachectl.verbs.store import SharedStore
    from cachectl.watching import proof as proving
    from cachectl.watching.timeline import Trace

T = TypeVar("T")


class _Verb(Generic[T]):
    """A method that is a function of another module, which is imported when the method is used."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, stack: Stack | None, kind: type[Stack]) -> Callable[..., T]:
        module, _, name = self._path.rpartition(".")
        function: Callable[..., T] = getattr(import_module(module), name)
        return function if stack is None else MethodType(function, stack)


class Stack(LayerSet):
    """The layers of one environment, and the verbs that work on all of them.

    Verbs of the command line are methods, with the same words as arguments, and return facts. ``layers`` names layers;
    without it a verb works on all of them, or on every clearable one if it removes or pushes. ``notice`` gets one line
    for each thing that a caller should know and that is no error; by default it issues a :class:`RuntimeWarning`.
    """

    @classmethod
    def below(cls, folder: str, environment: core.Environment | None = None) -> Stack:
        """Return the layers as ``run --isolated=FOLDER`` and ``env --root FOLDER`` keep them below a folder.

        Raises :class:`BadRequest` if there is no such folder.
        """
        from cachectl.switching.child import environment_below

        return cls(environment_below(environment or core.Environment.here(), folder))

    entries: _Verb[Iterator[core.Entry]] = _Verb("cachectl.listing.entries")
    report: _Verb[Report] = _Verb("cachectl.verbs.report.report")
    ls: _Verb[listing.Listing] = _Verb("cachectl.verbs.ls.ls")
    verify: _Verb[listing.Findings] = _Verb("cachectl.verbs.verify.verify")
    doctor: _Verb[listing.Findings] = _Verb("cachectl.verbs.doctor.doctor")
    plan_clear: _Verb[removal.Removal] = _Verb("cachectl.verbs.purge.plan_purge")
    purge: _Verb[removal.Removal] = _Verb("cachectl.verbs.purge.purge")
    prune: _Verb[removal.Removal] = _Verb("cachectl.verbs.prune.prune")
    run: _Verb[tuple[int, proving.Proof | None]] = _Verb("cachectl.verbs.run.run_with")
    trace: _Verb[Trace] = _Verb("cachectl.verbs.trace.trace")
    bench: _Verb[Bench] = _Verb("cachectl.verbs.bench.bench")
    portability_digest: _Verb[str] = _Verb("cachectl.exchange.portability.portability_digest")
    push: _Verb[transfer.Transfer] = _Verb("cachectl.exchange.push_pull.push")
    pull: _Verb[transfer.Transfer] = _Verb("cachectl.exchange.push_pull.pull")
    store: _Verb[SharedStore] = _Verb("cachectl.verbs.store.SharedStore")
