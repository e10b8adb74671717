"""Entries of AMD's comgr, their contents, and the policy for dropping them.

Sources: ``amd/comgr/src/comgr-cache.cpp`` of ROCm/llvm-project (an entry is the output and the log of one command, each
behind its length), ``llvm/lib/Support/CachePruning.cpp`` (the policy), and LLVM's AMDGPU usage guide (code objects).
"""

from __future__ import annotations

import re
import struct
from typing import Final

from cachectl.layers.base.lazy import regex
from cachectl.layers.formats import device_binaries, elf
from cachectl.layers.formats.details import Cut, Details, fields, names_or_none, part

_LENGTH: Final = struct.Struct("<Q")
_AMDGPU: Final = 0xE0
_NOTE: Final = 7
_METADATA: Final = 32
#: How a descriptor, which is the symbol of a kernel, is named after it.
_DESCRIPTOR: Final = ".kd"
#: The key in the metadata, and behind it a string of MessagePack: of less than 32 bytes, or less than 256.
_TARGET: Final = regex(rb"\xadamdhsa\.target(?:[\xa0-\xbf]|\xd9.)[\w-]*?--([\w:+-]+)", re.DOTALL)
_BUNDLE: Final = b"__CLANG_OFFLOAD_BUNDLE__"

#: An integer of at most 64 bits in any base that a prefix names, roughly.
_INTEGER: Final = "(?:0[xX][0-9a-fA-F]{1,16}|0[bB][01]{1,64}|0[oO]?[0-7]{1,21}|0|[1-9][0-9]{0,18})"
#: The pattern of each setting's value, and what a value is that does not match it.
_DURATION: Final = f"{_INTEGER}[smh]", "not an integer of s, m or h"
_VALUES: Final = {
    "prune_interval": _DURATION,
    "prune_after": _DURATION,
    "cache_size": ("(?:[0-9]{1,2}|100)%", "not an integer with %"),
    "cache_size_bytes": (f"{_INTEGER}[kmgKMG]?", "no number of bytes, k, m or g"),
    "cache_size_files": (_INTEGER, "not an integer"),
}


def output_of(data: bytes) -> bytes | None:
    """Return the output that an entry holds; ``None`` where it is not exactly an output and a log."""
    try:
        (length,) = fields(_LENGTH, data)
        output = part(data, _LENGTH.size, length)
        (log,) = fields(_LENGTH, data, _LENGTH.size + length)
    except Cut:
        return None
    return output if 2 * _LENGTH.size + length + log == len(data) else None


def complaint(output: bytes) -> str | None:
    """Return what is wrong with an output of a known kind; ``None`` where nothing is, and for other kinds."""
    # A translation to SPIR-V may end otherwise than the programs that drivers return.
    wrong = None if output.startswith(device_binaries.SPIRV) else device_binaries.complaint(output)
    return None if wrong is None else f"holds a program that {wrong}"


def describe(output: bytes) -> Details:
    """Return kind, kernels and device of an output."""
    if (details := device_binaries.describe(output)) is not None:
        return details
    if output.startswith(_BUNDLE):
        return Details("offload bundle")
    file = elf.read_elf(output)
    if file is None or file.machine != _AMDGPU:
        return Details("unknown" if file is None else "ELF")
    descriptors = (name.removesuffix(_DESCRIPTOR) for name in file.symbols() if name.endswith(_DESCRIPTOR))
    notes = (note for section in file.sections if section.kind == _NOTE for note in file.notes(section))
    targets = (_TARGET.search(described) for _, kind, described in notes if kind == _METADATA)
    device = next((target[1].decode() for target in targets if target is not None), None)
    return Details("code object", names_or_none(descriptors), device)


def policy_complaint(policy: str) -> str | None:
    """Return why LLVM cannot read a policy, which leaves comgr without a cache; ``None`` where it can."""
    for setting in policy.removesuffix(":").split(":") if policy else ():
        key, _, value = setting.partition("=")
        pattern, what = _VALUES.get(key, ("", ""))
        if not what:
            return f"it knows no {key!r}"
        if not re.fullmatch(pattern, value):
            return f"{setting} is {what}"
    return None
