"""``cachectl prune``: remove stale and old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from cachectl import config, layer_set, removal, verbs
from cachectl.layers.base.errors import reason_of
from cachectl.layers.base.text import plural
from cachectl.layers.core.entry import Entry, Found, Note, Problem, Usage
from cachectl.layers.core.layer import Layer, plan_removal
from cachectl.layers.core.plan import Plan
from cachectl.layers.core.root import Root
from cachectl.show import units
from cachectl.verbs import purge
from cachectl.watching import ledger

EXAMPLE = "cachectl prune --max-size 2G --dry-run"
OPTIONS = (
    verbs.CLEARABLE,
    ("--stale", "entries whose driver was seen here and has gone, and orphans"),
    ("--older-than", "AGE", "entries not changed or used for 30d, 12h, 2w", {"type": verbs.age_of}),
    ("--max-size", "SIZE", "until the layers together hold no more than 500M, 2GiB", {"type": verbs.size_of}),
    *verbs.REMOVING,
    verbs.PYTHON,
    *verbs.CHANGING,
)


def prune(
    stack: layer_set.LayerSet,
    limits: config.Limits | None = None,
    *,
    layers: Iterable[str] = (),
    dry_run: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> removal.RemovalPlan | removal.Removal:
    """Remove what is stale or old, then the longest unused until the rest fits, and what killed commands left.

    :param limits: by default those of the config files, or what is stale if they have none
    :param layers: names; none means every clearable one
    :param dry_run: return the plan
    :param notice: gets a line for each thing that a caller should know
    :returns: what of each layer goes, what is left and why; a layer that refuses is ``failed``
    :raises BadRequest: for an unknown layer
    """
    configured = None
    if limits is None:
        # They decide what is stale.
        environment = config.with_interpreters(stack.environment)
        if environment is not stack.environment:
            stack = type(stack)(environment)
        configured = config.load(environment).limits(environment.clock())
        limits = config.Limits(stale=True) if configured.none else configured
    # A command that runs every day by a config file would say it every day.
    is_said = limits is not configured
    chosen = stack.chosen(layers)
    lines: list[str] = []

    def plan() -> removal.RemovalPlan:
        # What the last plan says of the rest counts.
        lines.clear()
        return plan_prune(chosen, limits, lines.append)

    note = partial(ledger.note_removals, stack.environment, "prune")
    is_limit = limits.bytes is not None
    result = removal.carry_out(stack, chosen, plan, notice, dry_run=dry_run, note=note, repeats=is_limit)
    for line in lines if is_said else ():
        notice(line)
    return result


def plan_prune(
    layers: Iterable[Layer], limits: config.Limits, notice: Callable[[str], None] = layer_set.warn_user
) -> removal.RemovalPlan:
    """Plan the removals that the limits require; changes nothing.

    If only stale entries are to go and none is known to be stale, ``notice`` gets what would free space.

    The longest unused goes first, by time of use, else of change, else by a bound on it. Where a trace has measured
    what misses take, it is what is long unused, large and cheap to make again: what has the greatest product of seconds
    unused and bytes, divided by the seconds that it saves. Things of unknown age stay.
    """
    going: dict[Layer, list[Entry]] = {layer: [] for layer in layers}
    unread: dict[Layer, list[Note]] = {layer: [] for layer in going}
    unknown: dict[Layer, list[Note]] = {layer: [] for layer in going}
    book, now = ledger.empty(), 0.0
    if going and limits.bytes is not None:
        environment = next(iter(going)).environment
        book, now = ledger.readable(environment), environment.clock()
    aged: list[tuple[float, Layer, Entry]] = []
    total, uncertain, overhead = 0, [0, 0], dict.fromkeys(going, 0)
    only_stale = limits == config.Limits(stale=True)
    for layer, item in _things(unread, unknown, contents=limits.stale or bool(book.kernels)):
        if isinstance(item, Usage):
            overhead[layer] += item.bytes or 0
            continue
        latest = item.latest
        is_old = limits.before is not None and latest is not None and latest < limits.before
        if is_old or (limits.stale and item.stale):
            going[layer].append(item)
        else:
            total += item.bytes
            if item.stale is None:
                uncertain = [uncertain[0] + 1, uncertain[1] + item.bytes]
            if latest is not None:
                aged.append((latest, layer, item))
    only_orphans = all(entry.is_orphan for entries in going.values() for entry in entries)
    if only_stale and uncertain[0] and only_orphans:
        uncertain_share = f"{plural(uncertain[0], 'entry', 'entries')} ({units.size(uncertain[1])})"
        advice = "--older-than 30d or --max-size 1G frees space"
        notice(f"no entry is known to be stale, of {uncertain_share} that is unknown: {advice}")
    for layer, entry in _longest_unused(aged, book, now, limits.bytes, (total, overhead), notice=notice):
        going[layer].append(entry)

    def plan(layer: Layer) -> Plan:
        plan = plan_removal(layer, going[layer])
        # What is of an unknown format is not known to be stale, but counts for the other limits.
        left = () if only_stale else unknown[layer]
        return plan._replace(skipped=(*plan.skipped, *left), failed=(*plan.failed, *unread[layer]))

    return removal.planned(going, plan)


def _longest_unused(
    aged: Sequence[tuple[float, Layer, Entry]],
    book: ledger.Ledger,
    now: float,
    limit: int | None,
    counted: tuple[int, Mapping[Layer, int]],
    *,
    notice: Callable[[str], None],
) -> Iterator[tuple[Layer, Entry]]:
    """Yield what goes first, until the rest fits; each entry is given with the time of its last use.

    ``counted`` are the bytes of all entries, and by layer those of other files, of which a share goes with each entry.
    """
    if limit is None:
        return
    of_entries, overhead = counted
    total, numbers = of_entries + sum(overhead.values()), Counter(layer for _, layer, _ in aged)
    excess: float = total - limit
    if excess > 0 and not aged:
        ageless = f", {units.size(of_entries)} in entries of unknown age" if of_entries else ""
        files = f"{units.size(total - of_entries)} in files without entries, such as empty dictionaries and indexes"
        notice(f"{units.size(total)} stay, more than {units.size(limit)}: {files}{ageless}")
    worth = book.worth([entry for _, _, entry in aged])
    ranks: list[float] = [latest for latest, _, _ in aged]
    if worth:
        # Less than a nanosecond is no measurement.
        pairs = zip(aged, worth, strict=True)
        ranks = [(latest - now) * entry.bytes / max(seconds, 1e-9) for (latest, _, entry), seconds in pairs]
    for _, (_, layer, entry) in sorted(zip(ranks, aged, strict=True), key=lambda pair: pair[0]):
        if excess <= 0:
            return
        yield layer, entry
        excess -= entry.bytes + overhead[layer] / numbers[layer]


def _things(
    unread: Mapping[Layer, list[Note]], unknown: Mapping[Layer, list[Note]], *, contents: bool
) -> Iterator[tuple[Layer, Entry | Usage]]:
    """Yield what layers hold, and note what could not be read, or is of an unknown format."""

    def scan(layer: Layer, root: Root) -> Iterator[Found]:
        return layer.store.scan(root, contents=contents)

    for layer, root, item in layer_set.in_each_root(unread, scan, removal.existing_roots):
        if isinstance(item, Entry) and item.is_unknown:
            unknown[layer].append(Note(item.key, str(item.because)))
            yield layer, Usage(bytes=item.bytes)
        elif isinstance(item, Usage) or (isinstance(item, Entry) and not item.is_foreign):
            yield layer, item
        elif isinstance(item, Problem):
            unread[layer] += [item.note] if item.hides else []
        elif isinstance(item, Exception):
            unread[layer].append(Note(str(root.path) if root else "*", reason_of(item)))


show, table, of_users = purge.show, purge.table, purge.of_users


def run(request: verbs.Request) -> removal.RemovalPlan | removal.Removal:
    """Carry out ``cachectl prune``."""
    options, stack = request.options, request.stack
    limits = config.Limits(options.stale, options.older_than, options.max_size, now=request.now)
    typed = None if limits.none else limits
    with request.output.progress("pruning"):
        return prune(stack, typed, layers=options.layers, dry_run=options.dry_run, notice=request.notice)
