"""Programs in PoCL's cache: the names of their files, their kernels, and damage in their contents.

Sources: ``lib/CL/pocl_cache.c`` (names), ``lib/CL/devices`` (``common.c``, ``hsa``, ``tce``: files beside native code),
``lib/llvmopencl/Workgroup.cc`` (symbols of work-group functions).

From version 4.0 on, PoCL shortens the name of a kernel's folder to a prefix, ``.`` (on Windows a blank) and the SHA-1
of the name in 40 letters (``pocl_hash_clipped_name``). The name cannot be computed from that, but a name found in the
program's files can be compared with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.lazy import module, regex

if TYPE_CHECKING:
    from cachectl.layers.formats import bitcode, elf
else:
    bitcode, elf = (module(f"cachectl.layers.formats.{name}") for name in ("bitcode", "elf"))

BITCODE: Final = "program.bc"
#: Six characters drawn by ``mkstemp``.
DRAWN: Final = "[A-Za-z0-9]{6}"
#: A folder name that may be shortened: no OpenCL C name contains a dot or a blank.
SHORTENED: Final = regex(r".+[. ][A-P]{40}", re.DOTALL)
#: The longest names that are kept whole, in bytes: by PoCL 7.0 and newer, by 6.0, and by 4.0 and 5.0.
_LIMITS: Final = (59, 64, 255)
_HASH_AND_DOT: Final = 41

_TEMPORARY: Final = regex(rf".*_{DRAWN}\.(?:temp|so)")
#: Files of a work-group function: native code, and what ``POCL_LEAVE_KERNEL_COMPILER_TEMP_FILES`` and other devices
#: add. Any other file there does not belong to PoCL.
_FUNCTION: Final = (
    r"[^/]+\.(?:so|so\.o|o|obj|dll|tpef|img)|parallel\.bc(?:\.brig)?|descriptor\.so\.kernel_obj\.c"
    rf"|[^/]+_{DRAWN}\.(?:temp|so)"
)
_VARIANT: Final = regex(rf"(?P<kernel>[^/]+)/(?P<variant>\d+-\d+-\d+(?:-goffs0)?(?:-smallgrid)?)/(?P<file>{_FUNCTION})")
_PROGRAM: Final = (
    r"program\.(?:bc|spv|map|mlir|bc\.(?:noOfs|Ofs)\.ptx)|last_accessed|build\.log|native/[^/]+\.native|parallel\.bc"
)
#: Every file that a program may have.
MEMBERS: Final = regex(f"{_PROGRAM}|{_VARIANT.pattern}|{_TEMPORARY.pattern}")
#: Files that a folder may have without being a program.
NO_PROGRAM: Final = frozenset({"build.log", "last_accessed"})
#: Native code that PoCL links itself, since version 7.2.
OBJECT: Final = ".o"
_NATIVE: Final = (".so", OBJECT)
#: The symbol of a work-group function, in a table of strings.
_WORK_GROUP: Final = regex(rb"_pocl_kernel_([^\0]+)_workgroup\0")


def is_temporary(path: str) -> bool:
    """Return whether a file was left by a compile. A finished kernel may have a name that ends like a temporary's."""
    variant = _VARIANT.fullmatch(path)
    finished = variant is not None and variant["file"] == f"{variant['kernel']}.so"
    return not finished and _TEMPORARY.fullmatch(path) is not None


def is_native(path: str) -> bool:
    """Return whether a file is native code of a work-group function."""
    return path.endswith(_NATIVE) and _VARIANT.fullmatch(path) is not None


# ---------------------------------------------------------------------- kernels


def variants(paths: Iterable[str]) -> dict[str, list[str]]:
    """Map the kernel folders of a program to the work-group shapes that were compiled, sorted."""
    found: dict[str, set[str]] = {}
    for match in map(_VARIANT.fullmatch, paths):
        if match is not None:
            found.setdefault(match["kernel"], set()).add(match["variant"])
    return {folder: sorted(found[folder]) for folder in sorted(found)}


def kernel_names(paths: Iterable[str], content: Callable[[str], bytes | None]) -> dict[str, str | None]:
    """Map the kernel folders of a program to the kernels' names, ``None`` where its files do not contain the name.

    Native files contain whole names, and so does the bitcode, which takes longer to read.
    """
    names: dict[str, str | None] = {}
    natives: dict[str, list[str]] = {}
    for match in map(_VARIANT.fullmatch, paths):
        if match is not None:
            folder = match["kernel"]
            names[folder] = None if SHORTENED.fullmatch(folder) else folder
            if match["file"].endswith(_NATIVE):
                natives.setdefault(folder, []).append(match[0])
    for folder in [folder for folder, name in names.items() if name is None]:
        found = (whole_name(folder, _launched(content(path))) for path in natives.get(folder, ()))
        names[folder] = next(filter(None, found), None)
    if None in names.values():
        functions = bitcode.function_names(content(BITCODE) or b"")
        return {folder: name or whole_name(folder, functions) for folder, name in names.items()}
    return names


def whole_name(folder: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate whose folder PoCL gives this name, shortened or not; ``None`` if no candidate fits."""
    wanted = os.fsencode(folder)
    return next((name for name in candidates if wanted in _folder_names(name.encode(errors="surrogateescape"))), None)


def kept_part(prefix: str) -> str:
    """Return the beginning that every version keeps of a name that begins with ``prefix``."""
    # Names are cut at a byte, perhaps within a character.
    return prefix[: min(_LIMITS) - _HASH_AND_DOT] if prefix.isascii() else ""


# Kernels are few, and programs many.
@lru_cache(maxsize=1000)
def _folder_names(name: bytes) -> frozenset[bytes]:
    """Return the folder names that versions of PoCL give a kernel, on Windows and elsewhere."""
    import hashlib

    limits = [limit for limit in _LIMITS if len(name) > limit]
    if not limits:
        return frozenset((name,))
    digest = hashlib.sha1(name, usedforsecurity=False).digest()
    letters = bytes(ord("A") + nibble for byte in digest for nibble in (byte & 15, byte >> 4))
    prefixes = (name[: limit - _HASH_AND_DOT] for limit in limits)
    return frozenset((name, *(prefix + dot + letters for prefix in prefixes for dot in (b".", b" "))))


def _launched(data: bytes | None) -> Iterator[str]:
    """Yield the kernels whose work-group functions a native file contains."""
    for match in _WORK_GROUP.finditer(data or b""):
        yield match[1].decode(errors="replace")


# ---------------------------------------------------------------------- damage


def damage(contents: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield the path of each damaged file of a program, with what is wrong. Other kinds of file are not checked."""
    for path, data in contents.items():
        check = bitcode.complaint if path == BITCODE else elf.complaint
        if (path == BITCODE or is_native(path)) and (wrong := check(data)) is not None:
            yield path, wrong
