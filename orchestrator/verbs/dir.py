"""``cachectl dir``: the places of caches, one a line."""

from __future__ import annotations

from cachectl import verbs

EXAMPLE = "cachectl dir pocl"
OPTIONS = (verbs.LAYERS, verbs.ROOT)
EPILOG = "Without LAYER, places that do not exist are left out."


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl dir``: the roots that exist, each once, and the main root of each layer that is named.

    The temporary folder, a fallback of some libraries, is no place of a cache.
    """
    names = request.options.layers
    paths: dict[str, None] = {}
    for layer in request.stack.named(names):
        for number, root in enumerate(layer.roots()):
            if (names and not number) or (root.exists and root.path != layer.environment.temporary):
                paths[str(root.path)] = None
    request.output.show_raw(paths)
    return 0
