"""Plans and results of removals, which ``purge`` and ``prune`` share, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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

_SUMS = ("removed", "orphans_removed", "bytes_freed", "skipped", "failed")


@as_json("cachectl/purge/1", also=("dry_run", "total"), sums=_SUMS)
class RemovalPlan(NamedTuple):
    """What a removal would do, layer by layer."""

    layers: tuple[Plan, ...]

    def __repr__(self) -> str:
        return f"RemovalPlan(total={vars(self.total)})"

    def _repr_html_(self) -> str:
        return _html(self)

    @property
    def dry_run(self) -> bool:
        """Return ``True``: nothing has been removed."""
        return True

    @property
    def total(self) -> SimpleNamespace:
        """Return the sums over all layers: ``removed`` counts entries."""
        return total(self)

    @property
    def failed(self) -> bool:
        """Return whether anything could not be read or is refused."""
        return any(plan.failed for plan in self.layers)

    def apply(self) -> Removal:
        """Remove what the plans list, and nothing else. If a layer fails, the result says so; the others go on.

        Layers that need no free disk space are cleared first.
        """
        outcomes = {plan.name: Outcome(plan.name, skipped=plan.skipped, failed=plan.failed) for plan in self.layers}
        going = (plan for plan in self.layers if plan.entries)
        for plan in sorted(going, key=lambda plan: plan.layer.clearing_needs_room):
            try:
                outcomes[plan.name] = plan.apply()
            except FAILURES as error:  # noqa: PERF203 - one must not end the rest
                outcomes[plan.name] = outcomes[plan.name].plus(Outcome(plan.name, failed=_failure(error)))
        return Removal(tuple(outcomes.values()))


@as_json("cachectl/purge/1", also=("dry_run", "total"), sums=_SUMS)
class Removal(NamedTuple):
    """What a removal has done, layer by layer."""

    layers: tuple[Outcome, ...]

    def __repr__(self) -> str:
        return f"Removal(total={vars(self.total)})"

    def _repr_html_(self) -> str:
        return _html(self)

    @property
    def dry_run(self) -> bool:
        """Return ``False``: it was carried out."""
        return False

    @property
    def total(self) -> SimpleNamespace:
        """Return the sums over all layers: ``removed`` counts entries."""
        return total(self)

    @property
    def failed(self) -> bool:
        """Return whether anything failed or was refused."""
        return any(outcome.failed for outcome in self.layers)


def _failure(error: Exception) -> tuple[Note]:
    return (Note("*", reason_of(error)),)


def planned(layers: Iterable[Layer], plan: Callable[[Layer], Plan]) -> RemovalPlan:
    """Return the plans of layers; a refusal is part of a plan."""
    plans = []
    for layer in layers:
        try:
            # The store of a layer that has nothing here is not loaded. Others may refuse.
            is_absent = layer.about.scope is Scope.USER and not existing_roots(layer)
            plans.append(Plan(layer) if is_absent else plan(layer))
        except FAILURES as error:  # noqa: PERF203 - one must not end the rest
            plans.append(Plan(layer, failed=_failure(error)))
    return RemovalPlan(tuple(plans))


def existing_roots(layer: Layer) -> list[Root]:
    """Return the roots of a layer where something exists, and those of which that is unknown."""
    return [root for root in every_root(layer) if root.may_exist]


def carry_out(
    stack: layer_set.LayerSet,
    layers: Iterable[Layer],
    plan: Callable[[], RemovalPlan],
    notice: Callable[[str], None],
    *,
    dry_run: bool,
) -> RemovalPlan | Removal:
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


def _layers_table(
    result: RemovalPlan | Removal, layers: Iterable[Plan | Outcome], home: str, *, sums: bool
) -> verbs.Table:
    """Return the numbers of some layers with their places, and with ``sums`` those of all."""
    verb = "would go" if result.dry_run else "removed"
    numbers = {verb: verbs.count, "orphans": verbs.count, "size": verbs.size, "skipped": verbs.count}
    rows = []
    for layer in layers:
        roots = " ".join(verbs.short_path(root, home) for root in layer.roots)
        rows.append((layer.name, layer.removed, layer.orphans_removed, layer.bytes_freed, len(layer.skipped), roots))
    *total, _ = vars(result.total).values()
    return verbs.Table({"layer": str, **numbers, "root": str}, rows, ("total", *total, "") if sums else ())


def _is_empty(layer: Plan | Outcome) -> bool:
    """Return whether a layer has nothing to show."""
    return not (layer.removed or layer.orphans_removed or layer.skipped or layer.failed)


def _html(result: RemovalPlan | Removal) -> str:
    from cachectl import notebook

    shown = [layer for layer in result.layers if not _is_empty(layer)]
    failed = (f"{layer.name}: {note.key}: {note.because}" for layer in result.layers for note in layer.failed)
    return notebook.html([_layers_table(result, shown, "/", sums=True), *failed])


def table(result: RemovalPlan | Removal, request: verbs.Request) -> verbs.Table:
    """Return what was removed from each layer, or the entries of a plan."""
    if isinstance(result, Removal):
        return _layers_table(result, result.layers, str(request.environment.home_folder), sums=False)
    rows = []
    for plan in result.layers:
        for entry in plan.entries:
            age = verbs.since(entry.modified, request.now)
            rows.append((plan.name, entry.state, entry.bytes, age, entry.key))
    columns: verbs.Columns = {"layer": str, "state": str, "size": verbs.size, "age": verbs.age, "key": str}
    return verbs.Table(columns, rows)


def show(result: RemovalPlan | Removal, request: verbs.Request) -> Iterator[object]:
    """Yield what a removal did, or would do, layer by layer, with ``-v`` each entry of a plan; warn of what stays.

    Without ``-v`` or a named layer, layers without anything to remove are one line.
    """
    whole = request.options.verbose or request.options.layers
    if request.options.verbose and result.dry_run and (entries := table(result, request)).rows:
        yield entries
        yield ""
    cleared = [layer for layer in result.layers if not layer.failed or layer.removed]
    shown = [layer for layer in cleared if whole or not _is_empty(layer)]
    if shown:
        yield _layers_table(result, shown, str(request.environment.home_folder), sums=True)
    if hidden := len(cleared) - len(shown):
        yield f"{plural(hidden, 'more layer' if shown else 'layer')}: nothing to remove"
    for layer in result.layers:
        request.output.warn_notes(f"{layer.name}: skipped", layer.skipped)
        # A full disk is one warning, however many files it holds.
        keys: dict[str, list[str]] = {}
        for note in layer.failed:
            keys.setdefault(note.because, []).append(note.key)
        for reason, (first, *more) in keys.items():
            others = f" and {len(more)} more" if more else ""
            request.notice(f"{layer.name}: {'' if first == '*' else f'{first}{others}: '}{reason}")
