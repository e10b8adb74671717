"""``cachectl report``: where caches are, whether they are on, and how much they hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl import options
from cachectl import table as tables
from cachectl.layers.base import errors, facts, registry, store
from cachectl.layers.base.layer import Layer, every_root
from cachectl.layers.disk import temporaries

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.host.neighbours import Neighbour
    from cachectl.listing import Listing

OPTIONS: Final = (
    options.LAYERS,
    options.VERBOSE.having(help="also every layer, every place, and the reason of every state"),
    options.Option("--by", choices=("python",), help="also the sums of each Python that wrote entries"),
    options.Option(
        "--neighbours", action="store_true", help="also other caches of compiled code (Triton, CuPy …), read only"
    ),
    options.Option("--html", metavar="FILE", help="also draw it with every entry and finding, as one HTML page"),
    options.FORCE,
    options.PYTHON,
    options.PLACES,
    options.FORM,
)
EPILOG: Final = "A LAYER that is named is shown as with -v."


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over roots; lower bounds unless ``complete``, and ``None`` for what is unknown.

    ``files`` and ``bytes`` include orphans. ``prune --stale`` removes ``stale_bytes`` and ``orphan_bytes``.
    """

    entries: int | None
    files: int | None
    bytes: int | None
    complete: bool
    stale_entries: int | None
    stale_bytes: int | None
    orphan_bytes: int | None
    disk_bytes: int | None


def _total(usages: list[facts.Usage], *, complete: bool) -> Total:
    def known(*names: str) -> list[int]:
        values = [getattr(usage, name) for usage in usages for name in names]
        return [value for value in values if value is not None]

    def least(*names: str) -> int | None:
        return sum(known(*names)) or (0 if complete else None)

    disk = known("disk_bytes")
    return Total(
        entries=least("entries"),
        files=least("files", "orphan_files"),
        bytes=least("bytes", "orphan_bytes"),
        complete=complete,
        stale_entries=sum(stale) if (stale := known("stale_entries")) else None,
        stale_bytes=sum(stale) if (stale := known("stale_bytes")) else None,
        orphan_bytes=least("orphan_bytes"),
        disk_bytes=sum(disk) if len(disk) == len(usages) else None,
    )


@dataclass(frozen=True, slots=True)
class RootReport:
    """One root and what it holds."""

    root: facts.Root
    exists: bool
    usage: facts.Usage
    as_json: ClassVar[facts.AsJson] = facts.AsJson(flat=("root", "usage"))


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer: its state and its roots; ``failures`` are the errors met while reading them."""

    layer: str
    title: str
    state: facts.State
    scope: facts.Scope
    precious: bool
    roots: tuple[RootReport, ...]
    failures: tuple[str, ...] = ()
    as_json: ClassVar[facts.AsJson] = facts.AsJson(flat=("state", "total"), also=("total",))

    @property
    def total(self) -> Total:
        """Return the sums over the roots."""
        usages = [root.usage for root in self.roots]
        return _total(usages, complete=not self.failures and all(usage.complete for usage in usages))

    @property
    def problems(self) -> tuple[facts.Problem, ...]:
        """Return the problems of all roots."""
        return tuple(problem for root in self.roots for problem in root.usage.problems)

    @property
    def idle(self) -> bool:
        """Return whether the layer is complete and empty, and nobody has switched it off."""
        total, off = self.total, self.state.condition is facts.Condition.DISABLED
        return total.complete and not (off or total.entries or total.files or self.problems)


@dataclass(frozen=True, slots=True)
class PythonShare:
    """The entries of one Python: its five-part version, the packages they name, and the interpreters of that version.

    ``stale`` counts the entries that no known Python can hit.
    """

    python: str
    packages: Mapping[str, str | None]
    entries: int
    bytes: int
    stale: int
    interpreters: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole stack at one moment (epoch seconds).

    ``leftovers`` are temporary folders that killed commands left outside the roots. ``neighbours`` are the caches of no
    layer, and ``pythons`` the sums by Python; ``None`` if not requested.
    """

    generated: float
    layers: tuple[LayerReport, ...]
    broken: tuple[registry.Broken, ...] = ()
    leftovers: tuple[facts.Orphan, ...] = ()
    neighbours: tuple[Neighbour, ...] | None = None
    pythons: tuple[PythonShare, ...] | None = None
    as_json: ClassVar[facts.AsJson] = facts.AsJson(
        "cachectl/report/1", also=("total",), optional=("neighbours", "pythons")
    )

    def __repr__(self) -> str:
        return f"Report(layers={len(self.layers)}, total={self.total})"

    @property
    def total(self) -> Total:
        """Return the sums over all layers."""
        usages = [root.usage for layer in self.layers for root in layer.roots]
        return _total(usages, complete=all(layer.total.complete for layer in self.layers))

    @property
    def failed(self) -> bool:
        """Return whether anything could not be counted."""
        return not self.total.complete


# ---------------------------------------------------------------------- counting


def report(stack: LayerSet, layers: Iterable[str] = (), *, neighbours: bool = False, by_python: bool = False) -> Report:
    """Count the entries of the named layers, or of all, and return whether each is on. Writes nothing into a cache.

    ``neighbours`` also measures other caches of compiled code, which belong to no layer; ``by_python`` also sums the
    entries of each Python.
    """
    names, others = tuple(layers), None
    chosen = stack.named(names)
    if neighbours:
        from cachectl.layers.host.neighbours import neighbours as measured

        others = tuple(measured(stack.environment))
    return Report(
        stack.environment.clock(),
        tuple(map(_layer_report, chosen)),
        () if names else stack.broken,
        temporaries.abandoned_temporaries(stack.environment),
        others,
        _by_python(chosen, stack) if by_python else None,
    )


def _layer_report(layer: Layer) -> LayerReport:
    failures: dict[str, None] = {}
    state = facts.State(facts.Condition.UNKNOWN, "its state could not be read")
    roots: tuple[facts.Root, ...] = ()
    try:
        roots = tuple(every_root(layer))
    except errors.FAILURES as error:
        failures[errors.reason_of(error)] = None
    try:
        state = layer.state()
    except errors.FAILURES as error:
        failures[errors.reason_of(error)] = None
    reports = tuple(_root_report(layer, root) for root in roots)
    return LayerReport(
        layer.name, layer.title, state, layer.about.scope, layer.about.precious, reports, tuple(failures)
    )


def _root_report(layer: Layer, root: facts.Root) -> RootReport:
    try:
        # The store of a missing root is not loaded.
        exists = root.exists or os.path.lexists(root.path)
        return RootReport(root, root.exists, layer.store.usage(root) if exists else store.sum_usage(()))
    except errors.FAILURES as error:
        # An unreadable root exists.
        usage = store.unknown_usage(facts.Problem(root.path, "unreadable", errors.reason_of(error)))
        return RootReport(root, exists=True, usage=usage)


def _by_python(layers: Iterable[Layer], stack: LayerSet) -> tuple[PythonShare, ...]:
    """Sum the entries that name a Python, the largest sum first; entries that cannot be read are left out."""
    from cachectl.layers.base.selection import ALL
    from cachectl.layers.host.pythons import pythons_of
    from cachectl.listing import listed

    groups: dict[tuple[tuple[str, str | None], ...], list[facts.Entry]] = {}
    for entry in listed(layers, ALL, lambda _: None, contents=False):
        if entry.versions.get("python"):
            groups.setdefault(tuple(sorted(entry.versions.items())), []).append(entry)
    shares = []
    for versions, entries in groups.items():
        packages = dict(versions)
        python = str(packages.pop("python"))
        found = pythons_of(stack.environment)
        known = tuple(one.path for one in found if one.version == python and one.present is not False)
        stale = sum(entry.stale is True for entry in entries)
        held = sum(entry.bytes for entry in entries)
        shares.append(PythonShare(python, packages, len(entries), held, stale, known))
    return tuple(sorted(shares, key=lambda share: -share.bytes))


# ---------------------------------------------------------------------- the command line


def run(request: options.Request) -> Report | int:
    """Carry out ``cachectl report``."""
    typed, page = request.options, None
    if typed.html is not None:
        from cachectl.output_files import PAGE, demand_targets

        page = request.output_file(typed.html, PAGE)
        if typed.html == "-" and request.form != "table":
            request.misuse(f"--html - and --{request.form} both write to standard output; name a FILE for one")
        demand_targets(page)
    with request.working("counting"):
        done = report(request.stack, typed.layers, neighbours=typed.neighbours, by_python=typed.by == "python")
    if page is not None:
        from cachectl.verbs.doctor import doctor
        from cachectl.verbs.ls import ls

        with request.working("reading"):
            listing = ls(request.stack, layers=typed.layers)
            drawn = draw(done, listing, doctor(request.stack, typed.layers).findings)
        page.write((drawn,))
        if typed.html == "-":
            return 1 if done.failed else 0
    return done


def draw(done: Report, listing: Listing, findings: Iterable[facts.Finding]) -> bytes:
    """Return a report as an HTML page, with its entries and findings."""
    from cachectl.pages.report_rows import report_page

    total = done.total
    sums = {"complete": total.complete, "total": [total.entries, total.bytes]}
    layers = [layer.layer for layer in done.layers]
    return report_page({"generated": done.generated, "layers": layers, **sums}, listing, findings)


def _bound(text: str, total: Total) -> str:
    """Mark a number that is a lower bound."""
    return text if total.complete or text == tables.DASH else f"{text}+"


def _number(title: str, name: str) -> tables.Column[LayerReport]:
    """Return a column of numbers that may be lower bounds."""
    shown = tables.size if "bytes" in name else tables.count

    def raw(layer: LayerReport) -> int | None:
        value: int | None = getattr(layer.total, name)
        return value

    return tables.Column(title, lambda layer: _bound(shown(raw(layer)), layer.total), right=True, raw=raw)


_COLUMNS: Final[tuple[tables.Column[LayerReport], ...]] = (
    tables.Column("layer", lambda layer: layer.layer),
    tables.Column("state", lambda layer: layer.state.condition.value),
    _number("entries", "entries"),
    _number("files", "files"),
    _number("size", "bytes"),
    _number("stale", "stale_bytes"),
)


def table(done: Report, _request: options.Request) -> tables.Table[LayerReport]:
    """Return all numbers of all layers."""
    return tables.Table((*_COLUMNS, _number("on disk", "disk_bytes")), done.layers)


def show(done: Report, request: options.Request) -> Iterator[object]:
    """Yield the sums, a table of layers, and problems; with ``-v`` also reasons and places."""
    verbose = bool(request.options.verbose or request.options.layers)
    return lines(done, str(request.environment.home_folder), verbose=verbose)


def lines(done: Report, home: str, *, verbose: bool = False) -> Iterator[object]:
    """Yield what people see of a report; ``home`` is printed as ``~``."""
    total, shown = done.total, [layer for layer in done.layers if verbose or not layer.idle]
    yield summary(done)
    if shown:
        cells = (tables.count(total.entries), tables.count(total.files), tables.size(total.bytes))
        yield ""
        yield tables.Table(_COLUMNS, shown, ("total", "", *(_bound(cell, total) for cell in cells), ""))
    if hidden := len(done.layers) - len(shown):
        yield f"{errors.plural(hidden, 'more layer' if shown else 'layer')}: nothing here; -v shows all"
    if not total.complete:
        yield "+: lower bound, -: unknown; the problems below say what could not be counted"
    for layer in shown:
        if verbose:
            yield from _details(layer, home)
        problems = [f"{_short(problem.path, home)}: {problem.message}" for problem in layer.problems]
        for problem in (*layer.failures, *problems):
            yield f"{'  ' if verbose else f'{layer.layer}: '}problem: {problem}"
    yield from _others(done, home)


def _others(done: Report, home: str) -> Iterator[object]:
    """Yield what belongs to no layer."""
    for leftover in done.leftovers:
        held = f"{tables.size(leftover.bytes)}, {tables.age(leftover.modified, done.generated)} old"
        where = _short(leftover.root / leftover.key, home)
        yield ""
        yield f"{where}: {leftover.why} ({held}); the next purge or prune removes it"
    if done.pythons is not None:
        yield ""
        yield tables.Table(_PYTHONS, done.pythons)
        for share in done.pythons:
            for path in share.interpreters:
                yield f"  {_short(path, home)}: Python {_release(share)}"
    if done.neighbours is not None:
        place = tables.Column["Neighbour"]("place", lambda one: f"{_short(one.path, home)} ({one.source})")
        yield ""
        yield tables.Table((*_NEIGHBOURS, place), done.neighbours)


def summary(done: Report) -> str:
    """Format the sums: what there is, and what could go."""
    total = done.total
    entries = _bound(errors.plural(total.entries or 0, "entry", "entries"), total)
    held = f"{_bound(tables.size(total.bytes), total)} in {entries}"
    sums = {"stale": total.stale_bytes or 0, "orphans": total.orphan_bytes or 0}
    if removable := ", ".join(f"{what} {tables.size(amount)}" for what, amount in sums.items() if amount):
        return f"{held}; {tables.size(sum(sums.values()))} could go ({removable})"
    return held


def _details(layer: LayerReport, home: str) -> Iterator[str]:
    """Yield the reason of a layer's state, and its places."""
    yield ""
    yield f"{layer.layer}: {layer.state.condition.value}, {layer.state.why}"
    for file in layer.state.drivers:
        yield f"  driver: {_short(file, home)}"
    for number, root in enumerate(layer.roots):
        usage, notes = root.usage, [root.root.source]
        if number and not (usage.files or usage.orphan_files or usage.problems):
            continue
        notes += [] if root.exists else ["not there"]
        if usage.orphan_files:
            notes.append(f"{errors.plural(usage.orphan_files, 'orphan')}, {tables.size(usage.orphan_bytes)}")
        yield f"  {_short(root.root.path, home)}  ({'; '.join(notes)})"


def _short(place: Path | str, home: str) -> str:
    path = str(place)
    return "~" + path[len(home) :] if home != "/" and path.startswith(home.rstrip("/") + "/") else path


def _release(share: PythonShare) -> str:
    """Return the three numbers of a five-part version."""
    return ".".join(share.python.split(".")[:3])


_PYTHONS: Final[tuple[tables.Column[PythonShare], ...]] = (
    tables.Column("python", _release),
    tables.counts("entries", lambda share: share.entries),
    tables.counts("stale", lambda share: share.stale),
    tables.sizes("size", lambda share: share.bytes),
    tables.Column("packages", lambda share: " ".join(f"{name} {version}" for name, version in share.packages.items())),
)
_NEIGHBOURS: Final[tuple[tables.Column[Neighbour], ...]] = (
    tables.Column("neighbours", lambda one: one.name),
    tables.counts("files", lambda one: one.files),
    tables.sizes("size", lambda one: one.bytes),
)
