"""``cachectl report``: where caches are, whether they are on, and how much they hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.layers.base.errors import FAILURES, BadRequest, plural, printable, reason_of
from cachectl.layers.base.facts import AsJson, Condition, Orphan, Problem, Root, Scope, State, Usage
from cachectl.layers.base.registry import Broken
from cachectl.layers.base.store import sum_usage, unknown_usage
from cachectl.layers.disk.temporaries import abandoned_temporaries
from cachectl.options import FORCE, FORM, LAYERS, PLACES, PYTHON, VERBOSE, Option, Request
from cachectl.table import DASH, Column, Table, age, count, counts, numbers, size, sizes

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.facts import Entry, Finding
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.host.neighbours import Neighbour
    from cachectl.listing import Listing

OPTIONS: Final = (
    LAYERS,
    VERBOSE.having(help="also every layer, every place, and the reason of every state"),
    Option("--by", choices=("python",), help="also the sums of each Python that wrote entries"),
    Option("--neighbours", action="store_true", help="also other caches of compiled code (Triton, CuPy …), read only"),
    Option("--html", metavar="FILE", help="also draw it with every entry and finding, as one HTML page"),
    FORCE,
    PYTHON,
    PLACES,
    FORM,
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


def _total(usages: Iterable[Usage], *, complete: bool) -> Total:
    usages = tuple(usages)

    def known(*names: str) -> list[int]:
        values = [getattr(usage, name) for usage in usages for name in names]
        return [value for value in values if value is not None]

    def least(*names: str) -> int | None:
        total = sum(known(*names))
        return total if total or complete else None

    def optional(name: str) -> int | None:
        values = known(name)
        return sum(values) if values else None

    return Total(
        entries=least("entries"),
        files=least("files", "orphan_files"),
        bytes=least("bytes", "orphan_bytes"),
        complete=complete,
        stale_entries=optional("stale_entries"),
        stale_bytes=optional("stale_bytes"),
        orphan_bytes=least("orphan_bytes"),
        disk_bytes=sum(known("disk_bytes")) if len(known("disk_bytes")) == len(usages) else None,
    )


@dataclass(frozen=True, slots=True)
class RootReport:
    """One root and what it holds; ``link_to`` is where it leads if it is itself a link."""

    root: Root
    exists: bool
    usage: Usage
    link_to: Path | None = None
    as_json: ClassVar[AsJson] = AsJson(flat=("root", "usage"))


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer: its state and its roots; ``failures`` are the errors met while reading them."""

    layer: str
    title: str
    state: State
    scope: Scope
    precious: bool
    roots: tuple[RootReport, ...]
    failures: tuple[str, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(flat=("state", "total"), also=("total",))

    @property
    def total(self) -> Total:
        """Return the sums over the roots."""
        usages = [root.usage for root in self.roots]
        return _total(usages, complete=not self.failures and all(usage.complete for usage in usages))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the problems of all roots."""
        return tuple(problem for root in self.roots for problem in root.usage.problems)

    @property
    def idle(self) -> bool:
        """Return whether the layer is complete and empty, and nobody has switched it off."""
        total, off = self.total, self.state.condition is Condition.DISABLED
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
    broken: tuple[Broken, ...] = ()
    leftovers: tuple[Orphan, ...] = ()
    neighbours: tuple[Neighbour, ...] | None = None
    pythons: tuple[PythonShare, ...] | None = None
    as_json: ClassVar[AsJson] = AsJson("cachectl/report/1", also=("total",), optional=("neighbours", "pythons"))

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
    names, beside = tuple(layers), None
    chosen = stack.named(names)
    if neighbours:
        from cachectl.layers.host.neighbours import neighbours as measured

        beside = tuple(measured(stack.environment))
    return Report(
        stack.environment.clock(),
        tuple(map(_layer_report, chosen)),
        () if names else stack.broken,
        abandoned_temporaries(stack.environment),
        beside,
        _by_python(chosen, stack.environment) if by_python else None,
    )


def _layer_report(layer: Layer) -> LayerReport:
    failures: list[str] = []
    state = State(Condition.UNKNOWN, "its state could not be read")
    roots: tuple[Root, ...] = ()
    try:
        roots = tuple(layer.roots())
    except FAILURES as error:
        failures.append(reason_of(error))
    try:
        state = layer.state()
    except FAILURES as error:
        failures.append(reason_of(error))
    reports = tuple(_root_report(layer, root) for root in roots)
    said = tuple(dict.fromkeys(failures))
    return LayerReport(layer.name, layer.title, state, layer.about.scope, layer.about.precious, reports, said)


def _root_report(layer: Layer, root: Root) -> RootReport:
    # A circular link leads to itself.
    link = Path(os.path.realpath(root.path)) if os.path.islink(root.path) else None
    try:
        # The store of a missing root is not loaded.
        return RootReport(root, root.exists, layer.store.usage(root) if link or root.exists else sum_usage(()), link)
    except FAILURES as error:
        # An unreadable root exists.
        usage = unknown_usage(Problem(root.path, "unreadable", reason_of(error)))
        return RootReport(root, exists=True, usage=usage, link_to=link)


def _by_python(layers: Iterable[Layer], environment: Environment) -> tuple[PythonShare, ...]:
    """Sum the entries that name a Python, the largest sum first; entries that cannot be read are left out."""
    from cachectl.layers.base.selection import ALL
    from cachectl.layers.host.pythons import pythons_of
    from cachectl.listing import listed

    groups: dict[tuple[tuple[str, str | None], ...], list[Entry]] = {}
    for entry in listed(layers, ALL, lambda _: None, contents=False):
        if entry.versions.get("python"):
            groups.setdefault(tuple(sorted(entry.versions.items())), []).append(entry)
    shares = []
    for versions, entries in groups.items():
        packages = dict(versions)
        python = str(packages.pop("python"))
        known = [one.path for one in pythons_of(environment) if one.version == python and one.present is not False]
        stale = sum(entry.stale is True for entry in entries)
        held = sum(entry.bytes for entry in entries)
        shares.append(PythonShare(python, packages, len(entries), held, stale, tuple(known)))
    return tuple(sorted(shares, key=lambda share: -share.bytes))


# ---------------------------------------------------------------------- the command line


def run(request: Request) -> Report | int:
    """Carry out ``cachectl report``."""
    options = request.options
    page = None
    if options.html is not None:
        from cachectl.output_files import PAGE, demand_targets

        page = request.output_file(options.html, PAGE)
        if options.html == "-" and request.form != "table":
            request.misuse(f"--html - and --{request.form} both write to standard output; name a FILE for one")
        demand_targets(page)
    with request.working("counting"):
        done = report(request.stack, options.layers, neighbours=options.neighbours, by_python=options.by == "python")
    if page is not None:
        from cachectl.verbs.doctor import doctor
        from cachectl.verbs.ls import ls

        with request.working("reading"):
            listing = ls(request.stack, layers=options.layers)
            drawn = draw(done, listing, doctor(request.stack, options.layers).findings)
        page.write((drawn,))
        if options.html == "-":
            return 1 if done.failed else 0
    return done


def draw(done: Report, listing: Listing, findings: Iterable[Finding]) -> bytes:
    """Return a report as an HTML page, with its entries and findings."""
    from cachectl.pages.report_rows import report_page

    total = {"complete": done.total.complete, "total": [done.total.entries, done.total.bytes]}
    return report_page(done.generated, total, [_row(layer) for layer in done.layers], listing, findings)


def _row(layer: LayerReport) -> list[object]:
    """Return a layer as the script of the page reads it."""
    total, state = layer.total, layer.state
    places = [printable(root.root.path) for root in layer.roots if root.exists]
    held = [total.entries, total.bytes, total.stale_entries, total.stale_bytes, total.orphan_bytes]
    return [layer.layer, layer.title, state.condition.value, state.why, *held, places]


def _bound(text: str, *, complete: bool) -> str:
    """Mark a number that is a lower bound."""
    return text if complete or text == DASH else f"{text}+"


def _number(title: str, name: str) -> Column[LayerReport]:
    """Return a column of numbers that may be lower bounds."""

    def raw(layer: LayerReport) -> int | None:
        value: int | None = getattr(layer.total, name)
        return value

    def text(layer: LayerReport) -> str:
        shown = (size if "bytes" in name else count)(raw(layer))
        return _bound(shown, complete=layer.total.complete)

    return numbers(title, text, raw)


_COLUMNS: Final[tuple[Column[LayerReport], ...]] = (
    Column("layer", lambda layer: layer.layer),
    Column("state", lambda layer: layer.state.condition.value),
    _number("entries", "entries"),
    _number("files", "files"),
    _number("size", "bytes"),
    _number("stale", "stale_bytes"),
)
_ON_DISK: Final = _number("on disk", "disk_bytes")


def table(done: Report, _request: Request) -> Table[LayerReport]:
    """Return all numbers of all layers."""
    return Table((*_COLUMNS, _ON_DISK), done.layers)


def show(done: Report, request: Request) -> Iterator[object]:
    """Yield the sums, a table of layers, and problems; with ``-v`` also reasons and places."""
    verbose = bool(request.options.verbose or request.options.layers)
    yield from lines(done, str(request.environment.home_folder), limit=_limit(request), verbose=verbose)
    for plugin in done.broken:
        request.notice(f"plug-in {plugin.name}: {plugin.why}")


def lines(done: Report, home: str, *, limit: int | None = None, verbose: bool = False) -> Iterator[object]:
    """Yield what people see of a report.

    ``home`` is printed as ``~``. ``limit`` is the largest size that the config files allow, in bytes.
    """
    yield summary(done, limit)
    shown = [layer for layer in done.layers if verbose or not layer.idle]
    if shown:
        total = done.total
        cells = (count(total.entries), count(total.files), size(total.bytes))
        bound = (_bound(cell, complete=total.complete) for cell in cells)
        yield ""
        yield Table(_COLUMNS, shown, ("total", "", *bound, ""))
    if hidden := len(done.layers) - len(shown):
        yield f"{plural(hidden, 'more layer' if shown else 'layer')}: nothing here; -v shows all"
    if not done.total.complete:
        yield "+: lower bound, -: unknown; the problems below say what could not be counted"
    for layer in shown:
        yield from _details(layer, home) if verbose else (f"{layer.layer}: {line}" for line in _problems(layer, home))
    for leftover in done.leftovers:
        where = _short_home(str(leftover.root / leftover.key), home)
        facts = f"{size(leftover.bytes)}, {age(leftover.modified, done.generated)} old"
        yield ""
        yield f"{where}: {leftover.why} ({facts}); the next purge or prune removes it"
    if done.pythons is not None:
        yield ""
        yield Table(_PYTHONS, done.pythons)
        for share in done.pythons:
            for path in share.interpreters:
                yield f"  {_short_home(str(path), home)}: Python {_release(share.python)}"
    if done.neighbours is not None:
        place: Column[Neighbour] = Column("place", lambda one: f"{_short_home(str(one.path), home)} ({one.source})")
        yield ""
        yield Table((*_NEIGHBOURS, place), done.neighbours)


def _limit(request: Request) -> int | None:
    """Return the configured limit of all layers together in bytes; ``None`` if none is set, or if it is wrong."""
    from cachectl.layers.base.environment import is_configured

    if not is_configured(request.environment):
        return None
    try:
        return request.config.limits(request.now, request.stack, lambda _: None).bytes
    except BadRequest:
        # prune and config name the fault.
        return None


def summary(done: Report, limit: int | None) -> str:
    """Format the sums: what there is, what could go, and what may be there."""
    total = done.total
    held = _bound(size(total.bytes), complete=total.complete)
    parts = [f"{held} in {_bound(plural(total.entries or 0, 'entry', 'entries'), complete=total.complete)}"]
    sums = (("stale", total.stale_bytes), ("orphans", total.orphan_bytes))
    if removable := ", ".join(f"{what} {size(amount)}" for what, amount in sums if amount):
        parts.append(f"{size((total.stale_bytes or 0) + (total.orphan_bytes or 0))} could go ({removable})")
    parts += [] if limit is None else [f"limit {size(limit)}"]
    return "; ".join(parts)


def _details(layer: LayerReport, home: str) -> Iterator[str]:
    """Yield the reason of a layer's state, its places and its problems."""
    yield ""
    yield f"{layer.layer}: {layer.state.condition.value}, {layer.state.why}"
    for file in layer.state.drivers:
        yield f"  driver: {_short_home(file, home)}"
    for number, root in enumerate(layer.roots):
        if not number or root.usage.files or root.usage.orphan_files or root.usage.problems:
            yield _place(root, home)
    yield from (f"  {problem}" for problem in _problems(layer, home))


def _place(root: RootReport, home: str) -> str:
    notes = [root.root.source, *([] if root.exists else ["not there"])]
    notes += [] if root.link_to is None else [f"a link to {_short_home(str(root.link_to), home)}"]
    if root.usage.orphan_files:
        notes.append(f"{plural(root.usage.orphan_files, 'orphan')}, {size(root.usage.orphan_bytes)}")
    return f"  {_short_home(str(root.root.path), home)}  ({'; '.join(notes)})"


def _problems(layer: LayerReport, home: str) -> Iterator[str]:
    yield from (f"problem: {failure}" for failure in layer.failures)
    yield from (f"problem: {_short_home(str(problem.path), home)}: {problem.message}" for problem in layer.problems)


def _short_home(path: str, home: str) -> str:
    return "~" + path[len(home) :] if home != "/" and path.startswith(home.rstrip("/") + "/") else path


def _release(version: str) -> str:
    """Shorten a five-part version to the three numbers."""
    return ".".join(version.split(".")[:3])


_PYTHONS: Final[tuple[Column[PythonShare], ...]] = (
    Column("python", lambda share: _release(share.python)),
    counts("entries", lambda share: share.entries),
    counts("stale", lambda share: share.stale),
    sizes("size", lambda share: share.bytes),
    Column("packages", lambda share: " ".join(f"{name} {version}" for name, version in share.packages.items())),
)
_NEIGHBOURS: Final[tuple[Column[Neighbour], ...]] = (
    Column("neighbours", lambda one: one.name),
    counts("files", lambda one: one.files),
    sizes("size", lambda one: one.bytes),
)
