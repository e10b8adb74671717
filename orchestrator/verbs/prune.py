"""``cachectl prune``: remove stale and old entries, then the longest unused until the rest fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

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

    :param limits: by default those of the config files, or ``stale`` if these have none
    :param dry_run: return the plan, with the kernels of entries if ``contents``
    :param notice: also says what stays above a limit
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
    layers, book, now = tuple(layers), ledger.empty(), 0.0
    if layers and limits.bytes is not None:
        book, now = ledger.readable(layers[0].environment), layers[0].environment.clock()
    contents = contents or limits.stale or bool(book.kernels)
    scans = {layer: _scan(layer, contents=contents) for layer in layers}
    chosen: dict[Layer, list[Entry]] = {layer: [] for layer in layers}
    left: list[tuple[Layer, Entry]] = []
    for layer, scan in scans.items():
        for entry in scan.entries:
            latest = entry.latest
            is_old = limits.before is not None and latest is not None and latest < limits.before
            if is_old or (limits.stale and entry.stale):
                chosen[layer].append(entry)
            else:
                left.append((layer, entry))
    only_stale = limits == config.Limits(stale=True)
    only_orphans = all(entry.is_orphan for entries in chosen.values() for entry in entries)
    uncertain = [entry.bytes for _, entry in left if entry.stale is None]
    if only_stale and uncertain and only_orphans:
        amount = f"{plural(len(uncertain), 'entry', 'entries')} ({units.size(sum(uncertain))})"
        advice = "to free space, use --older-than 30d or --max-size 1G"
        notice(f"no entry is known to be stale; for {amount} it is unknown; {advice}")
    if limits.bytes is not None:
        rest = {layer: scan.rest for layer, scan in scans.items()}
        for layer, entry in _longest_unused(left, rest, limits.bytes, book, now, notice=notice):
            chosen[layer].append(entry)

    def plan(layer: Layer) -> Plan:
        plan, scan = plan_removal(layer, chosen[layer]), scans[layer]
        # Files of an unknown format are not known to be stale, but count towards the other limits.
        unknown = [] if only_stale else scan.unknown
        return plan._replace(skipped=(*plan.skipped, *unknown), failed=(*plan.failed, *scan.unread))

    return removal.planned(layers, plan)


def _longest_unused(
    entries: Sequence[tuple[Layer, Entry]],
    rest: Mapping[Layer, int],
    limit: int,
    book: ledger.Ledger,
    now: float,
    *,
    notice: Callable[[str], None],
) -> Iterator[tuple[Layer, Entry]]:
    """Yield the entries to remove, in order, until what is left is at most ``limit``.

    ``rest`` are the other bytes of each layer, such as those of folders: each entry frees a share of these.
    """
    aged = [(latest, layer, entry) for layer, entry in entries if (latest := entry.latest) is not None]
    numbers, total = Counter(layer for _, layer, _ in aged), sum(entry.bytes for _, entry in entries)
    excess: float = total + sum(rest.values()) - limit
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
        excess -= entry.bytes + rest[layer] / numbers[layer]
    if excess > 0:
        left = total - sum(entry.bytes for _, _, entry in aged)
        ageless = f", and {units.size(left)} in entries of unknown age" if left else ""
        files = "files without entries (such as empty dictionaries and indexes)"
        notice(f"{units.size(limit + round(excess))} stay, although the limit is {units.size(limit)}: {files}{ageless}")


class _Scan(NamedTuple):
    """What a layer holds: its entries, the bytes of all else, and what is unreadable or of an unknown format."""

    entries: list[Entry]
    rest: int
    unread: list[Note]
    unknown: list[Note]


def _scan(layer: Layer, *, contents: bool) -> _Scan:
    entries, unread, unknown, rest = list[Entry](), list[Note](), list[Note](), 0

    def scan(layer: Layer, root: Root) -> Iterator[Found]:
        return layer.store.scan(root, contents=contents)

    for _, root, item in layer_set.in_each_root([layer], scan, removal.existing_roots):
        if isinstance(item, Exception):
            unread.append(Note(str(root.path) if root else "*", reason_of(item)))
        elif isinstance(item, Problem):
            unread += [item.note] if item.hides else []
        elif isinstance(item, Usage):
            rest += item.bytes or 0
        elif item.is_unknown:
            unknown.append(Note(item.key, str(item.because)))
            rest += item.bytes
        elif not item.is_foreign:
            entries.append(item)
    return _Scan(entries, rest, unread, unknown)


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
