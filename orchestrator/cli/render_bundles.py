"""Exports and imports as text and as JSON; :mod:`cachectl.cli.render` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Final

from cachectl.cli.render import Table, count, entry_json, show_entries, show_lines, show_table, size, warn
from cachectl.cluster.rank_roots import MergedLayer
from cachectl.layers.base.facts import Note
from cachectl.layers.base.selection import moment_text
from cachectl.moving.exporting import Export, ExportedLayer
from cachectl.moving.importing import Import, ImportedLayer

#: How many keys of a kind are named; JSON has them all.
_FEW: Final = 5


def export_json(done: Export) -> dict[str, object]:
    """Spell an export as ``cachectl/export/1``."""
    return {
        "schema": "cachectl/export/1",
        "file": None if done.sha256 is None else done.file,
        "bytes": done.bytes,
        "sha256": done.sha256,
        "signature": done.signature,
        "layers": [
            {
                "layer": layer.layer,
                "entries": layer.entries,
                "bytes": layer.bytes,
                "fingerprint": dict(layer.fingerprint),
                "sensitive": layer.sensitive,
                "writable_by_others": [str(folder) for folder in layer.exposed],
                "skipped": _notes(layer.skipped),
                "failed": _notes(layer.failed),
            }
            for layer in done.layers
        ],
        "total": {
            "entries": done.entries,
            "bytes": sum(layer.bytes for layer in done.layers),
            "skipped": sum(len(layer.skipped) for layer in done.layers),
            "failed": sum(len(layer.failed) for layer in done.layers),
        },
    }


def show_export(done: Export) -> None:
    """Print what was exported, its sum, and what its reader will learn."""
    if done.sha256 is None:
        warn(f"no entry to export in {', '.join(layer.layer for layer in done.layers)}; {_nothing_written(done)}")
        _warn_of_export(done)
        return
    rows = [(layer.layer, count(layer.entries), size(layer.bytes)) for layer in done.layers if layer.entries]
    rows.append(("total", count(done.entries), size(sum(layer.bytes for layer in done.layers))))
    show_table(Table(("layer", "entries", "size"), tuple(rows), frozenset({1, 2})))
    show_lines(["", f"{done.file}: {size(done.bytes)}", f"SHA-256 {done.sha256}"])
    if done.signature is not None:
        show_lines([f"signed: {done.signature}"])
    _warn_of_export(done)


def _nothing_written(done: Export) -> str:
    return "nothing was written" if done.file == "-" else f"{done.file} was not written"


def _warn_of_export(done: Export) -> None:
    for layer in done.layers:
        for line in _warnings(layer):
            warn(f"{layer.layer}: {line}")


def _warnings(layer: ExportedLayer) -> Iterator[str]:
    if layer.sensitive is not None:
        yield f"the bundle holds {layer.sensitive}"
    for folder in layer.exposed:
        yield f"others can write to {folder}, and may have put code there"
    yield from _named(layer.skipped, "not exported")
    yield from _named(layer.failed, "failed")


def import_json(done: Import) -> dict[str, object]:
    """Spell an import as ``cachectl/import/1``."""
    return {
        "schema": "cachectl/import/1",
        "dry_run": done.dry_run,
        "file": done.file,
        "sha256": done.sha256,
        "trusted": done.trusted,
        "made": done.made,
        "layers": [
            {**_layer_json(layer), **({"entries": list(map(entry_json, layer.entries))} if done.dry_run else {})}
            for layer in done.layers
        ],
        "total": {
            "placed": sum(layer.placed for layer in done.layers),
            "bytes": sum(layer.bytes for layer in done.layers),
            "there": sum(layer.there for layer in done.layers),
            "cannot_hit": sum(layer.useless for layer in done.layers),
            "kept": sum(len(layer.kept) for layer in done.layers),
            "failed": sum(len(layer.failed) for layer in done.layers),
        },
    }


def _layer_json(layer: ImportedLayer) -> dict[str, object]:
    return {
        "layer": layer.layer,
        "placed": layer.placed,
        "bytes": layer.bytes,
        "there": layer.there,
        "cannot_hit": layer.useless,
        "kept": _notes(layer.kept),
        "failed": _notes(layer.failed),
        "outlook": [
            {"hits": one.outlook.hits, "because": one.outlook.because, "entries": one.entries} for one in layer.foreseen
        ],
        "differences": [asdict(one) for one in layer.differences],
        "writable_by_others": layer.exposed,
    }


def _notes(notes: Iterable[Note]) -> list[dict[str, str]]:
    return [{"key": note.key, "because": note.because} for note in notes]


def show_import(done: Import, now: float) -> None:
    """Print what was, or would be, placed; what can be expected of it; and what was not placed, with the reason."""
    if any(layer.entries for layer in done.layers):
        show_entries((entry for layer in done.layers for entry in layer.entries), now)
        show_lines([""])
    rows = tuple(
        (
            layer.layer,
            count(layer.placed),
            size(layer.bytes),
            count(layer.there),
            count(len(layer.kept)),
            count(layer.useless),
            count(len(layer.failed)),
        )
        for layer in done.layers
    )
    placed = "would place" if done.dry_run else "placed"
    headings = ("layer", placed, "size", "there", "differ", "cannot hit", "failed")
    show_table(Table(headings, rows, frozenset(range(1, 7))))
    made = "unknown, only a signed bundle says" if done.made is None else moment_text(done.made)
    show_lines(["", f"trusted: {done.trusted}", f"made: {made}"])
    for layer in done.layers:
        show_lines(f"{layer.layer}: {count(one.entries)} {one.outlook.words}" for one in layer.foreseen)
        if layer.exposed:
            warn(f"{layer.layer}: others could write to its folder where the bundle was made")
        for line in (*_named(layer.kept, "kept"), *_named(layer.failed, "failed")):
            warn(f"{layer.layer}: {line}")


def merge_json(done: Sequence[MergedLayer]) -> dict[str, object]:
    """Spell a merge of roots as ``cachectl/merge/1``."""
    return {
        "schema": "cachectl/merge/1",
        "layers": [
            {
                "layer": layer.layer,
                "placed": layer.placed,
                "bytes": layer.bytes,
                "there": layer.there,
                "kept": _notes(layer.kept),
                "failed": _notes(layer.failed),
            }
            for layer in done
        ],
        "total": {
            "placed": sum(layer.placed for layer in done),
            "bytes": sum(layer.bytes for layer in done),
            "there": sum(layer.there for layer in done),
            "kept": sum(len(layer.kept) for layer in done),
            "failed": sum(len(layer.failed) for layer in done),
        },
    }


def show_merge(done: Sequence[MergedLayer]) -> None:
    """Print what was placed of each layer, and what was not, with the reason."""
    if not done:
        show_lines(["nothing is there"])
        return
    rows = tuple(
        (
            layer.layer,
            count(layer.placed),
            size(layer.bytes),
            count(layer.there),
            count(len(layer.kept)),
            count(len(layer.failed)),
        )
        for layer in done
    )
    show_table(Table(("layer", "placed", "size", "there", "differ", "failed"), rows, frozenset(range(1, 6))))
    for layer in done:
        if layer.kept:
            # Drivers seldom compile the same bytes twice: where ranks share kernels, this is most of them.
            warn(f"{layer.layer}: {len(layer.kept)} differ from the one of the same key that was first, which stays")
        for line in _named(tuple(layer.failed), "failed"):
            warn(f"{layer.layer}: {line}")


def _named(notes: tuple[Note, ...], what: str) -> Iterator[str]:
    for note in notes[:_FEW]:
        yield f"{what}: {note.key}: {note.because}"
    if len(notes) > _FEW:
        yield f"{what}: {len(notes) - _FEW} more; --json names all"
