"""``cachectl report``: locations, state, entries, bytes, stale, problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser
from cachectl.layers.base.texts import plural

if TYPE_CHECKING:
    from cachectl.inspecting.by_python import PythonShare
    from cachectl.inspecting.report import LayerReport, Report, RootReport
    from cachectl.layers.host.neighbours import Neighbour
    from cachectl.moving.output_files import OutputFile


def add_options(parser: Parser) -> None:
    parser.add_layers()
    parser.add_argument(
        "--neighbours", action="store_true", help="also other caches of compiled code (Triton, CuPy …), read only"
    )
    parser.add_argument("--by", choices=("python",), help="also the sums of each Python that wrote entries")
    parser.add_argument("-v", "--verbose", action="store_true", help="also every place, and the reason of every state")
    parser.add_shared("--all-layers")
    parser.add_argument("--html", metavar="FILE", help="also draw it with every entry and finding, as one HTML page")
    parser.add_argument("--bench", metavar="FILE", help="what bench --json wrote, for the page of --html")
    parser.add_argument("--trace", metavar="FILE", help="what trace --json wrote, for the page of --html")
    parser.add_force("a page of cachectl")
    parser.add_places(users=True, root=True)
    parser.add_form("--python")
    parser.epilog = "A LAYER that is named is shown as with -v."


def run(call: Call) -> int:
    given = call.options
    if given.html is None and (given.bench or given.trace):
        call.misuse("--bench and --trace are for the page of --html FILE")
    page = None if given.html is None else _page_file(call)
    layers = given.layers
    with call.working("counting"):
        report = call.stack.report(layers=layers, neighbours=given.neighbours, by_python=bool(given.by))
    if page is not None:
        from cachectl.moving.whole_files import STREAM

        with output.working("reading every entry"):
            drawn = call.stack.report_page(report, layers=layers, bench=given.bench, trace=given.trace)
        page.write((drawn,))
        if page.name == STREAM:
            return 1 if report.failed else 0

    def show(report: Report) -> None:
        named = bool(layers)
        show_report(
            report,
            str(call.environment.home_folder),
            limit=_limit(call),
            all_layers=given.all_layers or named,
            verbose=given.verbose or named,
        )

    return call.show(report, show, lambda report: ((*COLUMNS, _DISK_BYTES), report.layers))


def _limit(call: Call) -> int | None:
    """Return the configured limit of all layers together in bytes; ``None`` if none is set, or if it is wrong."""
    from cachectl.layers.base.environment import is_configured
    from cachectl.layers.base.errors import BadRequest

    if not is_configured(call.environment):
        return None
    try:
        return call.config.limits(call.now, call.stack, lambda _: None).bytes
    except BadRequest:
        # prune and config name the fault.
        return None


def summary(report: Report, limit: int | None) -> str:
    """Format the sums: what there is, what could go, and what may be there."""
    total = report.total
    held = _bound(output.size(total.bytes), complete=report.complete)
    parts = [f"{held} in {_bound(plural(total.entries or 0, 'entry', 'entries'), complete=report.complete)}"]
    sums = (("stale", total.stale_bytes), ("orphans", total.orphan_bytes))
    if going := ", ".join(f"{what} {output.size(amount)}" for what, amount in sums if amount):
        parts.append(f"{output.size((total.stale_bytes or 0) + (total.orphan_bytes or 0))} could go ({going})")
    parts += [] if limit is None else [f"limit {output.size(limit)}"]
    return "; ".join(parts)


def _page_file(call: Call) -> OutputFile:
    """Return the file of ``--html``, once it is known that it may be written."""
    from cachectl.moving.output_files import PAGE, demand_targets
    from cachectl.moving.whole_files import STREAM

    file = call.output_file(call.options.html, PAGE)
    if file.name == STREAM and call.form != "table":
        call.misuse(f"--html - and --{call.form} both write to standard output; name a FILE for one")
    demand_targets(file)
    return file


def _bound(text: str, *, complete: bool) -> str:
    """Mark a number that is a lower bound."""
    return text if complete or text == output.DASH else f"{text}+"


def _amounts(
    title: str, text: Callable[[int | None], str], value: Callable[[LayerReport], int | None]
) -> output.Column[LayerReport]:
    """Return a column of numbers that may be lower bounds."""
    return output.numbers(title, lambda layer: _bound(text(value(layer)), complete=layer.complete), value)


COLUMNS: Final[tuple[output.Column[LayerReport], ...]] = (
    output.Column("layer", lambda layer: layer.layer),
    output.Column("state", lambda layer: layer.state.condition.value),
    _amounts("entries", output.count, lambda layer: layer.entries),
    _amounts("files", output.count, lambda layer: layer.files),
    _amounts("size", output.size, lambda layer: layer.bytes),
    _amounts("stale", output.size, lambda layer: layer.stale_bytes),
)
_DISK_BYTES: Final = _amounts("on disk", output.size, lambda layer: layer.disk_bytes)


def _on_disk(layer: LayerReport) -> str:
    """Format the disk blocks of a layer if they differ from its bytes by more than a tenth."""
    size, disk = layer.bytes, layer.disk_bytes
    if size is None or disk is None or abs(disk - size) <= size / 10:
        return ""
    return _bound(output.size(disk), complete=layer.complete)


#: Shown if a layer has such a number.
_ON_DISK: Final[output.Column[LayerReport]] = output.Column("on disk", _on_disk, right=True)


PYTHON_COLUMNS: Final[tuple[output.Column[PythonShare], ...]] = (
    output.Column("python", lambda one: _release(one.python)),
    output.counts("entries", lambda one: one.entries),
    output.counts("stale", lambda one: one.stale),
    output.sizes("size", lambda one: one.bytes),
    output.Column("packages", lambda one: " ".join(f"{name} {version}" for name, version in one.packages.items())),
)


def _release(version: str) -> str:
    """Shorten a five-part version to the three numbers."""
    return ".".join(version.split(".")[:3])


def _total(report: Report) -> tuple[str, ...]:
    numbers = (output.count(report.entries), output.count(report.files), output.size(report.bytes))
    return ("total", "", *(_bound(number, complete=report.complete) for number in numbers))


def _show_table(report: Report, layers: Sequence[LayerReport]) -> None:
    *columns, stale = COLUMNS
    if not any(map(_on_disk, layers)):
        output.show_table(COLUMNS, layers, (*_total(report), ""))
        return
    last = (*_total(report), output.size(report.total.disk_bytes), "")
    output.show_table((*columns, _ON_DISK, stale), layers, last)


def show_report(
    report: Report, home: str, *, limit: int | None = None, all_layers: bool = False, verbose: bool = False
) -> None:
    """Print the sums, a table of layers, and problems; with ``verbose`` also reasons and places.

    ``home`` is printed as ``~``. ``limit`` is the largest size that the config files allow, in bytes.
    """
    output.show_message(summary(report, limit), indent="  ")
    shown = [layer for layer in report.layers if all_layers or not layer.idle]
    if shown:
        output.show_lines([""])
        _show_table(report, shown)
    output.show_more_layers(len(report.layers) - len(shown), shown)
    if not report.complete:
        output.show_message("+: lower bound, -: unknown; the problems below say what could not be counted")
    for line in _places(shown, home, verbose=verbose):
        output.show_message(line, indent="    ")
    for one in report.leftovers:
        where = _short_home(str(one.root / one.key), home)
        facts = f"{output.size(one.bytes)}, {output.age(one.modified, report.generated)} old"
        output.show_lines([""])
        output.show_message(f"{where}: {one.why} ({facts}); the next purge or prune removes it", indent="    ")
    for plugin in report.broken:
        output.warn(f"plug-in {plugin.name}: {plugin.why}")
    if report.pythons is not None:
        output.show_lines([""])
        output.show_table(PYTHON_COLUMNS, report.pythons)
        paths = {path: _release(one.python) for one in report.pythons for path in one.interpreters}
        output.show_lines(f"  {_short_home(str(path), home)}: Python {release}" for path, release in paths.items())
    if report.neighbours is not None:
        output.show_lines([""])
        output.show_table(_neighbour_columns(home), report.neighbours)


def _neighbour_columns(home: str) -> tuple[output.Column[Neighbour], ...]:
    return (
        output.Column("neighbours", lambda one: one.name),
        output.counts("files", lambda one: one.files),
        output.sizes("size", lambda one: one.bytes),
        output.Column("place", lambda one: f"{_short_home(str(one.path), home)} ({one.source})"),
    )


def _places(layers: Sequence[LayerReport], home: str, *, verbose: bool) -> Iterator[str]:
    """Yield reasons, places and problems of layers; unless ``verbose``, only problems and their layers."""
    for layer in layers:
        if not verbose:
            yield from (f"{layer.layer}: {problem}" for problem in _problems(layer, home))
            continue
        yield ""
        yield f"{layer.layer}: {layer.state.condition.value}, {layer.state.why}"
        for file in layer.state.drivers:
            yield f"  driver: {_short_home(file, home)}"
        for number, root in enumerate(layer.roots):
            if not number or _holds_anything(root):
                yield _place(root, home)
        yield from (f"  {problem}" for problem in _problems(layer, home))


def _problems(layer: LayerReport, home: str) -> Iterator[str]:
    yield from (f"problem: {failure}" for failure in layer.failures)
    for root in layer.roots:
        for problem in root.usage.problems:
            yield f"problem: {_short_home(str(problem.path), home)}: {problem.message}"


def _place(root: RootReport, home: str) -> str:
    orphans = root.usage.orphan_files
    notes = [root.root.source, *([] if root.exists else ["not there"])]
    notes += [] if root.link_to is None else [f"a link to {_short_home(str(root.link_to), home)}"]
    notes += [f"{plural(orphans, 'orphan')}, {output.size(root.usage.orphan_bytes or 0)}"] if orphans else []
    return f"  {_short_home(str(root.root.path), home)}  ({'; '.join(notes)})"


def _holds_anything(root: RootReport) -> bool:
    return bool(root.usage.files or root.usage.orphan_files or root.usage.problems)


def _short_home(path: str, home: str) -> str:
    return "~" + path[len(home) :] if home != "/" and path.startswith(home.rstrip("/") + "/") else path
