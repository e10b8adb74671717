"""``cachectl report``: where caches are, whether they are on, and how much they hold."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cachectl import layer_set, verbs
from cachectl.layers.base.environment import python_release, user_state_folder
from cachectl.layers.base.errors import FAILURES, reason_of
from cachectl.layers.base.text import plural
from cachectl.layers.core.entry import UNCOUNTED, Entry, Problem, Usage, orphan, unknown_words
from cachectl.layers.core.finding import Finding
from cachectl.layers.core.json_form import as_json
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import DISABLED, UNKNOWN, Root, Scope, State
from cachectl.layers.core.selection import moment_before
from cachectl.layers.core.store import sum_usage
from cachectl.layers.disk import plain, temporaries
from cachectl.show import units
from cachectl.show.table import Columns, Table
from cachectl.watching import LEDGER

if TYPE_CHECKING:
    from cachectl import grouping, listing
    from cachectl.layers.host.neighbours import Neighbour
    from cachectl.watching import ledger

_BY = {"choices": ("driver", "kernel", "python", "user")}
EXAMPLE = "cachectl report --by kernel"
OPTIONS = (
    verbs.LAYERS,
    ("-v --verbose", "also show every layer and place, file counts, and the reason for every state"),
    ("--by", None, "also show sums by kernel, by user, or by the driver or Python that wrote the entries", _BY),
    ("--sort", None, "sort layers or users: largest, or most entries first", {"choices": ("size", "entries")}),
    ("--since", "AGE", "sum only the traced runs of the last AGE (default: all remembered ones)", verbs.AGE),
    ("--neighbours", "also show other caches of compiled code (Triton, CuPy …), read only"),
    ("--html", "FILE", "also write an HTML page with every entry and finding"),
    verbs.FORCE,
    verbs.PYTHON,
    verbs.PLACES,
    verbs.FORM,
)
_MOST_KERNELS = 20
EPILOG = "A named LAYER is shown as with -v."


class Total(NamedTuple):
    """Sums over roots; lower bounds unless ``complete``, and ``None`` for unknown.

    ``files`` and ``bytes`` include orphans and the ``unknown_files`` of an unknown format. ``prune --stale`` removes
    ``stale_bytes`` and ``orphan_bytes``, but leaves the ``stale_unknown`` entries, whose staleness is unknown.
    """

    entries: int | None
    files: int | None
    bytes: int | None
    complete: bool
    stale_entries: int | None
    stale_bytes: int | None
    orphan_bytes: int | None
    stale_unknown: int
    unknown_files: int | None


@as_json(flat=("root", "usage"))
class RootReport(NamedTuple):
    """One root and what it holds."""

    root: Root
    exists: bool
    usage: Usage


def total_of(roots: Sequence[RootReport], *, complete: bool = True) -> Total:
    """Return the sums; a sum without any known number is ``None``, or 0 if everything was counted."""
    complete = complete and all(root.usage.complete for root in roots)
    nothing = 0 if complete else None
    sums = sum_usage(root.usage for root in roots)
    return Total(
        sums.entries or nothing,
        (sums.files or 0) + (sums.orphan_files or 0) or nothing,
        (sums.bytes or 0) + (sums.orphan_bytes or 0) or nothing,
        complete,
        sums.stale_entries,
        sums.stale_bytes,
        sums.orphan_bytes or nothing,
        sums.stale_unknown or 0,
        sums.unknown_files or nothing,
    )


@as_json(flat=("state", "total"))
class LayerReport(NamedTuple):
    """One layer: its state, its roots and their sums; ``failures`` are the errors met while reading them.

    ``stale_seconds`` estimates the time it took to compile the stale entries, by their share of the bytes; it is
    ``None`` if no trace measured that. ``limit`` is the number of bytes above which the library evicts entries; it is
    ``None`` if there is no limit, if it is unknown, or if the layer is empty. ``place`` is the largest root, else the
    one that the library writes to.
    """

    layer: str
    title: str
    state: State
    scope: Scope
    precious: bool
    roots: tuple[RootReport, ...]
    failures: tuple[str, ...]
    total: Total
    stale_seconds: float | None = None
    limit: int | None = None
    place: Path | None = None

    @property
    def idle(self) -> bool:
        """Return whether the layer is completely counted, empty, and not switched off."""
        total, has_problems = self.total, any(root.usage.problems for root in self.roots)
        return total.complete and not (total.entries or total.files or has_problems or self.state.condition is DISABLED)


@as_json("cachectl/report/1", also=("total",), optional=("neighbours", "pythons", "kernels", "runs", "drivers"))
class Report(NamedTuple):
    """All layers at one moment (epoch seconds).

    ``leftovers`` are temporary folders of killed commands, outside the roots. ``neighbours`` are caches that belong to
    no layer; ``pythons``, ``drivers`` and ``kernels`` are sums by Python, driver and kernel; each is ``None`` unless
    requested. ``runs`` sums the traced runs; it is ``None`` if none is remembered.
    """

    generated: float
    layers: tuple[LayerReport, ...]
    broken: tuple[Mapping[str, str], ...] = ()
    leftovers: tuple[Entry, ...] = ()
    neighbours: tuple[Neighbour, ...] | None = None
    pythons: tuple[grouping.PythonShare, ...] | None = None
    kernels: tuple[listing.Kernel, ...] | None = None
    runs: ledger.Sums | None = None
    drivers: tuple[grouping.DriverShare, ...] | None = None

    def __repr__(self) -> str:
        return f"Report(layers={len(self.layers)}, total={self.total})"

    @property
    def total(self) -> Total:
        """Return the sums over all layers."""
        roots = [root for layer in self.layers for root in layer.roots]
        return total_of(roots, complete=all(layer.total.complete for layer in self.layers))

    @property
    def failed(self) -> bool:
        """Return whether anything could not be counted."""
        return not self.total.complete


def report(
    stack: layer_set.LayerSet,
    layers: Iterable[str] = (),
    *,
    neighbours: bool = False,
    by: str | None = None,
    since: str | float | None = None,
) -> Report:
    """Count the entries of layers, and say whether each is on. Writes nothing into a cache.

    :param neighbours: also measure other caches of compiled code, which belong to no layer
    :param by: also sum entries by ``"driver"``, ``"kernel"`` or ``"python"``
    :param since: sum only the runs traced within this age, such as ``"30d"``, or within so many seconds
    :raises BadRequest: for an unknown layer
    """
    names, here = tuple(layers), stack.environment
    chosen = stack.named(names)
    result = Report(
        here.clock(),
        tuple(map(_layer_report, chosen)),
        () if names else stack.broken,
        tuple(map(_leftover, temporaries.abandoned_temporaries(here))),
    )
    if neighbours:
        from cachectl.layers.host.neighbours import neighbours as measured

        result = result._replace(neighbours=tuple(measured(here)))
    if since is not None or os.path.lexists(user_state_folder(here) / LEDGER):
        from cachectl.watching import ledger

        result = result._replace(runs=ledger.readable(here).since(moment_before(since, here.clock()) or 0))
    if by is not None:
        from cachectl import grouping

        if by == "driver":
            result = result._replace(drivers=grouping.by_driver(chosen))
        elif by == "kernel":
            result = result._replace(kernels=grouping.by_kernel(chosen, here))
        elif by == "python":
            result = result._replace(pythons=grouping.by_python(chosen, here))
    return result


def _leftover(folder: Path) -> Entry:
    steps = [status for path in (folder, *folder.rglob("*")) if (status := plain.status_at(path)) is not None]
    files = [status.st_size for status in steps if stat.S_ISREG(status.st_mode)]
    newest = max((status.st_mtime for status in steps), default=0.0)
    entry = Entry("cachectl", folder.name, folder.parent, sum(files), len(files), modified=newest)
    return orphan(entry, "a temporary folder left by a cachectl that was killed")


def _count(layer: Layer, root: Root) -> Iterator[RootReport]:
    # The store of a missing root is not loaded.
    usage = layer.store.usage(root) if root.may_exist else sum_usage(())
    yield RootReport(root, root.exists, usage)


def _layer_report(layer: Layer) -> LayerReport:
    failures: dict[str, None] = {}
    roots, about = list[RootReport](), layer.about
    for _, root, result in layer_set.in_each_root([layer], _count):
        if isinstance(result, RootReport):
            roots.append(result)
        elif root is None:
            failures[reason_of(result)] = None
        else:
            problem = Problem(root.path, "unreadable", reason_of(result))
            # An unreadable root exists.
            roots.append(RootReport(root, exists=True, usage=UNCOUNTED._replace(problems=(problem,))))
    try:
        state = layer.state()
        if not isinstance(state, State):
            raise TypeError(f"its state is a {type(state).__name__}")
    except FAILURES as error:
        state = State(UNKNOWN, "its state could not be read")
        failures[reason_of(error)] = None
    total, stale_seconds = total_of(roots, complete=not failures), 0.0
    if total.stale_bytes and total.bytes:
        from cachectl.watching import ledger

        measured = ledger.readable(layer.environment).kernels.values()
        stale_seconds = sum(kernel.seconds.get(layer.name, 0) for kernel in measured) * total.stale_bytes / total.bytes
    head = (layer.name, layer.title, state, about.scope, about.precious)
    limit = layer.limit if total.bytes else None
    place = max(roots, key=lambda root: root.usage.bytes or 0).root.path if roots else None
    return LayerReport(*head, tuple(roots), tuple(failures), total, stale_seconds or None, limit, place)


def run(request: verbs.Request) -> Report | int:
    """Carry out ``cachectl report``."""
    options, stack, page = request.options, request.stack, None
    if options.html is not None:
        from cachectl.pages import PAGE

        if options.html == "-" and request.form != "table":
            request.misuse(f"--html - and --{request.form} both write to standard output; name a FILE for one")
        (page,) = request.outputs((options.html, PAGE))
    with request.output.progress("counting"):
        result = report(stack, options.layers, neighbours=options.neighbours, by=options.by, since=options.since)
    if page is not None:
        from cachectl.verbs import doctor, ls

        with request.output.progress("reading"):
            listed = ls.ls(stack, layers=options.layers)
            drawn = draw(result, listed, doctor.doctor(stack, options.layers).findings)
        page.write((drawn,))
        if options.html == "-":
            return 1 if result.failed else 0
    return result


def draw(result: Report, listed: listing.Listing, findings: Iterable[Finding]) -> bytes:
    """Return a report as an HTML page, with its entries and findings."""
    from cachectl.pages import report as page

    names, total = [layer.layer for layer in result.layers], result.total
    filled = [layer.total for layer in result.layers if layer.total.entries]
    is_known = all(sums.stale_bytes is not None and not sums.stale_unknown for sums in filled)
    sums = [total.entries, total.bytes, total.stale_bytes or 0, is_known]
    head = {"generated": result.generated, "layers": names, "complete": total.complete, "total": sums}
    return page.draw(head, listed, findings)


_NUMBERS = {"entries": units.count, "files": units.count, "size": units.size, "stale": units.size, "limit": units.size}
_COLUMNS: Columns = {"layer": str, "state": str, **_NUMBERS, "place": str}
#: What ``--all-users`` shows with ``--by``.
_SHARES = {
    "driver": verbs.OfUsers("drivers", ("layer", "versions", "device"), ("entries", "bytes")),
    "kernel": verbs.OfUsers("kernels", ("kernels", "layers"), ("entries", "bytes")),
    "python": verbs.OfUsers("pythons", ("python", "packages"), ("entries", "bytes")),
}


def of_users(options: argparse.Namespace) -> verbs.OfUsers:
    """Show one line per user, with ``-v`` per layer, or the sums of ``--by``."""
    texts = ("layer",) if options.verbose else ()
    layers = verbs.OfUsers("layers", texts, ("entries", "files", "bytes", "stale_bytes"))
    return _SHARES.get(options.by, layers)._replace(order="entries" if options.sort == "entries" else "bytes")


def table(result: Report, _request: verbs.Request) -> Table:
    """Return all numbers of all layers."""
    rows = []
    for layer in result.layers:
        total = layer.total
        numbers = (total.entries, total.files, total.bytes, total.stale_bytes, layer.limit)
        rows.append((layer.layer, layer.state.condition.value, *numbers, str(layer.place or units.DASH)))
    return Table(_COLUMNS, rows)


def show(result: Report, request: verbs.Request) -> Iterator[object]:
    """Yield the sums, a table of layers, and problems; with ``-v`` also reasons and places."""
    if request.options.sort is not None:
        name = "entries" if request.options.sort == "entries" else "bytes"
        layers = sorted(result.layers, key=lambda layer: -(getattr(layer.total, name) or 0))
        result = result._replace(layers=tuple(layers))
    verbose = bool(request.options.verbose or request.options.layers)
    yield from lines(result, str(request.environment.home_folder), verbose=verbose)
    if (most := request.config.get("prune.max-size")) is not None:
        yield f"cachectl prune leaves at most {units.size(most)} (prune.max-size)"


def lines(result: Report, home: str, *, verbose: bool = False) -> Iterator[object]:
    """Yield what people see of a report; ``home`` is printed as ``~``."""
    total, shown = result.total, [layer for layer in result.layers if verbose or not layer.idle]
    held = f"{_cells(total)[2]} in {plural(total.entries or 0, 'entry', 'entries')}{'' if total.complete else '+'}"
    clearable = [layer.total for layer in result.layers if not layer.precious]
    stale, orphans = (sum(getattr(layer, name) or 0 for layer in clearable) for name in ("stale_bytes", "orphan_bytes"))
    amounts = {"stale": stale, "orphans": orphans}
    removable = ", ".join(f"{what} {units.size(amount)}" for what, amount in amounts.items() if amount)
    yield f"{held}; {units.size(stale + orphans)} could be removed ({removable})" if removable else held
    for layer in shown:
        reasons = sum_usage(root.usage for root in layer.roots).stale_because
        # No line may suggest removing the entries of a precious layer.
        if reasons and not layer.precious:
            lost = f"{layer.total.stale_entries:,} of {plural(layer.total.entries or 0, 'entry', 'entries')}"
            reason, seconds = max(reasons, key=reasons.__getitem__), layer.stale_seconds
            measured = "" if seconds is None else f"; they took about {seconds:.1f} s to compile (measured)"
            fix = f"cachectl prune --stale {layer.layer} removes them"
            yield f"{layer.layer}: {lost} ({units.size(layer.total.stale_bytes)}) are stale: {reason}{measured}; {fix}"
    if shown:
        yield from ("", _layers_table(shown, total, home, verbose=verbose))
    if hidden := len(result.layers) - len(shown):
        yield f"{plural(hidden, 'more layer' if shown else 'layer')}: nothing here; -v shows all"
    if not total.complete:
        yield "+: lower bound, -: unknown; the problems below say why"
    for layer in shown:
        yield from _details(layer, home, verbose=verbose)
    yield from _others(result, home)


def _layers_table(layers: Iterable[LayerReport], total: Total, home: str, *, verbose: bool) -> Table:
    """Return the table of layers; unless ``verbose`` without files, and without limits if there are none."""
    # Places need the room.
    shows = {"files": verbose, "limit": verbose or any(layer.limit for layer in layers)}
    titles = [title for title in _COLUMNS if shows.get(title, True)]

    def row(*cells: object) -> list[object]:
        return [cell for title, cell in zip(_COLUMNS, cells, strict=True) if title in titles]

    rows = []
    for layer in layers:
        place = units.short_path(layer.place or units.DASH, home)
        rows.append(row(layer.layer, layer.state.condition.value, *_cells(layer.total), layer.limit, place))
    return Table({title: _COLUMNS[title] for title in titles}, rows, row("total", "", *_cells(total)[:3], "", "", ""))


def _cells(total: Total) -> list[str]:
    """Return what people see of a sum, lower bounds marked: entries, files, bytes, and bytes of stale entries."""
    cells = [*map(units.count, (total.entries, total.files)), *map(units.size, (total.bytes, total.stale_bytes))]
    *numbers, stale = [cell if total.complete or cell == units.DASH else f"{cell}+" for cell in cells]
    if not total.stale_unknown:
        return [*numbers, stale]
    unknown = f"{total.stale_unknown:,}{'' if total.complete else '+'} unknown"
    return [*numbers, f"{stale} + {unknown}" if total.stale_bytes else unknown]


def _others(result: Report, home: str) -> Iterator[object]:
    """Yield what belongs to no layer, and the requested sums."""
    now = result.generated
    for leftover in result.leftovers:
        sizes = f"{units.size(leftover.bytes)}, {units.age(units.since(leftover.modified, now))} old"
        path = units.short_path(leftover.root / leftover.key, home)
        yield from ("", f"{path}: {leftover.because} ({sizes}); the next purge or prune removes it")
    if result.pythons is not None:
        pythons, places = list[tuple[object, ...]](), dict[str, None]()
        for python in result.pythons:
            release = python_release(python.python)
            packages = " ".join(f"{name} {version}" for name, version in python.packages.items())
            pythons.append((release, python.entries, python.stale, python.bytes, packages))
            places.update((f"  {units.short_path(path, home)}: Python {release}", None) for path in python.interpreters)
        numbers = {"entries": units.count, "stale": units.count, "size": units.size}
        yield from ("", Table({"python": str, **numbers, "packages": str}, pythons), *places)
    if result.drivers is not None:
        drivers = []
        for share in result.drivers:
            words = [f"{name.replace('_', ' ')} {version}" for name, version in share.versions.items()]
            driver = " ".join(filter(None, (*words, share.device))) or units.DASH
            drivers.append((share.layer, driver, share.entries, share.bytes, units.since(share.newest, now)))
        titles: Columns = {"layer": str, "written by": str, "entries": units.count, "size": units.size}
        yield from ("", Table({**titles, "newest": units.age}, drivers))
    if result.kernels is not None:
        yield from _kernels(result.kernels, result)
    if (runs := result.runs) is not None:
        hits, since = plural(runs.hits, "hit"), "" if runs.first is None else f" since {units.moment(runs.first)}"
        if lookups := runs.hits + runs.misses:
            hits = f"{hits} of {plural(lookups, 'lookup')} ({100 * runs.hits // lookups} %)"
        saved = f" saved at least {runs.saved:.1f} s" if round(runs.saved, 1) else ""
        sums = f"{hits}{saved}, misses took {runs.missed:.1f} s"
        yield from ("", f"{plural(runs.runs, 'traced run')} of {runs.seconds:.1f} s{since}: {sums}")
    if result.neighbours is not None:
        columns: Columns = {"neighbours": str, "files": units.count, "size": units.size, "place": str}
        caches = [
            (cache.name, cache.files, cache.bytes, f"{units.short_path(cache.path, home)} ({cache.source})")
            for cache in result.neighbours
        ]
        yield from ("", Table(columns, caches))


def _kernels(kernels: Sequence[listing.Kernel], result: Report) -> Iterator[object]:
    """Yield the largest kernels, and what the entries of each layer save."""
    from cachectl.verbs.ls import kernels_table

    yield from ("", kernels_table(kernels[:_MOST_KERNELS], result.generated))
    if more := len(kernels[_MOST_KERNELS:]):
        yield f"{plural(more, 'more kernel')}: cachectl ls"
    saved = {layer.layer: sum(kernel.saves_in.get(layer.layer, 0) for kernel in kernels) for layer in result.layers}
    if parts := [f"{units.duration(seconds)} in {layer}" for layer, seconds in saved.items() if seconds]:
        yield f"measured: a warm start saves {', '.join(parts)}"


def _details(layer: LayerReport, home: str, *, verbose: bool) -> Iterator[str]:
    """Yield the problems of a layer; if ``verbose``, below the reason of its state and its places."""
    start = "  " if verbose else f"{layer.layer}: "
    if verbose:
        yield from ("", f"{layer.layer}: {layer.state.condition.value}, {layer.state.why}")
        yield from (f"  driver: {units.short_path(file, home)}" for file in layer.state.drivers)
    for number, root in enumerate(layer.roots) if verbose else ():
        usage, notes = root.usage, [root.root.source] if root.exists else [root.root.source, "missing"]
        if number and not (usage.files or usage.orphan_files or usage.problems):
            continue
        if usage.orphan_files:
            notes.append(f"{plural(usage.orphan_files, 'orphan')}, {units.size(usage.orphan_bytes)}")
        yield f"  {units.short_path(root.root.path, home)}  ({'; '.join(notes)})"
    yield from (f"{start}problem: {failure}" for failure in layer.failures)
    for root in layer.roots:
        for problem in root.usage.problems:
            yield f"{start}problem: {units.short_path(problem.path, home)}: {problem.message}"
        if unknown := root.usage.unknown_files:
            yield f"{start}{units.short_path(root.root.path, home)}: {unknown_words(unknown)}"
