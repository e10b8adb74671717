"""Entries of Mesa's shader cache, the same bytes in each of its three forms, and their owners.

GL and Vulkan use the same folders, and only contents show the owner: all entries of one driver and device were stored
by one build of one library, and Rusticl is a library of its own. So if one of them contains a kernel, all are OpenCL's.

A header names the driver and the device, and a checksum covers the payload, which is packed with zstd. Sources:
``src/util/disk_cache.h`` (``CACHE_KEY_SIZE``) and ``disk_cache.c`` (the driver's keys), ``src/util/disk_cache_os.c``
(``create_cache_item_header_and_blob``, ``parse_and_validate_cache_item``), ``src/util/crc32.c``. Payloads:
``src/gallium/frontends/rusticl/core/program.rs``, ``src/compiler/spirv/spirv_to_nir.c``
(``vtn_emit_kernel_entry_point_wrapper``).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.entry import Entry, Found, Kind, Problem, unknown
from cachectl.layers.core.finding import RECOMPILES
from cachectl.layers.core.store import Codec, Damage, unreadable
from cachectl.layers.formats import details, device_binaries, elf

#: Bytes that contain the header of every driver and device; GL's longer headers are read whole.
HEAD = 512
#: The driver, or the device, in entries stored by Rusticl itself.
RUSTICL = "rusticl"

#: Why something of an unknown version is left alone.
FOREIGN = "is of a version of Mesa's format that cachectl does not know; left alone"
#: After the version: driver and device.
_NAMES = rb"([\x21-\x7e][\x20-\x7e]{0,199})\0([\x21-\x7e][\x20-\x7e]{0,199})\0"
#: A version that is neither the known one nor zero.
_FOREIGN = regex(rb"[^\0\x01]" + _NAMES, re.DOTALL)
#: Then the size of a pointer, a number of the driver, and the kind of the entry: 1 if GL's own compiler made it.
_HEAD = regex(rb"\x01" + _NAMES + rb"[\x04\x08].{8}([\0\x01])\0{3}", re.DOTALL)
#: As many other bytes, but not the zeros of a power failure.
_OTHER_HEAD = regex(rb"\x01" + _NAMES + rb"(?!\0{13}).{13}", re.DOTALL)
_COUNT = struct.Struct("<I")
_CHECKED = struct.Struct("<II")
#: The length of a key: a SHA-1, or since Mesa 26 a BLAKE3.
KEY_SIZES = (20, 32)
#: More than any program needs, in bytes.
_LARGEST = 1 << 26
_ZSTD = b"\x28\xb5\x2f\xfd"
#: The first bytes of packed content: of zstd, and of each level of zlib.
_PACKED = (_ZSTD, b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
#: Mesa wraps only OpenCL kernels in such a function.
_WRAPPED = regex(rb"__wrapped_([A-Za-z_]\w{0,254})\0", re.ASCII)

#: How many entries of one driver are searched for a kernel, the smallest first.
_LOOKS = 256
_GL = "GL or Vulkan"
_GRAPHICS = f"is of {_GL}, which share the folder"
_UNKNOWN = "cannot be distinguished from what GL and Vulkan keep in the same folder"
#: The effect of a damaged entry.
NEVER = "Mesa compiles it again in every run, and never replaces it"


class Header(NamedTuple):
    """The owner of an entry: driver (a hash of its build), device, and whether GL's compiler made it.

    ``payload`` is the offset of the packed bytes, ``None`` if more must be read to know it, or if no known length of
    GL's keys explains the entry, in which case ``is_known`` is false.
    """

    driver: str
    device: str
    graphics: bool
    payload: int | None
    checksum: int = 0
    inflated: int = 0
    is_known: bool = True


def read_header(data: bytes) -> Header | None:
    """Read the header from an entry, or from its first :data:`HEAD` bytes; ``None`` if there is none."""
    head = _HEAD.match(data)
    if head is None:
        return None
    driver, device, kind = (part.decode("ascii") for part in head.groups())
    is_graphics, headers = kind == "\1", set[Header]()
    for size in KEY_SIZES if is_graphics else (0,):
        with suppress(details.Cut):
            keys = _COUNT.size + details.fields(_COUNT, data, head.end())[0] * size if is_graphics else 0
            begin = head.end() + keys
            fields = details.fields(_CHECKED, data, begin)
            headers.add(Header(driver, device, is_graphics, begin + _CHECKED.size, *fields))
    if is_graphics and headers:
        # Only the payload shows how long GL's keys are: its checksum, or in a damaged entry its beginning.
        fitting = {header for header in headers if checksum(data[header.payload :]) == header.checksum}
        headers = fitting or {header for header in headers if data[header.payload :].startswith(_PACKED)}
        if len(headers) != 1:
            return Header(driver, device, is_graphics, None, is_known=False)
    return headers.pop() if headers else Header(driver, device, is_graphics, None)


def checksum(data: bytes) -> int:
    """Return Mesa's checksum: CRC-32 without the last inversion."""
    return zlib.crc32(data) ^ 0xFFFFFFFF


def complaint(data: bytes, expected: int = 0) -> str | None:
    """Return why Mesa would not use an entry, or ``None``; ``expected`` is its checksum in a larger file, or 0."""
    header = read_header(data)
    if is_foreign(data):
        return FOREIGN
    if header is None or header.payload is None:
        return "has no complete header"
    is_same = checksum(data[header.payload :]) == header.checksum and expected in (0, checksum(data))
    return None if is_same else "its checksum does not match"


def is_foreign(data: bytes) -> bool:
    """Return whether an entry has the names of a header, but an unknown version before or format after them."""
    if (header := read_header(data)) is not None:
        return not header.is_known
    return _FOREIGN.match(data) is not None or _OTHER_HEAD.match(data) is not None


def inflate(data: bytes) -> bytes:
    """Unpack the payload of an entry. Raises :class:`ValueError` if that fails, or it is larger than any program."""
    header = read_header(data)
    if header is None or header.payload is None or header.inflated > _LARGEST:
        raise ValueError("its header is missing or impossible")
    packed, most = data[header.payload :], header.inflated + 1
    unpack: Callable[[bytes, int], bytes] = zlib.decompressobj().decompress
    failure: type[Exception] = zlib.error
    if packed.startswith(_ZSTD):
        try:
            from cachectl.layers.formats import zstd
        except ImportError as error:
            raise ValueError("this Python was built without zstd") from error
        unpack, failure = zstd.decompressor().decompress, zstd.ZstdError
    try:
        content = unpack(packed, most)
    except failure as error:
        raise ValueError(str(error)) from error
    if len(content) != header.inflated:
        raise ValueError("its length is not the one in its header")
    return content


def kernels(content: bytes) -> tuple[str, ...] | None:
    """Return the OpenCL kernels in an unpacked payload; ``None`` if it names none, such as machine code."""
    if content.startswith(elf.MAGIC):
        return None
    if content.startswith(device_binaries.SPIRV):
        return device_binaries.spirv_kernels(content)
    return details.names_or_none(match[1].decode("ascii") for match in _WRAPPED.finditer(content))


def with_header(entry: Entry, head: bytes) -> Entry:
    """Add what the first bytes of an entry say of its maker, or that they are of an unknown version."""
    if (header := read_header(head)) is not None:
        detail = {"of": _GL} if header.graphics else {}
        return entry._replace(details=details.Details(None, header.device, {"driver": header.driver}, detail))
    return entry._replace(details=details.Details(versions={"format": "unknown"})) if is_foreign(head) else entry


def kernels_in(data: bytes) -> tuple[str, ...] | None:
    """Return the kernels in an entry; ``None`` if it names none, or cannot be unpacked."""
    try:
        return kernels(inflate(data))
    except ValueError:
        return None


def owned(entries: Iterable[Entry], read: Callable[[Entry], bytes | None], *, contents: bool) -> Iterator[Found]:
    """Yield entries with their owners, by driver and device, and a problem for each that cannot be read."""
    problems: dict[str, Problem] = {}

    def kernels_of(entry: Entry) -> tuple[str, ...] | None:
        try:
            return kernels_in(read(entry) or b"")
        except LayerError as error:
            problems[entry.key] = unreadable(entry.root / entry.key, error)
            return None

    makers: dict[tuple[str | None, str | None], list[Entry]] = {}
    for entry in entries:
        makers.setdefault((entry.details.versions.get("driver"), entry.details.device), []).append(entry)
    for (driver, device), group in makers.items():
        guest: str | None = _UNKNOWN
        if any(entry.details.detail for entry in group):
            guest = _GRAPHICS
        elif device is not None:
            # Kernels are smaller than the code that a driver compiles them to.
            smallest = sorted(group, key=lambda entry: entry.length)[:_LOOKS]
            guest = None if RUSTICL in (driver, device) or any(map(kernels_of, smallest)) else _UNKNOWN
        for entry in group:
            if device is None and entry.details.versions:
                yield unknown(entry, FOREIGN)
                continue
            if device is None:
                message = f"has no header of an entry: {NEVER}"
                problems[entry.key] = Problem(entry.root / entry.key, "damaged", message)
            kernels = kernels_of(entry) if contents and guest is None else None
            detail = {"of": {None: "OpenCL", _GRAPHICS: _GL}.get(guest, "unknown")}
            about = entry.details._replace(kernels=kernels, detail=detail)
            kind: Kind = "entry" if guest is None else "foreign"
            yield entry._replace(details=about, kind=kind, because=guest)
    yield from problems.values()


class EntryCodec(Codec):
    """An entry, the same in each form of the cache."""

    form = "mesa-entry/1"

    def describe(self, data: bytes) -> details.Details:
        """Return kernels, device and driver."""
        header = read_header(data)
        device, driver = ("", "") if header is None else (header.device, header.driver)
        return details.Details(kernels_in(data), device, {"driver": driver})

    def check(self, data: bytes) -> Damage | None:
        """Compare the checksum. Nothing can check the name."""
        wrong = complaint(data)
        return None if wrong is None else Damage(RECOMPILES, f"{wrong}: {NEVER}")

    def foreign(self, data: bytes) -> str | None:
        """Return that an entry is of another version."""
        return FOREIGN if is_foreign(data) else None
