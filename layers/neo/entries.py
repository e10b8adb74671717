"""The store of NEO's cache: a file for each program, the sum of their sizes, and debugging files.

An entry is a zebin, its predecessor (a device binary in an OpenCL wrapper), or SPIR-V. Sources:
``shared/source/device_binary_format/`` of intel/compute-runtime (``zebin/zebin_elf.h``, ``elf/ocl_elf.h``) and
``ocl_igc_shared/executable_format/patch_list.h`` of intel-graphics-compiler.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from cachectl.layers import neo
from cachectl.layers.base.errors import Unreachable
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.codes import INDEX
from cachectl.layers.core.finding import FAILS, RECOMPILES, Finding
from cachectl.layers.core.root import Root
from cachectl.layers.core.store import Codec, Damage, counting, finding_of, unreadable
from cachectl.layers.disk import atomic, locks, plain
from cachectl.layers.formats import details, device_binaries, elf
from cachectl.layers.stores import files
from cachectl.layers.stores import tree_read as tree

ACCOUNT = "config.file"
#: Bytes of all entries, which the driver compares with its limit (``size_t``).
_TOTAL = struct.Struct("=Q")
_DIGIT = regex("[0-9a-f]")
_NAME = "[0-9a-f]{16}"
_ENTRY = regex(rf"{_NAME}\.(?:cl|l0|ocloc)_cache")
_SHAPES = (
    tree.Shape((_ENTRY,)),
    tree.Shape((_DIGIT, _DIGIT, _ENTRY)),
    tree.Shape((regex(r"cl_cache\.[A-Za-z0-9]{6}"),), because="left by a killed driver", private=True),
    # The account and debugging files are at the top, statistics at each level.
    tree.Shape((regex(re.escape(ACCOUNT)),), sums=True, sizes=(0, _TOTAL.size)),
    tree.Shape((regex(r"[0-9a-f]{16}\.(?:trace|input)"),), sums=True),
    *(tree.Shape((*above, regex("stats")), sums=True, sizes=(24,)) for above in ((), (_DIGIT,), (_DIGIT, _DIGIT))),
    # Other suffixes, longer or shorter hashes, and other levels.
    *(tree.resembling(*(("[0-9a-f]{1,4}",) * depth), rf"[0-9a-f]{{8,}}\.\w*cache|{_NAME}\.\w+") for depth in range(4)),
)
_NEVER = "the driver compiles it again in every run, and never replaces it"

_ZEBIN = frozenset({0xFF11, 0xFF12, 0xFF13})
_WRAPPER = 0xFF04
_DEVICE_BINARY = 0xFF000005
_SPIRV = 0xFF000009
_TEXT = ".text."
#: The section of functions that are not kernels.
_FUNCTIONS = "Intel_Symbol_Table_Void_Program"
#: The types of notes about compatibility: product family, graphics core, version of zebin, exact device.
_FAMILY, _CORE, _VERSION, _DEVICE = 1, 2, 4, 6
_ARCHIVE = b"!<arch>\n"

_PATCH_TOKENS = b"CTNI"
#: Magic, version, device, pointer size, number of kernels, stepping, bytes of patches.
_PROGRAM = struct.Struct("<7I")
#: Checksum, hash, then the lengths of name, patches and heaps: kernel, general, dynamic and surface state; and the
#: kernel's length without padding.
_KERNEL = struct.Struct("<IQ7I")


class NeoCodec(Codec):
    """A program of any kind that the driver stores."""

    form = "neo-entry/1"

    def describe(self, data: bytes) -> details.Details:
        """Return kernels, device and versions of a program of any kind."""
        if (known := device_binaries.describe(data)) is not None:
            return known
        if data.startswith(_ARCHIVE):
            return details.of_kind("archive")
        file = elf.read_elf(data)
        if file is None:
            return _patch_tokens(data) or details.of_kind("unknown")
        if file.kind != _WRAPPER:
            return _zebin(file) or details.of_kind("ELF")
        wrapped = {section.kind: file.content(section) for section in file.sections}
        device = wrapped.get(_DEVICE_BINARY, b"")
        # A wrapper is not wrapped again: no depth to bound.
        inner = _zebin(elf.read_elf(device)) or _patch_tokens(device)
        return inner or details.of_kind("OpenCL ELF", device_binaries.spirv_kernels(wrapped.get(_SPIRV, b"")))

    def check(self, data: bytes) -> Damage | None:
        """Check that an entry is a complete program of a kind that the driver stores."""
        wrong = None
        if device_binaries.is_known(data):
            wrong = device_binaries.complaint(data)
        elif data.startswith(_PATCH_TOKENS):
            wrong = str(details.Cut(data)) if _patch_tokens(data) is None else None
        elif not data.startswith(_ARCHIVE):
            wrong = "holds no program of a kind that the driver stores" if data else "is empty"
        if wrong is None:
            return None
        is_wrapper = data.startswith(elf.MAGIC) and data[16:18] == _WRAPPER.to_bytes(2, "little")
        if not data or is_wrapper:
            return Damage(RECOMPILES, f"{wrong}; {_NEVER}")
        return Damage(FAILS, f"{wrong}; the driver uses it as a program, and the build fails")


class NeoPrograms(files.Files):
    """Programs, flat in older releases and two levels deep in newer ones, and the driver's sum of their bytes."""

    shapes = _SHAPES
    codec = NeoCodec()
    forms = (codec.form,)
    writers = neo.LIBRARIES
    unread = Damage(RECOMPILES, f"; {_NEVER}")

    @contextmanager
    def changing(self, root: Root) -> Iterator[tree.Tidy]:
        """Hold the driver's lock during a change, then write the sum of all entries into the account.

        The sum is also written if the change fails. Raises :class:`Unsettled` if only the writing fails. Without an
        account, the driver counts the entries when it makes one. Yields whether the lock is held.
        """
        path = root.path / ACCOUNT
        with (
            locks.file_lock(self.name, path, lock_timeout=self.environment.lock_timeout) as handle,
            counting(self.name, path, partial(self._count, root, handle)),
        ):
            yield lambda: handle is not None

    def _count(self, root: Root, handle: int | None) -> None:
        if handle is None:
            return
        # A longer file is not the driver's.
        old = os.pread(handle, _TOTAL.size + 1, 0)
        new = _TOTAL.pack(sum(self._sizes(root).values()))
        if len(old) in (0, len(new)) and old != new:
            atomic.overwrite(handle, old, new)

    def _sizes(self, root: Root) -> dict[str, int]:
        """Return the bytes of the entries of each kind. Raises :class:`Unreachable` if some cannot be read."""
        sizes: dict[str, int] = {}
        for leaf in self.tree_of(root).leaves():
            kind = leaf.entry.key.rpartition(".")[2]
            if leaf.shape.is_entry or (leaf.entry.is_unknown and kind.endswith("cache")):
                sizes[kind] = sizes.get(kind, 0) + leaf.entry.length
        return sizes

    def check_index(self, root: Root) -> Iterator[Finding]:
        """Compare the account with the entries."""
        try:
            sizes = self._sizes(root)
            account = plain.read_plain(root.path / ACCOUNT, limit=_TOTAL.size + 1)
        except (Unreachable, OSError) as error:
            if isinstance(error, Unreachable) or not plain.means_no_file(error):
                yield finding_of(self, root, unreadable(root.path / ACCOUNT, error))
            return
        counted, total = int.from_bytes(account, sys.byteorder), sum(sizes.values())
        fix = "nothing: the next put or purge in this layer counts again"
        complaint = f"the account says {counted} bytes, but there are {total}: "
        if len(account) not in (0, _TOTAL.size):
            complaint = "the account does not have the length that the driver gives it: it counts from a wrong number"
            fix = f"rm {shlex.quote(str(root.path / ACCOUNT))}"
        elif counted > total:
            complaint += "the driver drops entries too early"
        # A driver that counts again counts only one of these kinds.
        elif account and counted < min(sizes.values(), default=0):
            complaint += "the cache grows beyond its limit"
        else:
            return
        yield INDEX.finding(self.name, root.path, complaint, fix, key=ACCOUNT)


def _zebin(file: elf.Elf | None) -> details.Details | None:
    """Describe a file of the current format, with the device as ``ocloc`` names it if known; ``None`` for others."""
    if file is None or file.kind not in _ZEBIN:
        return None
    named = {one.name.removeprefix(_TEXT) for one in file.sections if one.name.startswith(_TEXT)}
    notes = {kind: described for owner, kind, described in file.notes() if owner == b"IntelGT"}
    numbers = {kind: int.from_bytes(described[:4], "little") for kind, described in notes.items() if described}
    device = f"graphics core {numbers[_CORE]}" if _CORE in numbers else None
    if _DEVICE in numbers:
        config = numbers[_DEVICE]
        device = f"{config >> 22}.{config >> 14 & 0xFF}.{config & 0x3F}"
    elif _FAMILY in numbers:
        device = f"product family {numbers[_FAMILY]}"
    version = notes.get(_VERSION, b"").rstrip(b"\0").decode(errors="replace")
    kernels = details.names_or_none(named - {_FUNCTIONS})
    return details.of_kind("zebin", kernels, device, {"zebin": version} if version else {})


def _patch_tokens(data: bytes) -> details.Details | None:
    """Read a device binary of the format before zebin; ``None`` if it is another file, or incomplete."""
    try:
        magic, version, device, _, count, _, patches = details.fields(_PROGRAM, data)
        kernels = details.names_or_none(_kernels(data, _PROGRAM.size + patches, count))
    except details.Cut:
        return None
    is_one = magic == int.from_bytes(_PATCH_TOKENS, "little")
    about = details.of_kind("patch tokens", kernels, f"graphics core {device}", {"format": str(version)})
    return about if is_one else None


def _kernels(data: bytes, at: int, count: int) -> Iterator[str]:
    """Yield the name of each kernel. Raises :class:`Cut`."""
    for _ in range(count):
        _, _, name, patches, *heaps, _ = details.fields(_KERNEL, data, at)
        at += _KERNEL.size
        yield details.part(data, at, name).rstrip(b"\0").decode(errors="replace")
        details.require(data, at, name + patches + sum(heaps))
        at += name + patches + sum(heaps)
