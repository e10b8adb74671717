"""The page of ``report --html``: the report, every entry, and every finding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cachectl import pages
from cachectl.layers.base.environment import python_release
from cachectl.layers.base.text import plural, printable
from cachectl.layers.core.entry import Entry
from cachectl.layers.core.finding import Finding
from cachectl.listing import Listing

#: How many of the largest kernels and entries a page lists; smaller entries are summed.
_MOST_KERNELS, _MOST_ENTRIES = 1_000, 5_000


def draw(head: Mapping[str, object], listed: Listing, findings: Iterable[Finding]) -> bytes:
    """Return the page.

    ``head`` has the time at which the report was ``generated`` (epoch seconds), the names of its ``layers``, the
    ``total`` of entries, of bytes and of stale bytes, with whether the last is known, and whether it is ``complete``.
    """
    words = pages.numbered()
    # Entries that only share a folder are in no total.
    entries = sorted((entry for entry in listed.entries if not entry.is_foreign), key=lambda entry: -entry.bytes)
    rows: list[list[object]] = []
    for entry in entries[:_MOST_ENTRIES]:
        # A row of a database has no time, but its file has an upper bound.
        changed = entry.written_before if entry.modified is None else entry.modified
        times = [None if moment is None else round(moment) for moment in (changed, entry.used)]
        kernels = words[", ".join(map(printable, entry.details.kernels))] if entry.details.kernels else None
        rows.append([*_group_of(entry, words), kernels, printable(entry.key), entry.bytes, *times, 1])
    smaller: dict[tuple[int | None, ...], list[int]] = {}
    for entry in entries[_MOST_ENTRIES:]:
        smaller.setdefault(_group_of(entry, words), []).append(entry.bytes)
    for group, sizes in smaller.items():
        name = plural(len(sizes), "smaller entry", "smaller entries")
        rows.append([*group, None, name, sum(sizes), None, None, len(sizes)])
    data = {
        **head,
        "kernels": [
            [
                ", ".join(map(printable, kernel.kernels)) or None,
                ", ".join(kernel.layers),
                kernel.bytes,
                kernel.entries,
                kernel.used or kernel.modified,
            ]
            for kernel in listed.kernels[:_MOST_KERNELS]
        ],
        "entries": rows,
        "missing": [f"{trouble.layer}: {printable(trouble.message)}" for trouble in listed.problems if trouble.failed],
        "findings": [
            [*map(printable, (finding.layer, finding.severity.value, finding.root, finding.message, finding.fix))]
            for finding in findings
        ],
        # Rows contain the numbers of repeated texts.
        "words": list(words),
    }
    return pages.build_page("report", "cachectl report", data)


def _group_of(entry: Entry, words: Mapping[str, int]) -> tuple[int | None, ...]:
    """Return the numbers of an entry's layer, of its target, and of the reason why it is stale."""
    because = printable(entry.because or "nothing here can hit it") if entry.stale else None
    return words[entry.layer], words[_target_of(entry)], None if because is None else words[because]


def _target_of(entry: Entry) -> str:
    """Return the device or the Python of an entry, else the versions that it names."""
    if entry.details.device:
        return printable(entry.details.device)
    if python := entry.details.versions.get("python"):
        return f"Python {python_release(python)}"
    versions = (f"{name} {printable(version)}" for name, version in entry.details.versions.items())
    return ", ".join(versions) or "device unknown"
