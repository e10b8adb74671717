"""The layers of one environment, and the verbs that work on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cachectl import layer_set
from cachectl.layers.base import facts
from cachectl.layers.base.selection import ALL, Selection

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl import config, findings, listing, removal
    from cachectl.exchange import trust
    from cachectl.layers.base.environment import Environment
    from cachectl.transfer import Transfer
    from cachectl.verbs import bench, report, run, store
    from cachectl.watching import trace


class Stack(layer_set.LayerSet):
    """The layers of one environment, and the verbs that work on all of them.

    Verbs of the command line are methods, with the same words as arguments, and return facts. ``layers`` names layers;
    without it a verb works on all of them, or on every clearable one if it removes or pushes. ``options`` are those of
    the function that the verb's module defines. ``notice`` gets one line for each thing that a caller should know and
    that is no error; by default it issues a :class:`RuntimeWarning`.
    """

    @classmethod
    def below(cls, folder: str, environment: Environment | None = None) -> Stack:
        """Return the layers as ``run --isolated=FOLDER`` and ``env --root FOLDER`` keep them below a folder.

        Raises :class:`BadRequest` if there is no such folder.
        """
        from cachectl.layers.base.environment import Environment
        from cachectl.switching.run import environment_below

        return cls(environment_below(Environment.here() if environment is None else environment, folder))

    def report(self, *, layers: Iterable[str] = (), **options: Any) -> report.Report:  # noqa: ANN401
        """Count the entries of every layer, and return whether it is on: :func:`cachectl.verbs.report.report`."""
        from cachectl.verbs.report import report

        return report(self, layers, **options)

    def ls(self, selection: Selection = ALL, **options: Any) -> listing.Listing:  # noqa: ANN401
        """Return the selected entries: :func:`cachectl.verbs.ls.ls`."""
        from cachectl.verbs.ls import ls

        return ls(self, selection, **options)

    def entries(
        self,
        selection: Selection = ALL,
        *,
        layers: Iterable[str] = (),
        **options: Any,  # noqa: ANN401
    ) -> Iterator[facts.Entry]:
        """Yield the selected entries, layer by layer: :func:`cachectl.listing.listed`."""
        from cachectl.listing import listed

        return listed(self.named(layers), selection, **options)

    def verify(self, *, layers: Iterable[str] = ()) -> findings.Findings:
        """Check every entry for damage."""
        from cachectl.findings import damage

        return damage(self.named(layers))

    def doctor(self, *, layers: Sequence[str] = ()) -> findings.Findings:
        """Return the problems of this set-up, each with the command that fixes it."""
        from cachectl.verbs.doctor import doctor

        return doctor(self, layers)

    def plan_clear(
        self, selection: Selection = ALL, *, layers: Iterable[str] = (), damaged: bool = False
    ) -> removal.PurgePlan:
        """Plan a purge, with ``damaged`` only of damaged entries; touches nothing."""
        from cachectl.verbs.purge import plan_purge

        return plan_purge(self.chosen(layers), selection, damaged=damaged)

    def purge(self, selection: Selection = ALL, **options: Any) -> removal.PurgeResult:  # noqa: ANN401
        """Remove the selected entries: :func:`cachectl.verbs.purge.purge`."""
        from cachectl.verbs.purge import purge

        return purge(self, selection, **options)

    def prune(self, limits: config.Limits | None = None, **options: Any) -> removal.PurgeResult:  # noqa: ANN401
        """Remove what limits require: :func:`cachectl.verbs.prune.prune`."""
        from cachectl.verbs.prune import prune

        return prune(self, limits, **options)

    def run(self, command: Sequence[str], **options: Any) -> run.Ran:  # noqa: ANN401
        """Run a command as ``cachectl run`` does: :func:`cachectl.verbs.run.run_with`."""
        from cachectl.verbs.run import run_with

        return run_with(self, command, **options)

    def trace(self, command: Sequence[str], **options: Any) -> trace.Trace:  # noqa: ANN401
        """Run a command and return what each layer did: :func:`cachectl.verbs.trace.trace`."""
        from cachectl.verbs.trace import trace

        return trace(self, command, **options)

    def bench(self, command: Sequence[str], **options: Any) -> bench.Bench:  # noqa: ANN401
        """Run a command cold, warm, and with each layer off in turn: :func:`cachectl.verbs.bench.bench`."""
        from cachectl.verbs.bench import bench

        return bench(command, self, **options)

    def portability_digest(self) -> str:
        """Return 16 hexadecimal digits, equal where the same entries can be hit: a part of a key for caches of CI."""
        from cachectl.exchange.portability import portability_digest

        return portability_digest(self)

    def push(self, target: str | Path, selection: Selection = ALL, **options: Any) -> Transfer:  # noqa: ANN401
        """Add the selected entries that a store lacks: :func:`cachectl.exchange.push_pull.push`."""
        from cachectl.exchange.push_pull import push

        return push(self, target, selection, **options)

    def pull(
        self,
        sources: str | Path | Sequence[str],
        trust: trust.Trust | None = None,
        selection: Selection = ALL,
        **options: Any,  # noqa: ANN401
    ) -> Transfer:
        """Place the selected entries of sources that are missing here: :func:`cachectl.exchange.push_pull.pull`."""
        from cachectl.exchange.push_pull import pull

        return pull(self, sources, trust, selection, **options)

    def store(self, target: str | Path) -> store.SharedStore:
        """Return the store at a path or a URL."""
        from cachectl.verbs.store import SharedStore

        return SharedStore(self, target)
