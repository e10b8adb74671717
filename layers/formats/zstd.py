"""zstd from Python's standard library since 3.14, or its backport; imported only by functions that need it.

:exc:`ImportError` means that a Python of 3.14 or later was built without zstd.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZstdError = zstd.ZstdError
ZstdFile = zstd.ZstdFile
compress = zstd.compress
#: The binary logarithm of the largest window of a decompressor: data that needs a larger one is refused.
_LARGEST_WINDOW = 27


def decompressor() -> zstd.ZstdDecompressor:
    """Return a decompressor of one frame, which needs at most 128 MiB in addition to what it returns.

    Its ``decompress(data, max_length=…)`` limits what it returns, and raises :exc:`ZstdError` for damaged data.
    """
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _LARGEST_WINDOW})
