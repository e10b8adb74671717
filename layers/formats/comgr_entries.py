"""Entries of AMD's comgr, their contents, and the policy for dropping them.

Sources: ``amd/comgr/src/comgr-cache.cpp`` of ROCm/llvm-project (an entry is the output and the log of one command, each
behind its length), ``llvm/lib/Support/CachePruning.cpp`` (the policy), and LLVM's AMDGPU usage guide (code objects).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final

from cachectl.layers.base.lazy import regex
from cachectl.layers.formats import bitcode, elf, spirv
from cachectl.layers.formats.details import Details
from cachectl.layers.formats.elf import Elf, read_elf

_LENGTH: Final = struct.Struct("<Q")
_AMDGPU: Final = 0xE0
_NOTE: Final = 7
_METADATA: Final = 32
#: How a descriptor, which is the symbol of a kernel, is named after it.
_DESCRIPTOR: Final = ".kd"
#: The key in the metadata, and behind it a string of MessagePack: of less than 32 bytes, or less than 256.
_TARGET: Final = regex(rb"\xadamdhsa\.target(?:[\xa0-\xbf]|\xd9.)[\w-]*?--([\w:+-]+)", re.DOTALL)
_BUNDLE: Final = b"__CLANG_OFFLOAD_BUNDLE__"

_INTEGER: Final = regex(r"0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*", re.ASCII)
#: The unit behind the integer of each key (a pattern), and what a value is that is none.
_DURATION: Final = "[smh]", "not an integer of s, m or h"
_VALUES: Final = {
    "prune_interval": _DURATION,
    "prune_after": _DURATION,
    "cache_size": ("%", "not an integer with %"),
    "cache_size_bytes": ("[kmgKMG]?", "no number of bytes, k, m or g"),
    "cache_size_files": ("", "not an integer"),
}
_MOST: Final = 1 << 64


def output_of(data: bytes) -> bytes | None:
    """Return the output that an entry holds; ``None`` where it is not exactly an output and a log."""
    parts = list(_parts(data))
    return parts[0] if len(parts) == 2 and sum(map(len, parts)) + 2 * _LENGTH.size == len(data) else None  # noqa: PLR2004


def _parts(data: bytes) -> Iterator[bytes]:
    at = 0
    for _ in range(2):
        if at + _LENGTH.size > len(data):
            return
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield data[at : at + length]
        at += length


def complaint(output: bytes) -> str | None:
    """Return what is wrong with an output of a known kind; ``None`` where nothing is, and for other kinds."""
    kinds = {elf.MAGIC: ("an ELF file", elf.complaint), bitcode.MAGIC: ("bitcode", bitcode.complaint)}
    name, check = kinds.get(output[:4], ("", None))
    wrong = None if check is None else check(output)
    return None if wrong is None else f"holds {name} that {wrong}"


def describe(output: bytes) -> Details:
    """Return kind, kernels and device of an output."""
    if output.startswith(bitcode.MAGIC):
        return Details("LLVM bitcode", bitcode.kernels(output))
    if output.startswith(spirv.MAGIC):
        return Details("SPIR-V", spirv.kernels(output))
    if output.startswith(_BUNDLE):
        return Details("offload bundle")
    file = read_elf(output)
    if file is None:
        return Details("unknown")
    return _of_code_object(file) if file.machine == _AMDGPU else Details("ELF")


def _of_code_object(file: Elf) -> Details:
    named = {name.removesuffix(_DESCRIPTOR) for name in file.symbols() if name.endswith(_DESCRIPTOR)}
    return Details("code object", tuple(sorted(named - {""})) or None, _device(file))


def _device(file: Elf) -> str | None:
    for section in file.sections:
        for _, kind, described in file.notes(section) if section.kind == _NOTE else ():
            match = _TARGET.search(described) if kind == _METADATA else None
            if match is not None:
                return match[1].decode()
    return None


def policy_complaint(policy: str) -> str | None:
    """Return why LLVM cannot read a policy, which leaves comgr without a cache; ``None`` where it can."""
    rest = policy
    while rest:
        setting, _, rest = rest.partition(":")
        key, _, value = setting.partition("=")
        if (wrong := _value_complaint(key, value)) is not None:
            return wrong
    return None


def _value_complaint(key: str, value: str) -> str | None:
    unit, what = _VALUES.get(key, ("", ""))
    if not what:
        return f"it knows no {key!r}"
    match = re.fullmatch(f"(.*?){unit}", value, re.DOTALL)
    good = match is not None and _is_integer(match[1])
    if good and key == "cache_size":
        good = _number(value[:-1]) <= 100  # noqa: PLR2004 - percent
    return None if good else f"{key}={value} is {what}"


def _is_integer(text: str) -> bool:
    """Return whether LLVM reads a text as a number of 64 bits, in any base that a prefix names."""
    # A prefix and 64 digits are the longest.
    return _INTEGER.fullmatch(text) is not None and len(text) <= 66 and _number(text) < _MOST  # noqa: PLR2004


def _number(text: str) -> int:
    """Read such a number. A leading zero means octal."""
    return int(text, 8 if text.startswith("0") and text.isdigit() else 0)
