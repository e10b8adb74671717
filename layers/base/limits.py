"""Limits on input sizes, so that no file can take all memory or fill a disk. All sizes are in bytes.

Each limit is far above the sizes that the libraries write. A file above it is reported and left alone.
"""

from __future__ import annotations

from typing import Final

from cachectl.layers.base.lazy import regex

#: One entry, or one file that is read whole. Entries are held in memory. The largest known ones, programs of the CUDA
#: driver, have some 100 MiB; the whole CUDA cache has 4 GiB by default.
LARGEST_ENTRY: Final = 1 << 30
#: The file of one entry that ``get`` writes and ``put`` reads.
LARGEST_ARTIFACT: Final = LARGEST_ENTRY + (1 << 20)
#: A text database of MIOpen. Its largest shipped ones have some 50 MiB. Changing one holds it several times in memory.
LARGEST_RECORDS: Final = 256 << 20
#: An index that lists the entries of a store. One of 64 MiB lists a million entries of Mesa's.
LARGEST_INDEX: Final = 64 << 20
#: One key. The longest are those of MIOpen, which contain compiler arguments.
LONGEST_KEY: Final = 1 << 14

#: Control characters, also those of Unicode that end a line or turn the direction of text.
_CONTROL: Final = regex("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

#: How many details and versions an entry may have.
MOST_DETAILS: Final = 64
#: A bundle that is copied into the folder of temporary files.
LARGEST_BUNDLE: Final = 32 << 30
#: What such a copy leaves free on that file system, as other programs write there too.
SPARED_ROOM: Final = 256 << 20
#: A signature of OpenSSH has less than 1 KiB.
LARGEST_SIGNATURE: Final = 1 << 20


def too_large(size: int, most: int) -> str:
    """Return the message for something larger than its limit."""
    return f"has {size:,} bytes; the limit is {most:,}"


def key_complaint(key: str) -> str | None:
    """Return why a text cannot be a key of any layer, else ``None``. Keys come from bundles and become file names."""
    if not key:
        return "is empty"
    if len(key) > LONGEST_KEY:
        return f"is longer than {LONGEST_KEY:,} characters"
    if _CONTROL.search(key):
        return "holds control characters"
    return None
