"""``cachectl dir``: print the folders of caches, one per line."""

from __future__ import annotations

from cachectl import layer_set, verbs
from cachectl.layers.base.errors import reason_of
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Root

EXAMPLE = "cachectl dir pocl"
OPTIONS = (verbs.LAYERS, verbs.ROOT)
EPILOG = "Without LAYER, only folders that exist are printed."


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl dir``: print each existing root once, and the first root of each named layer.

    The temporary folder, a fallback of some libraries, is not printed.
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
