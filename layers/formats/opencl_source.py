"""OpenCL C, read for no more than the names of its kernels."""

from __future__ import annotations

import re
from typing import Final

_ATTRIBUTE: Final = rb"(?:__attribute__\s*\(\(.*?\)\)\s*)"
_VOID: Final = _ATTRIBUTE + rb"*void\s+" + _ATTRIBUTE + rb"*"
_KERNEL: Final = re.compile(rb"\b(?:__)?kernel\s+" + _VOID + rb"(\w+)\s*\(", re.DOTALL)


def kernel_names(source: bytes) -> tuple[str, ...] | None:
    """Return the kernels that a source defines or declares, ``None`` where it has none."""
    return tuple(sorted({match[1].decode() for match in _KERNEL.finditer(source)})) or None
