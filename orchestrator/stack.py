"""The layers of one environment, and the verbs that work on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cachectl.layer_set import LayerSet
from cachectl.layers.base.facts import Entry
from cachectl.layers.base.selection import ALL, Selection

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.config import Limits
    from cachectl.exchange.trust import Trust
    from cachectl.findings import Findings
    from cachectl.layers.base.environment import Environment
    from cachectl.listing import Listing
    from cachectl.removal import PurgePlan, PurgeResult
    from cachectl.transfer import Transfer
    from cachectl.verbs.bench import Bench
    from cachectl.verbs.report import Report
    from cachectl.verbs.run import Ran
    from cachectl.verbs.store import SharedStore
    from cachectl.watching.trace import Trace


class Stack(LayerSet):
    """The layers of one environment, and the verbs that work on all of them.

    Verbs of the command line are methods, with the same words as arguments, and return facts. ``layers`` names layers;
    without it a verb works on all of them, or on every clearable one if it removes or pushes. ``notice``
    gets one line for each thing that a caller should know and that is no error; by default it issues a
    :class:`RuntimeWarning`.
    """

    @classmethod
    def below(cls, folder: str, environment: Environment | None = None) -> Stack:
        """Return the layers as ``run --isolated=FOLDER`` and ``env --root FOLDER`` keep them below a folder.

        Raises :class:`BadRequest` if there is no such folder.
        """
        from cachectl.layers.base.environment import Environment
        from cachectl.switching.run import environment_below

        return cls(environment_below(Environment.here() if environment is None else environment, folder))

    # ------------------------------------------------------------------ inspecting

    def report(self, *, layers: Iterable[str] = (), neighbours: bool = False, by_python: bool = False) -> Report:
        """Count the entries of every layer, and return whether it is on. Writes nothing into a cache.

        ``neighbours`` also measures other caches of compiled code, which belong to no layer; ``by_python`` also sums
        the entries of each Python.
        """
        from cachectl.verbs.report import report

        return report(self, layers, neighbours=neighbours, by_python=by_python)

    def ls(self, selection: Selection = ALL, **options: Any) -> Listing:  # noqa: ANN401
        """Return the selected entries; ``options`` are those of :func:`~cachectl.verbs.ls.ls`."""
        from cachectl.verbs.ls import ls

        return ls(self, selection, **options)

    def entries(self, selection: Selection = ALL, *, layers: Iterable[str] = (), **options: Any) -> Iterator[Entry]:  # noqa: ANN401
        """Yield the selected entries, layer by layer; ``options`` are those of :func:`~cachectl.listing.listed`."""
        from cachectl.listing import listed

        return listed(self.named(layers), selection, **options)

    def verify(self, *, layers: Iterable[str] = ()) -> Findings:
        """Check every entry for damage."""
        from cachectl.findings import damage

        return damage(self.named(layers))

    def doctor(self, *, layers: Sequence[str] = ()) -> Findings:
        """Return the problems of this set-up, each with the command that fixes it."""
        from cachectl.verbs.doctor import doctor

        return doctor(self, layers)

    # ------------------------------------------------------------------ clearing

    def plan_clear(self, selection: Selection = ALL, *, layers: Iterable[str] = (), damaged: bool = False) -> PurgePlan:
        """Plan a purge of the named layers, or of every clearable one; with ``damaged`` only of damaged entries.

        Touches nothing.
        """
        from cachectl.verbs.purge import plan_purge

        return plan_purge(self.chosen(layers), selection, damaged=damaged)

    def purge(self, selection: Selection = ALL, **options: Any) -> PurgeResult:  # noqa: ANN401
        """Remove the selected entries; ``options`` are those of :func:`~cachectl.verbs.purge.purge`."""
        from cachectl.verbs.purge import purge

        return purge(self, selection, **options)

    def prune(self, limits: Limits | None = None, **options: Any) -> PurgeResult:  # noqa: ANN401
        """Remove what limits require; ``options`` are those of :func:`~cachectl.verbs.prune.prune`."""
        from cachectl.verbs.prune import prune

        return prune(self, limits, **options)

    # ------------------------------------------------------------------ running

    def run(self, command: Sequence[str], **options: Any) -> Ran:  # noqa: ANN401
        """Run a command with layers off, isolated, warm from a base or around a store, as ``cachectl run`` does.

        ``options`` are those of :func:`~cachectl.verbs.run.run_with`.
        """
        from cachectl.verbs.run import run_with

        return run_with(self, command, **options)

    def trace(self, command: Sequence[str], **options: Any) -> Trace:  # noqa: ANN401
        """Run a command and return what each layer did; ``options``: :func:`~cachectl.verbs.trace.trace`."""
        from cachectl.verbs.trace import trace

        return trace(self, command, **options)

    def bench(self, command: Sequence[str], **options: Any) -> Bench:  # noqa: ANN401
        """Run a command with all caches cold, all warm, all off, and each off in turn; return the times it took.

        ``options`` are those of :func:`~cachectl.verbs.bench.bench`.
        """
        from cachectl.verbs.bench import bench

        return bench(command, self, **options)

    # ------------------------------------------------------------------ exchange

    def portability_digest(self) -> str:
        """Return 16 hexadecimal digits, equal where the same entries can be hit: a part of a key for caches of CI."""
        from cachectl.exchange.portability import portability_digest

        return portability_digest(self)

    def push(self, target: str | Path, selection: Selection = ALL, **options: Any) -> Transfer:  # noqa: ANN401
        """Add the selected entries that a store lacks; ``options`` are those of :func:`~cachectl.exchange.push.push`.

        ``target`` is a bundle, a folder or a URL, made by the first push, or a database file that a layer knows.
        """
        from cachectl.exchange.push import push

        return push(self, target, selection, **options)

    def pull(
        self,
        sources: str | Path | Sequence[str],
        trust: Trust | None = None,
        selection: Selection = ALL,
        **options: Any,  # noqa: ANN401
    ) -> Transfer:
        """Place the selected entries of sources that are missing here and can be hit; existing entries stay.

        ``options`` are those of :func:`~cachectl.exchange.pull.pull`.
        """
        from cachectl.exchange.pull import pull

        return pull(self, sources, trust, selection, **options)

    def store(self, target: str | Path) -> SharedStore:
        """Return the store at a path or a URL."""
        from cachectl.verbs.store import SharedStore

        return SharedStore(self, target)
