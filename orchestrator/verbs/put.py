"""``cachectl put``: place an entry that ``get`` wrote, so that the library hits it."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from cachectl.layers.base import errors
from cachectl.options import KEY, ONE_LAYER, ROOT, SHARED, WAIT, Option, Request

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

OPTIONS: Final = (
    ONE_LAYER,
    KEY,
    Option("file", metavar="FILE", help="a file that get wrote, or - for standard input"),
    Option("--replace", action="store_true", help="replace a different entry of that key"),
    ROOT,
    WAIT,
    SHARED,
)


def put_artifact(layer: Layer, key: str, data: bytes, *, replace: bool = False) -> None:
    """Place an entry from the bytes of a file."""
    from cachectl.layers.stores.archive import artifact_from_bytes

    layer.put(key, artifact_from_bytes(data), replace=replace)


def run(request: Request) -> int:
    """Carry out ``cachectl put``."""
    options = request.options
    data = _read(options.file)
    put_artifact(request.stack[options.layer], options.key, data, replace=options.replace)
    return 0


def _read(file: str) -> bytes:
    """Read a file, or standard input. Raises :class:`CachectlError` for one that is too large, and :class:`OSError`."""
    whole = io.BytesIO()
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as source:
            while whole.tell() <= errors.LARGEST_ARTIFACT and (piece := source.read(1 << 20)):
                whole.write(piece)
    except OSError as error:
        error.filename = "standard input" if file == "-" else file
        raise
    if whole.tell() > errors.LARGEST_ARTIFACT:
        raise errors.CachectlError(
            f"{file}: has more than the {errors.LARGEST_ARTIFACT:,} bytes of the largest artifact; give what get wrote"
        )
    return whole.getvalue()
