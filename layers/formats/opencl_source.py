"""The names of kernels in OpenCL C."""

from __future__ import annotations

import re
from typing import Final

from cachectl.layers.base.lazy import regex
from cachectl.layers.formats.details import names_or_none

# Each part can match in only one way, a bounded number of times, so no source causes much backtracking.
_ATTRIBUTE: Final = rb"(?:__attribute__\s{0,9}\(\((?:(?!\)\)).){0,200}\){2,9}\s{0,99}){0,9}"
_KERNEL: Final = regex(
    rb"\b(?:__)?kernel\s{1,99}" + _ATTRIBUTE + rb"void\s{1,99}" + _ATTRIBUTE + rb"(\w{1,999})\s{0,99}\(", re.DOTALL
)


def kernel_names(source: bytes) -> tuple[str, ...] | None:
    """Return the kernels that a source defines or declares, ``None`` where it has none."""
    return names_or_none(match[1].decode() for match in _KERNEL.finditer(source))
