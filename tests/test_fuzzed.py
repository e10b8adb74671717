"""Every parser of cache bytes, on inputs that real libraries wrote, whole and damaged, and on those that broke one.

A parser may answer, or raise what its callers expect. The first byte of an input chooses the parser.
"""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.layers import comgr
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.cuda import entries as compute_cache
from cachectl.layers.formats import bitcode, device_binaries, elf, opencl_source, pdict, pickles
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.mesa import pairs
from cachectl.layers.miopen import databases as miopen_names
from cachectl.layers.miopen import kernels as kernel_db
from cachectl.layers.neo.entries import NeoCodec
from cachectl.layers.pocl import identity
from cachectl.layers.stores.archive import artifact_from_bytes, unpack
from cachectl.layers.stores.records import RecordFile
from cachectl.layers.stores.table import Row

SEEDS = sorted((Path(__file__).parent / "fuzz").glob("*/*"))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pickle(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        _, length = pickles.walk(data)
        assert length is None or 0 < length <= len(data)
    for row in (data, b"loopy" + data):
        pdict.kernel_names(row)


def _compute_entry(data: bytes) -> None:
    compute_cache.entry_complaint("0/1/23456789abcdef", data)
    if (key := compute_cache.key_of(data)) is not None:
        compute_cache.details_of(key)


def _compute_index(data: bytes) -> None:
    records, rest = compute_cache.split_index(data)
    assert compute_cache.split_index(compute_cache.write_index(records) + rest) == (records, rest)
    compute_cache.is_other_version(data, compute_cache.HEADER)


def _kernel_blob(data: bytes) -> None:
    size = int.from_bytes(data[:4], "little")
    with contextlib.suppress(ValueError):
        kernel_db.decode((data[4:], kernel_db.digest(data[4:]), size & 0xFFFFF))


def _records(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as written:
        written.write(data)
        written.flush()
        file = RecordFile("fuzz", Path(written.name), contextlib.nullcontext)
        scanned = list(file.scan())
    for found in scanned:
        assert not isinstance(found, Row) or all(found.key)


def _version(data: bytes) -> None:
    if miopen_names.VERSION_FOLDER.fullmatch(_text(data)):
        miopen_names.version_numbers(_text(data))


def _archive(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert sum(map(len, unpack(data).values())) <= len(data)
    with contextlib.suppress(CachectlError):
        artifact_from_bytes(data)


def _bitcode(data: bytes) -> None:
    bitcode.complaint(data)
    bitcode.producer(data)
    bitcode.kernels(data)
    bitcode.read_symbols(data)


def _comgr(data: bytes) -> None:
    output = comgr.output_of(data)
    assert output is None or len(output) + 16 <= len(data)
    for entry in (data, len(data).to_bytes(8, "little") + data + bytes(8)):
        comgr.ComgrCodec().check(entry)
        comgr.ComgrCodec().describe(entry)


def _mesa_entry(data: bytes) -> None:
    header, head = (mesa_entries.read_header(part) for part in (data, data[: mesa_entries.HEAD]))
    assert head is None or (header is not None and head[:2] == header[:2])
    mesa_entries.complaint(data)
    with contextlib.suppress(ValueError):
        content = mesa_entries.inflate(data)
        assert header is None or len(content) == header.inflated
    mesa_entries.kernels(data)


def _mesa_index(data: bytes) -> None:
    for made, name in ((pairs.Fossilize, "foz_cache.foz"), (pairs.Database, "mesa_cache.db")):
        with tempfile.TemporaryDirectory() as folder:
            pair = made("fuzz", Path(folder), name, 0)
            for path in pair.paths:
                path.write_bytes(data)
            with contextlib.suppress(CachectlError):
                for blob in pair.blobs().values():
                    assert max(blob.end, len(blob.record)) <= len(data)


def _objects(data: bytes) -> None:
    if (file := elf.read_elf(data)) is not None:
        list(file.dynamic_strings())
        list(file.symbols())
    for paths in (("program.bc", "k/1-1-1/k.so"), ("k/1-1-1/k.so.o",)):
        list(identity.judge_files(dict.fromkeys(paths, data), Environment({}, Path("/nowhere"))))


#: The readers of each kind of bytes.
PARSERS: tuple[tuple[Callable[[bytes], object], ...], ...] = (
    (lambda data: pdict.parse_name(_text(data), "3.11.7.final.0"),),
    (_pickle,),
    (opencl_source.source_info, lambda data: list(opencl_source.dependencies(data))),
    (_compute_entry,),
    (_compute_index,),
    (_kernel_blob,),
    (_records,),
    (lambda data: miopen_names.parse_name(_text(data)), lambda data: miopen_names.program_names(_text(data)), _version),
    (_archive,),
    (device_binaries.refusal, device_binaries.part_complaint, _objects),
    (opencl_source.kernel_names,),
    (NeoCodec().check, NeoCodec().describe),
    (_bitcode,),
    (lambda data: comgr.policy_complaint(_text(data)), _comgr),
    (_mesa_entry,),
    (_mesa_index,),
)


def one_input(data: bytes) -> None:
    """Give an input to the parsers that its first byte names."""
    for parse in PARSERS[data[0] % len(PARSERS)] if data else ():
        parse(data[1:])


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.name)
@given(chance=st.data())
def test_no_damage_makes_a_parser_raise(path: Path, chance: st.DataObject) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    one_input(bytes(data))
    for at, byte in chance.draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=8)):
        data[max(1, at) : at + 1] = bytes([byte])
    end = chance.draw(st.integers(1, len(data)))
    one_input(bytes(data[:end]))
    one_input(bytes(data[:end]) + bytes(len(data) - end))
