"""Many cheap entries: kernels in a database of MIOpen's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from homes import Home

from cachectl.layers.core.facts import Artifact
from cachectl.layers.core.layer import get_many
from support.miopen_kernels import store, user_file


def add_kernels(home: Home, numbers: Iterable[int], size: int = 99) -> None:
    """Add kernels, each with code of its own, to the database of a home, which is made if it is missing."""
    codes = {f"k{number}.cl.o": b"\x7fELF" + number.to_bytes(4, "little") * (size // 4) for number in numbers}
    digests = {name: hashlib.md5(code).hexdigest() for name, code in codes.items()}  # noqa: S324 - MIOpen's choice
    store(user_file(home.path), {(name, " -O3"): (code, digests[name], 0) for name, code in codes.items()})


def kernels_in(home: Home) -> dict[str, bytes]:
    layer = home.stack["miopen"]
    found = get_many(layer, [entry.key for entry in layer.entries()])
    return {key: one.data for key, one in found.items() if isinstance(one, Artifact)}
