"""Damage inside PoCL's bitcode and native files, and PyOpenCL's binaries: what verify finds, what ``--deep`` adds."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.drivers import register_driver

from benchmarks.trees import native
from cachectl.layers.base.facts import Finding, Severity, Unverified
from cachectl.layers.formats import bitcode, bitstream, elf, elf_checks
from cachectl.layers.host import llvm_tools
from cachectl.layers.pocl import PoclKernels
from cachectl.layers.pyopencl import PyOpenCLBinaries

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Driver
    from homes import Home

    from cachectl.layers.base.facts import Entry
    from cachectl.layers.base.layer import Layer

FUNCTION_BODY, BLOCK_COUNT = 12, 1


def flipped(data: bytes, at: int, mask: int = 1) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def findings(layer: Layer, *, deep: bool = False) -> list[Finding]:
    return [one for root in layer.roots() for one in layer.store.examine(root, deep=deep) if isinstance(one, Finding)]


def unverified(layer: Layer, *, deep: bool = False) -> list[Unverified]:
    return [
        one for root in layer.roots() for one in layer.store.examine(root, deep=deep) if isinstance(one, Unverified)
    ]


def launched(layer: PoclKernels) -> tuple[Entry, Path]:
    """Return a program of which a kernel was launched, and its folder."""
    entry = next(entry for entry in layer.entries() if entry.kernels)
    return entry, entry.root / entry.key


def no_such_block_count(data: bytes) -> bytes:
    """Let the first function have no basic block: every record is whole, and no LLVM reads it."""
    found = bitstream.records(data, 4, {FUNCTION_BODY: frozenset({BLOCK_COUNT})})
    inside = [record for record in found if record.block == FUNCTION_BODY]
    record = next(record for record in inside if record.code == BLOCK_COUNT)
    bits = int.from_bytes(data, "little")
    # The widths of abbreviation number, code and count come before the operand.
    begin = next(at for at in range(record.at + 12, record.at + 24) if bits >> (at - 12) & 0xFFF == 1 << 6 | 1)
    assert bits >> begin & 0x3F == record.operands[0]
    return (bits & ~(0x3F << begin)).to_bytes(len(data), "little")


#: Damage that the structure of bitcode gives away.
BITCODE_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "the length of a block": lambda data: flipped(data, 8),
    "zeros": lambda data: data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :],
    "ones": lambda data: data[: len(data) // 4] + b"\xff" * 32 + data[len(data) // 4 + 32 :],
    "cut short": lambda data: data[: len(data) // 8 * 4],
    "a part that is missing": lambda data: data[:400] + data[404:],
}


@pytest.mark.real
@pytest.mark.parametrize("kind", BITCODE_DAMAGE)
def test_damage_inside_bitcode_is_found(warm: Home, kind: str) -> None:
    layer = PoclKernels(warm.environment())
    entry, folder = launched(layer)
    program = folder / "program.bc"
    assert findings(layer) == []
    program.write_bytes(BITCODE_DAMAGE[kind](program.read_bytes()))
    (finding,) = findings(layer)
    assert (finding.key, finding.severity) == (entry.key, Severity.FAILS)
    assert finding.message.startswith("program.bc: is damaged or cut short at ")


@pytest.mark.real
def test_a_kernel_that_the_bitcode_does_not_name_is_damage(warm: Home) -> None:
    """The names lie in a table of their own, of which any byte is possible."""
    layer = PoclKernels(warm.environment())
    entry, folder = launched(layer)
    assert entry.kernels is not None
    kernel = entry.kernels[0].encode()
    program = folder / "program.bc"
    data = program.read_bytes()
    program.write_bytes(data.replace(kernel, kernel[:-1] + b"\x7f"))
    assert [finding.message for finding in findings(layer)] == [
        f"program.bc: has no function of the name {kernel.decode()}, which was launched"
    ]


#: Damage to a native file, by what it hits; each is a place and bits to flip.
def places(data: bytes) -> dict[str, tuple[int, int]]:
    found = elf.read_elf(data)
    assert found is not None
    sections = {section.name: section for section in found.sections}
    section_headers = int.from_bytes(data[40:48], "little")
    return {
        "the address of the first segment": (64 + 16 + 1, 0xF0),
        "the size of the last section": (section_headers + 64 * (len(found.sections) - 1) + 32 + 3, 0x40),
        "the name of a symbol": (sections[".dynstr"].offset + 5, 1),
        "the hash of a name": (sections[".gnu.hash"].offset + sections[".gnu.hash"].size - 2, 1),
        "the section of a symbol": (sections[".dynsym"].offset + 24 + 6, 0x40),
        "the table of symbols": (sections[".dynamic"].offset + 8 + 16 * 3, 0x40),
    }


@pytest.mark.real
def test_damage_inside_the_structure_of_native_files_is_found(warm: Home) -> None:
    layer = PoclKernels(warm.environment())
    _, folder = launched(layer)
    path = next(folder.glob("*/*/*.so"))
    data = path.read_bytes()
    assert elf_checks.complaint(data) is None
    for what, (at, mask) in places(data).items():
        path.write_bytes(flipped(data, at, mask))
        (finding,) = findings(layer)
        assert finding.message.startswith(f"{path.relative_to(folder)}: is "), what
        assert finding.severity is Severity.FAILS


def test_an_object_that_pocl_links_itself_costs_one_compilation(home: Home) -> None:
    layer = PoclKernels(home.environment())
    folder = layer.roots()[0].path / "AB" / ("C" * 37) / "k" / "0-0-0"
    folder.mkdir(parents=True)
    (folder / "k.so.o").write_bytes(native("k")[:-1])
    (finding,) = findings(layer)
    assert finding.severity is Severity.HEALS
    assert finding.message.endswith("; PoCL compiles the kernel again")


@pytest.mark.real
def test_a_pocl_that_links_itself_replaces_a_damaged_object(home: Home, built_pocl: Driver) -> None:
    home.python("kernels.py", "1", **built_pocl.variables)
    layer = PoclKernels(home.environment())
    assert findings(layer, deep=True) == []
    path = next(layer.roots()[0].path.glob("*/*/*/*/*.so.o"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert [finding.severity for finding in findings(layer)] == [Severity.HEALS]
    shutil.rmtree(home.path / ".cache" / "pytools")
    home.python("kernels.py", "1", **built_pocl.variables)
    assert findings(layer) == []


# ---------------------------------------------------------------------- --deep


@pytest.fixture
def disassembler(warm: Home) -> llvm_tools.Disassembler:
    layer = PoclKernels(warm.environment())
    release = bitcode.llvm_release((launched(layer)[1] / "program.bc").read_bytes())
    assert release is not None
    found = llvm_tools.Disassemblers(warm.environment()).of(release)
    if found is None:
        pytest.skip(f"needs llvm-dis of LLVM {release} or newer: apt-get install llvm-{release}")
    return found


@pytest.mark.real
def test_only_deep_finds_what_is_wrong_with_operands(warm: Home, disassembler: llvm_tools.Disassembler) -> None:
    layer = PoclKernels(warm.environment())
    entry, folder = launched(layer)
    assert findings(layer, deep=True) == []
    program = folder / "program.bc"
    program.write_bytes(no_such_block_count(program.read_bytes()))
    assert findings(layer) == []
    (finding,) = findings(layer, deep=True)
    assert (finding.key, finding.severity) == (entry.key, Severity.FAILS)
    assert finding.message == f"program.bc: llvm-dis {disassembler.release} cannot read it"


@pytest.mark.real
def test_checks_that_were_not_made_are_reported(warm: Home, disassembler: llvm_tools.Disassembler) -> None:
    del disassembler
    layer = PoclKernels(warm.environment())
    entries = list(layer.entries())
    natives = sum(len(list((entry.root / entry.key).glob("*/*/*.so"))) for entry in entries)
    code = f"machine code of {natives} native files"
    records = f"bitcode records of {len(entries)} programs"
    plain, deep = (warm.cachectl("verify", "pocl", *more) for more in ((), ("--deep",)))
    assert plain.stdout == deep.stdout == "no damage found\n"
    assert plain.stderr == f"cachectl: not checked: {code}; {records} (--deep checks them with llvm-dis)\n"
    assert deep.stderr == f"cachectl: not checked: {code}\n"
    said = json.loads(warm.cachectl("verify", "pocl", "--json").stdout)["not_checked"]
    assert [(one["layer"], one["what"], one["count"]) for one in said] == [
        ("pocl", "machine code of", natives),
        ("pocl", "bitcode records of", len(entries)),
    ]


@pytest.mark.real
def test_without_a_tool_deep_names_the_package(warm: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm_tools, "_FOLDERS", ())
    layer = PoclKernels(replace(warm.environment(), variables={**warm.variables, "PATH": "/nowhere"}))
    said = [one for one in unverified(layer, deep=True) if one.what == "bitcode records of"]
    assert [one.count for one in said if one.count] == [len(list(layer.entries()))]
    assert "install the package llvm-" in said[0].remedy


def test_a_tool_that_hangs_or_cannot_start_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm_tools, "_SECONDS", 0.5)
    tool = tmp_path / "llvm-dis-99"
    for script, answer in (("sleep 60", None), ("exit 1", False), ("cat > /dev/null", True), ("kill -9 $$", False)):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o700)
        assert llvm_tools.Disassembler(99, str(tool), {"PATH": "/usr/bin:/bin"}).reads(bytes(1 << 20)) is answer
    assert llvm_tools.Disassembler(99, str(tmp_path / "gone"), {}).reads(b"") is None


# ---------------------------------------------------------------------- PyOpenCL's binaries

INTEL = """
import pyopencl as cl
context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
print(cl.Program(context, "__kernel void k(__global int *a) { a[get_global_id(0)] += 1; }").build().k.function_name)
"""


@pytest.mark.real
@pytest.mark.parametrize("damage", ["cut in half", "random"])
def test_a_broken_binary_of_intels_driver_is_found(home: Home, intel_driver: Driver, damage: str) -> None:
    """PyOpenCL reads no byte of it, and every run fails."""
    run = (sys.executable, "-c", INTEL)
    home.run(*run, check=True, **intel_driver.variables)
    layer = PyOpenCLBinaries(home.environment(**intel_driver.variables))
    (entry,) = layer.entries()
    assert findings(layer) == []
    assert [(one.what, one.count) for one in unverified(layer) if one.count] == [("machine code of", 1)]
    binary = entry.root / entry.key / "binary"
    data = binary.read_bytes()
    noise = random.Random(5).randbytes(len(data))  # noqa: S311 - damage, repeatable
    binary.write_bytes(data[: len(data) // 2] if damage == "cut in half" else noise)
    assert "KeyError" in home.run(*run, check=False, **intel_driver.variables).stderr
    (finding,) = findings(layer)
    assert (finding.key, finding.severity) == (entry.key, Severity.FAILS)
    assert finding.message.startswith("binary: is ")


@pytest.mark.real
def test_damage_inside_a_binary_of_intels_driver_is_found(home: Home, intel_driver: Driver) -> None:
    """It runs with damaged bitcode, and not with a damaged object."""
    home.run(sys.executable, "-c", INTEL, check=True, **intel_driver.variables)
    layer = PyOpenCLBinaries(home.environment(**intel_driver.variables))
    (entry,) = layer.entries()
    binary = entry.root / entry.key / "binary"
    data = binary.read_bytes()
    found = elf.read_elf(data)
    assert found is not None
    at = {section.name: section.offset for section in found.sections}
    for section, place, severity in ((".ocl.ir", 400, Severity.RISKS), (".ocl.obj", 18, Severity.FAILS)):
        binary.write_bytes(data[: at[section] + place] + b"\xff" * 8 + data[at[section] + place + 8 :])
        (finding,) = findings(layer)
        assert finding.severity is severity
        assert finding.message.startswith(f"binary: {section} is ")


def test_a_binary_of_a_driver_whose_format_is_unknown_is_left_alone(home: Home) -> None:
    layer = PyOpenCLBinaries(home.environment(OCL_ICD_VENDORS=register_driver(home.path, "libmali.so")))
    folder = layer.roots()[0].path / "pyopencl-compiler-cache-v2-py3.11.7.final.0" / ("0" * 32)
    folder.mkdir(parents=True)
    (folder / "binary").write_bytes(b"a format of its own")
    assert [finding.code for finding in findings(layer)] == ["info"]


# ---------------------------------------------------------------------- formats


def test_bitcode_in_a_wrapper_is_read() -> None:
    module = b"BC\xc0\xde" + bytes.fromhex("210c0000 01000000 00000000")
    wrapped = b"".join(n.to_bytes(4, "little") for n in (0x0B17C0DE, 0, 20, len(module), 7)) + module
    assert bitcode.complaint(module) is None
    assert bitcode.complaint(wrapped) is None
    assert bitcode.complaint(wrapped[:-1]) == f"is cut short at {len(wrapped) - 1} bytes"


@pytest.mark.parametrize("where", ["its own chunk", "beyond 64 bits"])
def test_a_number_is_read_to_its_end(where: str) -> None:
    """A record of one number of 13 chunks is whole, and one of 14 is not."""
    chunks = 13 if where == "its own chunk" else 14
    text = "110" + "100000" + "100000" + "000001" * (chunks - 1) + "000000" + "000"
    length = -(-len(text) // 32)
    body = int(text[::-1], 2).to_bytes(4 * length, "little")
    data = b"BC\xc0\xde" + bytes.fromhex("210c0000") + length.to_bytes(4, "little") + body
    assert (bitcode.complaint(data) is None) == (chunks == 13)
