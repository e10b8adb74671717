"""A compiler to be cached: ``python toyc.py KERNEL…`` keeps what it makes of each name, unless TOYC_CACHE=0."""

import hashlib
import os
import sys
from pathlib import Path

cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toyc"
folder = Path(os.environ.get("TOYC_CACHE_DIR") or cache)
for kernel in sys.argv[1:]:
    path = folder / f"{hashlib.sha256(kernel.encode()).hexdigest()[:16]}.toyc"
    found = path.exists()
    if os.environ.get("TOYC_CACHE") != "0" and not found:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"TOYC " + kernel.encode() + b"\n" + bytes(100))
    print(kernel, "found" if found else "made")  # noqa: T201 - a program's output
