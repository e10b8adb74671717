"""``cachectl dir``: the places of caches, one a line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import FAILURES
from cachectl.layers.base.facts import Problem, Root
from cachectl.options import LAYERS, ROOT, Request
from cachectl.table import Raw

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

OPTIONS: Final = (LAYERS, ROOT)
EPILOG: Final = "Without LAYER, places that do not exist are left out."


def places(layers: Iterable[Layer], *, missing: bool = False) -> tuple[Path, ...]:
    """Return the main root of each layer if it exists, or is to be shown ``missing``, and other roots with content.

    A fallback may be a folder such as ``/tmp``, which is a place of the layer only if something of it lies there.
    """
    found: dict[Path, None] = {}
    for layer in layers:
        for number, root in enumerate(layer.roots()):
            if _holds_anything(layer, root) if number else root.exists or missing:
                found[root.path] = None
    return tuple(found)


def _holds_anything(layer: Layer, root: Root) -> bool:
    try:
        return any(not isinstance(thing, Problem) for thing in layer.store.scan(root, contents=False))
    except FAILURES:
        # The program that made it unreadable keeps something there.
        return True


def run(request: Request) -> Raw:
    """Carry out ``cachectl dir``."""
    layers = request.options.layers
    return Raw(map(str, places(request.stack.named(layers), missing=bool(layers))))
