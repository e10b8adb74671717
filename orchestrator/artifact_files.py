"""``cachectl get`` and ``cachectl put``: one entry as a file."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from cachectl.exchange.place import STREAM
from cachectl.layers.base.errors import LayerError, NotAnArtifact
from cachectl.layers.base.limits import LARGEST_ARTIFACT
from cachectl.layers.stores.archive import artifact_from_bytes, artifact_to_bytes

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer


def get_artifact(layer: Layer, key: str) -> bytes:
    """Return the entry of a key as the bytes of a file. Raises :class:`LayerError` if there is none."""
    artifact = layer.get(key)
    if artifact is None:
        raise LayerError(layer.name, f"no entry has the key {key!r}; cachectl ls {layer.name} lists keys")
    return artifact_to_bytes(artifact)


def put_artifact(layer: Layer, key: str, data: bytes, *, replace: bool = False) -> None:
    """Place an entry that :func:`get_artifact` returned, so that the library hits it."""
    layer.put(key, artifact_from_bytes(data), replace=replace)


def read_artifact(file: str) -> bytes:
    """Read a file that holds an artifact, or standard input (``-``).

    Raises :class:`NotAnArtifact` for more bytes than any artifact has, and :class:`OSError`.
    """
    whole = io.BytesIO()
    try:
        with nullcontext(sys.stdin.buffer) if file == STREAM else open(file, "rb") as source:
            while whole.tell() <= LARGEST_ARTIFACT and (piece := source.read(1 << 20)):
                whole.write(piece)
    except OSError as error:
        error.filename = "standard input" if file == STREAM else file
        raise
    if whole.tell() > LARGEST_ARTIFACT:
        message = f"{file}: has more than the {LARGEST_ARTIFACT:,} bytes of the largest artifact; give what get wrote"
        raise NotAnArtifact(message)
    return whole.getvalue()
