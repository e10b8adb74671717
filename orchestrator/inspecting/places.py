"""``cachectl dir``: the places of caches, each once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers.base.errors import FAILURES
from cachectl.layers.base.facts import Problem, Root

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer


def places(layers: Iterable[Layer], *, missing: bool) -> tuple[Path, ...]:
    """Return the main root of each layer if it exists, or is to be shown ``missing``, and other roots with content.

    A fallback may be a folder such as ``/tmp``, which is a place of the layer only if something of it lies there.
    """
    found: dict[Path, None] = {}
    for layer in layers:
        for number, root in enumerate(layer.roots()):
            if (root.exists or missing) if not number else _holds_anything(layer, root):
                found[root.path] = None
    return tuple(found)


def _holds_anything(layer: Layer, root: Root) -> bool:
    try:
        return any(not isinstance(thing, Problem) for thing in layer.scan(root, contents=False))
    except FAILURES:
        # The program that made it unreadable keeps something there.
        return True
