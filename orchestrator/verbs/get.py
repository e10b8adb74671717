"""``cachectl get``: write one entry to a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import LayerError
from cachectl.options import FORCE, KEY, ONE_LAYER, ROOT, Option, Request

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

OPTIONS: Final = (
    ONE_LAYER,
    KEY,
    Option("-o", "--output", default="-", metavar="FILE", help="the file to write (default: standard output)"),
    ROOT,
    FORCE,
)


def get_artifact(layer: Layer, key: str) -> bytes:
    """Return the entry of a key as the bytes of a file. Raises :class:`LayerError` if there is none."""
    from cachectl.layers.stores.archive import artifact_to_bytes

    artifact = layer.get(key)
    if artifact is None:
        raise LayerError(layer.name, f"no entry has the key {key!r}; cachectl ls {layer.name} lists keys")
    return artifact_to_bytes(artifact)


def run(request: Request) -> bytes | int:
    """Carry out ``cachectl get``."""
    from cachectl.output_files import ARTIFACT

    options = request.options
    layer = request.stack[options.layer]
    file = request.output_file(options.output, ARTIFACT)
    file.demand()
    data = get_artifact(layer, options.key)
    if options.output == "-":
        return data
    file.write((data,))
    return 0
