"""A compiler to be cached: ``python toyc.py KERNEL…`` keeps what it makes of each name, unless TOYC_CACHE=0."""

import hashlib
import os
import sys
from pathlib import Path


def place(kernel):
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toyc"
    folder = Path(os.environ.get("TOYC_CACHE_DIR") or cache)
    return folder / f"{hashlib.sha256(kernel.encode()).hexdigest()[:16]}.toyc"


def find(kernel):
    return place(kernel).read_bytes() if place(kernel).exists() else None


def keep(kernel, code):
    place(kernel).parent.mkdir(parents=True, exist_ok=True)
    place(kernel).write_bytes(b"TOYC " + kernel.encode() + b"\n" + code)


def build(kernel):
    if find(kernel) is not None:
        return "found"
    if os.environ.get("TOYC_CACHE") != "0":
        keep(kernel, bytes(100))
    return "made"


if __name__ == "__main__":
    # The module itself, which a trace watches, not this program's copy of it.
    import toyc

    for name in sys.argv[1:]:
        print(name, toyc.build(name))
