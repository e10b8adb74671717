"""MIOpen's files as text and as JSON: what was made to be installed, and what was merged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cachectl.cli.render import Table, count, show_lines, show_table, size, warn
from cachectl.layers.base.errors import printable
from cachectl.layers.base.facts import Note
from cachectl.layers.miopen.exporting import FilesExport
from cachectl.layers.miopen.merging import Merge

#: How many of a kind are named; JSON has them all.
_FEW: Final = 5


def export_json(done: FilesExport) -> dict[str, object]:
    """Spell what was written to be installed as ``cachectl/miopen-export/1``."""
    return {
        "schema": "cachectl/miopen-export/1",
        "folder": str(done.folder),
        "files": [
            {
                "file": str(file.file),
                "source": str(file.source),
                "entries": file.entries,
                "from_system": file.from_system,
                "bytes": file.bytes,
            }
            for file in done.files
        ],
        "skipped": _notes(done.skipped),
        "failed": _notes(done.failures),
        "hints": _notes(done.hints),
    }


def show_export(done: FilesExport) -> None:
    """Print what was written, and what was not."""
    rows = tuple(
        (file.file.name, count(file.entries), count(file.from_system), size(file.bytes)) for file in done.files
    )
    show_table(Table(("file", "entries", "of the system's", "size"), rows, frozenset({1, 2, 3})))
    show_lines(["", f"in {done.folder}"])
    _warn(done.skipped, "not exported")
    _warn(done.failures, "failed")
    _warn(done.hints, "note")


def merge_json(done: Merge) -> dict[str, object]:
    """Spell a merge as ``cachectl/miopen-merge/1``."""
    return {
        "schema": "cachectl/miopen-merge/1",
        "into": str(done.into),
        "files": [
            {
                "file": str(file.file),
                "added": file.added,
                "there": file.there,
                "conflicts": _notes(file.conflicts),
                "failed": _notes(file.failures),
            }
            for file in done.files
        ],
        "total": {
            "added": sum(file.added for file in done.files),
            "there": sum(file.there for file in done.files),
            "conflicts": sum(len(file.conflicts) for file in done.files),
            "failed": sum(len(file.failures) for file in done.files),
        },
    }


def show_merge(done: Merge) -> None:
    """Print what each file brought, and what differs."""
    rows = tuple(
        (str(file.file), count(file.added), count(file.there), count(len(file.conflicts)), count(len(file.failures)))
        for file in done.files
    )
    show_table(Table(("file", "added", "there", "differ", "failed"), rows, frozenset(range(1, 5))))
    show_lines(["", f"into {done.into}"])
    for file in done.files:
        _warn(file.conflicts, f"{file.file.name}: kept")
        _warn(file.failures, f"{file.file.name}: failed")


def _notes(notes: Iterable[Note]) -> list[dict[str, str]]:
    return [{"key": note.key, "because": note.because} for note in notes]


def _warn(notes: tuple[Note, ...], what: str) -> None:
    for note in notes[:_FEW]:
        warn(f"{what}: {printable(note.key)}: {note.because}")
    if len(notes) > _FEW:
        warn(f"{what}: {len(notes) - _FEW} more; --json names all")
