"""``cachectl dir``: the places of caches, one a line."""

from __future__ import annotations

from cachectl import layer_set, verbs
from cachectl.layers.base.errors import reason_of
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Root

EXAMPLE = "cachectl dir pocl"
OPTIONS = (verbs.LAYERS, verbs.ROOT)
EPILOG = "Without LAYER, places that do not exist are excluded."


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl dir``: the roots that exist, each once, and the main root of each layer that is named.

    The temporary folder, a fallback of some libraries, is no place of a cache.
    """
    names = request.options.layers
    main: dict[Layer, Root] = {}

    def shown(layer: Layer, root: Root) -> list[str]:
        is_named = main.setdefault(layer, root) is root and names
        return [str(root.path)] if is_named or (root.exists and root.path != layer.environment.temporary) else []

    paths: dict[str, None] = {}
    status = 0
    for layer, _, place in layer_set.in_each_root(request.stack.named(names), shown, lambda layer: layer.roots()):
        if isinstance(place, str):
            paths[place] = None
        else:
            request.notice(f"{layer.name}: {reason_of(place)}")
            status = 1
    request.output.show_raw(paths)
    return status
