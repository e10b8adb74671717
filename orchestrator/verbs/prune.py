"""``cachectl prune``: remove stale and old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cachectl import config, layer_set, removal, verbs
from cachectl.layers.base import errors, facts, selection
from cachectl.layers.base.layer import every_root, plan_removal

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

OPTIONS: Final = (
    verbs.CLEARABLE,
    verbs.flag("--stale", "entries that no known Python or driver can hit any more, and orphans"),
    verbs.value("--older-than", "AGE", "entries not changed or used for 30d, 12h, 2w"),
    verbs.value("--max-size", "SIZE", "until the layers together hold no more than 500M, 2GiB"),
    *verbs.REMOVING,
    verbs.PYTHON,
    *verbs.CHANGING,
)
_UNKNOWN: Final = float("inf")


def prune(
    stack: layer_set.LayerSet,
    limits: config.Limits | None = None,
    *,
    layers: Sequence[str] = (),
    dry_run: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> removal.PurgeResult:
    """Remove what is stale or old, then the longest unused until the rest fits, and what killed commands left.

    Without ``limits``, those of the config files count; :class:`BadRequest` is raised if there are none.
    """
    if limits is None:
        # They decide what is stale.
        environment = config.with_interpreters(stack.environment)
        if environment is not stack.environment:
            stack = type(stack)(environment)
        limits = config.configured_limits(environment)
    chosen, required = stack.chosen(layers), limits

    def plan() -> removal.PurgePlan:
        return plan_prune(chosen, required)

    return removal.carry_out(stack, chosen, plan, notice, dry_run=dry_run)


def plan_prune(layers: Iterable[Layer], limits: config.Limits) -> removal.PurgePlan:
    """Plan the removals that the limits require; changes nothing.

    The longest unused goes first, by time of use, else of change, else by a bound on it. Things of unknown age stay.
    """
    going: dict[Layer, list[facts.Entry]] = {}
    failed: dict[Layer, list[facts.Note]] = {}
    aged: list[tuple[float, int, Layer, facts.Entry]] = []
    total = 0
    for number, layer in enumerate(layers):
        try:
            going[layer], kept, fixed, failed[layer] = _look(layer, limits)
        except errors.FAILURES as error:
            # Nothing is removed because of an incomplete count.
            going[layer], kept, fixed, failed[layer] = [], [], 0, [facts.Note("*", errors.reason_of(error))]
        total += fixed + sum(thing.bytes for thing in kept)
        aged += ((_UNKNOWN if thing.latest is None else thing.latest, number, layer, thing) for thing in kept)
    for latest, _, layer, thing in sorted(aged, key=lambda item: item[:2]):
        if limits.bytes is None or total <= limits.bytes or latest == _UNKNOWN:
            break
        going[layer].append(thing)
        total -= thing.bytes

    def plan(layer: Layer) -> facts.Plan:
        plan = plan_removal(layer, going[layer])
        return replace(plan, failed=(*plan.failed, *failed[layer]))

    return removal.planned(going, plan)


def _look(layer: Layer, limits: config.Limits) -> tuple[list[facts.Entry], list[facts.Entry], int, list[facts.Note]]:
    """Return what is stale or old, what is not, the bytes that stay whatever is removed, and what could not be read."""
    going: list[facts.Entry] = []
    kept: list[facts.Entry] = []
    fixed, failed = 0, list[facts.Note]()
    for thing in _things(layer, failed, contents=limits.stale):
        if isinstance(thing, facts.Problem):
            failed += [thing.note] if thing.hides else []
        elif thing.sums is not None:
            # A file of fixed length does not shrink, so it must not make prune remove entries.
            fixed += 0 if thing.fixed else thing.bytes
        elif thing.guest is None:
            # A guest belongs to another program.
            stale = limits.stale and thing.stale
            old = limits.before is not None and selection.Selection(before=limits.before).matches(thing)
            (going if stale or old else kept).append(thing)
    return going, kept, fixed, failed


def _things(layer: Layer, failed: list[facts.Note], *, contents: bool) -> Iterator[facts.Found]:
    """Yield what is in the roots of a layer; those that cannot be read are noted, and the others are still pruned."""
    for root in every_root(layer):
        try:
            yield from layer.store.scan(root, contents=contents)
        except errors.FAILURES as error:  # noqa: PERF203 - one must not end the rest
            failed.append(facts.Note(str(root.path), errors.reason_of(error)))


show, table = removal.show, removal.table


def run(request: verbs.Request) -> removal.PurgeResult:
    """Carry out ``cachectl prune``."""
    options, stack = request.options, request.stack
    limits = config.Limits(options.stale, request.before, request.max_size)
    typed = None if limits.none else limits
    with request.working("pruning"):
        return prune(stack, typed, layers=options.layers, dry_run=options.dry_run, notice=request.notice)
