"""A report as one self-contained HTML page: a map of the entries, their ages and sizes, findings, and every entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cachectl.layers.base.errors import printable
from cachectl.layers.base.facts import Entry, Finding
from cachectl.listing import Listing
from cachectl.pages.skeleton import Words, build_page


def report_page(report: Mapping[str, object], listing: Listing, findings: Iterable[Finding]) -> bytes:
    """Return the page of a report: its sums and the names of its layers, its entries and its findings."""
    words = Words()
    data = {
        **report,
        # Entries that only share a folder are in no total.
        "entries": [_entry_row(entry, words) for entry in listing.entries if entry.guest is None],
        "missing": [f"{trouble.layer}: {printable(trouble.message)}" for trouble in listing.problems if trouble.failed],
        "findings": [_finding_row(finding) for finding in findings],
        "words": list(words),
    }
    return build_page("report", "cachectl report", data)


def _entry_row(entry: Entry, words: Words) -> list[object]:
    """Return an entry as the script reads it: texts that repeat by their numbers among the words."""
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
