"""``cachectl dir``: the places of caches, one a line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.options import LAYERS, ROOT, Request
from cachectl.table import Raw

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

OPTIONS: Final = (LAYERS, ROOT)
EPILOG: Final = "Without LAYER, places that do not exist are left out."


def places(layers: Iterable[Layer], *, missing: bool = False) -> tuple[Path, ...]:
    """Return the roots that exist, each once, and the main root of each layer also if it is ``missing``.

    The temporary folder, a fallback of some libraries, is no place of a cache.
    """
    found: dict[Path, None] = {}
    for layer in layers:
        for number, root in enumerate(layer.roots()):
            if (missing and not number) or (root.exists and root.path != layer.environment.temporary):
                found[root.path] = None
    return tuple(found)


def run(request: Request) -> Raw:
    """Carry out ``cachectl dir``."""
    layers = request.options.layers
    return Raw(map(str, places(request.stack.named(layers), missing=bool(layers))))
