"""The layers of one environment, and the verbs that work on all of them."""

from __future__ import annotations

from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING

from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.host.here import this_environment

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.exchange.portability import portability_digest
    from cachectl.exchange.push_pull import pull, push
    from cachectl.listing import entries
    from cachectl.verbs.bench import bench
    from cachectl.verbs.doctor import doctor
    from cachectl.verbs.ls import ls
    from cachectl.verbs.prune import prune
    from cachectl.verbs.purge import plan_purge, purge
    from cachectl.verbs.report import report
    from cachectl.verbs.run import run_from, run_in_place, run_isolated, run_without_cache
    from cachectl.verbs.store import SharedStore
    from cachectl.verbs.trace import trace
    from cachectl.verbs.verify import verify


class _Verb:
    """A function of another module as a method; the module is imported when the method is used."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, stack: Stack | None, kind: type[Stack]) -> object:
        module, _, name = self._path.rpartition(".")
        function = getattr(import_module(module), name)
        return function if stack is None else MethodType(function, stack)


class Stack(LayerSet):
    """The layers of one environment, and the verbs that work on all of them.

    The verbs of the command line are methods, their options are keywords, and they return facts. ``layers`` names
    layers; by default a verb works on all layers, or on the clearable ones if it removes or pushes. ``notice`` gets one
    line for each thing that is not an error but that a caller should know; by default it issues a
    :class:`RuntimeWarning`.
    """

    @classmethod
    def below(cls, folder: str, environment: Environment | None = None) -> Stack:
        """Return the layers below a folder, as of ``run --isolated=FOLDER`` and ``env --root FOLDER``.

        Raises :class:`BadRequest` if there is no such folder.
        """
        from cachectl.switching.child import environment_below

        return cls(environment_below(environment or this_environment(), folder))

    # Type checkers see the functions themselves, with their arguments.
    if TYPE_CHECKING:
        entries = entries
        report = report
        ls = ls
        verify = verify
        doctor = doctor
        plan_clear = plan_purge
        purge = purge
        prune = prune
        run = run_in_place
        run_without_cache = run_without_cache
        run_isolated = run_isolated
        run_from = run_from
        trace = trace
        bench = bench
        portability_digest = portability_digest
        push = push
        pull = pull

        def store(self, url: str | Path) -> SharedStore:
            """Return the shared store at a path or a URL."""
    else:
        entries = _Verb("cachectl.listing.entries")
        report = _Verb("cachectl.verbs.report.report")
        ls = _Verb("cachectl.verbs.ls.ls")
        verify = _Verb("cachectl.verbs.verify.verify")
        doctor = _Verb("cachectl.verbs.doctor.doctor")
        plan_clear = _Verb("cachectl.verbs.purge.plan_purge")
        purge = _Verb("cachectl.verbs.purge.purge")
        prune = _Verb("cachectl.verbs.prune.prune")
        run = _Verb("cachectl.verbs.run.run_in_place")
        run_without_cache = _Verb("cachectl.verbs.run.run_without_cache")
        run_isolated = _Verb("cachectl.verbs.run.run_isolated")
        run_from = _Verb("cachectl.verbs.run.run_from")
        trace = _Verb("cachectl.verbs.trace.trace")
        bench = _Verb("cachectl.verbs.bench.bench")
        portability_digest = _Verb("cachectl.exchange.portability.portability_digest")
        push = _Verb("cachectl.exchange.push_pull.push")
        pull = _Verb("cachectl.exchange.push_pull.pull")
        store = _Verb("cachectl.verbs.store.SharedStore")
