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
    ("--stale", "entries of a driver that was seen here and is gone, and orphans"),
    verbs.OLDER_THAN,
    (
        "--max-size",
        "SIZE",
        "the longest unused, until the layers together hold at most SIZE, such as 500M or 2GiB",
        verbs.SIZE,
    ),
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
    contents: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> removal.RemovalPlan | removal.Removal:
    """Remove what is stale or old, then the longest unused until the rest fits, and what killed commands left.

    ``notice`` says what stays above a limit.

    :param limits: by default those of the config files, or ``stale`` if these have none
    :param layers: names; none means every clearable layer
    :param dry_run: return the plan, with the kernels of entries if ``contents``
    :param notice: gets one line for each thing that a caller should know
    :returns: for each layer what is removed, and what is left and why; a layer that refuses is ``failed``
    :raises BadRequest: for an unknown layer
    """
    configured = None
    if limits is None:
        # The configured interpreters decide what is stale.
        environment = config.with_interpreters(stack.environment)
        if environment is not stack.environment:
            stack = type(stack)(environment)
        configured = config.load(environment).limits(environment.clock())
        limits = config.Limits(stale=True) if configured.none else configured
    chosen = stack.chosen(layers)
    lines: list[str] = []

    def plan() -> removal.RemovalPlan:
        # Only what the last plan says of the rest counts.
        lines.clear()
        return plan_prune(chosen, limits, lines.append, contents=contents and dry_run)

    note = partial(ledger.note_removals, stack.environment, "prune")
    is_limit = limits.bytes is not None
    result = removal.carry_out(stack, chosen, plan, notice, dry_run=dry_run, note=note, repeats=is_limit)
    # With configured limits, a daily job would repeat these lines every day.
    for line in lines if limits is not configured else ():
        notice(line)
    return result


def plan_prune(
    layers: Iterable[Layer],
    limits: config.Limits,
    notice: Callable[[str], None] = layer_set.warn_user,
    *,
    contents: bool = False,
) -> removal.RemovalPlan:
    """Plan the removals that the limits require; changes nothing.

    The longest unused go first, by time of use, else of change, else by a bound on it. Where a trace has measured the
    cost of misses, the order is: unused longest, largest, cheapest to rebuild (the greatest product of seconds unused
    and bytes, divided by the seconds saved). Entries of unknown age stay.

    ``notice`` says what stays above a size limit. If only stale entries are to be removed and none is known to be
    stale, it says what would free space.
    """
    chosen: dict[Layer, list[Entry]] = {layer: [] for layer in layers}
    unread: dict[Layer, list[Note]] = {layer: [] for layer in chosen}
    unknown: dict[Layer, list[Note]] = {layer: [] for layer in chosen}
    book, now = ledger.empty(), 0.0
    if chosen and limits.bytes is not None:
        environment = next(iter(chosen)).environment
        book, now = ledger.readable(environment), environment.clock()
    aged: list[tuple[float, Layer, Entry]] = []
    total, uncertain, overhead = 0, [0, 0], dict.fromkeys(chosen, 0)
    only_stale = limits == config.Limits(stale=True)
    for layer, item in _scanned(unread, unknown, contents=contents or limits.stale or bool(book.kernels)):
        if isinstance(item, Usage):
            overhead[layer] += item.bytes or 0
            continue
        latest = item.latest
        is_old = limits.before is not None and latest is not None and latest < limits.before
        if is_old or (limits.stale and item.stale):
            chosen[layer].append(item)
        else:
            total += item.bytes
            if item.stale is None:
                uncertain = [uncertain[0] + 1, uncertain[1] + item.bytes]
            if latest is not None:
                aged.append((latest, layer, item))
    only_orphans = all(entry.is_orphan for entries in chosen.values() for entry in entries)
    if only_stale and uncertain[0] and only_orphans:
        amount = f"{plural(uncertain[0], 'entry', 'entries')} ({units.size(uncertain[1])})"
        advice = "to free space, use --older-than 30d or --max-size 1G"
        notice(f"no entry is known to be stale; for {amount} it is unknown; {advice}")
    for layer, entry in _longest_unused(aged, book, now, limits.bytes, (total, overhead), notice=notice):
        chosen[layer].append(entry)

    def plan(layer: Layer) -> Plan:
        plan = plan_removal(layer, chosen[layer])
        # Files of an unknown format are not known to be stale, but count towards the other limits.
        left = () if only_stale else unknown[layer]
        return plan._replace(skipped=(*plan.skipped, *left), failed=(*plan.failed, *unread[layer]))

    return removal.planned(chosen, plan)


def _longest_unused(
    aged: Sequence[tuple[float, Layer, Entry]],
    book: ledger.Ledger,
    now: float,
    limit: int | None,
    counted: tuple[int, Mapping[Layer, int]],
    *,
    notice: Callable[[str], None],
) -> Iterator[tuple[Layer, Entry]]:
    """Yield the entries to remove, in order, until the rest fits; ``aged`` has the time of last use of each.

    ``counted`` are the bytes of all entries, and by layer the other bytes, such as those of folders: each entry frees a
    share of these.
    """
    if limit is None:
        return
    of_entries, overhead = counted
    total, numbers = of_entries + sum(overhead.values()), Counter(layer for _, layer, _ in aged)
    excess: float = total - limit
    worth = book.worth([entry for _, _, entry in aged])
    ranks: list[float] = [latest for latest, _, _ in aged]
    if worth:
        # Not less than a nanosecond, to avoid a division by zero.
        pairs = zip(aged, worth, strict=True)
        ranks = [(latest - now) * entry.bytes / max(seconds, 1e-9) for (latest, _, entry), seconds in pairs]
    for _, (_, layer, entry) in sorted(zip(ranks, aged, strict=True), key=lambda pair: pair[0]):
        if excess <= 0:
            return
        yield layer, entry
        excess -= entry.bytes + overhead[layer] / numbers[layer]
    if excess > 0:
        left = of_entries - sum(entry.bytes for _, _, entry in aged)
        ageless = f", and {units.size(left)} in entries of unknown age" if left else ""
        files = "files without entries (such as empty dictionaries and indexes)"
        notice(f"{units.size(limit + round(excess))} stay, although the limit is {units.size(limit)}: {files}{ageless}")


def _scanned(
    unread: Mapping[Layer, list[Note]], unknown: Mapping[Layer, list[Note]], *, contents: bool
) -> Iterator[tuple[Layer, Entry | Usage]]:
    """Yield what layers hold; note in ``unread`` what could not be read, in ``unknown`` what has an unknown format."""

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
    limits = config.Limits(options.stale, options.older_than, options.max_size, now=stack.environment.clock())
    with request.output.progress("pruning"):
        return prune(
            stack,
            None if limits.none else limits,
            layers=options.layers,
            dry_run=options.dry_run,
            contents=options.verbose,
            notice=request.notice,
        )
