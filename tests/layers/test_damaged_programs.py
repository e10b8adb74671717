"""Cut and emptied programs of PoCL, and binaries of PyOpenCL: what verify finds, and what it does not look at."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from homes import Home
from support.drivers import register_driver

from cachectl.layers.base.facts import Finding, Severity
from cachectl.layers.base.layer import Layer
from cachectl.layers.formats import bitcode
from cachectl.layers.pocl import PoclKernels
from cachectl.layers.pyopencl import PyOpenCLBinaries

if TYPE_CHECKING:
    from conftest import Driver

#: Damage of a file, with the beginning of what verify says of bitcode and of native code.
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "empty": (lambda _: b"", "is empty", "is empty"),
    "cut": (lambda data: data[: len(data) // 2], "is cut short at ", "is cut short at "),
    "a byte less": (lambda data: data[:-1], "is cut short at ", "is cut short at "),
    "zeros": (lambda data: bytes(len(data)), "is not LLVM bitcode", "is not an ELF file"),
    "zeros at the end": (lambda data: data[:-512] + bytes(512), "ends in zeros", "is damaged: "),
    "a page of zeros at the end": (lambda data: data[:-4096] + bytes(4096), "is cut short at ", "is damaged: "),
    "a longer block": (lambda data: data[:8] + b"\xff" * 8 + data[16:], "is cut short at ", ""),
}


def findings(layer: Layer) -> list[Finding]:
    return [finding for root in layer.roots() for finding in layer.store.verify(root)]


def launched(layer: PoclKernels) -> tuple[str, Path]:
    """Return the key of a program of which a kernel was launched, and its folder."""
    entry = next(entry for entry in layer.entries() if entry.kernels)
    return entry.key, entry.root / entry.key


@pytest.mark.real
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_program_is_found(warm: Home, kind: str) -> None:
    layer = PoclKernels(warm.environment())
    assert findings(layer) == []
    key, folder = launched(layer)
    damage, *messages = DAMAGE[kind]
    for path, message in zip((folder / "program.bc", next(folder.glob("*/*/*.so"))), messages, strict=True):
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        found = findings(layer)
        assert [(one.key, one.severity) for one in found] == ([(key, Severity.FAILS)] if message else [])
        assert all(one.message.startswith(f"{path.relative_to(folder)}: {message}") for one in found)
        path.write_bytes(whole)


@pytest.mark.real
def test_what_is_not_checked_is_said(warm: Home) -> None:
    said = "machine code, and the records of LLVM bitcode"
    done = warm.cachectl("verify", "pocl", "pytools")
    assert (done.stdout, done.stderr) == ("no damage found\n", f"cachectl: pocl: not checked: {said}\n")
    assert json.loads(warm.cachectl("verify", "pocl", "--json").stdout)["not_checked"] == {"pocl": said}


@pytest.mark.real
def test_a_pocl_that_links_itself_replaces_a_damaged_object(home: Home, built_pocl: Driver) -> None:
    home.python("kernels.py", "1", **built_pocl.variables)
    layer = PoclKernels(home.environment())
    assert findings(layer) == []
    path = next(layer.roots()[0].path.glob("*/*/*/*/*.so.o"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert [finding.severity for finding in findings(layer)] == [Severity.HEALS]
    shutil.rmtree(home.path / ".cache" / "pytools")
    home.python("kernels.py", "1", **built_pocl.variables)
    assert findings(layer) == []


INTEL = """
import pyopencl as cl
context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
print(cl.Program(context, "__kernel void k(__global int *a) { a[get_global_id(0)] += 1; }").build().k.function_name)
"""


@pytest.mark.real
@pytest.mark.parametrize("damage", ["cut in half", "random"])
def test_a_broken_binary_of_intels_driver_is_found(home: Home, intel_driver: Driver, damage: str) -> None:
    """PyOpenCL reads no byte of it, and every run fails."""
    home.run(sys.executable, "-c", INTEL, check=True, **intel_driver.variables)
    layer = PyOpenCLBinaries(home.environment(**intel_driver.variables))
    (entry,) = layer.entries()
    assert findings(layer) == []
    binary = entry.root / entry.key / "binary"
    data = binary.read_bytes()
    noise = random.Random(5).randbytes(len(data))  # noqa: S311 - damage, repeatable
    binary.write_bytes(data[: len(data) // 2] if damage == "cut in half" else noise)
    assert "KeyError" in home.run(sys.executable, "-c", INTEL, check=False, **intel_driver.variables).stderr
    (finding,) = findings(layer)
    assert (finding.root / (finding.key or ""), finding.severity) == (binary.parent, Severity.FAILS)
    assert finding.message.startswith("binary: is ")


def test_a_binary_of_a_driver_whose_format_is_unknown_is_left_alone(home: Home) -> None:
    layer = PyOpenCLBinaries(home.environment(OCL_ICD_VENDORS=register_driver(home.path, "libmali.so")))
    folder = layer.roots()[0].path / "pyopencl-compiler-cache-v2-py3.11.7.final.0" / ("0" * 32)
    folder.mkdir(parents=True)
    (folder / "binary").write_bytes(b"a format of its own")
    assert [finding.message.partition(" ")[0] for finding in findings(layer)] == ["info"]


def test_bitcode_in_a_wrapper_is_read() -> None:
    module = b"BC\xc0\xde" + bytes.fromhex("210c0000 01000000 00000000")
    wrapped = b"".join(n.to_bytes(4, "little") for n in (0x0B17C0DE, 0, 20, len(module), 7)) + module
    assert bitcode.complaint(module) is None
    assert bitcode.complaint(wrapped) is None
    assert bitcode.complaint(wrapped[:-1]) == f"is cut short at {len(wrapped) - 1} bytes"


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
