"""zstd as Python's own library has had it since 3.14, and as its backport has it before.

It is imported by the functions that compress or unpack: a report does neither. :exc:`ImportError` means that a Python
of 3.14 or later was built without zstd.
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
#: A decompressor keeps as much as this of what it has made, as a power of two: what needs more is refused.
_LARGEST_WINDOW = 27


def decompressor() -> zstd.ZstdDecompressor:
    """Return a decompressor of one frame, which needs no more than 128 MiB in addition to what it returns.

    Its ``decompress(data, max_length=…)`` bounds what it returns; it raises :exc:`ZstdError` for what is damaged.
    """
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _LARGEST_WINDOW})
