"""MIOpen's kernel databases (``.ukdb``, ``.kdb``): the table, and how a kernel is packed into a row.

Sources: ``src/kern_db.cpp``, ``src/include/miopen/kern_db.hpp`` (columns), ``src/bz2.cpp`` (packing).
"""

from __future__ import annotations

from typing import Final

from cachectl.layers.stores.rows import Schema, Values

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,"
    "`uncompressed_size` INT NOT NULL)"
)
_INDEX: Final = "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args)"
SCHEMA: Final = Schema(
    table="kern_db",
    create=(_TABLE, _INDEX),
    key=("kernel_name", "kernel_args"),
    values=("kernel_blob", "kernel_hash", "uncompressed_size"),
    size="length(kernel_blob)",
)

_LEVEL: Final = 9
#: More than any kernel has, in bytes: larger blobs are bombs.
_LARGEST: Final = 1 << 30
#: The first bytes of code objects: an ELF file, or a bundle of several.
CODE: Final = (b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB")


def digest(data: bytes) -> str:
    """Return MIOpen's checksum of unpacked bytes: md5 in lower-case hex."""
    import hashlib

    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def encode(data: bytes) -> Values:
    """Return the values of a row as MIOpen packs a kernel; a size of 0 means that the blob is not packed."""
    import bz2

    packed = bz2.compress(data, _LEVEL)
    return (packed, digest(data), len(data)) if len(packed) < len(data) else (data, digest(data), 0)


def kernel_key(name: str, args: str) -> str:
    """Return the part of a kernel's key that follows the file: ``NAME::ARGS``.

    A name may contain ``::`` (``ns::kernel.cl.o``), so its ``%`` and ``:`` are written ``%25`` and ``%3A``. Arguments
    are never changed.
    """
    return "::".join((name.replace("%", "%25").replace(":", "%3A"), args))


def split_kernel_key(text: str) -> tuple[str, str]:
    """Return name and arguments from the result of :func:`kernel_key`."""
    name, _, args = text.partition("::")
    return name.replace("%3A", ":").replace("%25", "%"), args


def decode(values: Values) -> bytes:
    """Return the kernel of a row, as ``KernDb::FindRecordUnsafe`` does.

    Raises :class:`ValueError` with the reason if MIOpen could not use the row.
    """
    blob, proof, stated = values
    data = _as_bytes(blob)
    size = int(stated) if isinstance(stated, (int, str)) else -1
    data = decompress(data, size) if size else data
    if digest(data).encode() != _as_bytes(proof):
        raise ValueError(f"the md5 of the kernel is {digest(data)}, its row says {proof!r}")
    if not data:
        raise ValueError("the kernel is empty, which MIOpen takes for a miss")
    return data


def decompress(blob: bytes, size: int) -> bytes:
    """Unpack the first bz2 stream of a blob, which is all that MIOpen reads.

    Raises :class:`ValueError` for a kernel of more than ``size`` bytes (``src/bz2.cpp``), or more than 1 GiB.
    """
    import bz2

    most = min(size, _LARGEST)
    if most <= 0:
        raise ValueError(f"a size of {size} bytes, which is no size")
    decompressor = bz2.BZ2Decompressor()
    try:
        data = decompressor.decompress(blob, most + 1)
    except OSError as error:
        raise ValueError(f"the blob is not a bz2 stream: {error}") from error
    if len(data) > most:
        raise ValueError(f"the kernel is larger than the {most} bytes that are allowed")
    if not decompressor.eof:
        raise ValueError("the bz2 stream is cut short")
    return data


def key_complaint(name: str, args: str) -> str | None:
    """Return why a key breaks MIOpen, which writes both parts between quotes in its statements."""
    if any(mark in part for part in (name, args) for mark in "'\0"):
        return "a quote in the kernel's name or arguments breaks MIOpen's statements"
    # Undecodable bytes of a command line.
    odd = any("\ud800" <= letter <= "\udfff" for letter in name + args)
    return "the key holds characters that a database cannot store" if odd else None


def _as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")
