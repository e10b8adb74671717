"""MIOpen's kernel databases (``.ukdb``, ``.kdb``): the table, and how a kernel is packed into a row.

Sources: ``src/kern_db.cpp``, ``src/include/miopen/kern_db.hpp`` (columns), ``src/bz2.cpp`` (packing).
"""

from __future__ import annotations

import bz2
from collections.abc import Sequence
from typing import Final

from cachectl.layers.stores.rows import Schema

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
    "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL"
)
_INDEX: Final = "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args)"

#: MIOpen 2.4.0 and newer.
SCHEMA: Final = Schema(
    table="kern_db",
    create=(f"{_TABLE},`kernel_hash` TEXT NOT NULL,`uncompressed_size` INT NOT NULL)", _INDEX),
    key=("kernel_name", "kernel_args"),
    values=("kernel_blob", "kernel_hash", "uncompressed_size"),
    size="length(kernel_blob)",
)
#: MIOpen 2.3.0: plain blobs without a checksum.
SCHEMA_2_3: Final = Schema("kern_db", (f"{_TABLE})", _INDEX), SCHEMA.key, ("kernel_blob",), SCHEMA.size)

_LEVEL: Final = 9
#: More than any kernel has, in bytes: what claims more is a bomb.
_LARGEST: Final = 1 << 30
#: What a code object begins with: an ELF file, or a bundle of several.
_CODE: Final = (b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB")


def is_code(head: bytes) -> bool:
    """Tell whether a file of a kernel begins as one."""
    return head.startswith(_CODE)


def schema_of(columns: frozenset[str]) -> Schema | None:
    """Tell which generation a table's columns are; ``None`` where no MIOpen could use them.

    MIOpen names its columns in every statement: further ones, and another order, do no harm.
    """
    if columns.issuperset(SCHEMA.columns):
        return SCHEMA
    proofs = {"kernel_hash", "uncompressed_size"}
    return SCHEMA_2_3 if columns.issuperset(SCHEMA_2_3.columns) and not columns & proofs else None


def digest(data: bytes) -> str:
    """Return the checksum of uncompressed bytes as MIOpen spells it: md5 in lower-case hex."""
    import hashlib

    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def encode(data: bytes, schema: Schema = SCHEMA) -> tuple[object, ...]:
    """Pack a kernel into a row's values as MIOpen does; a size of 0 says that the blob is plain."""
    if schema is SCHEMA_2_3:
        return (data,)
    packed = bz2.compress(data, _LEVEL)
    return (packed, digest(data), len(data)) if len(packed) < len(data) else (data, digest(data), 0)


def decode(values: Sequence[object]) -> bytes:
    """Unpack the value columns of a row of either generation.

    Raises :class:`ValueError` with the reason wherever MIOpen could not use the row.
    """
    data = _as_bytes(values[0])
    if len(values) > 1:
        size = int(str(values[2]))
        data = decompress(data, size) if size else data
        if digest(data) != values[1]:
            message = f"the md5 of the kernel is {digest(data)}, its row says {values[1]}"
            raise ValueError(message)
    if not data:
        message = "the kernel is empty, which MIOpen takes for a miss"
        raise ValueError(message)
    return data


def decompress(blob: bytes, size: int) -> bytes:
    """Unpack exactly one bz2 stream of at most ``size`` bytes, and never more than that.

    Joined streams, which :func:`bz2.decompress` accepts, are refused: MIOpen stops after the first.
    """
    decompressor = bz2.BZ2Decompressor()
    if not 0 <= size <= _LARGEST:
        message = f"a size of {size} bytes"
        raise ValueError(message)
    try:
        data = decompressor.decompress(blob, size + 1)
    except (OSError, OverflowError) as error:
        message = f"the blob is not a bz2 stream of {size} bytes: {error}"
        raise ValueError(message) from error
    complaint = None
    if len(data) > size:
        complaint = f"the kernel is larger than the {size} bytes its row says"
    elif not decompressor.eof:
        complaint = "the bz2 stream is cut short"
    elif decompressor.unused_data:
        complaint = "more bytes follow the bz2 stream"
    if complaint is not None:
        raise ValueError(complaint)
    return data


def key_complaint(name: str, args: str) -> str | None:
    """Say why a key breaks MIOpen, which pastes both parts between quotes into its statements."""
    if any(mark in part for part in (name, args) for mark in "'\0"):
        return "a quote in the kernel's name or arguments breaks MIOpen's statements"
    return None


def store_complaint(name: str, args: str, data: bytes) -> str | None:
    """Say why MIOpen would not have stored such a kernel."""
    if not name.endswith((".o", ".obj")):
        return f"the kernel name {name!r} does not end in .o"
    return key_complaint(name, args) or (None if data else "the kernel is empty")


def _as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
