"""After a driver is replaced, entries that no known driver can hit are stale, and ``report`` says so first."""

import os
import sys
from pathlib import Path

import pytest
from homes import Driver, Home, unpack_compute_cache
from support.layers import write
from tiers import real

from cachectl import Limits, Stack
from cachectl.layers.core import Environment
from cachectl.verbs.report import lines

#: So much of a library that the linker of this Python takes it for one.
LIBRARY = Path(sys.executable).read_bytes()[:64]
POCL = b"\0OpenCL 3.0 PoCL %s  Linux, Release, RELOC, LLVM %s, SLEEF\0"


def stack_of(home: Path, library: Path) -> Stack:
    """Return the layers of a home in which this is the only driver, and no Python is known."""
    write(home / "vendors/one.icd", f"{library}\n")
    environment = Environment({"HOME": str(home), "OCL_ICD_VENDORS": str(home / "vendors")}, home=home)
    return Stack(environment._replace(executable=home / "bin/python", processes=home / "proc"))


def said(stack: Stack, *layers: str) -> list[str]:
    return [
        line for line in lines(stack.report(layers), "/") if isinstance(line, str) and "no known program hits" in line
    ]


@real
def test_programs_of_another_llvm_are_stale_unless_they_are_newer_than_pocl(warm: Home) -> None:
    """PoCL's own entries, and a library that was installed after they were built."""
    kept = write(warm.path / "same/libpocl.so", LIBRARY + POCL % (b"3.1", b"14.0.6"))
    assert said(stack_of(warm.path, kept), "pocl") == []
    assert stack_of(warm.path, kept).report(["pocl"]).total.stale_entries is None
    stack = stack_of(warm.path, write(warm.path / "libpocl.so", LIBRARY + POCL % (b"99.1+x", b"99.0.1")))
    total = stack.report(["pocl"]).total
    assert total.entries is not None
    assert total.stale_entries == total.entries > 5
    (line,) = said(stack, "pocl")
    assert line.startswith(f"pocl: {total.entries} of {total.entries} entries (")
    # The system's PoCL is known too, whatever variable hides it.
    assert "compiled by LLVM 14.0.6, before PoCL 99.1+x with LLVM 99.0.1" in line
    assert line.endswith("; cachectl prune --stale pocl frees them")
    first = next(warm.path.rglob("program.bc"))
    os.utime(first)
    assert stack.report(["pocl"]).total.stale_entries == total.entries - 1, "somebody builds with LLVM 14 still"
    away = write(warm.path / "vendors/two.icd", "/not/mounted/libpocl.so\n")
    assert stack_of(warm.path, warm.path / "libpocl.so").report(["pocl"]).total.stale_entries is None
    away.unlink()
    assert stack.prune(Limits(stale=True), layers=["pocl"]).total.removed == total.entries - 1
    assert [*warm.path.rglob("program.bc")] == [first]


@real
@pytest.mark.environment
@pytest.mark.parametrize("driver", ["debian_pocl", "built_pocl"])
def test_real_drivers_say_which_llvm_they_have(warm: Home, driver: str, request: pytest.FixtureRequest) -> None:
    found: Driver = request.getfixturevalue(driver)
    library = Path(found["OCL_ICD_VENDORS"]).read_text().strip()
    for path in (warm.path / ".cache/pocl").rglob("*"):
        os.utime(path, (1e9, 1e9))
    (line,) = said(stack_of(warm.path, Path(library)), "pocl")
    assert "compiled by LLVM 14.0.6, before PoCL " in line


def test_entries_of_an_earlier_driver_of_nvidia_are_stale(tmp_path: Path) -> None:
    """Those of the front end name the driver in their keys, those of the back end do not."""
    unpack_compute_cache(tmp_path / ".nv/ComputeCache")
    stack = stack_of(tmp_path, write(tmp_path / "libnvidia-opencl.so.1", LIBRARY))
    version = tmp_path / "proc/driver/nvidia/version"
    for here, stale in (("580.159.04", None), ("590.48.01", 20)):
        write(version, f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {here}  Release Build\n")
        assert stack_of(tmp_path, tmp_path / "libnvidia-opencl.so.1").report(["cuda"]).total.stale_entries == stale
    (line,) = said(stack, "cuda")
    assert line.startswith("cuda: 20 of 40 entries (")
    assert "compiled by driver 580.159.04, before driver 590.48.01 was installed (20" in line
