"""``cachectl get``: write one entry to a file."""

from __future__ import annotations

from cachectl import verbs
from cachectl.layers.base.errors import LayerError
from cachectl.layers.core.layer import require_known

EXAMPLE = "cachectl get pocl 2f1c9a0b77de --output program.tar"
OPTIONS = (
    verbs.ONE_LAYER,
    verbs.KEY,
    ("-o --output", "FILE", "the file to write (default: standard output)", {"default": "-"}),
    verbs.ROOT,
    verbs.FORCE,
)


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl get``. Raises :class:`LayerError` if no entry has the key."""
    from cachectl.layers.stores.archive import artifact_to_bytes
    from cachectl.show.output_files import ARTIFACT

    options, layer = request.options, request.stack[request.options.layer]
    (file,) = request.outputs((options.output, ARTIFACT))
    artifact = layer.get(options.key)
    if artifact is None:
        require_known(layer, options.key)
        raise LayerError(layer.name, f"no entry has the key {options.key!r}; cachectl ls {layer.name} lists keys")
    file.write((artifact_to_bytes(artifact),))
    return 0
