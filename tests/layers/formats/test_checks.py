"""Every check of bytes, on what real compilers and drivers wrote: it finds every truncation."""

import _ctypes
import io
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from cachectl.layers import comgr
from cachectl.layers.cuda import entries as compute_cache
from cachectl.layers.formats import bitcode, device_binaries, elf
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.neo.entries import NeoCodec

TESTS = Path(__file__).parents[2]
#: A kind of file, its check, and where samples are: seeds of the fuzzer by their beginning, members of archives.
CHECKS: dict[str, tuple[Callable[[bytes], object], list[str]]] = {
    "bitcode of clang": (bitcode.complaint, ["12-clang", "amdgpu-llvm14:axpy.bc"]),
    "native code": (elf.complaint, ["9-pocl-so", "9-pocl-object"]),
    "AMD's code objects": (elf.complaint, ["amdgpu-llvm14:axpy-gfx906.o", "amdgpu-llvm14:axpy-gfx90a.o"]),
    "binaries of Intel's CPU driver": (device_binaries.complaint, ["9-intel"]),
    "programs of ocloc": (NeoCodec().check, ["neo-ocloc-22.43:"]),
    "entries of comgr": (lambda data: data if comgr.output_of(data) is None else None, ["13-entry"]),
    "entries of the ComputeCache": (compute_cache.form_complaint, ["computecache-h200-opencl:3/"]),
    "index of the ComputeCache": (lambda data: None if compute_cache.is_whole(data) else data, ["4-index"]),
    "entries of Mesa": (mesa_entries.complaint, ["14-code", "14-glsl", "14-nir"]),
}
KINDS = pytest.mark.parametrize("kind", CHECKS)


@cache
def samples(kind: str) -> list[bytes]:
    found: list[bytes] = []
    for place in CHECKS[kind][1]:
        archive, colon, beginning = place.partition(":")
        if not colon:
            # The first byte of a seed chooses the parser.
            found.append((TESTS / "fuzz/corpus" / place).read_bytes()[1:])
            continue
        with tarfile.open(TESTS / f"data/{archive}.tar.gz") as tar:
            members = [one for one in tar if one.isfile() and one.name.removeprefix("./").startswith(beginning)]
            found += [file.read() for one in members if (file := tar.extractfile(one)) is not None]
    assert found
    return found


@KINDS
def test_every_truncation_is_found(kind: str) -> None:
    check = CHECKS[kind][0]
    for data in samples(kind):
        assert check(data) is None
        # An empty index is that of a new cache, and other drivers return binaries of any kind.
        # ocloc fills files up with zeros.
        end = len(data.rstrip(b"\0")) if kind == "programs of ocloc" else len(data)
        assert [length for length in range(4, end) if check(data[:length]) is None] == []


#: Ends of zeros that each check finds; sections of native code may end in fewer.
@pytest.mark.parametrize(("kind", "ends"), [("bitcode of clang", (16, 512)), ("native code", (512, 4096))])
def test_zeros_of_a_power_loss_are_found(kind: str, ends: tuple[int, ...]) -> None:
    """And in bitcode a block that claims more than there is."""
    check, data = CHECKS[kind][0], samples(kind)[0]
    longer = [data[:8] + b"\xff" * 8 + data[16:]] if "bitcode" in kind else []
    assert all(check(wrong) for wrong in (b"", bytes(len(data)), *(data[:-end] + bytes(end) for end in ends), *longer))


def test_what_llvm_skips_is_not_damage() -> None:
    """Words behind the last block, and a header before the first."""
    check, data = CHECKS["bitcode of clang"][0], samples("bitcode of clang")[0]
    assert check(data + bytes(4)) is None
    assert check(data + bytes(3)) is not None
    assert check(b"\xde\xc0\x17\x0b" + bytes(16) + data) is None


#: Exits with a status that is not 0 if the dynamic linker cannot load a library, whose calls must be there.
LOAD = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY); os._exit(0)"


def test_a_library_is_damaged_where_the_dynamic_linker_fails(tmp_path: Path) -> None:
    """It reads no section: what was cut or emptied behind the segments is not missed."""
    # One of Python's own, whose references this process has.
    whole = Path(_ctypes.__file__).read_bytes()
    elffile = pytest.importorskip("elftools.elf.elffile").ELFFile(io.BytesIO(whole))
    loaded = [segment for segment in elffile.iter_segments() if segment["p_type"] == "PT_LOAD"]
    end = max(segment["p_offset"] + segment["p_filesz"] for segment in loaded)
    library, judged = tmp_path / "library.so", set()
    for missing in (0, 1, 64, 500, 1000, 4000, 8000, len(whole) * 2 // 3, len(whole) - 64):
        for filled in (b"", bytes(missing)):
            library.write_bytes(whole[: len(whole) - missing] + filled)
            status = subprocess.run([sys.executable, "-c", LOAD, library], check=False, capture_output=True).returncode
            is_damaged = elf.linking_complaint(library.read_bytes(), None) is not None
            # It may load one that lacks data, which is damaged all the same. Zeros that fill no page may be data.
            needed = (end - 1) // 4096 * 4096 + 1 if filled else end
            assert is_damaged is (len(whole) - missing < needed), (missing, bool(filled))
            assert is_damaged or status == 0 or filled
            judged.add((is_damaged, status == 0))
    assert {(False, True), (True, False)} <= judged


def test_a_list_longer_than_its_block_is_not_read() -> None:
    """A record that states 2**30 operands, and one of so many elements of no width, take no time and no memory."""
    operands = "110" + "100000" + ("000001" * 5 + "100000") + "0" * 40
    layout = "010" + "01000" + "0" + "110" + "0" + "100" + "00000" + "001" + ("000001" * 5 + "100000") + "0" * 40
    for text in (operands, layout):
        length = -(-len(text) // 32)
        body = int(text[::-1], 2).to_bytes(4 * length, "little")
        data = b"BC\xc0\xde" + bytes.fromhex("210c0000") + length.to_bytes(4, "little") + body
        assert bitcode.complaint(data) is None
        assert bitcode.kernels(data) is None


def test_a_frame_of_rusticl_states_the_length_of_its_module() -> None:
    """The frame of Mesa 22.3 takes nothing behind the module; that of 2025 begins with a name, and does."""
    module = struct.pack("<6I", 0x07230203, 0x10000, 0, 9, 0, 1 << 16 | 56)
    old = struct.pack("<3I", 1, len(module), 4) + module
    new = b"rusticl\0" + struct.pack("<4I", 1, 4, len(module), 4) + b"name" + module
    refusal = device_binaries.refusal
    assert [refusal(data) for data in (old, new, new + b"\0")] == [None] * 3
    assert all(refusal(old[:length]) for length in range(1, len(old)))
    assert all(refusal(new[:length]) for length in range(8, len(new)))
    assert refusal(old + b"\0") == "has 37 bytes, but its header says 36"
    assert refusal(old[:-4] + bytes(4)) is not None


def test_symbols_of_bitcode_are_those_of_its_module() -> None:
    for data in samples("bitcode of clang"):
        symbols = bitcode.read_symbols(data)
        assert symbols is not None
        assert set(bitcode.kernels(data) or ()) <= symbols.defined
        assert bitcode.read_symbols(data[: len(data) // 2]) is None
