"""Caches made by the thousand, true to what the real libraries leave: folders, names, formats, number of files.

Programs of :func:`programs` are those that PoCL made here of loopy kernels, each under many keys. Those of :func:`pocl`
are as small as they may be (a page or so a file, where a real one has 48 KiB), so that a million of them fit into
memory; nothing that is compared reads them. Rows of loopy's dictionaries are rows that loopy 2025.2 has stored, each
under a kernel name and a key of its own, so that a parser has the real work. Everything is dated a day back: what has
just changed may be in use by a running program, and a purge leaves it. :func:`expect` proves that ``cachectl`` takes
what was made for sound entries.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import shutil
import sqlite3
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commands import Failed, cachectl, output, variables
from cachectl.layers.cuda import entries as compute_cache

PYTHON = ".".join(str(part) for part in sys.version_info)
#: The kernel that ``ls --kernel`` looks for, and how many entries there are to each of its.
SOUGHT = "laplace_3d_q1"
_EVERY = 25_000
#: The name in the recorded rows: as long as any name given here, so that a pickle stays one.
_RECORDED = b"kernel_000000"
_ROWS = Path(__file__).with_name("recorded_rows.json")
_DAY = 86_400.0
_LETTERS = bytes.maketrans(b"0123456789abcdef", b"ABCDEFGHIJKLMNOP")
_VARIANT = "1-1-1-goffs0-smallgrid"


@dataclass(frozen=True, slots=True)
class Counts:
    """How many entries a layer is to be found with."""

    layer: str
    entries: int


def kernel(number: int) -> str:
    """Name the kernel of an entry; every name is equally long."""
    return SOUGHT if number % _EVERY == 0 else f"kernel_{number % 1_000_000:06d}"


def _digest(number: int, size: int) -> str:
    return hashlib.blake2b(b"%d" % number, digest_size=size).hexdigest()


def source(name: str) -> bytes:
    """Return a program of a few kilobytes with one kernel."""
    lines = "\n".join(
        f"  acc{line % 4} = fma(u[base + {line}], weight[{line % 8}], acc{(line + 1) % 4});" for line in range(40)
    )
    return (
        f"#define WIDTH 16\n__kernel void {name}(__global const double *restrict u, __global double *restrict out,\n"
        f"    __constant double *weight)\n{{\n  int const base = get_global_id(0) * WIDTH;\n"
        f"  double acc0 = 0, acc1 = 0, acc2 = 0, acc3 = 0;\n{lines}\n  out[get_global_id(0)] = acc0 + acc1;\n}}\n"
    ).encode()


def _write(path: str, data: bytes, mode: int = 0o600) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        if data:
            os.write(handle, data)
    finally:
        os.close(handle)


def _age(paths: Iterator[str] | tuple[str, ...]) -> None:
    """Date things a day back: files before the folders they are in."""
    then = time.time() - _DAY
    for path in paths:
        os.utime(path, (then, then))


# ---------------------------------------------------------------------- PoCL

#: A module of one record of many zeros: as long as the bitcode of a small program, and whole.
_ZEROS = 3989
_BITCODE = struct.pack("<4sII", b"BC\xc0\xde", 1 | 8 << 2 | 3 << 10, 749) + (
    # The record: no abbreviation, code 1, a count of three chunks of six bits, and the operands of six bits each.
    3 | 1 << 3 | (0x20 | _ZEROS & 31) << 9 | (0x20 | _ZEROS >> 5 & 31) << 15 | (_ZEROS >> 10) << 21
).to_bytes(4 * 749, "little")
#: The length of a small kernel's machine code, in bytes.
_CODE = 1_500


def native(*kernels: str, linked: bool = True) -> bytes:
    """Return a library, or an object, that defines work-group functions of these kernels, by name alone."""
    symbols, strings = bytes(24), b"\0"
    for kernel in kernels:
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0, 1, 0, _CODE)
        strings += f"_pocl_kernel_{kernel}_workgroup\0".encode()
    # Name, type, flags, address, offset, size, link, info, alignment and size of an entry.
    sections = (
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (0, 1, 6, 0, 64, _CODE, 0, 0, 4, 0),
        (0, 11 if linked else 2, 0, 0, 64 + _CODE, len(symbols), 3, 1, 1, 24),
        (1, 3, 0, 0, 64 + _CODE + len(symbols), len(strings), 0, 0, 1, 0),
    )
    body = b"\x90" * _CODE + symbols + strings
    header = struct.pack(
        "<HHIQQQIHHHHHH", 3 if linked else 1, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(sections), 3
    )
    table = b"".join(struct.pack("<IIQQQQIIQQ", *section) for section in sections)
    return b"\x7fELF\2\1\1".ljust(16, b"\0") + header + body + table


def pocl(home: Path, entries: int, first: int = 0) -> Counts:
    """Make a kernel cache of PoCL 3.0: of each program its bitcode, its time stamp and one work-group function."""
    root = home / ".cache" / "pocl" / "kcache"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(first, first + entries):
        _pocl_entry(f"{root}/{pocl_key(number)}", kernel(number))
    return Counts("pocl", entries)


def pocl_key(number: int) -> str:
    """Return the name of a program in PoCL's form: 40 letters with a slash in the third's place."""
    letters = _digest(number, 20).encode().translate(_LETTERS).decode()
    return f"{letters[:2]}/{letters[3:]}"


def _pocl_entry(folder: str, name: str) -> None:
    inner = f"{folder}/{name}"
    variant = f"{inner}/{_VARIANT}"
    os.makedirs(variant, mode=0o700)
    files = (f"{folder}/program.bc", f"{folder}/last_accessed", f"{variant}/{name}.so")
    for path, data in zip(files, (_BITCODE, b"", native(name)), strict=True):
        _write(path, data)
    _age((*files, variant, inner, folder))


def programs(home: Path, entries: int) -> Counts:
    """Make a kernel cache of programs that PoCL compiles now, from loopy kernels, each under many keys."""
    job = (sys.executable, str(Path(__file__).with_name("compiling_job.py")), "loopy", "0", str(min(8, entries)))
    root = home / ".cache" / "pocl" / "kcache"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as compiled:
        output(job, variables(Path(compiled)))
        real = sorted(path.parent for path in Path(compiled, ".cache", "pocl", "kcache").glob("*/*/program.bc"))
        for number in range(entries):
            folder = root / pocl_key(number)
            shutil.copytree(real[number % len(real)], folder)
            _age((*(str(path) for path in sorted(folder.rglob("*"), reverse=True)), str(folder)))
    return Counts("pocl", entries)


# ---------------------------------------------------------------------- CUDA

#: What a front end's key has after the source: options, lengths and version, as driver 580 wrote them.
_OPTIONS = b"-cl-nv-arch sm_90  -nv-m64\x03\0\0\0\0\0\0\0Z\0\0\0\0\0\0\0\x00580.159.04\x00NVVM70"


def cuda(home: Path, entries: int) -> Counts:
    """Make a ComputeCache of front-end entries with its index."""
    root = home / ".nv" / "ComputeCache"
    root.mkdir(mode=0o700, parents=True)
    payload = bytes(range(256)) * 8
    checksum = compute_cache.fnv1a(payload)
    records = []
    for number in range(entries):
        key = _cuda_key(number)
        identifier = compute_cache.fnv1a(key)
        header = compute_cache.HEADER.pack(compute_cache.VERSION, len(key), len(payload), checksum)
        name = f"{identifier:016x}"
        folder = f"{root}/{name[0]}/{name[1]}"
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _write(f"{folder}/{name[2:]}", header + key + payload, 0o644)
        _age((f"{folder}/{name[2:]}",))
        records.append((identifier, len(key) + len(payload)))
    (root / "index").write_bytes(compute_cache.write_index(records))
    return Counts("cuda", entries)


def _cuda_key(number: int) -> bytes:
    # A short program: the name of an entry is a hash that takes a step for each byte.
    body = b"(__global float *a) { int g = get_global_id(0); a[g] = native_sin(a[g]) * %d.0f + sqrt(a[g]); }\0" % number
    return b"__kernel void " + kernel(number).encode() + body + _OPTIONS


# ---------------------------------------------------------------------- PyOpenCL

#: The pickle of a ``pyopencl.cache._SourceInfo`` without dependencies, as PyOpenCL 2026.1 wrote it.
_INFO = (
    b"\x80\x04\x95B\0\0\0\0\0\0\0\x8c\x0epyopencl.cache\x94\x8c\x0b_SourceInfo\x94\x93\x94)\x81\x94}\x94"
    b"(\x8c\x0cdependencies\x94]\x94\x8c\x03log\x94Nub."
)


def pyopencl(home: Path, entries: int) -> Counts:
    """Make PyOpenCL's cache of programs: source, binary and info of each."""
    root = home / ".cache" / "pyopencl" / f"pyopencl-compiler-cache-v2-py{PYTHON}"
    root.mkdir(mode=0o755, parents=True)
    for number in range(entries):
        folder = f"{root}/{_digest(number, 16)}"
        os.mkdir(folder)
        contents = {"source.cl": source(kernel(number)), "binary": native(kernel(number)), "info": _INFO}
        for name, data in contents.items():
            _write(f"{folder}/{name}", data, 0o644)
        _age((*(f"{folder}/{name}" for name in contents), folder))
    return Counts("pyopencl", entries)


# ---------------------------------------------------------------------- pytools

#: Of loopy's dictionaries the one that grows largest.
SCHEDULES = "loopy-schedule-cache"


def recorded() -> dict[str, bytes]:
    """Return a real row of each dictionary that loopy fills, by identifier."""
    rows: dict[str, str] = json.loads(_ROWS.read_text())
    return {identifier: zlib.decompress(base64.b64decode(row)) for identifier, row in rows.items()}


def dictionary(home: Path, identifier: str) -> Path:
    """Return where pytools 2026.1 keeps a dictionary."""
    return home / ".cache" / "pytools" / f"pdict-v5-{identifier}-{PYTHON}.sqlite"


def schedules(home: Path) -> Path:
    """Return the dictionary of schedules."""
    return dictionary(home, next(name for name in recorded() if name.startswith(SCHEDULES)))


def one_dictionary(home: Path, rows: int) -> Counts:
    """Fill loopy's dictionary of schedules: 5 kB a row."""
    path = schedules(home)
    row = next(row for name, row in recorded().items() if name.startswith(SCHEDULES))
    _fill(path, row, rows)
    return Counts("loopy", rows)


def loopy(home: Path, rows: int) -> Counts:
    """Fill the five dictionaries that every kernel of loopy's has a row in, evenly."""
    each = -(-rows // len(recorded()))
    for identifier, row in recorded().items():
        _fill(dictionary(home, identifier), row, each)
    return Counts("loopy", each * len(recorded()))


def others(home: Path, dictionaries: int, rows: int) -> Counts:
    """Make dictionaries of other programs."""
    row = pickle.dumps(("key", "value" * 200), protocol=4)
    for number in range(dictionaries):
        _fill(dictionary(home, f"sumpy-code-cache-v8-p{number}"), row, rows)
    return Counts("pytools", dictionaries * rows)


def _fill(path: Path, row: bytes, rows: int) -> None:
    """Make a dictionary as pytools does, with a journal that is deleted, and fill it in one transaction."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = delete")
        connection.execute("pragma synchronous = off")
        connection.execute("pragma cache_size = -64000")
        connection.execute("create table dict (keyhash text not null primary key, key_value text not null)")
        connection.execute("begin")
        connection.executemany("insert into dict values (?, ?)", _rows(row, rows))
        connection.execute("commit")
    _age((str(path),))


def _rows(row: bytes, rows: int) -> Iterator[tuple[str, bytes]]:
    for number in range(rows):
        yield _digest(number, 8), row.replace(_RECORDED, kernel(number).encode())


# ---------------------------------------------------------------------- proof


def expect(home: Path, *expected: Counts) -> None:
    """Have ``cachectl report`` count what was made; raise :class:`Failed` where it finds other entries or damage."""
    document = json.loads(output((*cachectl(), "report", "--json"), variables(home)))
    found = {layer["layer"]: layer for layer in document["layers"] if layer["scope"] == "user" and layer["entries"]}
    wanted = {counts.layer: counts.entries for counts in expected if counts.entries}
    if (counted := {name: layer["entries"] for name, layer in found.items()}) != wanted:
        raise Failed(f"the caches were to hold {wanted}, and cachectl counts {counted}")
    problems = [
        problem["message"] for layer in found.values() for root in layer["roots"] for problem in root["problems"]
    ]
    if problems:
        raise Failed(f"cachectl finds a fault in what was made: {problems[0]}")
