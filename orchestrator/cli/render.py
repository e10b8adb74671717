"""Facts as text and as JSON. Beside the command line, the only module that prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal

from cachectl.layers.base.errors import printable
from cachectl.layers.base.facts import (
    Ability,
    Census,
    Entry,
    Finding,
    Note,
    Orphan,
    Outcome,
    Problem,
    Quarantined,
    Removable,
    Root,
    Unverified,
)

if TYPE_CHECKING:
    from cachectl.clearing.purge import PurgeResult
    from cachectl.clearing.quarantine import QuarantineResult, Restored
    from cachectl.inspecting.entries import Trouble
    from cachectl.inspecting.neighbours import Neighbour
    from cachectl.inspecting.report import LayerReport, Report, RootReport
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.registry import Broken
    from cachectl.observing.bench import Bench, Step
    from cachectl.observing.proof import Attestation, Proof
    from cachectl.observing.trace import KernelTrace, Trace

_DASH: Final = "-"
_NARROW: Final = 80
_PATIENCE: Final = 0.5
#: How many paths an attestation names.
_FEW: Final = 3


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text; ``right`` are the columns of numbers. The last column gives way first."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()


# ---------------------------------------------------------------------- words


def size(amount: int | None) -> str:
    """Spell bytes in powers of 1024, a dash for unknown."""
    if amount is None:
        return _DASH
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - the definition of the units
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(amount: int | None) -> str:
    """Format a number, a dash for unknown."""
    return _DASH if amount is None else f"{amount:,}"


def _at_least(text: str, *, complete: bool) -> str:
    """Mark a formatted number that is a lower bound."""
    return text if complete or text == _DASH else f"{text}+"


def age(moment: float | None, now: float) -> str:
    """Spell how long ago a moment was, a dash for unknown."""
    if moment is None:
        return _DASH
    seconds = max(0.0, now - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def duration(seconds: float) -> str:
    """Spell a time that is not known to the second."""
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004 - the definition of the units
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004


def _shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    mark = _ellipsis()[:width]
    room = width - len(mark)
    tail = (room + 1) // 2
    return text[: room - tail] + mark + text[len(text) - tail :]


def _ellipsis() -> str:
    try:
        "…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return "..."
    return "…"


def _width() -> int:
    """Return how wide a line may be: as the terminal, and 80 columns elsewhere."""
    if not sys.stdout.isatty():
        return _NARROW
    import shutil

    return shutil.get_terminal_size().columns


# ---------------------------------------------------------------------- printing


@contextmanager
def _output() -> Iterator[None]:
    """Name standard output in an error of writing to it; the error itself names nothing."""
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


def show_json(value: object) -> None:
    """Print a JSON document."""
    with _output():
        print(json.dumps(value, indent=2))


def json_bytes(value: object) -> bytes:
    """Spell a JSON document for a file."""
    return json.dumps(value, indent=2).encode() + b"\n"


def show_lines(lines: Iterable[str]) -> None:
    """Print lines of text."""
    with _output():
        for line in lines:
            print(printable(line))


def show_raw(lines: Iterable[str]) -> None:
    """Print lines that are meant for a machine: byte for byte, but for a terminal, which must not obey them."""
    if sys.stdout.isatty():
        show_lines(lines)
    else:
        show_bytes(b"".join(os.fsencode(line) + b"\n" for line in lines))


def show_bytes(data: bytes) -> None:
    """Write bytes to standard output."""
    with _output():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def finish() -> None:
    """Write what is still held back, so that a failure is noticed."""
    with _output():
        sys.stdout.flush()


def warn(line: str, speaker: str = "cachectl") -> None:
    """Print one line where it does not disturb the output."""
    with suppress(OSError):
        print(f"{speaker}: {printable(line)}", file=sys.stderr)


def show_table(table: Table) -> None:
    """Print a table: with lines and colour on a terminal, plain elsewhere; never wider than the screen."""
    if sys.stdout.isatty():
        _show_rich(table)
    else:
        show_lines(plain_table(table, _width()))


def plain_table(table: Table, width: int) -> list[str]:
    """Lay a table out in columns, cells shortened in the middle where they would not fit."""
    lines = []
    rows = _fitted(table, width)
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.headings))]
    for row in rows:
        cells = [
            cell.rjust(widths[column]) if column in table.right else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _fitted(table: Table, width: int) -> list[tuple[str, ...]]:
    """Return headings and rows, shortened so that all fit beside each other: the last cell first, then the widest."""
    rows = [table.headings, *(tuple(printable(cell) for cell in row) for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.headings))]
    room = width - 2 * (len(widths) - 1)
    excess = sum(widths) - room
    widths[-1] = min(widths[-1], max(len(table.headings[-1]), widths[-1] - excess))
    while sum(widths) > room and max(widths) > 1:
        # A number without its middle is another number: words give way first.
        words = [column for column, width in enumerate(widths) if column not in table.right and width > 1]
        widths[max(words or range(len(widths)), key=widths.__getitem__)] -= 1
    return [tuple(_shorten(cell, widths[column]) for column, cell in enumerate(row)) for row in rows]


def _show_rich(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    width = _width()
    fitted = _fitted(table, width)
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for column, heading in enumerate(fitted[0]):
        justify: Literal["left", "right"] = "right" if column in table.right else "left"
        drawn.add_column(Text(heading), justify=justify, no_wrap=True)
    for row in fitted[1:]:
        drawn.add_row(*(Text(cell) for cell in row))
    with _output():
        Console(width=width).print(drawn)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal, from the first half second on, that something is being done."""
    if not sys.stderr.isatty():
        yield
        return
    import threading

    finished = threading.Event()

    def spin() -> None:
        if finished.wait(_PATIENCE):
            return
        from rich.console import Console

        with Console(stderr=True).status(what):
            finished.wait()

    spinner = threading.Thread(target=spin, daemon=True)
    spinner.start()
    try:
        yield
    finally:
        finished.set()
        spinner.join()


@contextmanager
def progress() -> Iterator[Callable[[Step], None]]:
    """Yield what is told of each step of long work; on a terminal it shows a bar with the time left."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, left="")

        def show(step: Step) -> None:
            left = "" if step.seconds_left is None else f"about {duration(step.seconds_left)} left"
            # At once: a step may be over before the bar is drawn again by itself.
            bar.update(task, description=step.doing, completed=step.done, total=step.total, left=left, refresh=True)

        yield show


# ---------------------------------------------------------------------- report


def report_json(report: Report, beside: Sequence[Neighbour] | None = None) -> dict[str, object]:
    """Spell a report as ``cachectl/report/1``, with neighbours where they were asked for."""
    asked = {} if beside is None else {"neighbours": [{**asdict(one), "path": str(one.path)} for one in beside]}
    return {
        "schema": "cachectl/report/1",
        "generated": report.generated,
        "layers": [_layer_json(layer) for layer in report.layers],
        "total": {
            "entries": report.entries,
            "files": report.files,
            "bytes": report.bytes,
            "complete": report.complete,
        },
        "broken": _broken_json(report.broken),
        "leftovers": None if report.leftovers is None else [_orphan_json(one) for one in report.leftovers],
        **({"nodes": list(report.nodes)} if report.nodes else {}),
        **asked,
    }


def _layer_json(layer: LayerReport) -> dict[str, object]:
    return {
        "layer": layer.layer,
        "title": layer.title,
        "state": layer.state.condition.value,
        "why": layer.state.why,
        "scope": layer.scope.value,
        "precious": layer.precious,
        "entries": layer.entries,
        "files": layer.files,
        "bytes": layer.bytes,
        "complete": layer.complete,
        "stale_entries": layer.stale_entries,
        "stale_bytes": layer.stale_bytes,
        "roots": [_root_json(root) for root in layer.roots],
        "failures": list(layer.failures),
    }


def _root_json(root: RootReport) -> dict[str, object]:
    census: Census = root.census
    return {
        "path": str(root.root.path),
        "source": root.root.source,
        "scope": root.root.scope.value,
        "role": root.root.role or None,
        "link_to": None if root.link_to is None else str(root.link_to),
        "exists": root.exists,
        "entries": census.entries,
        "files": census.files,
        "bytes": census.bytes,
        "orphan_files": census.orphan_files,
        "orphan_bytes": census.orphan_bytes,
        "complete": census.complete,
        "oldest": census.oldest,
        "newest": census.newest,
        "problems": [_problem_json(problem) for problem in census.problems],
        **({"nodes": list(root.nodes)} if root.nodes else {}),
    }


def _problem_json(problem: Problem) -> dict[str, str]:
    return {"path": str(problem.path), "code": problem.code, "message": problem.message}


def _broken_json(broken: Iterable[Broken]) -> list[dict[str, str]]:
    return [{"name": plugin.name, "why": plugin.why} for plugin in broken]


def show_report(report: Report, home: str) -> None:
    """Print the report: a table of layers, then places, reasons and problems."""
    rows = [
        (
            layer.layer,
            layer.state.condition.value,
            *_sums(layer),
            _at_least(size(layer.stale_bytes), complete=layer.complete),
        )
        for layer in report.layers
    ]
    rows.append(("total", "", *_sums(report), ""))
    headings = ("layer", "state", "entries", "files", "size", "stale")
    show_table(Table(headings, tuple(rows), frozenset({2, 3, 4, 5})))
    if not report.complete:
        show_lines(["+ and -: at least, and unknown; a problem below says what could not be counted"])
    if report.nodes:
        more = " …" if len(report.nodes) > _MANY else ""
        show_lines(["", f"{_nodes(report.nodes)}: {', '.join(report.nodes[:_MANY])}{more}"])
    show_lines(_places(report, home))
    for one in report.leftovers or ():
        where = _short_home(str(one.root / one.key), home)
        said = f"{size(one.bytes)}, {age(one.modified, report.generated)} old"
        show_lines(["", f"{where}: {one.why} ({said}); the next purge or prune removes it"])
    for plugin in report.broken:
        warn(f"plug-in {plugin.name}: {plugin.why}")


def _sums(counted: LayerReport | Report) -> tuple[str, str, str]:
    """Format the entries, files and bytes of a layer, or of all."""
    numbers = (count(counted.entries), count(counted.files), size(counted.bytes))
    entries, files, amount = (_at_least(number, complete=counted.complete) for number in numbers)
    return entries, files, amount


def show_neighbours(beside: Sequence[Neighbour] | None, home: str) -> None:
    """Print neighbours, where they were asked for, as a table of their own: they are in no total."""
    if beside is None:
        return
    rows = tuple(
        (one.name, count(one.files), size(one.bytes), f"{_short_home(str(one.path), home)} ({one.source})")
        for one in beside
    )
    show_lines([""])
    show_table(Table(("neighbours", "files", "size", "place"), rows, frozenset({1, 2})))


def _places(report: Report, home: str) -> Iterator[str]:
    for layer in report.layers:
        if layer.state.condition.value == "absent" and not (layer.files or layer.failures or layer.problems):
            continue
        yield ""
        yield f"{layer.layer}: {layer.state.condition.value}, {layer.state.why}"
        places: dict[Root, list[RootReport]] = {}
        for root in layer.roots:
            places.setdefault(root.root, []).append(root)
        for number, alike in enumerate(places.values()):
            if not number or any(map(_holds_anything, alike)):
                yield _place(alike, home)
        for failure in layer.failures:
            yield f"  problem: {failure}"
        for root in layer.roots:
            where = f" (on {root.nodes[0]})" if root.nodes else ""
            for problem in root.census.problems:
                yield f"  problem: {_short_home(str(problem.path), home)}: {problem.message}{where}"


def _place(alike: Sequence[RootReport], home: str) -> str:
    """Spell a root, once for all nodes that have one of their own there."""
    first = alike[0]
    orphans = sum(one.census.orphan_files or 0 for one in alike)
    nodes = tuple(dict.fromkeys(node for one in alike for node in one.nodes))
    notes = [first.root.source, *([] if any(one.exists for one in alike) else ["not there"])]
    if len(nodes) > 1:
        notes.append(f"{_nodes(nodes)}, {'shared' if len(alike) < len(nodes) else 'each its own'}")
    else:
        notes += nodes
    notes += [] if first.link_to is None else [f"a link to {_short_home(str(first.link_to), home)}"]
    orphan_bytes = size(sum(one.census.orphan_bytes or 0 for one in alike))
    notes += [f"{orphans} {'orphan' if orphans == 1 else 'orphans'}, {orphan_bytes}"] if orphans else []
    return f"  {_short_home(str(first.root.path), home)}  ({'; '.join(notes)})"


def _nodes(nodes: Sequence[str]) -> str:
    return "1 node" if len(nodes) == 1 else f"{len(nodes):,} nodes"


def _holds_anything(root: RootReport) -> bool:
    return bool(root.census.files or root.census.orphan_files or root.census.problems)


def _short_home(path: str, home: str) -> str:
    return "~" + path[len(home) :] if home != "/" and path.startswith(home.rstrip("/") + "/") else path


# ---------------------------------------------------------------------- ls


def entries_json(entries: Iterable[Entry], troubles: Iterable[Trouble]) -> dict[str, object]:
    """Spell entries as ``cachectl/ls/1``."""
    return {
        "schema": "cachectl/ls/1",
        "entries": [entry_json(entry) for entry in entries],
        "problems": [_trouble_json(trouble) for trouble in troubles],
    }


def _trouble_json(trouble: Trouble) -> dict[str, object]:
    problem = {"path": None, "code": "failed"} if trouble.problem is None else _problem_json(trouble.problem)
    return {"layer": trouble.layer, **problem, "message": trouble.message, "failed": trouble.failed}


def warn_of(troubles: Iterable[Trouble]) -> None:
    """Print one line for each thing that is no entry, or kept entries from being listed."""
    for trouble in troubles:
        where = "" if trouble.problem is None else f"{trouble.problem.path}: "
        warn(f"{trouble.layer}: {where}{trouble.message}")


def entry_json(entry: Entry) -> dict[str, object]:
    """Return an entry as every listing of entries has it."""
    return {
        "layer": entry.layer,
        "key": entry.key,
        "root": str(entry.root),
        "bytes": entry.bytes,
        "files": entry.files,
        "created": entry.created,
        "modified": entry.modified,
        "used": entry.used,
        "written_before": entry.written_before,
        "kernels": None if entry.kernels is None else list(entry.kernels),
        "device": entry.device,
        "versions": dict(entry.versions),
        "stale": entry.stale,
        "stale_because": entry.stale_because,
        "detail": dict(entry.detail),
    }


def show_entries(entries: Iterable[Entry], now: float) -> None:
    """Print entries as a table."""
    _show_things(((entry.layer, entry) for entry in entries), now)


def _show_things(things: Iterable[tuple[str, Removable | Quarantined]], now: float) -> None:
    """Print what a listing or a dry run names, each with its layer, as a table."""
    rows = tuple(
        (layer, _shorten(_kernels(thing), 18), size(thing.bytes), age(_last(thing), now), _mark(thing), thing.key)
        for layer, thing in things
    )
    show_table(Table(("layer", "kernels", "size", "age", "", "key"), rows, frozenset({2, 3})))


def _kernels(thing: Removable | Quarantined) -> str:
    return " ".join((isinstance(thing, Entry) and thing.kernels) or (_DASH,))


def _mark(thing: Removable | Quarantined) -> str:
    if isinstance(thing, Orphan):
        return "orphan"
    return "stale" if isinstance(thing, Entry) and thing.stale else ""


def _last(thing: Removable | Quarantined) -> float | None:
    if isinstance(thing, Quarantined):
        return thing.moved
    return thing.used if isinstance(thing, Entry) and thing.used is not None else thing.modified


# ---------------------------------------------------------------------- purge


def purge_json(result: PurgeResult) -> dict[str, object]:
    """Spell what a purge did as ``cachectl/purge/1``."""
    return {
        "schema": "cachectl/purge/1",
        "dry_run": result.dry_run,
        "layers": [_outcome_json(outcome, named=result.dry_run) for outcome in result.outcomes],
        "total": {
            "removed": sum(outcome.removed for outcome in result.outcomes),
            "bytes_freed": sum(outcome.bytes_freed for outcome in result.outcomes),
            "skipped": sum(len(outcome.skipped) for outcome in result.outcomes),
            "failed": sum(len(outcome.failed) for outcome in result.outcomes),
        },
    }


def _outcome_json(outcome: Outcome, *, named: bool) -> dict[str, object]:
    things = {
        "entries": [entry_json(thing) for thing in outcome.things if isinstance(thing, Entry)],
        "orphans": [_orphan_json(thing) for thing in outcome.things if isinstance(thing, Orphan)],
    }
    return {
        "layer": outcome.layer,
        "removed": outcome.removed,
        "bytes_freed": outcome.bytes_freed,
        "skipped": [{"key": note.key, "because": note.because} for note in outcome.skipped],
        "failed": [{"key": note.key, "because": note.because} for note in outcome.failed],
        "remade": [str(path) for path in outcome.remade],
        **(things if named else {}),
    }


def _orphan_json(orphan: Orphan) -> dict[str, object]:
    return {
        "key": orphan.key,
        "root": str(orphan.root),
        "bytes": orphan.bytes,
        "files": orphan.files,
        "modified": orphan.modified,
        "because": orphan.why,
    }


def show_purge(result: PurgeResult, now: float) -> None:
    """Print what a purge did, or would do: then each entry as well. Reasons for what was left go to standard error."""
    if any(outcome.things for outcome in result.outcomes):
        _show_things(((outcome.layer, thing) for outcome in result.outcomes for thing in outcome.things), now)
        show_lines([""])
    rows = [
        (outcome.layer, count(outcome.removed), size(outcome.bytes_freed), count(len(outcome.skipped)))
        for outcome in result.outcomes
        if not outcome.failed or outcome.removed
    ]
    if rows:
        total = sum(outcome.removed for outcome in result.outcomes)
        freed = sum(outcome.bytes_freed for outcome in result.outcomes)
        skipped = sum(len(outcome.skipped) for outcome in result.outcomes)
        rows.append(("total", count(total), size(freed), count(skipped)))
        verb = "would go" if result.dry_run else "removed"
        show_table(Table(("layer", verb, "size", "skipped"), tuple(rows), frozenset({1, 2, 3})))
    made = "would be made" if result.dry_run else "is made"
    for outcome in result.outcomes:
        for path in outcome.remade:
            warn(f"{outcome.layer}: {path} {made} again: it had gone, and programs that are running fail without it")
    warn_of_notes(result.outcomes)


def warn_of_notes(outcomes: Iterable[Outcome]) -> None:
    """Print why things were skipped, some of them, and what failed."""
    for outcome in outcomes:
        for note in outcome.skipped[:_MANY]:
            warn(f"{outcome.layer}: skipped {note.key}: {note.because}")
        if len(outcome.skipped) > _MANY:
            warn(f"{outcome.layer}: skipped {len(outcome.skipped) - _MANY} more; --json lists them all")
        for because, keys in _by_reason(outcome.failed).items():
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            warn(f"{outcome.layer}: {'' if keys[0] == '*' else keys[0] + more + ': '}{because}")


def _by_reason(notes: Iterable[Note]) -> dict[str, list[str]]:
    """Gather the keys that failed for one reason: a full disk is one thing to say, however many files lie on it."""
    gathered: dict[str, list[str]] = {}
    for note in notes:
        gathered.setdefault(note.because, []).append(note.key)
    return gathered


_MANY: Final = 3


# ---------------------------------------------------------------------- verify, layers


def findings_json(findings: Iterable[Finding]) -> dict[str, object]:
    """Spell findings as ``cachectl/findings/1``."""
    return {
        "schema": "cachectl/findings/1",
        "findings": [
            {
                "layer": finding.layer,
                "root": str(finding.root),
                "key": finding.key,
                "severity": finding.severity.value,
                "code": finding.code,
                "message": finding.message,
                "fix": finding.fix,
            }
            for finding in findings
        ],
    }


def show_findings(
    findings: Sequence[Finding],
    nothing: str = "no damage found",
    moved: Callable[[Finding], bool] = lambda _: False,
) -> None:
    """Print each finding with its effect and its fix, unless it was ``moved``; or that there is ``nothing``."""
    for finding in findings:
        where = finding.key if finding.key is not None else str(finding.root)
        fix = "moved aside" if moved(finding) else f"fix: {finding.fix}"
        show_lines([f"{finding.layer}: {where}: {finding.message} ({finding.severity.value})", f"  {fix}"])
    if not findings:
        show_lines([nothing])


def unverified_json(unverified: Iterable[Unverified]) -> list[dict[str, object]]:
    """Format what was not checked."""
    return [
        {"layer": one.layer, "what": one.what, "count": one.count, "thing": one.thing, "remedy": one.remedy or None}
        for one in unverified
    ]


def show_unverified(unverified: Sequence[Unverified]) -> None:
    """Print in one line what was not checked, on standard error."""
    if unverified:
        parts = [
            f"{one.what} {one.count:,} {one.thing}{'' if one.count == 1 else 's'}"
            + (f" ({one.remedy})" if one.remedy else "")
            for one in unverified
        ]
        warn(f"not checked: {'; '.join(parts)}")


def verified_json(result: QuarantineResult) -> dict[str, object]:
    """Spell findings, with what was moved aside of them."""
    moved = [
        {
            "layer": outcome.layer,
            "moved": outcome.removed,
            "skipped": [{"key": note.key, "because": note.because} for note in outcome.skipped],
            "failed": [{"key": note.key, "because": note.because} for note in outcome.failed],
        }
        for outcome in result.outcomes
    ]
    return {**findings_json(result.findings), "quarantine": moved}


def show_quarantine(result: QuarantineResult) -> None:
    """Print how many things were moved aside, and why others were not."""
    moved = sum(outcome.removed for outcome in result.outcomes)
    if moved:
        show_lines([f"{moved} moved aside; cachectl restore lists them and brings them back"])
    warn_of_notes(result.outcomes)


def quarantine_json(
    listed: Iterable[Quarantined], restored: Sequence[Restored], *, dry_run: bool = False
) -> dict[str, object]:
    """Return what is in quarantine, and what was or would be brought back, as ``cachectl/quarantine/1``."""
    named = [one.thing for one in restored if dry_run and one.because is None]
    layers = [
        {"layer": layer, "entries": [_restorable_json(thing) for thing in named if thing.layer == layer]}
        for layer in dict.fromkeys(one.thing.layer for one in restored)
    ]
    return {
        "schema": "cachectl/quarantine/1",
        "dry_run": dry_run,
        "quarantine": [_quarantined_json(thing) for thing in listed],
        "restored": [
            {**_quarantined_json(one.thing), "failed": one.because, "trouble": one.trouble} for one in restored
        ],
        **({"layers": layers} if dry_run else {}),
    }


def _restorable_json(thing: Quarantined) -> dict[str, object]:
    # Nothing looks into a damaged thing for the names of its kernels.
    return {"key": thing.key, "root": str(thing.root), "bytes": thing.bytes, "kernels": None, "name": thing.name}


def _quarantined_json(thing: Quarantined) -> dict[str, object]:
    return {
        "name": thing.name,
        "layer": thing.layer,
        "root": str(thing.root),
        "key": thing.key,
        "bytes": thing.bytes,
        "moved": thing.moved,
        "code": thing.code,
        "message": thing.message,
    }


def show_quarantined(things: Sequence[Quarantined], now: float) -> None:
    """Print what is in quarantine, with the name by which it comes back."""
    if not things:
        show_lines(["nothing is in quarantine"])
        return
    for thing in things:
        show_lines(
            [
                f"{thing.name}  {thing.layer}  {size(thing.bytes)}  {age(thing.moved, now)}",
                f"  {thing.key}: {thing.message}",
            ]
        )


def show_restorable(restored: Sequence[Restored], now: float) -> None:
    """Print what would be brought back, and why the rest would not."""
    named = [one.thing for one in restored if one.because is None]
    if named:
        _show_things(((thing.layer, thing) for thing in named), now)
    show_lines([*([""] if named else []), f"{count(len(named))} would come back"])
    for one in restored:
        if one.because is not None:
            warn(f"{one.thing.layer}: {one.thing.name} would stay in quarantine: {one.because}")


def show_restored(restored: Iterable[Restored]) -> None:
    """Print what was brought back, and why the rest was not."""
    for one in restored:
        if one.because is None:
            show_lines([f"{one.thing.layer}: {one.thing.key} is back"])
        else:
            warn(f"{one.thing.layer}: {one.thing.name} stays in quarantine: {one.because}")
        if one.trouble is not None:
            warn(f"{one.thing.layer}: {one.thing.name}: {one.trouble}")


def show_proof(proof: Proof) -> None:
    """Say of each layer what is known of it, and last what follows for all, on standard error."""
    from cachectl.observing.proof import Verdict

    for one in proof.attestations:
        warn(f"proof: {one.layer}: {_attested(one)}")
    for name in proof.left_out:
        warn(f"proof: {name}: stays in use, so nothing is proved of it")
    bad = [
        f"{verdict.value} for {', '.join(names)}"
        for verdict in (Verdict.FAILS, Verdict.UNKNOWN)
        if (names := proof.of(verdict))
    ]
    warn(f"proof {'; '.join(bad) or ('holds' if proof.holds else 'cannot be given: no layer is left to prove it of')}")


def _attested(one: Attestation) -> str:
    from cachectl.observing.proof import Verdict

    if one.verdict is Verdict.FAILS:
        shown = [f"{touch.path} {', '.join(touch.what)}" for touch in one.touches[:_FEW]]
        more = len(one.touches) - len(shown)
        return "; ".join([*shown, *([f"and {more:,} more"] if more else [])])
    files = f"{one.compared:,} file{'' if one.compared == 1 else 's'} compared"
    if one.verdict is Verdict.UNKNOWN:
        return f"no write seen ({files}), but not known to be unread: {'; '.join(one.unknown)}"
    if not one.roots:
        return "keeps nothing in this environment"
    if not one.there:
        verb = "is" if len(one.roots) == 1 else "are"
        return f"not written, not read ({' and '.join(map(str, one.roots))} {verb} not there)"
    return f"not written ({files}), not read ({', '.join(one.means)})"


def layers_json(layers: Iterable[Layer], broken: Iterable[Broken]) -> dict[str, object]:
    """Spell layers and abilities as ``cachectl/layers/1``; an ability is ``null``, or why it is absent."""
    return {
        "schema": "cachectl/layers/1",
        "layers": [
            {
                "layer": layer.name,
                "title": layer.title,
                "scope": layer.scope.value,
                "precious": layer.precious,
                "abilities": {ability.value: reason for ability, reason in layer.abilities().items()},
            }
            for layer in layers
        ],
        "broken": _broken_json(broken),
    }


def show_layers(layers: Sequence[Layer], broken: Iterable[Broken]) -> None:
    """Print which layer can do what, and below why not."""
    import textwrap

    headings = ("layer", *(ability.value for ability in Ability))
    rows = tuple(
        (layer.name, *("no" if reason else "yes" for reason in layer.abilities().values())) for layer in layers
    )
    show_table(Table(headings, rows))
    for layer in layers:
        for ability, reason in layer.abilities().items():
            if reason is not None:
                line = printable(f"{layer.name}: no {ability.value}: {reason}")
                show_lines(textwrap.wrap(line, max(20, _width()), subsequent_indent="  ", break_on_hyphens=False))
    for plugin in broken:
        warn(f"plug-in {plugin.name}: {plugin.why}")


# ---------------------------------------------------------------------- bench


def trace_json(trace: Trace, *, kernels: bool = False, explain: bool = False) -> dict[str, object]:
    """Spell a trace as ``cachectl/trace/1``; unknown numbers are ``null``."""
    document: dict[str, object] = {
        "schema": "cachectl/trace/1",
        "command": list(trace.command),
        "exit_status": trace.exit_status,
        "wall_seconds": trace.wall_seconds,
        "layers": [asdict(layer) for layer in trace.layers],
        "unwatched": [asdict(one) for one in trace.unwatched],
    }
    if kernels:
        document["kernels"] = [asdict(kernel) for kernel in trace.kernels]
    if explain:
        document["misses"] = [asdict(miss) for miss in trace.misses]
    return document


def show_trace(trace: Trace, *, kernels: bool = False, explain: bool = False) -> None:
    """Print on standard error what a run did: standard output is the command's own."""
    with suppress(OSError):
        sys.stderr.flush()
        os.write(2, trace.passed_on)
    rows = tuple(
        (layer.layer, count(layer.hits), count(layer.misses), count(layer.stores), size(layer.bytes), layer.evidence)
        for layer in trace.layers
        if layer.evidence != "none"
    )
    headings = ("layer", "hits", "misses", "stores", "stored", "evidence")
    _tell(plain_table(Table(headings, rows, frozenset({1, 2, 3, 4})), _NARROW))
    unknown = [layer.layer for layer in trace.layers if layer.evidence == "none"]
    if unknown:
        _tell([f"nothing is known of {', '.join(unknown)}"])
    for one in trace.unwatched:
        _tell([f"not counted, for it could not be watched: {one.command} (it used {', '.join(one.layers)})"])
    if kernels:
        built = tuple(
            (f"{kernel.seconds:.3f}", _server(kernel), " ".join(kernel.kernels) or _DASH) for kernel in trace.kernels
        )
        _tell(["", *plain_table(Table(("seconds", "served by", "kernels"), built, frozenset({0})), _NARROW)])
    if explain:
        _tell(["", *(f"{miss.layer}: {' '.join(miss.kernels) or _DASH}: {miss.because}" for miss in trace.misses)])


def _server(kernel: KernelTrace) -> str:
    return kernel.served_by or ("compiled" if kernel.compiled else _DASH)


def _tell(lines: Iterable[str]) -> None:
    with suppress(OSError):
        for line in lines:
            print(printable(line), file=sys.stderr)


def bench_json(bench: Bench) -> dict[str, object]:
    """Spell a comparison as ``cachectl/bench/1``."""
    machine = bench.machine
    return {
        "schema": "cachectl/bench/1",
        "command": list(bench.command),
        "exit_status": 0,
        "started": bench.started,
        "settings": [
            {
                "setting": one.setting,
                "layer": one.layer,
                "how": one.how,
                "seconds": list(one.seconds),
                "median": one.median,
            }
            for one in bench.settings
        ],
        "saved_by_layer": [
            {"layer": one.layer, "seconds": one.seconds, "by_round": list(one.by_round), "entries": one.entries}
            for one in bench.saved
        ],
        "not_used": [{"layer": one.layer, "why": one.why} for one in bench.unused],
        "machine": {
            "cpu": machine.cpu,
            "cpus": machine.cpus,
            "gpus": list(machine.gpus),
            "system": machine.system,
            "drivers": list(machine.drivers),
        },
        "versions": dict(bench.versions),
    }


def show_bench(bench: Bench) -> None:
    """Print what each setting took, then what each layer saves."""
    rows = tuple(
        (f"{one.median:.2f}", f"{min(one.seconds):.2f}", f"{max(one.seconds):.2f}", one.setting, one.how)
        for one in bench.settings
    )
    show_table(Table(("median s", "fastest", "slowest", "setting", "how"), rows, frozenset({0, 1, 2})))
    show_lines([""])
    if bench.saved:
        saved = tuple(
            (*map(_difference, (one.seconds, min(one.by_round), max(one.by_round))), one.layer) for one in bench.saved
        )
        show_table(Table(("saves s", "least", "most", "layer"), saved, frozenset({0, 1, 2})))
    else:
        show_lines(["the command fills no cache"])
    unused = ", ".join(one.layer for one in bench.unused)
    if unused:
        import textwrap

        show_lines(["", *textwrap.wrap(f"not used: {unused}", _width())])


def _difference(seconds: float) -> str:
    # No minus before a zero.
    return f"{round(seconds, 2) or 0.0:+.2f}"
