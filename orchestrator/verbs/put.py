"""``cachectl put``: place an entry that ``get`` wrote, so that the library hits it."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext

from cachectl import verbs
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.limits import LARGEST_ARTIFACT
from cachectl.layers.core.layer import require_known

EXAMPLE = "cachectl put pocl 2f1c9a0b77de program.tar"
OPTIONS = (
    verbs.ONE_LAYER,
    verbs.KEY,
    ("file", "FILE", "a file written by get, or - for standard input"),
    ("--replace", "replace a different entry with that key"),
    verbs.ROOT,
    verbs.WAIT,
    verbs.SHARED,
)


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl put``. Raises :class:`CachectlError` for a file larger than any artifact."""
    from cachectl.layers.stores.archive import artifact_from_bytes

    options, content = request.options, io.BytesIO()
    file = options.file
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as source:
            # A single read would allocate memory for the largest artifact.
            while content.tell() <= LARGEST_ARTIFACT and (piece := source.read(1 << 20)):
                content.write(piece)
    except OSError as error:
        error.filename = "standard input" if file == "-" else file
        raise
    if content.tell() > LARGEST_ARTIFACT:
        raise CachectlError(f"{file}: larger than any artifact ({LARGEST_ARTIFACT:,} bytes); give a file of get")
    layer = request.stack[options.layer]
    require_known(layer, options.key)
    layer.put(options.key, artifact_from_bytes(content.getvalue()), replace=options.replace)
    return 0
