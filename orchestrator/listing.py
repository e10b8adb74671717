"""Entries in the order a user asked for, damage across layers, and a file written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.errors import BadRequest, LayerError
from cachectl.layers.facts import Entry, Finding, Root, Severity

if TYPE_CHECKING:
    from cachectl.layers.layer import Layer


def ordered(entries: Iterable[Entry], *, sort: str | None, limit: int | None) -> list[Entry]:
    """Return entries largest, oldest or longest unused first, no more than ``limit``; unknown times come last."""
    if limit is not None and limit < 0:
        message = f"--limit {limit} is less than nothing"
        raise BadRequest(message)
    listed = list(entries)
    if sort == "size":
        listed.sort(key=lambda entry: -entry.bytes)
    elif sort == "age":
        listed.sort(key=lambda entry: _or_last(entry.modified))
    elif sort == "used":
        listed.sort(key=lambda entry: _or_last(entry.used))
    return listed[:limit]


def findings(layers: Iterable[Layer]) -> list[Finding]:
    """Collect what is damaged in every root of the given layers."""
    return [finding for layer in layers for root in layer.roots() for finding in _verified(layer, root)]


def _verified(layer: Layer, root: Root) -> Iterator[Finding]:
    try:
        yield from layer.verify(root)
    except (LayerError, OSError) as error:
        message = error.message if isinstance(error, LayerError) else str(error.strerror or error)
        yield Finding(layer.name, root.path, None, Severity.FAILS, "unreadable", message, f"make {root.path} readable")


def write_file(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it in, so that half of one is never seen."""
    stage = path.with_name(f".{path.name}.{os.getpid()}.cachectl")
    try:
        stage.write_bytes(data)
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)


def _or_last(moment: float | None) -> float:
    return float("inf") if moment is None else moment
