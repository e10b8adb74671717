"""A report as one self-contained HTML page: a map of the entries, their ages and sizes, findings, and every entry."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.texts import printable
from cachectl.pages.skeleton import Words, build_page

if TYPE_CHECKING:
    from cachectl.inspecting.doctor import Diagnosis
    from cachectl.inspecting.entries import Listing
    from cachectl.inspecting.report import LayerReport, Report
    from cachectl.layers.base.facts import Entry, Finding

#: Most bytes of a document that is shown on a page.
_LARGEST: Final = 1 << 26


def page(
    report: Report, listing: Listing, diagnosis: Diagnosis, *, bench: str | None = None, trace: str | None = None
) -> bytes:
    """Return the page of a report, its entries and its findings.

    ``bench`` and ``trace`` are files that those verbs wrote as JSON. Raises :class:`BadRequest` for other files.
    """
    words = Words()
    damage = {(one.layer, str(one.root), one.key): one.message for one in diagnosis.findings if one.thing is not None}
    data = {
        "generated": report.generated,
        "complete": report.complete,
        "total": [report.entries, report.bytes],
        "layers": [_layer_row(layer) for layer in report.layers],
        # Entries that only share a folder are in no total.
        "entries": [_entry_row(entry, words, damage) for entry in listing.entries if entry.guest is None],
        "missing": [f"{trouble.layer}: {printable(trouble.message)}" for trouble in listing.problems if trouble.failed],
        "findings": [_finding_row(finding) for finding in diagnosis.findings],
        "bench": None if bench is None else _document(bench, "bench", _bench),
        "trace": None if trace is None else _document(trace, "trace", _trace),
        "words": list(words),
    }
    return build_page("report", "cachectl report", data)


def _layer_row(layer: LayerReport) -> list[object]:
    orphans = [root.usage.orphan_bytes for root in layer.roots]
    return [
        layer.layer,
        layer.title,
        layer.state.condition.value,
        layer.state.why,
        layer.entries,
        layer.bytes,
        layer.stale_entries,
        layer.stale_bytes,
        None if None in orphans else sum(size or 0 for size in orphans),
        [printable(root.root.path) for root in layer.roots if root.exists],
    ]


def _entry_row(entry: Entry, words: Words, damage: Mapping[tuple[str, str, str | None], str]) -> list[object]:
    """Return an entry as the script reads it: texts that repeat by their numbers among the words."""
    wrong = damage.get((entry.layer, str(entry.root), entry.key))
    # A row has no time of its own: its file bounds it.
    changed = entry.written_before if entry.modified is None else entry.modified
    return [
        words[entry.layer],
        words[_place_of(entry)],
        None if not entry.kernels else words[", ".join(map(printable, entry.kernels))],
        printable(entry.key),
        entry.bytes,
        None if changed is None else round(changed),
        None if entry.used is None else round(entry.used),
        None if not entry.stale else words[printable(entry.stale_because or "no known Python or driver can hit it")],
        None if wrong is None else words[printable(wrong)],
    ]


def _place_of(entry: Entry) -> str:
    """Return the device or the Python that an entry is for, else the versions that it names."""
    if entry.device:
        return printable(entry.device)
    if python := entry.versions.get("python"):
        return f"Python {'.'.join(python.split('.')[:3])}"
    return ", ".join(f"{name} {printable(version)}" for name, version in entry.versions.items()) or "device unknown"


def _finding_row(finding: Finding) -> list[str]:
    where = printable(finding.root)
    return [finding.layer, finding.severity.value, where, printable(finding.message), printable(finding.fix)]


# ---------------------------------------------------------------------- documents of other verbs


def _document(file: str, verb: str, read: Callable[[Mapping[str, Any]], dict[str, object]]) -> dict[str, object]:
    """Return what the page shows of a document. Raises :class:`BadRequest` if it is not one of the verb."""
    with open(file, "rb") as stream:
        data = stream.read(_LARGEST)
    try:
        document = json.loads(data, parse_constant=_refuse)
        if document["schema"] != f"cachectl/{verb}/1":
            _refuse(document["schema"])
        return read(document)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        message = f"{printable(file)} was not written by cachectl {verb}: make it with cachectl {verb} --json FILE"
        raise BadRequest(message) from error


def _refuse(what: object) -> NoReturn:
    """Raise :class:`ValueError`, also for the numbers that JSON does not have."""
    raise ValueError(what)


def _bench(document: Mapping[str, Any]) -> dict[str, object]:
    def row(name: str, seconds: Iterable[float], middle: float) -> list[object]:
        each = [float(one) for one in seconds]
        return [printable(name), float(middle), min(each), max(each)]

    return {
        "command": _command(document),
        "started": float(document["started"]),
        "settings": [row(one["setting"], one["seconds"], one["median"]) for one in document["settings"]],
        "saved": [row(one["layer"], one["by_round"], one["seconds"]) for one in document["saved_by_layer"]],
    }


def _trace(document: Mapping[str, Any]) -> dict[str, object]:
    def row(one: Mapping[str, Any]) -> list[object]:
        counts = [None if one[name] is None else int(one[name]) for name in ("hits", "misses", "stores", "bytes")]
        return [printable(one["layer"]), *counts, printable(one["evidence"])]

    return {
        "command": _command(document),
        "wall": float(document["wall_seconds"]),
        "layers": [row(one) for one in document["layers"]],
    }


def _command(document: Mapping[str, Any]) -> str:
    return printable(shlex.join(document["command"]))
