"""Plans and results of removals, which ``purge`` and ``prune`` share, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from cachectl import layer_set, verbs
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.text import plural
from cachectl.layers.core.entry import Note
from cachectl.layers.core.json_form import as_json, total
from cachectl.layers.core.layer import Layer, every_root, require_changeable
from cachectl.layers.core.plan import Outcome, Plan
from cachectl.layers.core.root import Root, Scope
from cachectl.layers.core.switch import Ability


@as_json(
    "cachectl/purge/1",
    also=("total",),
    hidden=("parts",),
    sums=("removed", "orphans_removed", "bytes_freed", "skipped", "failed"),
)
class Removal(NamedTuple):
    """The outcome of a removal, or (``dry_run``) its plan, layer by layer.

    ``parts`` are the layers and plans of a removal that can be applied.
    """

    dry_run: bool
    layers: tuple[Outcome, ...]
    parts: tuple[tuple[Layer, Plan], ...] = ()

    def __repr__(self) -> str:
        return f"Removal(dry_run={self.dry_run}, total={vars(self.total)})"

    def _repr_html_(self) -> str:
        from cachectl import notebook

        *sums, _ = vars(self.total).values()
        shown = [one for one in self.layers if one != Outcome(one.layer, entries=one.entries)]
        verb = "would go" if self.dry_run else "removed"
        failed = (f"{one.layer}: {note.key}: {note.because}" for one in self.layers for note in one.failed)
        return notebook.html([_layers_table(verb, shown, "/", ("total", *sums, "")), *failed])

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Return the plan of each layer."""
        return tuple(plan for _, plan in self.parts)

    @property
    def total(self) -> SimpleNamespace:
        """Return the sums over all layers: ``removed`` counts entries."""
        return total(self)

    @property
    def failed(self) -> bool:
        """Return whether anything failed or was refused."""
        return any(outcome.failed for outcome in self.layers)

    def apply(self) -> Removal:
        """Remove what the plans list, and nothing else. If a layer fails, the result says so; the others go on.

        Layers that need no free disk space are cleared first.
        """
        outcomes = {layer: Outcome(plan.layer, skipped=plan.skipped, failed=plan.failed) for layer, plan in self.parts}
        going = [(layer, plan) for layer, plan in self.parts if plan.entries]
        for layer, plan in sorted(going, key=lambda part: part[0].store.clearing_needs_room):
            try:
                outcomes[layer] = layer.clear(plan)
            except FAILURES as error:  # noqa: PERF203 - one must not end the rest
                outcomes[layer] = outcomes[layer].plus(Outcome(plan.layer, failed=_failure(error)))
        return Removal(dry_run=False, layers=tuple(outcomes.values()))


def _failure(error: Exception) -> tuple[Note]:
    return (Note("*", reason_of(error)),)


def planned(layers: Iterable[Layer], plan: Callable[[Layer], Plan]) -> Removal:
    """Return the plans of layers; a refusal is part of a plan."""
    parts = []
    for layer in layers:
        try:
            # The store of a layer that has nothing here is not loaded. Others may refuse.
            is_absent = layer.about.scope is Scope.USER and not existing_roots(layer)
            parts.append((layer, Plan(layer.name) if is_absent else plan(layer)))
        except FAILURES as error:  # noqa: PERF203 - one must not end the rest
            parts.append((layer, Plan(layer.name, failed=_failure(error))))
    return Removal(dry_run=True, layers=tuple(plan.outcome for _, plan in parts), parts=tuple(parts))


def existing_roots(layer: Layer) -> list[Root]:
    """Return the roots of a layer where something exists, and those of which that is unknown."""
    return [root for root in every_root(layer) if root.may_exist]


def carry_out(
    stack: layer_set.LayerSet,
    layers: Iterable[Layer],
    plan: Callable[[], Removal],
    notice: Callable[[str], None],
    *,
    dry_run: bool,
) -> Removal:
    """Return the plan of a removal (``dry_run``), or apply it and remove what killed commands left.

    Interrupted writes are finished or rolled back before the plan is made.
    """
    if dry_run:
        return plan()

    def recover(layer: Layer, root: Root) -> Iterable[None]:
        if hasattr(layer.store, "recover") and layer.abilities()[Ability.CLEAR] is None:
            require_changeable(layer, root)
            layer.store.recover(root)
        return ()

    # The plan of a layer names its failure. Stores are loaded where there is something.
    tuple(layer_set.in_each_root(layers, recover, existing_roots))
    result = plan().apply()
    from cachectl.layers.disk.temporaries import remove_abandoned

    if left := remove_abandoned(stack.environment):
        notice(f"removed {plural(left, 'temporary folder')} of commands that were killed")
    return result


# ---------------------------------------------------------------------- the command line


def _layers_table(verb: str, outcomes: Iterable[Outcome], home: str, last: Sequence[object] = ()) -> verbs.Table:
    """Return the sums of layers and their places; ``verb`` is the title over the number of entries."""
    numbers = {verb: verbs.count, "orphans": verbs.count, "size": verbs.size, "skipped": verbs.count}
    rows = []
    for one in outcomes:
        roots = " ".join(verbs.short_path(root, home) for root in one.roots)
        rows.append((one.layer, one.removed, one.orphans_removed, one.bytes_freed, len(one.skipped), roots))
    return verbs.Table({"layer": str, **numbers, "root": str}, rows, last)


def table(result: Removal, request: verbs.Request) -> verbs.Table:
    """Return what was removed from each layer, or the entries of a plan."""
    if not result.dry_run:
        return _layers_table("removed", result.layers, str(request.environment.home_folder))
    rows = []
    for outcome in result.layers:
        for entry in outcome.entries or ():
            age = verbs.since(entry.modified, request.now)
            rows.append((outcome.layer, entry.state, entry.bytes, age, entry.key))
    columns: verbs.Columns = {"layer": str, "state": str, "size": verbs.size, "age": verbs.age, "key": str}
    return verbs.Table(columns, rows)


def show(result: Removal, request: verbs.Request) -> Iterator[object]:
    """Yield what a removal did, or would do, layer by layer, with ``-v`` each entry of a plan; warn of what stays.

    Without ``-v`` or a named layer, layers without anything to remove are one line.
    """
    whole = request.options.verbose or request.options.layers
    if request.options.verbose and result.dry_run and (entries := table(result, request)).rows:
        yield entries
        yield ""
    cleared = [outcome for outcome in result.layers if not outcome.failed or outcome.removed]
    shown = [outcome for outcome in cleared if whole or outcome != Outcome(outcome.layer, entries=outcome.entries)]
    if shown:
        *sums, _ = vars(result.total).values()
        verb, home = "would go" if result.dry_run else "removed", str(request.environment.home_folder)
        yield _layers_table(verb, shown, home, ("total", *sums, ""))
    if hidden := len(cleared) - len(shown):
        yield f"{plural(hidden, 'more layer' if shown else 'layer')}: nothing to remove"
    for outcome in result.layers:
        request.output.warn_notes(f"{outcome.layer}: skipped", outcome.skipped)
        # A full disk is one warning, however many files it holds.
        keys: dict[str, list[str]] = {}
        for note in outcome.failed:
            keys.setdefault(note.because, []).append(note.key)
        for reason, (first, *more) in keys.items():
            others = f" and {len(more)} more" if more else ""
            request.notice(f"{outcome.layer}: {'' if first == '*' else f'{first}{others}: '}{reason}")
